"""The plan of every layer, decided and checked before the first layer is changed: by a budget, or
within a size.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hasslefree.core.budgets import Budget
from hasslefree.core.factors import check_factor_bits
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method
from hasslefree.errors import (
    BudgetError,
    GridError,
    HasslefreeError,
    PatternError,
    option,
)
from hasslefree.models.blocks import Blocks, head_unit
from hasslefree.models.rules import Matrix, Selection, select_sites
from hasslefree.packed.spec import LayerSpec
from hasslefree.recipe.resolve import Resolved
from hasslefree.solve.methods import with_grid
from hasslefree.units import Size

# Ranks within a size are multiples of STEP where S is on a grid, which suits kernels.
STEP = 8
# Matrices that hold at most this share of the weights may be too thin for the recipe.
THIN_SHARE = 0.05
# The smallest group that a grid gets where the default does not divide the inputs of a layer.
SMALLEST_GROUP = 16
# Bytes for what OUT holds besides weights: the tokenizer, the reports, the model card.
ROOM = 50_000_000


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer. pattern: with its exact count. dtype: of the model."""

    spec: LayerSpec
    pattern: Pattern
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The largest size of its weight in the file: zeros among the kept entries are not
        stored.
        """
        return self.spec.bytes(self.dtype)

    @property
    def dense_bytes(self) -> int:
        """The size of its weight before."""
        return self.spec.dense_bytes(self.dtype)

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        pattern: Pattern,
        rank: int,
        dtype: torch.dtype,
        grid: Grid | None = None,
        factor_bits: int | None = None,
    ) -> "LayerPlan":
        """The plan of a weight (out, in). factor_bits: without effect at rank 0."""
        return cls(
            LayerSpec(str(pattern), shape, rank, pattern.kept(shape), grid, factor_bits),
            pattern,
            dtype,
        )


def relative_cost(layer: LayerPlan) -> float:
    """A number to which the time of a layer is proportional: out · in².

    Every method spends most of its time on products out × in × in.
    """
    out, width = layer.spec.shape
    return out * width**2


# For every block: the name of a layer in it → its plan.
Plan = list[dict[str, LayerPlan]]


def select(blocks: Blocks, resolved: Resolved) -> Selection:
    """Choose the matrices to compress; a thin one that cannot take the recipe stays dense.

    Without this rule, one matrix of 4×4 would decide for the whole model.

    Raises:
        BudgetError, PatternError, GridError: the recipe does not fit matrices that hold more than
            `THIN_SHARE` of the weights.
        ModelError: as for `select_sites`.
    """
    selection = select_sites(blocks, resolved.leave_dense)
    sites: list[dict[str, Matrix]] = []
    dense = dict(selection.dense)
    misfits: list[tuple[Matrix, HasslefreeError]] = []
    weights = 0
    for index, matrices in enumerate(selection.sites):
        sites.append({})
        for name, matrix in matrices.items():
            weights += math.prod(matrix.shape)
            error = misfit(matrix, resolved)
            if error is None:
                sites[index][name] = matrix
                continue
            full_name = f"{blocks.prefix(index)}.{name}"
            misfits.append((matrix, error.within(full_name)))
            dense[full_name] = short_reason(error, matrix, resolved)
    if sum(math.prod(matrix.shape) for matrix, _ in misfits) > THIN_SHARE * weights:
        _, error = min(misfits, key=lambda found: min(found[0].shape))
        raise error
    return Selection(blocks, tuple(sites), dense)


def misfit(matrix: Matrix, resolved: Resolved) -> HasslefreeError | None:
    """The error that the recipe's rank, pattern or grid is for a matrix, or None."""
    narrow = min(matrix.shape)
    budget = resolved.budget
    if resolved.size:
        budget = dataclasses.replace(budget, rank=0)
    rank = budget.rank or 0
    if rank > narrow:
        out, width = matrix.shape
        return BudgetError(
            f"rank {rank} is larger than the narrowest weight ({out}×{width}); use"
            f" {option('rank', narrow)} or less"
        )
    try:
        pattern, _ = budget.resolve(*matrix.shape)
        grid = resolved.solver.grid
        if grid is not None:
            grid = fitted_grid(grid, matrix.shape, has_free_group(resolved)) or grid
            grid.check(matrix.shape, pattern)
    except (PatternError, GridError) as error:
        return error
    return None


def short_reason(error: HasslefreeError, matrix: Matrix, resolved: Resolved) -> str:
    """Why a matrix stays dense, in a few words."""
    if isinstance(error, BudgetError):
        return f"narrower than rank {resolved.budget.rank}"
    thing = "pattern" if isinstance(error, PatternError) else "group size"
    return f"the {thing} does not fit its {matrix.shape[1]} inputs"


def has_free_group(resolved: Resolved) -> bool:
    """Say whether neither the user nor an engine has set the group size."""
    return resolved.group_size is None and resolved.engine is None


def fitted_grid(grid: Grid, shape: tuple[int, int], free_group: bool) -> Grid | None:
    """The grid for a weight, with a smaller group if it may choose one; None if none fits.

    Args:
        shape: (out, in).
        free_group: the group size may differ from the grid's.
    """
    width = shape[1]
    if grid.group is None or width % grid.group == 0:
        return grid
    if not free_group:
        return None
    for group in range(grid.group - 1, SMALLEST_GROUP - 1, -1):
        if width % group == 0:
            return dataclasses.replace(grid, group=group)
    return None


def make_plan(selection: Selection, resolved: Resolved) -> Plan:
    """The pattern and rank of every layer, from shapes alone."""
    bits = resolved.factor_bits
    free_group = has_free_group(resolved)
    plan: Plan = []
    for index, matrices in enumerate(selection.sites):
        budget = resolved.budget
        solver = resolved.solver
        plan.append(plan_block(selection.blocks, index, matrices, budget, solver, bits, free_group))
    ranks = [layer.spec.rank for plans in plan for layer in plans.values()]
    check_factor_bits(bits, max(ranks, default=None))
    return plan


def plan_of(model: torch.nn.Module, selection: Selection, resolved: Resolved) -> Plan:
    """The plan with which a compression begins.

    It is that of the recipe, or the best uniform one within its size.
    """
    if resolved.size:
        return uniform_plans(model, selection, resolved)[0]
    return make_plan(selection, resolved)


def uniform_plans(model: torch.nn.Module, selection: Selection, resolved: Resolved) -> list[Plan]:
    """For each number of bits, the plan with the largest rank in the size, most bits first.

    Raises as `layer_room`.
    """
    grids: list[Grid | None] = list(resolved.grids) or [None]
    first_rank = resolved.fixed_rank or 0
    least = {grid: uniform_plan(selection, resolved, grid, first_rank) for grid in grids}
    room = layer_room(model, least[grids[0]], resolved)
    plans: list[Plan] = []
    for grid in reversed(grids):
        plan = least[grid]
        if bytes_of(plan) > room:
            continue
        if resolved.fixed_rank is None:
            plan = largest_ranks(selection, resolved, grid, room)
        plans.append(plan)
    return plans


def largest_ranks(selection: Selection, resolved: Resolved, grid: Grid | None, room: int) -> Plan:
    """The uniform plan with the largest rank within a number of bytes.

    A matrix that is narrower than the rank gets the largest rank that it allows.
    """
    step = STEP if grid else 1
    shapes = [matrix.shape for matrices in selection.sites for matrix in matrices.values()]
    fits = 0
    too_many = max(min(shape) for shape in shapes) // step + 1
    while too_many - fits > 1:
        steps = (fits + too_many) // 2
        if bytes_of(uniform_plan(selection, resolved, grid, steps * step)) <= room:
            fits = steps
        else:
            too_many = steps
    return uniform_plan(selection, resolved, grid, fits * step)


def uniform_plan(selection: Selection, resolved: Resolved, grid: Grid | None, rank: int) -> Plan:
    """The plan of the recipe with this grid, and this rank in every layer that is wide enough."""
    solver = with_grid(resolved.solver, grid)
    step = STEP if grid else 1
    plan: Plan = []
    for index, matrices in enumerate(selection.sites):
        plan.append({})
        for name, matrix in matrices.items():
            most = min(matrix.shape)
            fitted = rank if rank <= most else most // step * step
            budget = dataclasses.replace(resolved.budget, rank=fitted)
            bits = resolved.factor_bits if fitted else None
            one = {name: matrix}
            free_group = has_free_group(resolved)
            plan[index] |= plan_block(
                selection.blocks, index, one, budget, solver, bits, free_group
            )
    return plan


def bytes_of(plan: Plan) -> int:
    """The size of all planned layers."""
    return sum(layer.bytes for plans in plan for layer in plans.values())


def layer_room(model: torch.nn.Module, plan: Plan, resolved: Resolved) -> int:
    """The bytes for all layers: those of the recipe's size, or those of the plan.

    Args:
        plan: the smallest one.

    Raises:
        BudgetError: the size is too small, or no smaller than the dense model.
    """
    size = resolved.size_limit
    used = bytes_of(plan)
    if size is None:
        return used
    layers = [layer for plans in plan for layer in plans.values()]
    dense = sum(layer.dense_bytes for layer in layers)
    weights = sum(layer.spec.dense_parameters for layer in layers)
    rest = weights_on_disk(model, []) - dense

    def as_size(taken: int) -> Size:
        """The size of the user's kind, if the layers take a number of bytes."""
        if size.in_bits:
            return Size(8 * taken / weights, True)
        return Size(rest + taken)

    room = int(size.amount * weights / 8) if size.in_bits else int(size.amount) - rest
    if room >= dense:
        raise BudgetError(
            f"the uncompressed model takes {as_size(dense)}, which is already within the size of"
            f" {size}; give a smaller size",
            ("size",),
        )
    if room < used:
        least = as_size(used).rounded_up
        raise BudgetError(
            f"a size of {size} is too small: the least possible with method"
            f" {resolved.method} is {least} ({layers[0].spec.kind}, rank"
            f" {layers[0].spec.rank}); use {option('size', least)}",
            ("size",),
        )
    return room


def plan_block(
    blocks: Blocks,
    index: int,
    matrices: Mapping[str, Matrix],
    budget: Budget,
    method: Method,
    factor_bits: int | None,
    free_group: bool = False,
) -> dict[str, LayerPlan]:
    """The plans of the matrices of one block, by their names in it.

    Args:
        budget: of each layer.
        free_group: see `fitted_grid`.
    """
    plans = {}
    for name, matrix in matrices.items():
        shape = matrix.shape
        try:
            unit = head_unit(blocks.modules[index], name) if method.whole_channels else 1
            pattern, rank = budget.resolve(*shape, unit)
            method.check(rank)
            method.check_pattern(pattern)
            grid = method.grid
            if grid is not None:
                grid = fitted_grid(grid, shape, free_group) or grid
                grid.check(shape, pattern)
        except HasslefreeError as error:
            raise error.within(f"{blocks.prefix(index)}.{name}") from None
        plans[name] = LayerPlan.of(shape, pattern, rank, matrix.dtype, grid, factor_bits)
    return plans


def digest(plan: Plan) -> str:
    """CRC-32 of every layer's rank, non-zeros and grid."""
    layers = [
        (
            name,
            layer.spec.rank,
            layer.spec.nonzeros,
            *([str(layer.spec.grid)] if layer.spec.grid else []),
        )
        for plans in plan
        for name, layer in plans.items()
    ]
    return f"{zlib.crc32(repr(layers).encode()):08x}"


def bytes_on_disk(model: torch.nn.Module, plan: Plan) -> int:
    """The size of the folder: what stays dense, the packed layers, and room for the rest."""
    return ROOM + weights_on_disk(model, plan)


def weights_on_disk(model: torch.nn.Module, plan: Plan) -> int:
    """The size of all weights: what stays dense, and the packed layers."""
    dense = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return dense + sum(
        layer.bytes - layer.dense_bytes for plans in plan for layer in plans.values()
    )
