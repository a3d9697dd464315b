"""Run blocks on the calibration segments, and collect the Gram matrices of their layers."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.core.gram import Gram, working_dtype
from hasslefree.core.products import bfloat16_products, tiles
from hasslefree.distributed import World
from hasslefree.errors import NonFiniteError, option
from hasslefree.models.activations import Activations
from hasslefree.models.calls import BlockCall, Stop, hooks
from hasslefree.models.experts import every_expert_called, share_of_tokens
from hasslefree.models.precision import as_multiplied, computing
from hasslefree.models.sites import find_site
from hasslefree.units import FLOAT

# Tokens per float32 product of inputs with themselves.
CHUNK = 2048
# Columns per product, by type of device.
PANEL = {"cpu": 384, "cuda": 2048}
# Tokens that run through a block at a time, if the block takes several segments.
BATCH = 4096
# Largest relative change of a token's output that counts as rounding of bfloat16.
TOLERANCE = 0.05
# Calibration tokens on which the predictions of whole models are compared.
PROBED = 4096


def probes(samples: int, seqlen: int) -> int:
    """Number of probes: the first calibration segments, at least one."""
    return min(samples, max(PROBED // seqlen, 1))


def run_block(
    block: nn.Module,
    call: BlockCall,
    hidden: Activations,
) -> None:
    """Run a block, and replace its inputs by its outputs."""
    with computing(block), torch.no_grad():
        for batch in hidden.batches(BATCH):
            hidden[batch] = call.run(block, hidden[batch])


def with_batching(
    block: nn.Module,
    call: BlockCall,
    hidden: Activations,
) -> BlockCall:
    """Return the call, `batched` if the block gives the same outputs for two segments together as
    for each alone. call: a call that is not `batched`.
    """
    if len(hidden) < 2:
        return call
    batched = replace(call, batched=True)
    with computing(block), torch.no_grad():
        expected = call.run(block, hidden[:2])
        try:
            output = batched.run(block, hidden[:2])
        except (RuntimeError, ValueError, IndexError, TypeError):
            return call
    if output.shape != expected.shape:
        return call
    states = call.hidden(expected)
    difference = call.hidden(output) - states
    if not (difference.norm(dim=-1) <= TOLERANCE * states.norm(dim=-1)).all():
        return call
    width = states.shape[-1]
    columns = (output[..., width:], expected[..., width:])
    if torch.allclose(*columns, rtol=TOLERANCE, atol=TOLERANCE):
        return batched
    return call


def activation_values(
    block: nn.Module, shapes: Mapping[str, tuple[int, int]], tokens: int
) -> float:
    """Number of values that layers of a block read and write in a pass of `tokens` tokens.

    shapes: (out, in) by layer name.
    """
    values = 0.0
    for name, (out, width) in shapes.items():
        values += share_of_tokens(block, name) * (out + width)
    return tokens * values


def pass_bytes(values: float) -> int:
    """Memory of a pass whose layers read and write `values` float32 values, in bytes. Arrays
    between layers are assumed to take as much again.
    """
    return round(2 * FLOAT * values)


def tensors_read(
    block: nn.Module, call: BlockCall, states: Tensor, names: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """Identify the tensors that layers of a block read.

    Args:
        states: hidden states that enter the block, (segments, tokens, width).
        names: names of the layers in the block.

    Returns:
        For each layer, in the order of the first calls, the ids of its inputs, one per call. Layers
        that read the same tensor (q, k, v) have equal entries.
    """
    inputs = defaultdict[str, list[Tensor]](list)  # kept alive, so ids stay unique

    def keep(name: str, x: Tensor) -> None:
        inputs[name].append(x)

    watching = hooks(find_site(block, name).on_input(partial(keep, name)) for name in names)
    with watching, every_expert_called(block), computing(block), torch.no_grad():
        call.run(block, states)
    return {name: tuple(id(x) for x in tensors) for name, tensors in inputs.items()}


def groups_by_input(reads: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Group the layers that read the same tensors. reads: result of `tensors_read`."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensors in reads.items():
        groups.setdefault(tensors, []).append(name)
    return list(groups.values())


class MomentSums:
    """First and second moments of a layer's inputs, summed over segments of `seqlen` tokens.

    Each product is float32: of at most `CHUNK` tokens of a segment, or on CUDA of all tokens that
    arrive together. The products are summed in float64, which makes the result independent of how
    processes share the segments.
    """

    def __init__(self, seqlen: int):
        self.count = 0
        self.chunk = min(seqlen, CHUNK)

    def take(self, rows: Tensor) -> None:
        """Add inputs (tokens, in)."""
        if not self.count:
            width = rows.shape[1]
            wide = widest_dtype(rows.device)
            self.dtype = working_dtype(rows)
            self.first = rows.new_zeros(width, dtype=wide)
            self.second = rows.new_zeros(width, width, dtype=wide)
            if rows.is_cuda:
                self.chunk = max(len(rows), 1)
        self.count += len(rows)
        for part in rows.split(self.chunk):
            narrow = part.dtype == torch.bfloat16
            # CUDA multiplies bfloat16 directly, and sums in float32.
            factor = part if narrow and part.is_cuda else part.to(self.dtype)
            self.first.add_(factor.sum(0, dtype=self.dtype))
            with bfloat16_products(part.device) if narrow else nullcontext():
                _add_square(self.second, factor)

    def gram(self, world: World) -> Gram:
        """Return the Gram over the tokens of all processes; H = I if there are no tokens, as for an
        expert that no token is routed to.
        """
        tokens = int(world.total(self.count, self.first.device))
        world.add(self.second)
        world.add(self.first)
        if not tokens:
            mean = self.first.to(self.dtype)
            return Gram(torch.eye(len(mean)).to(mean), 0, mean)
        for panel in _panels(self.second):  # below the diagonal
            self.second[panel.stop :, panel] = self.second[panel, panel.stop :].T
        second = self.second.div_(tokens).to(self.dtype)
        return Gram(second, tokens, self.first.div_(tokens).to(self.dtype))


def sums_bytes(width: int) -> int:
    """Memory of `MomentSums` of a layer with `width` inputs, and of its Gram, in bytes."""
    return 3 * FLOAT * width**2


def checked(gram: Gram, name: str) -> Gram:
    """Return the Gram of the inputs of a layer. Raises a NonFiniteError if it is not finite."""
    check_finite(gram.matrix, name)
    return gram


def check_finite(moments: Tensor, name: str) -> None:
    """Raise a NonFiniteError if moments of the inputs of a layer are not finite."""
    if not torch.isfinite(moments).all():
        raise NonFiniteError(
            f"the inputs of {name} contain NaN or Inf; try another dtype"
            f" ({option('dtype', 'float32')})"
        )


def gather(
    block: nn.Module,
    prefix: str,
    call: BlockCall,
    hidden: Activations,
    groups: list[list[str]],
    world: World,
) -> list[Gram]:
    """Compute the Gram of each group's input, over the segments of all processes.

    The first batch that reaches all layers shows how often the block calls them; later passes stop
    at the last call. An expert without tokens is not called.
    """
    collector = Collector([group[0] for group in groups], hidden.states.shape[1])
    watching = hooks(collector.watch(block))
    with watching, computing(block), torch.no_grad():
        for batch in hidden.batches(BATCH if call.batched else 0):
            collector.called.clear()
            with suppress(Stop):
                call.run(block, hidden[batch])
            if set(collector.called) == collector.sums.keys():
                collector.calls_per_pass = len(collector.called)
    grams = []
    for name, sums in collector.sums.items():
        grams.append(checked(sums.gram(world), f"{prefix}.{name}"))
    return grams


class Collector:
    """Sums the moments of inputs of layers during passes of a block.

    Args:
        names: names of the layers in the block.
        seqlen: tokens per segment.
    """

    def __init__(self, names: Iterable[str], seqlen: int):
        self.sums = {name: MomentSums(seqlen) for name in names}
        self.called: list[str] = []
        # Calls after which a pass is stopped.
        self.calls_per_pass: int | None = None

    def watch(self, block: nn.Module) -> Iterator[Any]:
        """Register a hook on each layer, and yield the handles."""
        for name in self.sums:
            yield find_site(block, name).on_input(partial(self.take, name))

    def take(self, name: str, x: Tensor) -> None:
        """Add inputs (…, in) of a layer. Raises Stop after `calls_per_pass` calls."""
        rows = as_multiplied(x.reshape(-1, x.shape[-1]))
        self.sums[name].take(rows)
        self.called.append(name)
        if len(self.called) == self.calls_per_pass:
            raise Stop


# torch ≥ 2.8 can return float32 products of bfloat16 matrices.
WIDE_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype")


def widest_dtype(device: torch.device) -> torch.dtype:
    """Dtype of sums over tokens: float64, or float32 on Apple's GPUs, which have no float64."""
    if device.type == "mps":
        return torch.float32
    return torch.float64


def _add_square(total: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows, for rows (tokens, in). It is symmetric, so blocks below the diagonal are left
    out.
    """
    with torch.autocast(rows.device.type, enabled=False):
        for panel in _panels(total):
            left = rows[:, panel].T
            right = rows[:, panel.start :]
            if rows.dtype == torch.bfloat16 and WIDE_PRODUCTS:
                product = torch.mm(left, right, out_dtype=torch.float32)
            elif rows.dtype == torch.bfloat16:
                product = torch.mm(left.float(), right.float())
            else:
                product = torch.mm(left, right)
            total[panel, panel.start :].add_(product)


def _panels(total: Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix (in, in)."""
    return tiles(len(total), PANEL.get(total.device.type, PANEL["cpu"]))
