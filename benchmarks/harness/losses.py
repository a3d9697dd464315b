"""Losses of block matching that the library does not offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.levers.matching import Loss, relative_distance
from hasslefree.models.calls import hooks


def block_losses(model: Any, modules: Sequence[nn.Module], segments: Tensor, name: str) -> list[Loss]:
    """The loss of every block by name."""
    if name == "squared":
        return [squared] * len(modules)
    if name == "per token":
        return [relative_distance] * len(modules)
    return [in_metric(g) for g in fisher_metrics(model, modules, segments)]


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Σ over tokens of ‖output − target‖²."""
    return (output - target).square().sum()


def in_metric(metric: Tensor) -> Loss:
    """Σ over tokens of (output − target) G (output − target)ᵀ with G: (width, width)."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        rest = output - target
        return ((rest @ metric) * rest).sum()

    return loss


def fisher_metrics(model: Any, modules: Sequence[nn.Module], segments: Tensor, floor: float = 0.1) -> list[Tensor]:
    """For every block E[g gᵀ], g the gradient of −log p(sampled next token) at its output, in the dense model.

    Scaled to a mean diagonal of one, and mixed with the identity by the share `floor`.
    """
    held: dict[int, Tensor] = {}
    sums: list[Tensor | float] = [0.0] * len(modules)

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            held[index] = output[0] if isinstance(output, tuple) else output
            held[index].retain_grad()

        return hook

    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with hooks(module.register_forward_hook(keep(i)) for i, module in enumerate(modules)):
        for segment in segments:
            logits = model(input_ids=segment[None], use_cache=False).logits[0]
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            F.cross_entropy(logits, drawn, reduction="sum").backward()
            for index, output in held.items():
                g = output.grad.flatten(0, -2)  # type: ignore[union-attr]
                sums[index] = sums[index] + g.T @ g
    model.requires_grad_(True).zero_grad()
    metrics = []
    for total in sums:
        assert isinstance(total, Tensor)
        scaled = total / total.diagonal().mean()
        metrics.append((1 - floor) * scaled + floor * torch.eye(len(scaled)))
    return metrics


def logit_divergence(head: Callable[[Tensor], Tensor]) -> Loss:
    """Σ over tokens of KL(softmax head(target) ‖ softmax head(output)), in nats."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.log_softmax(head(target).float(), -1)
        found = F.log_softmax(head(output).float(), -1)
        return F.kl_div(found, wanted, reduction="sum", log_target=True)

    return loss


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """From the last block's output to the logits, for Llama-like models."""
    norm, linear = model.model.norm, model.lm_head
    return lambda hidden: linear(norm(hidden))
