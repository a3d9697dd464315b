"""How a model calls its blocks, and whether it can be run block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.errors import ModelError, NonFiniteError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.precision import converted
from hasslefree.models.streaming import Weights, outside


class Stop(Exception):  # noqa: N818 (not an error: it ends a forward pass whose rest nobody needs)
    pass


@dataclass(frozen=True)
class BlockCall:
    """What a block is called with beside the hidden states: masks, positions, rotary embeddings.

    Args:
        outputs: length of the tuple or list that the block returns, hidden states first; 0 if it returns a tensor.
        batched: whether several segments at a time have the outputs that they have one at a time, in these arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: int = 0
    batched: bool = False

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """The block's output for hidden states (segments, tokens, width), in their dtype.

        Where that is not the dtype of the block, it is to be called within `precision.computing`.
        """
        output = block(hidden, *converted(self.args, hidden.dtype), **converted(self.kwargs, hidden.dtype))
        return (output[0] if isinstance(output, tuple | list) else output).to(hidden.dtype)

    def as_output(self, hidden: Tensor) -> Any:
        """What the block would put out with these hidden states, and nothing beside them."""
        return (hidden, *[None] * (self.outputs - 1)) if self.outputs else hidden


# Called with the index of a block.
Look = Callable[[int], None]


@dataclass(frozen=True)
class Probe:
    """What one segment shows of a model: how its blocks are called, and what the last one returns."""

    calls: list[BlockCall]
    output: Tensor


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
    """The hidden states and the rest of the arguments that a block was called with."""
    if args:
        return args[0], BlockCall(args[1:], kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states"), BlockCall((), rest)


@contextmanager
def hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Remove the hooks at the end, whatever happens in between."""
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()


def probe(model: nn.Module, blocks: Blocks, segment: Tensor, weights: Weights, look: Look | None = None) -> Probe:
    """A forward pass of a segment (1, tokens) up to the last block, with one block in memory at a time.

    Args:
        look: called with the index of each block while it is in memory.

    Raises:
        ModelError: not all blocks run. NonFiniteError: one puts out NaN or Inf.
    """
    calls: dict[int, BlockCall] = {}
    outputs: list[Tensor] = []
    here = ExitStack()

    def enter(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            here.enter_context(weights.present(module.modules))
            calls[index] = split_call(args, kwargs)[1]
            if look is not None:
                look(index)

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        here.close()
        index, count = blocks.modules.index(module), len(output) if isinstance(output, tuple | list) else 0
        states = output[0] if count else output
        calls[index] = replace(calls[index], outputs=count)
        if not torch.isfinite(states).all():
            name = blocks.prefix(index)
            raise NonFiniteError(f"{name} puts out NaN or Inf; try another dtype ({option('dtype', 'float32')})")
        if module is blocks.modules[-1]:
            outputs.append(states)
            raise Stop

    handles = [b.register_forward_pre_hook(enter(i), with_kwargs=True) for i, b in enumerate(blocks.modules)]
    handles += [block.register_forward_hook(leave) for block in blocks.modules]
    with hooks(handles), here, weights.present(outside(model, blocks)), torch.no_grad(), suppress(Stop):
        model(input_ids=segment, use_cache=False)
    if len(calls) != len(blocks.modules):
        raise ModelError(
            f"only {len(calls)} of the {len(blocks.modules)} blocks in {blocks.name} run in a forward pass"
        )
    return Probe([calls[i] for i in range(len(calls))], outputs[0])


def block_calls(
    model: nn.Module, blocks: Blocks, segment: Tensor, weights: Weights, look: Look | None = None
) -> list[BlockCall]:
    """How a model calls each block, after a look that it can be run block by block and is a decoder.

    A second segment differs in its last token: a causal model gives the same output before it, and a model whose
    blocks are fed with the hidden states alone gives the blocks the same other arguments. segment: (1, tokens).
    look: as for `probe`, in the first pass.

    Raises:
        ModelError: one of the two does not hold.
    """
    first = probe(model, blocks, segment, weights, look)
    changed = segment.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    second = probe(model, blocks, changed, weights)
    for index, (one, other) in enumerate(zip(first.calls, second.calls, strict=True)):
        names = [name for name in one.kwargs.keys() | other.kwargs.keys()
                 if not _same(one.kwargs.get(name), other.kwargs.get(name))]  # fmt: skip
        if names or not _same(one.args, other.args):
            which = ", ".join(sorted(names)) or "positional ones"
            raise ModelError(
                f"{blocks.prefix(index)} is called with arguments that depend on the text ({which}); not supported"
            )
    before, after = first.output[0, :-1].float(), second.output[0, :-1].float()
    tolerance = 4 * torch.finfo(first.output.dtype).eps * before.abs().amax()
    if before.numel() and (before - after).abs().amax() > tolerance:
        raise ModelError(
            f"{type(model).__name__} is not a decoder: its output at a token changes with the tokens after it; "
            "hasslefree compresses causal language models"
        )
    return first.calls


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        # Threads may round sines and cosines differently from one call to the next.
        return torch.allclose(one, other, rtol=1e-3, atol=1e-5) if one.is_floating_point() else torch.equal(one, other)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other)
