"""Any N:M that is stored as positions: the inputs of each kept value are gathered, for all tokens at once."""

import triton
import triton.language as tl


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
