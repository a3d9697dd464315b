"""Numba kernels over the packed tensors of S: the product with a few tokens, and S unpacked into
dense rows.

Arrays in, arrays out. Values are float32, or the bits of bfloat16 as uint16; to unpack, the bits of
any dtype. Sums are float32. A row of the result is computed by one thread in one order, so that the
number of threads changes no bit of it. Rows run in parallel in Numba's threading layer; where that
is `workqueue` (neither OpenMP nor TBB was found), two Python threads must not call at once. Caching
works by file: everything jitted is in this one.

Where the processor has AVX-512, loops over whole registers do nearly all the work; a scalar loop
does the rest, and everything where `wide` is false. Other processors compile these loops too, but
never enter them. They are written in LLVM's IR because Numba does not generate their instructions:
selecting from two registers, expanding by a mask, products of bfloat16, and prefetching, without
which four tokens take up to 1.6 times as long.

A position beyond its group counts as the group's last, and bits of a mask beyond the row are
ignored, so that no index, however wrong, reaches outside a row.
"""

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, overload, register_model

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
# Reassociation lets a dot product use vector registers; NaN, Inf and signed zeros keep their
# meaning.
SUMS = {"reassoc", "contract"}
# A code is read from four bytes at once, wherever in the row it starts.
WINDOW = 4
# Numbers in a vector register of AVX-512, and inputs of 2:4 whose values fill one.
LANES, SPAN = 16, 32
# Bytes of values and of codes by which prefetching is ahead of the products; one row would be too
# near.
AHEAD, CODES_AHEAD = 8192, 1024
# A table for 2:4 holds TOKENS tokens and GROUPS groups, and has a row for each code of a group,
# from 4, which is the pair (0, 1), to 14, (2, 3). A group therefore begins every CODES rows; the
# last rows are for invalid codes.
TOKENS, GROUPS, CODES = 64, 16, 11
TABLE_ROWS = GROUPS * CODES + 5
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
# Rows of S by which prefetching is ahead of those that are multiplied with a table.
ROWS_AHEAD = 32

WIDE = {"+avx512f", "+avx512vbmi2", "+avx512bf16"} <= set(get_host_cpu_features().split(","))
FLOATS = ir.VectorType(ir.FloatType(), LANES)

row_function = njit(nogil=True, error_model="numpy", inline="always")
rows_in_parallel = njit(nogil=True, error_model="numpy", parallel=True, cache=True)
sums_in_parallel = njit(nogil=True, error_model="numpy", parallel=True, cache=True, fastmath=SUMS)


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


def store_rounded(y, t, o, value):
    """y[t, o] = a float32, rounded to the nearest, and to the even one of two."""


@overload(store_rounded, inline="always")
def _store_rounded(y, t, o, value):
    if isinstance(y.dtype, types.Float):

        def store(y, t, o, value):
            y[t, o] = value

    else:

        def store(y, t, o, value):
            bits = np.float32(value).view(
                np.uint32
            )  # of a NaN made of narrow numbers, the low half is 0
            rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
            y[t, o] = u16(rounded)

    return store


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite has no name for."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash("bfloat")


class Sums(types.Type):
    """Registers of sums, for so many rows and tokens at once; Numba has no type for them."""

    def __init__(self, rows, tokens):
        self.rows, self.tokens = rows, tokens
        super().__init__(f"Sums({rows}, {tokens})")


register_model(Sums)(
    lambda manager, kind: models.PrimitiveModel(
        manager, kind, ir.ArrayType(FLOATS, kind.rows * kind.tokens)
    )
)


def address(context, builder, kind, array, at, to):
    """Where array[at] begins, as a pointer to `to`. at: an index of each of its one or two
    dimensions.
    """
    structure = context.make_array(kind)(context, builder, array)
    offset = at[-1]
    if len(at) == 2:
        offset = builder.add(builder.mul(at[0], builder.extract_value(structure.shape, 1)), offset)
    return builder.bitcast(builder.gep(structure.data, [offset]), to.as_pointer())


def native(builder, name, result, arguments):
    """A call of an intrinsic of AVX-512; without it the loop is never entered, and anything would
    do.
    """
    if not WIDE:
        return ir.Constant(result, None)
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic(prefer_literal=True)
def zeros(typing, rows, tokens):
    """Sums of so many rows and tokens, both literal."""
    kind = Sums(rows.literal_value, tokens.literal_value)

    def generate(context, builder, signature, arguments):
        return ir.Constant(context.get_value_type(kind), None)

    return kind(rows, tokens), generate


@intrinsic
def store_totals(typing, sums, y, t, o):
    """y[t + j, o + i] = the total of row i and token j. y: (tokens, out), contiguous."""

    def generate(context, builder, signature, arguments):
        sums, y, t, o = arguments
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), FLOATS])
        reduce = cgutils.get_or_insert_function(
            builder.module, kind, "llvm.vector.reduce.fadd.v16f32"
        )
        for number in range(signature.args[0].rows * signature.args[0].tokens):
            i, j = divmod(number, signature.args[0].tokens)
            parts = [ir.FloatType()(0.0), builder.extract_value(sums, number)]
            at = [builder.add(t, t.type(j)), builder.add(o, o.type(i))]
            place = address(context, builder, signature.args[1], y, at, ir.FloatType())
            builder.store(builder.call(reduce, parts, fastmath=("reassoc",)), place)
        return context.get_dummy_value()

    return types.none(sums, y, types.uint64, types.uint64), generate


def places_of(builder, codes, lanes):
    """The inputs, 0 … 2·lanes − 1, that codes of 2·lanes bits name: a register of numbers of
    512/lanes bits.
    """
    numbers, places = (
        ir.VectorType(ir.IntType(512 // lanes), lanes),
        256 // lanes,
    )  # a number holds so many codes

    def constant(numbers_):
        return ir.Constant(numbers, list(numbers_))

    words = builder.bitcast(codes, ir.VectorType(numbers.element, lanes // places))
    which = ir.Constant(
        ir.VectorType(ir.IntType(32), lanes), [lane // places for lane in range(lanes)]
    )
    spread = builder.shuffle_vector(words, ir.Constant(words.type, ir.Undefined), which)
    shifted = builder.lshr(spread, constant(lane % places * 2 for lane in range(lanes)))
    return builder.or_(
        builder.and_(shifted, constant([3] * lanes)),
        constant(4 * (lane // 2) for lane in range(lanes)),
    )


@intrinsic
def add_products(typing, sums, values, codes, o, x, t, span):
    """sums += a span, two registers of inputs, of the rows from o on of 2:4 with the tokens from t
    on.
    """

    def generate(context, builder, signature, arguments):
        sums, _, _, o, _, t, span = arguments

        def load(number, row, more, scale, to, shift=0):
            at = [
                builder.add(row, row.type(more)),
                builder.add(builder.mul(span, span.type(scale)), span.type(shift)),
            ]
            return builder.load(
                address(context, builder, signature.args[number], arguments[number], at, to),
                align=1,
            )

        kind, wide = signature.args[0], isinstance(signature.args[1].dtype, types.Float)
        lanes = LANES if wide else 2 * LANES
        stored = FLOATS if wide else ir.VectorType(ir.IntType(16), lanes)
        inputs = [
            [load(4, t, j, 2 * lanes, stored, end) for end in (0, lanes)]
            for j in range(kind.tokens)
        ]
        for i in range(kind.rows):
            places = places_of(builder, load(2, o, i, lanes // 4, ir.IntType(2 * lanes)), lanes)
            factors = load(1, o, i, lanes, stored)
            for j, (low, high) in enumerate(inputs):
                number = i * kind.tokens + j
                total = builder.extract_value(sums, number)
                select = "llvm.x86.avx512.vpermi2var." + ("ps.512" if wide else "hi.512")
                chosen = native(builder, select, stored, [low, places, high])
                if wide:
                    total = native(builder, "llvm.fma.v16f32", FLOATS, [factors, chosen, total])
                else:  # products of bfloat16 in pairs, which go to one sum
                    pairs = [
                        builder.bitcast(part, ir.VectorType(BFloat(), lanes))
                        for part in (factors, chosen)
                    ]
                    total = native(
                        builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, *pairs]
                    )
                sums = builder.insert_value(sums, total, number)
        return sums

    u64 = types.uint64
    return sums(sums, values, codes, u64, x, u64, u64), generate


@intrinsic
def word(typing, codes, at):
    """Four bytes, wherever they begin."""

    def generate(context, builder, signature, arguments):
        codes, at = arguments
        return builder.load(
            address(context, builder, signature.args[0], codes, [at], ir.IntType(32)), align=1
        )

    return types.uint32(codes, types.uint64), generate


@intrinsic
def expand(typing, values, at, mask, row, base):
    """row[base : base + 32]: values from values[at] on where the mask has a bit, else 0. Reads 32
    values.
    """

    def generate(context, builder, signature, arguments):
        values, at, mask, row, base = arguments
        bitwidth = signature.args[0].dtype.bitwidth
        lanes = 512 // bitwidth
        vector, count = ir.VectorType(ir.IntType(bitwidth), lanes), ir.IntType(lanes)
        for first in range(0, SPAN, lanes):
            source = address(context, builder, signature.args[0], values, [at], vector)
            source = builder.load(source, align=bitwidth // 8)
            if WIDE:  # in a register: the instruction that expands from memory is slow on Zen
                source = builder.asm(ir.FunctionType(vector, [vector]), "", "=v,0", [source], False)
            part = builder.trunc(builder.lshr(mask, mask.type(first)), count)
            bits = builder.bitcast(part, ir.VectorType(ir.IntType(1), lanes))
            name = f"llvm.x86.avx512.mask.expand.v{lanes}i{bitwidth}"
            expanded = native(builder, name, vector, [source, ir.Constant(vector, None), bits])
            place = address(
                context,
                builder,
                signature.args[3],
                row,
                [builder.add(base, base.type(first))],
                vector,
            )
            builder.store(expanded, place, align=bitwidth // 8)
            at = builder.add(at, builder.zext(builder.ctpop(part), at.type))
        return context.get_dummy_value()

    return types.none(values, types.uint64, types.uint32, row, types.uint64), generate


@intrinsic
def prefetch(typing, row, at, ahead):
    """Ask for the cache line that is `ahead` bytes after row[at]; beyond the array this does
    nothing.
    """

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        array, at, ahead = arguments
        place = address(context, builder, signature.args[0], array, [at], ir.IntType(8))
        builder.call(
            ask, [builder.gep(place, [ahead]), number(0), number(3), number(1)]
        )  # to read, near, data
        return context.get_dummy_value()

    return types.none(row, types.uint64, types.int64), generate


# Any pattern: a row is expanded, and stays in the cache while the tokens are multiplied with it.


@row_function
def expand_positions(values, start, codes, n, m, bits, row):
    """One row of N:M from its positions. values: flat, the row's from `start`; codes: bytes."""
    # Unsigned indices: Numba tests signed ones for being negative.
    window = np.zeros(codes.shape[0] + WINDOW, u8)
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
    """One row from its mask. values: flat, the row's from `start`; mask: bytes. Reads no value that
    is not there.
    """
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
            row[at + popcount((bits & -bits) - u64(1))] = values[
                k
            ]  # the position of the lowest set bit
            bits &= bits - u64(1)
            k += u64(1)
        at += u64(8)


@njit(nogil=True, error_model="numpy", fastmath=SUMS)
def dot(row, x):
    """Σ row·x of two rows (in,), each float32 or the bits of bfloat16."""
    total = np.float32(0)
    for j in range(row.shape[0]):
        total += widen(row[j]) * widen(x[j])
    return total


@sums_in_parallel
def add_layer(x, v, u, bias, y):
    """y += x vᵀ uᵀ + bias, summed in float32 and rounded once; as for `layer_2_4`, y: (tokens,
    out).
    """
    hidden = np.empty((x.shape[0], v.shape[0]), np.float32)
    for k in prange(v.shape[0]):
        for t in range(x.shape[0]):
            hidden[t, k] = dot(v[k], x[t])
    for o in prange(u.shape[0]):
        for t in range(x.shape[0]):
            total = widen(y[t, o]) + dot(u[o], hidden[t])
            if bias.shape[0]:
                total += widen(bias[o])
            store_rounded(y, t, o, total)


@sums_in_parallel
def dot_positions(values, positions, n, m, bits, x, y):
    """y = x Sᵀ. values: flat; positions: (out, bytes); x: (tokens, in); y: (tokens, out)."""
    kept = x.shape[1] // m * n
    for o in prange(positions.shape[0]):
        row = np.empty(x.shape[1], values.dtype)
        expand_positions(values, o * kept, positions[o], n, m, bits, row)
        for t in range(x.shape[0]):
            y[t, o] = dot(row, x[t])


@sums_in_parallel
def dot_mask(values, starts, mask, x, y, wide):
    """y = x Sᵀ. values: flat; starts: (out,) where each row's begin; mask: (out, bytes); x:
    (tokens, in).
    """
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
        expand_positions(values, o * kept, positions[o], n, m, bits, rows[o])


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


# 2:4: a byte holds the codes of two groups. The positions that go with a register of values choose
# among two of inputs.


@row_function
def dot_groups(values, codes, x, first):
    """Σ of a row from its group `first` on."""
    sums = np.float32(0)
    for g in range(u64(first), u64(values.shape[0] // 2)):
        code = codes[g // u64(2)] >> u8(g % u64(2) * u64(4))
        sums += widen(values[u64(2) * g]) * widen(x[u64(4) * g + u64(code & u8(3))])
        sums += widen(values[u64(2) * g + u64(1)]) * widen(
            x[u64(4) * g + u64((code >> u8(2)) & u8(3))]
        )
    return sums


@row_function
def dot_one(values, codes, o, x, t, y, spans):
    """One row and one token; the values are prefetched earlier than the processor would."""
    sums, step = zeros(1, 1), u64(64 // values.itemsize)
    for span in range(spans):
        prefetch(values[o], step * span, AHEAD)
        if span % u64(16) == 0:
            prefetch(codes[o], step * span // u64(4), CODES_AHEAD)
        sums = add_products(sums, values, codes, o, x, t, span)
    store_totals(sums, y, t, o)


@row_function
def dot_block(values, codes, o, x, t, y, spans):
    """Four rows and four tokens, which share their reads; the next four rows are prefetched."""
    step = u64(64 // values.itemsize)
    sums, ahead = zeros(4, 4), 4 * values.shape[1] * values.itemsize if t == 0 else 0
    for span in range(spans):
        if ahead:
            for i in range(u64(4)):
                prefetch(values[o + i], step * span, ahead)
        sums = add_products(sums, values, codes, o, x, t, span)
    store_totals(sums, y, t, o)


@row_function
def rows_2_4(values, positions, x, sums, chunk, spans, span):
    """sums[:, o : o + 4] = x Sᵀ for the four rows of a chunk, or fewer in the last chunk."""
    tokens, out = u64(x.shape[0]), u64(values.shape[0])
    o = u64(4) * u64(chunk)
    paired = tokens & ~u64(3) if o + u64(4) <= out else u64(0)
    for t in range(u64(0), paired, u64(4)):
        dot_block(values, positions, o, x, t, sums, spans)
    for row in range(o, min(o + u64(4), out)):
        for t in range(paired, tokens):
            dot_one(values, positions, row, x, t, sums, spans)
        if spans * u64(span) < u64(x.shape[1]):
            for t in range(tokens):
                sums[t, row] += dot_groups(
                    values[row], positions[row], x[t], spans * u64(span // 4)
                )


@sums_in_parallel
def layer_2_4(values, positions, u, v, bias, x, y, wide):
    """y = x (S + u v)ᵀ + bias, summed in float32 and rounded once.

    values: (out, in/2); positions: (out, ⌈in/8⌉); u: (out, r); v: (r, in); bias: (out,), or (0,)
    for none; x: (tokens, in); y: (tokens, out). All but the positions are float32, or the bits of
    bfloat16.
    """
    span = 128 // x.itemsize  # inputs: two registers
    spans = u64(x.shape[1] // span if wide else 0)
    sums, hidden = np.empty(y.shape, np.float32), np.empty((x.shape[0], v.shape[0]), np.float32)
    for k in prange(v.shape[0]):
        for t in range(x.shape[0]):
            hidden[t, k] = dot(v[k], x[t])
    for chunk in prange((values.shape[0] + 3) // 4):
        rows_2_4(values, positions, x, sums, chunk, spans, span)
        for o in range(4 * chunk, min(4 * chunk + 4, y.shape[1])):
            for t in range(x.shape[0]):
                total = sums[t, o] + dot(u[o], hidden[t])
                if bias.shape[0]:
                    total += widen(bias[o])
                store_rounded(y, t, o, total)


@row_function
def mask_of(code, shift):
    """The bits of a group of 2:4 as a mask, in arithmetic that vectorises: the bit 1 << p is (1 +
    p₀)·(1 + 3·p₁).
    """
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


# 2:4 in bfloat16 with many tokens. The two kept values of a group are multiplied by one of six
# pairs of its inputs. A table holds the pairs of some groups for 64 tokens, small enough for the
# first-level cache, and many rows of S use it. A code is the row of the table, so that no input is
# selected, and half of the products of a dense layer remain.


@row_function
def fill_table(x, start, first, columns, table):
    """The pairs of GROUPS groups of x (tokens, in) from input `first` on, for TOKENS tokens from
    `start` on.

    columns: (inputs of the groups, TOKENS), room for them transposed.
    """
    for block in range(u64(0), u64(TOKENS), u64(LANES)):
        for i in range(u64(4 * GROUPS)):
            for t in range(block, block + u64(LANES)):
                columns[i, t] = x[start + t, first + i]
    for group in range(u64(GROUPS)):
        for low, high in PAIRS:
            row, base = table[group * u64(CODES) + u64(low + 4 * high)], u64(4) * group
            for t in range(u64(TOKENS)):
                row[t] = u32(columns[base + u64(low), t]) | u32(
                    columns[base + u64(high), t]
                ) << u32(16)


@intrinsic
def add_tabulated(typing, values, codes, table, sums):
    """sums (TOKENS,) += GROUPS groups of a row of S with a table. values: uint16, and codes: uint8,
    of these groups.
    """

    def generate(context, builder, signature, arguments):
        vector = ir.VectorType(BFloat(), 2 * LANES)
        lanes, rows = (
            ir.IntType(32),
            ir.ArrayType(vector, TOKENS // LANES),
        )  # a known length spares multiplications

        def pointer(number, at, to):
            return address(
                context,
                builder,
                signature.args[number],
                arguments[number],
                [ir.IntType(64)(at)],
                to,
            )

        places = [pointer(3, first, FLOATS) for first in range(0, TOKENS, LANES)]
        totals = [builder.load(place, align=64) for place in places]
        word = builder.load(pointer(1, 0, ir.IntType(64)), align=1)
        for g in range(GROUPS):
            code = builder.and_(builder.lshr(word, word.type(4 * g)), word.type(15))
            row = builder.gep(pointer(2, 0, rows), [builder.add(code, word.type(g * CODES))])
            pair = builder.load(pointer(0, 2 * g, lanes), align=2)
            copies = builder.insert_element(
                ir.Constant(ir.VectorType(lanes, LANES), ir.Undefined), pair, lanes(0)
            )
            copies = builder.shuffle_vector(copies, copies, ir.Constant(copies.type, [0] * LANES))
            factors = builder.bitcast(copies, vector)
            for i, total in enumerate(totals):
                inputs = builder.load(builder.gep(row, [lanes(0), lanes(i)]), align=64)
                totals[i] = native(
                    builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, factors, inputs]
                )
        for place, total in zip(places, totals, strict=True):
            builder.store(total, place, align=64)
        return context.get_dummy_value()

    return types.none(values, codes, table, sums), generate


@rows_in_parallel
def dot_tables_2_4(values, positions, x, y, memory):
    """y = x Sᵀ, with AVX-512 only. values: (out, in/2), positions: (out, in/8), x: (tokens in whole
    64s, in).

    They are the bits of bfloat16, as is y: (tokens, out). memory: (parts, TABLE_ROWS + rows of a
    tile, TOKENS), float32, aligned to 64 bytes: a table and sums for each part, which computes its
    share of the tiles.
    """
    out, tokens, parts = u64(values.shape[0]), u64(y.shape[0]), memory.shape[0]
    height, blocks = u64(memory.shape[1] - TABLE_ROWS), u64(x.shape[0] // TOKENS)
    tiles = (out + height - u64(1)) // height * blocks
    for part in prange(parts):
        table, sums = memory[part, :TABLE_ROWS].view(u32), memory[part, TABLE_ROWS:]
        columns = np.empty((4 * GROUPS, TOKENS), u16)
        for tile in range(u64(part), tiles, u64(parts)):
            first, start = tile // blocks * height, tile % blocks * u64(TOKENS)
            last = min(first + height, out)
            sums[: last - first] = 0
            for k in range(u64(positions.shape[1] // (GROUPS // 2))):
                fill_table(x, start, u64(4 * GROUPS) * k, columns, table)
                for o in range(first, last):
                    row, codes = (
                        values[o, u64(2 * GROUPS) * k :],
                        positions[o, u64(GROUPS // 2) * k :],
                    )
                    prefetch(row, u64(0), ROWS_AHEAD * values.shape[1] * 2)
                    prefetch(codes, u64(0), ROWS_AHEAD * positions.shape[1])
                    add_tabulated(row, codes, table, sums[o - first])
            for block in range(
                first, last, u64(LANES)
            ):  # by blocks, whose outputs for a token share a cache line
                for t in range(start, min(start + u64(TOKENS), tokens)):
                    for o in range(block, min(block + u64(LANES), last)):
                        store_rounded(y, t, o, sums[o - first, t - start])
