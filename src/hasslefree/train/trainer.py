"""Training: all compressed blocks together, on the predictions of the dense model.

Layer by layer, each S + L is fitted alone. Here the values of S, or the scales and offsets of its
grid, u, v, the biases and the norms of all blocks are trained together (`train.optimizer`), with
the support and the codes of S fixed, by Adam on

    mean over tokens of KL(dense ‖ compressed)

between the predictions. The text is new calibration text as far as there is enough of it; a short
text is read a few times. A step is a forward and a backward pass, block by block; the gradients of
a block are freed before those of the block before it are computed. With gradient checkpointing,
only the input of each block is kept, and the block runs again in the backward pass: one block at a
time has S unpacked and its activations in memory.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import Tensor

from hasslefree.allocate.sensitivity import check_predictions
from hasslefree.checkpoint.record import PredictionRecord
from hasslefree.distributed import ALONE, World
from hasslefree.errors import NonFiniteError, option
from hasslefree.models.calibrate import BATCH, run_block, with_batching
from hasslefree.models.calls import BlockCall
from hasslefree.models.precision import computing, only_trained
from hasslefree.models.probe import logits_of
from hasslefree.models.walk import Walk
from hasslefree.packed.linear import compressed_layers
from hasslefree.planning.schedule import Training
from hasslefree.progress import PREDICTIONS, REFERENCE
from hasslefree.train.gradients import BlockGraph, Divergence, input_scales
from hasslefree.train.optimizer import BlockOptimizer, norms
from hasslefree.train.reference import Reference

logger = logging.getLogger(__name__)

# Segments on which the inputs of layers are measured.
MEASURED = 16


def reference_of(
    walk: Walk,
    segments: Tensor,
    total: int,
    tokens: int = 0,
) -> Reference:
    """The reference of segments (samples, tokens) of this process. total, tokens: as for
    `Reference`.
    """
    hidden = walk.entering(segments)
    check_predictions(walk, segments, hidden)
    for _ in walk.phases.counted(
        REFERENCE, walk.visits(hidden), len(walk.blocks.modules), "blocks"
    ):
        pass
    return Reference(segments, hidden, total, tokens)


# What the first validation may have, over the divergence before training. It comes near the peak of
# the learning rate, and the divergence falls most after that.
TOLERATED = 1.1


@dataclass
class Attempt:
    """The mean divergences of a token during training, in nats. NaN counts as worse.

    Args:
        before: before training.
        history: at each validation.
        tokens: number of training tokens.
    """

    before: float
    history: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.history[-1])

    @property
    def improved(self) -> bool:
        return self.history[-1] < self.before

    @property
    def begins_well(self) -> bool:
        return self.history[0] < TOLERATED * self.before

    def record(self, learning_rate: float) -> PredictionRecord:
        return PredictionRecord(
            before=self.before,
            after=self.history[-1] if self.improved else self.before,
            history=[divergence for divergence in self.history if math.isfinite(divergence)],
            learning_rate=learning_rate,
            tokens=self.tokens,
        )


@dataclass(frozen=True)
class Batch:
    """A mini-batch. segments: global indices. done: steps or seconds after it, of `length`."""

    segments: Sequence[int]
    done: float
    length: float


@dataclass
class Trainer:
    """Training of the surviving values of all blocks, in place.

    Args:
        walk: through the compressed model, all of it in memory.
        world: the processes that share the segments as `World.share` does, each with the same
            model.
        optimizer_device: where the master weights and the moments of Adam are and Adam runs; None
            for the device of each block.
        keep_graphs: keep the activations of all blocks for the backward pass, in place of gradient
            checkpointing.
        deadline: end of training, in seconds of the performance counter; None for the passes of the
            reference.
    """

    walk: Walk
    reference: Reference
    settings: Training
    world: World = ALONE
    optimizer_device: torch.device | None = None
    keep_graphs: bool = False
    deadline: float | None = None
    calls: list[BlockCall] = field(default_factory=list, init=False)
    optimizers: list[BlockOptimizer] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.blocks = self.walk.blocks.modules

    def train(self, restore: Callable[[], None]) -> PredictionRecord:
        """Train, with a lower learning rate if the first validation is much worse than none.

        Args:
            restore: puts the blocks back as they are now.

        Returns:
            What was done. A model that would be worse on the validation segments is put back.
        """
        phases = self.walk.phases
        if self.deadline is None:
            length = len(self.mini_batches()) * self.reference.passes
            unit = "steps"
        else:
            length = max(round(self.deadline - time.perf_counter()), 1)
            unit = "seconds"
        retreats = self.settings.retreats
        # Embeddings and head are read once, not at every step.
        with self.walk.outside(dense=True), phases.phase(PREDICTIONS, length, unit) as phase:
            for retreat in range(retreats + 1):
                learning_rate = self.settings.learning_rate / 3**retreat
                self.open(learning_rate)
                attempt = self.attempt(retreat == retreats, phase.reach)
                self.close()
                if not attempt.finite:
                    logger.warning(
                        "%s: the predictions became NaN or Inf at the learning rate %g",
                        PREDICTIONS,
                        learning_rate,
                    )
                if not attempt.improved:
                    restore()
                if attempt.begins_well and attempt.finite:
                    break
        return attempt.record(learning_rate)

    def open(self, learning_rate: float) -> None:
        """Make the optimizers of the blocks, and train with this rate at its peak."""
        hidden = self.walk.entering(self.reference.segments[:MEASURED])
        # A weight of several blocks cannot change while the graph of one of them still needs it.
        uses = Counter(id(weight) for block in self.blocks for weight in norms(block))
        shared = {key for key, count in uses.items() if count > 1}
        for block, call in zip(self.blocks, self.walk.calls, strict=True):
            call = with_batching(block, call, hidden)
            scales = input_scales(block, call, hidden, self.world)
            self.calls.append(call)
            self.optimizers.append(
                BlockOptimizer(
                    block, scales, learning_rate, self.world, self.optimizer_device, shared
                )
            )
            run_block(block, call, hidden)

    def close(self) -> None:
        """Free the optimizers, the largest arrays of all, and let coded factors be read from their
        codes again.
        """
        self.calls.clear()
        self.optimizers.clear()
        for block in self.blocks:
            for layer in compressed_layers(block).values():
                layer.wide_factors.clear()

    def attempt(self, last: bool, reached: Callable[[int], None] = lambda done: None) -> Attempt:
        """Train on the passes over the segments, or until the deadline.

        Args:
            last: continue whatever the first validation shows.
            reached: called after each step with the steps or seconds so far.

        Raises:
            NonFiniteError: the predictions are NaN or Inf before training.
        """
        attempt = Attempt(self.validate())
        if not math.isfinite(attempt.before):
            raise NonFiniteError(
                "the predictions of the compressed model contain NaN or Inf; try another dtype "
                f"({option('dtype', 'float32')})"
            )
        with ExitStack() as opened:
            for block, optimizer in zip(self.blocks, self.optimizers, strict=True):
                leaves = [variable.leaf for variable in optimizer.variables]
                opened.enter_context(only_trained(block, leaves))
            validated = 0
            for batch in self.batches():
                # The rate is zero one step after the last. How long the first takes is not known.
                rate = self.settings.rate(max(batch.done - 1, 0), batch.length + 1)
                self.step(self.world.local(batch.segments), rate)
                attempt.tokens += len(batch.segments) * self.reference.seqlen
                reached(int(batch.done))
                due = int(batch.done * self.settings.validations / batch.length)
                if due <= validated:
                    continue
                validated = due
                attempt.history.append(self.validate())
                logger.debug(
                    "%s: %d tokens, KL %.4f (before training %.4f)",
                    PREDICTIONS,
                    attempt.tokens,
                    attempt.history[-1],
                    attempt.before,
                )
                if not attempt.finite or not (last or attempt.begins_well):
                    break
        return attempt

    def mini_batches(self) -> list[range]:
        """The global indices of the segments of each step of a pass."""
        training = self.reference.training
        size = self.settings.tokens(self.reference.seqlen) // self.reference.seqlen
        return [training[first : first + size] for first in range(0, len(training), size)]

    def batches(self) -> Iterator[Batch]:
        """The mini-batches, counted in steps without a deadline, and in seconds with one."""
        batches = self.mini_batches()
        if self.deadline is None:
            batches *= self.reference.passes
            for step, segments in enumerate(batches, 1):
                yield Batch(segments, step, len(batches))
            return
        begun = time.perf_counter()
        length = self.world.broadcast(max(self.deadline - begun, 1.0))
        for steps, segments in enumerate(cycle(batches)):
            passed = time.perf_counter() - begun
            # All processes end together; the next step takes as long as those so far.
            done = self.world.broadcast(min(passed + passed / max(steps, 1), length))
            yield Batch(segments, done, length)
            if done == length:
                return

    def step(self, segments: Sequence[int], rate: float) -> None:
        """Take one step of Adam, block by block from the last to the first.

        Args:
            segments: local indices; empty if only other processes have segments of the mini-batch.
            rate: share of the peak learning rate.
        """
        if not segments:
            for optimizer in reversed(self.optimizers):
                optimizer.update(rate)
            return
        graphs: list[BlockGraph] = []
        with ExitStack() as opened:
            states = self.entering(segments)
            for block, call in zip(self.blocks, self.calls, strict=True):
                graph = BlockGraph(block, call, states)
                opened.callback(graph.close)
                graphs.append(graph)
                states = graph.forward() if self.keep_graphs else graph.checkpoint()
            gradients = self.loss_gradients(segments, states)
            for optimizer in reversed(self.optimizers):
                graph = graphs.pop()
                gradients = graph.backward(gradients)
                optimizer.update(rate)
                graph.close()

    def entering(self, segments: Sequence[int]) -> Tensor:
        """The inputs of the first block: (segments, tokens, width)."""
        return self.walk.entering(self.reference.segments[list(segments)])[:]

    def loss_gradients(self, segments: Sequence[int], states: Tensor) -> Tensor:
        """The gradients of the divergence with respect to the outputs of the last block.

        Args:
            segments: local indices.
            states: outputs of the last block. Both (segments, tokens, width).
        """
        gradients: list[Tensor] = []
        with self.head():
            for row, segment in enumerate(segments):
                target = self.target(segment)
                leaf = states[[row]].detach().requires_grad_()
                with self.rounded_head(), torch.enable_grad():
                    divergence = self.divergence(segment, target, leaf)
                    gradients += torch.autograd.grad(divergence, leaf)
        return torch.cat(gradients)

    def target(self, segment: int) -> Tensor:
        """The logits (tokens, vocabulary) of the dense model for a segment; within `head`."""
        with torch.no_grad():
            return self.logits(self.reference.segments[segment], self.reference.states[segment])

    def divergence(self, segment: int, target: Tensor, states: Tensor) -> Tensor:
        """KL(dense ‖ compressed), summed over the tokens of one segment, in nats; within
        `rounded_head`.

        Args:
            segment: local index.
            target: logits of the dense model.
            states: outputs of the last block, (1, tokens, width).
        """
        logits = self.logits(self.reference.segments[segment], states)
        total: Tensor = Divergence.apply(target, logits)
        return total

    def logits(self, ids: Tensor, states: Tensor) -> Tensor:
        """The logits (tokens, vocabulary) for outputs of the last block, (1, tokens, width)."""
        return logits_of(self.walk.model, self.walk.blocks, self.walk.calls, ids, states)

    @contextmanager
    def head(self, dense: bool = True) -> Iterator[None]:
        """Let the output head of the dense or of the compressed model run."""
        walk = self.walk
        with walk.outside(dense), computing(walk.model, walk.outer(), unpack=False):
            yield

    def rounded_head(self) -> AbstractContextManager[None]:
        """Let the output head of the compressed model run; within `head`."""
        if self.walk.rounded:
            return self.head(dense=False)
        return nullcontext()

    def validate(self) -> float:
        """The mean divergence of a token over the validation segments of all processes, in nats."""
        local = self.world.local(self.reference.validation)
        size = max(BATCH // self.reference.seqlen, 1)
        total = 0.0
        for first in range(0, len(local), size):
            segments = local[first : first + size]
            states = self.entering(segments)
            for block, call in zip(self.blocks, self.calls, strict=True):
                states = BlockGraph(block, call, states).checkpoint()
            with self.head(), torch.no_grad():
                for row, segment in enumerate(segments):
                    target = self.target(segment)
                    with self.rounded_head():
                        total += self.divergence(segment, target, states[[row]]).item()
        tokens = len(self.reference.validation) * self.reference.seqlen
        mean = self.world.total(total, self.reference.segments.device) / tokens
        if mean < 0:  # a divergence of nearly nothing, rounded
            return 0.0
        return mean
