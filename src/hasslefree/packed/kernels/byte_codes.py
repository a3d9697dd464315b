"""x Sᵀ on a CPU for S in codes of one byte each, used if torch's operators for codes are not
possible: in float32, for example.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.products import is_traced, linear
from hasslefree.packed.kernels.arrays import numba_kernels
from hasslefree.packed.kernels.factors import add_low_rank

# The most tokens for which reading codes for each token is faster than unpacking S once.
MOST = 12
# Bytes of the rows of S that are unpacked together, in float32.
TILE_BYTES = 4 << 20


def bytes_of(out: int, width: int, groups: int) -> int:
    """Memory used by codes (out, width), and by scales and centres (out, groups), in bytes."""
    return out * width + 2 * out * groups * torch.float32.itemsize


@dataclass(frozen=True)
class ByteCodes:
    """S (out, in) = codes · scale + centre.

    Args:
        codes: minus the middle code, int8 (out, in), so that terms do not cancel if the values are
            around zero.
        middle: the middle code.
        scale: (out, groups), float32.
        centre: the values of the middle code, (out, groups), float32.
    """

    codes: Tensor
    middle: int
    scale: Tensor
    centre: Tensor

    @classmethod
    def of(cls, codes: Tensor, bits: int, scale: Tensor, low: Tensor) -> "ByteCodes":
        """Convert codes, uint8 (out, in). scale, low: (out, groups); low: the values of code 0."""
        middle = 1 << (bits - 1)
        centre = low.float() + middle * scale.float()
        return cls((codes - middle).view(torch.int8), middle, scale.float(), centre)

    @property
    def bytes(self) -> int:
        """Memory used by codes, scales and centres, in bytes."""
        out, width = self.codes.shape
        return bytes_of(out, width, self.scale.shape[1])

    def all_codes(self) -> Tensor:
        """The codes, uint8 (out, in)."""
        return self.codes.view(torch.uint8) + self.middle

    def codes_of_rows(self, rows: Tensor) -> Tensor:
        """The codes of selected rows: indices (rows,) → uint8 (rows, in)."""
        return self.codes[rows].view(torch.uint8) + self.middle

    def few_product(self, x: Tensor) -> Tensor:
        """x Sᵀ for a few tokens: (tokens, in) → (tokens, out), of x's dtype."""
        numba_kernels()  # sets the number of threads
        from hasslefree.packed.kernels.codes_numba import dot_codes

        y = torch.empty(len(x), len(self.codes))
        inputs = x.float().contiguous()
        operands = (self.codes, self.scale, self.centre, inputs, y)
        dot_codes(*[tensor.numpy() for tensor in operands])
        return y.to(x.dtype)

    def product(
        self,
        x: Tensor,
        u: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """x Sᵀ, or x Sᵀ + x vᵀ uᵀ: (tokens, in) → (tokens, out); all of x's dtype."""
        if not is_traced(x) and len(x) <= MOST:
            return add_low_rank(self.few_product(x), x, u, v)
        out, width = self.codes.shape
        height = max(1, TILE_BYTES // (4 * width))
        parts = []
        for first in range(0, out, height):
            rows = slice(first, first + height)
            scale = self.scale[rows].unsqueeze(-1)
            codes = self.codes[rows].view(*self.scale[rows].shape, -1)
            values = torch.addcmul(self.centre[rows].unsqueeze(-1), codes.float(), scale)
            parts.append(linear(x, values.flatten(1).to(x.dtype)))
        return add_low_rank(torch.cat(parts, 1), x, u, v)
