"""AVX-512 instructions for S in 2:4: inputs are selected from registers or from a table."""

from llvmlite import ir
from numba import types

from hasslefree.packed.kernels.llvm import (
    BFLOATS,
    FLOATS,
    INDEX,
    INT16,
    INT32,
    INT64,
    LANES,
    copies,
    instruction,
    native,
    plus,
    with_products,
)

# A table holds GROUPS groups for TOKENS tokens. A group has a row per code, from 4, which is the
# pair (0, 1), to 14, (2, 3), and begins every CODES rows. The last rows are for invalid codes.
TOKENS = 64
GROUPS = 16
CODES = 11
TABLE_ROWS = GROUPS * CODES + 5


def inputs_of_codes(
    builder,
    codes,
    lanes,
):
    """The inputs, 0 … 2·lanes − 1, that the codes of `lanes` values select.

    codes: an integer of 2·lanes bits. Returns a register of `lanes` numbers of 512/lanes bits.
    """
    number = ir.IntType(512 // lanes)
    numbers = ir.VectorType(number, lanes)
    together = 256 // lanes  # codes per number

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


@instruction(
    "sums",
    o=INDEX,
    t=INDEX,
    span=INDEX,
)
def add_products(
    builder,
    sums,
    values,
    codes,
    o,
    x,
    t,
    span,
):
    """sums += the products of the 2:4 rows from o on with the tokens from t on, for one span of
    inputs, which is two registers.
    """
    if isinstance(values.dtype, types.Float):
        lanes = LANES
        stored = FLOATS
        select = "llvm.x86.avx512.vpermi2var.ps.512"
    else:
        lanes = 2 * LANES
        stored = ir.VectorType(INT16, lanes)
        select = "llvm.x86.avx512.vpermi2var.hi.512"

    def scaled(factor, shift=0):
        return plus(builder, builder.mul(span, span.type(factor)), shift)

    inputs = []
    for j in range(sums.tokens):
        token = plus(builder, t, j)
        low = x.load([token, scaled(2 * lanes)], stored)
        high = x.load([token, scaled(2 * lanes, lanes)], stored)
        inputs.append((low, high))
    for i in range(sums.rows):
        row = plus(builder, o, i)
        word = codes.load([row, scaled(lanes // 4)], ir.IntType(2 * lanes))
        selected = inputs_of_codes(builder, word, lanes)
        factors = values.load([row, scaled(lanes)], stored)
        for j, (low, high) in enumerate(inputs):
            number = i * sums.tokens + j
            chosen = native(builder, select, stored, [low, selected, high])
            sums[number] = with_products(builder, sums[number], factors, chosen)
    return sums


@instruction(types.none)
def add_tabulated(
    builder,
    values,
    codes,
    table,
    sums,
):
    """sums (TOKENS,) += the products of GROUPS groups of a row of S with a table.

    values: uint16, and codes: uint8, both from the first of these groups on.
    """
    registers = range(0, TOKENS, LANES)
    targets = [sums.pointer([INT64(first)], FLOATS) for first in registers]
    totals = [builder.load(target, align=64) for target in targets]
    word = codes.load([INT64(0)], INT64)
    rows = ir.ArrayType(BFLOATS, TOKENS // LANES)  # a constant length saves multiplications
    first_row = table.pointer([INT64(0)], rows)
    for g in range(GROUPS):
        code = builder.and_(builder.lshr(word, word.type(4 * g)), word.type(15))
        row = builder.gep(first_row, [plus(builder, code, g * CODES)])
        pair = values.load([INT64(2 * g)], INT32)
        factors = builder.bitcast(copies(builder, pair), BFLOATS)
        for i, total in enumerate(totals):
            source = builder.gep(row, [INT32(0), INT32(i)])
            inputs = builder.load(source, align=64)
            totals[i] = with_products(builder, total, factors, inputs)
    for target, total in zip(targets, totals, strict=True):
        builder.store(total, target, align=64)
