"""Which grids other programs hold exactly: with the numbers that they store, and without rounding a
value again.

    engine         value of an entry               numbers of a group
    llama.cpp      code · scale + minimum          float16, in blocks of 32 (`block_of`); in some
    types the scale alone mlx            code · scale + bias             the model's dtype
    vllm           (code − zero) · scale           compressed-tensors: the model's dtype, and a zero
    of as many bits transformers   (code − 8) · scale + zero       torch's int4 operators: bfloat16,
    to which they round the zero

A group that is a multiple of the engine's, or a row, is held by repeating its numbers. MLX has no
whole zeros: the bias that takes their place, −zero · scale, has more digits than a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hasslefree.core.grids import BITS, Grid
from hasslefree.errors import option

# The kinds of grids: two are fields of `Grid`, and a grid with neither has a whole zero.
SYMMETRIC, OFFSET, WHOLE_ZERO = "symmetric", "offset", "whole zero"
# The bits of a code → the block of llama.cpp with a scale alone, whose codes are signed, or with a
# minimum.
SIGNED, WITH_MINIMUM = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}, {4: "Q4_1", 5: "Q5_1"}
# Every engine has groups of this many inputs.
GROUP = 32


def kind_of(grid: Grid) -> str:
    return SYMMETRIC if grid.symmetric else OFFSET if grid.offset else WHOLE_ZERO


def _grid(kind: str, bits: int, group: int | None = None) -> Grid:
    return Grid(bits, group, symmetric=kind == SYMMETRIC, offset=kind == OFFSET)


def block_of(grid: Grid) -> str | None:
    """The smallest block type of llama.cpp that holds the values of a grid, such as "Q4_0"; None if
    none does.
    """
    bits = grid.bits + (kind_of(grid) == WHOLE_ZERO)  # code − zero takes one bit more than the code
    return next(
        (name for most, name in (WITH_MINIMUM if grid.offset else SIGNED).items() if bits <= most),
        None,
    )


@dataclass(frozen=True)
class Engine:
    """What a program can hold of S.

    bits: of a code, for each kind of grid that it holds; in a recipe that leaves the kind open, the
        first counts.
    groups: the group sizes that it has, the largest first. group: what a recipe that leaves it open
    gets.
    """

    bits: Mapping[str, tuple[int, ...]]
    groups: tuple[int, ...]
    group: int = 64

    def holds(self, grid: Grid) -> bool:
        """Whether it does so exactly. A row must be a multiple of 32 inputs."""
        return grid.bits in self.bits.get(kind_of(grid), ()) and (grid.group or GROUP) % GROUP == 0

    def group_for(self, grid: Grid, width: int) -> int:
        """The largest of its groups that divides those of a grid in rows of `width` inputs, a
        multiple of 32.
        """
        return next(size for size in self.groups if (grid.group or width) % size == 0)


ENGINES = {
    "transformers": Engine(
        dict.fromkeys((OFFSET, WHOLE_ZERO, SYMMETRIC), (4,)), (256, 128, 64, 32)
    ),
    "llama.cpp": Engine(
        {
            kind: tuple(bits for bits in BITS if block_of(_grid(kind, bits)))
            for kind in (OFFSET, SYMMETRIC, WHOLE_ZERO)
        },
        (32,),
        group=32,
    ),
    "mlx": Engine({OFFSET: BITS, SYMMETRIC: BITS}, (128, 64, 32)),
    "vllm": Engine(dict.fromkeys((WHOLE_ZERO, SYMMETRIC), (4, 8)), (128, 64, 32)),
}


def grid_for(
    name: str, bits: int | None, group: int | None, symmetric: bool | None, offset: bool | None
) -> Grid | None:
    """The grid of an engine with these settings, else its own; None if it holds no such grid.
    group: 0 for a row.
    """
    size = ENGINES[name].group if group is None else group
    for kind in ENGINES[name].bits:
        grid = _grid(kind, bits or 4, size or None)
        given = symmetric in (None, grid.symmetric) and offset in (None, grid.offset)
        if given and ENGINES[name].holds(grid):
            return grid
    return None


def refusal(name: str, grid: Grid) -> str | None:
    """Why an engine cannot hold a grid, which engines can, and the least change that helps; None if
    it can.
    """
    engine = ENGINES[name]
    if engine.holds(grid):
        return None
    kind = kind_of(grid)
    able = [other for other, candidate in ENGINES.items() if candidate.holds(grid)]
    held = [(its_kind, bits) for its_kind, widths in engine.bits.items() for bits in widths]
    to, bits = min(held, key=lambda pair: (pair[0] != kind) + 2 * abs(pair[1] - grid.bits))
    group = grid.group if (grid.group or GROUP) % GROUP == 0 else engine.group
    given = [option("bits", bits)] * (bits != grid.bits) + [option("group_size", group)] * (
        group != grid.group
    )
    given += [option(to, True)] * (to != kind and to != WHOLE_ZERO)
    changes = [f"use {' and '.join(given)}"] * bool(given)
    changes += [f"leave out {option(kind, True)}"] * (to != kind and kind != WHOLE_ZERO)
    others = f" ({' and '.join(able)} can)" if able else ""
    held_is = f"{grid}, with whole zeros" if kind == WHOLE_ZERO else str(grid)
    return f"{name} cannot hold {held_is} exactly{others}; for {name}, {' and '.join(changes)}"
