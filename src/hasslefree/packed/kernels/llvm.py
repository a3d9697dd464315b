"""Instructions that Numba does not generate, as functions for the kernels, written in LLVM's IR.

This file has the instructions that all kernels share: registers of sums, products of bfloat16, and
prefetching, without which four tokens take up to 1.6 times as long. The instructions for 2:4 are in
`llvm_pairs`, those for masks in `llvm_masks`, and those for codes on a grid in `llvm_nibbles`.

Functions that call `native` need AVX-512. Other processors compile the loops that use them, but
never enter these loops.
"""

import functools
import inspect

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, register_model

# 32-bit numbers per vector register of AVX-512.
LANES = 16
# The type of indices.
INDEX = types.uint64

# The features of the processor that Numba compiles for.
CHOSEN: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
FEATURES = set((CHOSEN or get_host_cpu_features()).split(","))
WIDE = {"+avx512f", "+avx512vbmi2", "+avx512bf16"} <= FEATURES

FLOAT = ir.FloatType()
FLOATS = ir.VectorType(FLOAT, LANES)
BYTE = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
WORDS = ir.VectorType(INT32, LANES)
# The sum of the lanes of a float32 register.
TOTAL = "llvm.vector.reduce.fadd.v16f32"


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16, a type that llvmlite lacks."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash("bfloat")


BFLOATS = ir.VectorType(BFloat(), 2 * LANES)


class Sums(types.Type):
    """The type, which Numba lacks, of registers of sums for several rows and tokens."""

    def __init__(self, rows, tokens):
        self.rows = rows
        self.tokens = tokens
        self.registers = ir.ArrayType(FLOATS, rows * tokens)
        super().__init__(f"Sums({rows}, {tokens})")


@register_model(Sums)
def _model_of_sums(manager, kind):
    return models.PrimitiveModel(manager, kind, kind.registers)


class Array:
    """An array argument of an instruction, during code generation."""

    def __init__(
        self,
        context,
        builder,
        kind,
        value,
    ):
        self.builder = builder
        self.dtype = kind.dtype
        self.align = kind.dtype.bitwidth // 8
        self.structure = context.make_array(kind)(context, builder, value)

    def pointer(self, at, to):
        """The address of array[at], as a pointer to the type `to`. at: one or two indices."""
        offset = at[-1]
        if len(at) == 2:
            width = self.builder.extract_value(self.structure.shape, 1)
            offset = self.builder.add(self.builder.mul(at[0], width), offset)
        element = self.builder.gep(self.structure.data, [offset])
        return self.builder.bitcast(element, to.as_pointer())

    def load(self, at, to):
        """Read a number or a register of the type `to` from array[at]."""
        return self.builder.load(self.pointer(at, to), align=self.align)

    def store(self, value, at):
        """Write a number or a register to array[at]."""
        self.builder.store(value, self.pointer(at, value.type), align=self.align)


class Registers:
    """Sums that are an argument or the result of an instruction, during code generation."""

    def __init__(
        self,
        builder,
        kind,
        value,
    ):
        self.builder = builder
        self.rows = kind.rows
        self.tokens = kind.tokens
        self.value = value

    def __getitem__(self, number):
        return self.builder.extract_value(self.value, number)

    def __setitem__(self, number, register):
        self.value = self.builder.insert_value(self.value, register, number)


def instruction(result, **kinds):
    """Make an intrinsic of Numba from the function that generates its code.

    The function takes LLVM's builder and the arguments: arrays as `Array`, sums as `Registers`, and
    None as None. It returns the result, if any.

    result: the type of the result, or the name of an argument of the same type.
    kinds: types to which Numba converts arguments, by name; other arguments keep their types.
    """

    def decorate(emit):
        _, *names = inspect.signature(emit).parameters

        @intrinsic
        @functools.wraps(emit)
        def typed(typing, *given):
            arguments = dict(zip(names, given, strict=True)) | kinds
            returned = arguments[result] if isinstance(result, str) else result
            return returned(*arguments.values()), generate

        def generate(
            context,
            builder,
            signature,
            arguments,
        ):
            operands = []
            for kind, value in zip(signature.args, arguments, strict=True):
                operands.append(operand_of(context, builder, kind, value))
            output = emit(builder, *operands)
            if isinstance(output, Registers):
                return output.value
            if output is None:
                return context.get_dummy_value()
            return output

        return typed

    return decorate


def operand_of(
    context,
    builder,
    kind,
    value,
):
    """An argument in the form that code generators take."""
    if isinstance(kind, types.Array):
        return Array(context, builder, kind, value)
    if isinstance(kind, Sums):
        return Registers(builder, kind, value)
    if isinstance(kind, types.NoneType):
        return None
    return value


def native(
    builder,
    name,
    result,
    arguments,
):
    """Call an intrinsic of AVX-512. Without AVX-512 the code is never reached, and any value will
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
    fastmath=(),
):
    """Call an intrinsic of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, arguments, fastmath=fastmath)


def plus(builder, number, constant):
    """number + constant, for an integer of any type."""
    return builder.add(number, number.type(constant))


def with_products(
    builder,
    total,
    left,
    right,
):
    """total + left · right, for registers of float32 or bfloat16, given as numbers or bits."""
    if left.type.count == LANES:
        left = builder.bitcast(left, FLOATS)
        right = builder.bitcast(right, FLOATS)
        return native(builder, "llvm.fma.v16f32", FLOATS, [left, right, total])
    left = builder.bitcast(left, BFLOATS)
    right = builder.bitcast(right, BFLOATS)
    # Sums of the products of pairs of bfloat16, added to a float32 register.
    return native(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, left, right])


def everywhere(value):
    """A register with a constant in every lane."""
    return ir.Constant(WORDS, [value] * LANES)


def copies(builder, number):
    """A register with a number in every lane."""
    first = builder.trunc(number, INT32)
    lane = builder.insert_element(ir.Constant(WORDS, ir.Undefined), first, INT32(0))
    return builder.shuffle_vector(lane, lane, everywhere(0))


@instruction("bits")
def popcount(builder, bits):
    """Count the set bits of an unsigned integer."""
    return builder.ctpop(bits)


@intrinsic(prefer_literal=True)
def zeros(
    typing,
    rows,
    tokens,
):
    """Sums of 0 for these numbers of rows and tokens, both literals."""
    kind = Sums(rows.literal_value, tokens.literal_value)

    def generate(
        context,
        builder,
        signature,
        arguments,
    ):
        return ir.Constant(kind.registers, None)

    return kind(rows, tokens), generate


@instruction(types.none, t=INDEX, o=INDEX)
def store_totals(
    builder,
    sums,
    y,
    t,
    o,
):
    """y[t + j, o + i] = the total of row i and token j. y: (tokens, out), contiguous."""
    for number in range(sums.rows * sums.tokens):
        i, j = divmod(number, sums.tokens)
        register = sums[number]
        target = y.pointer([plus(builder, t, j), plus(builder, o, i)], FLOAT)
        total = call(builder, TOTAL, FLOAT, [FLOAT(0.0), register], fastmath=("reassoc",))
        builder.store(total, target)


@instruction(types.none, at=INDEX, ahead=types.int64)
def prefetch(
    builder,
    row,
    at,
    ahead,
):
    """Prefetch the cache line `ahead` bytes after row[at]; beyond the array this is harmless."""
    line = builder.gep(row.pointer([at], BYTE), [ahead])
    to_read_near_data = [INT32(0), INT32(3), INT32(1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [line, *to_read_near_data])
