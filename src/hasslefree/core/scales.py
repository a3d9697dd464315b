"""Storage of the scales and offsets of a grid, and the numbers that they may therefore be.

They are either floats or multiples. Floats have the eight significant bits of bfloat16, and are the
same numbers in every dtype of a model: below 2^-17, where float16 has fewer bits, they are
multiples of 2^-24 (`suits_half`). Multiples are whole multiples, with b bits each, of a unit of
their row, or of a block of their row, as in the double quantisation of QLoRA (arXiv 2305.14314) and
in the K types of llama.cpp:

    scale_g  =  k_g·unit / 2^b,      k_g = 1, …, 2^b − 1
    offset_g = −m_g·unit' / 2^b,     m_g = 0, …, 2^b − 1

On a symmetric grid with blocks, scales have a sign, which takes one of the bits: the codes reach
one step further on one side of zero, and the sign chooses the side.

    scale_g  =  k_g·unit / 2^(b−1),  k_g = −2^(b−1), …, 2^(b−1) − 1,  but 0

The units are such floats themselves, near the largest scale and offset of the row or block:
division by a power of two is exact. For blocks, the quotients are float16 numbers too, since
llama.cpp stores them in float16. Products with an eight-bit code are exact in float32.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasslefree.core.gram import dtype_name
from hasslefree.errors import GridError, option

# Possible bits of a multiple.
SCALE_BITS = (3, 4, 5, 6, 8)
# The number from which float16 has eight significant bits.
EIGHT_BITS = 2.0**-17
# The smallest number of float16, which is the scale of a group of zeros: a larger one would change
# the learning rate of all scales, and amplify rounding errors.
SMALLEST_HALF = 2.0**-24


def as_float(numbers: Tensor, half: Tensor | None = None) -> Tensor:
    """Round numbers to the eight bits of bfloat16, and if `half` is true, also to float16."""
    rounded = numbers.bfloat16().to(numbers.dtype)
    if half is None:
        return rounded
    return torch.where(half, rounded.half().to(numbers.dtype), rounded)


def cast_exactly(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast scales or offsets to another dtype; GridError if they would change."""
    cast = numbers.to(dtype)
    if not torch.equal(cast.to(numbers.dtype), numbers):
        raise GridError(
            f"a quantisation scale or offset overflows or underflows {dtype_name(cast)}; "
            f"use another dtype ({option('dtype', 'bfloat16')})"
        )
    return cast


def suits_half(matrix: Tensor, steps: int) -> Tensor:
    """Return whether float16 holds the scales of a matrix (out, in), the largest one with eight
    bits: a 0-dim bool tensor, to avoid a wait for the GPU.

    Without this condition, all entries of a matrix of tiny numbers would become zero; with it, only
    entries that are tiny compared with the largest one become zero.

    Args:
        steps: a scale is about the largest entry of a group, divided by this number.
    """
    low, high = torch.aminmax(matrix)
    largest = torch.maximum(-low, high)
    return (largest >= steps * EIGHT_BITS) & (largest <= torch.finfo(torch.half).max)


@dataclass(frozen=True)
class Floats:
    """Scales and offsets are floats. half: whether float16 holds them too, a 0-dim bool tensor."""

    half: Tensor | None = None

    def scales(self, values: Tensor) -> Tensor:
        return as_float(values, self.half)

    def offsets(self, values: Tensor) -> Tensor:
        return as_float(values, self.half)


@dataclass(frozen=True)
class Multiples:
    """Scales and offsets are whole multiples of units of their row, or of its blocks.

    Values for all groups are (out, groups, …). Values for one group are (out,) or (out, 1), with
    the units of the group's block (`of_block`).

    Args:
        bits: b, one of SCALE_BITS.
        scale_unit: (out, blocks), positive; one block for a whole row.
        offset_unit: (out, blocks), positive; None on a grid without offsets.
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
        """Choose units whose largest multiples are about the largest numbers of each block.

        Args:
            scale: the scales of the groups, (out, groups).
            offset: the offsets of the groups, at most 0; None on a grid without offsets.
            blocks: the number of blocks per row; None for one unit per row.
            half: if true, units are float16 numbers. With blocks, the steps always are.
        """
        in_blocks = blocks is not None
        parts = (blocks or 1, -1)
        scale_unit = unit_of(scale.unflatten(1, parts), bits - signed, in_blocks, half)
        offset_unit = None
        if offset is not None:
            offset_unit = unit_of(offset.unflatten(1, parts), bits, in_blocks, half)
        return cls(bits, scale_unit, offset_unit, signed)

    def of_block(self, index: int) -> "Multiples":
        """Return the storage with the units of one block of each row."""
        block = slice(index, index + 1)
        offset = None if self.offset_unit is None else self.offset_unit[:, block]
        return replace(self, scale_unit=self.scale_unit[:, block], offset_unit=offset)

    def scale_multiples(self, values: Tensor) -> Tensor:
        """Return the k of the nearest scales, in the dtype of the values."""
        bits = self.bits - self.signed
        steps = (values / self._step(values, self.scale_unit, bits)).round_()
        if not self.signed:
            return steps.clamp_(1, (1 << bits) - 1)
        steps.clamp_(-(1 << bits), (1 << bits) - 1)
        return torch.where(steps == 0, torch.ones_like(steps).copysign(values), steps)

    def offset_multiples(self, values: Tensor) -> Tensor:
        """Return the m of the nearest offsets, in the dtype of the values."""
        assert self.offset_unit is not None
        steps = (-values / self._step(values, self.offset_unit, self.bits)).round_()
        return steps.clamp_(0, (1 << self.bits) - 1)

    def scales(self, values: Tensor) -> Tensor:
        """Return the scales nearest to values."""
        bits = self.bits - self.signed
        return self.scale_multiples(values) * self._step(values, self.scale_unit, bits)

    def offsets(self, values: Tensor) -> Tensor:
        """Return the offsets nearest to values."""
        assert self.offset_unit is not None
        return -self.offset_multiples(values) * self._step(values, self.offset_unit, self.bits)

    def to(self, dtype: torch.dtype) -> "Multiples":
        """Cast the units to another dtype; GridError if they would change."""
        offset = self.offset_unit
        if offset is not None:
            offset = cast_exactly(offset, dtype)
        return replace(self, scale_unit=cast_exactly(self.scale_unit, dtype), offset_unit=offset)

    def _step(self, values: Tensor, unit: Tensor, bits: int) -> Tensor:
        """Return unit / 2^bits, broadcast with the values and in their dtype."""
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
    """Return the units (out, blocks) for numbers (out, blocks, groups) of one sign; for zeros, a
    unit with steps of `SMALLEST_HALF`.

    Args:
        bits: the largest number is about 2^bits − 1 steps of unit / 2^bits.
        half_steps: make these steps float16 numbers.
        half: if true, make the units float16 numbers.
    """
    steps = 1 << bits
    unit = as_float(numbers.abs().amax(2) * (steps / (steps - 1)), half)
    if half_steps:
        unit = with_half_steps(unit, bits)
    return torch.where(unit > 0, unit, steps * SMALLEST_HALF)


def with_half_steps(unit: Tensor, bits: int) -> Tensor:
    """Return the nearest units whose steps, unit / 2^bits, are float16 numbers."""
    steps = 1 << bits
    return (unit.float() / steps).half().to(unit.dtype) * steps


FLOATS = Floats()
