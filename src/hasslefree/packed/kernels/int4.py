"""x Sᵀ for S in codes of 2 to 8 bits, by torch's operators for 4-bit codes (`codes`), which compute
in bfloat16.

The operators are fast for a few tokens. For more tokens, a few rows of S at a time are unpacked
into bfloat16. The operators read codes in their own order, from which we unpack: see `interleaved`
for CPUs and `tiles` for CUDA.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.grids import Grid
from hasslefree.core.products import linear
from hasslefree.packed.kernels import arrays, interleaved, tiles
from hasslefree.packed.kernels.arrays import bits_of, numba_kernels
from hasslefree.packed.kernels.codes import ZERO, Nibbles
from hasslefree.packed.kernels.factors import add_low_rank
from hasslefree.packed.kernels.interleaved import rows_of, rows_of_block
from hasslefree.packed.kernels.ops import operator
from hasslefree.packed.kernels.rooms import BLOCK, BlockedRoom, room_for

# The largest product of tokens and nibbles per input for which the operators are used on a CPU: for
# more, unpacking is faster, by Numba or by torch.
MOST_BY_NUMBA = 10
MOST_BY_TORCH = 128
# The most tokens for which they are used on CUDA.
CUDA_TOKENS = 16
# Bytes of the rows of S that are unpacked together, in bfloat16.
CUDA_TILE_BYTES = 64 << 20
TILE_BYTES = 4 << 20
# The numbers of outputs and of inputs must be multiples of these.
MULTIPLES = {"cpu": (16, 16), "cuda": (8, 32)}


@dataclass(frozen=True)
class Int4:
    """S (out, in) in the order of the operators.

    Args:
        codes: nibbles, on a CPU uint8 (out, nibbles/2), on CUDA int32 (`tiles`).
        terms: scales and centres, (groups, out, 2) bfloat16.
        nibbles: the format of codes in nibbles.
        shared: the nibbles that high bits share, uint8 (out, shared · in/8), or None.
    """

    codes: Tensor
    terms: Tensor
    nibbles: Nibbles
    shared: Tensor | None = None

    @classmethod
    def of(
        cls,
        codes: Tensor,
        bits: int,
        scale: Tensor,
        low: Tensor,
    ) -> "Int4":
        """Convert codes to the order of the operators.

        Args:
            codes: uint8 (out, in).
            bits: per code.
            scale: (out, groups).
            low: the values of code 0, (out, groups).
        """
        out, width = codes.shape
        stored_group = width // scale.shape[1]
        nibbles = Nibbles.fitting(bits, stored_group, codes.device.type)
        assert nibbles is not None
        if bits == 8:
            nibbles = replace(nibbles, full=bool(codes.max() >= 256 - ZERO))
        repeats = stored_group // nibbles.group
        terms = nibbles.terms(scale.float(), low.float()).repeat_interleave(repeats, 0)
        if codes.device.type == "cuda":
            return cls(tiles.tiled(nibbles.split(codes)), terms, nibbles)
        packed = codes.new_empty(out, nibbles.count * width // 2)
        shared = codes.new_empty(out, nibbles.shared * width // 8)
        for rows in tiles_of(out, width, rows_of_block(), TILE_BYTES):
            packed[rows] = interleaved.interleaved(nibbles.split(codes[rows]))
            if nibbles.shared:
                shared[rows] = interleaved.interleaved(nibbles.share(codes[rows]))
        return cls(packed, terms, nibbles, shared if nibbles.shared else None)

    @property
    def bytes(self) -> int:
        """Memory used by codes and terms, in bytes."""
        shared = 0 if self.shared is None else self.shared.nbytes
        return self.codes.nbytes + shared + self.terms.nbytes

    def all_codes(self) -> Tensor:
        """The codes, uint8 (out, in)."""
        return torch.cat([self.codes_of_rows(rows) for rows in self.row_tiles()])

    def row_tiles(self) -> Iterator[slice]:
        """Divide the rows into slices that are unpacked together."""
        out = self.terms.shape[1]
        width = len(self.terms) * self.nibbles.group
        if self.codes.is_cuda:
            return tiles_of(out, width, tiles.ROWS, CUDA_TILE_BYTES)
        return tiles_of(out, width, rows_of_block(), TILE_BYTES)

    def codes_of_rows(self, rows: Tensor | slice) -> Tensor:
        """The codes of some rows, uint8 (rows, in). rows: indices, or a slice of whole blocks or
        of the last rows.
        """
        return self.nibbles.join(*self._nibbles_of(rows))

    def values(self, rows: slice) -> Tensor:
        """Some rows of S, whole blocks or the last rows: (rows, in) bfloat16."""
        return self.nibbles.values(*self._nibbles_of(rows), self.terms[:, rows])

    def _nibbles_of(self, rows: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """The nibbles of some rows, and those that high bits share."""
        if self.codes.is_cuda:
            return tiles.rows_of(self.codes, rows), None
        shared = None if self.shared is None else rows_of(self.shared, rows)
        return rows_of(self.codes, rows), shared

    @functools.cached_property
    def high(self) -> tuple[Any, ...]:
        """The operands of `add_high` for high bits that share nibbles: made once, because for a
        few tokens Python's overhead matters.
        """
        assert self.shared is not None
        pairs = bits_of(self.terms.view(torch.int32).squeeze(-1))
        return (self.shared.numpy(), pairs, self.nibbles.group, self.nibbles.shared)

    def few_product(self, x: Tensor) -> Tensor:
        """x Sᵀ for a few tokens on a CPU: (tokens, in) → (tokens, out), bfloat16."""
        nibbles = self.nibbles
        inputs = nibbles.spread(x)
        y = torch._weight_int4pack_mm_for_cpu(inputs, self.codes, nibbles.together, self.terms)
        if self.shared is not None:
            numba_kernels()  # sets the number of threads
            from hasslefree.packed.kernels.nibbles import add_high

            add_high(inputs.data_ptr(), y.data_ptr(), len(x), *self.high)
        return y

    def product(
        self,
        x: Tensor,
        u: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """x Sᵀ, or x Sᵀ + x vᵀ uᵀ.

        Args:
            x: (tokens, in), bfloat16.
            u: (out, r), bfloat16.
            v: (r, in), bfloat16.

        Returns:
            (tokens, out), bfloat16.
        """
        nibbles = self.nibbles
        if not x.is_cuda:
            form = (nibbles.bits, nibbles.group)
            return int4_product(x, self.codes, self.shared, self.terms, *form, u, v)
        if len(x) <= CUDA_TOKENS:
            multiply = torch.ops.aten._weight_int4pack_mm
            y: Tensor = multiply(nibbles.spread(x), self.codes, nibbles.together, self.terms)
        else:
            y = torch.cat([F.linear(x, self.values(rows)) for rows in self.row_tiles()], 1)
        return add_low_rank(y, x, u, v)


@operator(rows=0)
def int4_product(
    x: Tensor,
    codes: Tensor,
    shared: Tensor | None,
    terms: Tensor,
    bits: int,
    group: int,
    u: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """`Int4.product` on a CPU, as a function of tensors and the fields of `nibbles`."""
    high = 0 if shared is None else bits - 4
    nibbles = Nibbles(bits, group, high)
    operands = Int4(codes, terms, nibbles, shared)
    blocked = arrays.HAS_NUMBA and rows_of_block() == BLOCK
    most = MOST_BY_NUMBA if blocked else MOST_BY_TORCH
    if nibbles.count * len(x) <= most:
        return add_low_rank(operands.few_product(x), x, u, v)
    parts = []
    for rows in operands.row_tiles():
        room = room_for(rows.stop - rows.start, x.shape[1]) if blocked else None
        if room is None:
            parts.append(linear(x, unpacked_rows(operands, rows)))
        else:
            fill(room, operands, rows)
            parts.append(room.product(x))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return add_low_rank(y, x, u, v)


def fill(room: BlockedRoom, operands: Int4, rows: slice) -> None:
    """Unpack rows of S, whole blocks or the last rows, into a room."""
    numba_kernels()  # sets the number of threads
    from hasslefree.packed.kernels.nibbles import unpack_nibbles

    nibbles = operands.nibbles
    codes = operands.codes.numpy()
    above = codes if operands.shared is None else operands.shared.numpy()
    pairs = room.values.view(torch.uint32).squeeze(-1).numpy()
    form = (nibbles.group, nibbles.count, nibbles.is_high, nibbles.shared)
    unpack_nibbles(codes, above, bits_of(operands.terms), rows.start, *form, pairs)


def unpacked_rows(operands: Int4, rows: slice) -> Tensor:
    """Rows of S on a CPU, whole blocks or the last rows, in this thread's workspace."""
    width = len(operands.terms) * operands.nibbles.group
    unpacked = arrays.workspace((rows.stop - rows.start, width), torch.bfloat16)
    height = 4 * rows_of_block()  # rows that stay in the cache
    start = rows.start
    for part in unpacked.split(height):
        stop = start + len(part)
        part.copy_(operands.values(slice(start, stop)))
        start = stop
    return unpacked


def tiles_of(
    out: int,
    width: int,
    block: int,
    tile_bytes: int,
) -> Iterator[slice]:
    """Divide the rows of S into tiles of whole blocks, of about `tile_bytes` in bfloat16, and the
    remaining rows.
    """
    whole = out - out % block
    height = max(1, tile_bytes // (2 * width * block)) * block
    for start in range(0, whole, height):
        yield slice(start, min(start + height, whole))
    if whole < out:
        yield slice(whole, out)


def obstacle(
    device: str,
    dtype: torch.dtype,
    grid: Grid,
    shape: tuple[int, int],
) -> str | None:
    """The reason why the operators cannot multiply S (out, in) on this grid; None if they can."""
    out, width = shape
    if dtype != torch.bfloat16:
        return (
            "torch's operators for codes of 4 bits are fast with bfloat16 only, and the layer has"
            f" {dtype}"
        )
    group = grid.group or width
    nibbles = Nibbles.fitting(grid.bits, group, device)
    if nibbles is None:
        return f"torch's operators take groups of a multiple of 16 inputs, and these have {group}"
    if device not in MULTIPLES:
        return f"torch's operators run on a CPU and on CUDA, and the layer is on {device}"
    outputs, inputs = MULTIPLES[device]
    if out % outputs or width % inputs:
        return (
            f"on {device}, torch's operators take multiples of {outputs} outputs and {inputs}"
            f" inputs, and the layer has {out} and {width}"
        )
    if device == "cuda":
        return without_cuda()
    return without_cpu()


@functools.cache
def without_cuda() -> str | None:
    """The reason why the operators cannot be used on this GPU; None if they can."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm") or torch.version.hip:
        return "this build of torch has no operators for codes of 4 bits on this GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "torch's operators for codes of 4 bits need a GPU of compute capability 8.0 or newer"
    return unknown_order(torch.device("cuda"))


@functools.cache
def without_cpu() -> str | None:
    """The reason why the operators cannot be used on this processor; None if they can. One trial
    shows whether the order of codes is known.
    """
    name = interleaved.CAPABILITY
    if name not in interleaved.BLOCKS:
        return (
            "torch's operators for codes of 4 bits need a processor with AVX2 or AVX-512, and"
            f" torch uses {name}"
        )
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return (
            f"torch {torch.__version__} has no operators for codes of 4 bits on a CPU; update torch"
        )
    return unknown_order(torch.device("cpu"))


def unknown_order(device: torch.device) -> str | None:
    """Try the order of codes on a device: a message if it is not the known one, else None."""
    numbers = torch.arange(80 * 32, device=device).view(80, 32)
    codes = (numbers * 0x9E3779B1 >> 20 & 15).to(torch.uint8)
    ones = torch.ones(80, 1, device=device)
    if torch.equal(Int4.of(codes, 4, ones, ones).all_codes(), codes):
        return None
    return (
        f"torch {torch.__version__} orders codes of 4 bits in a way that is not known here; update"
        " hasslefree"
    )
