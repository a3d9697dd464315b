"""Codes of 2 to 8 bits in nibbles. Torch's operators for 4-bit codes multiply by

    (nibble − 8)·scale_g + centre_g,    g: one of the groups of 32, 64, 128 or 256 inputs of a row.

A code of up to 4 bits is one nibble. A code of 5, 6 or 8 bits is low + 16·high. In general, both
are nibbles, and the groups of S become twice as long: the low nibbles of a group, multiplied by the
inputs x, are followed by the high nibbles, multiplied by 16·x. One call adds up both in float32,
and they share a scale and a centre. Groups of 16 inputs whose codes are one nibble are padded with
nibbles that are multiplied by 0.

On a CPU with AVX-512, the one or two high bits of a code of 5 or 6 bits take less than a nibble: in
a second matrix, in the same order, one nibble holds the high bits of four or of two inputs. The
nibble selects one of the 16 possible sums of these inputs, which `nibbles.add_high` looks up.

Nibbles are shifted so that the middle code becomes 8, the operators' zero. Scale and centre are
rounded to bfloat16. With m the value of the middle code 2^(bits − 1), the error of a value of S is
therefore at most

    |m|/256,  or (|m| + 8·scale)/256 if codes of eight bits reach 248,

and |value − m|/256 more if scales are multiples of a unit of their row. Without the operators, the
value itself would be rounded to bfloat16.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.packed.kernels import arrays, interleaved
from hasslefree.packed.kernels.arrays import numba_kernels

# Group sizes that the operators support, in nibbles.
GROUPS = (256, 128, 64, 32)
# Group sizes of S: the groups of a grid are divided into the longest of these that fits.
STORED_GROUPS = (*GROUPS, 16)
# The operators' zero among the nibbles.
ZERO = 8


@dataclass(frozen=True)
class Nibbles:
    """The format of codes of S in nibbles.

    Args:
        bits: per code.
        group: the number of inputs of S that share a scale and a centre.
        shared: the number of high bits per code that share a nibble with the high bits of other
            inputs, 1 or 2; 0 if none do.
        full: True if codes of eight bits reach 248. This changes their nibbles, not the product.
    """

    bits: int
    group: int
    shared: int = 0
    full: bool = False

    @classmethod
    def fitting(cls, bits: int, stored_group: int, device: str) -> "Nibbles | None":
        """The format with the longest group that divides `stored_group`; None if none does."""
        high = bits - 4
        shares = high in (1, 2) and device == "cpu" and shares_nibbles()
        for group in STORED_GROUPS:
            shared = high if shares and group in GROUPS else 0
            nibbles = cls(bits, group, shared)
            if stored_group % group == 0 and nibbles.together in GROUPS:
                return nibbles
        return None

    @property
    def is_high(self) -> bool:
        """True if a code has a second nibble, which is multiplied by 16."""
        return self.bits > 4 and not self.shared

    @property
    def lift(self) -> int:
        """The number that is added to a code before the high bits are split off.

        With `ZERO`, the low nibble of the middle code stands for 0, and the centre of a group is
        near zero, where the rounding errors of bfloat16 are smallest. This matters because the
        error is the same for all inputs of a group. Codes from 248 on would overflow.
        """
        return ZERO if self.is_high and not self.full else 0

    @property
    def count(self) -> int:
        """The number of nibbles per input."""
        return 2 if self.is_high or self.group < GROUPS[-1] else 1

    @property
    def together(self) -> int:
        """The number of nibbles that share a scale and a centre."""
        return self.count * self.group

    def bytes(self, out: int, width: int) -> int:
        """Memory used by nibbles, scales and centres of S (out, width), in bytes."""
        bits = 4 * self.count + self.shared
        return bits * out * width // 8 + 4 * out * width // self.group

    def split(self, codes: Tensor) -> Tensor:
        """Codes, uint8 (out, in) → nibbles, uint8 (out, count · in)."""
        middle = 1 << (self.bits - 1)
        if self.shared:
            parts = [codes & 15]
        elif self.is_high:
            lifted = codes + self.lift
            parts = [lifted & 15, (lifted >> 4) + (ZERO - middle // 16)]
        else:
            parts = [codes + (ZERO - middle)]
            if self.count == 2:
                parts.append(torch.full_like(codes, ZERO))
        grouped = [part.view(len(codes), -1, self.group) for part in parts]
        return torch.stack(grouped, 2).view(len(codes), -1)

    def share(self, codes: Tensor) -> Tensor:
        """The nibbles of the high bits of codes, uint8 (out, in) → (out, shared · in/4)."""
        high = (codes >> 4).view(len(codes), -1, 4 // self.shared)
        shared = torch.zeros_like(high[:, :, 0])
        for i, bits in enumerate(high.unbind(2)):
            shared |= bits << (self.shared * i)
        return shared

    def high(self, shared: Tensor) -> Tensor:
        """Shared nibbles, (rows, shared · in/4) → the high bits of each input, (rows, in)."""
        mask = (1 << self.shared) - 1
        parts = [shared >> shift & mask for shift in range(0, 4, self.shared)]
        return torch.stack(parts, 2).flatten(1)

    def join(self, nibbles: Tensor, shared: Tensor | None) -> Tensor:
        """Nibbles, (rows, count · in), and those that high bits share → codes, uint8 (rows, in)."""
        middle = 1 << (self.bits - 1)
        if shared is not None:
            return nibbles | self.high(shared) << 4
        parts = nibbles.view(len(nibbles), -1, self.count, self.group).unbind(2)
        if self.is_high:
            lifted = parts[0] | (parts[1] - (ZERO - middle // 16)) << 4
            codes = lifted - self.lift
        else:
            codes = parts[0] - (ZERO - middle)
        return codes.flatten(1)

    def terms(self, scale: Tensor, low: Tensor) -> Tensor:
        """Scales and centres, (groups, out, 2) bfloat16. Rounding of the scale does not change the
        value of the middle code.

        Args:
            scale: float32 (out, groups of the grid).
            low: the values of code 0, likewise.
        """
        rounded = scale.bfloat16().float()
        centre = low + scale * (1 << (self.bits - 1))
        if self.is_high:  # the middle is (lift − 8)·scale + 17·centre
            centre = (centre + (ZERO - self.lift) * rounded) / 17
        return torch.stack([rounded, centre], -1).transpose(0, 1).bfloat16().contiguous()

    def spread(self, x: Tensor) -> Tensor:
        """x (tokens, in) → the factors of the nibbles, (tokens, count · in)."""
        if self.count == 1:
            return x.contiguous()
        # The factor of the high nibble, or of the padding of a group.
        multiples = multiples_on(x.device, 16.0 if self.is_high else 0.0)
        return (x.unflatten(1, (-1, 1, self.group)) * multiples).flatten(1)

    def values(
        self,
        nibbles: Tensor,
        shared: Tensor | None,
        terms: Tensor,
    ) -> Tensor:
        """S (rows, in), bfloat16.

        Args:
            nibbles: uint8 (rows, count · in).
            shared: the nibbles that high bits share, or None.
            terms: scales and centres, (groups, rows, 2) bfloat16.
        """
        parts = nibbles.view(len(nibbles), -1, self.count, self.group)
        steps = parts[:, :, 0].float() - ZERO
        scale, centre = terms.float().permute(2, 1, 0).unsqueeze(-1)
        if self.is_high:
            steps += 16 * (parts[:, :, 1].float() - ZERO)
            centre = 17 * centre
        if shared is not None:
            middle = ((1 << self.shared) - 1) / 2
            high = self.high(shared).float() - middle
            steps += 16 * high.view(steps.shape)
        return torch.addcmul(centre, steps, scale).bfloat16().flatten(1)


@functools.cache
def multiples_on(device: torch.device, second: float) -> Tensor:
    """The factors 1 and `second` of a code's two nibbles, (2, 1), bfloat16: made once, because a
    copy to a GPU takes longer than a product.
    """
    return torch.tensor([1.0, second], dtype=torch.bfloat16, device=device).view(2, 1)


@functools.cache
def shares_nibbles() -> bool:
    """True if high bits can share nibbles: the processor has the instructions, and torch orders
    codes as our kernel expects.
    """
    if not arrays.HAS_NUMBA or interleaved.CAPABILITY != "AVX512":
        return False
    return bool(numba_kernels().WIDE)
