"""Evaluate a model folder: texts in, a plain dictionary of results out."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hasslefree.evaluation.perplexity import perplexity
from hasslefree.models.load import encode, load_model, load_tokenizer, resolve_seqlen
from hasslefree.report import versions
from hasslefree.texts import check_text, evaluation_text


def evaluate_perplexity(
    model: str,
    texts: list[str],
    seqlen: int | None = None,
    max_tokens: int | None = None,
    batch: int = 1,
    dtype: str = "auto",
    device: str | None = None,
) -> dict[str, Any]:
    """The perplexity of a model, dense or compressed, on texts by hub name or path.

    Args:
        seqlen: tokens a window; None for 2048, or what the model takes if that is less.
        max_tokens: only the first tokens of each text.
        batch: windows at a time. dtype, device: as for `load_model`.

    Returns:
        {"model", "dtype", "device", "versions", "perplexity": {text: {"perplexity", "tokens", "scored", "window"}}}
    """
    for text in texts:
        check_text(text)
    tokenizer = load_tokenizer(model)
    loaded = load_model(model, dtype, device)
    window = resolve_seqlen(loaded, seqlen)
    results = {}
    for text in texts:
        tokens = torch.tensor(encode(tokenizer, evaluation_text(text))[:max_tokens])
        results[text] = dataclasses.asdict(perplexity(loaded, tokens, window, batch))
    return {
        "model": model,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "versions": versions(),
        "perplexity": results,
    }
