"""How codes of 2 to 8 bits are written in nibbles, which torch's operators for codes of four bits
multiply by

    (nibble − 8)·scale_g + centre_g,    g: one of the groups of 32, 64, 128 or 256 inputs of a row.

A code of up to 4 bits is one nibble. A code of 5, 6 or 8 bits is low + 16·high. In general, both
are nibbles, and the groups of S become twice as long: the low nibbles of a group are multiplied by
its inputs x, and after them the high ones by 16·x. One call adds up both in float32, and they share
a scale and a centre. Groups of 16 inputs whose codes are one nibble are filled up with nibbles that
are multiplied by 0.

On a CPU with AVX-512, the one or two high bits of a code of 5 or 6 bits take no nibble of their
own: the nibble of a row in their matrix, which is ordered like the other, holds those of four or of
two inputs. It names one of the 16 sums of these inputs that can occur, which `nibbles.add_high`
looks up.

Nibbles are moved so that the middle code becomes 8, the operators' zero. Scale and centre are
rounded to bfloat16. With m the value of the middle code 2^(bits − 1), a value of S is therefore off
by at most

    |m|/256,  or (|m| + 8·scale)/256 if codes of eight bits reach 248,

and by |value − m|/256 more where scales are multiples of a unit of their row. Without operators,
the value itself would be rounded to bfloat16.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.packed.kernels import arrays, interleaved
from hasslefree.packed.kernels.arrays import numba_kernels

# The groups of nibbles that the operators take.
GROUPS = (256, 128, 64, 32)
# The groups of S: those of a grid are divided into the longest of these that fits.
STORED_GROUPS = (*GROUPS, 16)
# The operators' zero among the nibbles.
ZERO = 8


@dataclass(frozen=True)
class Nibbles:
    """How codes of S are written in nibbles.

    Args:
        bits: of a code.
        group: the inputs of S that share a scale and a centre.
        shared: the high bits of a code that share a nibble with those of other inputs, 1, 2 or, if
            they do not, 0.
        full: codes of eight bits reach 248. It changes how they are written, not how they are
            multiplied.
    """

    bits: int
    group: int
    shared: int = 0
    full: bool = False

    @classmethod
    def fitting(cls, bits: int, stored_group: int, device: str) -> "Nibbles | None":
        """With the longest group that divides those of a grid; None if there is none."""
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
        """True if a code has a second nibble, which counts 16 times."""
        return self.bits > 4 and not self.shared

    @property
    def lift(self) -> int:
        """What is added to a code before its high bits are split off.

        With `ZERO`, the low nibble of the middle code counts nothing, and the centre of a group is
        near zero, where bfloat16 rounds least. This error is the same for all inputs of a group, so
        it adds up. Codes from 248 on have no room for a lift.
        """
        return ZERO if self.is_high and not self.full else 0

    @property
    def count(self) -> int:
        """The nibbles of an input."""
        return 2 if self.is_high or self.group < GROUPS[-1] else 1

    @property
    def together(self) -> int:
        """The nibbles that share a scale and a centre."""
        return self.count * self.group

    def bytes(self, out: int, width: int) -> int:
        """The memory of nibbles, scales and centres of S (out, width)."""
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
        """The high bits, (rows, in), of the nibbles that they share, (rows, shared · in/4)."""
        mask = (1 << self.shared) - 1
        parts = [shared >> shift & mask for shift in range(0, 4, self.shared)]
        return torch.stack(parts, 2).flatten(1)

    def join(self, nibbles: Tensor, shared: Tensor | None) -> Tensor:
        """The codes, uint8 (rows, in), of nibbles (rows, count · in) and of those that high bits
        share.
        """
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
        """Scales and centres, (groups, out, 2) bfloat16. The middle code keeps its value whatever
        rounding does to the scale.

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
        """x (tokens, in) → what the nibbles are multiplied by, (tokens, count · in)."""
        if self.count == 1:
            return x.contiguous()
        # Of the high nibble, or of what fills a group up.
        multiples = multiples_on(x.device, 16.0 if self.is_high else 0.0)
        return (x.unflatten(1, (-1, 1, self.group)) * multiples).flatten(1)

    def values(self, nibbles: Tensor, terms: Tensor) -> Tensor:
        """S (rows, in), bfloat16.

        Args:
            nibbles: of its codes, uint8 (rows, count · in).
            terms: scales and centres, (groups, rows, 2) bfloat16.
        """
        parts = nibbles.view(len(nibbles), -1, self.count, self.group)
        steps = parts[:, :, 0].float() - ZERO
        scale, centre = terms.float().permute(2, 1, 0).unsqueeze(-1)
        if self.is_high:
            steps += 16 * (parts[:, :, 1].float() - ZERO)
            centre = 17 * centre
        return torch.addcmul(centre, steps, scale).bfloat16().flatten(1)


@functools.cache
def multiples_on(device: torch.device, second: float) -> Tensor:
    """What the inputs of the two nibbles of a code are multiplied by, (2, 1), bfloat16: made once,
    as a copy to a GPU takes longer than a product.
    """
    return torch.tensor([1.0, second], dtype=torch.bfloat16, device=device).view(2, 1)


@functools.cache
def shares_nibbles() -> bool:
    """Whether high bits can share nibbles: the processor has the instructions, and torch's order of
    codes is that of our kernel.
    """
    if not arrays.HAS_NUMBA or interleaved.CAPABILITY != "AVX512":
        return False
    return bool(numba_kernels().WIDE)
