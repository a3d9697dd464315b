"""Numba kernels over the packed tensors of S: the product with a few tokens, and S unpacked into dense rows.

Arrays in, arrays out. Values are float32, or the bits of bfloat16 as uint16; to unpack, the bits of any dtype. Sums are
float32. A row of the result is computed by one thread in one order, so that the number of threads changes no bit of it.
Rows run in parallel in Numba's threading layer; where that is `workqueue` (neither OpenMP nor TBB was found), two
Python threads must not call at once. Caching works by file: everything jitted stands in this one.

A position beyond its group is taken for the group's last, and bits of a mask beyond the row are not looked at, so that
no index, however wrong, reaches outside a row.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
# Reassociation lets a dot product use vector registers; NaN, Inf and signed zeros keep their meaning.
SUMS = {"reassoc", "contract"}
# A code is read from four bytes at once, wherever in the row it starts.
WINDOW = 4
# Bytes of a line of the cache, and rows that share a block of the inputs.
LINE, ROWS = 64, 32

row_function = njit(nogil=True, error_model="numpy", inline="always")
rows_in_parallel = njit(nogil=True, error_model="numpy", parallel=True, cache=True)
sums_in_parallel = njit(nogil=True, error_model="numpy", parallel=True, cache=True, fastmath=SUMS)


def use_threads(count: int) -> None:
    """Kernels called from this thread run on `count` threads, or on as many as Numba has."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


@intrinsic
def lowest_bit(typing, word):
    """The number of the lowest set bit of a uint64 that is not zero."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def popcount(typing, byte):
    """The number of set bits of a uint8."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint8(types.uint8), generate


def widen(value):
    """A stored value as float32."""


@overload(widen, inline="always")
def _widen(value):
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: u32(u32(value) << u32(16)).view(np.float32)


@intrinsic
def prefetch(typing, row, at):
    """Ask for the cache line of row[at]."""

    def generate(context, builder, signature, arguments):
        memory = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        address = builder.bitcast(builder.gep(memory, [arguments[1]]), pointer)
        builder.call(ask, [address, number(0), number(3), number(1)])  # to read, near, data
        return context.get_dummy_value()

    return types.none(row, types.int64), generate


@row_function
def fetch(row, start, stop):
    for at in range(start, stop, LINE // row.itemsize):
        prefetch(row, at)


# 2:4: a byte, an octet of inputs, holds two groups with 4 values.


@row_function
def chosen(first, second, low, high):
    """Of four inputs (two pairs) the one that a 2-bit position names: selections, which vectorise, and no gather."""
    return widen((second[1] if low else second[0]) if high else (first[1] if low else first[0]))


@njit(nogil=True, error_model="numpy", fastmath=SUMS)
def dot_octets(values, positions, x):
    """values: (4·octets,); positions: (octets,); x: (8, ≥ octets), x[k, b] = input 8b + k."""
    total = np.float32(0)
    for b in range(positions.shape[0]):
        c = np.int32(positions[b])
        first, second = (x[0, b], x[1, b]), (x[2, b], x[3, b])
        total += widen(values[4 * b]) * chosen(first, second, c & 1, c & 2)
        total += widen(values[4 * b + 1]) * chosen(first, second, c & 4, c & 8)
        first, second = (x[4, b], x[5, b]), (x[6, b], x[7, b])
        total += widen(values[4 * b + 2]) * chosen(first, second, c & 16, c & 32)
        total += widen(values[4 * b + 3]) * chosen(first, second, c & 64, c & 128)
    return total


@sums_in_parallel
def dot_2_4(values, positions, x, y):
    """y = x Sᵀ. values: (out, in/2); positions: (out, ⌈in/8⌉); y: (tokens, out), zeros.

    A block of x stays in the cache for some rows; a row's part of the block is asked for one row ahead, for the
    processor cannot foresee it. x: (tokens, blocks, 8, octets), of the dtype of the values.
    """
    out, whole, octets = values.shape[0], values.shape[1] // 4, x.shape[3]
    for chunk in prange((out + ROWS - 1) // ROWS):
        rows = range(chunk * ROWS, min(chunk * ROWS + ROWS, out))
        for start in range(0, whole, octets):
            stop = min(start + octets, whole)
            for o in rows:
                if o + 1 < out:
                    fetch(values[o + 1], 4 * start, 4 * stop)
                    fetch(positions[o + 1], start, stop)
                for t in range(x.shape[0]):
                    part = values[o, 4 * start : 4 * stop]
                    y[t, o] += dot_octets(part, positions[o, start:stop], x[t, start // octets])
        if whole < positions.shape[1]:  # a last group without a partner
            for o in rows:
                for t in range(x.shape[0]):
                    c, last = positions[o, whole], x[t, whole // octets, :, whole % octets]
                    y[t, o] += widen(values[o, 4 * whole]) * widen(last[c & 3])
                    y[t, o] += widen(values[o, 4 * whole + 1]) * widen(last[(c >> 2) & 3])


@row_function
def placed(pair, code):
    """A group of four 16-bit values as one word, from its two values (one word) and its 4-bit code."""
    low = (pair & u64(0xFFFF)) << ((code & u64(3)) << u64(4))
    return low | ((pair >> u64(16)) << ((code & u64(12)) << u64(2)))


@rows_in_parallel
def unpack_2_4_16(pairs, positions, rows):
    """rows (out, in/4) of words of four 16-bit values. pairs: (out, in/4) uint32, the two values of a group."""
    groups = pairs.shape[1]
    for o in prange(pairs.shape[0]):
        for b in range(groups // 2):
            c = u64(positions[o, b])
            rows[o, 2 * b] = placed(u64(pairs[o, 2 * b]), c)
            rows[o, 2 * b + 1] = placed(u64(pairs[o, 2 * b + 1]), c >> u64(4))
        if groups % 2:
            rows[o, groups - 1] = placed(u64(pairs[o, groups - 1]), u64(positions[o, groups // 2]))


@row_function
def placed_wide(pair, code):
    """A group of four 32-bit values as two words, from its two values (one word) and its 4-bit code."""
    zero = u64(0)
    a = (pair & u64(0xFFFFFFFF)) << ((code & u64(1)) << u64(5))
    b = (pair >> u64(32)) << ((code & u64(4)) << u64(3))
    low = (zero if code & u64(2) else a) | (zero if code & u64(8) else b)
    return low, (a if code & u64(2) else zero) | (b if code & u64(8) else zero)


@rows_in_parallel
def unpack_2_4_32(pairs, positions, rows):
    """rows (out, in/2) of words of two 32-bit values. pairs: (out, in/4) uint64, the two values of a group."""
    groups = pairs.shape[1]
    for o in prange(pairs.shape[0]):
        for b in range(groups // 2):
            c = u64(positions[o, b])
            rows[o, 4 * b], rows[o, 4 * b + 1] = placed_wide(pairs[o, 2 * b], c)
            rows[o, 4 * b + 2], rows[o, 4 * b + 3] = placed_wide(pairs[o, 2 * b + 1], c >> u64(4))
        if groups % 2:
            last = placed_wide(pairs[o, groups - 1], u64(positions[o, groups // 2]))
            rows[o, 2 * groups - 2], rows[o, 2 * groups - 1] = last


# Any pattern: a row is expanded, and stays in the cache while the tokens are multiplied with it.


@row_function
def expand_positions(values, start, codes, window, n, m, bits, row):
    """One row of N:M from its positions. values: flat, the row's from `start`; codes: bytes; window: scratch for them.

    Unsigned indices, for Numba tests signed ones for being negative.
    """
    window[: codes.shape[0]] = codes
    row[:] = 0
    k, bit, mask, last = u64(start), u64(0), u64((1 << bits) - 1), u64(m - 1)
    for base in range(0, row.shape[0], m):
        for _ in range(n):
            at = bit >> u64(3)
            low = u64(window[at]) | (u64(window[at + u64(1)]) << u64(8))
            high = u64(window[at + u64(2)]) | (u64(window[at + u64(3)]) << u64(8))
            position = ((low | (high << u64(16))) >> (bit & u64(7))) & mask
            row[u64(base) + min(position, last)] = values[k]
            k += u64(1)
            bit += u64(bits)


@row_function
def expand_mask(values, start, mask, row):
    """One row from its mask, 64 inputs at a time. values: flat, the row's from `start`; mask: bytes."""
    row[:] = 0
    k, width = u64(start), row.shape[0]
    for base in range(0, width, 64):
        word = u64(0)
        for i in range(min(8, mask.shape[0] - base // 8)):
            word |= u64(mask[base // 8 + i]) << u64(8 * i)
        if width - base < 64:
            word &= (u64(1) << u64(width - base)) - u64(1)
        while word:
            row[u64(base) + lowest_bit(word)] = values[k]
            word &= word - u64(1)
            k += u64(1)


@njit(nogil=True, error_model="numpy", fastmath=SUMS)
def dot(row, x):
    """Σ row·x of an expanded row: (in,) and (in,) float32."""
    total = np.float32(0)
    for j in range(row.shape[0]):
        total += widen(row[j]) * x[j]
    return total


@sums_in_parallel
def dot_positions(values, positions, n, m, bits, x, y):
    """y = x Sᵀ. values: flat; positions: (out, bytes); x: (tokens, in); y: (tokens, out)."""
    kept = x.shape[1] // m * n
    for o in prange(positions.shape[0]):
        row, window = np.empty(x.shape[1], values.dtype), np.zeros(positions.shape[1] + WINDOW, u8)
        expand_positions(values, o * kept, positions[o], window, n, m, bits, row)
        for t in range(x.shape[0]):
            y[t, o] = dot(row, x[t])


@sums_in_parallel
def dot_mask(values, starts, mask, x, y):
    """y = x Sᵀ. values: flat; starts: (out,) where each row's begin; mask: (out, bytes); x: (tokens, in)."""
    for o in prange(mask.shape[0]):
        row = np.empty(x.shape[1], values.dtype)
        expand_mask(values, starts[o], mask[o], row)
        for t in range(x.shape[0]):
            y[t, o] = dot(row, x[t])


@rows_in_parallel
def unpack_positions(values, positions, n, m, bits, rows):
    """rows: (out, in). values: flat bits; positions: (out, bytes)."""
    kept = rows.shape[1] // m * n
    for o in prange(rows.shape[0]):
        window = np.zeros(positions.shape[1] + WINDOW, u8)
        expand_positions(values, o * kept, positions[o], window, n, m, bits, rows[o])


@rows_in_parallel
def unpack_mask(values, starts, mask, rows):
    """rows: (out, in). values: flat bits; starts: (out,); mask: (out, bytes)."""
    for o in prange(rows.shape[0]):
        expand_mask(values, starts[o], mask[o], rows[o])


@rows_in_parallel
def count_rows(mask, counts):
    """counts (out,) of the set bits of each row of a mask (out, bytes)."""
    for o in prange(mask.shape[0]):
        total = u32(0)
        for i in range(mask.shape[1]):
            total += u32(popcount(mask[o, i]))
        counts[o] = total
