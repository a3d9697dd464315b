"""The logits of a model for given outputs of its last block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.errors import ModelError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import BlockCall, replaced

# Options of a configuration for further outputs, which would have to come from the blocks.
ASKED = ("output_router_logits", "output_attentions", "output_hidden_states")


def logits_of(
    model: PreTrainedModel, blocks: Blocks, calls: Sequence[BlockCall], segment: Tensor, states: Tensor
) -> Tensor:
    """The logits (tokens, vocabulary) for `states` as the output of the last block; the blocks do not run.

    Only the modules outside the blocks run; gradients flow to the states if they require them.

    Args:
        calls: how each block is called. segment: token ids (tokens,). states: (1, tokens, width).
    """
    with ExitStack() as changes:
        for name in ASKED:
            if getattr(model.config, name, False):
                changes.enter_context(replaced(model.config, name, False))
        for block, call in zip(blocks.modules, calls, strict=True):
            changes.enter_context(replaced(block, "forward", partial(put_out, call.as_output(states))))
        output = model(input_ids=segment[None], use_cache=False)
    if not isinstance(getattr(output, "logits", None), Tensor):
        raise ModelError(
            f"{type(model).__name__} has no output head, and {option('allocate', 'error')} and prediction matching "
            "need the model's predictions; load it as a causal language model (AutoModelForCausalLM), or use "
            f"{option('effort', 'fast')}"
        )
    return output.logits[0]


def put_out(output: Any, *args: Any, **kwargs: Any) -> Any:
    """The output, whatever a block is called with."""
    return output
