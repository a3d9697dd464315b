"""Numba kernels for S of any pattern by the mask of a row: its product with a few tokens, and S
unpacked into dense rows.

Arrays and sums are as in `cpu`; to unpack, values are the bits of any dtype. Masks of N:M are made
from its positions first. A position beyond its group counts as the group's last, bits of a mask
beyond the row or the values are ignored, so that no index, however wrong, reaches outside them.
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

# A position is read from four bytes at once, wherever in the row it starts.
WINDOW = 4
# Inputs that this processor takes at once: with AVX-512, with AVX2, and without either.
WITH_AVX512 = SPAN
WITH_AVX2 = octets.STEP
if WIDE:
    STEP = WITH_AVX512
elif octets.HAS_AVX2:
    STEP = WITH_AVX2
else:
    STEP = 0
# Tokens that share the expanded values of a row.
TOGETHER = 4


@row_function
def mask_of_pair(code, shift):
    """The bits of a group of 2:4 as a mask, in arithmetic that vectorises: the bit 1 << p is (1 +
    p₀)·(1 + 3·p₁).
    """
    one = u8(1)
    code = code >> u8(shift)
    first = (one + (code & one)) * (one + u8(3) * ((code >> one) & one))
    second = (one + ((code >> u8(2)) & one)) * (one + u8(3) * ((code >> u8(3)) & one))
    return first | second


@row_function
def mark_pairs(codes, width, mask):
    """Set the mask of a row of 2:4; both are bytes of two groups."""
    for i in range(codes.shape[0]):
        mask[i] = mask_of_pair(codes[i], 0) | (mask_of_pair(codes[i], 4) << u8(4))
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
    """Set the mask of a row of N:M and this width, both bytes."""
    # Unsigned indices: Numba tests signed ones for being negative.
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
    """One row from its mask. values: flat, the row's from `start`; mask: bytes. Reads no value that
    is not there.
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
    """y[t :, o] = the products of one row with the tokens of `sums`, which are 0."""
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

    values: flat; starts: (out,) where each row's begin; masks: (out, bytes); step: `STEP`; the
    others as for `layer_2_4`.
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
        # Registers are filled whole: what they read must be there.
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
    """rows: (out, in). values: flat bits; starts: (out,); masks: (out, bytes)."""
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
    """masks (out, ⌈in/8⌉), which are 0, of N:M. positions: (out, bytes), of `bits` bits each."""
    for o in prange(masks.shape[0]):
        if n == 2 and m == 4:
            mark_pairs(positions[o], width, masks[o])
        else:
            mark_row(positions[o], n, m, bits, width, masks[o])


@rows_in_parallel
def count_rows(mask, counts):
    """counts (out,) of the set bits of each row of a mask (out, bytes)."""
    for o in prange(mask.shape[0]):
        total = u32(0)
        for i in range(mask.shape[1]):
            total += u32(popcount(mask[o, i]))
        counts[o] = total
