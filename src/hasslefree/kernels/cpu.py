"""Numba kernels over the packed tensors of S: the product with a few tokens, and S unpacked into dense rows.

Arrays in, arrays out. Values are float32, or the bits of bfloat16 as uint16; to unpack, the bits of any dtype. Sums are
float32. A row of the result is computed by one thread in one order, so that the number of threads changes no bit of it.
Rows run in parallel in Numba's threading layer; where that is `workqueue` (neither OpenMP nor TBB was found), two
Python threads must not call at once. Caching works by file: everything jitted stands in this one.

Where the processor has AVX-512, the loops over whole registers do nearly all; a scalar loop does what they leave, and
everything where `wide` is false. Other processors compile those loops too, and never enter them.

A position beyond its group is taken for the group's last, and bits of a mask beyond the row are not looked at, so that
no index, however wrong, reaches outside a row.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, overload, register_model

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
# Reassociation lets a dot product use vector registers; NaN, Inf and signed zeros keep their meaning.
SUMS = {"reassoc", "contract"}
# A code is read from four bytes at once, wherever in the row it starts.
WINDOW = 4
# Numbers in a vector register of AVX-512, and inputs of 2:4 whose values fill one.
LANES, SPAN = 16, 32
# Bytes of values and of codes between what is multiplied and what is asked for; one row is too near.
AHEAD, CODES_AHEAD = 8192, 1024

WIDE = {"+avx512f", "+avx512vbmi2"} <= set(get_host_cpu_features().split(","))
FLOATS, INTEGERS = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32)))

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
def popcount(typing, bits):
    """The number of set bits of an unsigned integer."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return bits(bits), generate


def widen(value):
    """A stored value as float32."""


@overload(widen, inline="always")
def _widen(value):
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: u32(u32(value) << u32(16)).view(np.float32)


class Lanes(types.Type):
    """A register of sums, which Numba has no type for."""

    def __init__(self):
        super().__init__("Lanes")


SUMS_TYPE = Lanes()


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, FLOATS)


def address(context, builder, kind, array, at, to):
    """Where array[at] begins, as a pointer to `to`."""
    memory = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(memory, [at]), to.as_pointer())


def native(builder, name, result, arguments):
    """A call of an intrinsic of AVX-512; without it the loop is never entered, and anything would do."""
    if not WIDE:
        return ir.Constant(result, None)
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def loaded(context, builder, kind, array, at):
    """LANES stored numbers as integers of 32 bits, those of 16 bits in the low half."""
    stored = ir.VectorType(ir.IntType(kind.dtype.bitwidth), LANES)
    found = builder.load(address(context, builder, kind, array, at, stored), align=kind.dtype.bitwidth // 8)
    return found if stored == INTEGERS else builder.zext(found, INTEGERS)


@intrinsic
def no_sums(typing):
    def generate(context, builder, signature, arguments):
        return ir.Constant(FLOATS, None)

    return SUMS_TYPE(), generate


@intrinsic
def total(typing, sums):
    """The sum of the sums."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), FLOATS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(reduce, [ir.Constant(ir.FloatType(), 0.0), arguments[0]], fastmath=("reassoc",))

    return types.float32(SUMS_TYPE), generate


@intrinsic
def word(typing, codes, at):
    """Four bytes of codes, wherever they begin."""

    def generate(context, builder, signature, arguments):
        place = address(context, builder, signature.args[0], *arguments, ir.IntType(32))
        return builder.load(place, align=1)

    return types.uint32(codes, types.uint64), generate


@intrinsic
def add_products(typing, sums, values, at, codes, x, base):
    """sums += 16 values of 2:4 from values[at], with their inputs among x[base : base + 32]. codes: their 32 bits."""

    def generate(context, builder, signature, arguments):
        def constant(numbers):
            return ir.Constant(INTEGERS, list(numbers))

        sums, values, at, codes, x, base = arguments
        undefined, first = ir.Constant(INTEGERS, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        spread = builder.shuffle_vector(
            builder.insert_element(undefined, codes, first), undefined, constant([0] * LANES)
        )
        places = builder.and_(builder.lshr(spread, constant(range(0, 2 * LANES, 2))), constant([3] * LANES))
        places = builder.or_(places, constant(4 * (lane // 2) for lane in range(LANES)))
        ends = base, builder.add(base, ir.Constant(base.type, LANES))
        low, high = (
            builder.load(address(context, builder, signature.args[4], x, end, FLOATS), align=4) for end in ends
        )
        chosen = native(builder, "llvm.x86.avx512.vpermi2var.ps.512", FLOATS, [low, places, high])
        factors = loaded(context, builder, signature.args[1], values, at)
        if signature.args[1].dtype.bitwidth == 16:
            factors = builder.shl(factors, constant([16] * LANES))
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
        return builder.call(fma, [builder.bitcast(factors, FLOATS), chosen, sums])

    return SUMS_TYPE(SUMS_TYPE, values, types.uint64, types.uint32, x, types.uint64), generate


@intrinsic
def expand(typing, values, at, mask, row, base):
    """row[base : base + 32]: values from values[at] on where the mask has a bit, else 0. Reads 32 values."""

    def generate(context, builder, signature, arguments):
        values, at, mask, row, base = arguments
        bitwidth = signature.args[0].dtype.bitwidth
        lanes = 512 // bitwidth
        vector, count = ir.VectorType(ir.IntType(bitwidth), lanes), ir.IntType(lanes)
        for first in range(0, SPAN, lanes):
            source = builder.load(address(context, builder, signature.args[0], values, at, vector), align=bitwidth // 8)
            if WIDE:  # in a register: the instruction that expands from memory is slow on Zen
                source = builder.asm(ir.FunctionType(vector, [vector]), "", "=v,0", [source], False)
            part = builder.trunc(builder.lshr(mask, ir.Constant(mask.type, first)), count)
            bits = builder.bitcast(part, ir.VectorType(ir.IntType(1), lanes))
            name = f"llvm.x86.avx512.mask.expand.v{lanes}i{bitwidth}"
            found = native(builder, name, vector, [source, ir.Constant(vector, None), bits])
            place = builder.add(base, ir.Constant(base.type, first))
            builder.store(
                found, address(context, builder, signature.args[3], row, place, vector), align=bitwidth // 8
            )
            at = builder.add(at, builder.zext(builder.ctpop(part), at.type))
        return context.get_dummy_value()

    return types.none(values, types.uint64, types.uint32, row, types.uint64), generate


@intrinsic
def prefetch(typing, row, at, ahead):
    """Ask for the cache line that is `ahead` bytes after row[at]; beyond the array this does nothing."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        place = address(context, builder, signature.args[0], *arguments[:2], ir.IntType(8))
        builder.call(ask, [builder.gep(place, [arguments[2]]), number(0), number(3), number(1)])  # to read, near, data
        return context.get_dummy_value()

    return types.none(row, types.uint64, types.int64), generate


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
def expand_mask(values, start, mask, row, wide):
    """One row from its mask. values: flat, the row's from `start`; mask: bytes. Reads no value that is not there."""
    k, at, width = u64(start), u64(0), u64(row.shape[0])
    while wide and at + u64(SPAN) <= width and k + u64(SPAN) <= u64(values.shape[0]):
        bits = word(mask, at >> u64(3))
        prefetch(values, k, AHEAD)
        expand(values, k, bits, row, at)
        k += u64(popcount(bits))
        at += u64(SPAN)
    while at < width:
        bits = u64(mask[at >> u64(3)])
        row[at : min(at + u64(8), width)] = 0
        if width - at < u64(8):
            bits &= (u64(1) << (width - at)) - u64(1)
        while bits:
            row[at + lowest_bit(bits)] = values[k]
            bits &= bits - u64(1)
            k += u64(1)
        at += u64(8)


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
def dot_mask(values, starts, mask, x, y, wide):
    """y = x Sᵀ. values: flat; starts: (out,) where each row's begin; mask: (out, bytes); x: (tokens, in)."""
    for o in prange(mask.shape[0]):
        row = np.empty(x.shape[1], values.dtype)
        expand_mask(values, starts[o], mask[o], row, wide)
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
def unpack_mask(values, starts, mask, rows, wide):
    """rows: (out, in). values: flat bits; starts: (out,); mask: (out, bytes)."""
    for o in prange(rows.shape[0]):
        expand_mask(values, starts[o], mask[o], rows[o], wide)


@rows_in_parallel
def count_rows(mask, counts):
    """counts (out,) of the set bits of each row of a mask (out, bytes)."""
    for o in prange(mask.shape[0]):
        total = u32(0)
        for i in range(mask.shape[1]):
            total += u32(popcount(mask[o, i]))
        counts[o] = total


# 2:4: a byte holds the codes of two groups. The positions that go with a register of values choose among two of inputs.


@row_function
def dot_ahead(values, codes, x, spans):
    """Σ of the first `spans` spans of a row; the values are asked for before the processor would foresee them."""
    sums = no_sums()
    for span in range(u64(spans)):
        at = u64(LANES) * span
        prefetch(values, at, AHEAD)
        if span % u64(16) == 0:
            prefetch(codes, u64(4) * span, CODES_AHEAD)
        sums = add_products(sums, values, at, word(codes, u64(4) * span), x, u64(SPAN) * span)
    return total(sums)


@row_function
def dot_of_four(values, codes, x, spans):
    """The same for four tokens, x: (4, in)."""
    a, b, c, d = no_sums(), no_sums(), no_sums(), no_sums()
    for span in range(u64(spans)):
        at, places, base = u64(LANES) * span, word(codes, u64(4) * span), u64(SPAN) * span
        prefetch(values, at, AHEAD)
        a = add_products(a, values, at, places, x[0], base)
        b = add_products(b, values, at, places, x[1], base)
        c = add_products(c, values, at, places, x[2], base)
        d = add_products(d, values, at, places, x[3], base)
    return total(a), total(b), total(c), total(d)


@row_function
def dot_groups(values, codes, x, first):
    """Σ of a row from its group `first` on."""
    sums = np.float32(0)
    for g in range(u64(first), u64(values.shape[0] // 2)):
        code = codes[g // u64(2)] >> u8(g % u64(2) * u64(4))
        sums += widen(values[u64(2) * g]) * x[u64(4) * g + u64(code & u8(3))]
        sums += widen(values[u64(2) * g + u64(1)]) * x[u64(4) * g + u64((code >> u8(2)) & u8(3))]
    return sums


@sums_in_parallel
def dot_2_4(values, positions, x, y, wide):
    """y = x Sᵀ. values: (out, in/2); positions: (out, ⌈in/8⌉); x: (tokens, in) float32; y: (tokens, out)."""
    tokens = x.shape[0]
    spans = x.shape[1] // SPAN if wide else 0
    for o in prange(values.shape[0]):
        row, codes = values[o], positions[o]
        for t in range(0, tokens - tokens % 4, 4):
            y[t, o], y[t + 1, o], y[t + 2, o], y[t + 3, o] = dot_of_four(row, codes, x[t : t + 4], spans)
        for t in range(tokens - tokens % 4, tokens):
            y[t, o] = dot_ahead(row, codes, x[t], spans)
        if spans * SPAN < x.shape[1]:
            for t in range(tokens):
                y[t, o] += dot_groups(row, codes, x[t], spans * SPAN // 4)


@row_function
def mask_of(code, shift):
    """The bits of a group of 2:4 as a mask, in arithmetic that vectorises: the bit 1 << p is (1 + p₀)·(1 + 3·p₁)."""
    one = u8(1)
    code = code >> u8(shift)
    first = (one + (code & one)) * (one + u8(3) * ((code >> one) & one))
    return first | ((one + ((code >> u8(2)) & one)) * (one + u8(3) * ((code >> u8(3)) & one)))


@rows_in_parallel
def unpack_2_4(values, positions, rows, wide):
    """rows: (out, in). values: flat bits; positions: (out, ⌈in/8⌉)."""
    for o in prange(rows.shape[0]):
        mask, codes = np.empty(positions.shape[1], u8), positions[o]
        for i in range(codes.shape[0]):
            mask[i] = mask_of(codes[i], 0) | (mask_of(codes[i], 4) << u8(4))
        expand_mask(values, o * (rows.shape[1] // 2), mask, rows[o], wide)
