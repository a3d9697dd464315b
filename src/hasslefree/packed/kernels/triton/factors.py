"""The dense factor v: h = x vᵀ."""

import triton
import triton.language as tl


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
