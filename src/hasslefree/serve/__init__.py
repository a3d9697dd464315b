"""Serve a compressed folder with vLLM. The arithmetic, in `parts` and `fused`, needs no vLLM."""
