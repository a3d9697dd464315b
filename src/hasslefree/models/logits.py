"""What a model says for the hidden states that its last block puts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hasslefree.core.gram import working_dtype
from hasslefree.errors import ModelError
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import BlockCall, hooks

# Rows of the output head that are cast to float32 at a time, and tokens whose probabilities are.
CHUNK = 4096
TOKENS = 256


def check_head(model: PreTrainedModel) -> None:
    """Raise a ModelError where the model has no output head, and so says nothing."""
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model).__name__} has no output head, and allocation by error is decided by what the model says; "
            "load it as a causal language model, or use --allocate uniform"
        )


@torch.no_grad()
def logits_of(model: PreTrainedModel, blocks: Blocks, last: BlockCall, segment: Tensor, states: Tensor) -> Tensor:
    """The logits (tokens, vocabulary) where the last block puts out `states`, whatever the blocks would do.

    Only what is outside the blocks runs. The product with the output head is float32 at least: bfloat16 rounds logits
    by more than the change of one layer moves them.

    Args:
        last: how the last block is called. segment: token ids (tokens,). states: (1, tokens, width).
    """
    head: Any = model.get_output_embeddings()

    def precisely(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows = args[0].to(working_dtype(args[0]))
        parts = [F.linear(rows, part.to(rows.dtype)) for part in module.weight.split(CHUNK)]
        bias = getattr(module, "bias", None)
        return torch.cat(parts, -1) if bias is None else torch.cat(parts, -1) + bias.to(rows.dtype)

    low = states.dtype != working_dtype(states)
    with bypassed(blocks, last, states), hooks([head.register_forward_hook(precisely)] if low else []):
        return model(input_ids=segment[None], use_cache=False).logits[0]


@contextmanager
def bypassed(blocks: Blocks, last: BlockCall, states: Tensor) -> Iterator[None]:
    """Within it, each block puts out `states` and does nothing."""
    output = (states,) if last.in_tuple else states
    before: list[Callable[..., Any] | None] = [block.__dict__.get("forward") for block in blocks.modules]
    try:
        for block in blocks.modules:
            block.forward = lambda *args, **kwargs: output
        yield
    finally:
        for block, forward in zip(blocks.modules, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def divergence(found: Tensor, wanted: Tensor) -> float:
    """Σ over tokens of KL(softmax wanted ‖ softmax found), in nats, for logits (tokens, vocabulary).

    With d the difference of log-probabilities it is Σ p·d; what is summed is p(d + e⁻ᵈ − 1), which comes to the same,
    since probabilities sum to one, but is as small as d²/2 term by term: rounding cannot drown a small divergence.
    """
    total = 0.0
    for one, other in zip(found.split(TOKENS), wanted.split(TOKENS), strict=True):
        here, there = (F.log_softmax(part.to(working_dtype(part)), -1) for part in (one, other))
        apart = there - here
        total += (there.exp() * (apart + (-apart).expm1())).sum().item()
    return total
