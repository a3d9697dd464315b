"""Run blocks on the calibration segments, and gather the Grams of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from hasslefree.core.gram import Gram, working_dtype
from hasslefree.errors import NonFiniteError
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import BlockCall, Stop, hooks, split_call
from hasslefree.models.linear import unpacked_once

# Rows of inputs that are cast to float32 at a time.
CHUNK = 1024


def first_hidden_states(
    model: nn.Module, blocks: Blocks, segments: Tensor, place: str = "device", folder: Path = Path()
) -> Activations:
    """What enters the first block, for segments (samples, tokens). place, folder: as for `Activations`."""
    found: list[Activations] = []

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            states = split_call(args, kwargs)[0]
            if not found:
                shape = (len(segments), *states.shape[1:])
                found.append(Activations(shape, states.dtype, states.device, place, folder))
            found[0][index] = states
            raise Stop

        return hook

    for index, segment in enumerate(segments):
        handle = blocks.modules[0].register_forward_pre_hook(keep(index), with_kwargs=True)
        with hooks([handle]), torch.no_grad():
            try:
                model(input_ids=segment[None], use_cache=False)
            except Stop:
                continue
    return found[0]


def run_block(block: nn.Module, call: BlockCall, hidden: Activations) -> None:
    """Put the block's outputs in the place of its inputs."""
    with unpacked_once(block), torch.no_grad():
        for index in range(len(hidden)):
            hidden[index] = call.run(block, hidden[index])


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


def gather_sums(
    block: nn.Module, call: BlockCall, hidden: Activations, groups: list[list[str]]
) -> list[tuple[Tensor, int]]:
    """XᵀX and the number of tokens for each group's common input X, in one pass that ends at the last of the groups.

    Products are float32, whatever the dtype of X, of at most `CHUNK` tokens. Their sum is float64: of float32 numbers
    it is all but exact, and so the same however segments are shared between processes.
    """
    found: dict[int, tuple[Tensor, int]] = {}

    def accumulate(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows, width = args[0].reshape(-1, args[0].shape[-1]), args[0].shape[-1]
            if index not in found:
                wide = torch.float32 if rows.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
                found[index] = rows.new_zeros(width, width, dtype=wide), 0
            total, tokens = found[index]
            for part in rows.split(CHUNK):
                chunk = part.to(working_dtype(rows))
                total.add_(chunk.T @ chunk)
            found[index] = total, tokens + len(rows)
            if index == len(groups) - 1:
                raise Stop

        return hook

    handles = (block.get_submodule(g[0]).register_forward_pre_hook(accumulate(i)) for i, g in enumerate(groups))
    with hooks(handles), unpacked_once(block), torch.no_grad():
        for segment in range(len(hidden)):
            try:
                call.run(block, hidden[segment])
            except Stop:
                continue
    return [found[index] for index in range(len(groups))]


def gather_grams(
    block: nn.Module,
    prefix: str,
    call: BlockCall,
    hidden: Activations,
    groups: list[list[str]],
    add: Callable[[Tensor], None] = lambda sums: None,
) -> list[Gram]:
    """The Gram of each group's common input, over all segments.

    Args:
        prefix: the name of the block. add: adds to a tensor, in place, what it is in other processes.

    Raises:
        NonFiniteError: an activation is NaN or Inf.
    """
    grams = []
    for (total, count), group in zip(gather_sums(block, call, hidden, groups), groups, strict=True):
        tokens = torch.tensor(count, device=total.device)
        add(total)
        add(tokens)
        if not torch.isfinite(total).all():
            raise NonFiniteError(
                f"the inputs of {prefix}.{group[0]} hold NaN or Inf; try another dtype (--dtype float32)"
            )
        matrix = total.div_(int(tokens)).to(working_dtype(hidden.states))
        grams.append(Gram(matrix, int(tokens)))
    return grams
