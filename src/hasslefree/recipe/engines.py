"""The grids that other programs hold exactly, without rounding any value again.

    engine         value of an entry               numbers of a group
    llama.cpp      code · scale + minimum          float16, in blocks of 32 (`block_of`); some types
                                                   have the scale alone
    mlx            code · scale + bias             the model's dtype
    vllm           (code − zero) · scale           compressed-tensors: the model's dtype, and a zero
                                                   of as many bits
    transformers   (code − middle) · scale + value torch's int4 operators: bfloat16 (the value is
                   of the middle code              rounded to it), and scales of a few bits

A group that is a multiple of the engine's group, or a row, is held by repeating its numbers. The K
types of llama.cpp, whose scales and minimums are small integers in units of blocks of 256 inputs,
are separate grids (`K_TYPES`). MLX has no whole zeros: the equivalent bias, −zero · scale, has more
digits than a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from hasslefree.core.grids import BITS, Grid
from hasslefree.errors import option

# The kinds of grids: two are fields of `Grid`, and a grid with neither has a whole zero.
SYMMETRIC = "symmetric"
OFFSET = "offset"
WHOLE_ZERO = "whole zero"
# Bits of a code → block of llama.cpp. Blocks without a minimum have signed codes.
SIGNED = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}
WITH_MINIMUM = {4: "Q4_1", 5: "Q5_1"}
# A group size that every engine has.
GROUP = 32
# Layers that vLLM multiplies as one, which therefore need the same grid: entries of
# `packed_modules_mapping` of its models (vLLM 0.33).
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "w13": ("w1", "w3"),
    "c_fc": ("c_fc_0", "c_fc_1"),
}
# The types of llama.cpp with blocks, by rising bytes. Types without a minimum have signed scales.
BLOCK = 256
K_TYPES = {
    "Q2_K": Grid(2, 16, offset=True, scale_bits=4, block=BLOCK),
    "Q3_K": Grid(3, 16, symmetric=True, scale_bits=6, block=BLOCK),
    "Q4_K": Grid(4, 32, offset=True, scale_bits=6, block=BLOCK),
    "Q5_K": Grid(5, 32, offset=True, scale_bits=6, block=BLOCK),
    "Q6_K": Grid(6, 16, symmetric=True, scale_bits=8, block=BLOCK),
}
Q8_0 = Grid(8, GROUP, symmetric=True)
# The types of llama.cpp that a layer may get within a size, by rising bytes: if BLOCK divides its
# rows, and otherwise (Q4_0, Q5_0, Q8_0). Q5_K, Q4_1 and Q5_1 are left out: on a CPU, llama.cpp
# multiplies by a larger type in less time.
WIDE_TYPES = (*(K_TYPES[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q6_K")), Q8_0)
OTHER_TYPES = (Grid(4, GROUP, symmetric=True), Grid(5, GROUP, symmetric=True), Q8_0)


def kind_of(grid: Grid) -> str:
    if grid.symmetric:
        return SYMMETRIC
    if grid.offset:
        return OFFSET
    return WHOLE_ZERO


def grid_of_kind(
    kind: str,
    bits: int,
    group: int | None = None,
) -> Grid:
    return Grid(bits, group, symmetric=kind == SYMMETRIC, offset=kind == OFFSET)


def types_for(width: int) -> tuple[Grid, ...]:
    """The types of llama.cpp for rows of `width` inputs, by rising bytes."""
    if width % BLOCK:
        return OTHER_TYPES
    return WIDE_TYPES


def type_like(grid: Grid, width: int) -> Grid:
    """The type for rows of `width` inputs, a multiple of 32, that replaces a type for rows that
    BLOCK divides: the smallest with at least as many bits.
    """
    if width % BLOCK == 0:
        return grid
    return next(other for other in OTHER_TYPES if other.bits >= grid.bits)


def block_of(grid: Grid) -> str | None:
    """The smallest block type of llama.cpp that holds the values of a grid, such as "Q4_0"; None if
    none does.
    """
    for k_type, held in K_TYPES.items():
        if grid == held:
            return k_type
    bits = grid.bits
    if kind_of(grid) == WHOLE_ZERO:
        bits += 1  # code − zero takes one bit more than the code
    blocks = WITH_MINIMUM if grid.offset else SIGNED
    for block_bits, name in blocks.items():
        if bits <= block_bits:
            return name
    return None


@dataclass(frozen=True)
class Engine:
    """The grids of S that a program can hold.

    Args:
        kinds: the kinds of grids that the engine holds. A recipe that leaves the kind open gets the
            first one.
        groups: the group sizes of the engine, the largest first.
        group: the group size of a recipe that leaves it open.
        multiples: scales may be multiples of a unit of their row.
        embeddings: the engine holds embeddings and heads in codes too.
        blocked: the grids with blocks that the engine holds. It holds other grids if a block type
            does (`block_of`). An engine with no blocked grids holds all bits.
        fuses: the engine multiplies the layers of `FUSED` as one.
    """

    kinds: tuple[str, ...]
    groups: tuple[int, ...]
    group: int = 64
    multiples: bool = False
    embeddings: bool = True
    blocked: tuple[Grid, ...] = ()
    fuses: bool = False

    def holds(self, grid: Grid) -> bool:
        """Return True if the engine holds the grid exactly, in rows of a multiple of 32 inputs."""
        if grid.rate is not None:
            return False
        if grid.block is not None and self.blocked:
            return grid in self.blocked
        if grid.scale_bits is not None and not self.multiples:
            return False
        if self.blocked and block_of(grid) is None:
            return False
        whole_groups = grid.group is None or grid.group % GROUP == 0
        return whole_groups and kind_of(grid) in self.kinds

    def group_for(self, grid: Grid, width: int) -> int:
        """The largest group size of the engine that divides the groups of a grid in rows of `width`
        inputs, a multiple of 32.
        """
        return next(size for size in self.groups if (grid.group or width) % size == 0)


ENGINES = {
    "transformers": Engine(
        (OFFSET, WHOLE_ZERO, SYMMETRIC), (256, 128, 64, 32), group=32, multiples=True
    ),
    "llama.cpp": Engine(
        (OFFSET, SYMMETRIC, WHOLE_ZERO), (32,), group=32, blocked=tuple(K_TYPES.values())
    ),
    "mlx": Engine((OFFSET, SYMMETRIC), (128, 64, 32)),
    "vllm": Engine((WHOLE_ZERO, SYMMETRIC), (128, 64, 32), embeddings=False, fuses=True),
}


def fused_name(name: str) -> str:
    """The layer of vLLM of which a layer is a part; the name itself if vLLM multiplies it alone."""
    parent, dot, leaf = name.rpartition(".")
    for fused, parts in FUSED.items():
        if leaf in parts:
            return f"{parent}{dot}{fused}"
    return name


def fused_apart(forms: Mapping[str, str], reasons: Mapping[str, str]) -> str | None:
    """An error message on differing layers that vLLM multiplies as one; None without any.

    Args:
        forms: storage of each layer, by name, such as "int4 in groups of 64" or "dense".
        reasons: the reasons for the storage of some layers.
    """
    units: dict[str, list[str]] = {}
    for name in forms:
        units.setdefault(fused_name(name), []).append(name)
    for names in units.values():
        if len({forms[name] for name in names}) > 1:
            parts = ", ".join(f"{name} ({reasons.get(name, forms[name])})" for name in names)
            return f"vllm multiplies these layers as one, so they need the same grid: {parts}"
    return None


def vllm_kernels(bits: int, symmetric: bool) -> str:
    """The kernels of vLLM 0.32 and 0.33 for layers on a grid, and their hardware."""
    if bits == 4:
        return "Marlin or Machete on a GPU, CPUWNA16 on a CPU"
    if bits != 8:
        return "Humming on a GPU only"
    if symmetric:
        return "Marlin or Machete on a GPU only"
    return "Machete or Humming on a GPU only"


def grid_for(
    name: str, bits: int | None, group: int | None, symmetric: bool | None, offset: bool | None
) -> Grid | None:
    """The grid of an engine with these settings; None if it holds no such grid.

    Args:
        name: the engine.
        bits, group, symmetric, offset: the fields of `Grid`, with a group of 0 for a row; None for
            the default of the engine.
    """
    engine = ENGINES[name]
    size = engine.group if group is None else group
    for kind in engine.kinds:
        grid = grid_of_kind(kind, bits or 4, size or None)
        suits = symmetric in (None, grid.symmetric) and offset in (None, grid.offset)
        if suits and engine.holds(grid):
            return grid
    return None


def refusal(name: str, grid: Grid) -> str | None:
    """An error message: the engine cannot hold the grid, which engines can, and the smallest change
    of the recipe that helps; None if the engine holds the grid.
    """
    engine = ENGINES[name]
    if engine.holds(grid):
        return None
    return f"{not_held(name, grid)}; for {name}, {' and '.join(_changes(engine, grid))}"


def not_held(name: str, grid: Grid) -> str:
    """An error message: the engine cannot hold the grid, and which engines can."""
    able = [other for other, candidate in ENGINES.items() if candidate.holds(grid)]
    others = f" ({' and '.join(able)} can)" if able else ""
    described = f"{grid}, with whole zeros" if kind_of(grid) == WHOLE_ZERO else str(grid)
    return f"{name} cannot hold {described} exactly{others}"


def _changes(engine: Engine, grid: Grid) -> list[str]:
    """The smallest changes of a grid's settings after which an engine holds it, in words."""
    if grid.rate is not None:
        return [f"leave out {option('coding', 'entropy')}"]
    kind = kind_of(grid)

    def distance(candidate: Grid) -> int:
        # Another number of bits is a larger change than another kind.
        return 2 * abs(candidate.bits - grid.bits) + (kind_of(candidate) != kind)

    candidates = [grid_of_kind(each, bits) for each, bits in product(engine.kinds, BITS)]
    nearest = min(filter(engine.holds, candidates), key=distance)
    to_kind = kind_of(nearest)
    settings = []
    if nearest.bits != grid.bits:
        settings.append(option("bits", nearest.bits))
    if grid.group is not None and grid.group % GROUP:
        settings.append(option("group_size", engine.group))
    if to_kind not in (kind, WHOLE_ZERO):
        settings.append(option(to_kind, True))
    changes = [f"use {' and '.join(settings)}"] if settings else []
    if kind not in (to_kind, WHOLE_ZERO):
        changes.append(f"leave out {option(kind, True)}")
    if grid.scale_bits is not None and not engine.multiples:
        changes.append(f"leave out {option('scale_bits', grid.scale_bits)}")
    return changes
