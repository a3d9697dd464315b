"""Serve a compressed folder with vLLM. Only `config` and `linear` import vLLM; the arithmetic does without it."""
