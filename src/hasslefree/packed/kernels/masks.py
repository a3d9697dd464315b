"""Numba kernels for S of any pattern, by the masks of rows: the product with a few tokens, and
unpacking into dense rows.

Arrays and sums are as in `cpu`; for unpacking, values are the bits of any dtype. The masks of N:M
are made from positions first. No index, however wrong, leads to an access outside the arrays: a
position beyond its group counts as the last of the group, and bits of a mask beyond the row or the
values are ignored.
"""

import numpy as np
from numba import prange

from hasslefree.packed.kernels import octets
from hasslefree.packed.kernels.cpu import (
    AHEAD,
    add_factors,
    dot,
    row_function,
    rows_in_parallel,
    sums_in_parallel,
    u8,
    u32,
    u64,
    widen,
)
from hasslefree.packed.kernels.cpu import layer_2_4 as layer_2_4
from hasslefree.packed.kernels.llvm import WIDE, popcount, prefetch, store_totals, zeros
from hasslefree.packed.kernels.llvm_masks import SPAN, add_expanded, expand, load_word

# The bytes that are read at once for a position, wherever it starts.
WINDOW = 4
# Inputs that the processor multiplies at once: with AVX-512, with AVX2, and 0 without either.
WITH_AVX512 = SPAN
WITH_AVX2 = octets.STEP
if WIDE:
    STEP = WITH_AVX512
elif octets.HAS_AVX2:
    STEP = WITH_AVX2
else:
    STEP = 0
# The number of tokens that share the expanded values of a row.
TOGETHER = 4


@row_function
def mask_of_position(code):
    """1 << p for the position p in the two low bits of a code, in arithmetic that vectorises: with
    the bits p₀ and p₁, it is (1 + p₀)·(1 + 3·p₁).
    """
    one = u8(1)
    low = code & one
    high = (code >> one) & one
    return (one + low) * (one + u8(3) * high)


@row_function
def mask_of_group(code):
    """The mask of a 2:4 group, from the four low bits of a code."""
    return mask_of_position(code) | mask_of_position(code >> u8(2))


@row_function
def mark_pairs(codes, width, mask):
    """Set the mask of a 2:4 row. codes, mask: two groups per byte."""
    for i in range(codes.shape[0]):
        low = mask_of_group(codes[i])
        high = mask_of_group(codes[i] >> u8(4))
        mask[i] = low | (high << u8(4))
    if width % 8:  # the last byte has one group
        mask[codes.shape[0] - 1] &= u8(15)


@row_function
def mark_row(
    codes,
    n,
    m,
    bits,
    width,
    mask,
):
    """Set the mask of an N:M row of `width` inputs. codes, mask: bytes."""
    # Unsigned indices, because Numba tests signed ones for being negative.
    window = np.zeros(codes.shape[0] + WINDOW, u8)
    window[: codes.shape[0]] = codes
    bit = u64(0)
    lowest = u64((1 << bits) - 1)
    last = u64(m - 1)
    for base in range(u64(0), u64(width), u64(m)):
        for _ in range(n):
            word = u64(load_word(window, bit >> u64(3)))
            position = base + min((word >> (bit & u64(7))) & lowest, last)
            mask[position >> u64(3)] |= u8(u64(1) << (position & u64(7)))
            bit += u64(bits)


@row_function
def expand_mask(
    values,
    start,
    mask,
    row,
    step,
):
    """Unpack one row from its mask. values: flat, those of the row from `start` on; mask: bytes.
    Reads nothing beyond the end of the values.
    """
    k = u64(start)
    at = u64(0)
    width = u64(row.shape[0])
    while step == WITH_AVX512 and at + u64(SPAN) <= width and k + u64(SPAN) <= u64(values.shape[0]):
        bits = load_word(mask, at >> u64(3))
        prefetch(values, k, AHEAD)
        expand(values, k, bits, row, at)
        k += u64(popcount(bits))
        at += u64(SPAN)
    while at < width:
        bits = u64(mask[at >> u64(3)])
        row[at : min(at + u64(8), width)] = 0
        if width - at < u64(8):
            bits &= (u64(1) << (width - at)) - u64(1)
        while bits and k < u64(values.shape[0]):
            lowest = popcount((bits & -bits) - u64(1))  # the position of the lowest set bit
            row[at + lowest] = values[k]
            bits &= bits - u64(1)
            k += u64(1)
        at += u64(8)


@row_function
def dot_wide(
    values,
    start,
    mask,
    o,
    x,
    t,
    y,
    sums,
):
    """y[t :, o] = the products of one row with as many tokens as `sums` has. sums: all 0."""
    k = u64(start)
    for span in range(u64(x.shape[1] // SPAN)):
        bits = load_word(mask, u64(4) * span)
        prefetch(values, k, AHEAD)
        sums = add_expanded(sums, values, k, bits, x, t, span)
        k += u64(popcount(bits))
    store_totals(sums, y, t, o)


@sums_in_parallel
def layer_by_masks(
    values,
    starts,
    masks,
    u,
    v,
    bias,
    x,
    y,
    step,
):
    """y = x (S + u v)ᵀ + bias, summed in float32 and rounded once.

    values: flat; starts: (out,), the index of each row's first value; masks: (out, bytes); step:
    `STEP`; the others as for `layer_2_4`.
    """
    width = u64(x.shape[1])
    tokens = u64(x.shape[0])
    together = tokens - tokens % u64(TOGETHER)
    sums = np.empty(y.shape, np.float32)
    hidden = np.empty((x.shape[0], v.shape[0]), np.float32)
    wide_x = np.empty(x.shape if step == WITH_AVX2 else (0, 0), np.float32)
    for t in range(u64(wide_x.shape[0])):
        for j in range(width):
            wide_x[t, j] = widen(x[t, j])
    for k in prange(v.shape[0]):
        for t in range(tokens):
            hidden[t, k] = dot(v[k], x[t])
    for o in prange(masks.shape[0]):
        # Whole registers are read, which must not reach beyond the end of the values.
        fits = u64(starts[o]) + width <= u64(values.shape[0]) and width % u64(SPAN) == 0
        if fits and step == WITH_AVX2:
            for t in range(tokens):
                octets.dot_octets(values, starts[o], masks[o], o, wide_x, t, sums)
        elif fits and step == WITH_AVX512:
            for t in range(u64(0), together, u64(TOGETHER)):
                dot_wide(values, starts[o], masks[o], o, x, t, sums, zeros(1, TOGETHER))
            for t in range(together, tokens):
                dot_wide(values, starts[o], masks[o], o, x, t, sums, zeros(1, 1))
        else:
            row = np.empty(x.shape[1], values.dtype)
            expand_mask(values, starts[o], masks[o], row, step)
            for t in range(tokens):
                sums[t, o] = dot(row, x[t])
        add_factors(sums, u, hidden, bias, y, o)


@rows_in_parallel
def unpack_by_masks(
    values,
    starts,
    masks,
    rows,
    step,
):
    """Unpack rows (out, in). values: flat bits; starts: (out,); masks: (out, bytes)."""
    for o in prange(rows.shape[0]):
        expand_mask(values, starts[o], masks[o], rows[o], step)


@rows_in_parallel
def mark_positions(
    positions,
    n,
    m,
    bits,
    width,
    masks,
):
    """Set masks (out, ⌈in/8⌉), all 0, of N:M. positions: (out, bytes), of `bits` bits each."""
    for o in prange(masks.shape[0]):
        if n == 2 and m == 4:
            mark_pairs(positions[o], width, masks[o])
        else:
            mark_row(positions[o], n, m, bits, width, masks[o])


@rows_in_parallel
def count_rows(mask, counts):
    """counts (out,) = the number of set bits in each row of a mask (out, bytes)."""
    for o in prange(mask.shape[0]):
        total = u32(0)
        for i in range(mask.shape[1]):
            total += u32(popcount(mask[o, i]))
        counts[o] = total
