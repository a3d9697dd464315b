"""Which numbers the scales and offsets of a grid may be, which is how they are stored.

Either floats with the eight significant bits of bfloat16, which are the same numbers in every dtype
of a model: below 2^-17, where float16 has fewer bits, they are multiples of 2^-24 (`suits_half`).
Or whole multiples of a unit of their row, or of a block of their row, as in the double
quantisation of QLoRA (arXiv 2305.14314) and in the K types of llama.cpp, with b bits each:

    scale_g  =  k_g·unit / 2^b,      k_g = 1, …, 2^b − 1
    offset_g = −m_g·unit' / 2^b,     m_g = 0, …, 2^b − 1

On a symmetric grid with blocks, scales have a sign, which takes one of the bits: the codes reach
one step further on one side of zero, and the sign chooses the side.

    scale_g  =  k_g·unit / 2^(b−1),  k_g = −2^(b−1), …, 2^(b−1) − 1,  but 0

The units are such floats themselves, near the largest scale and offset of the row or block:
division by a power of two is exact. The quotients of blocks are numbers of float16 too, in which
llama.cpp stores them. Products with a code of eight bits are exact in float32.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasslefree.core.gram import dtype_name
from hasslefree.errors import GridError, option

# Bits of a multiple.
SCALE_BITS = (3, 4, 5, 6, 8)
# The number from which float16 has eight significant bits.
EIGHT_BITS = 2.0**-17
# The smallest number of float16, which is the scale of a group that needs none: a larger one would
# count in the learning rate of all scales, and multiply what cancels.
SMALLEST_HALF = 2.0**-24


def as_float(numbers: Tensor, half: Tensor | None = None) -> Tensor:
    """Numbers rounded to bfloat16's eight bits; where `half` is true, to numbers of float16 too."""
    rounded = numbers.bfloat16().to(numbers.dtype)
    if half is None:
        return rounded
    return torch.where(half, rounded.half().to(numbers.dtype), rounded)


def cast_exactly(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales or offsets in another dtype; GridError if it does not hold them."""
    cast = numbers.to(dtype)
    if not torch.equal(cast.to(numbers.dtype), numbers):
        raise GridError(
            f"a quantisation scale or offset overflows or underflows {dtype_name(cast)}; "
            f"use another dtype ({option('dtype', 'bfloat16')})"
        )
    return cast


def suits_half(matrix: Tensor, steps: int) -> Tensor:
    """Whether float16 holds the scales of a matrix (out, in), the largest one with eight bits: a
    bool without dimensions, for which no GPU need be waited for.

    Without this condition, all entries of a matrix of tiny numbers would become zero; with it,
    those are lost that are tiny next to the largest entry.

    Args:
        steps: a scale is about the largest entry of a group, divided by this number.
    """
    low, high = torch.aminmax(matrix)
    largest = torch.maximum(-low, high)
    return (largest >= steps * EIGHT_BITS) & (largest <= torch.finfo(torch.half).max)


@dataclass(frozen=True)
class Floats:
    """Each scale and each offset is a float. half: whether float16 holds it too."""

    half: Tensor | None = None

    def scales(self, values: Tensor) -> Tensor:
        return as_float(values, self.half)

    def offsets(self, values: Tensor) -> Tensor:
        return as_float(values, self.half)


@dataclass(frozen=True)
class Multiples:
    """Scales and offsets are whole multiples of units of their row, or of blocks of it.

    Numbers of all groups are (out, groups, …), and those of one group, with the units of its block
    (`of_block`), are (out,) or (out, 1).

    Args:
        bits: b, one of SCALE_BITS.
        scale_unit: (out, blocks), above 0; one block for a whole row.
        offset_unit: likewise; None on a grid without offsets.
        signed: scales have a sign.
    """

    bits: int
    scale_unit: Tensor
    offset_unit: Tensor | None
    signed: bool = False

    @classmethod
    def covering(
        cls,
        bits: int,
        scale: Tensor,
        offset: Tensor | None,
        blocks: int | None = None,
        signed: bool = False,
        half: Tensor | None = None,
    ) -> "Multiples":
        """Units whose largest multiples are the largest numbers of each block, up to rounding.

        Args:
            scale: of each group, (out, groups).
            offset: likewise, and at most 0; None on a grid without offsets.
            blocks: of each row; None for one unit a row.
            half: whether float16 holds the units. It always holds the steps of those of blocks.
        """
        in_blocks = blocks is not None
        parts = (blocks or 1, -1)
        scale_unit = unit_of(scale.unflatten(1, parts), bits - signed, in_blocks, half)
        offset_unit = None
        if offset is not None:
            offset_unit = unit_of(offset.unflatten(1, parts), bits, in_blocks, half)
        return cls(bits, scale_unit, offset_unit, signed)

    def of_block(self, index: int) -> "Multiples":
        """The multiples of the units of one block of each row."""
        block = slice(index, index + 1)
        offset = None if self.offset_unit is None else self.offset_unit[:, block]
        return replace(self, scale_unit=self.scale_unit[:, block], offset_unit=offset)

    def scale_multiples(self, values: Tensor) -> Tensor:
        """The nearest k of scales, in their dtype."""
        bits = self.bits - self.signed
        steps = (values / self._step(values, self.scale_unit, bits)).round_()
        if not self.signed:
            return steps.clamp_(1, (1 << bits) - 1)
        steps.clamp_(-(1 << bits), (1 << bits) - 1)
        return torch.where(steps == 0, torch.ones_like(steps).copysign(values), steps)

    def offset_multiples(self, values: Tensor) -> Tensor:
        """The nearest m of offsets, in their dtype."""
        assert self.offset_unit is not None
        steps = (-values / self._step(values, self.offset_unit, self.bits)).round_()
        return steps.clamp_(0, (1 << self.bits) - 1)

    def scales(self, values: Tensor) -> Tensor:
        """The nearest scales to values."""
        bits = self.bits - self.signed
        return self.scale_multiples(values) * self._step(values, self.scale_unit, bits)

    def offsets(self, values: Tensor) -> Tensor:
        """The nearest offsets to values."""
        assert self.offset_unit is not None
        return -self.offset_multiples(values) * self._step(values, self.offset_unit, self.bits)

    def to(self, dtype: torch.dtype) -> "Multiples":
        """With units in another dtype; GridError if it does not hold them."""
        offset = self.offset_unit
        if offset is not None:
            offset = cast_exactly(offset, dtype)
        return replace(self, scale_unit=cast_exactly(self.scale_unit, dtype), offset_unit=offset)

    def _step(self, values: Tensor, unit: Tensor, bits: int) -> Tensor:
        """The value of 1, broadcast with values and in their dtype."""
        step = unit.to(values.dtype) / (1 << bits)
        if values.ndim == 1:
            return step.squeeze(1)
        step = step.repeat_interleave(values.shape[1] // step.shape[1], 1)
        return step.view(*step.shape, *[1] * (values.ndim - 2))


def unit_of(
    numbers: Tensor,
    bits: int,
    half_steps: bool,
    half: Tensor | None,
) -> Tensor:
    """The unit (out, blocks) of numbers (out, blocks, groups) on one side of 0; for zeros, one of
    `SMALLEST_HALF` steps.

    Args:
        bits: the largest number is about 2^bits − 1 steps of unit / 2^bits.
        half_steps: make these steps numbers of float16.
        half: whether to make the unit one.
    """
    steps = 1 << bits
    unit = as_float(numbers.abs().amax(2) * (steps / (steps - 1)), half)
    if half_steps:
        unit = with_half_steps(unit, bits)
    return torch.where(unit > 0, unit, steps * SMALLEST_HALF)


def with_half_steps(unit: Tensor, bits: int) -> Tensor:
    """The nearest units whose steps, unit / 2^bits, are numbers of float16."""
    steps = 1 << bits
    return (unit.float() / steps).half().to(unit.dtype) * steps


FLOATS = Floats()
