"""The plan at the start of a compression: the recipe's numbers, or the largest uniform plan in a
size.
"""

import logging
from bisect import bisect_right
from dataclasses import replace
from typing import Any

import torch

from hasslefree.core.factors import check_factor_bits
from hasslefree.core.grids import BITS, RATES
from hasslefree.errors import BudgetError, option
from hasslefree.models.blocks import find_blocks
from hasslefree.models.rules import Selection
from hasslefree.planning.disk import weights_on_disk
from hasslefree.planning.fit import plan_end, plan_layer, with_rank
from hasslefree.planning.plan import LayerPlan, Plan
from hasslefree.planning.selection import select
from hasslefree.recipe.resolve import FIXED_FROM, Resolved, resolve
from hasslefree.solve.methods import with_grid
from hasslefree.units import Size

logger = logging.getLogger(__name__)

# Within a size, ranks beside an S on a grid are multiples of STEP, which suits kernels.
STEP = 8


def plan_of(model: torch.nn.Module, selection: Selection, resolved: Resolved) -> Plan:
    """The first plan of a compression: the recipe's, or the best uniform plan in its size."""
    if resolved.size:
        return uniform_plans(model, selection, resolved)[0]
    return make_plan(selection, resolved)


def select_and_plan(model: torch.nn.Module, resolved: Resolved) -> tuple[Resolved, Selection, Plan]:
    """The recipe, the layers to compress, and the plan at the start of a compression.

    If a size has room for far more than entropy-coded codes take, the recipe gets codes of one
    length, unless it sets the coding.
    """
    blocks = find_blocks(model)
    selection = select(blocks, resolved)
    plan = plan_of(model, selection, resolved)
    highest = (layer.grid is not None and layer.grid.rate == RATES[-1] for layer in plan.layers)
    if not resolved.size or not all(highest):
        return resolved, selection, plan
    unfilled = (
        f"entropy-coded codes take at most {RATES[-1]} bits per weight, which is less than the size"
        f" of {resolved.size_limit}"
    )
    room = layer_room(model, plan, resolved)
    if not resolved.coding_is_open or room * RATES[-1] < plan.size * FIXED_FROM:
        logger.warning(
            "%s: the result will be smaller. For a larger file, use coding fixed", unfilled
        )
        return resolved, selection, plan
    logger.info("%s: coding fixed is used, which has up to %d bits", unfilled, BITS[-1])
    resolved = resolve(replace(resolved, coding="fixed"), with_text=False)
    selection = select(blocks, resolved)
    return resolved, selection, plan_of(model, selection, resolved)


def make_plan(selection: Selection, resolved: Resolved, rank: int | None = None) -> Plan:
    """The pattern and rank of every layer, from shapes alone.

    Args:
        rank: of every layer that is wide enough, within a size; None for that of the recipe.
    """
    blocks: list[dict[str, LayerPlan]] = []
    # Matrices of one kind have one plan: a mixture of experts has thousands of a few shapes.
    known: dict[Any, LayerPlan] = {}
    for index, matrices in enumerate(selection.sites):
        plans: dict[str, LayerPlan] = {}
        for name, matrix in matrices.items():
            # The number of pruned channels depends on the heads of a layer.
            place = (index, name) if resolved.solver.whole_channels else None
            kind = (matrix.shape, matrix.dtype, place)
            if kind not in known:
                fitted = resolved if rank is None else narrowed(resolved, rank, matrix.shape)
                known[kind] = plan_layer(selection.blocks, index, matrix, fitted)
            plans[name] = known[kind]
        blocks.append(plans)
    plan = Plan(blocks, plan_ends(selection, resolved))
    if rank is None:
        check_factor_bits(resolved.factor_bits, max(layer.rank for layer in plan.layers))
    return plan


def plan_ends(selection: Selection, resolved: Resolved) -> dict[str, LayerPlan]:
    """The plans of the embedding and the head, on the grid with bits nearest to the layers'."""
    grid = resolved.solver.grid
    bits = 0 if grid is None else grid.stored_bits
    plans: dict[str, LayerPlan] = {}
    for name, end in selection.ends.items():
        nearest = min(resolved.end_grids, key=lambda allowed: abs(allowed.stored_bits - bits))
        plans[name] = plan_end(end, nearest, resolved)
    return plans


def narrowed(resolved: Resolved, rank: int, shape: tuple[int, int]) -> Resolved:
    """The recipe with a rank, or with the largest rank that a narrower weight (out, in) takes."""
    widest = min(shape)
    if rank > widest:
        step = STEP if resolved.solver.grid else 1
        rank = widest // step * step
    return with_rank(resolved, rank)


def uniform_plans(model: torch.nn.Module, selection: Selection, resolved: Resolved) -> list[Plan]:
    """For each number of bits, the plan with the largest rank in the size, most bits first.

    Raises:
        BudgetError: as for `layer_room`.
    """
    least: list[tuple[Resolved, Plan]] = []
    for grid in resolved.grids or (None,):
        on_grid = replace(resolved, solver=with_grid(resolved.solver, grid))
        least.append((on_grid, make_plan(selection, on_grid, resolved.fixed_rank or 0)))
    room = layer_room(model, least[0][1], resolved)
    plans: list[Plan] = []
    for on_grid, plan in reversed(least):
        if plan.size > room:
            continue
        if resolved.fixed_rank is None:
            plan = largest_ranks(selection, on_grid, room)
        plans.append(plan)
    return plans


def largest_ranks(selection: Selection, resolved: Resolved, room: int) -> Plan:
    """The uniform plan with the largest rank within a number of bytes.

    A matrix that is narrower than the rank gets the largest rank that it allows.
    """
    step = STEP if resolved.solver.grid else 1
    widest = max(min(matrix.shape) for matrices in selection.sites for matrix in matrices.values())
    ranks = range(step, widest + 1, step)

    def size(rank: int) -> int:
        return make_plan(selection, resolved, rank).size

    steps = bisect_right(ranks, room, key=size)
    return make_plan(selection, resolved, steps * step)


def layer_room(model: torch.nn.Module, plan: Plan, resolved: Resolved) -> int:
    """The bytes for all layers: from the recipe's size, or the bytes of the plan.

    Args:
        plan: the smallest plan.

    Raises:
        BudgetError: the size is too small, or no smaller than the dense model.
    """
    size = resolved.size_limit
    if size is None:
        return plan.size
    dense = plan.dense_size
    weights = sum(matrix.dense_parameters for matrix in plan.matrices)
    rest = weights_on_disk(model, plan) - plan.size

    def as_size(taken: int) -> Size:
        """The size in the unit of the recipe if the layers take a number of bytes."""
        if size.in_bits:
            return Size(8 * taken / weights, True)
        return Size(rest + taken)

    room = size.bytes_for(weights) if size.in_bits else int(size.amount) - rest
    if room >= dense:
        raise BudgetError(
            f"the uncompressed model takes {as_size(dense)}, which is already within the size of"
            f" {size}; give a smaller size",
            ("size",),
        )
    if room < plan.size:
        raise too_small(size, as_size(plan.size).rounded_up, plan, resolved)
    return room


def too_small(size: Size, least: str, plan: Plan, resolved: Resolved) -> BudgetError:
    """The error of a size in which the smallest plan does not fit. least: the size of this plan."""
    remedy = f"use {option('size', least)}"
    if plan.size >= plan.dense_size:
        smaller = "use another pattern"
        if resolved.fixed_rank:
            smaller = f"give a smaller {option('rank')}"
        remedy = f"the uncompressed model takes less; {smaller}"
    if resolved.solver.grid is None and resolved.method == "joint":
        remedy += f", or {option('method', 'joint-grid')}, which also quantises S"
    layer = plan.layers[0]
    return BudgetError(
        f"a size of {size} is too small: the least possible with method {resolved.method} is"
        f" {least} ({layer.kind}, rank {layer.rank}); {remedy}",
        ("size",),
    )
