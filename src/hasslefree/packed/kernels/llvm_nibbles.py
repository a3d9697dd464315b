"""The instructions of AVX-512 for an S on a grid, whose codes are nibbles of 64 rows at a time."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hasslefree.packed.kernels.llvm import (
    BYTE,
    FLOATS,
    INT32,
    INT64,
    LANES,
    address,
    native,
)

# The float32 of a register that the numbers of another name.
SELECT_FLOATS = "llvm.x86.avx512.permvar.sf.512"
WORDS = ir.VectorType(INT32, LANES)


def everywhere(value):
    """A register with a constant in every lane."""
    return ir.Constant(WORDS, [value] * LANES)


def copies(builder, number):
    """A register with a number in every lane."""
    first = builder.trunc(number, INT32)
    lane = builder.insert_element(ir.Constant(WORDS, ir.Undefined), first, INT32(0))
    return builder.shuffle_vector(lane, lane, everywhere(0))


def nibbles_from(
    context,
    builder,
    kind,
    array,
    first,
    offset,
    shift,
):
    """A nibble of each of 16 bytes, from byte first + offset of the array on, as a register. shift:
    0 for the lower nibble, 4 for the upper one.
    """
    place = builder.add(first, first.type(offset))
    source = address(context, builder, kind, array, [place], ir.VectorType(BYTE, LANES))
    wide = builder.zext(builder.load(source, align=1), WORDS)
    return builder.and_(builder.lshr(wide, everywhere(shift)), everywhere(15))


def value_bits(
    builder,
    code,
    scale,
    centre,
):
    """code · scale + centre, in float32, as bits whose upper half is the value in bfloat16."""
    steps = builder.sitofp(code, FLOATS)
    product = builder.fmul(steps, scale, flags=("contract",))
    value = builder.fadd(product, centre, flags=("contract",))
    return builder.add(builder.bitcast(value, WORDS), everywhere(0x8000))


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
        has_high = not isinstance(above_kind, types.NoneType)

        def code_of(
            second,
            offset,
            shift,
        ):
            from_codes = (context, builder, codes_kind, codes)
            code = nibbles_from(*from_codes, low, 2 * LANES * second + offset, shift)
            if not has_high:
                return code
            first = builder.extract_value(high, 2 * second)
            found = nibbles_from(context, builder, above_kind, above, first, offset, shift)
            skipped = copies(builder, builder.extract_value(high, 2 * second + 1))
            bits = builder.and_(builder.lshr(found, skipped), copies(builder, mask))
            return builder.or_(code, builder.shl(bits, everywhere(4)))

        def term(kind, row):
            place = [INT64(kind), INT64(row)]
            source = address(context, builder, terms_kind, terms, place, FLOATS)
            return builder.load(source, align=4)

        for row in range(0, 4 * LANES, LANES):
            shift = row // (2 * LANES) * 4
            offset = row % (2 * LANES)
            scale = term(0, row)
            centre = term(1, row)
            first, second = [
                value_bits(builder, code_of(number, offset, shift), scale, centre)
                for number in range(2)
            ]
            lower = builder.lshr(first, everywhere(16))
            pair = builder.or_(lower, builder.and_(second, everywhere(0xFFFF0000)))
            place = builder.add(at, at.type(row))
            target = address(context, builder, pairs_kind, pairs, [place], WORDS)
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
        place = [at, at.type(0)]
        table = builder.load(address(context, builder, tables_kind, tables, place, FLOATS), align=4)
        for half in range(2):
            start = builder.add(first, first.type(LANES * half))
            octets = ir.VectorType(BYTE, LANES)
            source = address(context, builder, codes_kind, codes, [start], octets)
            low = builder.zext(builder.load(source, align=1), WORDS)
            high = builder.lshr(low, everywhere(4))
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
        for i in range(signature.args[0].rows):
            place = [group, builder.add(row, row.type(LANES * i))]
            source = address(context, builder, signature.args[2], terms, place, WORDS)
            pairs = builder.load(source, align=4)
            bits = builder.shl(pairs, everywhere(16))
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
