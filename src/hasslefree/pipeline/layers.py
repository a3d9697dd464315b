"""The layers of a block whose inputs are known: decomposed, each process its share, and put in
their place.

A layer belongs to one process, or all processes share its rows."""

import dataclasses
import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hasslefree.checkpoint.entries import entry_of, read_entries
from hasslefree.checkpoint.plugin import empty_layer
from hasslefree.checkpoint.record import LayerRecord
from hasslefree.core.gram import Gram
from hasslefree.core.patterns import of_rows
from hasslefree.core.protocols import Decomposition, Method
from hasslefree.core.rows import WHOLE, Rows
from hasslefree.distributed import World
from hasslefree.errors import HasslefreeError, MemoryShortError, OutputError, option
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Visit
from hasslefree.models.weights import trim
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.planning.plan import LayerPlan, Plan
from hasslefree.progress import Phase
from hasslefree.recipe.resolved import Resolved
from hasslefree.solve.decompose import gathered, solve_layer
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
    shared = shared_layers(task.resolved.method, plans, world.size)
    owners = assign_layers(plans, shared, world.size)
    solved: dict[str, Done] = {}
    for group, gram in zip(groups, grams, strict=True):
        # First those that are shared: what the method caches for this Gram is then the same in all
        # processes.
        names = sorted(group, key=lambda name: name not in shared)
        share = {name: plans[name] for name in names if owners[name] in (None, world.rank)}
        solved |= compress_group(task, share, shared, gram) if share else {}
    done = [install_layer(task, name, owner, solved.get(name)) for name, owner in owners.items()]
    trim()
    return done


def compress_group(task: Task, plans: Plans, shared: Container[str], gram: Gram) -> dict[str, Done]:
    """Decompose layers that share one input, with what depends on its Gram matrix computed once."""
    visit, resolved = task.visit, task.resolved
    start, done = time.perf_counter(), {}
    sites, method = visit.sites(list(plans)), resolved.method
    remarks = () if gram.tokens else (NEVER_ROUTED,)
    try:
        factorising = f"factorise the Gram matrix (XᵀX of the layers' {len(gram.matrix)} inputs)"
        prepared = with_room(lambda: method.prepare(gram), factorising, gram.matrix.device)
        preparing = (time.perf_counter() - start) / len(plans)
        for name, plan in plans.items():
            start = time.perf_counter()
            rows = Rows(task.world, plan.spec.shape[0]) if name in shared else WHOLE
            weight = rows.local(sites[name].weight()).to(plan.dtype)  # it may be `computing`
            solver = with_grid(method, plan.spec.grid)
            if (weights := task.output_weights.get(f"{visit.prefix}.{name}")) is not None:
                solver = Weighted(solver, rows.local(weights))
            result = solve_with_room(
                weight, gram, solver, prepared, plan, resolved.recipe.seed, rows
            )
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


def with_room(
    compute: Callable[[], T], task: str, device: torch.device, remedy: str = "", attempts: int = 2
) -> T:
    """What `compute` returns; where memory is short, once more after emptying torch's cache."""
    for _ in range(attempts):
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            logger.warning("not enough memory to %s: %s", task, error)
        torch.cuda.empty_cache()
    remedies = (
        f"{remedy}{option('activations', 'cpu')}, another method, a larger device, or"
        f" {option('device', 'cpu')}"
    )
    raise MemoryShortError(f"not enough memory on {device} to {task}; use {remedies}")


def solve_with_room(
    weight: Tensor,
    gram: Gram,
    method: Method,
    prepared: Any,
    plan: LayerPlan,
    seed: int,
    rows: Rows = WHOLE,
) -> Decomposition:
    """`solve_layer` with `with_room`. rows: those of the weight, where processes share the
    layer.
    """
    spec, pattern = plan.spec, of_rows(plan.pattern, rows)

    def solve() -> Decomposition:
        result = solve_layer(
            weight, gram, method, prepared, pattern, spec.rank, seed, spec.factor_bits, rows
        )
        return gathered(result, rows)

    layer, remedy, attempts = f"solve a layer of {spec.shape[0]}×{spec.shape[1]}", "", 2
    if rows.size > 1:
        layer += f", of which this process has {len(weight)} rows (it is one of {rows.size})"
        remedy, attempts = "more processes, ", 1
    return with_room(solve, layer, weight.device, remedy, attempts)


def install_layer(task: Task, name: str, owner: int | None, done: Done | None) -> Done:
    """Put a compressed layer in its place, in all processes. done: what its owner has; all do where
    there is none.
    """
    site, world = find_sites(task.visit.block)[name], task.world
    if owner is None:
        assert done is not None
        site.replace(done[0])
        return done
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


def shared_layers(method: Method, plans: Plans, processes: int) -> frozenset[str]:
    """The layers, of those solved at the same time, whose rows the processes share: if large, and
    the method can.
    """
    flagged = World(0, processes).too_large([weight_of(layer) for layer in plans.values()])
    return frozenset(
        name
        for (name, layer), large in zip(plans.items(), flagged, strict=True)
        if large
        and processes > 1
        and layer.spec.shape[0] >= processes
        and method.shares_rows(layer.pattern)
    )


def undivided(method: Method, plan: Plan, processes: int) -> str | None:
    """A remark where the method cannot share rows, so that one process solves each layer; None
    where it can.
    """
    layers = [layer for plans in plan for layer in plans.values()]
    whole = {str(layer.pattern) for layer in layers if not method.shares_rows(layer.pattern)}
    if processes == 1 or not whole:
        return None
    patterns = " and ".join(sorted(whole))
    return (
        f"{type(method).__name__} cannot split a layer of pattern {patterns} between processes:"
        f" each layer is solved by one of the {processes} processes, and the others wait until all"
        " layers of a group are solved"
    )


def weight_of(layer: LayerPlan) -> float:
    """What the cost of a layer is proportional to: every method does products out × in × in most of
    the time.
    """
    out, width = layer.spec.shape
    return out * width**2


def assign_layers(plans: Plans, shared: frozenset[str], processes: int) -> dict[str, int | None]:
    """The rank that solves each layer; None for one that is shared."""
    whole = [name for name in plans if name not in shared]
    owners = World(0, processes).assign([weight_of(plans[name]) for name in whole])
    return dict.fromkeys(plans) | dict(zip(whole, owners, strict=True))
