"""How S is stored: its values, and an index tensor with their positions. Packing and unpacking is
exact, bit for bit.

An entry is stored if its bits are not all zero: −0.0 is stored, +0.0 is not. Bits go into bytes
from the low end.

Every layout of a matrix S (out, in) has the name and the dtype of its index tensor, and these
methods:

- `shapes`: the shapes of `values` and the index; a PatternError if no S has this number of stored
  values.
- `pack`: the values and the index of S; a PatternError if S has more entries than the pattern
  allows.
- `unpack`: S, with gradients to the values; the index is not validated.
- `validate`: a PatternError if an index of the right shape has contents that `pack` never writes.
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

# Entries that are packed at a time: torch's selections by a mask need 16 bytes per entry.
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
        """The bits of a position in its group."""
        return (self.m - 1).bit_length()

    @property
    def is_mask(self) -> bool:
        """True if a code is the mask."""
        return self.n * self.position_bits > self.m

    @property
    def code_bits(self) -> int:
        """The bits of a code."""
        if self.is_mask:
            return self.m
        return self.n * self.position_bits

    def shapes(
        self,
        out: int,
        width: int,
        nonzeros: int,
    ) -> dict[str, tuple[int, ...]]:
        SemiStructured(self.n, self.m).check((out, width))
        groups = width // self.m
        stored = out * groups * self.n
        if nonzeros != stored:
            raise PatternError(
                f"a {out}×{width} weight of pattern {self.n}:{self.m} has {stored} stored values,"
                f" got {nonzeros}"
            )
        code_bytes = -(-groups * self.code_bits // 8)
        return {"values": (out, groups * self.n), "positions": (out, code_bytes)}

    def pack(self, sparse: Tensor) -> tuple[Tensor, Tensor]:
        SemiStructured(self.n, self.m).check((sparse.shape[0], sparse.shape[1]))
        return joined([self._pack_rows(first, rows) for first, rows in row_chunks(sparse)])

    def _pack_rows(self, first: int, sparse: Tensor) -> tuple[Tensor, Tensor]:
        """Pack the rows from `first` on: (rows, in)."""
        rows = len(sparse)
        groups = sparse.shape[1] // self.m
        entries = is_stored(sparse).view(rows, groups, self.m)
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
        kept = entries | filling
        values = sparse.masked_select(kept.view(rows, -1)).view(rows, groups * self.n)
        if self.is_mask:
            return values, pack_bits(kept.view(rows, -1))
        inputs = torch.arange(self.m, dtype=torch.int32, device=sparse.device)
        positions = inputs.expand(kept.shape).masked_select(kept)
        shifts = torch.arange(self.position_bits, dtype=torch.int32, device=sparse.device)
        bits = positions[:, None] >> shifts & 1
        return values, pack_bits(bits.view(rows, groups * self.code_bits))

    def _inputs(self, group: int) -> str:
        return f"inputs {group * self.m} to {group * self.m + self.m - 1}"

    def unpack(
        self,
        values: Tensor,
        index: Tensor,
        width: int,
    ) -> Tensor:
        out = len(index)
        if not self.code_bits:  # everything is kept, or nothing
            if self.n:
                return values.clone()
            return values.new_zeros(out, width)
        if self.is_mask:
            mask = unpack_bits(index)[:, :width]
            return values.new_zeros(out, width).masked_scatter(mask, values)
        sparse: Tensor = Placed.apply(values, self._places(index, width), (out, width))
        return sparse

    def _places(self, index: Tensor, width: int) -> Tensor:
        """The position of each value in S, counted row by row."""
        out = len(index)
        dtype = torch.int32 if out * width < 2**31 else torch.int64
        groups = width // self.m
        if 8 % self.code_bits:
            together = 1
            bits = unpack_bits(index)[:, : groups * self.code_bits]
            places = self._positions(bits).to(dtype)
        else:  # codes do not cross bytes: a table look-up
            together = 8 // self.code_bits
            positions = self._positions(bits_of_bytes(index.device))
            first_inputs = self.m * torch.arange(together, dtype=dtype, device=index.device)
            table = (positions + first_inputs[:, None]).flatten(1)
            places = look_up_bytes(table, index).view(out, -1, table.shape[1])
        numbers = torch.arange(places.shape[1], dtype=dtype, device=index.device)
        rows = torch.arange(out, dtype=dtype, device=index.device)
        places += numbers[:, None] * (together * self.m)
        places += rows[:, None, None] * width
        return places.flatten(1)[:, : groups * self.n].flatten()

    def _positions(self, bits: Tensor) -> Tensor:
        """(rows, codes · bits of a code) → (rows, codes, n)."""
        fields = bits.unflatten(1, (-1, self.n, self.position_bits))
        dtype = torch.uint8 if self.position_bits <= 8 else torch.int32
        positions = torch.zeros(fields.shape[:-1], dtype=dtype, device=bits.device)
        for bit in range(self.position_bits):
            positions = positions | fields[..., bit].to(dtype) << bit
        return positions

    def validate(
        self,
        index: Tensor,
        width: int,
        nonzeros: int,
    ) -> None:
        used = width // self.m * self.code_bits
        checked = self._valid_bytes(index, used)
        end = used - 8 * checked
        for first, rows in row_chunks(index):
            bits = unpack_bits(rows[:, checked:])
            padded = bits[:, end:].any(1).nonzero()
            if len(padded):
                raise PatternError(
                    f"a padding bit at the end of row {first + int(padded[0])} is not 0"
                )
            if not end:
                continue
            invalid = self._is_invalid(bits[:, :end])
            if invalid.any():
                row, group = invalid.nonzero()[0].tolist()
                group += 8 * checked // self.code_bits
                raise PatternError(
                    f"the stored code of row {first + row}, {self._inputs(group)}, is not a valid"
                    f" code of pattern {self.n}:{self.m}"
                )

    def _valid_bytes(self, index: Tensor, used: int) -> int:
        """The leading bytes of all rows that hold valid codes, as a table of all bytes shows; 0 if
        one is invalid, or codes cross bytes. used: the bits of a row.
        """
        if not self.code_bits or 8 % self.code_bits:
            return 0
        whole = used // 8
        is_valid = ~self._is_invalid(bits_of_bytes(index.device)).any(1, keepdim=True)
        if not look_up_bytes(is_valid, index[:, :whole]).all():
            return 0
        return whole

    def _is_invalid(self, bits: Tensor) -> Tensor:
        """Mark the codes that `pack` never writes: (rows, codes · bits of a code) → bool (rows,
        codes).
        """
        if self.is_mask:
            return bits.unflatten(1, (-1, self.m)).sum(-1) != self.n
        positions = self._positions(bits)
        is_outside = (positions >= self.m).any(-1)
        is_descending = (positions[..., 1:] <= positions[..., :-1]).any(-1)
        return is_outside | is_descending


@dataclass(frozen=True)
class Bitmask:
    """A bit for each entry, rows padded to whole bytes; the values row by row."""

    index = "mask"
    index_dtype = torch.uint8

    def shapes(
        self,
        out: int,
        width: int,
        nonzeros: int,
    ) -> dict[str, tuple[int, ...]]:
        if not 0 <= nonzeros <= out * width:
            raise PatternError(f"a {out}×{width} weight cannot have {nonzeros} stored values")
        return {"values": (nonzeros,), "mask": (out, -(-width // 8))}

    def pack(self, sparse: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for _, rows in row_chunks(sparse):
            mask = is_stored(rows)
            parts.append((rows.masked_select(mask), pack_bits(mask)))
        return joined(parts)

    def unpack(
        self,
        values: Tensor,
        index: Tensor,
        width: int,
    ) -> Tensor:
        mask = unpack_bits(index)[:, :width]
        return values.new_zeros(len(index), width).masked_scatter(mask, values)

    def validate(
        self,
        index: Tensor,
        width: int,
        nonzeros: int,
    ) -> None:
        if width % 8:
            padded = (index[:, -1] >> width % 8).nonzero()
            if len(padded):
                raise PatternError(f"a padding bit at the end of row {int(padded[0])} is not 0")
        ones = bits_of_bytes(index.device).sum(1, keepdim=True, dtype=torch.uint8)
        count = sum(int(look_up_bytes(ones, rows).sum()) for _, rows in row_chunks(index))
        if count != nonzeros:
            raise PatternError(f"the mask marks {count} entries, but {nonzeros} values are stored")


@dataclass(frozen=True)
class Columns:
    """Whole input channels: the columns that have an entry, ascending, and their values (out,
    k).
    """

    index = "columns"
    index_dtype = torch.int32

    def shapes(
        self,
        out: int,
        width: int,
        nonzeros: int,
    ) -> dict[str, tuple[int, ...]]:
        if nonzeros % out or not 0 <= nonzeros <= out * width:
            raise PatternError(
                f"{nonzeros} values do not fill whole columns of a {out}×{width} weight; there must"
                f" be a multiple of {out}, and at most {out * width}"
            )
        return {"values": (out, nonzeros // out), "columns": (nonzeros // out,)}

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
    """The layout of a pattern's name, such as "2:4" or "row". A name is parsed once per process."""
    semi = parse_pattern(pattern)
    if semi is not None:
        return PackedGroups(semi.n, semi.m)
    if pattern == "structured":
        return Columns()
    return Bitmask()


class Placed(torch.autograd.Function):
    """Put values at their places in a matrix, counted row by row: on a CPU faster, forwards and
    backwards, than selections by a mask.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        places: Tensor,
        shape: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = values.shape
        flat = values.new_zeros(shape[0] * shape[1])
        return flat.index_copy_(0, places.long(), values.flatten()).view(shape)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        [places] = ctx.saved_tensors
        return outer[0].flatten().index_select(0, places).view(ctx.shape), None, None


def is_stored(sparse: Tensor) -> Tensor:
    """Mark the entries whose bits are not all zero: bool, for a floating tensor of any shape."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sparse.contiguous().view(integers[sparse.element_size()]) != 0


def row_chunks(matrix: Tensor) -> list[tuple[int, Tensor]]:
    """Divide a matrix into pieces of whole rows and about CHUNK entries, each with the number of
    its first row.
    """
    rows = max(1, CHUNK // max(1, matrix.shape[1]))
    return [(first, matrix[first : first + rows]) for first in range(0, len(matrix), rows)]


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the values and the indices of consecutive rows."""
    values, indices = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(indices)


def pack_bits(bits: Tensor) -> Tensor:
    """0s and 1s (rows, n) → uint8 (rows, ⌈n / 8⌉)."""
    rows, n = bits.shape
    octets = F.pad(bits.to(torch.uint8), (0, -n % 8)).view(rows, -(-n // 8), 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets << shifts).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """uint8 (rows, n) → bool (rows, 8n), by looking up whole bytes."""
    return look_up_bytes(bits_of_bytes(packed.device), packed)


def bits_of_bytes(device: torch.device) -> Tensor:
    """The bits of 0 … 255: bool (256, 8)."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    return (numbers >> torch.arange(8, dtype=torch.uint8, device=device) & 1).bool()


def look_up_bytes(table: Tensor, packed: Tensor) -> Tensor:
    """Replace each byte by its row of a table (256, k): uint8 (rows, n) → (rows, n · k)."""
    rows, n = packed.shape
    return table.index_select(0, packed.flatten().int()).view(rows, n * table.shape[1])
