"""Training: what all compressed layers store, until the model predicts what the dense one does.

Layer by layer, each S + L is fitted alone. Here the values of S or the scales and offsets of its
grid, u, v and the biases of all blocks are trained together (`levers.masters`), with the support
and the codes of S fixed, by Adam on

    mean over tokens of KL(dense ‖ compressed)

between the predictions, on new calibration text as far as there is enough of it; a short text is
read a few times. A step is a forward and a backward pass, block by block; the gradients of a block
are freed before those of the block before it are computed. Where memory is short, only the input of
each block is kept, and the block runs once more in the backward pass, so that one block at a time
has S unpacked and its activations in memory.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from hasslefree.allocate.sensitivity import check_predictions
from hasslefree.checkpoint.record import PredictionRecord
from hasslefree.distributed import ALONE, World
from hasslefree.errors import NonFiniteError, option
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import BATCH, run_block, with_batching
from hasslefree.models.calls import BlockCall
from hasslefree.models.precision import computing, only_trained
from hasslefree.models.probe import logits_of
from hasslefree.models.walk import Walk
from hasslefree.packed.linear import compressed_layers
from hasslefree.progress import PREDICTIONS, REFERENCE
from hasslefree.train.gradients import BlockGraph, Divergence, input_scales
from hasslefree.train.optimizer import Masters, norms

logger = logging.getLogger(__name__)

# Training segments per validation segment.
TRAINING_PER_VALIDATION = 16
# How often a text that is too short is read at most.
MOST_PASSES = 3
# Segments on which the inputs of layers are measured.
MEASURED = 16


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    Args:
        learning_rate: at the peak, times the root mean square of each tensor: a step changes an
            entry by that share of a typical one, whatever the units of the tensor.
        warm_up: the share of the steps over which the rate grows linearly; it then falls along half
            a cosine to zero.
        retreats: if the first validation is no better than before training, training starts over
            with a third of the rate, at most this number of times: the effect of a step on the
            output grows with the
                width of the model.
        batch: tokens per step. validations: how often the model is validated during training.
        betas, epsilon: of Adam. Gradients differ widely in size, so epsilon is tiny.
    """

    learning_rate: float = 0.0015
    warm_up: float = 0.05
    retreats: int = 2
    batch: int = 2048
    validations: int = 4
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-12

    def rate(self, step: float, steps: float) -> float:
        """The share of the peak learning rate in step `step` of `steps`, or as many seconds after
        the start.
        """
        warm = self.warm_up * steps
        if step + 1 < warm:
            return (step + 1) / warm
        progress = (step + 1 - warm) / max(steps - warm, 1)
        return (1 + math.cos(math.pi * min(progress, 1.0))) / 2

    def tokens(self, seqlen: int) -> int:
        """Tokens per step: whole segments, at least one."""
        return max(self.batch // seqlen, 1) * seqlen


@dataclass(frozen=True)
class Reference:
    """The last hidden states of the dense model for the text that the model is trained on.

    Args:
        segments: token ids (samples, tokens) of this process. states: what leaves the last block
            for them.
        total: the number of segments of all processes. tokens: how many the training asks for.
    """

    segments: Tensor
    states: Activations
    total: int
    tokens: int = 0

    @property
    def validation(self) -> range:
        """Global indices of the segments that are held out: the first ones, at least one."""
        return range(self.total - trained_of(self.total))

    @property
    def training(self) -> range:
        """Global indices of the segments to train on."""
        return range(len(self.validation), self.total)

    @property
    def seqlen(self) -> int:
        return self.segments.shape[1]

    @property
    def passes(self) -> int:
        """How often the segments to train on are read, if no deadline says how long."""
        return passes_over(self.total, self.tokens, self.seqlen)


def segments_for(tokens: int, seqlen: int) -> int:
    """How many segments hold this number of training tokens, plus the validation segments."""
    training = math.ceil(tokens / seqlen)
    return training + math.ceil(training / TRAINING_PER_VALIDATION)


def trained_of(segments: int) -> int:
    """How many of these segments are trained on; the others are for validation."""
    return segments * TRAINING_PER_VALIDATION // (TRAINING_PER_VALIDATION + 1)


def passes_over(segments: int, tokens: int, seqlen: int) -> int:
    """How often this number of segments is read, so that training reads about as many tokens as it
    asks for.
    """
    return min(max(round(tokens / (max(trained_of(segments), 1) * seqlen)), 1), MOST_PASSES)


def reference_of(walk: Walk, segments: Tensor, total: int, tokens: int = 0) -> Reference:
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


def train(
    walk: Walk,
    reference: Reference,
    settings: Training,
    restore: Callable[[], None],
    world: World = ALONE,
    optimizer_device: torch.device | None = None,
    keep_graphs: bool = False,
    deadline: float | None = None,
) -> PredictionRecord:
    """Train the surviving values of all blocks in place, so that the model predicts what the dense
    one does.

    Args:
        walk: through the compressed model, all of it in memory. restore: puts its blocks back as
            they are now.
        world: the processes that share the segments as `World.share` does, each with the same
            model.
        optimizer_device: of the masters and the moments of Adam, where Adam also runs; None for
            that of each block.
        keep_graphs: keep all activations of a step for the backward pass, instead of running each
            block again.
        deadline: train until then, by the clock of the phases of `walk`; None for the passes of the
            reference.

    Returns:
        What was done; where the model would be worse on the validation segments, it is left as it
        was.
    """
    steps = math.ceil(
        len(reference.training) * reference.seqlen / settings.tokens(reference.seqlen)
    )
    length, unit = steps * reference.passes, "steps"
    if deadline is not None:
        length, unit = max(round(deadline - walk.phases.clock()), 1), "seconds"
    # Embeddings and head are read once, not at every step.
    with walk.outside(), walk.phases.phase(PREDICTIONS, length, unit) as phase:
        for retreat in range(settings.retreats + 1):
            tried = replace(settings, learning_rate=settings.learning_rate / 3**retreat)
            trainer = Trainer(
                walk, reference, tried, world, optimizer_device, keep_graphs, deadline
            )
            before, history = trainer.train(retreat == settings.retreats, phase.reach)
            tokens = trainer.tokens
            trainer.close()
            del trainer  # before the next one is made: its masters are the largest arrays of all
            # These comparisons are false for NaN.
            improved = history[-1] < before
            if not improved:
                restore()
            if history[0] < before and math.isfinite(history[-1]):
                break
    return PredictionRecord(
        before=before,
        after=history[-1] if improved else before,
        history=[divergence for divergence in history if math.isfinite(divergence)],
        learning_rate=tried.learning_rate,
        tokens=tokens,
    )


class Trainer:
    """A compressed model with the masters of what each of its blocks stores; arguments as for
    `train`.
    """

    def __init__(
        self,
        walk: Walk,
        reference: Reference,
        settings: Training,
        world: World = ALONE,
        optimizer_device: torch.device | None = None,
        keep_graphs: bool = False,
        deadline: float | None = None,
    ):
        self.walk, self.reference, self.settings, self.world = walk, reference, settings, world
        self.keep_graphs, self.deadline, self.tokens = keep_graphs, deadline, 0
        self.blocks, self.calls, self.masters = (
            walk.blocks.modules,
            list[BlockCall](),
            list[Masters](),
        )
        hidden = walk.entering(reference.segments[:MEASURED])
        # A weight of several blocks cannot change while the graph of one of them still needs it.
        uses = Counter(id(weight) for block in self.blocks for weight in norms(block))
        shared = {key for key, count in uses.items() if count > 1}
        for block, call in zip(self.blocks, walk.calls, strict=True):
            call = with_batching(block, call, hidden)
            scales = input_scales(block, call, hidden, world)
            self.calls.append(call)
            rates = settings.learning_rate, settings.betas, settings.epsilon
            self.masters.append(Masters(block, scales, *rates, world, optimizer_device, shared))
            run_block(block, call, hidden)

    def close(self) -> None:
        """Let coded factors be read from their codes again."""
        for block in self.blocks:
            for layer in compressed_layers(block).values():
                layer.wide_factors.clear()

    def train(
        self, last: bool, reached: Callable[[int], None] = lambda done: None
    ) -> tuple[float, list[float]]:
        """The passes over the training segments, or as many as there is time for.

        Args:
            last: continue even if the first validation is no better than before training.
            reached: called after each step with the steps or seconds so far.

        Returns:
            The mean divergence of a token, in nats, before training and at each validation.
        """
        before = self.validate()
        if not math.isfinite(before):
            raise NonFiniteError(
                "the predictions of the compressed model contain NaN or Inf; try another dtype "
                f"({option('dtype', 'float32')})"
            )
        history: list[float] = []
        with ExitStack() as opened:
            for block, masters in zip(self.blocks, self.masters, strict=True):
                opened.enter_context(
                    only_trained(block, [variable.leaf for variable in masters.variables])
                )
            validated = 0
            for batch, done, length in self.batches():
                # The rate is zero one step after the last.
                self.step(self.world.local(batch), self.settings.rate(done - 1, length + 1))
                self.tokens += len(batch) * self.reference.seqlen
                reached(int(done))
                if (quarter := int(done * self.settings.validations / length)) > validated:
                    validated = quarter
                    history.append(self.validate())
                    logger.debug(
                        "%s: %d tokens, KL %.4f (before training %.4f)",
                        PREDICTIONS,
                        self.tokens,
                        history[-1],
                        before,
                    )
                    if not math.isfinite(history[-1]):
                        logger.warning(
                            "%s: the predictions became NaN or Inf at the learning rate %g",
                            PREDICTIONS,
                            self.settings.learning_rate,
                        )
                        break
                    if not last and history[0] >= before:
                        break
        return before, history

    def batches(self) -> Iterator[tuple[Sequence[int], float, float]]:
        """Mini-batches of segments, by their global indices; what is done after each, of how much.

        That is steps without a deadline, and otherwise seconds until then.
        """
        training, size = (
            self.reference.training,
            self.settings.tokens(self.reference.seqlen) // self.reference.seqlen,
        )
        batches = [training[i : i + size] for i in range(0, len(training), size)]
        if self.deadline is None:
            batches *= self.reference.passes
            yield from ((batch, step, len(batches)) for step, batch in enumerate(batches, 1))
            return
        clock, begun = self.walk.phases.clock, self.walk.phases.clock()
        length = max(self.deadline - begun, 1.0)
        for steps, batch in enumerate(cycle(batches)):
            passed = clock() - begun
            # All processes end together; the next step takes as long as those so far.
            done = self.world.broadcast(min(passed + passed / max(steps, 1), length))
            yield batch, done, length
            if done == length:
                return

    def step(self, segments: Sequence[int], rate: float) -> None:
        """Train on some segments, by their local indices. rate: as a share of the peak."""
        inputs: list[Tensor] = []
        graphs: list[BlockGraph] = []
        gradients = torch.empty(0)
        with ExitStack() as opened:
            if segments:
                states = self.entering(segments)
                for index in range(len(self.blocks)):
                    inputs.append(states)
                    if self.keep_graphs:
                        graphs.append(self.graph(index, states, opened))
                        states = graphs[-1].output.detach()
                    else:
                        states = self.output(index, states)
                with self.head():
                    gradients = torch.cat(
                        [self.gradient(i, states[[at]]) for at, i in enumerate(segments)]
                    )
            for index in reversed(range(len(self.blocks))):
                if not segments:
                    self.masters[index].update(rate)
                    continue
                states = inputs.pop()
                graph = graphs.pop() if graphs else self.graph(index, states, opened)
                gradients = graph.backward(gradients)
                self.masters[index].update(rate)
                graph.close()

    def entering(self, segments: Sequence[int]) -> Tensor:
        """What enters the first block for some segments: (segments, tokens, width)."""
        return self.walk.entering(self.reference.segments[list(segments)])[:]

    def graph(self, index: int, states: Tensor, opened: ExitStack) -> BlockGraph:
        """Of states through a block; closed with `opened` at the latest."""
        graph = BlockGraph(self.blocks[index], self.calls[index])
        opened.callback(graph.close)
        graph.run(states)
        return graph

    def output(self, index: int, states: Tensor) -> Tensor:
        """What leaves a block that these states enter: (segments, tokens, width)."""
        with computing(self.blocks[index]), torch.no_grad():
            return self.calls[index].run(self.blocks[index], states)

    def gradient(self, index: int, states: Tensor) -> Tensor:
        """The gradient of `divergence` with respect to the states, both (1, tokens, width); within
        `head`.
        """
        with torch.enable_grad():
            leaf = states.detach().requires_grad_()
            [gradient] = torch.autograd.grad(self.divergence(index, leaf), leaf)
        return gradient

    def divergence(self, index: int, states: Tensor) -> Tensor:
        """KL(dense ‖ compressed), summed over the tokens of one segment, in nats; within `head`.

        Args:
            index: of the segment in this process. states: what leaves the last compressed block,
                (1, tokens, width).
        """
        walk, segment = self.walk, self.reference.segments[index]
        with torch.no_grad():
            target = logits_of(
                walk.model, walk.blocks, walk.calls, segment, self.reference.states[index]
            )
        total: Tensor = Divergence.apply(
            target, logits_of(walk.model, walk.blocks, walk.calls, segment, states)
        )
        return total

    @contextmanager
    def head(self) -> Iterator[None]:
        """Within it, the output head runs."""
        with self.walk.outside(), computing(self.walk.model, self.walk.outer(), unpack=False):
            yield

    def validate(self) -> float:
        """The mean divergence of a token over the validation segments of all processes, in nats."""
        local = self.world.local(self.reference.validation)
        size = max(BATCH // self.reference.seqlen, 1)
        total = 0.0
        for first in range(0, len(local), size):
            segments = local[first : first + size]
            states = self.entering(segments)
            for index in range(len(self.blocks)):
                states = self.output(index, states)
            with self.head(), torch.no_grad():
                total += sum(
                    self.divergence(i, states[[at]]).item() for at, i in enumerate(segments)
                )
        tokens = len(self.reference.validation) * self.reference.seqlen
        return self.world.total(total, self.reference.segments.device) / tokens
