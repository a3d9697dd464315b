"""AVX-512 instructions for S on a grid, in codes that are nibbles of 64 rows at a time."""

from llvmlite import ir
from numba import types

from hasslefree.packed.kernels.llvm import (
    BYTE,
    FLOATS,
    INDEX,
    INT64,
    LANES,
    WORDS,
    copies,
    everywhere,
    instruction,
    native,
    plus,
    with_products,
)

# Float32 numbers of a register, selected by indices in another register.
SELECT_FLOATS = "llvm.x86.avx512.permvar.sf.512"
BYTES = ir.VectorType(BYTE, LANES)
# The first byte and the shift of each of two inputs.
PLACES = types.UniTuple(INDEX, 4)


def nibbles_from(
    builder,
    codes,
    first,
    offset,
    shift,
):
    """One nibble from each of 16 bytes of the codes, from byte first + offset on, as a register.
    shift: 0 for the lower nibble, 4 for the upper one.
    """
    octets = codes.load([plus(builder, first, offset)], BYTES)
    wide = builder.zext(octets, WORDS)
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


@instruction(
    types.none,
    low=INDEX,
    high=PLACES,
    mask=INDEX,
    at=INDEX,
)
def unpack_pairs(
    builder,
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

    Byte i of `codes` from `low` on has the nibble of row i and, in the upper half, of row 32 + i;
    the next 32 bytes have those of the second input. High bits, which count 16 times, are in
    `above`, in the same order; without high bits, it is None. `high` holds the first byte and the
    shift of each of the two inputs, and `mask` the bits to use. terms: float32 (2, 64), scales and
    centres; pairs: uint32.
    """

    def code_of(
        second,
        offset,
        shift,
    ):
        code = nibbles_from(builder, codes, low, 2 * LANES * second + offset, shift)
        if above is None:
            return code
        first = builder.extract_value(high, 2 * second)
        found = nibbles_from(builder, above, first, offset, shift)
        skipped = copies(builder, builder.extract_value(high, 2 * second + 1))
        bits = builder.and_(builder.lshr(found, skipped), copies(builder, mask))
        return builder.or_(code, builder.shl(bits, everywhere(4)))

    for row in range(0, 4 * LANES, LANES):
        shift = row // (2 * LANES) * 4
        offset = row % (2 * LANES)
        scale = terms.load([INT64(0), INT64(row)], FLOATS)
        centre = terms.load([INT64(1), INT64(row)], FLOATS)
        first = value_bits(builder, code_of(0, offset, shift), scale, centre)
        second = value_bits(builder, code_of(1, offset, shift), scale, centre)
        lower = builder.lshr(first, everywhere(16))
        pair = builder.or_(lower, builder.and_(second, everywhere(0xFFFF0000)))
        pairs.store(pair, [plus(builder, at, row)])


@instruction(
    "sums",
    at=INDEX,
    first=INDEX,
)
def add_entries(
    builder,
    sums,
    tables,
    at,
    codes,
    first,
):
    """Add to the sums of 64 rows the entries of tables[at] that the nibbles of the rows select.
    sums: of four rows, each a register of 16 rows, and one token.

    tables: float32 (steps, 16); codes: uint8, of which byte i from `first` on has the nibble of row
    i and, in the upper half, of row 32 + i.
    """
    table = tables.load([at, at.type(0)], FLOATS)
    for half in range(2):
        start = plus(builder, first, LANES * half)
        low = builder.zext(codes.load([start], BYTES), WORDS)
        high = builder.lshr(low, everywhere(4))
        for register, index in ((half, low), (half + 2, high)):
            # Only the four lowest bits of an index are used.
            entries = native(builder, SELECT_FLOATS, FLOATS, [table, index])
            sums[register] = builder.fadd(sums[register], entries)
    return sums


@instruction(
    "sums",
    group=INDEX,
    row=INDEX,
)
def add_scaled(
    builder,
    sums,
    parts,
    terms,
    group,
    row,
):
    """sums += parts · scales of the 64 rows from `row` on. sums, parts: of four rows, each a
    register; terms: uint32 (groups, out), whose lower halves are the scales in bfloat16.
    """
    for i in range(sums.rows):
        place = [group, plus(builder, row, LANES * i)]
        bits = builder.shl(terms.load(place, WORDS), everywhere(16))
        scale = builder.bitcast(bits, FLOATS)
        sums[i] = with_products(builder, sums[i], parts[i], scale)
    return sums


@instruction(types.none)
def store_rows(
    builder,
    sums,
    target,
):
    """target[: 64] = the sums of four rows, each a register. target: float32."""
    for i in range(sums.rows):
        target.store(sums[i], [INT64(LANES * i)])
