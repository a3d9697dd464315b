"""x Sᵀ on a CPU for S in symmetric 8-bit codes with one scale per row, by torch's operator for such
codes, which is fast in bfloat16 only.

The operator is fast for a few tokens. For more tokens, a few rows of S at a time are unpacked.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.coder import MIDDLE
from hasslefree.core.grids import Grid
from hasslefree.core.products import linear, multiplies_slowly, tiles
from hasslefree.packed.kernels import interleaved
from hasslefree.packed.kernels.factors import add_low_rank
from hasslefree.packed.kernels.ops import operator

# The most tokens for which the operator is used: for more, unpacking S is faster with AVX2.
MOST = 16
# Bytes of the rows of S that are unpacked together, in float32.
TILE_BYTES = 4 << 20
# The number of inputs must be a multiple of this: the operator reads 32 codes at once, and
# would read beyond the end of a row.
INPUTS = 32


@dataclass(frozen=True)
class Int8:
    """S (out, in) = codes · scale.

    Args:
        codes: minus the code of zero, int8 (out, in).
        scale: (out,), bfloat16.
    """

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor) -> "Int8":
        """Convert codes, uint8 (out, in), and scales, (out, 1)."""
        return cls((codes - MIDDLE).view(torch.int8), scale.flatten().bfloat16())

    @property
    def bytes(self) -> int:
        """Memory used by codes and scales, in bytes."""
        return bytes_of(*self.codes.shape)

    def all_codes(self) -> Tensor:
        """The codes, uint8 (out, in)."""
        return self.codes.view(torch.uint8) + MIDDLE

    def codes_of_rows(self, rows: Tensor) -> Tensor:
        """The codes of selected rows: indices (rows,) → uint8 (rows, in)."""
        return self.codes[rows].view(torch.uint8) + MIDDLE

    def few_product(self, x: Tensor) -> Tensor:
        """x Sᵀ for a few tokens: (tokens, in) → (tokens, out), bfloat16."""
        return torch._weight_int8pack_mm(x.contiguous(), self.codes, self.scale)

    def product(
        self,
        x: Tensor,
        u: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """x Sᵀ, or x Sᵀ + x vᵀ uᵀ: (tokens, in) → (tokens, out); all bfloat16."""
        return int8_product(x, self.codes, self.scale, u, v)


def bytes_of(out: int, width: int) -> int:
    """Memory used by codes (out, width) and scales, in bytes."""
    return out * width + out * torch.bfloat16.itemsize


@operator(rows=0)
def int8_product(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """`Int8.product` as a function of tensors."""
    if len(x) <= MOST:
        return add_low_rank(Int8(codes, scale).few_product(x), x, u, v)
    dtype = torch.float32 if multiplies_slowly(x.dtype, x.device) else x.dtype
    inputs = x.to(dtype)
    out, width = codes.shape
    y = x.new_empty(len(x), out)
    # Sums of unscaled codes are large: autocast to float16 would make them infinite.
    with torch.autocast("cpu", enabled=False):
        for rows in tiles(out, TILE_BYTES // (4 * width)):
            y[:, rows] = linear(inputs, codes[rows].to(dtype)) * scale[rows]
    return add_low_rank(y, x, u, v)


def obstacle(
    device: str,
    dtype: torch.dtype,
    grid: Grid,
    shape: tuple[int, int],
) -> str | None:
    """The reason why the operator cannot multiply S (out, in) on this grid; None if it can."""
    if device != "cpu":
        return f"torch's operator runs on a CPU, and the layer is on {device}"
    if dtype != torch.bfloat16:
        return (
            "torch's operator for codes of 8 bits is fast with bfloat16 only, and the layer has"
            f" {dtype}"
        )
    if not (grid.symmetric and grid.bits == 8 and grid.group is None):
        return f"torch's operator takes symmetric codes of 8 bits in rows, and the layer has {grid}"
    if shape[1] % INPUTS:
        return f"torch's operator takes a multiple of {INPUTS} inputs, and the layer has {shape[1]}"
    return without()


@functools.cache
def without() -> str | None:
    """The reason why the operator cannot be used on this processor; None if it can."""
    if interleaved.CAPABILITY not in interleaved.BLOCKS:
        return (
            "torch's operator for codes of 8 bits is fast with AVX2 or AVX-512, and torch uses"
            f" {interleaved.CAPABILITY}"
        )
    if not hasattr(torch, "_weight_int8pack_mm"):
        return f"torch {torch.__version__} has no operator for codes of 8 bits; update torch"
    return None
