"""Instructions that Numba does not generate, as functions for the kernels, written in LLVM's IR.

This file has what all kernels share: registers of sums, products of bfloat16, and prefetching,
without which four tokens take up to 1.6 times as long. The instructions for 2:4 are in
`llvm_pairs`, those for masks in `llvm_masks`, and those for codes on a grid in `llvm_nibbles`.

What calls `native` needs AVX-512. Other processors compile the loops around it, but never enter
them.
"""

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, register_model

# Numbers of 32 bits in a vector register of AVX-512.
LANES = 16

# Of the processor that Numba compiles for.
CHOSEN: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
FEATURES = set((CHOSEN or get_host_cpu_features()).split(","))
WIDE = {"+avx512f", "+avx512vbmi2", "+avx512bf16"} <= FEATURES

FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
BYTE = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
# Σ of products of pairs of bfloat16, added to a register of float32.
PRODUCTS_BF16 = "llvm.x86.avx512bf16.dpbf16ps.512"


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
