"""x Sᵀ for 2:4 in bfloat16 and many tokens, by Numba with AVX-512.

The two stored values of a group are multiplied by one of six pairs of inputs. A table, small enough
for the L1 cache, holds the pairs of a few groups for 64 tokens, and serves many rows of S. A code
is a row of the table, so inputs need no selection, and half of the products of a dense layer
remain.
"""

from itertools import combinations

import numpy as np
from numba import prange

from hasslefree.packed.kernels.cpu import (
    row_function,
    rows_in_parallel,
    store_rounded,
    u16,
    u32,
    u64,
)
from hasslefree.packed.kernels.llvm import LANES, prefetch
from hasslefree.packed.kernels.llvm_pairs import CODES, GROUPS, TABLE_ROWS, TOKENS, add_tabulated

# Rows of S by which prefetching is ahead of the multiplication by a table.
ROWS_AHEAD = 32
# The pairs of inputs that a group of 2:4 may keep.
PAIRS = tuple(combinations(range(4), 2))


@row_function
def fill_table(
    x,
    start,
    first,
    columns,
    table,
):
    """Fill a table with the pairs of GROUPS groups of x (tokens, in) from input `first` on, for
    TOKENS tokens from `start` on.

    columns: (inputs of the groups, TOKENS), space for the transposed inputs.
    """
    for block in range(u64(0), u64(TOKENS), u64(LANES)):
        for i in range(u64(4 * GROUPS)):
            for t in range(block, block + u64(LANES)):
                columns[i, t] = x[start + t, first + i]
    for group in range(u64(GROUPS)):
        for low, high in PAIRS:
            row = table[group * u64(CODES) + u64(low + 4 * high)]
            base = u64(4) * group
            for t in range(u64(TOKENS)):
                low_input = u32(columns[base + u64(low), t])
                high_input = u32(columns[base + u64(high), t])
                row[t] = low_input | high_input << u32(16)


@rows_in_parallel
def dot_tables_2_4(
    values,
    positions,
    x,
    y,
    memory,
):
    """y = x Sᵀ of 2:4 in the bits of bfloat16, with AVX-512 only.

    values: (out, in/2); positions: (out, in/8); x: (tokens in whole 64s, in); y: (tokens, out);
    memory: (parts, TABLE_ROWS + rows per tile, TOKENS), float32, aligned to 64 bytes: a table and
    sums for each part, which computes some of the tiles.
    """
    out = u64(values.shape[0])
    tokens = u64(y.shape[0])
    parts = memory.shape[0]
    height = u64(memory.shape[1] - TABLE_ROWS)
    blocks = u64(x.shape[0] // TOKENS)
    tiles = (out + height - u64(1)) // height * blocks
    for part in prange(parts):
        table = memory[part, :TABLE_ROWS].view(u32)
        sums = memory[part, TABLE_ROWS:]
        columns = np.empty((4 * GROUPS, TOKENS), u16)
        for tile in range(u64(part), tiles, u64(parts)):
            first = tile // blocks * height
            start = tile % blocks * u64(TOKENS)
            last = min(first + height, out)
            sums[: last - first] = 0
            for k in range(u64(positions.shape[1] // (GROUPS // 2))):
                fill_table(x, start, u64(4 * GROUPS) * k, columns, table)
                for o in range(first, last):
                    row = values[o, u64(2 * GROUPS) * k :]
                    codes = positions[o, u64(GROUPS // 2) * k :]
                    prefetch(row, u64(0), ROWS_AHEAD * values.shape[1] * 2)
                    prefetch(codes, u64(0), ROWS_AHEAD * positions.shape[1])
                    add_tabulated(row, codes, table, sums[o - first])
            # By blocks of outputs, which for one token share a cache line.
            for block in range(first, last, u64(LANES)):
                for t in range(start, min(start + u64(TOKENS), tokens)):
                    for o in range(block, min(block + u64(LANES), last)):
                        store_rounded(y, t, o, sums[o - first, t - start])
