"""Run blocks on the calibration segments, and gather the Grams of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hasslefree.core.gram import Gram, working_dtype
from hasslefree.errors import NonFiniteError, option
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import BlockCall, Stop, hooks, split_call
from hasslefree.models.sites import Site, find_sites
from hasslefree.packed.linear import unpacked_once

# Rows of inputs that are cast to float32 at a time.
CHUNK = 1024
# Calibration tokens on which the predictions of whole models are compared.
PROBED = 4096


def probes(samples: int, seqlen: int) -> int:
    """How many of so many segments, the first ones, are for that: one at least."""
    return min(samples, max(PROBED // seqlen, 1))


def first_hidden_states(
    model: nn.Module, blocks: Blocks, segments: Tensor, storage: str = "device", folder: Path = Path()
) -> Activations:
    """What enters the first block, for segments (samples, tokens). storage, folder: as for `Activations`."""
    found: list[Activations] = []

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            states = split_call(args, kwargs)[0]
            if not found:
                shape = (len(segments), *states.shape[1:])
                found.append(Activations(shape, states.dtype, states.device, storage, folder))
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
    """The named sites in order of data flow; those that read the very same tensor (q, k, v) form a group."""
    inputs: dict[str, list[Tensor]] = {}
    sites = find_sites(block)

    def record(name: str) -> Callable[[Tensor], None]:
        return lambda x: inputs.setdefault(name, []).append(x)

    with hooks(sites[name].on_input(record(name)) for name in names), torch.no_grad():
        call.run(block, states)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensors in inputs.items():
        groups.setdefault(tuple(id(tensor) for tensor in tensors), []).append(name)
    return list(groups.values())


# A block and the hidden states that enter it.
Stream = tuple[nn.Module, Activations]


@dataclass(frozen=True)
class Moments:
    """What is known of the inputs of a group of layers.

    Args:
        gram: H = X̂ᵀX̂ / tokens, with the mean of X̂. drift: X̂ᵀ(X − X̂) / tokens, (in, in), with X the inputs in the dense
            stream; None where that was not asked for.
    """

    gram: Gram
    drift: Tensor | None = None


def gather(
    block: nn.Module,
    prefix: str,
    call: BlockCall,
    hidden: Activations,
    groups: Sequence[Sequence[str]],
    dense: Stream | None = None,
    add: Callable[[Tensor], None] = lambda sums: None,
) -> list[Moments]:
    """The moments of each group's common input, over all segments, in one pass that ends at the last of the groups.

    Products are float32, whatever the dtype of X, of at most `CHUNK` tokens. Their sum is float64: of float32 numbers
    it is all but exact, and so the same however segments are shared between processes.

    Args:
        prefix: the name of the block. dense: the block as it was, with its own inputs, for the drift.
        add: adds to a tensor, in place, what it is in other processes.

    Raises:
        NonFiniteError: an activation is NaN or Inf.
    """
    here, there = ([find_sites(each)[group[0]] for group in groups] for each in (block, dense[0] if dense else block))
    second: list[Tensor | None] = [None] * len(groups)
    first: list[Tensor | None] = [None] * len(groups)
    drift: list[Tensor | None] = [None] * len(groups)
    count = torch.zeros((), dtype=torch.int64, device=hidden.device)
    with unpacked_once(block), torch.no_grad():
        for segment in range(len(hidden)):
            wanted = _inputs(dense[0], call, dense[1][segment], there) if dense else []
            states = hidden[segment]
            count += states.shape[1]
            for index, rows in enumerate(_inputs(block, call, states, here)):
                second[index] = squares = _added(second[index], rows, rows)
                sums, before = rows.sum(0, dtype=squares.dtype), first[index]
                first[index] = sums if before is None else before.add_(sums)
                if dense:
                    drift[index] = _added(drift[index], rows, wanted[index].sub_(rows))
    add(count)

    def mean(total: Tensor) -> Tensor:
        add(total)
        return total.div_(int(count)).to(working_dtype(hidden.states))

    found = []
    for group, total, summed, apart in zip(groups, second, first, drift, strict=True):
        assert total is not None
        assert summed is not None
        gram = Gram(mean(total), int(count), mean(summed))
        found.append(Moments(gram, None if apart is None else mean(apart)))
        if not torch.isfinite(found[-1].gram.matrix).all():
            raise NonFiniteError(
                f"the inputs of {prefix}.{group[0]} hold NaN or Inf; try another dtype ({option('dtype', 'float32')})"
            )
    return found


def _inputs(block: nn.Module, call: BlockCall, states: Tensor, sites: list[Site]) -> list[Tensor]:
    """What enters the sites of a block for one segment: (tokens, in) each, in the working dtype."""
    caught: dict[str, Tensor] = {}

    def catch(name: str) -> Callable[[Tensor], None]:
        def see(x: Tensor) -> None:
            rows = x.reshape(-1, x.shape[-1])
            caught[name] = rows.to(working_dtype(rows), copy=True)
            if len(caught) == len(sites):
                raise Stop

        return see

    with hooks(site.on_input(catch(site.name)) for site in sites), suppress(Stop):
        call.run(block, states)
    return [caught[site.name] for site in sites]


def widest_dtype(device: torch.device) -> torch.dtype:
    """Of sums over tokens: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def _added(total: Tensor | None, one: Tensor, other: Tensor) -> Tensor:
    """total + oneᵀ other, for (tokens, in) each."""
    if total is None:
        total = one.new_zeros(one.shape[1], one.shape[1], dtype=widest_dtype(one.device))
    for rows, others in zip(one.split(CHUNK), other.split(CHUNK), strict=True):
        total.add_(rows.T @ others)
    return total
