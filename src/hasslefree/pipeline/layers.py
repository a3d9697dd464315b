"""Solve and replace the layers of a block whose inputs are known."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.checkpoint.record import NEVER_ROUTED, LayerRecord
from hasslefree.core.gram import Gram
from hasslefree.distributed import World
from hasslefree.errors import HasslefreeError, MemoryShortError, option
from hasslefree.models.sites import find_site
from hasslefree.models.walk import Visit
from hasslefree.models.weights import trim
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.spec import LayerSpec
from hasslefree.pipeline.job import Job
from hasslefree.planning.plan import LayerPlan
from hasslefree.progress import Phase
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.methods import with_grid
from hasslefree.solve.methods.weighted import Weighted

Plans = Mapping[str, LayerPlan]
# Names of layers that share one input.
Group = list[str]
# A compressed layer and its record.
Done = tuple[SparseLowRankLinear, LayerRecord]


@dataclass(frozen=True)
class Task:
    """One block of a job to compress.

    Args:
        visit: the block, in memory.
        plans: of the layers in the block, after the allocation.
        output_weights: of layers of the model, by full name; see `Weighted`.
        collecting, solving: the phases that count layers.
    """

    job: Job
    visit: Visit
    plans: Plans
    output_weights: Mapping[str, Tensor]
    collecting: Phase
    solving: Phase


def compress_groups(task: Task, groups: list[Group], grams: Sequence[Gram]) -> list[Done]:
    """Decompose and replace the layers of groups; each process solves its share.

    Args:
        grams: of the input of each group.
    """
    world = task.job.world
    plans = {name: task.plans[name] for group in groups for name in group}
    ranks = world.assign([plan.cost for plan in plans.values()])
    owners = dict(zip(plans, ranks, strict=True))
    solved: dict[str, Done] = {}
    for group, gram in zip(groups, grams, strict=True):
        local = {name: plans[name] for name in group if owners[name] == world.rank}
        if local:
            solved.update(compress_group(task, local, gram))
    done = [install_layer(task, name, owner, solved.get(name)) for name, owner in owners.items()]
    trim()
    return done


def compress_group(task: Task, plans: Plans, gram: Gram) -> dict[str, Done]:
    """Decompose layers that share one input; what depends on its Gram matrix is computed once."""
    start = time.perf_counter()
    method = task.job.resolved.solver
    done: dict[str, Done] = {}
    try:
        factorising = f"factorise the Gram matrix (XᵀX of the layers' {len(gram.matrix)} inputs)"
        with memory_errors(factorising, gram.matrix.device):
            prepared = method.prepare(gram)
        preparing = (time.perf_counter() - start) / len(plans)
        for name, plan in plans.items():
            layer, record = compress_layer(task, name, plan, gram, prepared, preparing)
            done[name] = (layer, record)
            task.solving.advance(layer=record)
    except HasslefreeError as error:
        raise error.within(f"{task.visit.prefix}: {', '.join(plans)}") from None
    return done


def compress_layer(
    task: Task, name: str, plan: LayerPlan, gram: Gram, prepared: Any, preparing: float
) -> Done:
    """Decompose one layer.

    Args:
        name: of the layer in its block.
        prepared: the result of the method's `prepare`.
        preparing: the layer's share of the seconds that `prepare` took.
    """
    start = time.perf_counter()
    full_name = f"{task.visit.prefix}.{name}"
    site = find_site(task.visit.block, name)
    weight = site.weight().to(plan.dtype)  # a block that is computing may have another dtype
    solver = with_grid(task.job.resolved.solver, plan.grid)
    weights = task.output_weights.get(full_name)
    if weights is not None:
        solver = Weighted(solver, weights)
    seed = task.job.resolved.seed
    with memory_errors(f"solve a layer of {plan.shape[0]}×{plan.shape[1]}", weight.device):
        result = solve_layer(
            weight, gram, solver, prepared, plan.kept, plan.rank, seed, plan.factor_bits
        )
    layer = SparseLowRankLinear.from_decomposition(result, site.bias, plan.pattern)
    seconds = preparing + time.perf_counter() - start
    record = LayerRecord.of(full_name, layer.spec, result, seconds, layer.stored_bytes)
    if not gram.tokens:
        record = dataclasses.replace(record, remarks=(*record.remarks, NEVER_ROUTED))
    return layer, record


@contextmanager
def memory_errors(task: str, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error of torch into a MemoryShortError that names the task and the
    remedies.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryShortError(
            f"not enough memory on {device} to {task}; use {option('activations', 'cpu')}, another"
            f" method, a larger device, or {option('device', 'cpu')}"
        ) from error


def install_layer(task: Task, name: str, owner: int, done: Done | None) -> Done:
    """Replace a layer of a block with its compressed one, in all processes.

    Args:
        name: of the layer in its block.
        owner, done: as for `share_layer`.
    """
    site = find_site(task.visit.block, name)

    def empty(spec: LayerSpec) -> SparseLowRankLinear:
        # The dtype of the model: a block that is computing may have another.
        dtype = task.plans[name].dtype
        return SparseLowRankLinear(spec, site.bias is not None, dtype, site.parameter.device)

    layer, record = share_layer(task.job.world, owner, done, empty)
    if done is None:
        task.solving.advance(layer=record)
    site.replace(layer)
    return layer, record


def share_layer(
    world: World,
    owner: int,
    done: Done | None,
    empty: Callable[[LayerSpec], SparseLowRankLinear],
) -> Done:
    """Broadcast a compressed layer to all processes.

    Args:
        owner: the rank of the process that has solved the layer.
        done: the layer and its record; None in the other processes.
        empty: creates a layer without values in the other processes.
    """
    if done is None:
        spec, record = world.broadcast(None, owner)
        layer = empty(spec)
    else:
        layer, record = done
        world.broadcast((layer.spec, record), owner)
    for tensor in layer.state_dict().values():
        world.broadcast_(tensor, owner)
    return layer, record
