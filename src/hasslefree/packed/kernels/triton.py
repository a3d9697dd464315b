"""A Triton kernel for a few tokens: y = x Sᵀ, with S read as N:M values and positions, once for all tokens.

Not measured on a GPU: its block sizes are guesses, and only its results are tested, in Triton's interpreter.
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


def decode(x: Tensor, values: Tensor, positions: Tensor, n: int, m: int) -> Tensor:
    """x Sᵀ.

    Args:
        x: (tokens, in), at most 16 tokens. values: (out, in/M·N). positions: (out, bytes), uint8.

    Returns:
        (tokens, out), in x's dtype; sums are float32.
    """
    count, out, kept = x.shape[0], values.shape[0], values.shape[1]
    tokens = triton.next_power_of_2(max(count, 1))
    wide = x.new_zeros(x.shape[1], tokens)
    wide[:, :count] = x.T
    y = torch.empty(out, tokens, dtype=torch.float32, device=x.device)
    _decode[(triton.cdiv(out, BLOCK_OUT),)](
        wide, values.contiguous(), positions.contiguous(), y, out, kept, positions.shape[1],
        N=n, M=m, BITS=(m - 1).bit_length(),
        TOKENS=tokens, ROWS=BLOCK_OUT, VALUES=max(BLOCK_VALUES // tokens, 16),
    )  # fmt: skip
    return y.T[:count].to(x.dtype)
