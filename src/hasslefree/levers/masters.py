"""The values that a lever trains: the kept values of compressed layers, as float32 masters of the stored ones.

Adam moves every entry about equally far. So that this moves the output equally far, S and v are trained in units of
their inputs: S D and v D, with D² the mean square of each input. What is stored are the masters, rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hasslefree.core.gram import working_dtype
from hasslefree.core.low_rank import LowRank
from hasslefree.distributed import World
from hasslefree.models.calls import hooks
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers, unpacked_once

# Segments on which the inputs of layers are measured, and the least scale of an input, over that of all of them.
SAMPLES, LEAST_SCALE = 16, 1e-3


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How Adam steps.

    Args:
        learning_rate: at the peak; with `relative`, times the root mean square of each tensor, so that a step changes
            an entry by that share of a typical one, whatever the units of the tensor.
        warm_up, decay: the rate grows linearly over this share of the steps, and falls along half a cosine to this
            share of the peak at the end.
        retreats: where training does not improve the model at first, it starts over with a third of the learning rate,
            at most this number of times: the effect of a step on the output grows with the width, and no rate fits
            every model.
        betas, epsilon: of Adam. Gradients differ widely in size, so that epsilon is tiny.
    """

    learning_rate: float
    relative: bool = True
    warm_up: float = 0.05
    decay: float = 0.0
    retreats: int
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-12

    def rate(self, step: int, steps: int) -> float:
        """The share of the peak learning rate in step `step` of `steps`."""
        warm = self.warm_up * steps
        if step + 1 < warm:
            return (step + 1) / warm
        done = (step + 1 - warm) / max(steps - warm, 1)
        return self.decay + (1 - self.decay) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


class Masters:
    """Adam on float32 masters of the parameters of a block, and the block's own parameters as their rounded copies.

    Args:
        kept: the parameters that are trained. stored: the dtypes that they are stored in.
        scales: of the inputs of compressed layers; S and v are trained in units of them, and all others as they are.
        how: it steps. world: the processes whose gradients are added.
        home: where the masters are, and where Adam runs; None for where the parameters are.
    """

    def __init__(
        self,
        kept: Sequence[nn.Parameter],
        stored: Sequence[torch.dtype],
        scales: Mapping[SparseLowRankLinear, Tensor],
        how: Steps,
        world: World,
        home: torch.device | None = None,
    ):
        self.kept, self.stored, self.world = list(kept), list(stored), world
        units = units_of(kept, scales)
        masters = masters_of(kept, units, scales)
        self.units = [unit.to(home) for unit in units]
        self.masters = [master.to(home) for master in masters]
        self.peaks = [how.learning_rate * (_rms(master) if how.relative else 1.0) for master in self.masters]
        groups = [{"params": [m], "lr": peak} for m, peak in zip(self.masters, self.peaks, strict=True)]
        # A block may have been left dense.
        self.optimizer = torch.optim.Adam(groups, betas=how.betas, eps=how.epsilon, fused=True) if groups else None

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """One step on the masters with the gradients of the parameters, and their roundings into the parameters.

        Afterwards the parameters have no gradients. rate: the learning rate, over that at the peak.
        """
        if self.optimizer is None:
            return
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        for parameter, master, unit in zip(self.kept, self.masters, self.units, strict=True):
            # No gradient is a gradient of zero, for every number of processes: one without a segment of the mini-batch
            # has none to add, and a parameter that a mini-batch does not reach still moves by its momentum.
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grad = grad.to(master.dtype)
            self.world.add(grad)
            master.grad = grad.to(master.device) / unit
            parameter.grad = None
        self.optimizer.step()
        for parameter, master, unit, dtype in zip(self.kept, self.masters, self.units, self.stored, strict=True):
            parameter.copy_((master / unit).to(dtype))
            master.grad = None


def kept_parameters(block: nn.Module) -> list[nn.Parameter]:
    """What matching trains: the values, factors and biases of compressed layers."""
    return [p for layer in compressed_layers(block).values() for p in layer.parameters() if p.numel()]


def input_scales(
    block: nn.Module, run: Callable[[Sequence[int]], Tensor], segments: Sequence[int], world: World
) -> dict[SparseLowRankLinear, Tensor]:
    """D, (in,), of every compressed layer: the root mean square of each of its inputs, over that of all of them.

    Args:
        run: runs the block on segments by their number in this process. segments: on which inputs are measured.
    """
    layers = list(compressed_layers(block).values())
    squares = {layer: torch.zeros(layer.in_features, device=layer.weight.device) for layer in layers}

    def see(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        squares[layer].add_(args[0].flatten(0, -2).float().square().sum(0))  # type: ignore[index]

    with unpacked_once(block), hooks(layer.register_forward_pre_hook(see) for layer in layers), torch.no_grad():
        for segment in segments:
            run([segment])
    for total in squares.values():
        world.add(total)
        total.div_(total.mean().clamp_min(torch.finfo(total.dtype).tiny)).sqrt_().clamp_min_(LEAST_SCALE)
    return squares


@contextmanager
def only_trained(block: nn.Module, kept: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within it, gradients flow to `kept` and to no other parameter of the block."""
    before = [(p, p.requires_grad) for p in block.parameters()]
    chosen = {id(p) for p in kept}
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in chosen)
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)
            parameter.grad = None


@contextmanager
def whole_for_gradients(layers: Sequence[SparseLowRankLinear]) -> Iterator[None]:
    """Within it, layers multiply by S + u v at once; at the end its gradient over all calls goes to values and factors.

    One product in the place of three, and S is unpacked once.
    """
    try:
        sums = [sum_of(layer) for layer in layers]
        for layer, each in zip(layers, sums, strict=True):
            layer.merged_weight = each.detach().requires_grad_()
        yield
        for layer, each in zip(layers, sums, strict=True):
            if layer.merged_weight is not None and layer.merged_weight.grad is not None:
                each.backward(layer.merged_weight.grad)
    finally:
        for layer in layers:
            layer.merged_weight = None


def sum_of(layer: SparseLowRankLinear) -> Tensor:
    """S + u v: (out, in)."""
    sparse, factors = layer.unpacked(), layer.factors()
    return sparse if factors is None else torch.addmm(sparse, *factors)


@torch.no_grad()
def units_of(kept: Sequence[nn.Parameter], scales: Mapping[SparseLowRankLinear, Tensor]) -> list[Tensor]:
    """What each parameter is multiplied by while it is trained: D for S, entry by entry, and for v; else 1."""
    found: dict[int, Tensor] = {}
    for layer, scale in scales.items():
        if layer.low_rank_v is not None:
            found[id(layer.low_rank_v)] = scale
        found[id(layer.values)] = scale.expand(layer.spec.shape).masked_select(layer.support()).view_as(layer.values)
    return [found.get(id(p), torch.ones((), device=p.device)) for p in kept]


@torch.no_grad()
def masters_of(
    kept: Sequence[nn.Parameter], units: Sequence[Tensor], layers: Iterable[SparseLowRankLinear]
) -> list[Tensor]:
    """Copies of the parameters in the working dtype and in these units, the factors of each layer balanced."""
    masters = {id(p): p.detach().to(working_dtype(p)) * unit for p, unit in zip(kept, units, strict=True)}
    for layer in layers:
        u, v = layer.low_rank_u, layer.low_rank_v
        if u is not None and v is not None and id(u) in masters and id(v) in masters:
            balanced = LowRank(masters[id(u)], masters[id(v)]).balanced()
            masters[id(u)], masters[id(v)] = balanced.u, balanced.v
    return [masters[id(p)] for p in kept]


def _rms(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item()
