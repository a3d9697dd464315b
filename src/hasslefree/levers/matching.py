"""Block matching: train what a compressed block keeps, until its output is close to the dense block's.

Layer by layer, each S + L is fitted alone. Here all kept values of a block are trained together by Adam on

    mean over tokens of Σ_c m_c (block(x̂)_c − y_c)² / ‖y‖²

with x̂ from the compressed blocks before it and y from the dense model: what the layers before lost is made good where
that is possible. Each token counts by its own energy, because the hidden states of a few tokens, attention sinks, are
larger than all others together: a sum of squares sees nothing else. m_c is how much channel c of the output moves the
model's predictions (`levers.sensitivity.importance`).

The support of S stays as it is. Adam moves every entry about equally far. So that this moves the output equally far,
S and v are trained in units of their inputs: S D and v D, with D² the mean square of each input. Masters are float32
beside the block's own dtype; the block is judged with its values rounded to that dtype, as they will be stored.

Several processes have the segments of a mini-batch between them, and add their gradients: the steps are those of one
process, up to the order of sums. A sum over processes has the same bits in all of them; at the end the block of the
first goes to the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hasslefree.core.gram import working_dtype
from hasslefree.core.low_rank import LowRank
from hasslefree.errors import CalibrationError, NonFiniteError, option
from hasslefree.models.calls import hooks
from hasslefree.models.distributed import ALONE, World
from hasslefree.models.precision import computing
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers, unpacked_once


class Call(Protocol):
    """How a block is run: a `BlockCall`, or any other object like it. batched: whether it takes several segments."""

    @property
    def batched(self) -> bool: ...

    def run(self, block: nn.Module, hidden: Tensor, /) -> Tensor:
        """The output for hidden states (segments, tokens, width)."""


class Segments(Protocol):
    """Hidden states (1, tokens, width) of each segment: a list, or `Activations`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Tensor: ...


# Segments on which the inputs of layers are measured, and the least scale of an input, over that of all of them.
SAMPLES, LEAST_SCALE = 16, 1e-3

# Sum over the tokens of segments of how far an output is from its target, both (segments, tokens, width); a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Matching:
    """How a block is matched.

    Args:
        epochs: passes over the training segments, at most.
        learning_rate: of Adam at the peak; with `relative`, times the root mean square of each tensor, so that a step
            changes an entry by that share of a typical one, whatever the units of the tensor.
        warm_up, decay: the rate grows linearly over this share of the steps, and falls along half a cosine to this
            share of the peak at the end.
        batch: segments in a step. held_out: the share of segments that are never trained on, and judge.
        patience: epochs without a better iterate after which to stop.
        retreats: where the first epoch ends worse than the block was, matching starts over with a third of the
            learning rate, at most so many times: how far a step moves the output grows with the width, and no rate
            fits every model.
        betas, epsilon: of Adam. Gradients are of all sizes, so that epsilon is next to nothing.
    """

    epochs: int = 4
    learning_rate: float = 0.01
    relative: bool = True
    warm_up: float = 0.05
    decay: float = 0.0
    batch: int = 4
    held_out: float = 0.125
    patience: int = 3
    retreats: int = 4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-12

    @classmethod
    def of(cls, epochs: int) -> Matching:
        """For so many epochs: with few of them, smaller batches make more steps, each of them shorter."""
        return cls(epochs) if epochs > 2 else cls(epochs, learning_rate=0.007, batch=2)

    def rate(self, step: int, steps: int) -> float:
        """The share of the peak learning rate in a step, of so many."""
        warm = self.warm_up * steps
        if step + 1 < warm:
            return (step + 1) / warm
        way = (step + 1 - warm) / max(steps - warm, 1)
        return self.decay + (1 - self.decay) * (1 + math.cos(math.pi * min(way, 1.0))) / 2


@dataclass(frozen=True)
class MatchRecord:
    """What matching did to a block.

    Args:
        before, after: the loss of a token, on average over the judging segments. after ≤ before.
        best_epoch: the one that was kept; 0 for the block as it was.
        history: the error after each epoch, since the last retreat. learning_rate: then, as `Matching` has it.
    """

    before: float
    after: float
    best_epoch: int
    history: tuple[float, ...] = field(repr=False)
    learning_rate: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without the seconds: the same run gives the same bytes."""
        return {name: value for name, value in asdict(self).items() if name != "seconds"}


def relative_distance(output: Tensor, target: Tensor, channels: Tensor | None = None) -> Tensor:
    """Σ over tokens of ‖output − target‖² / ‖target‖², a scalar.

    A target of next to nothing would outweigh all others: it counts as a hundredth of the median one.

    Args:
        channels: weights of the squares in the numerator, (width,), of mean 1; None for all alike.
    """
    energy, squares = target.square().sum(-1), (output - target).square()
    apart = (squares if channels is None else squares * channels).sum(-1)
    return (apart / energy.clamp_min(0.01 * energy.median().item() or 1.0)).sum()


def match_block(
    block: nn.Module,
    call: Call,
    inputs: Segments,
    targets: Segments,
    settings: Matching,
    seed: int,
    loss: Loss = relative_distance,
    parameters: Sequence[nn.Parameter] | None = None,
    world: World = ALONE,
) -> MatchRecord:
    """Train the kept values of a block in place; it is never worse on the judging segments than it was.

    Args:
        block: with its layers replaced, in evaluation mode.
        inputs, targets: what enters the block, and what should leave it: (1, tokens, width) for each segment of this
            process.
        seed: of the split into training and judging segments, and of the order of the segments.
        parameters: what to train; None for `kept_parameters(block)`.
        world: the processes that share the segments as `World.share` does, each with the same block.

    Raises:
        CalibrationError: no segment is left to train on. NonFiniteError: the block's output is NaN or Inf at first.
    """
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    kept = kept_parameters(block) if parameters is None else list(parameters)
    device = next(block.parameters()).device
    training, judging = split(round(world.total(len(inputs), device)), settings.held_out, generator)

    def lost(chosen: Sequence[int]) -> Tensor:
        """The sum over some segments of the loss of a token on average."""
        x, y = (torch.cat([states[i].to(device) for i in chosen]) for states in (inputs, targets))
        return loss(call.run(block, x.to(working_dtype(x))), y.to(working_dtype(y))) / y.shape[-2]

    def judged() -> float:
        with unpacked_once(block), torch.no_grad():
            return world.total(sum(lost([i]).item() for i in world.local(judging)), device) / len(judging)

    def order() -> list[int]:
        return [training[i] for i in torch.randperm(len(training), generator=generator).tolist()]

    stored = [p.dtype for p in kept]
    with computing(block), only_trained(block, kept):
        before = judged()
        if not math.isfinite(before):
            raise NonFiniteError(
                f"the output of the compressed block is NaN or Inf; try another dtype ({option('dtype', 'float32')})"
            )
        scales = input_scales(block, lost, world.local(training)[:SAMPLES], world)
        shuffles = generator.get_state()
        for retreat in range(settings.retreats + 1):
            generator.set_state(shuffles)
            tried = replace(settings, learning_rate=settings.learning_rate / 3**retreat)
            trainer = Trainer(block, kept, stored, scales, tried, len(training), lost, world, call.batched)
            last = retreat == settings.retreats
            history, best = attempt(trainer, order, judged, before, settings.patience if last else 1)
            if best:
                break
    for parameter in kept:
        world.broadcast_(parameter.data, 0)  # processors of different kinds round otherwise
    after = history[best - 1] if best else before
    return MatchRecord(before, after, best, tuple(history), tried.learning_rate, time.perf_counter() - start)


def attempt(
    trainer: Trainer, order: Callable[[], list[int]], judged: Callable[[], float], before: float, patience: int
) -> tuple[list[float], int]:
    """Train for the epochs of the settings, and leave the best iterate in the block.

    Args:
        order: the segments of an epoch. judged: the error of the block as it is.
        before: the error at first. patience: epochs to wait for the first iterate that is better.

    Returns:
        The errors after each epoch, and the number of the best; 0 where none was better than before.
    """
    history: list[float] = []
    best, best_epoch, snapshot = before, 0, [p.detach().clone() for p in trainer.kept]
    for epoch in range(1, trainer.settings.epochs + 1):
        trainer.epoch(order())
        history.append(judged())
        if history[-1] < best:
            best, best_epoch, snapshot = history[-1], epoch, [p.detach().clone() for p in trainer.kept]
        elif epoch - best_epoch >= (trainer.settings.patience if best_epoch else patience):
            break
    with torch.no_grad():
        for parameter, value in zip(trainer.kept, snapshot, strict=True):
            parameter.copy_(value)
    return history, best_epoch


def split(count: int, held_out: float, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """The segments to train on and those that judge; with held_out = 0 the same ones do both.

    Raises:
        CalibrationError: no segment is left to train on.
    """
    judges = math.ceil(held_out * count)
    if judges >= count:
        raise CalibrationError(
            f"matching holds {judges} of {count} calibration segments out and has none to train on; use more samples"
        )
    order = torch.randperm(count, generator=generator).tolist()
    training = sorted(order[judges:])
    return training, sorted(order[:judges]) or training


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
def unpacked_for_gradients(layers: Sequence[SparseLowRankLinear]) -> Iterator[None]:
    """Within it, layers hold S unpacked and collect its gradient over all calls; at the end it goes to the values."""
    before = [layer.held for layer in layers]
    try:
        whole = [layer.unpacked() for layer in layers]
        for layer, sparse in zip(layers, whole, strict=True):
            layer.held = sparse.detach().requires_grad_()
        yield
        for layer, sparse in zip(layers, whole, strict=True):
            if layer.held is not None and layer.held.grad is not None:
                sparse.backward(layer.held.grad)
    finally:
        for layer, held in zip(layers, before, strict=True):
            layer.held = held


class Trainer:
    """Adam on float32 masters of a block's parameters, and the block's own parameters as their rounded copies.

    Args:
        stored: the dtypes that the parameters are stored in. scales: of the inputs of compressed layers; S and v are
            trained in units of them, and all others as they are.
        segments: the number in an epoch, of all processes.
        lost: the loss, with gradients, of segments by their number in this process.
        world: the processes that share the segments. batched: whether the segments of a step run together.
    """

    def __init__(
        self,
        block: nn.Module,
        kept: Sequence[nn.Parameter],
        stored: Sequence[torch.dtype],
        scales: Mapping[SparseLowRankLinear, Tensor],
        settings: Matching,
        segments: int,
        lost: Callable[[Sequence[int]], Tensor],
        world: World,
        batched: bool,
    ):
        self.kept, self.stored, self.settings, self.lost, self.world = list(kept), stored, settings, lost, world
        self.batched = batched
        self.layers = [layer for layer in scales if layer.values.requires_grad]
        self.units = units_of(kept, scales)
        self.masters = masters_of(kept, self.units, scales)
        self.peaks = [settings.learning_rate * (_rms(m) if settings.relative else 1.0) for m in self.masters]
        groups = [{"params": [m], "lr": peak} for m, peak in zip(self.masters, self.peaks, strict=True)]
        self.optimizer = torch.optim.Adam(groups, betas=settings.betas, eps=settings.epsilon)
        self.step, self.steps = 0, settings.epochs * math.ceil(segments / settings.batch)

    def epoch(self, order: Sequence[int]) -> None:
        """One pass over the segments, in this order."""
        for first in range(0, len(order), self.settings.batch):
            with unpacked_for_gradients(self.layers), torch.enable_grad():
                local = self.world.local(order[first : first + self.settings.batch])
                for together in [local] if self.batched and local else [[i] for i in local]:
                    self.lost(together).backward()
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """One step of Adam on the masters, and their roundings into the block."""
        rate = self.settings.rate(self.step, self.steps)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        for parameter, master, unit in zip(self.kept, self.masters, self.units, strict=True):
            # No gradient is a gradient of zero, for every number of processes: one without a segment of the mini-batch
            # has none to add, and what a mini-batch does not reach goes on by its momentum.
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            master.grad = grad.to(master.dtype) / unit
            self.world.add(master.grad)
            parameter.grad = None
        self.optimizer.step()
        for parameter, master, unit, dtype in zip(self.kept, self.masters, self.units, self.stored, strict=True):
            parameter.copy_((master / unit).to(dtype))
        self.step += 1


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
