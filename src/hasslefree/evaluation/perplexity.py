"""Perplexity of a fixed-length model, as the Hugging Face guide defines it, at full stride.

https://huggingface.co/docs/transformers/perplexity: the text is cut into windows of the maximum length that do not
overlap; the first token of a window has no context and is not scored; the mean is over scored tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.errors import CalibrationError, NonFiniteError, option
from hasslefree.phases import Phases


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood, in nats, over the `scored` ones of the `tokens` tokens in windows."""

    perplexity: float
    tokens: int
    scored: int
    window: int


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokens: Tensor,
    window: int,
    batch: int = 1,
    *,
    windows: int | None = None,
    remainder: bool = True,
    phases: Phases | None = None,
    name: str = "perplexity",
) -> Perplexity:
    """The perplexity of a causal language model on tokens: (n,), in windows of `window` tokens, `batch` at a time.

    Args:
        windows: score only this number of windows, the first ones. remainder: also score a shorter last window.
        phases, name: the run, and its phase in which the windows are counted.

    Raises:
        CalibrationError: fewer than two tokens, in the text or in a window. NonFiniteError: the model gives NaN.
    """
    if windows is not None:
        tokens = tokens[: windows * window]
    if not remainder:
        if len(tokens) < window:
            raise CalibrationError(
                f"{len(tokens)} tokens do not fill one window of {window}, and only full windows are scored; "
                f"use a smaller {option('seqlen')} or more tokens"
            )
        tokens = tokens[: len(tokens) // window * window]
    for what, size in {"text": len(tokens), "window": window}.items():
        if size < 2:
            raise CalibrationError(f"perplexity needs a {what} of at least 2 tokens, got {size}")
    full = len(tokens) // window * window
    batches = list(tokens[:full].view(-1, window).split(batch)) if full else []
    if len(tokens) - full > 1:
        batches.append(tokens[full:][None])
    device = next(model.parameters()).device
    total, scored = 0.0, 0
    with (phases or Phases()).phase(name, sum(map(len, batches)), "windows") as phase:
        for rows in batches:
            rows = rows.to(device)
            logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
            total += losses.item()
            scored += rows[:, 1:].numel()
            phase.advance(len(rows))
    if math.isnan(total):
        raise NonFiniteError(
            f"the model gives NaN on this text; look for NaN or Inf in its weights, or try {option('dtype', 'float32')}"
        )
    mean = torch.tensor(total / scored, dtype=torch.float64)
    return Perplexity(mean.exp().item(), len(tokens), scored, window)
