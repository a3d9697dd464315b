"""Block matching: train what a compressed block keeps, until its output is close to the dense block's.

Layer by layer, each S + L is fitted alone. Here all kept values of a block are trained together by Adam on

    Σ over tokens ‖block(x̂) − y‖²

with x̂ from the compressed blocks before it and y from the dense model: what the layers before lost is made good where
that is possible. The support of S stays as it is. Masters are float32 beside the block's own dtype; the block runs,
and is judged, in its own dtype, so that what is kept is what was measured.

Several processes have the segments of a mini-batch between them, and add their gradients: the steps are those of one
process, up to the order of sums. A sum over processes has the same bits in all of them; at the end the block of the
first goes to the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hasslefree.core.gram import relative, working_dtype
from hasslefree.core.low_rank import LowRank
from hasslefree.errors import CalibrationError, NonFiniteError, option
from hasslefree.models.distributed import ALONE, World
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers, unpacked_once


class Call(Protocol):
    """How a block is run: a `BlockCall`, or any other object with this method."""

    def run(self, block: nn.Module, hidden: Tensor, /) -> Tensor:
        """The output for hidden states (1, tokens, width)."""


class Segments(Protocol):
    """Hidden states (1, tokens, width) of each segment: a list, or `Activations`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Tensor: ...


# Sum over the tokens of a segment of how far an output is from its target, both (1, tokens, width); a scalar.
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
        betas, epsilon: of Adam. Gradients are sums over tokens, so that epsilon is next to nothing.
    """

    epochs: int = 6
    learning_rate: float = 0.01
    relative: bool = True
    warm_up: float = 0.05
    decay: float = 0.0
    batch: int = 4
    held_out: float = 0.125
    patience: int = 3
    retreats: int = 4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

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
        before, after: Σ‖output − target‖² / Σ‖target‖² over the judging segments, in the block's dtype; with another
            loss, that loss over Σ‖target‖². after ≤ before.
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


def squared_distance(output: Tensor, target: Tensor) -> Tensor:
    """Σ‖output − target‖² in float32 at least; a scalar."""
    dtype = working_dtype(output)
    return (output.to(dtype) - target.to(dtype)).square().sum()


def match_block(
    block: nn.Module,
    call: Call,
    inputs: Segments,
    targets: Segments,
    settings: Matching,
    seed: int,
    loss: Loss = squared_distance,
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
    norm = world.total(
        sum(squared_distance(targets[i], torch.zeros_like(targets[i])).item() for i in world.local(judging)), device
    )
    unit = norm / max(len(judging) * targets[0].numel(), 1) or 1.0

    def lost(i: int) -> Tensor:
        return loss(call.run(block, inputs[i].to(device)), targets[i].to(device))

    def judged() -> float:
        with unpacked_once(block), torch.no_grad():
            return relative(world.total(sum(lost(i).item() for i in world.local(judging)), device), norm)

    def order() -> list[int]:
        return [training[i] for i in torch.randperm(len(training), generator=generator).tolist()]

    before = judged()
    if not math.isfinite(before):
        raise NonFiniteError(
            f"the output of the compressed block is NaN or Inf; try another dtype ({option('dtype', 'float32')})"
        )
    shuffles = generator.get_state()
    with only_trained(block, kept):
        for retreat in range(settings.retreats + 1):
            generator.set_state(shuffles)
            tried = replace(settings, learning_rate=settings.learning_rate / 3**retreat)
            trainer = Trainer(block, kept, tried, len(training), lambda i: lost(i) / unit, world)
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
    """What matching trains: the values and factors of compressed layers, biases and norms; no dense matrix."""
    of_layers = {id(p) for layer in compressed_layers(block).values() for p in layer.parameters()}
    return [p for p in block.parameters() if p.numel() and (id(p) in of_layers or sum(n > 1 for n in p.shape) < 2)]


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
        segments: the number in an epoch, of all processes.
        lost: the loss, with gradients, of a segment by its number in this process.
        world: the processes that share the segments.
    """

    def __init__(
        self,
        block: nn.Module,
        kept: Sequence[nn.Parameter],
        settings: Matching,
        segments: int,
        lost: Callable[[int], Tensor],
        world: World = ALONE,
    ):
        self.kept, self.settings, self.lost, self.world = list(kept), settings, lost, world
        self.layers = [layer for layer in compressed_layers(block).values() if layer.values.requires_grad]
        self.masters = masters_of(block, kept)
        self.peaks = [settings.learning_rate * (_rms(m) if settings.relative else 1.0) for m in self.masters]
        groups = [{"params": [m], "lr": peak} for m, peak in zip(self.masters, self.peaks, strict=True)]
        self.optimizer = torch.optim.Adam(groups, betas=settings.betas, eps=settings.epsilon)
        self.step, self.steps = 0, settings.epochs * math.ceil(segments / settings.batch)

    def epoch(self, order: Sequence[int]) -> None:
        """One pass over the segments, in this order."""
        for first in range(0, len(order), self.settings.batch):
            with unpacked_for_gradients(self.layers), torch.enable_grad():
                for i in self.world.local(order[first : first + self.settings.batch]):
                    self.lost(i).backward()
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """One step of Adam on the masters, and their roundings into the block."""
        rate = self.settings.rate(self.step, self.steps)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        for parameter, master in zip(self.kept, self.masters, strict=True):
            # No gradient is a gradient of zero, for every number of processes: one without a segment of the mini-batch
            # has none to add, and what a mini-batch does not reach goes on by its momentum.
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            master.grad = grad.to(master.dtype)
            self.world.add(master.grad)
            parameter.grad = None
        self.optimizer.step()
        for parameter, master in zip(self.kept, self.masters, strict=True):
            parameter.copy_(master)
        self.step += 1


@torch.no_grad()
def masters_of(block: nn.Module, kept: Sequence[nn.Parameter]) -> list[Tensor]:
    """Copies of the parameters in the working dtype, the factors of each layer balanced."""
    masters = {id(p): p.detach().to(working_dtype(p), copy=True) for p in kept}
    for layer in compressed_layers(block).values():
        u, v = layer.low_rank_u, layer.low_rank_v
        if u is not None and v is not None and id(u) in masters and id(v) in masters:
            balanced = LowRank(masters[id(u)], masters[id(v)]).balanced()
            masters[id(u)], masters[id(v)] = balanced.u, balanced.v
    return [masters[id(p)] for p in kept]


def _rms(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item()
