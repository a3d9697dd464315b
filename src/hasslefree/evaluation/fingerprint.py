"""A hash of everything that the scores of a model depend on, so that a changed model never reuses old scores."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel, tokenizer: Any, options: dict[str, Any]) -> str:
    """SHA-256, in hexadecimal, of every tensor of a loaded model, its configuration, its tokenizer and the options.

    Args:
        options: whatever else affects the scores, such as versions; any JSON value.
    """
    digest = hashlib.sha256()
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    digest.update(json.dumps([type(model).__name__, config, options], sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # As bytes, because NumPy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file():
                digest.update(f"{file.name} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
