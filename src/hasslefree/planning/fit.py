"""Fit the recipe to one matrix: its pattern, rank and grid."""

from collections.abc import Iterable
from dataclasses import replace

from hasslefree.core.budgets import Budget
from hasslefree.core.grids import Grid
from hasslefree.errors import GridError, HasslefreeError, option
from hasslefree.models.blocks import Blocks, head_unit
from hasslefree.models.ends import End
from hasslefree.models.rules import Matrix
from hasslefree.planning.plan import LayerPlan
from hasslefree.recipe.engines import ENGINES, GROUP, type_like
from hasslefree.recipe.resolve import Resolved, takes_types

# The smallest group that a grid gets if the default does not divide the inputs of a layer.
SMALLEST_GROUP = 16


def plan_layer(blocks: Blocks, index: int, matrix: Matrix, resolved: Resolved) -> LayerPlan:
    """The plan of a matrix of one block.

    Raises:
        HasslefreeError: the recipe does not fit it.
    """
    shape = matrix.shape
    method = resolved.solver
    try:
        unit = head_unit(blocks.modules[index], matrix.name) if method.whole_channels else 1
        pattern, rank = resolved.budget.resolve(*shape, unit)
        method.check(rank)
        method.check_pattern(pattern)
        grid = method.grid
        if grid is not None:
            grid = fitted_grid(grid, resolved, shape[1])
            grid.check(shape, pattern)
    except HasslefreeError as error:
        raise error.within(f"{blocks.prefix(index)}.{matrix.name}") from None
    return LayerPlan.of(shape, pattern, rank, matrix.dtype, grid, resolved.factor_bits)


def plan_end(end: End, grid: Grid, resolved: Resolved) -> LayerPlan:
    """The plan of an embedding or a head on a grid. Raises a GridError if its groups do not fit."""
    fitted = fitted_grid(grid, resolved, end.shape[1])
    fitted.check(end.shape)
    pattern, rank = Budget("dense", rank=0).resolve(*end.shape)
    return LayerPlan.of(end.shape, pattern, rank, end.dtype, fitted)


def fitted_grid(grid: Grid, resolved: Resolved, width: int) -> Grid:
    """The grid for a weight with `width` inputs: a type of llama.cpp, or the grid, with another
    group if the default does not divide the inputs.

    The other group is the next smaller one that divides them, or else the next larger; with an
    engine, the largest of its groups that does.

    Raises:
        GridError: the engine has no groups that fit.
    """
    if no_engine_group(width, resolved):
        raise GridError(
            f"{resolved.engine} needs a multiple of {GROUP} inputs, and the layer has {width};"
            f" leave out {option('engine')}"
        )
    if takes_types(resolved):
        return type_like(grid, width)
    if grid.group is None or width % grid.group == 0 or not group_is_open(resolved):
        return grid
    groups: Iterable[int] = (
        *range(grid.group, SMALLEST_GROUP - 1, -1),
        *range(grid.group, width + 1),
    )
    if resolved.engine is not None:
        groups = ENGINES[resolved.engine].groups
    for group in groups:
        if width % group == 0:
            return replace(grid, group=group)
    return grid


def no_engine_group(width: int, resolved: Resolved) -> bool:
    """Return True if the recipe names an engine without groups for rows of `width` inputs."""
    return resolved.engine is not None and width % GROUP != 0


def group_is_open(resolved: Resolved) -> bool:
    """Return True if the group size is the default: a layer may then get another."""
    if resolved.engine is None:
        return resolved.group_size is None
    return resolved.group_size == ENGINES[resolved.engine].group


def with_rank(resolved: Resolved, rank: int) -> Resolved:
    """The recipe with another rank."""
    budget = replace(resolved.budget, rank=rank)
    return replace(resolved, budget=budget)
