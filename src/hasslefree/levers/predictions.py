"""Prediction matching: train all compressed blocks together, until the model predicts what the dense one does.

Before, the kept values of each block were fitted to the outputs of layers and blocks. Here all are trained on

    mean over tokens of KL(dense ‖ compressed)

between the predictions, on new calibration text as far as there is enough of it: a few passes over a short text would
overfit it. A step is a forward and a backward pass, block by block; the gradients of a block are freed before those of
the block before it are computed. Where memory is short, only the input of each block is kept, and the block runs once
more in the backward pass, so that one block at a time has S unpacked and its activations. The support of S is fixed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.core.gram import working_dtype
from hasslefree.distributed import ALONE, World
from hasslefree.errors import NonFiniteError, option
from hasslefree.folder.record import PredictionRecord
from hasslefree.levers.masters import (
    SAMPLES,
    Masters,
    Steps,
    input_scales,
    kept_parameters,
    only_trained,
    whole_for_gradients,
)
from hasslefree.levers.sensitivity import check_predictions
from hasslefree.models.activations import Activations
from hasslefree.models.calls import BlockCall
from hasslefree.models.logits import logits_of
from hasslefree.models.moments import BATCH, run_block, takes_batches
from hasslefree.models.precision import computing
from hasslefree.models.walk import Walk
from hasslefree.packed.linear import compressed_layers
from hasslefree.phases import PREDICTIONS, REFERENCE

logger = logging.getLogger(__name__)

# Training segments for each validation segment.
JUDGED = 16
# Entries of logits that are in float32 at a time.
ENTRIES = 2**20


@dataclass(frozen=True, kw_only=True)
class Predictions(Steps):
    """How predictions are matched.

    Args:
        batch: tokens in a step. looks: how often the model is validated in training; the first decides on a retreat.
    """

    learning_rate: float = 0.0015
    retreats: int = 2
    batch: int = 2048
    looks: int = 4

    def tokens(self, seqlen: int) -> int:
        """In a step: whole segments, one at least."""
        return max(self.batch // seqlen, 1) * seqlen


@dataclass(frozen=True)
class Reference:
    """The last hidden states of the dense model for the text that all blocks are trained on.

    Args:
        segments: token ids (samples, tokens) of this process. states: what leaves the last block for them.
        total: the number of segments of all processes. judges: how many of them, the first ones, are held out for
            validation.
    """

    segments: Tensor
    states: Activations
    total: int
    judges: int


def segments_for(tokens: int, seqlen: int) -> int:
    """How many segments make this number of training tokens, the validation segments included."""
    training = math.ceil(tokens / seqlen)
    return training + math.ceil(training / JUDGED)


def judges_of(segments: int) -> int:
    """How many of the segments are for validation: one at least."""
    return segments - segments * JUDGED // (JUDGED + 1)


def reference_of(walk: Walk, segments: Tensor, total: int, judges: int) -> Reference:
    """The reference of segments (samples, tokens) of this process; see `Reference`.

    Raises:
        ModelError: the model has no output head, or one that cannot be run on its own.
    """
    hidden = walk.entering(segments)
    check_predictions(walk, segments, hidden)
    for _ in walk.phases.counted(REFERENCE, walk.visits(hidden), len(walk.blocks.modules), "blocks"):
        pass
    return Reference(segments, hidden, total, judges)


def match_predictions(
    walk: Walk,
    reference: Reference,
    settings: Predictions,
    restore: Callable[[], None],
    world: World = ALONE,
    home: torch.device | None = None,
    keep_graphs: bool = False,
) -> PredictionRecord:
    """Train the kept values of all blocks in place, so that the model predicts what the dense one does.

    Args:
        walk: through the compressed model, all of it in memory. restore: puts its blocks back as they are now.
        world: the processes that share the segments as `World.share` does, each with the same model.
        home: the device of the masters and the moments of Adam, where Adam also runs; None for that of each block.
        keep_graphs: keep all activations of a step for the backward pass, instead of running each block again.

    Returns:
        The record; where the model would be worse on the validation segments, it is left as it was.

    Raises:
        NonFiniteError: the model's predictions are NaN or Inf at first.
    """
    history: list[float] = []
    seqlen = reference.segments.shape[1]
    steps = math.ceil((reference.total - reference.judges) * seqlen / settings.tokens(seqlen))
    with walk.phases.phase(PREDICTIONS, steps, "steps") as phase:
        for retreat in range(settings.retreats + 1):
            tried = replace(settings, learning_rate=settings.learning_rate / 3**retreat)
            trainer = ModelTrainer(walk, reference, tried, world, home, keep_graphs)
            before, history = trainer.train(last=retreat == settings.retreats, stepped=phase.reach)
            del trainer  # before the next one: its masters are the largest arrays that there are
            if history[-1] >= before:
                restore()
            if history[0] < before:
                break
    tokens = (reference.total - reference.judges) * seqlen
    after = min(before, history[-1])
    return PredictionRecord(
        before=before, after=after, history=history, learning_rate=tried.learning_rate, tokens=tokens
    )


class Divergence(torch.autograd.Function):
    """Σ over tokens of KL(softmax(target) ‖ softmax(logits)), a scalar; its gradient goes to the logits alone.

    Both are (tokens, vocabulary). A few rows at a time are in float32 at least.
    """

    @staticmethod
    def forward(ctx: Any, target: Tensor, logits: Tensor) -> Tensor:
        total, gradient = torch.zeros((), dtype=working_dtype(logits), device=logits.device), torch.empty_like(logits)
        rows = max(ENTRIES // logits.shape[-1], 1)
        for wanted, found, slope in zip(target.split(rows), logits.split(rows), gradient.split(rows), strict=True):
            p, q = (finite_log_softmax(each) for each in (wanted, found))
            share = p.exp()
            total += (p.sub_(q) * share).sum()
            slope.copy_(q.exp_().sub_(share))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, Tensor]:
        [gradient] = ctx.saved_tensors
        return None, gradient * outer[0].to(gradient.dtype)


def finite_log_softmax(logits: Tensor) -> Tensor:
    """In the working dtype. A model may rule tokens out, by logits of −∞: their probability is exactly zero."""
    found = F.log_softmax(logits.to(working_dtype(logits)), -1)
    return found.clamp_min_(torch.finfo(found.dtype).min)


def at_once(call: BlockCall, states: Tensor) -> Iterator[Tensor]:
    """States (segments, tokens, width), as many segments at a time as a block takes."""
    yield from states.split(len(states) if call.batched else 1)


class Passage:
    """Hidden states through a block, with its graph for the backward pass. The block is `computing` until `close`."""

    def __init__(self, block: nn.Module, call: BlockCall):
        self.block, self.call = block, call
        self.computing, self.whole = ExitStack(), ExitStack()
        self.leaves: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def run(self, states: Tensor) -> None:
        """states: what enters the block, (segments, tokens, width)."""
        self.computing.enter_context(computing(self.block, unpack=False))
        layers = [layer for layer in compressed_layers(self.block).values() if layer.values.requires_grad]
        self.leaves = [each.detach().requires_grad_() for each in at_once(self.call, states)]
        with torch.enable_grad():
            self.whole.enter_context(whole_for_gradients(layers))
            self.outputs = [self.call.run(self.block, leaf) for leaf in self.leaves]

    @property
    def output(self) -> Tensor:
        """What leaves the block: (segments, tokens, width)."""
        return torch.cat(self.outputs).detach()

    def backward(self, gradients: Tensor) -> Tensor:
        """The gradients with respect to the inputs of the block; those of its kept values are in its parameters.

        Args:
            gradients: with respect to what leaves it. Both (segments, tokens, width).
        """
        for output, gradient in zip(self.outputs, at_once(self.call, gradients), strict=True):
            output.backward(gradient)
        leaves, self.leaves, self.outputs = self.leaves, [], []
        self.whole.close()
        return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])

    def close(self) -> None:
        self.whole.close()
        self.computing.close()


class ModelTrainer:
    """A compressed model, and the masters of what each of its blocks keeps."""

    def __init__(
        self,
        walk: Walk,
        reference: Reference,
        settings: Predictions,
        world: World,
        home: torch.device | None,
        keep_graphs: bool,
    ):
        self.walk, self.reference, self.settings, self.world = walk, reference, settings, world
        self.keep_graphs = keep_graphs
        self.calls: list[BlockCall] = []
        self.masters: list[Masters] = []
        hidden = walk.entering(reference.segments[:SAMPLES])
        for block, call in zip(walk.blocks.modules, walk.calls, strict=True):
            self.calls.append(replace(call, batched=takes_batches(block, call, hidden)))
            self.masters.append(self.masters_of(block, call, hidden, home))
            run_block(block, self.calls[-1], hidden)

    def masters_of(self, block: nn.Module, call: BlockCall, hidden: Activations, home: torch.device | None) -> Masters:
        """The masters of a block that these states enter."""

        def run(chosen: Sequence[int]) -> Tensor:
            return call.run(block, hidden[chosen[0]])

        kept = kept_parameters(block)
        stored = [parameter.dtype for parameter in kept]
        with computing(block):
            scales = input_scales(block, run, range(len(hidden)), self.world)
            return Masters(kept, stored, scales, self.settings, self.world, home)

    def train(self, last: bool, stepped: Callable[[int], None]) -> tuple[float, list[float]]:
        """One pass over the training segments: the divergence before it, and at each look.

        Args:
            last: continue even where the first look is no better than before. stepped: called after each step with its
                number, from 1.

        Raises:
            NonFiniteError: the model's predictions are NaN or Inf at first.
        """
        before = self.judged()
        if not math.isfinite(before):
            raise NonFiniteError(
                "the predictions of the compressed model contain NaN or Inf; try another dtype "
                f"({option('dtype', 'float32')})"
            )
        training, seqlen = range(self.reference.judges, self.reference.total), self.reference.segments.shape[1]
        size = self.settings.tokens(seqlen) // seqlen
        batches = [training[i : i + size] for i in range(0, len(training), size)]
        looks = {math.ceil(len(batches) * look / self.settings.looks) for look in range(1, self.settings.looks + 1)}
        history: list[float] = []
        with ExitStack() as opened:
            for block in self.walk.blocks.modules:
                opened.enter_context(only_trained(block, kept_parameters(block)))
            for step, batch in enumerate(batches):
                # One step more than there are, where the rate is zero.
                self.step(self.world.local(batch), self.settings.rate(step, len(batches) + 1))
                stepped(step + 1)
                if step + 1 in looks:
                    history.append(self.judged())
                    done = f"step {step + 1}/{len(batches)}, KL {history[-1]:.4f} (before training {before:.4f})"
                    logger.info("prediction matching: %s", done)
                    if not last and history[0] >= before:
                        break
        return before, history

    def step(self, chosen: Sequence[int], rate: float) -> None:
        """Train on some segments of this process, by their number in it. rate: over that at the peak."""
        entering: list[Tensor] = []
        passages: list[Passage] = []
        gradients = torch.empty(0)
        with ExitStack() as opened:
            if chosen:
                states = self.entering(chosen)
                for index in range(len(self.masters)):
                    entering.append(states)
                    if self.keep_graphs:
                        passages.append(self.passage(index, states, opened))
                        states = passages[-1].output
                    else:
                        states = self.output(index, states)
                with self.head():
                    gradients = torch.cat([self.gradient(i, states[[at]]) for at, i in enumerate(chosen)])
            for index in reversed(range(len(self.masters))):
                if not chosen:
                    self.masters[index].update(rate)
                    continue
                states = entering.pop()
                passage = passages.pop() if passages else self.passage(index, states, opened)
                gradients = passage.backward(gradients)
                self.masters[index].update(rate)
                passage.close()

    def entering(self, chosen: Sequence[int]) -> Tensor:
        """What enters the first block for some segments: (segments, tokens, width)."""
        return self.walk.entering(self.reference.segments[list(chosen)])[:]

    def passage(self, index: int, states: Tensor, opened: ExitStack) -> Passage:
        """Of states (segments, tokens, width) through a block; closed with `opened` at the latest."""
        passage = Passage(self.walk.blocks.modules[index], self.calls[index])
        opened.callback(passage.close)
        passage.run(states)
        return passage

    def output(self, index: int, states: Tensor) -> Tensor:
        """What leaves a block where these states enter it: (segments, tokens, width)."""
        block, call = self.walk.blocks.modules[index], self.calls[index]
        with computing(block), torch.no_grad():
            return torch.cat([call.run(block, each) for each in at_once(call, states)])

    def gradient(self, index: int, states: Tensor) -> Tensor:
        """Of the divergence of one segment with respect to what leaves the last block, both (1, tokens, width).

        Within `head`.
        """
        with torch.enable_grad():
            leaf = states.detach().requires_grad_()
            [gradient] = torch.autograd.grad(self.divergence(index, leaf), leaf)
        return gradient

    def divergence(self, index: int, states: Tensor) -> Tensor:
        """KL(dense ‖ compressed), summed over the tokens of one segment, in nats; within `head`.

        Args:
            states: what leaves the last compressed block, (1, tokens, width).
        """
        segment = self.reference.segments[index]
        walk = self.walk
        with torch.no_grad():
            target = logits_of(walk.model, walk.blocks, walk.calls, segment, self.reference.states[index])
        found: Tensor = Divergence.apply(target, logits_of(walk.model, walk.blocks, walk.calls, segment, states))
        return found

    @contextmanager
    def head(self) -> Iterator[None]:
        """Within it, the output head runs."""
        with self.walk.outside(), computing(self.walk.model, self.walk.outer(), unpack=False):
            yield

    def judged(self) -> float:
        """The divergence of a token, on average over the judging segments."""
        local = self.world.local(range(self.reference.judges))
        size = max(BATCH // self.reference.segments.shape[1], 1)
        found = 0.0
        for first in range(0, len(local), size):
            chosen = local[first : first + size]
            states = self.entering(chosen)
            for index in range(len(self.masters)):
                states = self.output(index, states)
            with self.head(), torch.no_grad():
                found += sum(self.divergence(i, states[[at]]).item() for at, i in enumerate(chosen))
        tokens = self.reference.judges * self.reference.segments.shape[1]
        return self.world.total(found, self.reference.segments.device) / tokens
