"""Products of rows of S, stored as masks, with tokens on processors with AVX2: sixteen inputs at a
time, in two registers of eight.

A table of all masks of eight bits holds the index of the value of each input.
"""

import numpy as np
from llvmlite import ir
from numba import types

from hasslefree.packed.kernels.cpu import AHEAD, row_function, u64
from hasslefree.packed.kernels.llvm import (
    BYTE,
    FEATURES,
    FLOAT,
    FLOATS,
    INDEX,
    INT16,
    INT32,
    call,
    instruction,
    plus,
    popcount,
    prefetch,
    store_totals,
    zeros,
)

HAS_AVX2 = {"+avx2", "+fma"} <= FEATURES
# Inputs per step.
STEP = 16
OCTET = 8
EIGHT_FLOATS = ir.VectorType(FLOAT, OCTET)
EIGHT_WORDS = ir.VectorType(INT32, OCTET)
# For each mask and input, the number of set bits before it: int32 (256, 8). The sign is set if the
# bit of the input is set.
BITS = np.arange(256)[:, np.newaxis] >> np.arange(OCTET) & 1
PLACES = (np.cumsum(BITS, axis=1) - BITS - BITS * 2**31).astype(np.int32)


def expanded_octet(
    builder,
    values,
    places,
):
    """Eight float32 values moved to the places (8,) of their inputs; 0 for other inputs."""
    if isinstance(values.type.element, ir.IntType):
        wide = builder.zext(values, EIGHT_WORDS)
        bits = builder.shl(wide, ir.Constant(EIGHT_WORDS, [16] * OCTET))
        values = builder.bitcast(bits, EIGHT_FLOATS)
    chosen = call(builder, "llvm.x86.avx2.permps", EIGHT_FLOATS, [values, places])
    has_value = builder.ashr(places, ir.Constant(EIGHT_WORDS, [31] * OCTET))
    kept = builder.and_(builder.bitcast(chosen, EIGHT_WORDS), has_value)
    return builder.bitcast(kept, EIGHT_FLOATS)


@instruction(
    "sums",
    first=INDEX,
    second=INDEX,
    masks=INDEX,
    t=INDEX,
    column=INDEX,
)
def add_octets(
    builder,
    sums,
    values,
    first,
    second,
    masks,
    table,
    x,
    t,
    column,
):
    """sums, of one row and token, += the products of sixteen inputs from `column` on.

    values: those of the first eight inputs begin at `first`, those of the others at `second`; eight
    are read from each. masks: two masks of eight bits; table: `PLACES`; x: float32.
    """
    if not HAS_AVX2:
        return sums
    is_float = isinstance(values.dtype, types.Float)
    stored = ir.VectorType(FLOAT if is_float else INT16, OCTET)
    factors = []
    inputs = []
    for half, start in enumerate((first, second)):
        mask = builder.and_(builder.lshr(masks, masks.type(8 * half)), masks.type(255))
        places = table.load([mask, mask.type(0)], EIGHT_WORDS)
        octet = values.load([start], stored)
        factors.append(expanded_octet(builder, octet, places))
        source = x.pointer([t, plus(builder, column, OCTET * half)], BYTE)
        # Only inputs whose place is negative are read; the others are 0.
        read = "llvm.x86.avx.maskload.ps.256"
        inputs.append(call(builder, read, EIGHT_FLOATS, [source, places]))
    lanes = ir.Constant(ir.VectorType(INT32, STEP), list(range(STEP)))
    left = builder.shuffle_vector(*factors, lanes)
    right = builder.shuffle_vector(*inputs, lanes)
    sums[0] = call(builder, "llvm.fma.v16f32", FLOATS, [left, right, sums[0]])
    return sums


@row_function
def dot_octets(
    values,
    start,
    mask,
    o,
    x,
    t,
    y,
):
    """y[t, o] = the product of one row with a token. x: float32."""
    sums = zeros(1, 1)
    k = u64(start)
    for step in range(u64(x.shape[1] // STEP)):
        low = u64(mask[u64(2) * step])
        high = u64(mask[u64(2) * step + u64(1)])
        middle = k + u64(popcount(low))
        prefetch(values, k, AHEAD)
        column = u64(STEP) * step
        sums = add_octets(sums, values, k, middle, low | high << u64(8), PLACES, x, t, column)
        k = middle + u64(popcount(high))
    store_totals(sums, y, t, o)
