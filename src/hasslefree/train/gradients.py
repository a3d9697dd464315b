"""Gradients of training: of the divergence of predictions, and through one compressed block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.core.gram import working_dtype
from hasslefree.core.predictions import ENTRIES, finite_log_softmax
from hasslefree.distributed import World
from hasslefree.models.activations import Activations
from hasslefree.models.calls import BlockCall, hooks
from hasslefree.models.precision import computing
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from hasslefree.train.optimizer import BlockOptimizer

# Minimum of D, relative to the root mean square of all inputs of the layer.
LEAST_SCALE = 1e-3


class Divergence(torch.autograd.Function):
    """Σ over tokens of KL(softmax(target) ‖ softmax(logits)), a scalar, with gradients for the
    logits only.

    Both are (tokens, vocabulary). Only a few rows at a time are converted to float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        target: Tensor,
        logits: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=working_dtype(logits), device=logits.device)
        gradient = torch.empty_like(logits)
        rows = max(ENTRIES // logits.shape[-1], 1)
        for wanted, predicted, slope in zip(
            target.split(rows), logits.split(rows), gradient.split(rows), strict=True
        ):
            p = finite_log_softmax(wanted)
            q = finite_log_softmax(predicted)
            share = p.exp()
            total += (p.sub_(q) * share).sum()
            slope.copy_(q.exp_().sub_(share))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[None, Tensor]:
        [gradient] = ctx.saved_tensors
        return None, gradient * outer[0].to(gradient.dtype)


@dataclass
class TrainedBlock:
    """A block in training, which keeps its inputs from the forward to the backward pass of a step.

    Args:
        call: the arguments with which the model calls the block.
        optimizer: updates the trained tensors of the block.
        inputs, outputs: (segments, tokens, width); None outside a step. The outputs hold the
            activations of the block.
    """

    block: nn.Module
    call: BlockCall
    optimizer: BlockOptimizer
    inputs: Tensor | None = None
    outputs: Tensor | None = None
    computing: ExitStack = field(default_factory=ExitStack)

    def run(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the block, (segments, tokens, width), and keep no activations."""
        with computing(self.block), torch.no_grad():
            return self.call.run(self.block, inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of the block, (segments, tokens, width), and keep its activations.

        The block is `computing` until `close`.
        """
        self.inputs = inputs.detach().requires_grad_()
        self.computing.enter_context(computing(self.block, unpack=False))
        with torch.enable_grad(), merged(self.block):
            self.outputs = self.call.run(self.block, self.inputs)
        return self.outputs.detach()

    def backward(self, gradients: Tensor) -> Tensor:
        """Return the gradients with respect to the inputs; those of the parameters go to `grad`.

        Args:
            gradients: with respect to the outputs. Both (segments, tokens, width).
        """
        assert self.inputs is not None
        if self.outputs is None:
            self.forward(self.inputs)
        assert self.outputs is not None
        self.outputs.backward(gradients)
        self.outputs = None
        if self.inputs.grad is None:
            return torch.zeros_like(self.inputs)
        return self.inputs.grad

    def close(self) -> None:
        """Free the inputs and the activations, and end `computing`."""
        self.inputs = None
        self.outputs = None
        self.computing.close()


def input_scales(
    block: nn.Module, call: BlockCall, hidden: Activations, world: World
) -> dict[SparseLowRankLinear, Tensor]:
    """D, (in,), of every compressed layer: the root mean square of each input, relative to that of
    all inputs.
    """
    layers = list(compressed_layers(block).values())
    squares = {
        layer: torch.zeros(layer.in_features, device=layer.weight.device) for layer in layers
    }

    def add_squares(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        squares[layer].add_(args[0].flatten(0, -2).float().square().sum(0))  # type: ignore[index]

    watching = hooks(layer.register_forward_pre_hook(add_squares) for layer in layers)
    with computing(block), watching, torch.no_grad():
        for index in range(len(hidden)):
            call.run(block, hidden[index])
    for total in squares.values():
        world.add(total)
        mean = total.mean().clamp_min(torch.finfo(total.dtype).tiny)
        total.div_(mean).sqrt_().clamp_min_(LEAST_SCALE)
    return squares


@contextmanager
def merged(block: nn.Module) -> Iterator[None]:
    """Let the trained layers of a block multiply by one matrix, S + u v, within the context."""
    layers = [layer for layer in compressed_layers(block).values() if layer.weight.requires_grad]
    try:
        for layer in layers:
            layer.merged_weight = layer.unpacked()
            factors = layer.factors()
            if factors is not None:
                layer.merged_weight = torch.addmm(layer.merged_weight, *factors)
        yield
    finally:
        for layer in layers:
            layer.merged_weight = None
