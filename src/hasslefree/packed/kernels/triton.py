"""Triton kernels for a few tokens: y = x Sᵀ, with S read as N:M values and positions, once for all tokens.

Not measured on a GPU: their results are tested in Triton's interpreter, and `benchmarks/gpu_kernels.py` compiles them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TOKENS = 16
BLOCK_OUT = 8
# Kept values of a row at a time, over all tokens.
BLOCK_VALUES = 512
# Of 2:4 and one token: rows of a program, and bytes of positions of a row at a time.
PAIRS_OUT, PAIRS_BYTES = 8, 128


@triton.jit
def _decode(
    x, values, positions, y, out, kept, code_bytes,
    N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """x: (in, TOKENS); values: (out, kept); y: (out, TOKENS)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    row_exists = rows[:, None] < out
    start = rows.to(tl.int64)[:, None]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for first in range(0, kept, VALUES):
        k = first + tl.arange(0, VALUES)[None, :]
        exists = row_exists & (k < kept)
        value = tl.load(values + start * kept + k, mask=exists, other=0.0).to(tl.float32)
        bit = k * BITS
        byte = bit // 8
        code = tl.load(positions + start * code_bytes + byte, mask=exists & (byte < code_bytes), other=0).to(tl.int32)
        if 8 % max(BITS, 1) != 0:  # a position may lie across two bytes
            after = exists & (byte + 1 < code_bytes)
            code |= tl.load(positions + start * code_bytes + byte + 1, mask=after, other=0).to(tl.int32) << 8
        position = tl.minimum((code >> (bit % 8)) & ((1 << BITS) - 1), M - 1)
        column = (k // N) * M + position
        at = column[:, :, None] * TOKENS + tokens[None, None, :]
        inputs = tl.load(x + at, mask=exists[:, :, None], other=0.0).to(tl.float32)
        total += tl.sum(value[:, :, None] * inputs, axis=1)
    tl.store(y + start * TOKENS + tokens[None, :], total, mask=row_exists)


@triton.jit
def _decode_pairs(x, values, positions, y, out, kept, code_bytes, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """2:4 and one token. x: (in,); values: (out, kept); y: (out,).

    A byte holds the positions of two groups of four inputs. The first of a group is 0, 1 or 2 and the second 1, 2 or 3,
    so that two selections among the group's inputs, which all rows share, stand in the place of a load for each value.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_exists = rows[:, None] < out
    start = rows.to(tl.int64)[:, None]
    total = tl.zeros((ROWS, BYTES), tl.float32)
    for first in range(0, code_bytes, BYTES):
        byte = first + tl.arange(0, BYTES)[None, :]
        code = tl.load(positions + start * code_bytes + byte, mask=row_exists & (byte < code_bytes), other=0).to(
            tl.int32
        )
        k = first * 4 + tl.arange(0, BYTES * 4)[None, :]
        value = tl.load(values + start * kept + k, mask=row_exists & (k < kept), other=0.0)
        left, right = tl.split(tl.reshape(value, (ROWS, BYTES, 2, 2)))  # the two values of a group: (ROWS, BYTES, 2)
        left_0, left_1 = tl.split(left)  # of the first and of the second group of a byte: (ROWS, BYTES)
        right_0, right_1 = tl.split(right)
        at = first * 8 + tl.arange(0, BYTES * 8)
        inputs = tl.load(x + at, mask=at < kept * 2, other=0.0)
        even, odd = tl.split(tl.reshape(inputs, (BYTES, 2, 2, 2)))  # inputs 0 and 2, and 1 and 3, of each group
        i0, i2 = tl.split(even)
        i1, i3 = tl.split(odd)
        i0_0, i0_1 = tl.split(i0)
        i1_0, i1_1 = tl.split(i1)
        i2_0, i2_1 = tl.split(i2)
        i3_0, i3_1 = tl.split(i3)
        total += _first(code, i0_0, i1_0, i2_0) * left_0.to(tl.float32)
        total += _second(code >> 2, i1_0, i2_0, i3_0) * right_0.to(tl.float32)
        total += _first(code >> 4, i0_1, i1_1, i2_1) * left_1.to(tl.float32)
        total += _second(code >> 6, i1_1, i2_1, i3_1) * right_1.to(tl.float32)
    tl.store(y + rows, tl.sum(total, axis=1), mask=rows < out)


@triton.jit
def _first(code, i0, i1, i2):
    """The input that the two lowest bits of a code select: the first of a group."""
    position = code & 3
    selected = tl.where(position == 0, i0[None, :], tl.where(position == 1, i1[None, :], i2[None, :]))
    return selected.to(tl.float32)


@triton.jit
def _second(code, i1, i2, i3):
    """The same for the second of a group."""
    position = code & 3
    selected = tl.where(position == 3, i3[None, :], tl.where(position == 2, i2[None, :], i1[None, :]))
    return selected.to(tl.float32)


def block_values(tokens: int) -> int:
    """Kept values of a row at a time, for so many tokens, a power of two."""
    return max(BLOCK_VALUES // tokens, 16)


def decode(x: Tensor, values: Tensor, positions: Tensor, n: int, m: int) -> Tensor:
    """x Sᵀ.

    Args:
        x: (tokens, in), at most 16 tokens. values: (out, in/M·N). positions: (out, bytes), uint8.

    Returns:
        (tokens, out), in x's dtype; sums are float32.
    """
    count, out, kept = x.shape[0], values.shape[0], values.shape[1]
    if (n, m, count) == (2, 4, 1):
        sums = torch.empty(out, dtype=torch.float32, device=x.device)
        _decode_pairs[(triton.cdiv(out, PAIRS_OUT),)](
            x.contiguous(), values.contiguous(), positions.contiguous(), sums, out, kept, positions.shape[1],
            ROWS=PAIRS_OUT, BYTES=PAIRS_BYTES,
        )  # fmt: skip
        return sums[None].to(x.dtype)
    tokens = triton.next_power_of_2(max(count, 1))
    wide = x.new_zeros(x.shape[1], tokens)
    wide[:, :count] = x.T
    y = torch.empty(out, tokens, dtype=torch.float32, device=x.device)
    _decode[(triton.cdiv(out, BLOCK_OUT),)](
        wide, values.contiguous(), positions.contiguous(), y, out, kept, positions.shape[1],
        N=n, M=m, BITS=(m - 1).bit_length(),
        TOKENS=tokens, ROWS=BLOCK_OUT, VALUES=block_values(tokens),
    )  # fmt: skip
    return y.T[:count].to(x.dtype)
