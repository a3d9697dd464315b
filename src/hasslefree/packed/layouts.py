"""Layouts of S in storage: a tensor of values, and an index tensor with their positions. Packing
and unpacking are exact, bit for bit.

An entry is stored if its bits are not all zero: −0.0 is stored, +0.0 is not. Bytes are filled from
the lowest bit.

Every layout of a matrix S (out, in) has the name and the dtype of the index tensor, and these
methods:

- `shapes`: the shapes of `values` and the index; raises a PatternError if no S of this shape has
  this number of stored values.
- `pack`: the values and the index of S; raises a PatternError if S has more entries than the
  pattern allows.
- `unpack`: S, with gradients to the values; the index is not validated.
- `validate`: raises a PatternError if `pack` never writes these contents of an index.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.budgets import parse_pattern
from hasslefree.core.patterns import SemiStructured
from hasslefree.errors import PatternError

# Entries packed at a time: selecting by a mask needs 16 bytes per entry in torch.
CHUNK = 1 << 24

# The shapes of the values and of the index.
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class PackedGroups:
    """N:M: n values and one code per group of m consecutive inputs of a row; codes follow each
    other without gaps.

    A code is the n positions, ascending, of ⌈log₂ m⌉ bits each; or the m-bit mask, if the mask is
    shorter or m is above 256. A group with fewer entries is padded with +0.0 at the lowest free
    positions.
    """

    n: int
    m: int

    index = "positions"
    index_dtype = torch.uint8

    @property
    def position_bits(self) -> int:
        """The number of bits of a position in a group."""
        return (self.m - 1).bit_length()

    @property
    def is_mask(self) -> bool:
        """True if the codes are masks."""
        return self.position_bits > 8 or self.n * self.position_bits > self.m

    @property
    def code_bits(self) -> int:
        """The number of bits of a code."""
        if self.is_mask:
            return self.m
        return self.n * self.position_bits

    def shapes(self, shape: tuple[int, int], nonzeros: int) -> Shapes:
        pattern = SemiStructured(self.n, self.m)
        pattern.check(shape)
        out, width = shape
        stored = pattern.kept(shape)
        if nonzeros != stored:
            raise PatternError(
                f"a {out}×{width} weight of pattern {self.n}:{self.m} has {stored} stored values,"
                f" got {nonzeros}"
            )
        groups = width // self.m
        code_bytes = -(-groups * self.code_bits // 8)
        return (out, groups * self.n), (out, code_bytes)

    def pack(self, sparse: Tensor) -> tuple[Tensor, Tensor]:
        SemiStructured(self.n, self.m).check(sparse.shape)
        return in_chunks(sparse, self._pack_rows)

    def _pack_rows(self, sparse: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Pack rows (rows, in). first: the index of the first of them in S."""
        rows, width = sparse.shape
        entries = is_stored(sparse).view(rows, -1, self.m)
        missing = self.n - entries.sum(-1, keepdim=True)
        if missing.amin() < 0:
            row, group = (missing[..., 0] < 0).nonzero()[0].tolist()
            count = self.n - int(missing[row, group])
            raise PatternError(
                f"row {first + row}, {self._inputs(group)}, has {count} non-zeros, but pattern"
                f" {self.n}:{self.m} allows {self.n}; use another pattern"
            )
        free = ~entries
        filling = free & (free.cumsum(-1, dtype=torch.int32) <= missing)
        kept = (entries | filling).view(rows, width)
        values = sparse.masked_select(kept).view(rows, width // self.m * self.n)
        if self.is_mask:
            return values, pack_bits(kept, 1)
        positions = kept.flatten().nonzero().view(values.shape) % self.m
        return values, pack_bits(positions, self.position_bits)

    def _inputs(self, group: int) -> str:
        return f"inputs {group * self.m} to {group * self.m + self.m - 1}"

    def unpack(
        self,
        values: Tensor,
        index: Tensor,
        width: int,
    ) -> Tensor:
        if not self.code_bits:  # everything is stored, or nothing
            return F.pad(values, (0, width - values.shape[1]))
        if self.is_mask:
            return Bitmask().unpack(values, index, width)
        positions = self._positions(index, width)
        first_inputs = torch.arange(0, width, self.m, device=index.device)
        inputs = positions + first_inputs.unsqueeze(1)
        return values.new_zeros(len(index), width).scatter(1, inputs.flatten(1), values)

    def _positions(self, index: Tensor, width: int) -> Tensor:
        """The positions of the values in their groups: uint8 (out, groups, n)."""
        groups = width // self.m
        positions = unpack_bits(index, self.position_bits, groups * self.n)
        return positions.reshape(-1, groups, self.n)

    def validate(
        self,
        index: Tensor,
        width: int,
        nonzeros: int,
    ) -> None:
        if not self.code_bits:
            return
        check_padding(index, width // self.m * self.code_bits)
        invalid = self._invalid(index, width)
        if invalid.any():
            row, group = invalid.nonzero()[0].tolist()
            raise PatternError(
                f"the stored code of row {row}, {self._inputs(group)}, is not a valid code of"
                f" pattern {self.n}:{self.m}"
            )

    def _invalid(self, index: Tensor, width: int) -> Tensor:
        """Mark the codes that `pack` never writes: bool (out, groups)."""
        if self.is_mask:
            bits = unpack_bits(index, 1, width)
            return bits.unflatten(1, (-1, self.m)).sum(-1) != self.n
        positions = self._positions(index, width)
        invalid = positions[..., -1] > self.m - 1  # 256 is no uint8
        for k in range(1, self.n):
            invalid |= positions[..., k] <= positions[..., k - 1]
        return invalid


@dataclass(frozen=True)
class Bitmask:
    """One bit per entry, each row padded to whole bytes; the values row by row."""

    index = "mask"
    index_dtype = torch.uint8

    def shapes(self, shape: tuple[int, int], nonzeros: int) -> Shapes:
        out, width = shape
        if not 0 <= nonzeros <= out * width:
            raise PatternError(f"a {out}×{width} weight cannot have {nonzeros} stored values")
        return (nonzeros,), (out, -(-width // 8))

    def pack(self, sparse: Tensor) -> tuple[Tensor, Tensor]:
        return in_chunks(sparse, self._pack_rows)

    def _pack_rows(self, sparse: Tensor, first: int) -> tuple[Tensor, Tensor]:
        mask = is_stored(sparse)
        return sparse.masked_select(mask), pack_bits(mask, 1)

    def unpack(
        self,
        values: Tensor,
        index: Tensor,
        width: int,
    ) -> Tensor:
        mask = unpack_bits(index, 1, width).bool()
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    def validate(
        self,
        index: Tensor,
        width: int,
        nonzeros: int,
    ) -> None:
        check_padding(index, width)
        count = int(unpack_bits(index, 1, width).sum())
        if count != nonzeros:
            raise PatternError(f"the mask marks {count} entries, but {nonzeros} values are stored")


@dataclass(frozen=True)
class Columns:
    """Whole input channels: the k columns that have an entry, ascending, and values (out, k)."""

    index = "columns"
    index_dtype = torch.int32

    def shapes(self, shape: tuple[int, int], nonzeros: int) -> Shapes:
        out, width = shape
        if nonzeros % out or not 0 <= nonzeros <= out * width:
            raise PatternError(
                f"{nonzeros} values do not fill whole columns of a {out}×{width} weight; there must"
                f" be a multiple of {out}, and at most {out * width}"
            )
        return (out, nonzeros // out), (nonzeros // out,)

    def pack(self, sparse: Tensor) -> tuple[Tensor, Tensor]:
        columns = is_stored(sparse).any(0).nonzero().flatten()
        return sparse.index_select(1, columns), columns.int()

    def unpack(
        self,
        values: Tensor,
        index: Tensor,
        width: int,
    ) -> Tensor:
        return values.new_zeros(len(values), width).index_copy(1, index.long(), values)

    def validate(
        self,
        index: Tensor,
        width: int,
        nonzeros: int,
    ) -> None:
        if ((index < 0) | (index >= width)).any():
            raise PatternError(f"a column index is not between 0 and {width - 1}")
        if (index[1:] <= index[:-1]).any():
            raise PatternError("the column indices are not in ascending order")


Layout = PackedGroups | Bitmask | Columns


@cache
def layout_of(pattern: str) -> Layout:
    """The layout of the pattern of this name, such as "2:4" or "row"."""
    semi = parse_pattern(pattern)
    if semi is not None:
        return PackedGroups(semi.n, semi.m)
    if pattern == "structured":
        return Columns()
    return Bitmask()


def support_of(
    layout: Layout,
    stored_shape: tuple[int, ...],
    index: Tensor,
    width: int,
) -> Tensor:
    """The mask of the entries for values of this shape, in row-major order: bool (out, width)."""
    ones = torch.ones(stored_shape, dtype=torch.uint8, device=index.device)
    return layout.unpack(ones, index, width).bool()


def is_stored(sparse: Tensor) -> Tensor:
    """Mark the entries whose bits are not all zero: bool, for a floating tensor of any shape."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sparse.contiguous().view(integers[sparse.element_size()]) != 0


def in_chunks(
    sparse: Tensor, pack_rows: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Pack whole rows, about CHUNK entries at a time. pack_rows: takes rows of S and the index of
    the first.
    """
    height = max(1, CHUNK // max(1, sparse.shape[1]))
    parts = [pack_rows(rows, i * height) for i, rows in enumerate(sparse.split(height))]
    values, indices = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(indices)


def check_padding(index: Tensor, used: int) -> None:
    """Raise a PatternError if a bit of a row is set beyond the `used` ones."""
    if used % 8:
        padded = (index[:, -1] >> used % 8).nonzero()
        if len(padded):
            raise PatternError(f"a padding bit at the end of row {int(padded[0])} is not 0")


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 0 to 8 bits, any integers (…, n) → uint8 (…, ⌈n·bits / 8⌉): low bits first,
    without gaps, the rest of a row zeros.
    """
    count = codes.shape[-1]
    padded = F.pad(codes.long(), (0, -count % 8))
    eights = padded.unflatten(-1, (-1, 8))
    words = (eights << bits * torch.arange(8, device=codes.device)).sum(-1)
    octets = words.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    return octets[..., : -(-count * bits // 8)]


def unpack_bits(
    octets: Tensor,
    bits: int,
    count: int,
) -> Tensor:
    """Unpack codes of 1 to 8 bits: uint8 (…, ⌈count·bits / 8⌉ or more) → uint8 (…, count)."""
    rows = octets.shape[:-1]
    mask = (1 << bits) - 1
    if 8 % bits:
        octets = F.pad(octets, (0, -octets.shape[-1] % bits))
        octets = octets.unflatten(-1, (-1, bits))
        words = F.pad(octets, (0, 8 - bits)).contiguous().view(torch.int64)
        codes = words >> bits * torch.arange(8, device=octets.device) & mask
        return codes.to(torch.uint8).flatten(-2)[..., :count]
    # All codes of a byte at once: a look-up is faster than shifts.
    numbers = torch.arange(256, dtype=torch.uint8, device=octets.device).unsqueeze(1)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device)
    table = numbers >> shifts & mask
    codes = table.index_select(0, octets.flatten().int())
    return codes.view(*rows, octets.shape[-1] * (8 // bits))[..., :count]
