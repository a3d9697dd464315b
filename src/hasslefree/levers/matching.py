"""Block matching: train the kept values of a compressed block until its output is close to the dense block's.

Layer by layer, each S + L is fitted alone. Here all kept values of a block are trained together by Adam on

    mean over tokens of Σ_c m_c (block(x̂)_c − y_c)² / ‖y‖²

with x̂ from the compressed blocks before it and y from the dense model: the block compensates the errors of the layers
before it where it can. Each token is divided by its own energy, because the hidden states of a few tokens, attention
sinks, are larger than all others together and would dominate a sum of squares. m_c is how much channel c of the output
affects the model's predictions (`levers.sensitivity.importance`).

The support of S is fixed. Training works on `masters`; the block is validated with its values rounded to its own dtype,
as they will be stored.

Several processes share the segments of a mini-batch, and add their gradients: the steps are those of one process, up to
the order of sums. A sum over processes has the same bits in all of them; at the end the block of the first process is
broadcast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hasslefree.core.gram import working_dtype
from hasslefree.distributed import ALONE, World
from hasslefree.errors import CalibrationError, NonFiniteError, option
from hasslefree.levers.masters import (
    SAMPLES,
    Masters,
    Steps,
    input_scales,
    kept_parameters,
    only_trained,
    whole_for_gradients,
)
from hasslefree.models.precision import computing
from hasslefree.packed.linear import SparseLowRankLinear, unpacked_once


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


# Sum over the tokens of segments of how far an output is from its target, both (segments, tokens, width); a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Matching(Steps):
    """How a block is matched.

    Args:
        epochs: passes over the training segments, at most.
        batch: segments in a step. held_out: the share of segments that are held out for validation.
        patience: epochs without a better iterate after which to stop.
    """

    epochs: int = 4
    learning_rate: float = 0.01
    batch: int = 4
    held_out: float = 0.125
    patience: int = 3
    retreats: int = 4

    @classmethod
    def of(cls, epochs: int) -> Matching:
        """For this number of epochs: with few of them, smaller batches make more and smaller steps."""
        return cls(epochs=epochs) if epochs > 2 else cls(epochs=epochs, learning_rate=0.007, batch=2)

    def steps(self, training: int) -> int:
        """At most, for so many segments to train on."""
        return self.epochs * math.ceil(training / self.batch)


@dataclass(frozen=True)
class MatchRecord:
    """What matching did to a block.

    Args:
        before, after: the mean loss of a token on the validation segments. after ≤ before.
        best_epoch: the one that was kept; 0 for the block as it was.
        history: the error after each epoch, since the last retreat. learning_rate: since then, as in `Matching`.
    """

    before: float
    after: float
    best_epoch: int
    history: tuple[float, ...] = field(repr=False)
    learning_rate: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the seconds: the same run gives the same bytes."""
        return {name: value for name, value in asdict(self).items() if name != "seconds"}


def relative_distance(output: Tensor, target: Tensor, channels: Tensor | None = None) -> Tensor:
    """Σ over tokens of ‖output − target‖² / ‖target‖², a scalar.

    A target close to zero would outweigh all others: its energy is raised to a hundredth of the median.

    Args:
        channels: weights of the squares in the numerator, (width,), of mean 1; None for all alike.
    """
    energy, squares = target.square().sum(-1), (output - target).square()
    apart = (squares if channels is None else squares * channels).sum(-1)
    return (apart / energy.clamp_min(0.01 * energy.median().item() or 1.0)).sum()


def sink_share(states: Tensor) -> float:
    """The share of tokens with a norm of more than ten times that of a small one (the tenth percentile).

    Args:
        states: (segments, tokens, width).
    """
    norms = states.flatten(0, -2).norm(dim=-1).sort().values
    return float((norms > 10 * norms[len(norms) // 10]).sum()) / len(norms)


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
    stepped: Callable[[int], None] | None = None,
) -> MatchRecord:
    """Train the kept values of a block in place; on the validation segments it never gets worse.

    Args:
        block: with its layers replaced, in evaluation mode.
        inputs, targets: the inputs and the target outputs of the block: (1, tokens, width) for each segment of this
            process.
        seed: of the split into training and validation segments, and of the order of the segments.
        parameters: what to train; None for `kept_parameters(block)`.
        world: the processes that share the segments as `World.share` does, each with the same block.
        stepped: called after each step with its number, from 1; after a retreat the numbers begin anew.

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
                "the output of the compressed block contains NaN or Inf; try another dtype "
                f"({option('dtype', 'float32')})"
            )
        scales = input_scales(block, lost, world.local(training)[:SAMPLES], world)
        shuffles = generator.get_state()
        for retreat in range(settings.retreats + 1):
            generator.set_state(shuffles)
            tried = replace(settings, learning_rate=settings.learning_rate / 3**retreat)
            masters = Masters(kept, stored, scales, tried, world)
            trainer = Trainer(masters, list(scales), tried, len(training), lost, world, call.batched, stepped)
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


def judges_of(count: int, held_out: float) -> int:
    """How many of so many segments are held out."""
    return math.ceil(held_out * count)


def split(count: int, held_out: float, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """The training and the validation segments; with held_out = 0 the same ones are both.

    Raises:
        CalibrationError: no segment is left to train on.
    """
    judges = judges_of(count, held_out)
    if judges >= count:
        raise CalibrationError(
            f"block matching keeps {judges} of {count} calibration segments for validation and has none left to train "
            f"on; use more {option('samples')}"
        )
    order = torch.randperm(count, generator=generator).tolist()
    training = sorted(order[judges:])
    return training, sorted(order[:judges]) or training


class Trainer:
    """Trains one block. lost: the loss, with gradients, of segments by their number in this process.

    Args:
        masters: of what is trained. segments: the number in an epoch, of all processes.
        world: the processes that share the segments. batched: whether the segments of a step run together.
        stepped: as for `match_block`.
    """

    def __init__(
        self,
        masters: Masters,
        layers: Sequence[SparseLowRankLinear],
        settings: Matching,
        segments: int,
        lost: Callable[[Sequence[int]], Tensor],
        world: World,
        batched: bool,
        stepped: Callable[[int], None] | None = None,
    ):
        self.stepped = stepped
        self.masters, self.settings, self.lost, self.world, self.batched = masters, settings, lost, world, batched
        self.layers = [layer for layer in layers if layer.values.requires_grad]
        self.step, self.steps = 0, settings.steps(segments)

    @property
    def kept(self) -> list[nn.Parameter]:
        return self.masters.kept

    def epoch(self, order: Sequence[int]) -> None:
        """One pass over the segments, in this order."""
        for first in range(0, len(order), self.settings.batch):
            with torch.enable_grad(), whole_for_gradients(self.layers):
                local = self.world.local(order[first : first + self.settings.batch])
                for together in [local] if self.batched and local else [[i] for i in local]:
                    self.lost(together).backward()
            self.masters.update(self.settings.rate(self.step, self.steps))
            self.step += 1
            if self.stepped is not None:
                self.stepped(self.step)
