"""Codes that move before the training: how each block is rounded is learnt by signed gradients, as in AutoRound.

Every code gets an offset V in ±½, in units of its scale, that is added before the code is rounded. One block after
another, V takes steps of constant size against the sign of its gradient, so that the outputs of the block, on the
outputs of the compressed blocks before it, come close to those of the dense model (arXiv 2309.05516). Clipping ranges,
which AutoRound learns too, stay: they are scales, and the training that follows moves their units.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness import models
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calibrate import run_block, with_batching
from hasslefree.models.calls import BlockCall
from hasslefree.models.precision import computing
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from hasslefree.train.gradients import merged_weight
from hasslefree.train.trainer import Trainer

BOUND = 0.5
SEGMENTS = 4  # of a step
JUDGES = 8  # one of this many segments is not learnt from, and judges the codes of a block
JUDGED = 10  # after this many steps, and after the last one


@dataclass
class Rounding:
    """How one layer is rounded.

    Args:
        codes: as they were, (out, in).
        entries: the values that are rounded to them, in codes: those of the dense weight, where these are nearer.
        steps: the scale of each entry, (out, in).
        base: S + u v with the codes as they were, (out, in).
        offsets: V, (out, in).
    """

    layer: SparseLowRankLinear
    codes: Tensor
    entries: Tensor
    steps: Tensor
    base: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, layer: SparseLowRankLinear, weight: Tensor) -> "Rounding":
        """That of a layer as it is. weight: the dense one, (out, in)."""
        tensors = layer.tensors()
        codes = layer.codes(tensors).float()
        scales = layer.spec.scales(tensors)
        steps = scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
        base = merged_weight(layer).float()
        entries = codes + ((weight.float() - base) / steps).nan_to_num_(0, 0, 0).clamp_(-0.49, 0.49)
        return cls(layer, codes, entries, steps, base, torch.zeros_like(codes, requires_grad=True))

    def rounded(self) -> Tensor:
        """The codes with the offsets, whose gradients pass the rounding."""
        assert self.layer.spec.grid is not None
        wanted = self.entries + self.offsets
        nearest = wanted.detach().round().clamp_(0, self.layer.spec.grid.top)
        return wanted + (nearest - wanted.detach())

    def weight(self) -> Tensor:
        """S + u v with the moved codes, (out, in)."""
        return self.base + self.steps * (self.rounded() - self.codes)

    @torch.no_grad()
    def step(self, gradient: Tensor, size: float) -> None:
        """Move the offsets by `size` against the signs of their gradient, within ±½."""
        self.offsets.sub_(size * gradient.sign()).clamp_(-BOUND, BOUND)

    @torch.no_grad()
    def store(self) -> float:
        """Write the codes into the layer; the share of them that moved."""
        codes = self.rounded().round()
        packed = self.layer.spec.pack(codes.to(torch.uint8), self.layer.index)
        self.layer.get_buffer("weight_packed").copy_(packed)
        return (codes != self.codes).float().mean().item()


@dataclass(frozen=True)
class MovingBlock:
    """A block whose codes move.

    Args:
        roundings: of its compressed layers.
        hidden: its inputs.
        wanted: the outputs of the dense block on the dense model's states.
    """

    block: nn.Module
    call: BlockCall
    roundings: list[Rounding]
    hidden: Activations
    wanted: Activations

    def error(self, segments: Sequence[int]) -> Tensor:
        """The mean over tokens of ‖found − wanted‖² / ‖wanted‖², a scalar: attention sinks, whose outputs are a hundred
        times as large, count no more than other tokens.
        """
        inputs = torch.cat([self.hidden[segment] for segment in segments])
        wanted = torch.cat([self.wanted[segment] for segment in segments])
        try:
            for rounding in self.roundings:
                rounding.layer.merged_weight = rounding.weight()
            found = self.call.run(self.block, inputs)
        finally:
            for rounding in self.roundings:
                rounding.layer.merged_weight = None
        squares = (found - wanted).square().sum(-1)
        return (squares / wanted.square().sum(-1)).mean()

    @torch.no_grad()
    def judged(self) -> float:
        """The mean error of the segments that are not learnt from."""
        judges = range(0, len(self.hidden), JUDGES)
        return sum(self.error([segment]).item() for segment in judges) / len(judges)

    def step(self, segments: Sequence[int], size: float) -> None:
        """Move all offsets by `size`, so that the error of some segments falls."""
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.error(segments), [each.offsets for each in self.roundings])
        for rounding, gradient in zip(self.roundings, gradients, strict=True):
            rounding.step(gradient, size)

    def learn(self, iterations: int, generator: torch.Generator) -> str:
        """Take steps that shrink to nothing, and store the codes with which the judged error was least.

        Returns:
            What that changed, in words.
        """
        segments = torch.tensor([segment for segment in range(len(self.hidden)) if segment % JUDGES])
        before = self.judged()
        least = before
        best: list[Tensor] = []
        for iteration in range(iterations):
            chosen = torch.randperm(len(segments), generator=generator)[:SEGMENTS]
            self.step(segments[chosen].tolist(), (1 - iteration / iterations) / iterations)
            done = iteration + 1
            if done % JUDGED and done < iterations:
                continue
            after = self.judged()
            if after < least:
                least = after
                best = [rounding.offsets.detach().clone() for rounding in self.roundings]
        if not best:
            return f"{before:.3g}, not moved ({after:.3g})"
        moved = []
        for rounding, offsets in zip(self.roundings, best, strict=True):
            rounding.offsets = offsets
            moved.append(rounding.store())
        return f"{before:.3g} to {least:.3g}, {sum(moved) / len(moved):.1%} of the codes moved"


def move_codes(walk: Walk, dense: Walk, segments: Tensor, iterations: int) -> Iterator[str]:
    """Move the codes of a compressed model in memory, and yield for each block what that changed.

    Args:
        dense: through the dense model.
        segments: (samples, tokens).
    """
    hidden = walk.entering(segments)
    wanted = dense.entering(segments)
    generator = torch.Generator().manual_seed(0)
    blocks = zip(walk.blocks.modules, walk.calls, dense.visits(wanted), strict=True)
    for block, plain_call, original in blocks:
        layers = compressed_layers(block)
        sites = original.sites(list(layers))
        roundings = [Rounding.of(layer, sites[name].weight()) for name, layer in layers.items()]
        run_block(original.block, original.call, wanted)
        original.has_run = True
        call = with_batching(block, plain_call, hidden)
        with computing(block, unpack=False):
            changed = MovingBlock(block, call, roundings, hidden, wanted).learn(iterations, generator)
        run_block(block, call, hidden)
        yield changed


@contextmanager
def codes_move_first(model: str, iterations: int) -> Iterator[None]:
    """Within it, every training moves the codes before, unless there are no iterations. model: the dense one."""
    if not iterations:
        yield
        return
    train = Trainer.train

    def moved_then_trained(trainer: Trainer, restore: Any) -> Any:
        dense: Any = models.loaded(model)
        segments = trainer.reference.segments[list(trainer.reference.training)]
        walk = Walk.open(dense, find_blocks(dense), Weights(dense, dense.device), segments[:1])
        with trainer.walk.outside(dense=True):
            for index, changed in enumerate(move_codes(trainer.walk, walk, segments, iterations)):
                print(f"block {index}: relative error {changed}", flush=True)
        layers = compressed_layers(trainer.walk.model).values()
        codes = {layer: layer.get_buffer("weight_packed").clone() for layer in layers}

        def restored() -> None:
            restore()
            for layer, moved in codes.items():
                layer.get_buffer("weight_packed").copy_(moved)

        return train(trainer, restored)

    Trainer.train = moved_then_trained  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.train = train  # type: ignore[method-assign]
