"""Numba kernels for a complete S in codes of torch's int4 operators (`int4`): S unpacked into dense
rows, and L added to a product. Arrays are those of `cpu`.
"""

import numpy as np
from numba import carray, njit, prange, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from hasslefree.packed.kernels.cpu import SUMS, rows_in_parallel, store_rounded, u32, u64, widen
from hasslefree.packed.kernels.llvm import NIBBLES, unpack_lanes


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


@rows_in_parallel
def unpack_nibbles(
    codes,
    terms,
    first,
    block,
    group,
    slots,
    high,
    tile,
):
    """Rows of S from `first` on, in bfloat16: tile (in, rows), whole blocks or the last rows.

    codes: uint8 (out, octets) in the order of torch's operators; terms: the bits of (groups, out,
    2); block: the rows that this order interleaves; group: the inputs of S that share terms; slots:
    the nibbles of an input; high: the second one counts 16 times.
    """
    octets = u64(codes.shape[1])
    flat = codes.reshape(-1)
    middle = np.float32(136 if high else 8)
    times = np.float32(17 if high else 1)
    rows = tile.shape[1]
    for part in prange((rows + block - 1) // block):
        start = u64(part * block)
        count = min(u64(block), u64(rows) - start)
        half = count // u64(2)
        is_whole = count == u64(block)
        numbers = np.empty((2, count), np.float32)
        unsorted = np.empty(count, np.uint16)
        base = (u64(first) + start) * octets
        for g in range(u64(tile.shape[0] // group)):
            for c in range(count):
                row = c if is_whole else c % half * u64(2) + c // half
                scale = widen(terms[g, u64(first) + start + row, 0])
                centre = widen(terms[g, u64(first) + start + row, 1])
                numbers[0, c] = scale
                numbers[1, c] = times * centre - middle * scale
            for k in range(g * u64(group), (g + u64(1)) * u64(group)):
                low = base + (k + g * u64((slots - 1) * group)) * half
                above = low + u64(group) * half if high else low
                values = tile[k, start : start + count] if is_whole else unsorted
                for c in range(u64(0), half, u64(NIBBLES)):
                    unpack_lanes(flat, low + c, above + c, u32(0), numbers, c, values)
                    unpack_lanes(flat, low + c, above + c, u32(4), numbers, half + c, values)
                if not is_whole:  # neighbouring rows share a byte
                    for c in range(half):
                        tile[k, start + u64(2) * c] = unsorted[c]
                        tile[k, start + u64(2) * c + u64(1)] = unsorted[half + c]
