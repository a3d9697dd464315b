"""A grid as a constraint set: the entries of a group of inputs of a row lie at equal distances.

    S_ij = (code_ij − zero_g)·scale_g,    code_ij and zero_g whole numbers from 0 to 2^bits − 1
    S_ij = code_ij·scale_g + offset_g,    offset_g any number, on a grid with an offset

g is the group of row i and input j. On a grid with a whole zero, zero is a value to the bit, and S
can be on a support and on a grid at once. A grid with an offset has one more number for each group,
and fits better: it is for an S that keeps every entry. Which numbers scales and offsets may be is
said in `core.scales`; (code − zero)·scale is exact in float32.

An entropy-coded grid has codes of eight bits, a scale for each row and one for each input,

    S_ij = (code_ij − 128)·scale_i·input_scale_j

and its scales decide how many bits the codes take in a file, where frequent ones are short
(`core.entropy`). At the same number of bits, its steps are far finer than those of codes of one
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

# Bits of a code.
BITS = (2, 3, 4, 5, 6, 8)
# The bits a weight that an entropy-coded grid may have, and those among which a size chooses.
LEAST_RATE = 1.0
MOST_RATE = 7.0
RATES = tuple(quarters / 4 for quarters in range(6, 27))
# Each further range that is tried for a group is narrower by this share of the whole one.
NARROWER = 0.02


def check_bits(name: str, bits: int, allowed: Sequence[int]) -> None:
    """Raise a GridError unless a number of bits is one of those that are allowed, in rising order;
    it names the nearest ones.
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
    """The values that S may have: 2^bits numbers in each group of inputs of a row.

    Args:
        bits: the bits of a code, one of BITS.
        group: the number of consecutive inputs that share a scale and a zero, 32 to 128 as a rule;
            None for a whole row.
        symmetric: place the values around zero, with zero = 2^(bits − 1) everywhere; otherwise from
            the smallest to the largest entry.
        offset: store the value of code 0 for each group, in place of a whole zero.
        scale_bits: store scales and offsets as multiples of units of their row, with so many bits,
            one of SCALE_BITS; None for floats of 16 bits.
        block: with scale_bits, the number of consecutive inputs that share units, a multiple of the
            group; None for a whole row. Scales of a symmetric grid with blocks have a sign.
        rate: of an entropy-coded grid (`entropy_coded`): the bits a weight of its codes in a file,
            from LEAST_RATE to MOST_RATE; None for codes of one length.

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
        """Codes that take this many bits each on average."""
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
                f" bits a weight, got {rate:g}",
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
                "a row with one scale has no multiples of it; use groups"
                f" ({option('group_size', 32)}), or leave out {option('scale_bits', bits)}",
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
        """For JSON: what a reader of the codes needs; `offset`, `scale_bits`, `block` and `rate`
        only where they are set.
        """
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
        """The bits of a code in a file, on average."""
        return self.bits if self.rate is None else self.rate

    def with_bits(self, bits: int) -> "Grid":
        """The grid with codes of another length, or of another rate."""
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
        # Their layouts leave out entries that happen to be zero, however many they keep.
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
        """The number of groups in a row of `width` inputs."""
        if self.group is None:
            return 1
        return width // self.group

    def blocks(self, width: int) -> int | None:
        """The number of blocks in a row of `width` inputs; None if its units are those of a row."""
        if self.block is None:
            return None
        return width // self.block

    def fit(self, entries: Tensor, storage: Floats | Multiples = FLOATS) -> "Levels":
        """The levels of groups of entries (out, …, n), from the smallest entry to the largest
        (arXiv 2210.17323): scale and zero (out, …, 1), in the dtype of the entries.

        Args:
            storage: which numbers they may be.
        """
        return self._spanning(*self._ends(entries), storage)

    def search(
        self,
        entries: Tensor,
        ranges: int,
        weights: Tensor,
        storage: Floats | Multiples = FLOATS,
    ) -> "Levels":
        """The levels with the smallest weighted sum of squared rounding errors in each group.

        Args:
            entries, storage: as for `fit`.
            ranges: the number of ranges of values that are tried for a group, from 1 to
                1 / NARROWER. The first range is that of `fit`, and each further one is narrower by
                a share NARROWER of the first.
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
        """The values of the lowest and of the highest code for groups (…, n): (…, 1) each."""
        high = entries.amax(-1, keepdim=True)
        low = entries.amin(-1, keepdim=True)
        if self.offset and self.scale_bits:
            return low.clamp_max_(0), high  # no multiple is above 0
        if self.offset:
            return low, high
        if self.signed_scales:
            # The code that has no opposite is at the entry that is farthest from zero.
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
        """Levels whose codes run from low to high. Without an offset, 0 is between them."""
        span = storage.scales((high - low) / self.top)
        scale = torch.where(span != 0, span, SMALLEST_HALF)  # a group of equal entries
        if self.offset and self.scale_bits:
            # Where scales are coarse, codes from the low end lose less than codes in the middle.
            zero = storage.offsets(low)
        elif self.offset:
            zero = storage.offsets((low + high - self.top * span) / 2)
        elif self.symmetric:
            zero = torch.full_like(scale, (self.top + 1) / 2)
        else:
            zero = (-low / scale).round_().clamp_(0, self.top)
        return Levels(self, scale, zero)

    def scaling(self, matrix: Tensor) -> "Scaling":
        """Scales and zeros that suit a matrix (out, in).

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
        """A scaling for a matrix (out, in), to be written into group by group."""
        # Transposed, so that the column of a group lies in one piece.
        shape = (self.groups(matrix.shape[1]), matrix.shape[0])
        storage = self.storage_for(matrix)
        return Scaling(self, matrix.new_ones(shape).T, matrix.new_zeros(shape).T, storage)

    def storage_for(self, matrix: Tensor) -> Floats | Multiples:
        """Which numbers the scales and offsets of a matrix (out, in) may be."""
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
        """The codes of the nearest values, whole numbers in the dtype of the entries."""
        if self.grid.offset:
            codes = ((entries - self.zero) / self.scale).round_()
        else:
            codes = (entries / self.scale).round_().add_(self.zero)
        return codes.clamp_(0, self.grid.top)

    def values(self, codes: Tensor) -> Tensor:
        """The values of codes, which are overwritten, in the dtype of the scale."""
        if self.grid.offset:
            return codes.mul_(self.scale).add_(self.zero)
        return codes.sub_(self.zero).mul_(self.scale)

    def nearest(self, entries: Tensor) -> Tensor:
        """The values that are nearest to entries."""
        return self.values(self.codes(entries))

    def error(self, entries: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of squared rounding errors of each group (…, n): (…, 1)."""
        squares = (entries - self.nearest(entries)).square_()
        return squares.mul_(weights).sum(-1, keepdim=True)


@dataclass(frozen=True)
class Scaling:
    """The scale and the zero of each group of a matrix (out, in), as in `Levels`: (out, groups),
    floating.

    Args:
        storage: which numbers they may be. Floats are in the dtype in which they are stored.
            Multiples are in a working dtype, and their units in the dtype in which they are stored.
        input_scale: of each input, (in,), on an entropy-coded grid; otherwise None.
    """

    grid: Grid
    scale: Tensor
    zero: Tensor
    storage: Floats | Multiples = FLOATS
    input_scale: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Scaling":
        """The same numbers, stored in another dtype; GridError if it does not hold them."""
        if isinstance(self.storage, Multiples):
            return replace(self, storage=self.storage.to(dtype))
        scale = cast_exactly(self.scale, dtype)
        zero = cast_exactly(self.zero, dtype)
        input_scale = self.input_scale
        if input_scale is not None:
            input_scale = cast_exactly(input_scale, dtype)
        return replace(self, scale=scale, zero=zero, input_scale=input_scale)

    def of_rows(self, rows: slice) -> "Scaling":
        """That of some rows, if scales and zeros are floats."""
        assert isinstance(self.storage, Floats)
        return replace(self, scale=self.scale[rows], zero=self.zero[rows])

    def levels(self) -> Levels:
        """Those of entries by group, (out, groups, n), in the working dtype."""
        dtype = working_dtype(self.scale)
        scale = self.scale.to(dtype).unsqueeze(-1)
        if self.input_scale is not None:
            scale = scale * self.input_scale.to(dtype)
        return Levels(self.grid, scale, self.zero.to(dtype).unsqueeze(-1))

    def at(self, j: int) -> Levels:
        """Those of the entries of input j, (out,); writing to them changes the group of j, except
        on an entropy-coded grid.
        """
        g = j // self.grid.group if self.grid.group else 0
        scale = self.scale[:, g]
        if self.input_scale is not None:
            scale = scale * self.input_scale[j]
        return Levels(self.grid, scale, self.zero[:, g])

    def storage_at(self, j: int) -> Floats | Multiples:
        """Which numbers those of the group of input j may be."""
        if isinstance(self.storage, Multiples):
            return self.storage.of_block(j // self.grid.block if self.grid.block else 0)
        return self.storage

    def by_group(self, matrix: Tensor) -> Tensor:
        """A matrix (out, in) as (out, groups, n)."""
        return matrix.unflatten(1, (self.scale.shape[1], -1))

    def codes(self, matrix: Tensor) -> Tensor:
        """The codes, uint8, of the values nearest to a matrix (out, in); exact for one on the grid
        in float32.
        """
        return self.levels().codes(self.by_group(matrix)).flatten(1).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """The values of codes (out, in) of any dtype, rounded once to the dtype in which the scales
        or their units are stored.
        """
        stored = self.scale
        if isinstance(self.storage, Multiples):
            stored = self.storage.scale_unit
        parts = self.by_group(codes.to(working_dtype(self.scale), copy=True))
        return self.levels().values(parts).flatten(1).to(stored.dtype)

    def nearest(self, matrix: Tensor) -> Tensor:
        """The matrix on the grid that is nearest to a matrix (out, in)."""
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
        """The codes of a matrix on the grid, with scales in another dtype; GridError if that dtype
        does not hold them exactly.
        """
        return cls(scaling.codes(matrix), scaling.to(dtype))

    def values(self) -> Tensor:
        """The matrix, in the dtype of the scales."""
        return self.scaling.values(self.codes)
