"""The layers of a block whose inputs are known: decomposed, each by one process, and put in
their place.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hasslefree.checkpoint.entries import entry_of, read_entries
from hasslefree.checkpoint.plugin import empty_layer
from hasslefree.checkpoint.record import LayerRecord
from hasslefree.core.gram import Gram
from hasslefree.core.protocols import Decomposition, Method
from hasslefree.distributed import World
from hasslefree.errors import HasslefreeError, MemoryShortError, OutputError, option
from hasslefree.models.sites import find_site
from hasslefree.models.walk import Visit
from hasslefree.models.weights import trim
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.planning.plan import LayerPlan
from hasslefree.progress import Phase
from hasslefree.recipe.resolve import Resolved
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.methods import with_grid
from hasslefree.solve.methods.weighted import Weighted

logger = logging.getLogger(__name__)

T = TypeVar("T")
# The remark on a layer of an expert that no calibration token was routed to.
NEVER_ROUTED = (
    "no calibration token was routed to this expert: it was fitted without inputs (H = I)"
)

Plans = Mapping[str, LayerPlan]
# A layer that was compressed, and its report.
Done = tuple[SparseLowRankLinear, LayerRecord]


@dataclass(frozen=True)
class Task:
    """A block to compress, the plans of its layers, what takes each record, and the phases that
    count the layers.

    output_weights: of layers of the model, by their full names; see `Weighted`.
    """

    visit: Visit
    plans: Plans
    output_weights: Mapping[str, Tensor]
    resolved: Resolved
    world: World
    report_layer: Callable[[LayerRecord], None]
    collecting: Phase
    solving: Phase


def compress_groups(task: Task, groups: list[list[str]], grams: Sequence[Gram]) -> list[Done]:
    """Decompose and replace the layers of groups, given the Gram matrices of their inputs; each
    process its share.
    """
    world = task.world
    plans = {name: task.plans[name] for group in groups for name in group}
    owners = assign_layers(plans, world.size)
    solved: dict[str, Done] = {}
    for group, gram in zip(groups, grams, strict=True):
        local = {name: plans[name] for name in group if owners[name] == world.rank}
        if local:
            solved.update(compress_group(task, local, gram))
    done = [install_layer(task, name, owner, solved.get(name)) for name, owner in owners.items()]
    trim()
    return done


def compress_group(task: Task, plans: Plans, gram: Gram) -> dict[str, Done]:
    """Decompose layers that share one input, with what depends on its Gram matrix computed once."""
    visit, resolved = task.visit, task.resolved
    start, done = time.perf_counter(), {}
    sites, method = visit.sites(list(plans)), resolved.solver
    remarks = () if gram.tokens else (NEVER_ROUTED,)
    try:
        factorising = f"factorise the Gram matrix (XᵀX of the layers' {len(gram.matrix)} inputs)"
        prepared = with_room(lambda: method.prepare(gram), factorising, gram.matrix.device)
        preparing = (time.perf_counter() - start) / len(plans)
        for name, plan in plans.items():
            start = time.perf_counter()
            weight = sites[name].weight().to(plan.dtype)  # it may be `computing`
            solver = with_grid(method, plan.spec.grid)
            if (weights := task.output_weights.get(f"{visit.prefix}.{name}")) is not None:
                solver = Weighted(solver, weights)
            result = solve_with_room(weight, gram, solver, prepared, plan, resolved.seed)
            layer = SparseLowRankLinear.from_decomposition(
                result, sites[name].bias, plan.spec.pattern
            )
            seconds = time.perf_counter() - start + preparing
            report = LayerRecord.of(
                f"{visit.prefix}.{name}", layer.spec, result, seconds, layer.stored_bytes
            )
            report = dataclasses.replace(report, remarks=(*report.remarks, *remarks))
            done[name] = layer, report
            task.report_layer(report)
    except OutputError:
        raise  # `task.report_layer` raises that of the block before, which is written meanwhile
    except HasslefreeError as error:
        raise error.within(f"{visit.prefix}: {', '.join(plans)}") from None
    return done


def with_room(compute: Callable[[], T], task: str, device: torch.device) -> T:
    """What `compute` returns; where memory is short, once more after emptying torch's cache."""
    for _ in range(2):
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            logger.warning("not enough memory to %s: %s", task, error)
        torch.cuda.empty_cache()
    raise MemoryShortError(
        f"not enough memory on {device} to {task}; use {option('activations', 'cpu')}, another"
        f" method, a larger device, or {option('device', 'cpu')}"
    )


def solve_with_room(
    weight: Tensor, gram: Gram, method: Method, prepared: Any, plan: LayerPlan, seed: int
) -> Decomposition:
    """`solve_layer` with `with_room`."""
    spec = plan.spec

    def solve() -> Decomposition:
        return solve_layer(
            weight, gram, method, prepared, plan.pattern, spec.rank, seed, spec.factor_bits
        )

    return with_room(solve, f"solve a layer of {spec.shape[0]}×{spec.shape[1]}", weight.device)


def install_layer(task: Task, name: str, owner: int, done: Done | None) -> Done:
    """Put a compressed layer in its place, in all processes. done: what its owner has; None in the
    other processes.
    """
    site, world = find_site(task.visit.block, name), task.world
    entry, report = world.broadcast((entry_of(done[0]), done[1]) if done else None, owner)
    if done is None:
        layer = empty_layer(site, report.name, read_entries({report.name: entry})[report.name])
        task.report_layer(report)
    else:
        layer = done[0]
    for tensor in layer.state_dict().values():
        world.broadcast_(tensor, owner)
    site.replace(layer)
    return layer, report


def relative_cost(layer: LayerPlan) -> float:
    """What the cost of a layer is proportional to: every method does products out × in × in most of
    the time.
    """
    out, width = layer.spec.shape
    return out * width**2


def assign_layers(plans: Plans, processes: int) -> dict[str, int]:
    """The rank that solves each layer."""
    owners = World(0, processes).assign([relative_cost(plan) for plan in plans.values()])
    return dict(zip(plans, owners, strict=True))
