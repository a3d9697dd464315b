"""The plan of every layer, decided and checked before the first layer is changed: by a budget, or
within a size.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hasslefree.core.budgets import Budget
from hasslefree.core.factors import check_factor_bits
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method
from hasslefree.errors import BudgetError, HasslefreeError, option
from hasslefree.models.blocks import Blocks, head_unit
from hasslefree.models.rules import Matrix, select_sites
from hasslefree.packed.spec import LayerSpec
from hasslefree.recipe.resolve import Resolved
from hasslefree.solve.methods import with_grid
from hasslefree.units import Size

# Ranks within a size are multiples of STEP where S is on a grid, which suits kernels.
STEP = 8
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


# For every block: the name of a layer in it → its plan.
Plan = list[dict[str, LayerPlan]]


def make_plan(blocks: Blocks, resolved: Resolved) -> Plan:
    """The pattern and rank of every layer, from shapes alone."""
    selected = select_sites(blocks, resolved.leave_dense).sites
    check_rank(blocks, selected, resolved.budget.rank or 0)
    bits = resolved.factor_bits
    plan = [
        plan_block(blocks, i, sites, resolved.budget, resolved.solver, bits)
        for i, sites in enumerate(selected)
    ]
    check_factor_bits(
        bits, max((layer.spec.rank for plans in plan for layer in plans.values()), default=None)
    )
    return plan


def plan_of(model: torch.nn.Module, blocks: Blocks, resolved: Resolved) -> Plan:
    """The plan with which a compression begins: that of the recipe, or the best uniform one within
    its size.
    """
    return (
        uniform_plans(model, blocks, resolved)[0] if resolved.size else make_plan(blocks, resolved)
    )


def uniform_plans(model: torch.nn.Module, blocks: Blocks, resolved: Resolved) -> list[Plan]:
    """For each number of bits, from the most on, the plan with the largest rank in the size. Raises
    as `layer_room`.
    """
    sites = select_sites(blocks, resolved.leave_dense).sites
    narrowest = min(min(site.shape) for layers in sites for site in layers.values())
    grids: Sequence[Grid | None] = resolved.grids or (None,)
    least = {
        grid: uniform_plan(blocks, resolved, grid, resolved.fixed_rank or 0)
        for grid in reversed(grids)
    }
    room, plans = layer_room(model, least[grids[0]], resolved), list[Plan]()
    for grid, plan in least.items():
        if (left := room - bytes_of(plan)) > 0 and resolved.fixed_rank is None:
            step = STEP if grid else 1
            cost = bytes_of(uniform_plan(blocks, resolved, grid, step)) - bytes_of(plan)
            plan = uniform_plan(blocks, resolved, grid, min(left // cost, narrowest // step) * step)
        plans += [plan] if left >= 0 else []
    return plans


def uniform_plan(blocks: Blocks, resolved: Resolved, grid: Grid | None, rank: int) -> Plan:
    """The plan of the recipe with this grid and rank in every layer."""
    changed = dataclasses.replace(
        resolved,
        budget=dataclasses.replace(resolved.budget, rank=rank),
        solver=with_grid(resolved.solver, grid),
        factor_bits=resolved.factor_bits if rank else None,
    )
    return make_plan(blocks, changed)


def bytes_of(plan: Plan) -> int:
    """The size of all planned layers."""
    return sum(layer.bytes for plans in plan for layer in plans.values())


def layer_room(model: torch.nn.Module, plan: Plan, resolved: Resolved) -> int:
    """The bytes for the planned layers: by the recipe's size, or the plan's. A BudgetError if the
    size does not do.
    """
    if (size := resolved.size_limit) is None:
        return bytes_of(plan)
    layers = [layer for plans in plan for layer in plans.values()]
    dense, weights = (
        sum(layer.dense_bytes for layer in layers),
        sum(layer.spec.dense_parameters for layer in layers),
    )
    used, rest = bytes_of(plan), weights_on_disk(model, []) - dense
    room = int(size.amount * weights / 8) if size.in_bits else int(size.amount) - rest
    uncompressed, least = (
        Size(8 * taken / weights, True) if size.in_bits else Size(rest + taken)
        for taken in (dense, used)
    )
    if room >= dense:
        raise BudgetError(
            f"the uncompressed model takes {uncompressed}, which is already within the size of"
            f" {size}; give a smaller size",
            ("size",),
        )
    if room < used:
        raise BudgetError(
            f"a size of {size} is too small: the least possible with method"
            f" {resolved.method} is {least.rounded_up} ({layers[0].spec.kind}, rank"
            f" {layers[0].spec.rank}); use {option('size', least.rounded_up)}",
            ("size",),
        )
    return room


def check_rank(blocks: Blocks, selected: Sequence[Mapping[str, Matrix]], rank: int) -> None:
    """Raise a BudgetError with the narrowest layer if the rank is too large for it."""
    layers = [
        (min(site.shape), blocks.prefix(i), site)
        for i, sites in enumerate(selected)
        for site in sites.values()
    ]
    narrowest, prefix, site = min(layers, key=lambda layer: layer[0], default=(rank, "", None))
    if site is not None and rank > narrowest:
        out, width = site.shape
        raise BudgetError(
            f"rank {rank} is larger than the narrowest weight ({out}×{width}); use"
            f" {option('rank', narrowest)} or less"
        ).within(f"{prefix}.{site.name}")


def plan_block(
    blocks: Blocks,
    index: int,
    sites: Mapping[str, Matrix],
    budget: Budget,
    method: Method,
    factor_bits: int | None,
) -> dict[str, LayerPlan]:
    """The plans of the sites of one block, by their names in it. budget: of each layer. Raises as
    `make_plan`.
    """
    plans = {}
    for name, site in sites.items():
        try:
            unit = head_unit(blocks.modules[index], name) if method.whole_channels else 1
            pattern, rank = budget.resolve(*site.shape, unit)
            method.check(rank)
            method.check_pattern(pattern)
            if method.grid:
                method.grid.check(site.shape, pattern)
        except HasslefreeError as error:
            raise error.within(f"{blocks.prefix(index)}.{name}") from None
        plans[name] = LayerPlan.of(site.shape, pattern, rank, site.dtype, method.grid, factor_bits)
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
