"""The product of a row of S, stored as a mask, with a token on processors with AVX2: sixteen inputs
at a time, in two registers of eight.

A table of all masks of eight bits says where each input finds its value.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hasslefree.packed.kernels.cpu import AHEAD, row_function, u64
from hasslefree.packed.kernels.llvm import (
    BYTE,
    FEATURES,
    FLOAT,
    FLOATS,
    INT16,
    INT32,
    address,
    call,
    popcount,
    prefetch,
    store_totals,
    zeros,
)

HAS_AVX2 = {"+avx2", "+fma"} <= FEATURES
# Inputs of one step.
STEP = 16
OCTET = 8


def places_of_masks():
    """For each mask and input, how many inputs before it have a bit: int32 (256, 8). The sign is
    set where the input has one.
    """
    places = np.zeros((256, OCTET), np.int32)
    for mask in range(256):
        bits = mask >> np.arange(OCTET) & 1
        places[mask] = np.cumsum(bits) - bits - bits * 2**31
    return places


PLACES = places_of_masks()


def expanded_octet(
    builder,
    values,
    places,
):
    """The values, eight float32, in the places (8,) of their inputs, and 0 for other inputs."""
    floats = ir.VectorType(FLOAT, OCTET)
    words = ir.VectorType(INT32, OCTET)
    if isinstance(values.type.element, ir.IntType):
        wide = builder.zext(values, words)
        values = builder.bitcast(builder.shl(wide, ir.Constant(words, [16] * OCTET)), floats)
    chosen = call(builder, "llvm.x86.avx2.permps", floats, [values, places])
    has_value = builder.ashr(places, ir.Constant(words, [31] * OCTET))
    return builder.bitcast(builder.and_(builder.bitcast(chosen, words), has_value), floats)


@intrinsic
def add_octets(
    typing,
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

    values: the row's begin at `first` for the first eight inputs, and at `second` for the others;
    eight are read from each. masks: the two masks of eight bits; table: `PLACES`; x: float32.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        sums, values, first, second, masks, table, x, t, column = arguments
        _, values_kind, _, _, _, table_kind, x_kind, _, _ = signature.args
        if not HAS_AVX2:
            return sums
        is_float = isinstance(values_kind.dtype, types.Float)
        stored = ir.VectorType(FLOAT if is_float else INT16, OCTET)
        words = ir.VectorType(INT32, OCTET)
        floats = ir.VectorType(FLOAT, OCTET)
        factors = []
        inputs = []
        for half, start in enumerate((first, second)):
            mask = builder.and_(builder.lshr(masks, masks.type(8 * half)), masks.type(255))
            at = [mask, mask.type(0)]
            places = builder.load(address(context, builder, table_kind, table, at, words), align=4)
            source = address(context, builder, values_kind, values, [start], stored)
            octet = builder.load(source, align=values_kind.dtype.bitwidth // 8)
            factors.append(expanded_octet(builder, octet, places))
            at = [t, builder.add(column, column.type(OCTET * half))]
            source = address(context, builder, x_kind, x, at, BYTE)
            # Only inputs whose sign is set are read; the others are 0.
            inputs.append(call(builder, "llvm.x86.avx.maskload.ps.256", floats, [source, places]))
        lanes = ir.Constant(ir.VectorType(INT32, STEP), list(range(STEP)))
        left = builder.shuffle_vector(*factors, lanes)
        right = builder.shuffle_vector(*inputs, lanes)
        total = builder.extract_value(sums, 0)
        total = call(builder, "llvm.fma.v16f32", FLOATS, [left, right, total])
        return builder.insert_value(sums, total, 0)

    index = types.uint64
    return sums(sums, values, index, index, types.uint64, table, x, index, index), generate


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
