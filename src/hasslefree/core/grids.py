"""Quantisation grids: in each group of inputs of a row, the allowed values are equally spaced.

    S_ij = (code_ij − zero_g)·scale_g,    code_ij and zero_g whole numbers from 0 to 2^bits − 1
    S_ij = code_ij·scale_g + offset_g,    offset_g any number, on a grid with an offset

g is the group of row i and input j. A grid with a whole zero represents the value 0 exactly, so S
can be sparse and on the grid at once. A grid with an offset fits better, but only suits an S that
keeps every entry. `core.scales` describes the numbers that scales and offsets may be;
(code − zero)·scale is exact in float32.

An entropy-coded grid has codes of eight bits, one scale per row and one per input,

    S_ij = (code_ij − 128)·scale_i·input_scale_j

The scales decide how many bits the codes take in a file, where frequent codes are shorter
(`core.entropy`). At the same number of bits, the steps are far finer than with codes of equal
length (WaterSIC, arXiv 2603.04956).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hasslefree.core.gram import working_dtype
from hasslefree.core.patterns import Counted, Pattern
from hasslefree.core.scales import (
    FLOATS,
    SCALE_BITS,
    SMALLEST_HALF,
    Floats,
    Multiples,
    cast_exactly,
    suits_half,
)
from hasslefree.errors import GridError, option
from hasslefree.validation import Checked, Positive

# Possible bits of a code.
BITS = (2, 3, 4, 5, 6, 8)
# The fewest and the most bits per weight of an entropy-coded grid, and the rates that are tried to
# reach a given size.
LEAST_RATE = 1.0
MOST_RATE = 7.0
RATES = tuple(quarters / 4 for quarters in range(6, 27))
# Each further range tried for a group is narrower by this share of the whole range.
NARROWER = 0.02


def check_bits(name: str, bits: int, allowed: Sequence[int]) -> None:
    """Raise a GridError, which names the nearest allowed bits, unless these bits are allowed.

    Args:
        allowed: in ascending order.
    """
    if bits in allowed:
        return
    below = [each for each in allowed if each < bits][-1:]
    above = [each for each in allowed if each > bits][:1]
    nearest = " or ".join(option(name, each) for each in below + above)
    listed = ", ".join(map(str, allowed))
    raise GridError(f"{name} must be one of {listed}, got {bits}; use {nearest}", (name,))


@dataclass(frozen=True)
class Grid(Checked):
    """The values that S may have: 2^bits numbers per group of inputs of a row.

    Args:
        bits: the bits per code, one of BITS.
        group: the number of consecutive inputs that share a scale and a zero, usually 32 to 128;
            None for a whole row.
        symmetric: place the values around zero, with zero = 2^(bits − 1) everywhere; otherwise from
            the smallest to the largest entry.
        offset: store the value of code 0 for each group, instead of a whole zero.
        scale_bits: store scales and offsets as multiples of units of their row, with this many
            bits, one of SCALE_BITS; None for 16-bit floats.
        block: with scale_bits, the number of consecutive inputs that share units, a multiple of the
            group; None for a whole row. Scales of a symmetric grid with blocks have a sign.
        rate: the bits per code in a file, for an entropy-coded grid (`entropy_coded`), from
            LEAST_RATE to MOST_RATE; None for codes of equal length.

    Example:
        >>> scaling = Grid(bits=4, group=64).scaling(weight)  # weight: (out, in)
        >>> rounded = scaling.nearest(weight)
    """

    error: ClassVar = GridError
    bits: int = 4
    group: Positive | None = 64
    symmetric: bool = False
    offset: bool = False
    scale_bits: int | None = None
    block: Positive | None = None
    rate: float | None = None

    @classmethod
    def entropy_coded(cls, rate: float) -> "Grid":
        """Return the grid whose codes take this many bits each, on average."""
        return cls(bits=8, group=None, symmetric=True, rate=rate)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits("bits", self.bits, BITS)
        if self.symmetric and self.offset:
            raise GridError(
                "a symmetric grid has no offset; leave out one of symmetric and offset",
                ("symmetric", "offset"),
            )
        if self.scale_bits is not None:
            self._check_scale_bits(self.scale_bits)
        if self.block is not None and (not self.scale_bits or self.block % (self.group or 0)):
            raise GridError(
                f"a block of {self.block} inputs needs scale_bits, and groups that divide it",
                ("block",),
            )
        if self.rate is not None:
            self._check_rate(self.rate)

    def _check_rate(self, rate: float) -> None:
        if not LEAST_RATE <= rate <= MOST_RATE:
            raise GridError(
                f"the rate of an entropy-coded grid must be from {LEAST_RATE:g} to {MOST_RATE:g}"
                f" bits per weight, got {rate:g}",
                ("bits",),
            )
        if self.bits != 8 or self.group is not None or not self.symmetric:
            raise GridError(
                "an entropy-coded grid has symmetric codes of eight bits in rows; use"
                " Grid.entropy_coded(rate)",
                ("rate",),
            )

    def _check_scale_bits(self, bits: int) -> None:
        check_bits("scale_bits", bits, SCALE_BITS)
        if self.group is None:
            raise GridError(
                "scale_bits applies to scales of groups, and this grid has one scale per row; use"
                f" groups ({option('group_size', 32)}), or leave out {option('scale_bits', bits)}",
                ("scale_bits", "group"),
            )

    def __str__(self) -> str:
        if self.rate is not None:
            return f"entropy-coded, {self.rate:g} bits"
        groups = "rows" if self.group is None else f"groups of {self.group}"
        text = f"int{self.bits} in {groups}"
        if self.symmetric:
            text += ", symmetric"
        if self.offset:
            text += ", with offsets"
        if self.scale_bits:
            text += f", scales of {self.scale_bits} bits"
        if self.block:
            text += f" in blocks of {self.block}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; `offset`, `scale_bits`, `block` and `rate` only if set."""
        content: dict[str, Any] = {
            "bits": self.bits,
            "group": self.group,
            "symmetric": self.symmetric,
        }
        for name in ("offset", "scale_bits", "block", "rate"):
            value = getattr(self, name)
            if value:
                content[name] = value
        return content

    @property
    def stored_bits(self) -> float:
        """The bits per code in a file, on average."""
        return self.bits if self.rate is None else self.rate

    def with_bits(self, bits: int) -> "Grid":
        """Return the grid with other bits per code, or another rate."""
        if self.rate is None:
            return replace(self, bits=bits)
        return replace(self, rate=float(bits))

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def signed_scales(self) -> bool:
        """True if scales may be negative."""
        return self.symmetric and self.block is not None

    def check(self, shape: Sequence[int], pattern: Pattern | None = None) -> None:
        """Raise GridError if a weight (out, in) cannot have this grid, alone or with a pattern."""
        if self.group is not None:
            self._check_group(self.group, shape[1], pattern)
        if self.block is not None and shape[1] % self.block:
            raise GridError(
                f"blocks of {self.block} do not divide the {shape[1]} inputs of the layer"
            )
        prunes = pattern is not None and pattern.kept(shape) < math.prod(shape)
        # The layouts of these patterns omit entries that happen to be zero, even if all are kept.
        prunes |= isinstance(pattern, Counted)
        if self.offset and prunes:
            raise GridError(
                f"pattern {pattern} prunes entries, and a grid with offsets need not have the value"
                f" zero; leave out {option('offset', True)}, or use {option('pattern', 'dense')}",
                ("offset", "pattern"),
            )
        if self.rate is not None and prunes:
            raise GridError(
                f"pattern {pattern} prunes entries, and an entropy-coded grid keeps every one; use"
                f" {option('pattern', 'dense')}",
                ("coding", "pattern"),
            )

    def _check_group(
        self,
        group: int,
        width: int,
        pattern: Pattern | None,
    ) -> None:
        by_row = f"{option('group_size', 0)} for one scale per row"
        if width % group:
            fitting = math.gcd(width, 128)
            remedy = by_row
            if fitting > 1:
                remedy = f"{option('group_size', fitting)}, or {by_row}"
            raise GridError(
                f"group_size {group} does not divide the {width} inputs of the layer; use {remedy}"
            )
        length = pattern.group if pattern else None
        if length is not None and group % length:
            raise GridError(
                f"group_size {group} is not a multiple of {length}, the group length of the"
                f" pattern; use a multiple of {length}, or {by_row}"
            )

    def groups(self, width: int) -> int:
        """Return the number of groups in a row of `width` inputs."""
        if self.group is None:
            return 1
        return width // self.group

    def blocks(self, width: int) -> int | None:
        """Return the number of blocks in a row of `width` inputs; None without blocks."""
        if self.block is None:
            return None
        return width // self.block

    def fit(self, entries: Tensor, storage: Floats | Multiples = FLOATS) -> "Levels":
        """Fit levels from the smallest entry to the largest (arXiv 2210.17323) to groups of entries
        (out, …, n): scale and zero (out, …, 1), in the dtype of the entries.

        Args:
            storage: the numbers that scales and offsets may be.
        """
        return self._spanning(*self._ends(entries), storage)

    def search(
        self,
        entries: Tensor,
        ranges: int,
        weights: Tensor,
        storage: Floats | Multiples = FLOATS,
    ) -> "Levels":
        """Find the levels with the smallest weighted sum of squared rounding errors in each group.

        Args:
            entries, storage: as for `fit`.
            ranges: the number of ranges of values to try, from 1 to 1 / NARROWER. The first is the
                range of `fit`; each further one is narrower by NARROWER of the first.
            weights: the weights of the squares, (n,).
        """
        low, high = self._ends(entries)
        centre = (low + high) / 2 if self.offset else 0.0
        best = self._spanning(low, high, storage)
        least = best.error(entries, weights)
        for step in range(1, ranges):
            share = 1 - NARROWER * step
            tried = self._spanning(
                centre + (low - centre) * share, centre + (high - centre) * share, storage
            )
            error = tried.error(entries, weights)
            better = error < least
            least = torch.where(better, error, least)
            scale = torch.where(better, tried.scale, best.scale)
            best = Levels(self, scale, torch.where(better, tried.zero, best.zero))
        return best

    def _ends(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of the lowest and the highest code for groups (…, n): (…, 1) each."""
        high = entries.amax(-1, keepdim=True)
        low = entries.amin(-1, keepdim=True)
        if self.offset and self.scale_bits:
            return low.clamp_max_(0), high  # stored offsets are at most 0
        if self.offset:
            return low, high
        if self.signed_scales:
            # The code without an opposite represents the entry farthest from zero.
            low = torch.where(high > -low, high, low)
            return low, low * ((1 - self.top) / (1 + self.top))
        high = high.clamp_min_(0)
        low = low.clamp_max_(0)
        if self.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        return low, high

    def _spanning(
        self,
        low: Tensor,
        high: Tensor,
        storage: Floats | Multiples,
    ) -> "Levels":
        """Return levels whose codes run from low to high. Without an offset, 0 is in between."""
        span = storage.scales((high - low) / self.top)
        scale = torch.where(span != 0, span, SMALLEST_HALF)  # a group of equal entries
        if self.offset and self.scale_bits:
            # With coarse scales, codes that start at the low end lose less than centred ones.
            zero = storage.offsets(low)
        elif self.offset:
            zero = storage.offsets((low + high - self.top * span) / 2)
        elif self.symmetric:
            zero = torch.full_like(scale, (self.top + 1) / 2)
        else:
            zero = (-low / scale).round_().clamp_(0, self.top)
        return Levels(self, scale, zero)

    def scaling(self, matrix: Tensor) -> "Scaling":
        """Fit scales and zeros to a matrix (out, in).

        Raises:
            GridError: the groups do not divide its inputs, or the grid is entropy-coded.
        """
        self.check(matrix.shape)
        if self.rate is not None:
            raise GridError(
                "the scales of an entropy-coded grid depend on the codes; use"
                " hasslefree.decompose with JointOnGrid(grid)",
                ("rate",),
            )
        storage = self.storage_for(matrix)
        levels = self.fit(self._by_group(matrix), storage)
        return Scaling(self, levels.scale.squeeze(-1), levels.zero.squeeze(-1), storage)

    def empty_scaling(self, matrix: Tensor) -> "Scaling":
        """Return a scaling for a matrix (out, in), to be filled group by group."""
        # Transposed, so that the column of a group is contiguous.
        shape = (self.groups(matrix.shape[1]), matrix.shape[0])
        storage = self.storage_for(matrix)
        return Scaling(self, matrix.new_ones(shape).T, matrix.new_zeros(shape).T, storage)

    def storage_for(self, matrix: Tensor) -> Floats | Multiples:
        """Choose the numbers that the scales and offsets of a matrix (out, in) may be."""
        half = suits_half(matrix, self.top)
        if self.scale_bits is None:
            return Floats(half)
        low, high = self._ends(self._by_group(matrix))
        scale = (high - low).squeeze(-1) / self.top
        offset = low.squeeze(-1) if self.offset else None
        blocks = self.blocks(matrix.shape[1])
        return Multiples.covering(self.scale_bits, scale, offset, blocks, self.signed_scales, half)

    def _by_group(self, matrix: Tensor) -> Tensor:
        return matrix.unflatten(1, (self.groups(matrix.shape[1]), -1))


@dataclass(frozen=True)
class Levels:
    """The values that entries may have: scale and zero broadcast with the entries.

    The zero is a code, a whole number; on a grid with an offset, it is the value of code 0.
    """

    grid: Grid
    scale: Tensor
    zero: Tensor

    def codes(self, entries: Tensor) -> Tensor:
        """Return the codes of the nearest values, whole numbers in the dtype of the entries."""
        if self.grid.offset:
            codes = ((entries - self.zero) / self.scale).round_()
        else:
            codes = (entries / self.scale).round_().add_(self.zero)
        return codes.clamp_(0, self.grid.top)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values of codes, in the dtype of the scale. The codes are overwritten."""
        if self.grid.offset:
            return codes.mul_(self.scale).add_(self.zero)
        return codes.sub_(self.zero).mul_(self.scale)

    def nearest(self, entries: Tensor) -> Tensor:
        """Return the values nearest to entries."""
        return self.values(self.codes(entries))

    def error(self, entries: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of squared rounding errors of each group (…, n): (…, 1)."""
        squares = (entries - self.nearest(entries)).square_()
        return squares.mul_(weights).sum(-1, keepdim=True)


@dataclass(frozen=True)
class Scaling:
    """The scale and the zero of each group of a matrix (out, in), as in `Levels`: (out, groups),
    floating.

    Args:
        storage: the numbers that scales and offsets may be. Floats have the dtype in which they are
            stored. Multiples have a working dtype, and their units the dtype of storage.
        input_scale: the scale of each input, (in,), on an entropy-coded grid; otherwise None.
    """

    grid: Grid
    scale: Tensor
    zero: Tensor
    storage: Floats | Multiples = FLOATS
    input_scale: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Scaling":
        """Return the same numbers, stored in another dtype; GridError if they would change."""
        if isinstance(self.storage, Multiples):
            return replace(self, storage=self.storage.to(dtype))
        scale = cast_exactly(self.scale, dtype)
        zero = cast_exactly(self.zero, dtype)
        input_scale = self.input_scale
        if input_scale is not None:
            input_scale = cast_exactly(input_scale, dtype)
        return replace(self, scale=scale, zero=zero, input_scale=input_scale)

    def of_rows(self, rows: slice) -> "Scaling":
        """Return the scaling of some rows; scales and zeros must be floats."""
        assert isinstance(self.storage, Floats)
        return replace(self, scale=self.scale[rows], zero=self.zero[rows])

    def levels(self) -> Levels:
        """Return the levels of entries by group, (out, groups, n), in the working dtype."""
        dtype = working_dtype(self.scale)
        scale = self.scale.to(dtype).unsqueeze(-1)
        if self.input_scale is not None:
            scale = scale * self.input_scale.to(dtype)
        return Levels(self.grid, scale, self.zero.to(dtype).unsqueeze(-1))

    def at(self, j: int) -> Levels:
        """Return the levels of input j, (out,). Writing to them changes the group of j, except on
        an entropy-coded grid.
        """
        g = j // self.grid.group if self.grid.group else 0
        scale = self.scale[:, g]
        if self.input_scale is not None:
            scale = scale * self.input_scale[j]
        return Levels(self.grid, scale, self.zero[:, g])

    def storage_at(self, j: int) -> Floats | Multiples:
        """Return the storage of the group of input j."""
        if isinstance(self.storage, Multiples):
            return self.storage.of_block(j // self.grid.block if self.grid.block else 0)
        return self.storage

    def by_group(self, matrix: Tensor) -> Tensor:
        """View a matrix (out, in) as (out, groups, n)."""
        return matrix.unflatten(1, (self.scale.shape[1], -1))

    def codes(self, matrix: Tensor) -> Tensor:
        """Return the codes, uint8, of the values nearest to a matrix (out, in). They are exact for
        a matrix on the grid in float32.
        """
        return self.levels().codes(self.by_group(matrix)).flatten(1).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values of codes (out, in) of any dtype, rounded once to the dtype in which the
        scales or their units are stored.
        """
        stored = self.scale
        if isinstance(self.storage, Multiples):
            stored = self.storage.scale_unit
        parts = self.by_group(codes.to(working_dtype(self.scale), copy=True))
        return self.levels().values(parts).flatten(1).to(stored.dtype)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Round a matrix (out, in) to the nearest values of the grid."""
        return self.levels().nearest(self.by_group(matrix)).flatten(1)


@dataclass(frozen=True)
class Quantised:
    """A matrix (out, in) on a grid, as its codes: uint8 (out, in). Entries off the support have the
    code of zero.
    """

    codes: Tensor
    scaling: Scaling

    @classmethod
    def of(
        cls,
        matrix: Tensor,
        scaling: Scaling,
        dtype: torch.dtype,
    ) -> "Quantised":
        """Return the codes of a matrix on the grid, with scales in another dtype; GridError if they
        would change.
        """
        return cls(scaling.codes(matrix), scaling.to(dtype))

    def values(self) -> Tensor:
        """Return the matrix in the dtype of the scales."""
        return self.scaling.values(self.codes)
