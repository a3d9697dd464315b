"""The instructions that Numba does not generate, as functions for the kernels.

They are written in LLVM's IR: selecting from two registers, expanding by a mask, products of
bfloat16, and prefetching, without which four tokens take up to 1.6 times as long. What calls
`native` needs AVX-512. Other processors compile the loops around it, but never enter them.
"""

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, register_model

# Numbers of 32 bits in a vector register of AVX-512, and inputs of 2:4 whose values fill one.
LANES = 16
SPAN = 32
# A table for 2:4 holds TOKENS tokens and GROUPS groups. A group has a row for each of its codes,
# from 4, which is the pair (0, 1), to 14, (2, 3). A group therefore begins every CODES rows; the
# last rows are for invalid codes.
TOKENS = 64
GROUPS = 16
CODES = 11
TABLE_ROWS = GROUPS * CODES + 5

# Of the processor that Numba compiles for.
CHOSEN: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
FEATURES = set((CHOSEN or get_host_cpu_features()).split(","))
WIDE = {"+avx512f", "+avx512vbmi2", "+avx512bf16"} <= FEATURES

FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
BIT = ir.IntType(1)
BYTE = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
# Σ of products of pairs of bfloat16, added to a register of float32.
PRODUCTS_BF16 = "llvm.x86.avx512bf16.dpbf16ps.512"
# The float32 of a register that the numbers of another name.
SELECT_FLOATS = "llvm.x86.avx512.permvar.sf.512"


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite has no name for."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash("bfloat")


BFLOATS = ir.VectorType(BFloat(), 2 * LANES)


class Sums(types.Type):
    """Registers of sums of several rows and tokens; Numba has no type for them."""

    def __init__(self, rows, tokens):
        self.rows = rows
        self.tokens = tokens
        super().__init__(f"Sums({rows}, {tokens})")


def _model_of_sums(manager, kind):
    registers = ir.ArrayType(FLOATS, kind.rows * kind.tokens)
    return models.PrimitiveModel(manager, kind, registers)


register_model(Sums)(_model_of_sums)


def address(
    context,
    builder,
    kind,
    array,
    at,
    to,
):
    """The address of array[at], as a pointer to the type `to`. at: one or two indices."""
    structure = context.make_array(kind)(context, builder, array)
    offset = at[-1]
    if len(at) == 2:
        width = builder.extract_value(structure.shape, 1)
        offset = builder.add(builder.mul(at[0], width), offset)
    return builder.bitcast(builder.gep(structure.data, [offset]), to.as_pointer())


def native(
    builder,
    name,
    result,
    arguments,
):
    """Call an intrinsic of AVX-512. Without AVX-512 the loop is never entered, and any value would
    do.
    """
    if not WIDE:
        return ir.Constant(result, None)
    return call(builder, name, result, arguments)


def call(
    builder,
    name,
    result,
    arguments,
):
    """Call an intrinsic of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments)


def with_products(
    builder,
    total,
    left,
    right,
):
    """total + left · right, of registers of float32 or bfloat16, given as numbers or as bits."""
    if left.type.count == LANES:
        left = builder.bitcast(left, FLOATS)
        right = builder.bitcast(right, FLOATS)
        return native(builder, "llvm.fma.v16f32", FLOATS, [left, right, total])
    left = builder.bitcast(left, BFLOATS)
    right = builder.bitcast(right, BFLOATS)
    return native(builder, PRODUCTS_BF16, FLOATS, [total, left, right])


@intrinsic
def popcount(typing, bits):
    """Count the set bits of an unsigned integer."""

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        return builder.ctpop(arguments[0])

    return bits(bits), generate


@intrinsic(prefer_literal=True)
def zeros(
    typing,
    rows,
    tokens,
):
    """Sums of this number of rows and tokens, both literal, all 0."""
    kind = Sums(rows.literal_value, tokens.literal_value)

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        return ir.Constant(context.get_value_type(kind), None)

    return kind(rows, tokens), generate


@intrinsic
def store_totals(
    typing,
    sums,
    y,
    t,
    o,
):
    """y[t + j, o + i] = the total of row i and token j. y: (tokens, out), contiguous."""

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        sums, y, t, o = arguments
        kind = ir.FunctionType(FLOAT, [FLOAT, FLOATS])
        name = "llvm.vector.reduce.fadd.v16f32"
        reduce = cgutils.get_or_insert_function(builder.module, kind, name)
        rows = signature.args[0].rows
        tokens = signature.args[0].tokens
        for number in range(rows * tokens):
            i, j = divmod(number, tokens)
            register = builder.extract_value(sums, number)
            at = [builder.add(t, t.type(j)), builder.add(o, o.type(i))]
            target = address(context, builder, signature.args[1], y, at, FLOAT)
            total = builder.call(reduce, [FLOAT(0.0), register], fastmath=("reassoc",))
            builder.store(total, target)
        return context.get_dummy_value()

    return types.none(sums, y, types.uint64, types.uint64), generate


def inputs_of_codes(
    builder,
    codes,
    lanes,
):
    """The inputs, 0 … 2·lanes − 1, that the codes of `lanes` values name.

    codes: an integer of 2·lanes bits. Returns a register of `lanes` numbers of 512/lanes bits.
    """
    number = ir.IntType(512 // lanes)
    numbers = ir.VectorType(number, lanes)
    together = 256 // lanes  # codes that a number holds

    def constant(values):
        return ir.Constant(numbers, values)

    words = builder.bitcast(codes, ir.VectorType(number, lanes // together))
    word_of_lane = [lane // together for lane in range(lanes)]
    shift_of_lane = [lane % together * 2 for lane in range(lanes)]
    group_of_lane = [4 * (lane // 2) for lane in range(lanes)]
    undefined = ir.Constant(words.type, ir.Undefined)
    lanes_of_words = ir.Constant(ir.VectorType(INT32, lanes), word_of_lane)
    spread = builder.shuffle_vector(words, undefined, lanes_of_words)
    shifted = builder.lshr(spread, constant(shift_of_lane))
    in_group = builder.and_(shifted, constant([3] * lanes))
    return builder.or_(in_group, constant(group_of_lane))


@intrinsic
def add_products(
    typing,
    sums,
    values,
    codes,
    o,
    x,
    t,
    span,
):
    """sums += one span, two registers of inputs, of the rows of 2:4 from o on with the tokens from
    t on.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        sums, values, codes, o, x, t, span = arguments
        kind, values_kind, codes_kind, _, x_kind, _, _ = signature.args
        is_float = isinstance(values_kind.dtype, types.Float)
        if is_float:
            lanes = LANES
            stored = FLOATS
            select = "llvm.x86.avx512.vpermi2var.ps.512"
        else:
            lanes = 2 * LANES
            stored = ir.VectorType(INT16, lanes)
            select = "llvm.x86.avx512.vpermi2var.hi.512"

        def load(
            array_kind,
            array,
            row,
            column,
            to,
        ):
            source = address(context, builder, array_kind, array, [row, column], to)
            return builder.load(source, align=1)

        def scaled(factor, shift=0):
            return builder.add(builder.mul(span, span.type(factor)), span.type(shift))

        inputs = []
        for j in range(kind.tokens):
            token = builder.add(t, t.type(j))
            low = load(x_kind, x, token, scaled(2 * lanes), stored)
            high = load(x_kind, x, token, scaled(2 * lanes, lanes), stored)
            inputs.append((low, high))
        for i in range(kind.rows):
            row = builder.add(o, o.type(i))
            word = load(codes_kind, codes, row, scaled(lanes // 4), ir.IntType(2 * lanes))
            selected = inputs_of_codes(builder, word, lanes)
            factors = load(values_kind, values, row, scaled(lanes), stored)
            for j, (low, high) in enumerate(inputs):
                number = i * kind.tokens + j
                total = builder.extract_value(sums, number)
                chosen = native(builder, select, stored, [low, selected, high])
                total = with_products(builder, total, factors, chosen)
                sums = builder.insert_value(sums, total, number)
        return sums

    index = types.uint64
    return sums(sums, values, codes, index, x, index, index), generate


@intrinsic
def add_tabulated(
    typing,
    values,
    codes,
    table,
    sums,
):
    """sums (TOKENS,) += GROUPS groups of a row of S with a table.

    values: uint16, and codes: uint8, both from the first of these groups on.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        values_kind, codes_kind, table_kind, sums_kind = signature.args
        values, codes, table, sums = arguments

        def pointer(
            kind,
            array,
            at,
            to,
        ):
            return address(context, builder, kind, array, [INT64(at)], to)

        registers = range(0, TOKENS, LANES)
        targets = [pointer(sums_kind, sums, first, FLOATS) for first in registers]
        totals = [builder.load(target, align=64) for target in targets]
        word = builder.load(pointer(codes_kind, codes, 0, INT64), align=1)
        rows = ir.ArrayType(BFLOATS, TOKENS // LANES)  # a known length spares multiplications
        first_row = pointer(table_kind, table, 0, rows)
        undefined = ir.Constant(ir.VectorType(INT32, LANES), ir.Undefined)
        for g in range(GROUPS):
            code = builder.and_(builder.lshr(word, word.type(4 * g)), word.type(15))
            row = builder.gep(first_row, [builder.add(code, word.type(g * CODES))])
            pair = builder.load(pointer(values_kind, values, 2 * g, INT32), align=2)
            first_lane = builder.insert_element(undefined, pair, INT32(0))
            all_lanes = ir.Constant(undefined.type, [0] * LANES)
            copies = builder.shuffle_vector(first_lane, first_lane, all_lanes)
            factors = builder.bitcast(copies, BFLOATS)
            for i, total in enumerate(totals):
                source = builder.gep(row, [INT32(0), INT32(i)])
                inputs = builder.load(source, align=64)
                totals[i] = native(builder, PRODUCTS_BF16, FLOATS, [total, factors, inputs])
        for target, total in zip(targets, totals, strict=True):
            builder.store(total, target, align=64)
        return context.get_dummy_value()

    return types.none(values, codes, table, sums), generate


@intrinsic
def load_word(
    typing,
    codes,
    at,
):
    """Load four bytes, wherever they begin."""

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        codes, at = arguments
        source = address(context, builder, signature.args[0], codes, [at], INT32)
        return builder.load(source, align=1)

    return types.uint32(codes, types.uint64), generate


def expanded(
    context,
    builder,
    kind,
    values,
    at,
    mask,
):
    """A register of the values from values[at] on, in the places where the mask has a bit, else 0.

    mask: of as many bits as a register has values.
    """
    bits = kind.dtype.bitwidth
    lanes = mask.type.width
    vector = ir.VectorType(ir.IntType(bits), lanes)
    source = address(context, builder, kind, values, [at], vector)
    register = builder.load(source, align=bits // 8)
    if WIDE:  # in a register: the instruction that expands from memory is slow on Zen
        copy = ir.FunctionType(vector, [vector])
        register = builder.asm(copy, "", "=v,0", [register], False)
    selected = builder.bitcast(mask, ir.VectorType(BIT, lanes))
    name = f"llvm.x86.avx512.mask.expand.v{lanes}i{bits}"
    return native(builder, name, vector, [register, ir.Constant(vector, None), selected])


def expand_span(
    context,
    builder,
    kind,
    values,
    at,
    mask,
):
    """A span in its registers: values from values[at] on where the mask has a bit, else 0."""
    lanes = 512 // kind.dtype.bitwidth
    registers = []
    for first in range(0, SPAN, lanes):
        shifted = builder.lshr(mask, mask.type(first))
        part = builder.trunc(shifted, ir.IntType(lanes))
        registers.append(expanded(context, builder, kind, values, at, part))
        at = builder.add(at, builder.zext(builder.ctpop(part), at.type))
    return registers


@intrinsic
def expand(
    typing,
    values,
    at,
    mask,
    row,
    base,
):
    """row[base : base + 32]: values from values[at] on where the mask has a bit, else 0. Reads 32
    values.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        values, at, mask, row, base = arguments
        registers = expand_span(context, builder, signature.args[0], values, at, mask)
        for number, register in enumerate(registers):
            column = builder.add(base, base.type(number * register.type.count))
            target = address(context, builder, signature.args[3], row, [column], register.type)
            builder.store(register, target, align=signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(values, types.uint64, types.uint32, row, types.uint64), generate


@intrinsic
def add_expanded(
    typing,
    sums,
    values,
    at,
    mask,
    x,
    t,
    span,
):
    """sums += one span of inputs of a row of S with the tokens from t on. The row's values of this
    span are those from values[at] on, where the mask has a bit. Reads 32 values.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        sums, values, at, mask, x, t, span = arguments
        kind, values_kind, _, _, x_kind, _, _ = signature.args
        registers = expand_span(context, builder, values_kind, values, at, mask)
        for part, register in enumerate(registers):
            column = builder.mul(span, span.type(SPAN))
            column = builder.add(column, span.type(part * register.type.count))
            for j in range(kind.tokens):
                token = builder.add(t, t.type(j))
                source = address(context, builder, x_kind, x, [token, column], register.type)
                inputs = builder.load(source, align=1)
                total = builder.extract_value(sums, j)
                total = with_products(builder, total, register, inputs)
                sums = builder.insert_value(sums, total, j)
        return sums

    index = types.uint64
    return sums(sums, values, index, types.uint32, x, index, index), generate


@intrinsic
def unpack_pairs(
    typing,
    codes,
    low,
    above,
    high,
    mask,
    terms,
    pairs,
    at,
):
    """pairs[at : at + 64] = code · scale + centre for 64 rows and two inputs, in bfloat16; the two
    share a word.

    Byte i of `codes` from `low` on has the nibbles of row i and, above it, row 32 + i; the next 32
    bytes have those of the second input. What counts 16 times is found likewise in `above`, which
    is None if there is nothing: high holds the first byte and the shift of each of the two inputs,
    and mask the bits that count. terms: float32 (2, 64), scales and centres; pairs: uint32.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        codes, low, above, high, mask, terms, pairs, at = arguments
        codes_kind, _, above_kind, _, _, terms_kind, pairs_kind, _ = signature.args
        words = ir.VectorType(INT32, LANES)
        has_high = not isinstance(above_kind, types.NoneType)

        def constant(value):
            return ir.Constant(words, [value] * LANES)

        def copies(number):
            first = builder.trunc(number, INT32)
            lane = builder.insert_element(ir.Constant(words, ir.Undefined), first, INT32(0))
            return builder.shuffle_vector(lane, lane, constant(0))

        def nibbles(
            kind,
            array,
            first,
            offset,
            shift,
        ):
            place = builder.add(first, first.type(offset))
            octets = ir.VectorType(BYTE, LANES)
            source = address(context, builder, kind, array, [place], octets)
            wide = builder.zext(builder.load(source, align=1), words)
            return builder.and_(builder.lshr(wide, constant(shift)), constant(15))

        def high_bits(
            second,
            offset,
            shift,
        ):
            place = builder.extract_value(high, 2 * second)
            found = nibbles(above_kind, above, place, offset, shift)
            skipped = copies(builder.extract_value(high, 2 * second + 1))
            return builder.and_(builder.lshr(found, skipped), copies(mask))

        def numbers(kind, row):
            place = [INT64(kind), INT64(row)]
            source = address(context, builder, terms_kind, terms, place, FLOATS)
            return builder.load(source, align=4)

        def rounded(
            second,
            offset,
            shift,
            row,
        ):
            code = nibbles(codes_kind, codes, low, 2 * LANES * second + offset, shift)
            if has_high:
                bits = high_bits(second, offset, shift)
                code = builder.or_(code, builder.shl(bits, constant(4)))
            steps = builder.sitofp(code, FLOATS)
            product = builder.fmul(steps, numbers(0, row), flags=("contract",))
            value = builder.fadd(product, numbers(1, row), flags=("contract",))
            return builder.add(builder.bitcast(value, words), constant(0x8000))

        for row in range(0, 4 * LANES, LANES):
            shift = row // (2 * LANES) * 4
            offset = row % (2 * LANES)
            first = builder.lshr(rounded(0, offset, shift, row), constant(16))
            second = rounded(1, offset, shift, row)
            pair = builder.or_(first, builder.and_(second, constant(0xFFFF0000)))
            place = builder.add(at, at.type(row))
            target = address(context, builder, pairs_kind, pairs, [place], words)
            builder.store(pair, target, align=4)
        return context.get_dummy_value()

    index = types.uint64
    places = types.UniTuple(index, 4)
    return types.none(codes, index, above, places, index, terms, pairs, index), generate


@intrinsic
def add_entries(
    typing,
    sums,
    tables,
    at,
    codes,
    first,
):
    """Add to the sums of 64 rows the entries tables[at] that their nibbles name. sums: of four
    rows, each a register of 16 rows, and one token.

    tables: float32 (steps, 16); codes: uint8, of which byte i from `first` on has the nibbles of
    row i and, above it, row 32 + i.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        sums, tables, at, codes, first = arguments
        _, tables_kind, _, codes_kind, _ = signature.args
        words = ir.VectorType(INT32, LANES)
        place = [at, at.type(0)]
        table = builder.load(address(context, builder, tables_kind, tables, place, FLOATS), align=4)
        for half in range(2):
            start = builder.add(first, first.type(LANES * half))
            octets = ir.VectorType(BYTE, LANES)
            source = address(context, builder, codes_kind, codes, [start], octets)
            low = builder.zext(builder.load(source, align=1), words)
            high = builder.lshr(low, ir.Constant(words, [4] * LANES))
            for register, index in ((half, low), (half + 2, high)):
                # Only the four lowest bits of an index count.
                entries = native(builder, SELECT_FLOATS, FLOATS, [table, index])
                total = builder.extract_value(sums, register)
                sums = builder.insert_value(sums, builder.fadd(total, entries), register)
        return sums

    return sums(sums, tables, types.uint64, codes, types.uint64), generate


@intrinsic
def add_scaled(
    typing,
    sums,
    parts,
    terms,
    group,
    row,
):
    """sums += parts · scales of the 64 rows from `row` on. sums, parts: of four rows, each a
    register; terms: uint32 (groups, out), whose lower halves are the scales in bfloat16.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        sums, parts, terms, group, row = arguments
        words = ir.VectorType(INT32, LANES)
        for i in range(signature.args[0].rows):
            place = [group, builder.add(row, row.type(LANES * i))]
            source = address(context, builder, signature.args[2], terms, place, words)
            pairs = builder.load(source, align=4)
            bits = builder.shl(pairs, ir.Constant(words, [16] * LANES))
            scale = builder.bitcast(bits, FLOATS)
            part = builder.extract_value(parts, i)
            total = builder.extract_value(sums, i)
            more = native(builder, "llvm.fma.v16f32", FLOATS, [part, scale, total])
            sums = builder.insert_value(sums, more, i)
        return sums

    index = types.uint64
    return sums(sums, parts, terms, index, index), generate


@intrinsic
def store_rows(
    typing,
    sums,
    target,
):
    """target[: 64] = the sums of four rows, each a register. target: float32."""

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        sums, target = arguments
        for i in range(signature.args[0].rows):
            place = [INT64(LANES * i)]
            source = address(context, builder, signature.args[1], target, place, FLOATS)
            builder.store(builder.extract_value(sums, i), source, align=4)
        return context.get_dummy_value()

    return types.none(sums, target), generate


@intrinsic
def prefetch(
    typing,
    row,
    at,
    ahead,
):
    """Ask for the cache line that is `ahead` bytes after row[at]; beyond the array this does
    nothing.
    """

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        array, at, ahead = arguments
        kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT32, INT32, INT32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        start = address(context, builder, signature.args[0], array, [at], BYTE)
        line = builder.gep(start, [ahead])
        builder.call(ask, [line, INT32(0), INT32(3), INT32(1)])  # to read, near, data
        return context.get_dummy_value()

    return types.none(row, types.uint64, types.int64), generate
