"""Which numbers the scales and offsets of a grid may be, which is how they are stored.

Either floats with the eight significant bits of bfloat16, which are the same numbers in every dtype
of a model. Or whole multiples of a unit of their row, as in the double quantisation of QLoRA (arXiv
2305.14314) and in the K types of llama.cpp, with b bits each:

    scale_g  =  k_g·unit / 2^b,      k_g = 1, …, 2^b − 1
    offset_g = −m_g·unit' / 2^b,     m_g = 0, …, 2^b − 1

The units are such floats themselves, near the largest scale and offset of the row: division by a
power of two is exact. Products with a code of eight bits are exact in float32.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Bits of a multiple.
SCALE_BITS = (3, 4, 5, 6, 8)


def as_float(numbers: Tensor) -> Tensor:
    """Numbers rounded to what every dtype of a model holds: bfloat16's eight bits."""
    return numbers.bfloat16().to(numbers.dtype)


@dataclass(frozen=True)
class Floats:
    """Each scale and each offset is a float."""

    def scales(self, values: Tensor) -> Tensor:
        return as_float(values)

    def offsets(self, values: Tensor) -> Tensor:
        return as_float(values)


@dataclass(frozen=True)
class Multiples:
    """Scales and offsets are whole multiples of units of their row.

    Args:
        bits: b, one of SCALE_BITS.
        scale_unit: (out,), above 0.
        offset_unit: likewise; None on a grid without offsets.
    """

    bits: int
    scale_unit: Tensor
    offset_unit: Tensor | None

    @classmethod
    def covering(
        cls,
        bits: int,
        scale: Tensor,
        offset: Tensor | None,
    ) -> "Multiples":
        """Units whose largest multiples are the largest numbers of each row, up to rounding.

        Args:
            scale: of each group, (out, groups).
            offset: likewise, and at most 0; None on a grid without offsets.
        """
        return cls(bits, unit_of(scale, bits), None if offset is None else unit_of(-offset, bits))

    def scale_multiples(self, values: Tensor) -> Tensor:
        """The nearest k of scales (out, …), in their dtype."""
        return self._multiples(values, self.scale_unit).clamp_min_(1)

    def offset_multiples(self, values: Tensor) -> Tensor:
        """The nearest m of offsets (out, …), in their dtype."""
        assert self.offset_unit is not None
        return self._multiples(-values, self.offset_unit)

    def scales(self, values: Tensor) -> Tensor:
        """The nearest scales to values (out, …)."""
        return self.scale_multiples(values) * self._step(values, self.scale_unit)

    def offsets(self, values: Tensor) -> Tensor:
        """The nearest offsets to values (out, …)."""
        assert self.offset_unit is not None
        return -self.offset_multiples(values) * self._step(values, self.offset_unit)

    def to(self, dtype: torch.dtype) -> "Multiples":
        """With units in another dtype."""
        offset = None if self.offset_unit is None else self.offset_unit.to(dtype)
        return replace(self, scale_unit=self.scale_unit.to(dtype), offset_unit=offset)

    def _multiples(self, values: Tensor, unit: Tensor) -> Tensor:
        steps = (values / self._step(values, unit)).round_()
        return steps.clamp_(0, (1 << self.bits) - 1)

    def _step(self, values: Tensor, unit: Tensor) -> Tensor:
        """The value of 1, broadcast with values (out, …) and in their dtype."""
        step = unit.to(values.dtype) / (1 << self.bits)
        return step.view(-1, *[1] * (values.ndim - 1))


def unit_of(numbers: Tensor, bits: int) -> Tensor:
    """The unit (out,) of numbers (out, groups) from 0; 1 for a row of zeros."""
    largest = numbers.amax(1)
    unit = as_float(largest * ((1 << bits) / ((1 << bits) - 1)))
    return torch.where(unit > 0, unit, 1.0)


FLOATS = Floats()
