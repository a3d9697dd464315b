"""How S is stored: its values, and an index tensor with their positions. Packing and unpacking is
exact, bit for bit.

An entry is stored if its bits are not all zero: −0.0 is stored, +0.0 is not. Bits go into bytes
from the low end.

Every layout of a matrix S (out, in) has the name and the dtype of its index tensor, and these
methods:

    shapes    the shapes of `values` and the index; a PatternError if no S has this number of stored
    values pack      the values and the index of S; a PatternError if S has more entries than the
    pattern allows unpack    S, with gradients to the values; the index is not validated
    validate  raises PatternError if an index of the right shape has contents that `pack` never
    writes
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.budgets import parse_pattern
from hasslefree.core.patterns import SemiStructured
from hasslefree.errors import PatternError

# Entries that are packed at a time: torch's selections by a mask need 16 bytes an entry.
CHUNK = 1 << 24


@dataclass(frozen=True)
class PackedGroups:
    """N:M: n values and one code for each m consecutive inputs of a row; codes follow each other
    without a gap.

    A code is the n positions, ascending, of ⌈log₂ m⌉ bits each; or the m-bit mask, where that is
    shorter. A group with fewer entries is filled up with +0.0 at its lowest free positions.
    """

    n: int
    m: int

    index = "positions"
    index_dtype = torch.uint8

    @property
    def position_bits(self) -> int:
        return (self.m - 1).bit_length()

    @property
    def is_mask(self) -> bool:
        """Whether a code is the mask."""
        return self.n * self.position_bits > self.m

    @property
    def code_bits(self) -> int:
        return self.m if self.is_mask else self.n * self.position_bits

    def shapes(self, out: int, width: int, nonzeros: int) -> dict[str, tuple[int, ...]]:
        SemiStructured(self.n, self.m).check((out, width))
        groups = width // self.m
        if nonzeros != out * groups * self.n:
            raise PatternError(
                f"a {out}×{width} weight of pattern {self.n}:{self.m} has {out * groups * self.n}"
                f" stored values, got {nonzeros}"
            )
        return {
            "values": (out, groups * self.n),
            "positions": (out, -(-groups * self.code_bits // 8)),
        }

    def pack(self, sparse: Tensor) -> tuple[Tensor, Tensor]:
        SemiStructured(self.n, self.m).check((sparse.shape[0], sparse.shape[1]))
        return joined([self._pack_rows(rows, chunk) for rows, chunk in row_chunks(sparse)])

    def _pack_rows(self, first: int, sparse: Tensor) -> tuple[Tensor, Tensor]:
        """`pack` for the rows from `first` on: (rows, in)."""
        rows, groups = len(sparse), sparse.shape[1] // self.m
        entries = is_stored(sparse).view(rows, groups, self.m)
        missing = self.n - entries.sum(-1, keepdim=True)
        if missing.amin() < 0:
            row, group = (missing[..., 0] < 0).nonzero()[0].tolist()
            raise PatternError(
                f"row {first + row}, inputs {group * self.m} to {group * self.m + self.m - 1}, has"
                f" {self.n - int(missing[row, group])} non-zeros, but pattern {self.n}:{self.m}"
                f" allows {self.n}; use another pattern"
            )
        kept = entries | (~entries & ((~entries).cumsum(-1, dtype=torch.int32) <= missing))
        values = sparse.masked_select(kept.view(rows, -1)).view(rows, groups * self.n)
        if self.is_mask:
            return values, pack_bits(kept.view(rows, -1))
        places = (
            torch.arange(self.m, dtype=torch.int32, device=sparse.device)
            .expand(kept.shape)
            .masked_select(kept)
        )
        bits = (
            places[:, None]
            >> torch.arange(self.position_bits, dtype=torch.int32, device=sparse.device)
            & 1
        )
        return values, pack_bits(bits.view(rows, groups * self.code_bits))

    def unpack(self, values: Tensor, index: Tensor, width: int) -> Tensor:
        if not self.code_bits:  # everything is kept, or nothing
            return values.clone() if self.n else values.new_zeros(len(index), width)
        if self.is_mask:
            return values.new_zeros(len(index), width).masked_scatter(
                unpack_bits(index)[:, :width], values
            )
        sparse: Tensor = Placed.apply(values, self._places(index, width), (len(index), width))
        return sparse

    def _places(self, index: Tensor, width: int) -> Tensor:
        """The position of each value in S, counted row by row; for codes that do not cross bytes: a
        table look-up.
        """
        dtype = torch.int32 if len(index) * width < 2**31 else torch.int64
        if 8 % self.code_bits:
            codes, places = (
                1,
                self._positions(unpack_bits(index)[:, : width // self.m * self.code_bits]).to(
                    dtype
                ),
            )
        else:
            codes = 8 // self.code_bits
            in_byte = torch.arange(codes, dtype=dtype, device=index.device)[:, None] * self.m
            table = (self._positions(bits_of_bytes(index.device)) + in_byte).flatten(1)
            places = look_up_bytes(table, index).view(len(index), -1, table.shape[1])
        places += torch.arange(places.shape[1], dtype=dtype, device=index.device)[:, None] * (
            codes * self.m
        )
        places += torch.arange(len(index), dtype=dtype, device=index.device)[:, None, None] * width
        return places.flatten(1)[:, : width // self.m * self.n].flatten()

    def _positions(self, bits: Tensor) -> Tensor:
        """(rows, codes · bits of a code) → (rows, codes, n)."""
        fields = bits.unflatten(1, (-1, self.n, self.position_bits))
        dtype = torch.uint8 if self.position_bits <= 8 else torch.int32
        places = torch.zeros(fields.shape[:-1], dtype=dtype, device=bits.device)
        for bit in range(self.position_bits):
            places = places | fields[..., bit].to(dtype) << bit
        return places

    def validate(self, index: Tensor, width: int, nonzeros: int) -> None:
        used = width // self.m * self.code_bits
        whole = used // 8 if self.code_bits and 8 % self.code_bits == 0 else 0
        if whole:  # as in `mask`; the rest of the row is at most a byte
            possible = ~self._impossible(bits_of_bytes(index.device)).any(1, keepdim=True)
            if not look_up_bytes(possible, index[:, :whole]).all():
                whole = 0
        for first, rows in row_chunks(index):
            bits = unpack_bits(rows[:, whole:])
            end = used - 8 * whole
            if len(padded := bits[:, end:].any(1).nonzero()):
                raise PatternError(
                    f"a padding bit at the end of row {first + int(padded[0])} is not 0"
                )
            if end and (bad := self._impossible(bits[:, :end])).any():
                row, group = bad.nonzero()[0].tolist()
                group += 8 * whole // self.code_bits
                raise PatternError(
                    f"the stored code of row {first + row}, inputs {group * self.m} to"
                    f" {group * self.m + self.m - 1}, is not a valid code of pattern"
                    f" {self.n}:{self.m}"
                )

    def _impossible(self, bits: Tensor) -> Tensor:
        """The codes that `pack` never writes: (rows, codes · bits of a code) → bool (rows,
        codes).
        """
        if self.is_mask:
            return bits.unflatten(1, (-1, self.m)).sum(-1) != self.n
        places = self._positions(bits)
        return (places >= self.m).any(-1) | (places[..., 1:] <= places[..., :-1]).any(-1)


@dataclass(frozen=True)
class Bitmask:
    """A bit for each entry, rows padded to whole bytes; the values row by row."""

    index = "mask"
    index_dtype = torch.uint8

    def shapes(self, out: int, width: int, nonzeros: int) -> dict[str, tuple[int, ...]]:
        if not 0 <= nonzeros <= out * width:
            raise PatternError(f"a {out}×{width} weight cannot have {nonzeros} stored values")
        return {"values": (nonzeros,), "mask": (out, -(-width // 8))}

    def pack(self, sparse: Tensor) -> tuple[Tensor, Tensor]:
        masks = ((chunk, is_stored(chunk)) for _, chunk in row_chunks(sparse))
        return joined([(chunk.masked_select(mask), pack_bits(mask)) for chunk, mask in masks])

    def unpack(self, values: Tensor, index: Tensor, width: int) -> Tensor:
        return values.new_zeros(len(index), width).masked_scatter(
            unpack_bits(index)[:, :width], values
        )

    def validate(self, index: Tensor, width: int, nonzeros: int) -> None:
        if width % 8 and len(padded := (index[:, -1] >> width % 8).nonzero()):
            raise PatternError(f"a padding bit at the end of row {int(padded[0])} is not 0")
        ones = bits_of_bytes(index.device).sum(1, keepdim=True, dtype=torch.uint8)
        if (
            count := sum(int(look_up_bytes(ones, rows).sum()) for _, rows in row_chunks(index))
        ) != nonzeros:
            raise PatternError(f"the mask marks {count} entries, but {nonzeros} values are stored")


@dataclass(frozen=True)
class Columns:
    """Whole input channels: the columns that have an entry, ascending, and their values (out,
    k).
    """

    index = "columns"
    index_dtype = torch.int32

    def shapes(self, out: int, width: int, nonzeros: int) -> dict[str, tuple[int, ...]]:
        if nonzeros % out or not 0 <= nonzeros <= out * width:
            raise PatternError(
                f"{nonzeros} values do not fill whole columns of a {out}×{width} weight; there must"
                f" be a multiple of {out}, and at most {out * width}"
            )
        return {"values": (out, nonzeros // out), "columns": (nonzeros // out,)}

    def pack(self, sparse: Tensor) -> tuple[Tensor, Tensor]:
        columns = is_stored(sparse).any(0).nonzero().flatten()
        return sparse.index_select(1, columns), columns.int()

    def unpack(self, values: Tensor, index: Tensor, width: int) -> Tensor:
        return values.new_zeros(len(values), width).index_copy(1, index.long(), values)

    def validate(self, index: Tensor, width: int, nonzeros: int) -> None:
        if ((index < 0) | (index >= width)).any():
            raise PatternError(f"a column index is not between 0 and {width - 1}")
        if (index[1:] <= index[:-1]).any():
            raise PatternError("the column indices are not in ascending order")


Layout = PackedGroups | Bitmask | Columns


@cache
def layout_of(pattern: str) -> Layout:
    """The layout of a pattern's name, such as "2:4" or "row". A name is parsed once per process."""
    semi = parse_pattern(pattern)
    if semi is not None:
        return PackedGroups(semi.n, semi.m)
    return Columns() if pattern == "structured" else Bitmask()


class Placed(torch.autograd.Function):
    """Values at their places in a matrix, counted row by row: on a CPU faster, both ways, than
    selections by a mask.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = values.shape
        return (
            values.new_zeros(shape[0] * shape[1])
            .index_copy_(0, places.long(), values.flatten())
            .view(shape)
        )

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        [places] = ctx.saved_tensors
        return outer[0].flatten().index_select(0, places).view(ctx.shape), None, None


def is_stored(sparse: Tensor) -> Tensor:
    """The entries whose bits are not all zero, bool, for a floating tensor of any shape."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sparse.contiguous().view(integers[sparse.element_size()]) != 0


def row_chunks(matrix: Tensor) -> list[tuple[int, Tensor]]:
    """The matrix in pieces of whole rows and about CHUNK entries, each with the number of its first
    row.
    """
    rows = max(1, CHUNK // max(1, matrix.shape[1]))
    return [(first, matrix[first : first + rows]) for first in range(0, len(matrix), rows)]


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Values and indices of consecutive rows, put together."""
    values, indices = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(indices)


def pack_bits(bits: Tensor) -> Tensor:
    """0s and 1s (rows, n) → uint8 (rows, ⌈n / 8⌉)."""
    rows, n = bits.shape
    octets = F.pad(bits.to(torch.uint8), (0, -n % 8)).view(rows, -(-n // 8), 8)
    return (octets << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(
        -1, dtype=torch.uint8
    )


def unpack_bits(packed: Tensor) -> Tensor:
    """uint8 (rows, n) → bool (rows, 8n), by looking up whole bytes."""
    return look_up_bytes(bits_of_bytes(packed.device), packed)


def bits_of_bytes(device: torch.device) -> Tensor:
    """The bits of 0 … 255: bool (256, 8)."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    return (numbers >> torch.arange(8, dtype=torch.uint8, device=device) & 1).bool()


def look_up_bytes(table: Tensor, packed: Tensor) -> Tensor:
    """Each byte's row of a table (256, k): uint8 (rows, n) → (rows, n · k)."""
    rows, n = packed.shape
    return table.index_select(0, packed.flatten().int()).view(rows, n * table.shape[1])
