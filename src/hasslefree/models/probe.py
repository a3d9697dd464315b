"""What one segment shows of a model: how it calls its blocks, and that it can be run block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from hasslefree.core.gram import working_dtype
from hasslefree.errors import ModelError, NonFiniteError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import BlockCall, Stop, hooks, replaced, shaped, split_call
from hasslefree.models.extra_inputs import BlockTrace, ExtraInputs, depends, learn, leaves, rebuilt, same
from hasslefree.models.streaming import Weights, outside

# Called with the index of a block.
Look = Callable[[int], None]
# Called after a block.
Passed = Callable[[], None]


@dataclass(frozen=True)
class Probe:
    """The result of a forward pass of one segment: how the blocks are called, and what the last one returns.

    Args:
        seen: of each call, the arguments that may be extra inputs.
    """

    calls: list[BlockCall]
    seen: list[BlockTrace]
    output: Tensor


class _Pass:
    """A forward pass of one segment: what the blocks that ran were given and returned, and the hooks that note it."""

    def __init__(self, blocks: Blocks, weights: Weights, look: Look | None, passed: Passed | None) -> None:
        self.blocks, self.weights, self.look, self.passed = blocks, weights, look, passed
        self.calls: list[BlockCall] = []
        self.seen: list[BlockTrace] = []
        self.output: Tensor | None = None
        # Holds the weights of the block that runs.
        self.here = ExitStack()

    def handles(self) -> Iterator[RemovableHandle]:
        for index, block in enumerate(self.blocks.modules):
            yield block.register_forward_pre_hook(partial(self.enter, index), with_kwargs=True)
            yield block.register_forward_hook(partial(self.leave, index))

    def enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.here.enter_context(self.weights.present(module.modules, self.blocks.part(index + 1)))
        states, call = split_call(args, kwargs)
        if self.output is not None and not torch.equal(self.output.to(states), states):
            raise ModelError(
                f"the model changes the hidden states outside its blocks, before {self.blocks.prefix(index)}; models "
                "of this kind are not supported"
            )
        self.calls.append(shaped(call, states))
        self.seen.append(BlockTrace(rebuilt(call.arguments), call.arguments, ()))
        if self.look is not None:
            self.look(index)

    def leave(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self.here.close()
        several = isinstance(output, tuple | list)
        states, *others = output if several else (output,)
        self.calls[-1] = replace(self.calls[-1], outputs=len(output) if several else 0)
        self.seen[-1] = replace(self.seen[-1], after=rebuilt(self.seen[-1].after), outputs=tuple(others))
        self.output = states
        if not torch.isfinite(states).all():
            raise NonFiniteError(
                f"the output of {self.blocks.prefix(index)} contains NaN or Inf; try another dtype "
                f"({option('dtype', 'float32')})"
            )
        if self.passed is not None:
            self.passed()
        if index == len(self.blocks.modules) - 1:
            raise Stop


def probe(
    model: nn.Module,
    blocks: Blocks,
    segment: Tensor,
    weights: Weights,
    look: Look | None = None,
    passed: Passed | None = None,
) -> Probe:
    """A forward pass of a segment (1, tokens) up to the last block, with one block in memory at a time.

    Args:
        look: called with the index of each block while it is in memory. passed: called after each block.
    """
    recorded = _Pass(blocks, weights, look, passed)
    with (
        hooks(recorded.handles()),
        recorded.here,
        weights.present(outside(model, blocks)),
        torch.no_grad(),
        suppress(Stop),
    ):
        model(input_ids=segment, use_cache=False)
    if recorded.output is None or len(recorded.calls) != len(blocks.modules):
        raise ModelError(
            f"the model called blocks {len(recorded.calls)} times in one forward pass, but {blocks.name} has "
            f"{len(blocks.modules)} blocks; only models that call each block once are supported"
        )
    return Probe(recorded.calls, recorded.seen, recorded.output)


def sees_later_tokens(before: Tensor, after: Tensor, dtype: torch.dtype) -> bool:
    """Whether outputs at some tokens, before and after a later token was changed, differ by more than rounding.

    The experts of a mixture sum in another order when one token changes, so in float32 some rounding must be allowed.

    Args:
        before, after: of one shape. dtype: in which they were computed.
    """
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-4) * before.abs().amax()
    return bool((before - after).abs().amax() > tolerance)


def block_calls(
    model: nn.Module,
    blocks: Blocks,
    segment: Tensor,
    weights: Weights,
    look: Look | None = None,
    passed: Passed | None = None,
) -> list[BlockCall]:
    """How a model calls each block, after a check that it can be run block by block and is a decoder.

    A second segment differs in its last token: a causal model gives the same output before it, and the arguments that
    differ are those that depend on the text. segment: (1, tokens). look: as for `probe`, in the first pass. passed: as
    for `probe`, in both.
    """
    first = probe(model, blocks, segment, weights, look, passed)
    changed = segment.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    second = probe(model, blocks, changed, weights, passed=passed)
    before, after = (each.calls[-1].as_rows(each.output)[0, :-1].float() for each in (first, second))
    if before.numel() and sees_later_tokens(before, after, first.output.dtype):
        raise ModelError(
            f"{type(model).__name__} is not a decoder: its output for a token depends on the tokens after it; "
            "hasslefree compresses causal language models"
        )
    names = [blocks.prefix(index) for index in range(len(blocks.modules))]
    extra = learn(first.calls[-1].as_rows(first.output).shape[-1], segment.shape[1], names, first.seen, second.seen)
    if not extra[0].columns:
        return first.calls
    calls = [replace(call, extra=each) for call, each in zip(first.calls, extra, strict=True)]
    with weights.present(outside(model, blocks)):
        states = entering(model, blocks, calls, changed)
    check_arguments(calls, names, second.seen, states)
    return calls


def check_arguments(
    calls: Sequence[BlockCall], names: Sequence[str], traces: Sequence[BlockTrace], states: Tensor
) -> None:
    """Raise a ModelError where the columns do not reproduce the arguments of the blocks in a forward pass.

    states: what enters the first block.
    """
    for call, name, one in zip(calls, names, traces, strict=True):
        extra: Any = call.extra
        given = dict(leaves(extra.arguments(call.arguments, states)))
        for path, value in leaves(one.before):
            if not same(value.float(), given[path].float()):
                raise depends(name, path)
        states = extra.after(states, call.hidden(states), one.outputs, one.after)


def entering(model: nn.Module, blocks: Blocks, calls: Sequence[BlockCall], segment: Tensor) -> Tensor:
    """What enters the first block for a segment (1, tokens), in float32 at least: (1, tokens, width).

    The forward pass ends once everything that depends on the text alone is known; blocks return their inputs.

    Args:
        calls: of the blocks; none if there are no extra inputs.
    """
    entered: list[Tensor] = []
    last = max((i for i, call in enumerate(calls) if call.extra and _reads_text(call.extra)), default=0)

    def put_out(index: int, *args: Any, **kwargs: Any) -> Any:
        hidden, call = split_call(args, kwargs)
        states = shaped(call, hidden).as_rows(hidden.to(working_dtype(hidden)))
        if not entered:
            entered.append(F.pad(states, (0, calls[0].extra.size if calls and calls[0].extra else 0)))
        if calls and (extra := calls[index].extra):
            for column, rows in extra.of_text(call.arguments):
                entered[0][..., column.first : column.first + column.size] = rows
        if index == last:
            raise Stop
        return replace(calls[index], extra=None).as_output(states)

    with ExitStack() as changes, torch.no_grad(), suppress(Stop):
        for index, block in enumerate(blocks.modules):
            changes.enter_context(replaced(block, "forward", partial(put_out, index)))
        model(input_ids=segment, use_cache=False)
    return entered[0]


def _reads_text(extra: ExtraInputs) -> bool:
    return any(key[0] == "text" for key in extra.reads.values())
