"""Sensitivity: how much worse the whole model predicts when one of its layers is pruned and all others are not.

The models, one for each layer, are not run from the first block to the last. Up to the block of its layer each is the
dense model, which runs once for all; from there on it is a stream of hidden states of its own, and all streams go
through a block while it is in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.gram import Gram, working_dtype
from hasslefree.errors import HasslefreeError, ModelError, NonFiniteError, option
from hasslefree.levers.ladders import root_of
from hasslefree.models.activations import Activations
from hasslefree.models.distributed import World
from hasslefree.models.logits import divergence, logits_of
from hasslefree.models.moments import gather, groups_by_input, probes, run_block, widest_dtype
from hasslefree.models.sites import PlainLinear
from hasslefree.models.walk import Visit, Walk
from hasslefree.recipe.plan import LayerPlan, Plan
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.methods.joint import LOOK

T = TypeVar("T")
# What is made of a pruned layer: of its weight, that pruned, H, its plan, and the root of H where it is known.
See = Callable[[Tensor, Tensor, Gram, LayerPlan, Tensor | None], T]


@dataclass(frozen=True)
class Alone(Generic[T]):
    """A layer pruned alone. seen: what was made of it. states: of the model with it, at the block that was last run."""

    seen: T
    states: Activations


def sensitivities(
    walk: Walk, plan: Plan, segments: Tensor, world: World, see: See[T]
) -> list[dict[str, tuple[T, float]]]:
    """For each block, by the name of each planned layer: what `see` makes of it, and its sensitivity to pruning.

    The layer is pruned by its pattern, by ten rounds of `joint`. The sensitivity is the mean over tokens of
    KL(dense ‖ pruned) between the models' predictions, in nats.

    Args:
        segments: of this process.

    Raises:
        ModelError: the model has no output head, or it does not run without the blocks.
        NonFiniteError: it returns NaN or Inf with one layer pruned.
    """
    hidden, count = walk.entering(segments), local_probes(segments, world)
    check_predictions(walk, segments[0], hidden[0])
    found: dict[tuple[int, str], Alone[T]] = {}
    for visit in walk.visits(hidden):
        for layer in found.values():
            run_block(visit.block, visit.call, layer.states)
        alone = pruned_alone(visit, plan[visit.index], hidden, count, world, see)
        found |= {(visit.index, name): layer for name, layer in alone.items()}
    measured = divergences(walk, segments[:count], hidden, [layer.states for layer in found.values()], world)
    by_block: list[dict[str, tuple[T, float]]] = [{} for _ in plan]
    for ((index, name), layer), mean in zip(found.items(), measured, strict=True):
        if not math.isfinite(mean):
            raise NonFiniteError(
                f"with {walk.blocks.prefix(index)}.{name} pruned the model puts out NaN or Inf; try another dtype "
                f"({option('dtype', 'float32')}), or {option('allocate', 'uniform')}"
            )
        by_block[index][name] = layer.seen, mean
    return by_block


def check_predictions(walk: Walk, segment: Tensor, states: Tensor) -> None:
    """Raise a ModelError where the model's predictions cannot be had without running its blocks, before any work."""
    try:
        with walk.outside():
            logits_of(walk.model, walk.blocks, walk.calls, segment, states)
    except HasslefreeError:
        raise
    except Exception as error:
        raise ModelError(
            f"the output head of {type(walk.model).__name__} does not run without the blocks "
            f"({type(error).__name__}: {error}); use {option('allocate', 'uniform')}"
        ) from error


def local_probes(segments: Tensor, world: World) -> int:
    """How many of this process's segments, the first ones, are probes."""
    total = round(world.total(len(segments), segments.device))
    return len(world.local(range(probes(total, segments.shape[1]))))


def pruned_alone(
    visit: Visit, plans: Mapping[str, LayerPlan], hidden: Activations, count: int, world: World, see: See[T]
) -> dict[str, Alone[T]]:
    """The planned layers of a block in the order of the plan, each with what leaves the block for the first segments.

    Args:
        hidden: what enters the block. count: of segments.
    """
    block, call, sites = visit.block, visit.call, visit.sites(list(plans))
    found = {}
    for group in groups_by_input(block, call, hidden[0], plans):
        [moments] = gather(block, visit.prefix, call, hidden, [group], add=world.add)
        owners = world.assign([plans[name].spec.dense_parameters for name in group])
        prepared = LOOK.prepare(moments.gram) if world.rank in owners else None
        tall = any(out > width for out, width in (plans[name].spec.shape for name in group))
        root = root_of(moments.gram) if tall else None
        for name, owner in zip(group, owners, strict=True):
            site, weight = sites[name], sites[name].weight()
            if owner == world.rank:
                sparse = solve_layer(weight, moments.gram, LOOK, prepared, plans[name].pattern, 0, 0).sparse
            else:
                sparse = torch.empty_like(weight)
            world.broadcast_(sparse, owner)
            states = hidden.first(count)
            site.replace(PlainLinear(sparse, site.bias))
            run_block(block, call, states)
            site.put_back()
            found[name] = Alone(see(weight, sparse, moments.gram, plans[name], root), states)
    return {name: found[name] for name in plans}


def divergences(
    walk: Walk, segments: Tensor, dense: Activations, streams: list[Activations], world: World
) -> list[float]:
    """The mean over tokens, those of all processes, of KL(dense ‖ stream) between predictions, for each stream.

    Args:
        segments: token ids (segments, tokens). dense, streams: what leaves the last block for them.
    """
    total = torch.zeros(len(streams) + 1, dtype=widest_dtype(dense.device), device=dense.device)
    total[-1] = segments.numel()
    with walk.outside():
        for i, segment in enumerate(segments):
            logits = logits_of(walk.model, walk.blocks, walk.calls, segment, dense[i])
            wanted = F.log_softmax(logits.to(working_dtype(logits)), -1)
            del logits
            for j, states in enumerate(streams):
                total[j] += divergence(logits_of(walk.model, walk.blocks, walk.calls, segment, states[i]), wanted)
            del wanted  # before the next: they are large
    world.add(total)
    means: list[float] = (total[:-1] / total[-1]).tolist()
    return means
