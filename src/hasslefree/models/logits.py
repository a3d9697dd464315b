"""What a model says for the hidden states that its last block puts out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hasslefree.core.gram import working_dtype
from hasslefree.errors import ModelError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import BlockCall

# Rows of the output head that are cast to float32 at a time, and tokens whose probabilities are compared.
CHUNK = 4096
TOKENS = 256
# What a configuration may ask a model to put out beside its logits, and would have to come from the blocks.
ASKED = ("output_router_logits", "output_attentions", "output_hidden_states")


@torch.no_grad()
def logits_of(
    model: PreTrainedModel, blocks: Blocks, calls: Sequence[BlockCall], segment: Tensor, states: Tensor
) -> Tensor:
    """The logits (tokens, vocabulary) where the last block puts out `states`, whatever the blocks would do.

    Only what is outside the blocks runs. The product with the output head is float32 at least, where the head is a
    plain linear layer: bfloat16 rounds logits by more than the change of one layer moves them.

    Args:
        calls: how each block is called. segment: token ids (tokens,). states: (1, tokens, width).

    Raises:
        ModelError: the model has no output head.
    """
    head = model.get_output_embeddings()
    with ExitStack() as changes:
        for name in ASKED:
            if getattr(model.config, name, False):
                changes.enter_context(replaced(model.config, name, False))
        for block, call in zip(blocks.modules, calls, strict=True):
            changes.enter_context(replaced(block, "forward", partial(put_out, call.as_output(states))))
        if type(head) is nn.Linear:
            changes.enter_context(replaced(head, "forward", lambda rows: precise_product(head, rows)))
        output = model(input_ids=segment[None], use_cache=False)
    if not isinstance(getattr(output, "logits", None), Tensor):
        raise ModelError(
            f"{type(model).__name__} has no output head, and allocation by error is decided by what the model says; "
            f"load it as a causal language model, or use {option('allocate', 'uniform')}"
        )
    return output.logits[0]


def put_out(output: Any, *args: Any, **kwargs: Any) -> Any:
    """The output, whatever a block is called with."""
    return output


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it, an object has another attribute; afterwards its own, or that of its class."""
    own = name in vars(owner) or isinstance(getattr(type(owner), name, None), property)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def precise_product(head: nn.Linear, rows: Tensor) -> Tensor:
    """The head's output in float32 at least. rows: (…, width)."""
    wide = rows.to(working_dtype(rows))
    product = wide.new_empty(*rows.shape[:-1], head.out_features)
    for first in range(0, head.out_features, CHUNK):
        part = head.weight[first : first + CHUNK]
        product[..., first : first + CHUNK] = F.linear(wide, part.to(wide.dtype))
    return product if head.bias is None else product.add_(head.bias)


def divergence(logits: Tensor, wanted: Tensor) -> float:
    """Σ over tokens of KL(p ‖ softmax logits), in nats. wanted: log p; both (tokens, vocabulary).

    With d the difference of log-probabilities it is Σ p·d. What is summed is p(d + e⁻ᵈ − 1), which comes to the same,
    since probabilities sum to one, but is as small as d²/2 term by term: rounding cannot drown a small divergence.
    """
    total = 0.0
    for part, there in zip(logits.split(TOKENS), wanted.split(TOKENS), strict=True):
        here = F.log_softmax(part.to(there.dtype), -1)
        p, q = there.exp(), here.exp()
        apart = (there - here).masked_fill(there == -math.inf, 0.0)
        near, far = p * (apart + (-apart).expm1()), p * apart - p + q
        total += torch.where(apart.abs() < 1, near, far).sum().item()
    return total
