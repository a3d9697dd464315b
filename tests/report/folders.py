"""Compressed folders for reports."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import hasslefree
from hasslefree import Adam, AlternatingMinimization, Recipe
from hasslefree.solve.methods import METHODS
from tests.tiny_models import build, segments


def compressed(folder: Path, **changes) -> Path:
    """A tiny Llama, compressed into a folder, from a gaussian start, with which the L of some layers is zero."""
    recipe = Recipe(**{"rank": 2, "method": "hassle-free", "rounds": 5} | changes)
    gaussian = {"hassle-free": AlternatingMinimization(low_rank=Adam(adapter_start=False))}
    with patch.dict(METHODS, gaussian):
        hasslefree.compress(build("llama"), folder, recipe, segments=segments())
    return folder


def evaluation(file: Path, model: str | Path, perplexity: float, kl: dict[str, float] | None = None, **rest) -> Path:
    """Results as `evaluate` writes them."""
    row = {"perplexity": perplexity} | ({"kl": kl} if kl else {})
    content = {"model": str(model), "perplexity": {"texts/held_out.txt": row}} | rest
    file.write_text(json.dumps(content))
    return file


def edit(folder: Path, change) -> None:
    """Change compression.json in place."""
    file = folder / "compression.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
