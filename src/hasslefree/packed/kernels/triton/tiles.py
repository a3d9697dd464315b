"""Sums of a program over its rows and its part of the inputs: of S, and of the dense factor v.

S with 2:4 in 16 bits: one byte of positions and one 64-bit word of four values describe eight inputs of a row. The four
inputs of a group are a 64-bit word too, so that one shift of 16 times the position selects an input, or puts a value at
its place in the unpacked group. No input is gathered from memory, and no position is compared. Lengths and offsets in a
row are in bytes of positions, which are also words of values.

S with any other N:M that is stored as positions: the inputs of each kept value are gathered, for all tokens at once.
"""

import triton
import triton.language as tl


@triton.jit
def selected_sums(
    x, values, positions, rows, begin, end, row_bytes,
    ROWS: tl.constexpr, BYTES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """x Sᵀ of one token for these rows and the bytes from begin to end: (ROWS,) float32.

    x: (in / 4,) int64; values: (out, row_bytes) int64; positions: (out, row_bytes); rows: (ROWS, 1) int64.
    """
    total = tl.zeros((ROWS, BYTES), tl.float32)
    for first in range(begin, end, BYTES):
        byte = (first + tl.arange(0, BYTES))[None, :]
        exists = byte < end
        code = tl.load(positions + rows * row_bytes + byte, mask=exists, other=0).to(tl.int32)
        value = tl.load(values + rows * row_bytes + byte, mask=exists, other=0)
        # One address for each row: a row of addresses would be loaded in another layout, and go through shared memory.
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
    """x Sᵀ of several tokens for these rows and bytes, from tiles of S unpacked in registers: (ROWS, TOKENS) float32.

    x: (tokens, in), of DTYPE; the rest as above. An input that is not finite makes the sums of its token NaN, because
    the zeros of S multiply it as well.
    """
    token = tl.minimum(tl.arange(0, TOKENS), tokens - 1)[None, :]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(begin, end, BYTES):
        byte = (first + tl.arange(0, BYTES))[None, :]
        exists = byte < end
        code = tl.load(positions + rows * row_bytes + byte, mask=exists, other=0).to(tl.int32)
        value = tl.load(values + rows * row_bytes + byte, mask=exists, other=0)
        low = ((value & 0xFFFF) << _shift(code, 0)) | (((value >> 16) & 0xFFFF) << _shift(code, 1))
        high = (((value >> 32) & 0xFFFF) << _shift(code, 2)) | (((value >> 48) & 0xFFFF) << _shift(code, 3))
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
    """x Sᵀ for these rows and the kept values from begin to end of each: (ROWS, TOKENS) float32.

    x: (in, TOKENS); values: (out, kept); positions: (out, row_bytes), of BITS bits each; rows: (ROWS, 1) int64.
    """
    tokens = tl.arange(0, TOKENS)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(begin, end, VALUES):
        k = (first + tl.arange(0, VALUES))[None, :]
        exists = k < end
        value = tl.load(values + rows * kept + k, mask=exists, other=0.0).to(tl.float32)
        bit = k * BITS
        byte = bit // 8
        code = tl.load(positions + rows * row_bytes + byte, mask=exists & (byte < row_bytes), other=0).to(tl.int32)
        if 8 % max(BITS, 1) != 0:  # a position may lie across two bytes
            after = exists & (byte + 1 < row_bytes)
            code |= tl.load(positions + rows * row_bytes + byte + 1, mask=after, other=0).to(tl.int32) << 8
        position = tl.minimum((code >> (bit % 8)) & ((1 << BITS) - 1), M - 1)
        column = (k // N) * M + position
        at = column[:, :, None] * TOKENS + tokens[None, None, :]
        inputs = tl.load(x + at, mask=exists[:, :, None], other=0.0).to(tl.float32)
        total += tl.sum(value[:, :, None] * inputs, axis=1)
    return total


@triton.jit
def factor_sums(x, v, rows, begin, end, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr):
    """x vᵀ for these rows and the columns from begin to end, without tensor cores: (ROWS, TOKENS) float32.

    x: (in, TOKENS); v: (r, in), of width columns; rows: (ROWS, 1) int64.
    """
    tokens = tl.arange(0, TOKENS)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        exists = column < end
        factor = tl.load(v + rows * width + column[None, :], mask=exists[None, :], other=0.0).to(tl.float32)
        at = column[:, None] * TOKENS + tokens[None, :]
        inputs = tl.load(x + at, mask=exists[:, None], other=0.0).to(tl.float32)
        total += tl.sum(factor[:, :, None] * inputs[None, :, :], axis=1)
    return total


@triton.jit
def factor_dot(x, v, rows, begin, end, width, tokens, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr):
    """The same by the tensor cores. x: (tokens, in), in 16 bits."""
    token = tl.minimum(tl.arange(0, TOKENS), tokens - 1)[None, :]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(begin, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        exists = column < end
        factor = tl.load(v + rows * width + column[None, :], mask=exists[None, :], other=0.0)
        inputs = tl.load(x + token * width + column[:, None], mask=exists[:, None], other=0.0)
        total = tl.dot(factor, inputs, total)
    return total
