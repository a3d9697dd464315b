"""Training: all compressed blocks together, on the predictions of the dense model.

Layer by layer, each S + L is fitted alone. Here the values of S, or the scales and offsets of its
grid, u, v, the biases and the norms of all blocks are trained together (`train.optimizer`), with
the support and the codes of S fixed, by Adam on

    mean over tokens of KL(dense ‖ compressed)

between the predictions. The text is unused calibration text as far as there is enough; a short text
is read several times. A step is a forward and a backward pass, block by block; the gradients of
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
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import Tensor

from hasslefree.allocate.sensitivity import check_predictions
from hasslefree.checkpoint.record import PredictionRecord
from hasslefree.distributed import ALONE, World
from hasslefree.errors import NonFiniteError, option
from hasslefree.models.calibrate import BATCH, run_block, with_batching
from hasslefree.models.precision import only_trained
from hasslefree.models.walk import Walk
from hasslefree.packed.linear import compressed_layers
from hasslefree.planning.schedule import Training
from hasslefree.progress import PREDICTIONS
from hasslefree.train.gradients import Divergence, TrainedBlock, input_scales
from hasslefree.train.optimizer import BlockOptimizer, norms
from hasslefree.train.reference import Reference

logger = logging.getLogger(__name__)

# Number of segments on which the inputs of layers are measured.
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
    walk.run_dense(hidden)
    return Reference(segments, hidden, total, tokens)


# Maximum divergence at the first validation, relative to the one before training. This validation
# comes near the peak of the learning rate, and the divergence falls most afterwards.
TOLERATED = 1.1


@dataclass
class Attempt:
    """Mean divergences per token during training, in nats. NaN counts as worse.

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
        walk: of the compressed model, which is in memory as a whole.
        world: the processes that share the segments as `World.share` does, each with the same
            model.
        optimizer_device: where the master weights and the moments of Adam are and Adam runs; None
            for the device of each block.
        keep_graphs: keep the activations of all blocks for the backward pass, in place of gradient
            checkpointing.
        deadline: end of training, in seconds of the performance counter; None for the number of
            passes of the reference.
    """

    walk: Walk
    reference: Reference
    settings: Training
    world: World = ALONE
    optimizer_device: torch.device | None = None
    keep_graphs: bool = False
    deadline: float | None = None
    trained: list[TrainedBlock] = field(default_factory=list, init=False)

    def train(self, restore: Callable[[], None]) -> PredictionRecord:
        """Train; start again with a lower learning rate if the first validation is much worse than
        before training.

        Args:
            restore: restores the blocks to their state before training.

        Returns:
            A record of the training. A model that became worse on the validation segments is
            restored.
        """
        phases = self.walk.phases
        if self.deadline is None:
            length = len(self.mini_batches())
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
        """Make the optimizers of the blocks, with this peak learning rate."""
        blocks = self.walk.blocks.modules
        hidden = self.walk.entering(self.reference.segments[:MEASURED])
        # A weight of several blocks cannot change while the graph of one of them still needs it.
        uses = Counter(id(weight) for block in blocks for weight in norms(block))
        shared = {key for key, count in uses.items() if count > 1}
        for block, call in zip(blocks, self.walk.calls, strict=True):
            call = with_batching(block, call, hidden)
            scales = input_scales(block, call, hidden, self.world)
            optimizer = BlockOptimizer(
                block, scales, learning_rate, self.world, self.optimizer_device, shared
            )
            self.trained.append(TrainedBlock(block, call, optimizer))
            run_block(block, call, hidden)

    def close(self) -> None:
        """Free the optimizers, whose arrays are the largest, and let layers read coded factors from
        their codes again.
        """
        for trained in self.trained:
            for layer in compressed_layers(trained.block).values():
                layer.wide_factors.clear()
        self.trained.clear()

    def attempt(self, last: bool, reached: Callable[[int], None]) -> Attempt:
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
            for trained in self.trained:
                leaves = [variable.leaf for variable in trained.optimizer.variables]
                opened.enter_context(only_trained(trained.block, leaves))
            validated = 0
            for batch in self.batches():
                # The rate is zero one step after the last. The time of the first is not known.
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
        """The global indices of the segments of each step of all passes."""
        training = self.reference.training
        size = self.settings.tokens(self.reference.seqlen) // self.reference.seqlen
        batches = [training[first : first + size] for first in range(0, len(training), size)]
        return batches * self.reference.passes

    def batches(self) -> Iterator[Batch]:
        """The mini-batches, counted in steps without a deadline, and in seconds with one."""
        batches = self.mini_batches()
        if self.deadline is None:
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
            for trained in reversed(self.trained):
                trained.optimizer.update(rate)
            return
        with ExitStack() as opened:
            states = self.entering(segments)
            for trained in self.trained:
                opened.callback(trained.close)
                if self.keep_graphs:
                    states = trained.forward(states)
                else:
                    trained.inputs = states
                    states = trained.run(states)
            gradients = self.loss_gradients(segments, states)
            for trained in reversed(self.trained):
                gradients = trained.backward(gradients)
                trained.optimizer.update(rate)
                trained.close()

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
        with self.walk.head(dense=True), torch.enable_grad():
            for row, segment in enumerate(segments):
                leaf = states[[row]].detach().requires_grad_()
                with self.divergence(segment, leaf) as divergence:
                    gradients += torch.autograd.grad(divergence, leaf)
        return torch.cat(gradients)

    @contextmanager
    def divergence(self, segment: int, states: Tensor) -> Iterator[Tensor]:
        """KL(dense ‖ compressed), summed over the tokens of one segment, in nats. Its gradient must
        be computed in this context, which is within `Walk.head` of the dense model.

        Args:
            segment: local index.
            states: outputs of the last block, (1, tokens, width).
        """
        ids = self.reference.segments[segment]
        with torch.no_grad():
            target = self.walk.logits(ids, self.reference.states[segment])
        # Without rounded values the compressed model has the same head.
        with self.walk.head(dense=False) if self.walk.rounded else nullcontext():
            yield Divergence.apply(target, self.walk.logits(ids, states))

    def validate(self) -> float:
        """Mean divergence per token, in nats, on the validation segments of all processes."""
        local = self.world.local(self.reference.validation)
        size = max(BATCH // self.reference.seqlen, 1)
        total = 0.0
        for first in range(0, len(local), size):
            segments = local[first : first + size]
            states = self.entering(segments)
            for trained in self.trained:
                states = trained.run(states)
            with self.walk.head(dense=True), torch.no_grad():
                for row, segment in enumerate(segments):
                    with self.divergence(segment, states[[row]]) as divergence:
                        total += divergence.item()
        tokens = len(self.reference.validation) * self.reference.seqlen
        mean = self.world.total(total, self.reference.segments.device) / tokens
        if mean < 0:  # a divergence of nearly nothing, rounded; NaN stays NaN
            return 0.0
        return mean
