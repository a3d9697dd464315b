"""A grid as a constraint set: the entries of a group of inputs of a row lie at equal distances.

    S_ij = (code_ij − zero_g)·scale_g,     code_ij in 0 … 2^bits − 1,   zero_g too   (g: the group
    of row i, input j) S_ij = code_ij·scale_g + offset_g,     offset_g any number, on a grid with an
    offset

On a grid with a whole zero, zero is a value to the bit, so that S can be on a support and on a grid
at once. A grid with an offset has one more number for each group, and fits better: it is for an S
that keeps every entry. Scales and offsets have the eight significant bits of bfloat16: they are the
same numbers in every dtype that S is stored in, and (code − zero)·scale is exact in float32.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hasslefree.core.gram import working_dtype
from hasslefree.errors import GridError, option
from hasslefree.validation import Checked, Positive

if TYPE_CHECKING:
    from hasslefree.core.patterns import Pattern

# Bits of a code.
BITS = (2, 3, 4, 5, 6, 8)
# Each further range that is tried for a group is narrower by this share of the whole one.
NARROWER = 0.02


@dataclass(frozen=True)
class Grid(Checked):
    """What the entries of S may be: 2^bits values in each group of inputs of a row.

    Args:
        bits: of a code: one of BITS.
        group: consecutive inputs that share a scale and a zero, 32 to 128 as a rule; None for a
            whole row.
        symmetric: around zero, with zero = 2^(bits − 1) everywhere; otherwise from the least to the
            largest entry.
        offset: with the value of code 0 as a number for each group, in the place of a whole zero.

    Example:
        >>> scaling = Grid(bits=4, group=64).scaling(weight)  # weight: (out, in)
        >>> rounded = scaling.nearest(weight)
    """

    error: ClassVar = GridError
    bits: int = 4
    group: Positive | None = 64
    symmetric: bool = False
    offset: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in BITS:
            allowed = ", ".join(map(str, BITS))
            raise GridError(
                f"bits must be one of {allowed}, got {self.bits}; use {option('bits', 4)}",
                ("bits",),
            )
        if self.symmetric and self.offset:
            raise GridError(
                "a symmetric grid has no offset; leave out one of symmetric and offset",
                ("symmetric", "offset"),
            )

    def __str__(self) -> str:
        groups = "rows" if self.group is None else f"groups of {self.group}"
        return (
            f"int{self.bits} in"
            f" {groups}{', symmetric' * self.symmetric}{', with offsets' * self.offset}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what a reader of the codes needs; the offset only where there is one."""
        content = {"bits": self.bits, "group": self.group, "symmetric": self.symmetric}
        return content | ({"offset": True} if self.offset else {})

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def check(self, shape: tuple[int, int], pattern: "Pattern | None" = None) -> None:
        """Raise GridError where a weight (out, in) cannot have this grid, alone or with a
        pattern.
        """
        if self.group is not None and shape[1] % self.group:
            fitting = math.gcd(shape[1], 128)
            remedy = f"{option('group_size', fitting)}, or " if fitting > 1 else ""
            raise GridError(
                f"group_size {self.group} does not divide the {shape[1]} inputs of the layer; "
                f"use {remedy}{option('group_size', 0)} for one scale per row"
            )
        together = pattern.group if pattern else None
        if self.group is not None and together is not None and self.group % together:
            raise GridError(
                f"group_size {self.group} is not a multiple of {together}, the group length of the"
                f" pattern; use a multiple of {together}, or {option('group_size', 0)} for one"
                " scale per row"
            )
        if self.offset and pattern and pattern.kept(shape) < math.prod(shape):
            raise GridError(
                f"pattern {pattern} prunes entries, and a grid with offsets need not have the value"
                f" zero; leave out {option('offset', True)}, or use {option('pattern', 'dense')}",
                ("offset", "pattern"),
            )

    def groups(self, width: int) -> int:
        """How many groups a row of `width` inputs has."""
        return 1 if self.group is None else width // self.group

    def fit(
        self, entries: Tensor, ranges: int = 1, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scale and zero, (…, 1) each, of groups of entries (…, n), in the dtype of the entries.

        Args:
            ranges: how many ranges of values are tried for a group, from 1 to 1 / NARROWER. 1: from
                its least entry to its largest (arXiv 2210.17323). More: each narrower than the one
                before by a share NARROWER of the whole, and the one with the least sum of squared
                rounding errors is taken.
            weights: of those squares, (n,); None for equal ones.
        """
        high, low = entries.amax(-1, keepdim=True), entries.amin(-1, keepdim=True)
        if not self.offset:
            high, low = high.clamp_min_(0), low.clamp_max_(0)
        if self.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale, zero = self._spanning(low, high)
        if ranges == 1:
            return scale, zero

        def error(scale: Tensor, zero: Tensor) -> Tensor:
            squares = (entries - self.nearest(entries, scale, zero)).square_()
            return (squares if weights is None else squares.mul_(weights)).sum(-1, keepdim=True)

        least, centre = error(scale, zero), (low + high) / 2 if self.offset else 0.0
        for step in range(1, ranges):
            share = 1 - NARROWER * step
            narrower, its_zero = self._spanning(
                *(centre + (end - centre) * share for end in (low, high))
            )
            better = (tried := error(narrower, its_zero)) < least
            least = torch.where(better, tried, least)
            scale, zero = torch.where(better, narrower, scale), torch.where(better, its_zero, zero)
        return scale, zero

    def _spanning(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero with which the codes run from low to high; low ≤ 0 ≤ high, except with an
        offset.
        """
        span = stored((high - low) / self.top)
        scale = torch.where(span > 0, span, 1.0)  # a group of equal entries
        if self.offset:
            return scale, stored((low + high - self.top * span) / 2)
        if self.symmetric:
            return scale, torch.full_like(scale, (self.top + 1) / 2)
        return scale, (-low / scale).round_().clamp_(0, self.top)

    def nearest(self, entries: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The values on the grid that are nearest to entries; scale and zero broadcast with
        them.
        """
        return self.values(self.codes(entries, scale, zero), scale, zero)

    def values(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Of codes, which are overwritten, in the dtype of the scale."""
        return codes.mul_(scale).add_(zero) if self.offset else codes.sub_(zero).mul_(scale)

    def codes(self, entries: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The codes of those values, whole numbers in the dtype of the entries."""
        steps = (
            ((entries - zero) / scale).round_()
            if self.offset
            else (entries / scale).round_().add_(zero)
        )
        return steps.clamp_(0, self.top)

    def scaling(self, matrix: Tensor) -> "Scaling":
        """Scales and zeros that suit a matrix (out, in); a GridError if the groups do not divide
        its inputs.
        """
        self.check((matrix.shape[0], matrix.shape[1]))
        scale, zero = self.fit(matrix.unflatten(1, (self.groups(matrix.shape[1]), -1)))
        return Scaling(self, scale.squeeze(-1), zero.squeeze(-1))

    def empty_scaling(self, like: Tensor) -> "Scaling":
        """A scaling for a matrix (out, in), to be written into group by group."""
        shape = (
            self.groups(like.shape[1]),
            like.shape[0],
        )  # the column of a group lies in one piece
        return Scaling(self, like.new_ones(shape).T, like.new_zeros(shape).T)


def stored(numbers: Tensor) -> Tensor:
    """Scales or offsets, rounded to what every dtype of a model holds: bfloat16's eight bits."""
    return numbers.bfloat16().to(numbers.dtype)


@dataclass(frozen=True)
class Scaling:
    """The scale and the zero of each group of a matrix (out, in): (out, groups), floating.

    The zero is a code, a whole number; on a grid with an offset, it is the value of code 0.
    """

    grid: Grid
    scale: Tensor
    zero: Tensor

    def codes(self, matrix: Tensor) -> Tensor:
        """The codes, uint8, of the values nearest to a matrix (out, in); exact for one on the grid
        in float32.
        """
        parts = matrix.unflatten(1, (self.scale.shape[1], -1))
        return (
            self.grid.codes(parts, self.scale.unsqueeze(-1), self.zero.unsqueeze(-1))
            .flatten(1)
            .to(torch.uint8)
        )

    def values(self, codes: Tensor) -> Tensor:
        """The values of codes (out, in) of any dtype, rounded once to the dtype of the scale."""
        parts = codes.to(working_dtype(self.scale), copy=True).unflatten(
            1, (self.scale.shape[1], -1)
        )
        scale, zero = (part.to(parts.dtype).unsqueeze(-1) for part in (self.scale, self.zero))
        return self.grid.values(parts, scale, zero).flatten(1).to(self.scale.dtype)

    def nearest(self, matrix: Tensor) -> Tensor:
        """The matrix on the grid that is nearest to a matrix (out, in)."""
        parts = matrix.unflatten(1, (self.scale.shape[1], -1))
        return self.grid.nearest(parts, self.scale.unsqueeze(-1), self.zero.unsqueeze(-1)).flatten(
            1
        )

    def nearest_column(self, column: Tensor, j: int) -> Tensor:
        """The values on the grid that are nearest to those of input j: (out,)."""
        g = j // self.grid.group if self.grid.group else 0
        return self.grid.nearest(column, self.scale[:, g], self.zero[:, g])


@dataclass(frozen=True)
class Quantised:
    """A matrix (out, in) on a grid, as its codes: uint8 (out, in). Entries off the support have the
    code of zero.
    """

    codes: Tensor
    scaling: Scaling

    @classmethod
    def of(cls, matrix: Tensor, scaling: Scaling, dtype: torch.dtype) -> "Quantised":
        """The codes of a matrix on the grid, with scales in another dtype; GridError if they do not
        fit it exactly.
        """
        scale, zero = scaling.scale.to(dtype), scaling.zero.to(dtype)
        if any(
            not torch.equal(new.to(old.dtype), old)
            for new, old in ((scale, scaling.scale), (zero, scaling.zero))
        ):
            name = str(dtype).removeprefix("torch.")
            raise GridError(
                f"a quantisation scale or offset overflows or underflows {name}; "
                f"use another dtype ({option('dtype', 'bfloat16')})"
            )
        return cls(scaling.codes(matrix), Scaling(scaling.grid, scale, zero))

    def values(self) -> Tensor:
        """The matrix, in the dtype of the scales."""
        return self.scaling.values(self.codes)
