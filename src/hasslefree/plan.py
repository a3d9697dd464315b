"""What every layer will become: decided, and checked, before the first one is touched."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hasslefree.core.factors import check_factor_bits, factor_bytes
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import check_pattern, grid_of, removes_channels
from hasslefree.core.storage import Storage, kind_of
from hasslefree.errors import HasslefreeError
from hasslefree.models.blocks import Blocks, linear_shape, select_linears
from hasslefree.models.heads import head_unit
from hasslefree.recipe import Recipe

# Beside the weights: the tokenizer, the reports, the model card.
ROOM = 50_000_000


@dataclass(frozen=True)
class LayerPlan:
    """One layer. shape: (out, in). bytes, dense_bytes: of its weight in the file, after (at most) and before.

    grid: on which S will lie, or None. factor_bits: of u and v; None for the model's dtype.
    """

    shape: tuple[int, int]
    pattern: Pattern
    rank: int
    bytes: int
    dense_bytes: int
    grid: Grid | None = None
    factor_bits: int | None = None

    @property
    def kind(self) -> str:
        """The pattern, the grid if there is one, and how the factors are stored if not as all else."""
        return kind_of(str(self.pattern), self.grid, self.factor_bits if self.rank else None)

    @property
    def nonzeros(self) -> int:
        return self.pattern.kept(self.shape)

    @property
    def parameters(self) -> int:
        """Non-zeros and both factors."""
        return self.nonzeros + self.rank * sum(self.shape)


# For every block: the name of a layer in it → its plan.
Plan = list[dict[str, LayerPlan]]


def make_plan(blocks: Blocks, recipe: Recipe) -> Plan:
    """The pattern and rank of every layer, from shapes alone.

    Raises:
        HasslefreeError: with the layer's name: a budget that it cannot meet.
    """
    chosen = select_linears(blocks, recipe.leave_dense)
    plan = [plan_block(blocks, index, linears, recipe) for index, linears in enumerate(chosen)]
    ranks = [layer.rank for plans in plan for layer in plans.values()]
    check_factor_bits(recipe.factor_bits, max(ranks, default=None))
    return plan


def plan_block(blocks: Blocks, index: int, names: Iterable[str], recipe: Recipe) -> dict[str, LayerPlan]:
    """The plans of the layers of these names in one block.

    Raises:
        HasslefreeError: as for `make_plan`.
    """
    block, budget, method, plans = blocks.modules[index], recipe.budget(), recipe.build_method(), {}
    for name in names:
        linear: Any = block.get_submodule(name)
        shape = linear_shape(linear)
        try:
            unit = head_unit(block, name) if removes_channels(method) else 1
            pattern, rank = budget.resolve(*shape, unit)
            method.check(rank)
            check_pattern(method, pattern)
            if grid := grid_of(method):
                grid.check(shape, pattern.group)
        except HasslefreeError as error:
            raise type(error)(f"{error} ({blocks.prefix(index)}.{name})") from None
        plans[name] = plan_layer(shape, pattern, rank, linear.weight.dtype, grid_of(method), recipe.factor_bits)
    return plans


def plan_layer(
    shape: tuple[int, int],
    pattern: Pattern,
    rank: int,
    dtype: torch.dtype,
    grid: Grid | None,
    factor_bits: int | None = None,
) -> LayerPlan:
    (out, width), storage = shape, Storage.of(str(pattern), grid)
    packed = storage.bytes(out, width, pattern.kept(shape), dtype)
    packed += factor_bytes(out, width, rank, factor_bits, dtype)
    return LayerPlan(shape, pattern, rank, packed, out * width * dtype.itemsize, grid, factor_bits)


def digest(plan: Plan) -> str:
    """CRC-32 of every layer's rank and non-zeros."""
    layers = [(name, layer.rank, layer.nonzeros) for plans in plan for name, layer in plans.items()]
    return f"{zlib.crc32(repr(layers).encode()):08x}"


def bytes_on_disk(model: torch.nn.Module, plan: Plan) -> int:
    """The size of the folder: what stays dense, the packed layers, and room for the rest."""
    dense = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return ROOM + dense + sum(layer.bytes - layer.dense_bytes for plans in plan for layer in plans.values())
