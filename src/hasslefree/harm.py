"""The harm of pruning: how much worse the whole model predicts when one of its layers is pruned and all others are not.

The models, one for each layer, are not run from the first block to the last. Up to the block of its layer each is the
dense model, which runs once for all; from there on it is a stream of hidden states of its own, and all streams go
through a block while it is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.blockwise import Job, each_block, entering
from hasslefree.core.allocation import root_of
from hasslefree.core.gram import Gram, working_dtype
from hasslefree.decompose import solve_layer
from hasslefree.errors import HasslefreeError, ModelError, NonFiniteError
from hasslefree.methods.joint import LOOK
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import dense_weight, replace_module
from hasslefree.models.calibration import gather, groups_by_input, probes, run_block, widest_dtype
from hasslefree.models.calls import BlockCall
from hasslefree.models.logits import divergence, logits_of
from hasslefree.models.streaming import outside
from hasslefree.plan import LayerPlan

T = TypeVar("T")
# What is made of a pruned layer: of its weight, that pruned, H, its plan, and the root of H where it is known.
See = Callable[[Tensor, Tensor, Gram, LayerPlan, Tensor | None], T]


@dataclass(frozen=True)
class Pruned(Generic[T]):
    """A layer pruned alone. seen: what was made of it. states: of the model with it, at the block that was last run."""

    seen: T
    states: Activations


def harms(
    job: Job, calls: list[BlockCall], segments: Tensor, folder: Path, see: See[T]
) -> list[dict[str, tuple[T, float]]]:
    """For each block, by the name of each planned layer: what `see` makes of it, and the harm of pruning it.

    The layer is pruned by its pattern, by ten rounds of `joint`. The harm is the mean over tokens of KL(dense ‖ pruned)
    between the models' predictions, in nats.

    Args:
        segments: of this process. folder: for hidden states on the disk.

    Raises:
        ModelError: the model has no output head, or it does not run without the blocks.
        NonFiniteError: it puts out NaN or Inf with one layer pruned.
    """
    hidden, count = entering(job, segments, folder), own_probes(job, segments)
    check_predictions(job, calls, segments[0], hidden[0])
    found: dict[tuple[int, str], Pruned[T]] = {}
    for index in each_block(job, calls, hidden):
        for layer in found.values():
            run_block(job.blocks.modules[index], calls[index], layer.states)
        own = pruned_alone(job, index, calls[index], hidden, count, see)
        found |= {(index, name): layer for name, layer in own.items()}
    told = divergences(job, calls, segments[:count], hidden, [layer.states for layer in found.values()])
    harm_of: list[dict[str, tuple[T, float]]] = [{} for _ in job.plan]
    for ((index, name), layer), harm in zip(found.items(), told, strict=True):
        if not math.isfinite(harm):
            raise NonFiniteError(
                f"with {job.blocks.prefix(index)}.{name} pruned the model puts out NaN or Inf; try another dtype "
                "(--dtype float32), or --allocate uniform"
            )
        harm_of[index][name] = layer.seen, harm
    return harm_of


def check_predictions(job: Job, calls: list[BlockCall], segment: Tensor, states: Tensor) -> None:
    """Raise a ModelError where the model's predictions cannot be had without running its blocks, before any work."""
    try:
        with job.weights.present(outside(job.model, job.blocks)):
            logits_of(job.model, job.blocks, calls, segment, states)
    except HasslefreeError:
        raise
    except Exception as error:
        raise ModelError(
            f"the output head of {type(job.model).__name__} does not run without the blocks "
            f"({type(error).__name__}: {error}); use --allocate uniform"
        ) from error


def own_probes(job: Job, segments: Tensor) -> int:
    """How many of this process's segments, the first ones, are probes."""
    total = round(job.world.total(len(segments), segments.device))
    return len(job.world.own(range(probes(total, segments.shape[1]))))


def pruned_alone(
    job: Job, index: int, call: BlockCall, hidden: Activations, count: int, see: See[T]
) -> dict[str, Pruned[T]]:
    """The planned layers of a block in the order of the plan, each with what leaves the block for the first segments.

    Args:
        hidden: what enters the block. count: of segments.
    """
    block, prefix, plans = job.blocks.modules[index], job.blocks.prefix(index), job.plan[index]
    found = {}
    for group in groups_by_input(block, call, hidden[0], plans):
        [moments] = gather(block, prefix, call, hidden, [group], add=job.world.add)
        owners = job.world.deal([math.prod(plans[name].shape) for name in group])
        prepared = LOOK.prepare(moments.gram) if job.world.rank in owners else None
        tall = any(plans[name].shape[0] > plans[name].shape[1] for name in group)
        root = root_of(moments.gram) if tall else None
        for name, owner in zip(group, owners, strict=True):
            linear: Any = block.get_submodule(name)
            weight = dense_weight(linear)
            if owner == job.world.rank:
                sparse = solve_layer(weight, moments.gram, LOOK, prepared, plans[name].pattern, 0, 0).sparse
            else:
                sparse = torch.empty_like(weight)
            job.world.spread(sparse, owner)
            replace_module(block, name, PrunedLinear(sparse, linear.bias))
            states = hidden.first(count)
            run_block(block, call, states)
            replace_module(block, name, linear)
            found[name] = Pruned(see(weight, sparse, moments.gram, plans[name], root), states)
    return {name: found[name] for name in plans}


class PrunedLinear(nn.Module):
    """A linear layer for a look: weight (out, in), bias (out,) or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def divergences(
    job: Job, calls: list[BlockCall], segments: Tensor, dense: Activations, streams: list[Activations]
) -> list[float]:
    """The mean over tokens, those of all processes, of KL(dense ‖ stream) between predictions, for each stream.

    Args:
        segments: token ids (segments, tokens). dense, streams: what leaves the last block for them.
    """
    total = torch.zeros(len(streams) + 1, dtype=widest_dtype(dense.device), device=dense.device)
    total[-1] = segments.numel()
    with job.weights.present(outside(job.model, job.blocks)):
        for i, segment in enumerate(segments):
            logits = logits_of(job.model, job.blocks, calls, segment, dense[i])
            wanted = F.log_softmax(logits.to(working_dtype(logits)), -1)
            del logits
            for j, states in enumerate(streams):
                total[j] += divergence(logits_of(job.model, job.blocks, calls, segment, states[i]), wanted)
            del wanted  # before the next: they are large
    job.world.add(total)
    harm: list[float] = (total[:-1] / total[-1]).tolist()
    return harm
