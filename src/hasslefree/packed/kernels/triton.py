"""A layer x Sᵀ + (x vᵀ) uᵀ + b in two launches; each further layer that is stacked on it takes one
more.

The first launch multiplies what reads x. Each program takes some rows of S or v, and one part of
the inputs, and writes its float32 sums for all tokens to a buffer (parts, tokens, columns); the
columns are the rows of S, then those of v. The second launch adds the parts, u times the sums of v,
and the bias.

S with 2:4 in 16 bits: one byte of positions and one 64-bit word of four values describe eight
inputs of a row. The four inputs of a group are a 64-bit word too, so that one shift of 16 times the
position selects an input, or puts a value at its place in the unpacked group. No input is gathered
from memory, and no position is compared. Lengths and offsets in a row are in bytes of positions,
which are also words of values.

S with any other N:M that is stored as positions: the inputs of each kept value are gathered, for
all tokens at once.

Not measured on a GPU: results are tested in Triton's interpreter, and `benchmarks/gpu_kernels.py`
compiles the kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from hasslefree.packed.kernels.ops import TRITON_TOKENS

# Programs for each processor of the GPU: where a layer has fewer blocks of rows, its rows are
# split.
PROGRAMS = 8
# Rows of a program of the second launch.
SUM_ROWS = 16
NUMBERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Tile:
    """What a program of the first launch multiplies at a time, with the kernel "select", "dot" or
    "gather".

    rows: of S or v. step: of a row of S, bytes of positions, or with "gather" kept values. columns:
        of a row of v.
    tokens: a power of two, at least as many as x has. least: the inputs of a part of a row, at
    least.
    """

    kernel: str
    rows: int
    step: int
    columns: int
    tokens: int
    least: int

    @classmethod
    def of(cls, x: Tensor, n: int, m: int) -> "Tile":
        """For inputs (tokens, in) and S with the pattern N:M."""
        tokens, width = x.shape
        if (n, m) == (2, 4) and x.itemsize == 2 and width % 8 == 0:
            if tokens == 1:
                return cls("select", rows=4, step=128, columns=512, tokens=1, least=1024)
            # Rows of S at addresses that are not multiples of 16 are loaded in more, and shorter,
            # pieces.
            return cls(
                "dot",
                32 if width % 128 else 64,
                step=16,
                columns=128,
                tokens=TRITON_TOKENS,
                least=512,
            )
        wide = triton.next_power_of_2(tokens)
        values = max(512 // wide, 16)
        return cls("gather", rows=8, step=values, columns=values, tokens=wide, least=1024)


@triton.jit
def multiply(
    x, values, positions, v, sums, out, rank, width, kept, row_bytes, tokens, columns,
    KERNEL: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The first launch: a grid of blocks of rows, of S and then of v, by parts.

    x: (tokens, in), or with "gather" (in, TOKENS); values: (out, kept); positions: (out,
        row_bytes); v: (rank, width);
    sums: (parts, tokens, columns).
    """
    block, blocks = tl.program_id(0), tl.cdiv(out, ROWS)
    sums += tl.program_id(1) * tokens * columns
    if block >= blocks:
        row = (block - blocks) * ROWS + tl.arange(0, ROWS)
        rows = tl.minimum(row, rank - 1).to(tl.int64)[:, None]
        begin, end = _share(width, COLUMNS)
        if KERNEL == "dot":
            total = factor_dot(x, v, rows, begin, end, width, tokens, ROWS, COLUMNS, TOKENS)
        else:
            total = gathered_sums(
                x, v, v, rows, begin, end, width, 0, 1, 1, 0, ROWS, COLUMNS, TOKENS
            )
        _store(sums + out, total, row, rank, tokens, columns, TOKENS)
    else:
        row = block * ROWS + tl.arange(0, ROWS)
        rows = tl.minimum(row, out - 1).to(tl.int64)[:, None]
        if KERNEL == "gather":
            begin, end = _share(kept, STEP)
            total = gathered_sums(
                x,
                values,
                positions,
                rows,
                begin,
                end,
                kept,
                row_bytes,
                N,
                M,
                BITS,
                ROWS,
                STEP,
                TOKENS,
            )
            _store(sums, total, row, out, tokens, columns, TOKENS)
        else:
            begin, end = _share(row_bytes, STEP)
            words = values.to(tl.pointer_type(tl.int64))
            # The tensor cores multiply every input by the zeros of S as well: where a sum is not
            # finite, an input that S does not use may be the reason, and the selected inputs alone
            # are multiplied.
            finite = 0
            if KERNEL == "dot":
                total = dot_sums(
                    x,
                    words,
                    positions,
                    rows,
                    begin,
                    end,
                    row_bytes,
                    tokens,
                    ROWS,
                    STEP,
                    TOKENS,
                    DTYPE,
                )
                finite = tl.min((tl.abs(total) < float("inf")).to(tl.int32))
                if finite != 0:
                    _store(sums, total, row, out, tokens, columns, TOKENS)
            if finite == 0:
                inputs = x.to(tl.pointer_type(tl.int64))
                for token in range(tokens):
                    selected = selected_sums(
                        inputs + token * (2 * row_bytes), words, positions, rows, begin, end, row_bytes, ROWS, STEP,  # noqa: E501
                        DTYPE,
                    )  # fmt: skip
                    tl.store(sums + token * columns + row, selected, mask=row < out)


@triton.jit
def _store(sums, total, row, out, tokens, columns, TOKENS: tl.constexpr):
    token = tl.arange(0, TOKENS)[None, :]
    tl.store(
        sums + token * columns + row[:, None], total, mask=(row[:, None] < out) & (token < tokens)
    )


@triton.jit
def add_up(
    sums, u, bias, y, out, rank, length, first, inner, outs, parts, tokens, columns,
    ROWS: tl.constexpr, RANKS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The second launch, for one layer of a stack: a grid of blocks of rows.

    sums: (parts, tokens, columns), with the layer's rows of S from column `first` on, and those of
        its v from `inner`.
    u: (out, rank); bias: (length,), where the length is out, or 0 without a bias; y: (tokens,
    outs).
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    token = tl.arange(0, TOKENS)[None, :]
    exists = (row < out) & (token < tokens)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    total += tl.load(bias + row, mask=row < length, other=0.0).to(tl.float32)
    for part in range(parts):
        total += tl.load(
            sums + (part * tokens + token) * columns + first + row, mask=exists, other=0.0
        )
    for start in range(0, rank, RANKS):
        k = start + tl.arange(0, RANKS)
        at = token * columns + inner + k[:, None]
        used = (k[:, None] < rank) & (token < tokens)
        hidden = tl.zeros((RANKS, TOKENS), tl.float32)
        for part in range(parts):
            hidden += tl.load(sums + part * tokens * columns + at, mask=used, other=0.0)
        inside = (row < out) & (k[None, :] < rank)
        factor = tl.load(u + row.to(tl.int64) * rank + k[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        total += tl.sum(factor[:, :, None] * hidden[None, :, :], axis=1)
    tl.store(y + token * outs + first + row, total, mask=exists)


@triton.jit
def _share(length, STEP: tl.constexpr):
    """Begin and end of this program's part of a row, in whole steps; the last parts may be short,
    or empty.
    """
    share = tl.cdiv(tl.cdiv(length, tl.num_programs(1)), STEP) * STEP
    begin = tl.minimum(tl.program_id(1) * share, length)
    return begin, tl.minimum(begin + share, length)


@triton.jit
def selected_sums(
    x, values, positions, rows, begin, end, row_bytes,
    ROWS: tl.constexpr, BYTES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """x Sᵀ of one token for these rows and the bytes from begin to end: (ROWS,) float32.

    x: (in / 4,) int64; values: (out, row_bytes) int64; positions: (out, row_bytes); rows: (ROWS, 1)
    int64.
    """
    total = tl.zeros((ROWS, BYTES), tl.float32)
    for first in range(begin, end, BYTES):
        byte = (first + tl.arange(0, BYTES))[None, :]
        exists = byte < end
        code = tl.load(positions + rows * row_bytes + byte, mask=exists, other=0).to(tl.int32)
        value = tl.load(values + rows * row_bytes + byte, mask=exists, other=0)
        # One address for each row: a row of addresses would be loaded in another layout, and go
        # through shared memory.
        at = x + 2 * byte + 0 * rows
        low = tl.load(at, mask=exists, other=0)
        high = tl.load(at + 1, mask=exists, other=0)
        total += _number(value, DTYPE) * _number(low >> _shift(code, 0), DTYPE)
        total += _number(value >> 16, DTYPE) * _number(low >> _shift(code, 1), DTYPE)
        total += _number(value >> 32, DTYPE) * _number(high >> _shift(code, 2), DTYPE)
        total += _number(value >> 48, DTYPE) * _number(high >> _shift(code, 3), DTYPE)
    return tl.sum(total, axis=1)


@triton.jit
def dot_sums(
    x, values, positions, rows, begin, end, row_bytes, tokens,
    ROWS: tl.constexpr, BYTES: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """x Sᵀ of several tokens for these rows and bytes, from tiles of S unpacked in registers:
    (ROWS, TOKENS) float32.

    x: (tokens, in), of DTYPE; the rest as above. An input that is not finite makes the sums of its
    token NaN, because the zeros of S multiply it as well.
    """
    token = tl.minimum(tl.arange(0, TOKENS), tokens - 1)[None, :]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(begin, end, BYTES):
        byte = (first + tl.arange(0, BYTES))[None, :]
        exists = byte < end
        code = tl.load(positions + rows * row_bytes + byte, mask=exists, other=0).to(tl.int32)
        value = tl.load(values + rows * row_bytes + byte, mask=exists, other=0)
        low = ((value & 0xFFFF) << _shift(code, 0)) | (((value >> 16) & 0xFFFF) << _shift(code, 1))
        high = (((value >> 32) & 0xFFFF) << _shift(code, 2)) | (
            ((value >> 48) & 0xFFFF) << _shift(code, 3)
        )
        group = tl.join(low, high)
        even = tl.join(_entry(group, DTYPE), _entry(group >> 32, DTYPE))
        odd = tl.join(_entry(group >> 16, DTYPE), _entry(group >> 48, DTYPE))
        tile = tl.reshape(tl.join(even, odd), (ROWS, 8 * BYTES))
        column = (8 * first + tl.arange(0, 8 * BYTES))[:, None]
        inputs = tl.load(x + token * (8 * row_bytes) + column, mask=column < 8 * end, other=0.0)
        total = tl.dot(tile, inputs, total)
    return total


@triton.jit
def _shift(code, INDEX: tl.constexpr):
    """16 times the position of value 0 to 3 of a byte: int64."""
    doubled = (code << 4) >> (2 * INDEX)
    return (doubled & 0x30).to(tl.int64)


@triton.jit
def _entry(word, DTYPE: tl.constexpr):
    """The lowest 16 bits as a number of DTYPE."""
    return word.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _number(word, DTYPE: tl.constexpr):
    """The same in float32."""
    return _entry(word, DTYPE).to(tl.float32)


@triton.jit
def gathered_sums(
    x, values, positions, rows, begin, end, kept, row_bytes,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, VALUES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """x Sᵀ for these rows and the kept values from begin to end of each; of a dense v, as 1:1:
    (ROWS, TOKENS) float32.

    x: (in, TOKENS); values: (out, kept); positions: (out, row_bytes), of BITS bits each; rows:
    (ROWS, 1) int64.
    """
    tokens = tl.arange(0, TOKENS)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(begin, end, VALUES):
        k = (first + tl.arange(0, VALUES))[None, :]
        exists = k < end
        value = tl.load(values + rows * kept + k, mask=exists, other=0.0).to(tl.float32)
        column = (k // N) * M
        if BITS > 0:
            bit = k * BITS
            byte = bit // 8
            code = tl.load(
                positions + rows * row_bytes + byte, mask=exists & (byte < row_bytes), other=0
            ).to(tl.int32)
            if 8 % BITS != 0:  # a position may lie across two bytes
                after = exists & (byte + 1 < row_bytes)
                code |= (
                    tl.load(positions + rows * row_bytes + byte + 1, mask=after, other=0).to(
                        tl.int32
                    )
                    << 8
                )
            column = column + tl.minimum((code >> (bit % 8)) & ((1 << BITS) - 1), M - 1)
        at = column[:, :, None] * TOKENS + tokens[None, None, :]
        inputs = tl.load(x + at, mask=exists[:, :, None], other=0.0).to(tl.float32)
        total += tl.sum(value[:, :, None] * inputs, axis=1)
    return total


@triton.jit
def factor_dot(
    x,
    v,
    rows,
    begin,
    end,
    width,
    tokens,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """x vᵀ for these rows and columns, by the tensor cores. x: (tokens, in), in 16 bits: (ROWS,
    TOKENS) float32.
    """
    token = tl.minimum(tl.arange(0, TOKENS), tokens - 1)[None, :]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        exists = column < end
        factor = tl.load(v + rows * width + column[None, :], mask=exists[None, :], other=0.0)
        inputs = tl.load(x + token * width + column[:, None], mask=exists[:, None], other=0.0)
        total = tl.dot(factor, inputs, total)
    return total


def decode(
    x: Tensor, values: Tensor, positions: Tensor, us: Sequence[Tensor], v: Tensor, bias: Tensor | None, n: int, m: int,  # noqa: E501
    parts: int | None = None,
) -> Tensor:  # fmt: skip
    """`ops.decode_cuda`. parts: how many programs share a row; by default as many as keep the GPU
    busy.
    """
    (tokens, width), out, rank = x.shape, len(values), len(v)
    y = x.new_empty(tokens, out)
    if not y.numel():
        return y
    tile, columns = Tile.of(x, n, m), out + rank
    blocks = triton.cdiv(out, tile.rows) + triton.cdiv(rank, tile.rows)
    if parts is None:
        processors = (
            torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
        )
        parts = max(1, min(-(-processors * PROGRAMS // blocks), width // tile.least))
    to_multiply, to_add = constants(x, n, m)
    sums = torch.empty(parts, tokens, columns, dtype=torch.float32, device=x.device)
    # Transposed, the inputs of all tokens, filled up with zeros, are loaded at once.
    inputs = (
        F.pad(x.T, (0, tile.tokens - tokens)).contiguous()
        if tile.kernel == "gather"
        else aligned(x)
    )
    with torch.cuda.device_of(x):  # Triton launches on the current device
        multiply[blocks, parts](
            inputs, aligned(values), positions.contiguous(), v.contiguous(), sums, out, rank,
            width, values.shape[1], positions.shape[1], tokens, columns, **to_multiply,
        )  # fmt: skip
        first, inner = 0, out
        for u in us:
            end = first + len(u)
            shift, length = (x, 0) if bias is None else (bias[first:end].contiguous(), len(u))
            add_up[triton.cdiv(len(u), SUM_ROWS),](
                sums, u.contiguous(), shift, y, len(u), u.shape[1], length, first, inner, out, parts, tokens, columns,  # noqa: E501
                **to_add,
            )  # fmt: skip
            first, inner = end, inner + u.shape[1]
    return y


def constants(x: Tensor, n: int, m: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `multiply` and `add_up` are compiled for, for inputs (tokens, in) and S with the pattern
    N:M.
    """
    tile = Tile.of(x, n, m)
    to_multiply = {
        "KERNEL": tile.kernel, "N": n, "M": m, "BITS": (m - 1).bit_length(), "DTYPE": NUMBERS[x.dtype],  # noqa: E501
        "ROWS": tile.rows, "STEP": tile.step, "COLUMNS": tile.columns, "TOKENS": tile.tokens,
    }  # fmt: skip
    return to_multiply, {
        "ROWS": SUM_ROWS,
        "RANKS": max(32 // tile.tokens, 16),
        "TOKENS": tile.tokens,
    }


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, and at an address from which 64-bit words can be read."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 8 else tensor
