"""Learn from forward passes of one segment how a model calls its blocks, and compute the inputs of
the first block.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.core.gram import working_dtype
from hasslefree.core.products import fast_products
from hasslefree.errors import ModelError, NonFiniteError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import BlockCall, Stop, replaced, split_call, split_output
from hasslefree.models.extra_inputs import (
    BlockTrace,
    depends_on_text,
    learn,
    leaves,
    made_by_block,
    same,
)
from hasslefree.models.weights import Weights, outside

# Called with the index of each block while it is in memory, and after each block.
Inspect = Callable[[int], None]
Advance = Callable[[], None]


class Probe:
    """A forward pass of a segment (1, tokens) up to the last block, with one block in memory at a
    time.
    """

    output: Tensor

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        segment: Tensor,
        weights: Weights,
        inspect: Inspect,
        advance: Advance,
    ) -> None:
        self.blocks = blocks
        self.weights = weights
        self.inspect = inspect
        self.advance = advance
        self.calls: list[BlockCall] = []
        self.traces: list[BlockTrace] = []
        self.forwards = [block.forward for block in blocks.modules]
        with (
            weights.present(outside(model, blocks)),
            fast_products(model),
            torch.no_grad(),
            suppress(Stop),
        ):
            run_with(model, blocks, segment, self.forward)
        if len(self.calls) != len(blocks.modules):
            raise ModelError(
                f"{type(model).__name__} is not supported: it calls blocks {len(self.calls)} times"
                f" in a forward pass, and has {len(blocks.modules)} of them in {blocks.name}; each"
                " must be called once"
            )

    @property
    def states(self) -> Tensor:
        """The hidden states after the last block: (1, tokens, width)."""
        return self.calls[-1].as_rows(self.output)

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Run a block in place of its `forward`, and record the call and the output."""
        name = self.blocks.prefix(index)
        part = self.blocks.modules[index].modules
        with self.weights.present(part, self.blocks.part(index + 1)):
            states, call = split_call(args, kwargs)
            if self.calls and not torch.equal(self.output.to(states), states):
                raise ModelError(
                    "this model is not supported: it changes the hidden states between its blocks"
                    f" (before {name})"
                )
            given = dict(leaves(call.arguments))
            self.inspect(index)
            output = self.forwards[index](*args, **kwargs)
        self.output, others = split_output(output)
        length = 0 if output is self.output else len(output)
        self.calls.append(replace(call, outputs=length))
        self.traces.append(BlockTrace(name, given, made_by_block(call.arguments, others)))
        if not torch.isfinite(self.output).all():
            raise NonFiniteError(
                f"the output of {name} contains NaN or Inf; try another dtype"
                f" ({option('dtype', 'float32')})"
            )
        self.advance()
        if index == len(self.blocks.modules) - 1:
            raise Stop
        return output


def run_with(model: nn.Module, blocks: Blocks, segment: Tensor, forward: Callable[..., Any]) -> Any:
    """Run a model on a segment (1, tokens), with `forward` in place of its blocks.

    forward: takes the index of a block and the arguments of the call, and returns an output.
    """
    with ExitStack() as changes:
        for index, block in enumerate(blocks.modules):
            changes.enter_context(replaced(block, "forward", partial(forward, index)))
        return model(input_ids=segment, use_cache=False)


def sees_later_tokens(
    before: Tensor,
    after: Tensor,
    dtype: torch.dtype,
) -> bool:
    """Return True if outputs before and after a change of a later token differ by more than
    rounding in the dtype.

    If one token changes, the experts of a mixture sum in another order, so even in float32 some
    rounding is allowed.
    """
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-4) * before.abs().amax()
    return bool((before - after).abs().amax() > tolerance)


def block_calls(
    model: nn.Module,
    blocks: Blocks,
    segment: Tensor,
    weights: Weights,
    inspect: Inspect,
    advance: Advance,
) -> list[BlockCall]:
    """Learn how a model calls each block, and check that it is a decoder that runs block by block.

    A second segment differs in its last token. The outputs of a causal model for earlier tokens
    stay the same, and the arguments that change are those that depend on the text.

    Args:
        segment: token ids (1, tokens).
        inspect: called with the index of each block while it is in memory, in the first pass.
        advance: called after each block, in both passes.

    Raises:
        ModelError: the model is not supported.
        NonFiniteError: the output of a block is not finite.
    """
    first = Probe(model, blocks, segment, weights, inspect, advance)
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    changed = segment.clone()
    changed[0, -1] = (changed[0, -1] + 1) % embeddings.num_embeddings
    second = Probe(model, blocks, changed, weights, lambda index: None, advance)
    before = first.states[0, :-1].float()
    after = second.states[0, :-1].float()
    if before.numel() and sees_later_tokens(before, after, first.output.dtype):
        raise ModelError(
            f"{type(model).__name__} is not a decoder: its output for a token depends on the tokens"
            " after it; hasslefree compresses causal language models"
        )
    extras = learn(first.states.shape[-1], segment.shape[1], first.traces, second.traces)
    calls = [replace(call, extra=extra) for call, extra in zip(first.calls, extras, strict=True)]
    if extras[0].columns:
        with weights.present(outside(model, blocks)):
            states = entering(model, blocks, calls, changed)
        check_columns(calls, second.traces, states)
    return calls


def check_columns(calls: Sequence[BlockCall], traces: Sequence[BlockTrace], states: Tensor) -> None:
    """Raise a ModelError unless the columns reproduce the arguments of the blocks in a pass.

    Args:
        traces: traces of the blocks in the pass.
        states: inputs of the first block in the pass, (1, tokens, width with columns).
    """
    for call, trace in zip(calls, traces, strict=True):
        arguments = dict(leaves(call.extra.arguments(call.arguments, states)))
        for path, value in trace.given.items():
            if not same(value.float(), arguments[path].float()):
                raise depends_on_text(trace.name, path)
        states = call.extra.after(states, call.hidden(states), trace.made)


class Entry:
    """Replaces the blocks in a pass, and records the inputs of the first block: hidden states, and
    columns for arguments that depend on the text alone.
    """

    states: Tensor

    def __init__(self, calls: Sequence[BlockCall]):
        self.calls = calls

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states unchanged, as the output of a block."""
        hidden, call = split_call(args, kwargs)
        states = call.as_rows(hidden.to(working_dtype(hidden)))
        extra = self.calls[index].extra
        if index == 0:
            self.states = F.pad(states, (0, extra.size))
        for column, rows in extra.of_text(call.arguments):
            self.states[..., column.columns] = rows
        if index == len(self.calls) - 1:
            raise Stop
        return self.calls[index].as_output(states)


def entering(
    model: nn.Module, blocks: Blocks, calls: Sequence[BlockCall], segment: Tensor
) -> Tensor:
    """Compute the inputs of the first block for a segment (1, tokens): (1, tokens, width), at least
    in float32.
    """
    entry = Entry(calls)
    with torch.no_grad(), suppress(Stop):
        run_with(model, blocks, segment, entry.forward)
    return entry.states
