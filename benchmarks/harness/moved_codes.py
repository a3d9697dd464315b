"""Codes that move before the training: how each block is rounded is learnt by signed gradients, as in AutoRound.

Every code gets an offset V in ±½, in units of its scale, that is added before the code is rounded. One block after
another, V takes steps of constant size against the sign of its gradient, so that the outputs of the block, on the
outputs of the compressed blocks before it, come close to those of the dense model (arXiv 2309.05516). Clipping ranges,
which AutoRound learns too, stay: they are scales, and the training that follows moves their units.
"""

from collections.abc import Iterator, Mapping
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
        self.offsets.sub_(size * gradient.sign()).clamp_(-BOUND, BOUND)

    @torch.no_grad()
    def store(self) -> float:
        """Write the codes into the layer; the share of them that moved."""
        codes = self.rounded().round()
        packed = self.layer.spec.pack(codes.to(torch.uint8), self.layer.index)
        self.layer.get_buffer("weight_packed").copy_(packed)
        return (codes != self.codes).float().mean().item()


def outputs(roundings: list[Rounding], block: nn.Module, call: BlockCall, inputs: Tensor) -> Tensor:
    """The outputs of a block with moved codes: (segments, tokens, width)."""
    try:
        for rounding in roundings:
            rounding.layer.merged_weight = rounding.weight()
        return call.run(block, inputs)
    finally:
        for rounding in roundings:
            rounding.layer.merged_weight = None


def error(found: Tensor, wanted: Tensor) -> Tensor:
    """The mean over tokens of ‖found − wanted‖² / ‖wanted‖²: attention sinks, whose outputs are a hundred times as
    large, count no more than other tokens.
    """
    squares = (found - wanted).square().sum(-1)
    return (squares / wanted.square().sum(-1)).mean()


def move_block(
    block: nn.Module, call: BlockCall, weights: Mapping[str, Tensor], hidden: Activations, wanted: Activations,
    iterations: int, generator: torch.Generator,
) -> str:  # fmt: skip
    """Learn how a block is rounded, and store the codes with which its error on the judging segments was least.

    Args:
        weights: the dense ones of its layers, by name.
        hidden, wanted: its inputs, and the dense model's outputs.
    """
    roundings = [Rounding.of(layer, weights[name]) for name, layer in compressed_layers(block).items()]
    learnt_from = torch.tensor([index for index in range(len(hidden)) if index % JUDGES])
    with computing(block, unpack=False):
        before = judged(roundings, block, call, hidden, wanted)
        least = before
        for iteration in range(1, iterations + 1):
            chosen = learnt_from[torch.randperm(len(learnt_from), generator=generator)[:SEGMENTS]].tolist()
            inputs = torch.cat([hidden[index] for index in chosen])
            aims = torch.cat([wanted[index] for index in chosen])
            with torch.enable_grad():
                loss = error(outputs(roundings, block, call, inputs), aims)
                gradients = torch.autograd.grad(loss, [rounding.offsets for rounding in roundings])
            for rounding, gradient in zip(roundings, gradients, strict=True):
                rounding.step(gradient, (1 - (iteration - 1) / iterations) / iterations)
            if iteration % JUDGED and iteration < iterations:
                continue
            after = judged(roundings, block, call, hidden, wanted)
            if after < least:
                least = after
                best = [rounding.offsets.detach().clone() for rounding in roundings]
    if least == before:
        return f"{before:.3g}, not moved ({after:.3g})"
    moved = []
    for rounding, offsets in zip(roundings, best, strict=True):
        rounding.offsets = offsets
        moved.append(rounding.store())
    return f"{before:.3g} to {least:.3g}, {sum(moved) / len(moved):.1%} of the codes moved"


@torch.no_grad()
def judged(
    roundings: list[Rounding], block: nn.Module, call: BlockCall, hidden: Activations, wanted: Activations
) -> float:
    """The mean error of the segments that are not learnt from."""
    judges = range(0, len(hidden), JUDGES)
    found = [error(outputs(roundings, block, call, hidden[index]), wanted[index]).item() for index in judges]
    return sum(found) / len(found)


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
        sites = original.sites(list(compressed_layers(block)))
        weights = {name: site.weight() for name, site in sites.items()}
        run_block(original.block, original.call, wanted)
        original.has_run = True
        call = with_batching(block, plain_call, hidden)
        changed = move_block(block, call, weights, hidden, wanted, iterations, generator)
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
