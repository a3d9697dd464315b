"""Numba kernels for S in the codes of torch's int4 operators (`int4`): unpacking of S into dense
rows, and the parts of a product that the operators leave out, high bits of codes and L. Arrays are
as in `cpu`.
"""

import numpy as np
from numba import carray, prange, types  # type: ignore[attr-defined]

from hasslefree.core.compiled import compiled
from hasslefree.packed.kernels.cpu import (
    SUMS,
    row_function,
    rows_in_parallel,
    store_rounded,
    sums_in_parallel,
    u32,
    u64,
    widen,
)
from hasslefree.packed.kernels.llvm import INT16, LANES, instruction, zeros
from hasslefree.packed.kernels.llvm_nibbles import add_entries, add_scaled, store_rows, unpack_pairs

# Rows per block, in the orders of torch's operators and of oneDNN.
BLOCK = 4 * LANES


@instruction(types.CPointer(types.uint16))
def bits_at(builder, address):
    """A pointer to bfloat16 bits at an address: making an array per call takes longer than L."""
    return builder.inttoptr(address, INT16.as_pointer())


@compiled(fastmath=SUMS)
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
    summed in float32 and rounded once. On one thread: starting others takes longer.

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
def tabulate(
    x,
    t,
    bits,
    tables,
):
    """tables[k, code] = Σ (high − middle) x over the inputs whose `bits` high bits are in nibble k,
    for each value of the nibble. tables: float32 (nibbles, 16).
    """
    inputs = u64(4) // u64(bits)
    middle = np.float32((1 << bits) - 1) / np.float32(2)
    for k in range(u64(tables.shape[0])):
        total = np.float32(0)
        for i in range(inputs):
            total += np.float32(widen(x[t, k * inputs + i]))
        tables[k, 0] = -middle * total
        size = u64(1)
        for i in range(inputs):
            number = np.float32(widen(x[t, k * inputs + i]))
            for _ in range(u64(bits)):
                for code in range(size):
                    tables[k, size + code] = tables[k, code] + number
                size *= u64(2)
                number *= np.float32(2)


@row_function
def last_totals(
    tables,
    codes,
    at,
    terms,
    row,
    count,
    totals,
):
    """The sums of `add_high` for the last `count` rows, of which neighbours share a byte."""
    half = count // u64(2)
    groups = u64(terms.shape[0])
    steps = u64(tables.shape[0]) // groups
    for c in range(count):
        totals[c] = np.float32(0)
        for g in range(groups):
            part = np.float32(0)
            for k in range(g * steps, (g + u64(1)) * steps):
                octet = u64(codes[at + k * half + c // u64(2)])
                part += tables[k, octet >> (u64(4) * (c % u64(2))) & u64(15)]
            scale = np.uint32(terms[g, row + c] << u32(16)).view(np.float32)
            totals[c] += part * scale


@sums_in_parallel
def add_high(
    x_address,
    y_address,
    tokens,
    codes,
    terms,
    group,
    bits,
):
    """y += 16·x Hᵀ for x (tokens, in) and y (tokens, out) in bfloat16 at their addresses, summed in
    float32 and rounded once. H = (high − middle)·scale: the high bits of the codes of S, minus the
    middle of their range.

    codes: nibbles, uint8 (out, bits · in/8) in the order of torch's operators with AVX-512, each
    with the high bits of 4/bits inputs; terms: uint32 (groups, out), whose lower halves are the
    scales in bfloat16; group: the number of inputs per scale.
    """
    out = u64(terms.shape[1])
    groups = u64(terms.shape[0])
    width = groups * u64(group)
    steps = u64(group) * u64(bits) // u64(4)
    octets = u64(codes.shape[1])
    x = carray(bits_at(x_address), (tokens, width))
    y = carray(bits_at(y_address), (tokens, out))
    flat = codes.reshape(-1)
    tables = np.empty((tokens, groups * steps, 16), np.float32)
    for t in range(u64(tokens)):
        tabulate(x, t, bits, tables[t])
    for block in prange((out + u64(BLOCK - 1)) // u64(BLOCK)):
        row = u64(block) * u64(BLOCK)
        count = min(u64(BLOCK), out - row)
        totals = np.empty(BLOCK, np.float32)
        for t in range(u64(tokens)):
            table = tables[t]
            at = row * octets
            if count < u64(BLOCK):
                last_totals(table, flat, at, terms, row, count, totals)
            else:
                sums = zeros(4, 1)
                for g in range(groups):
                    part = zeros(4, 1)
                    for k in range(g * steps, (g + u64(1)) * steps):
                        part = add_entries(part, table, k, flat, at)
                        at += u64(BLOCK // 2)
                    sums = add_scaled(sums, part, terms, g, row)
                store_rows(sums, totals)
            for c in range(count):
                total = widen(y[t, row + c]) + np.float32(16) * totals[c]
                store_rounded(y, t, row + c, total)


@row_function
def last_rows(
    codes,
    low,
    above,
    high,
    mask,
    terms,
    pairs,
    at,
    half,
):
    """`unpack_pairs` for the last 2·half rows, of which neighbours share a byte, with `half` bytes
    per input. mask: 0 if nothing is above.
    """
    for i in range(half):
        for side in range(u64(2)):
            column = side * half + i
            for second in range(u64(2)):
                place = second * half + i
                code = u32(codes[low + place]) >> u32(u64(4) * side) & u32(15)
                if mask:
                    octet = u32(above[high[2 * second] + i]) >> u32(u64(4) * side)
                    code |= (octet >> u32(high[2 * second + 1]) & u32(mask)) << u32(4)
                value = np.float32(np.int32(code)) * terms[0, column] + terms[1, column]
                bits = np.float32(value).view(np.uint32) + u32(0x8000)
                if second:
                    pairs[at + u64(2) * i + side] |= bits & u32(0xFFFF0000)
                else:
                    pairs[at + u64(2) * i + side] = bits >> u32(16)


@row_function
def places_of_high(
    pair,
    low,
    group,
    shared,
    start,
    half,
):
    """The places of the high bits of a pair of inputs, as `unpack_pairs` takes them. pair: the
    index in the row; start: the first of the rows' shared nibbles.
    """
    if shared:
        bit = pair * u64(2) * u64(shared)
        place = start + bit // u64(4) * half
        return (place, bit % u64(4), place, bit % u64(4) + u64(shared))
    place = low + u64(group) * half
    return (place, u64(0), place + half, u64(0))


@rows_in_parallel
def unpack_nibbles(
    codes,
    above,
    terms,
    first,
    group,
    slots,
    high,
    shared,
    pairs,
):
    """Unpack rows of S from `first` on into bfloat16, in oneDNN's order: blocks of 64 rows.

    codes: uint8 (out, octets) in the order of torch's operators with AVX-512; terms: the bits of
    (groups, out, 2); group: the number of inputs of S that share terms; slots: the nibbles per
    input; high: True if the second nibble counts 16 times; shared: the number of high bits per code
    that share a nibble of `above`, which has the order of `codes` and is `codes` itself if there
    are none; pairs: uint32 (blocks, pairs of inputs, 64), whose padding is not written.
    """
    octets = u64(codes.shape[1])
    flat = codes.reshape(-1)
    flat_above = above.reshape(-1)
    places = pairs.reshape(-1)
    middle = np.float32(136 if high else 8 << shared)
    times = np.float32(17 if high else 1)
    mask = u64(15 if high else (1 << shared) - 1)
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
            at = (u64(block) * u64(pairs.shape[1]) + g * u64(group // 2)) * u64(BLOCK)
            first_pair = g * u64(group // 2)
            for i in range(u64(group // 2)):
                bits = places_of_high(
                    first_pair + i, low, group, shared, start * u64(above.shape[1]), half
                )
                if count < u64(BLOCK):
                    last_rows(flat, low, flat_above, bits, mask, numbers, places, at, half)
                elif mask:
                    unpack_pairs(flat, low, flat_above, bits, mask, numbers, places, at)
                else:
                    unpack_pairs(flat, low, None, bits, mask, numbers, places, at)
                low += count
                at += u64(BLOCK)
