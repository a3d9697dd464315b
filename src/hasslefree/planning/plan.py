"""The plan of every layer, made from a budget or a size and checked before any layer is changed."""

import logging
import math
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hasslefree.core.budgets import Budget
from hasslefree.core.factors import check_factor_bits
from hasslefree.core.grids import BITS, RATES, Grid
from hasslefree.core.patterns import Pattern
from hasslefree.errors import (
    BudgetError,
    GridError,
    HasslefreeError,
    ModelError,
    PatternError,
    option,
)
from hasslefree.models.blocks import Blocks, find_blocks, head_unit
from hasslefree.models.ends import End
from hasslefree.models.experts import experts_of
from hasslefree.models.rules import Matrix, Selection, select_ends, select_sites
from hasslefree.models.unloaded import copied_bytes
from hasslefree.packed.spec import LayerSpec
from hasslefree.recipe.engines import ENGINES, GROUP, fused_apart, type_like
from hasslefree.recipe.resolve import FIXED_FROM, Resolved, resolve, takes_types
from hasslefree.solve.methods import with_grid
from hasslefree.units import Size

logger = logging.getLogger(__name__)

# Within a size, ranks beside an S on a grid are multiples of STEP, which suits kernels.
STEP = 8
# Matrices that hold at most this share of the weights may be too thin for the recipe.
THIN_SHARE = 0.05
# The smallest group that a grid gets if the default does not divide the inputs of a layer.
SMALLEST_GROUP = 16
# A matrix with fewer rows is not entropy-coded.
FEWEST_ROWS = 8
# Bytes of the other files in OUT: the tokenizer, the reports, the model card.
ROOM = 50_000_000

# A matrix that the recipe does not fit, and the reason.
Misfit = tuple[Matrix, HasslefreeError]


@dataclass(frozen=True)
class LayerPlan(LayerSpec):
    """The plan of one layer.

    Args:
        kept: the pattern with its exact count.
        dtype: of the model.
    """

    kept: Pattern = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True)

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        kept: Pattern,
        rank: int,
        dtype: torch.dtype,
        grid: Grid | None = None,
        factor_bits: int | None = None,
    ) -> "LayerPlan":
        """The plan of a weight (out, in). factor_bits: without effect at rank 0."""
        nonzeros = kept.kept(shape)
        return cls(str(kept), shape, rank, nonzeros, grid, factor_bits, kept=kept, dtype=dtype)

    @property
    def spec(self) -> LayerSpec:
        """The plan without the fields that `LayerSpec` does not have."""
        return LayerSpec(**{part.name: getattr(self, part.name) for part in fields(LayerSpec)})

    def like(self, spec: LayerSpec) -> "LayerPlan":
        """The plan of the same weight with the numbers of a spec."""
        kept = self.kept.with_kept(self.shape, spec.nonzeros)
        return LayerPlan.of(self.shape, kept, spec.rank, self.dtype, spec.grid, spec.factor_bits)

    @property
    def size(self) -> int:
        """The most bytes of its weight in the file: zeros among the kept entries are not stored."""
        return self.bytes(self.dtype)

    @property
    def dense_size(self) -> int:
        """The bytes of the dense weight."""
        return self.dense_bytes(self.dtype)

    @property
    def cost(self) -> float:
        """The time of the layer up to a factor: out · in².

        Every method spends most of its time on products out × in × in.
        """
        out, width = self.shape
        return out * width**2


@dataclass(frozen=True)
class Plan:
    """The plans of all compressed matrices.

    Args:
        blocks: for every block, the name of a layer in it → its plan.
        ends: the full name of an embedding or a head → its plan.
    """

    blocks: list[dict[str, LayerPlan]]
    ends: dict[str, LayerPlan] = field(default_factory=dict)

    @property
    def layers(self) -> list[LayerPlan]:
        """The plans of all layers in the blocks, in order."""
        return [layer for plans in self.blocks for layer in plans.values()]

    @property
    def matrices(self) -> list[LayerPlan]:
        """The plans of the ends, and of all layers in the blocks."""
        return [*self.ends.values(), *self.layers]

    @property
    def parts(self) -> list[dict[str, LayerPlan]]:
        """The plans of the ends, and those of each block, by name."""
        return [self.ends, *self.blocks]

    @property
    def size(self) -> int:
        """The bytes of all planned matrices."""
        return sum(matrix.size for matrix in self.matrices)


def select(blocks: Blocks, resolved: Resolved) -> Selection:
    """Choose the matrices to compress; a thin one that the recipe does not fit stays dense.

    Without this rule, a single 4×4 matrix would make the whole recipe fail.

    Raises:
        BudgetError, PatternError, GridError: the recipe does not fit matrices that hold more than
            `THIN_SHARE` of the weights.
        ModelError: as for `select_sites`.
    """
    selection = select_sites(blocks, resolved.leave_dense)
    if resolved.size:
        resolved = with_rank(resolved, 0)
    sites: list[dict[str, Matrix]] = []
    dense = dict(selection.dense)
    misfits: list[Misfit] = []
    weights = 0
    for index, matrices in enumerate(selection.sites):
        fitting = {}
        for name, matrix in matrices.items():
            weights += math.prod(matrix.shape)
            check_experts(blocks, index, matrix, resolved.engine)
            try:
                check_entropy_coding(plan_layer(blocks, index, matrix, resolved), matrix)
                fitting[name] = matrix
            except (BudgetError, PatternError, GridError) as error:
                misfits.append((matrix, error))
                full_name = f"{blocks.prefix(index)}.{name}"
                dense[full_name] = short_reason(error, matrix, resolved)
        sites.append(fitting)
    refused = misfits
    if any(sites):
        refused = [misfit for misfit in misfits if not may_stay_dense(*misfit, resolved)]
    if sum(math.prod(matrix.shape) for matrix, _ in refused) > THIN_SHARE * weights:
        raise refusal(refused, resolved)
    if resolved.engine is not None and ENGINES[resolved.engine].fuses:
        check_fused(blocks, sites, dense)
    ends, dense_ends = fitting_ends(blocks, resolved)
    return Selection(blocks, tuple(sites), dense | dense_ends, ends)


def fitting_ends(blocks: Blocks, resolved: Resolved) -> tuple[dict[str, End], dict[str, str]]:
    """The embedding and the head to compress, by name, and why each of the others stays dense."""
    if not resolved.end_grids:
        return {}, {}
    ends, dense = select_ends(blocks, resolved.leave_dense)
    for name, end in list(ends.items()):
        try:
            plan_end(end, resolved.end_grids[0], resolved)
        except GridError as error:
            del ends[name]
            dense[name] = short_reason(error, end, resolved)
    return ends, dense


def check_entropy_coding(plan: LayerPlan, matrix: Matrix) -> None:
    """Raise a GridError if a matrix is to be entropy-coded and is too small for it.

    To decode the codes, the file stores numbers for each column and row. With few codes, these
    numbers take most of the bits.
    """
    if plan.grid is None or plan.grid.rate is None:
        return
    out, width = plan.shape
    if out < FEWEST_ROWS or plan.size >= plan.dense_size:
        raise GridError(
            f"{matrix.name}, {out} × {width}, is too small for entropy coding; use"
            f" {option('coding', 'fixed')}",
            ("coding",),
        )


def refusal(misfits: Sequence[Misfit], resolved: Resolved) -> HasslefreeError:
    """The error of the narrowest of some matrices, with a remedy that fits all of them."""
    _, narrowest = min(misfits, key=lambda misfit: min(misfit[0].shape))
    if isinstance(narrowest, GridError) and resolved.engine is None and resolved.group_size:
        automatic = f"or leave out {option('group_size')}: each layer then gets one that fits"
        return GridError(f"{narrowest.message}; {automatic}", narrowest.fields)
    return narrowest


def may_stay_dense(
    matrix: Matrix,
    error: HasslefreeError,
    resolved: Resolved,
) -> bool:
    """Return True if a matrix that the recipe does not fit stays dense however large it is: none of
    the group sizes that may be chosen divides its inputs.
    """
    return isinstance(error, GridError) and (
        no_engine_group(matrix.shape[1], resolved) or group_is_open(resolved)
    )


def no_engine_group(width: int, resolved: Resolved) -> bool:
    """Return True if the recipe names an engine without groups for rows of `width` inputs."""
    return resolved.engine is not None and width % GROUP != 0


def group_is_open(resolved: Resolved) -> bool:
    """Return True if the group size is the default: a layer may then get another."""
    if resolved.engine is None:
        return resolved.group_size is None
    return resolved.group_size == ENGINES[resolved.engine].group


def check_experts(blocks: Blocks, index: int, matrix: Matrix, engine: str | None) -> None:
    """Raise a ModelError for the layer of an expert if the engine's export takes no experts."""
    if engine in (None, "transformers") or not experts_of(blocks.modules[index], matrix.name):
        return
    raise ModelError(
        f"layers of experts, such as {blocks.prefix(index)}.{matrix.name}, cannot be exported to"
        f" {engine} with their codes: leave out {option('engine')} and export to dense, or keep"
        f" them dense with {option('leave_dense', '*.experts.*')}"
    )


def check_fused(
    blocks: Blocks,
    sites: Sequence[Mapping[str, Matrix]],
    dense: Mapping[str, str],
) -> None:
    """Raise a ModelError if only some of the layers that an engine multiplies as one stay dense.

    Args:
        sites: the layers to compress, by block.
        dense: why each other matrix stays dense, by full name.
    """
    forms = dict.fromkeys(dense, "dense")
    for index, matrices in enumerate(sites):
        for name in matrices:
            forms[f"{blocks.prefix(index)}.{name}"] = "quantised"
    if apart := fused_apart(forms, dense):
        raise ModelError(f"{apart}; exclude all of them with {option('leave_dense')}, or none")


def short_reason(error: HasslefreeError, matrix: Matrix | End, resolved: Resolved) -> str:
    """The reason for which a matrix stays dense, in a few words."""
    if isinstance(error, BudgetError):
        return f"narrower than rank {resolved.budget.rank}"
    if isinstance(error, GridError) and no_engine_group(matrix.shape[1], resolved):
        return (
            f"its {matrix.shape[1]} inputs are no multiple of {GROUP}, as {resolved.engine} needs"
        )
    if error.fields == ("coding",):
        return "too small for entropy coding"
    thing = "pattern" if isinstance(error, PatternError) else "group size"
    return f"the {thing} does not fit its {matrix.shape[1]} inputs"


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


def plan_ends(selection: Selection, resolved: Resolved) -> dict[str, LayerPlan]:
    """The plans of the embedding and the head, on the grid with bits nearest to the layers'."""
    grid = resolved.solver.grid
    bits = 0 if grid is None else grid.stored_bits
    plans: dict[str, LayerPlan] = {}
    for name, end in selection.ends.items():
        nearest = min(resolved.end_grids, key=lambda allowed: abs(allowed.stored_bits - bits))
        plans[name] = plan_end(end, nearest, resolved)
    return plans


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


def with_rank(resolved: Resolved, rank: int) -> Resolved:
    """The recipe with another rank."""
    budget = replace(resolved.budget, rank=rank)
    return replace(resolved, budget=budget)


def narrowed(resolved: Resolved, rank: int, shape: tuple[int, int]) -> Resolved:
    """The recipe with a rank, or with the largest rank that a narrower weight (out, in) takes."""
    widest = min(shape)
    if rank > widest:
        step = STEP if resolved.solver.grid else 1
        rank = widest // step * step
    return with_rank(resolved, rank)


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


def bytes_of(plans: Mapping[str, LayerPlan]) -> int:
    """The size of the planned layers of a block."""
    return sum(layer.size for layer in plans.values())


def layer_room(model: torch.nn.Module, plan: Plan, resolved: Resolved) -> int:
    """The bytes for all layers: from the recipe's size, or the bytes of the plan.

    Args:
        plan: the smallest plan.

    Raises:
        BudgetError: the size is too small, or no smaller than the dense model.
    """
    size = resolved.size_limit
    used = plan.size
    if size is None:
        return used
    layers = plan.layers
    dense = sum(matrix.dense_size for matrix in plan.matrices)
    weights = sum(matrix.dense_parameters for matrix in plan.matrices)
    rest = weights_on_disk(model, plan) - used

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
    if room < used:
        least = as_size(used).rounded_up
        quantised = ""
        if resolved.solver.grid is None and resolved.method == "joint":
            quantised = f", or {option('method', 'joint-grid')}, which also quantises S"
        remedy = f"use {option('size', least)}"
        if used >= dense:
            smaller = "use another pattern"
            if resolved.fixed_rank:
                smaller = f"give a smaller {option('rank')}"
            remedy = f"the uncompressed model takes less; {smaller}"
        raise BudgetError(
            f"a size of {size} is too small: the least possible with method"
            f" {resolved.method} is {least} ({layers[0].kind}, rank"
            f" {layers[0].rank}); {remedy}{quantised}",
            ("size",),
        )
    return room


def digest(plan: Plan) -> str:
    """CRC-32 of every matrix's rank, non-zeros and grid."""
    layers = []
    for plans in plan.parts:
        for name, layer in plans.items():
            grid = [str(layer.grid)] if layer.grid else []
            layers.append((name, layer.rank, layer.nonzeros, *grid))
    return f"{zlib.crc32(repr(layers).encode()):08x}"


def bytes_to_write(model: torch.nn.Module, blocks: Blocks, plan: Plan, resolved: Resolved) -> int:
    """The largest size of the folder: trained blocks are written before the blocks they replace are
    removed.
    """
    taken = bytes_on_disk(model, plan)
    if resolved.match_predictions:
        for block, plans in zip(blocks.modules, plan.blocks, strict=True):
            taken += weights_on_disk(block, Plan([plans]))
    return taken


def bytes_on_disk(model: torch.nn.Module, plan: Plan) -> int:
    """The size of the folder: all weights, and room for the other files."""
    return ROOM + weights_on_disk(model, plan)


def weights_on_disk(model: torch.nn.Module, plan: Plan) -> int:
    """The size of all tensors of a model or a block in the files: dense, copied and packed ones.

    Stored buffers count: each block of MiniMax has one of heads × 256 × 256 numbers.
    """
    # Tied parameters are one object under two names.
    stored = {id(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}
    taken = sum(stored.values()) + sum(matrix.size - matrix.dense_size for matrix in plan.matrices)
    if isinstance(model, PreTrainedModel):
        taken += copied_bytes(model)
    return taken
