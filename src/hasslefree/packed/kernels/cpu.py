"""The Numba kernel of a 2:4 layer for a few tokens, and functions that all kernels share.

Arrays in, arrays out. Values are float32, or the bits of bfloat16 as uint16. Sums are float32. Each
row of the result is computed by one thread in a fixed order, so that results do not depend on the
number of threads. Rows run in parallel in Numba's threading layer; if that is `workqueue` (neither
OpenMP nor TBB was found), two Python threads must not call at once. Numba caches kernels per file:
after a change of this file, of `octets` or of a file whose name begins with `llvm`, remove the
caches of the whole folder.

If the processor has AVX-512 (`WIDE`), loops over whole registers do nearly all the work
(`llvm_pairs`). A scalar loop does the rest, or all of it if `wide` is false.
"""

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from hasslefree.core.compiled import compiled
from hasslefree.packed.kernels.llvm import prefetch, store_totals, zeros
from hasslefree.packed.kernels.llvm_pairs import add_products

u8 = np.uint8
u16 = np.uint16
u32 = np.uint32
u64 = np.uint64
# Reassociation lets a dot product use vector registers; NaN, Inf and signed zeros keep their
# meaning.
SUMS = {"reassoc", "contract"}
# Bytes of values and of codes by which prefetching is ahead of the products; one row would not be
# enough.
AHEAD = 8192
CODES_AHEAD = 1024

row_function = njit(nogil=True, error_model="numpy", inline="always")
rows_in_parallel = compiled(parallel=True)
sums_in_parallel = compiled(parallel=True, fastmath=SUMS)


def widen(value):
    """A stored value as float32."""


@overload(widen, inline="always")
def _widen(value):
    if isinstance(value, types.Float):
        return lambda value: value
    if value == types.int8:  # a code
        return lambda value: np.float32(value)
    return lambda value: u32(u32(value) << u32(16)).view(np.float32)


def store_rounded(
    y,
    t,
    o,
    value,
):
    """y[t, o] = a float32, rounded to the nearest number, ties to even."""


@overload(store_rounded, inline="always")
def _store_rounded(
    y,
    t,
    o,
    value,
):
    if isinstance(y.dtype, types.Float):

        def store(
            y,
            t,
            o,
            value,
        ):
            y[t, o] = value

    else:

        def store(
            y,
            t,
            o,
            value,
        ):
            bits = np.float32(value).view(np.uint32)  # of a NaN of bfloat16, the low half is 0
            rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
            y[t, o] = u16(rounded)

    return store


@njit(nogil=True, error_model="numpy", fastmath=SUMS)
def dot(row, x):
    """Σ row·x of two rows (in,), each float32 or the bits of bfloat16."""
    total = np.float32(0)
    for j in range(row.shape[0]):
        total += widen(row[j]) * widen(x[j])
    return total


@row_function
def add_factors(
    sums,
    u,
    hidden,
    bias,
    y,
    o,
):
    """y[:, o] = sums[:, o] + hidden u[o] + bias[o], rounded. bias: (0,) for none."""
    for t in range(y.shape[0]):
        total = sums[t, o] + dot(u[o], hidden[t])
        if bias.shape[0]:
            total += widen(bias[o])
        store_rounded(y, t, o, total)


# In 2:4, a byte holds the codes of two groups. The positions of a register of values select inputs
# from two registers.


@row_function
def dot_groups(
    values,
    codes,
    x,
    first,
):
    """The dot product of a row and a token from group `first` on."""
    sums = np.float32(0)
    for g in range(u64(first), u64(values.shape[0] // 2)):
        code = codes[g // u64(2)] >> u8(g % u64(2) * u64(4))
        first_input = x[u64(4) * g + u64(code & u8(3))]
        second_input = x[u64(4) * g + u64((code >> u8(2)) & u8(3))]
        sums += widen(values[u64(2) * g]) * widen(first_input)
        sums += widen(values[u64(2) * g + u64(1)]) * widen(second_input)
    return sums


@row_function
def dot_one(
    values,
    codes,
    o,
    x,
    t,
    y,
    spans,
):
    """One row and one token. Values are prefetched earlier than by the processor."""
    sums = zeros(1, 1)
    step = u64(64 // values.itemsize)
    for span in range(spans):
        prefetch(values[o], step * span, AHEAD)
        if span % u64(16) == 0:
            prefetch(codes[o], step * span // u64(4), CODES_AHEAD)
        sums = add_products(sums, values, codes, o, x, t, span)
    store_totals(sums, y, t, o)


@row_function
def dot_block(
    values,
    codes,
    o,
    x,
    t,
    y,
    spans,
):
    """Four rows and four tokens, which share reads. The next four rows are prefetched."""
    sums = zeros(4, 4)
    step = u64(64 // values.itemsize)
    ahead = 4 * values.shape[1] * values.itemsize if t == 0 else 0
    for span in range(spans):
        if ahead:
            for i in range(u64(4)):
                prefetch(values[o + i], step * span, ahead)
        sums = add_products(sums, values, codes, o, x, t, span)
    store_totals(sums, y, t, o)


@row_function
def rows_2_4(
    values,
    positions,
    x,
    sums,
    chunk,
    spans,
    span,
):
    """sums[:, o : o + 4] = x Sᵀ for the four rows of a chunk, or fewer in the last chunk."""
    tokens = u64(x.shape[0])
    out = u64(values.shape[0])
    o = u64(4) * u64(chunk)
    paired = tokens & ~u64(3) if o + u64(4) <= out else u64(0)
    for t in range(u64(0), paired, u64(4)):
        dot_block(values, positions, o, x, t, sums, spans)
    for row in range(o, min(o + u64(4), out)):
        for t in range(paired, tokens):
            dot_one(values, positions, row, x, t, sums, spans)
        if spans * u64(span) < u64(x.shape[1]):
            first = spans * u64(span // 4)
            for t in range(tokens):
                sums[t, row] += dot_groups(values[row], positions[row], x[t], first)


@sums_in_parallel
def layer_2_4(
    values,
    positions,
    u,
    v,
    bias,
    x,
    y,
    wide,
):
    """y = x (S + u v)ᵀ + bias, summed in float32 and rounded once.

    values: (out, in/2); positions: (out, ⌈in/8⌉); u: (out, r); v: (r, in); bias: (out,), or (0,)
    for none; x: (tokens, in); y: (tokens, out). All except the positions are float32, or the bits
    of bfloat16.
    """
    span = 128 // x.itemsize  # inputs: two registers
    spans = u64(x.shape[1] // span if wide else 0)
    sums = np.empty(y.shape, np.float32)
    hidden = np.empty((x.shape[0], v.shape[0]), np.float32)
    for k in prange(v.shape[0]):
        for t in range(x.shape[0]):
            hidden[t, k] = dot(v[k], x[t])
    for chunk in prange((values.shape[0] + 3) // 4):
        rows_2_4(values, positions, x, sums, chunk, spans, span)
        for o in range(4 * chunk, min(4 * chunk + 4, y.shape[1])):
            add_factors(sums, u, hidden, bias, y, o)
