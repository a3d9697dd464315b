"""Numba kernels for a complete S in codes of torch's int4 operators (`int4`): S unpacked into dense
rows, and L added to a product. Arrays are those of `cpu`.
"""

import numpy as np
from numba import carray, njit, prange, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from hasslefree.packed.kernels.cpu import (
    SUMS,
    row_function,
    rows_in_parallel,
    store_rounded,
    u32,
    u64,
    widen,
)
from hasslefree.packed.kernels.llvm import LANES, unpack_pairs

# Rows of a block, in the order of torch's operators and of oneDNN.
BLOCK = 4 * LANES


@intrinsic
def bits_at(typing, address):
    """A pointer to the bits of bfloat16 at an address: an array for each call costs more than L."""
    pointer = types.CPointer(types.uint16)

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address), generate


@njit(nogil=True, error_model="numpy", cache=True, fastmath=SUMS)
def add_low_rank(
    x_address,
    y_address,
    tokens,
    v,
    v_scale,
    u,
    u_scale,
    bias,
):
    """y += x vᵀ uᵀ + bias for x (tokens, in) and y (tokens, out) in bfloat16 at their addresses,
    summed in float32 and rounded once. By one thread: starting others takes longer.

    u: (out, r) and v: (r, in) are the bits of bfloat16, or int8 codes with scales (out,) and (r,);
    scales and bias are float32, and (0,) for none.
    """
    x = carray(bits_at(x_address), (tokens, v.shape[1]))
    y = carray(bits_at(y_address), (tokens, u.shape[0]))
    hidden = np.empty(v.shape[0], np.float32)
    for t in range(u64(tokens)):
        for k in range(u64(v.shape[0])):
            total = np.float32(0)
            for j in range(u64(v.shape[1])):
                total += widen(v[k, j]) * widen(x[t, j])
            if v_scale.shape[0]:
                total *= v_scale[k]
            hidden[k] = total
        for o in range(u64(u.shape[0])):
            total = np.float32(0)
            for k in range(u64(v.shape[0])):
                total += widen(u[o, k]) * hidden[k]
            if u_scale.shape[0]:
                total *= u_scale[o]
            if bias.shape[0]:
                total += bias[o]
            store_rounded(y, t, o, widen(y[t, o]) + total)


@row_function
def last_rows(
    codes,
    low,
    above,
    high,
    terms,
    pairs,
    at,
    half,
):
    """`unpack_pairs` for 2·half rows, of which neighbours share a byte, and `half` bytes an
    input.
    """
    for i in range(half):
        for side in range(u64(2)):
            column = side * half + i
            for second in range(u64(2)):
                place = second * half + i
                code = u32(codes[low + place]) >> u32(u64(4) * side) & u32(15)
                if high:
                    octet = u32(codes[above + place])
                    code |= (octet >> u32(u64(4) * side) & u32(15)) << u32(4)
                value = np.float32(np.int32(code)) * terms[0, column] + terms[1, column]
                bits = np.float32(value).view(np.uint32) + u32(0x8000)
                if second:
                    pairs[at + u64(2) * i + side] |= bits & u32(0xFFFF0000)
                else:
                    pairs[at + u64(2) * i + side] = bits >> u32(16)


@rows_in_parallel
def unpack_nibbles(
    codes,
    terms,
    first,
    group,
    slots,
    high,
    pairs,
):
    """Rows of S from `first` on, in bfloat16, in blocks of 64 rows, as oneDNN takes them.

    codes: uint8 (out, octets) in the order of torch's operators with AVX-512; terms: the bits of
    (groups, out, 2); group: the inputs of S that share terms; slots: the nibbles of an input; high:
    the second one counts 16 times; pairs: uint32 (blocks, pairs of inputs, 64), of which rows and
    inputs that S does not have stay as they are.
    """
    octets = u64(codes.shape[1])
    flat = codes.reshape(-1)
    places = pairs.reshape(-1)
    middle = np.float32(136 if high else 8)
    times = np.float32(17 if high else 1)
    out = u64(codes.shape[0])
    for block in prange(pairs.shape[0]):
        start = u64(first) + u64(block * BLOCK)
        count = min(u64(BLOCK), out - start)
        half = count // u64(2)
        numbers = np.zeros((2, BLOCK), np.float32)
        for g in range(u64(terms.shape[0])):
            for c in range(count):
                # In a last block of fewer rows, neighbours share a byte.
                row = c if count == u64(BLOCK) else c % half * u64(2) + c // half
                scale = widen(terms[g, start + row, 0])
                numbers[0, c] = scale
                numbers[1, c] = times * widen(terms[g, start + row, 1]) - middle * scale
            low = start * octets + g * u64(slots * group) * half
            above = low + u64(group) * half
            at = (u64(block) * u64(pairs.shape[1]) + g * u64(group // 2)) * u64(BLOCK)
            for _ in range(u64(group // 2)):
                if count < u64(BLOCK):
                    last_rows(flat, low, above, high, numbers, places, at, half)
                elif high:
                    unpack_pairs(flat, low, above, numbers, places, at)
                else:
                    unpack_pairs(flat, low, None, numbers, places, at)
                low += count
                above += count
                at += u64(BLOCK)
