"""Run a model block by block on the calibration segments, and gather the Grams of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.core.gram import Gram, working_dtype
from hasslefree.errors import ModelError, NonFiniteError
from hasslefree.models.blocks import Blocks
from hasslefree.models.linear import unpacked_once


class _Stop(Exception):  # noqa: N818 (not an error: it ends a forward pass whose rest nobody needs)
    pass


@dataclass(frozen=True)
class BlockCall:
    """What a block is called with beside the hidden states: masks, positions, rotary embeddings."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """The block's output for hidden states (1, tokens, width)."""
        output = block(hidden, *self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class Probe:
    """What one segment shows of a model: how its blocks are called, which layers run, what the last block gives."""

    calls: list[BlockCall]
    reached: set[nn.Module]
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


def probe(model: nn.Module, blocks: Blocks, segment: Tensor) -> Probe:
    """One whole forward pass of a segment (1, tokens)."""
    calls: dict[int, BlockCall] = {}
    reached: set[nn.Module] = set()
    outputs: list[Tensor] = []

    def record(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls[index] = split_call(args, kwargs)[1]

        return hook

    def keep_output(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [b.register_forward_pre_hook(record(i), with_kwargs=True) for i, b in enumerate(blocks.modules)]
    handles.append(blocks.modules[-1].register_forward_hook(keep_output))
    for block in blocks.modules:
        handles += [m.register_forward_pre_hook(lambda m, _: reached.add(m)) for m in block.modules()]
    with hooks(handles), torch.no_grad():
        model(input_ids=segment, use_cache=False)
    if len(calls) != len(blocks.modules):
        raise ModelError(
            f"only {len(calls)} of the {len(blocks.modules)} blocks in {blocks.name} run in a forward pass"
        )
    return Probe([calls[i] for i in range(len(calls))], reached, outputs[0])


def block_calls(model: nn.Module, blocks: Blocks, segment: Tensor) -> Probe:
    """Probe the model, and make sure that it can be run block by block and is a decoder.

    A second segment differs in its last token: a causal model gives the same output before it, and a model whose
    blocks are fed with the hidden states alone gives the blocks the same other arguments. segment: (1, tokens).

    Raises:
        ModelError: one of the two does not hold.
    """
    first = probe(model, blocks, segment)
    changed = segment.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    second = probe(model, blocks, changed)
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
    if before.numel() and torch.isfinite(before).all() and (before - after).abs().amax() > tolerance:
        raise ModelError(
            f"{type(model).__name__} is not a decoder: its output at a token changes with the tokens after it; "
            "hasslefree compresses causal language models"
        )
    return first


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


def first_hidden_states(model: nn.Module, blocks: Blocks, segments: Tensor) -> list[Tensor]:
    """What enters the first block: (1, tokens, width) for each row of segments (samples, tokens)."""
    found: list[Tensor] = []

    def catch(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(split_call(args, kwargs)[0])
        raise _Stop

    with hooks([blocks.modules[0].register_forward_pre_hook(catch, with_kwargs=True)]), torch.no_grad():
        for segment in segments:
            try:
                model(input_ids=segment[None], use_cache=False)
            except _Stop:
                continue
    return found


def run_block(block: nn.Module, call: BlockCall, hidden: list[Tensor]) -> list[Tensor]:
    """The block's outputs, (1, tokens, width) each, for its inputs."""
    with unpacked_once(block), torch.no_grad():
        return [call.run(block, states) for states in hidden]


def groups_by_input(block: nn.Module, call: BlockCall, states: Tensor, names: Iterable[str]) -> list[list[str]]:
    """The named linear layers in order of data flow; those that read the very same tensor (q, k, v) form a group."""
    inputs: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda module, args: inputs.setdefault(name, []).append(args[0])

    with hooks(block.get_submodule(n).register_forward_pre_hook(record(n)) for n in names), torch.no_grad():
        call.run(block, states)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensors in inputs.items():
        groups.setdefault(tuple(id(tensor) for tensor in tensors), []).append(name)
    return list(groups.values())


def gather_grams(
    block: nn.Module, prefix: str, call: BlockCall, hidden: list[Tensor], groups: list[list[str]]
) -> list[Gram]:
    """The Gram of each group's common input, over all segments, in one pass that ends at the last of the groups.

    Raises:
        NonFiniteError: an activation is NaN or Inf.
    """
    sums: list[Tensor | None] = [None] * len(groups)
    tokens = [0] * len(groups)

    def accumulate(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).to(working_dtype(args[0]))
            held = sums[index]
            sums[index] = x.T @ x if held is None else held.addmm_(x.T, x)
            tokens[index] += len(x)
            if index == len(groups) - 1:
                raise _Stop

        return hook

    handles = (block.get_submodule(g[0]).register_forward_pre_hook(accumulate(i)) for i, g in enumerate(groups))
    with hooks(handles), unpacked_once(block), torch.no_grad():
        for states in hidden:
            try:
                call.run(block, states)
            except _Stop:
                continue
    grams = []
    for total, count, group in zip(sums, tokens, groups, strict=True):
        if total is None or not torch.isfinite(total).all():
            raise NonFiniteError(
                f"the inputs of {prefix}.{group[0]} hold NaN or Inf; try another dtype (--dtype float32)"
            )
        grams.append(Gram(total.div_(count), count))
    return grams
