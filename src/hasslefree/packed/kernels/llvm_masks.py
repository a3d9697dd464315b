"""AVX-512 instructions for S stored with masks: values of a row are spread over registers."""

from llvmlite import ir
from numba import types

from hasslefree.packed.kernels.llvm import (
    INDEX,
    INT32,
    WIDE,
    instruction,
    native,
    plus,
    with_products,
)

BIT = ir.IntType(1)
# Inputs per word of a mask, which are multiplied together.
SPAN = 32


@instruction(types.uint32, at=INDEX)
def load_word(
    builder,
    codes,
    at,
):
    """Load four bytes, wherever they begin."""
    return codes.load([at], INT32)


def expand_span(
    builder,
    values,
    at,
    mask,
):
    """The registers of a span: values from values[at] on where the mask has a bit, else 0."""
    bits = values.dtype.bitwidth
    lanes = 512 // bits
    vector = ir.VectorType(ir.IntType(bits), lanes)
    name = f"llvm.x86.avx512.mask.expand.v{lanes}i{bits}"
    registers = []
    for first in range(0, SPAN, lanes):
        part = builder.trunc(builder.lshr(mask, mask.type(first)), ir.IntType(lanes))
        register = values.load([at], vector)
        if WIDE:  # in a register: the instruction that expands from memory is slow on Zen
            copy = ir.FunctionType(vector, [vector])
            register = builder.asm(copy, "", "=v,0", [register], False)
        selected = builder.bitcast(part, ir.VectorType(BIT, lanes))
        operands = [register, ir.Constant(vector, None), selected]
        registers.append(native(builder, name, vector, operands))
        at = builder.add(at, builder.zext(builder.ctpop(part), at.type))
    return registers


@instruction(
    types.none,
    at=INDEX,
    mask=types.uint32,
    base=INDEX,
)
def expand(
    builder,
    values,
    at,
    mask,
    row,
    base,
):
    """row[base : base + 32]: values from values[at] on where the mask has a bit, else 0. Reads 32
    values.
    """
    for number, register in enumerate(expand_span(builder, values, at, mask)):
        column = plus(builder, base, number * register.type.count)
        row.store(register, [column])


@instruction(
    "sums",
    at=INDEX,
    mask=types.uint32,
    t=INDEX,
    span=INDEX,
)
def add_expanded(
    builder,
    sums,
    values,
    at,
    mask,
    x,
    t,
    span,
):
    """sums += the products of a row of S with the tokens from t on, for one span of inputs. The
    values of the span are those from values[at] on, where the mask has a bit. Reads 32 values.
    """
    for part, register in enumerate(expand_span(builder, values, at, mask)):
        column = builder.mul(span, span.type(SPAN))
        column = plus(builder, column, part * register.type.count)
        for j in range(sums.tokens):
            token = plus(builder, t, j)
            inputs = x.load([token, column], register.type)
            sums[j] = with_products(builder, sums[j], register, inputs)
    return sums
