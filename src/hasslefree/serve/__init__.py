"""Serve a compressed folder with vLLM. Its arithmetic, `parts` and `stacked`, needs no vLLM."""
