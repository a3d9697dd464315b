"""The instructions of AVX-512 for an S by masks: the values of a row are spread over registers."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hasslefree.packed.kernels.llvm import (
    INT32,
    WIDE,
    address,
    native,
    with_products,
)

BIT = ir.IntType(1)
# Inputs of a word of a mask, which are multiplied together.
SPAN = 32


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
