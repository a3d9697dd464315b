"""The product with L, added to y = x Sᵀ by torch, or for a few tokens on a CPU by Numba."""

from typing import Any

import torch
from torch import Tensor

from hasslefree.core.products import add_product, linear
from hasslefree.packed.kernels.arrays import as_numpy


def add_low_rank(
    y: Tensor,
    x: Tensor,
    u: Tensor | None,
    v: Tensor | None,
) -> Tensor:
    """y + x vᵀ uᵀ, for y (tokens, out) and x (..., in); y if there are no factors.

    In place, unless the dtypes differ because of autocast: for a long prompt, allocating memory
    takes longer than the product.
    """
    if u is None or v is None:
        return y
    hidden = linear(x, v).reshape(-1, len(v))
    if y.dtype == hidden.dtype == u.dtype:
        return add_product(y, hidden, u)
    return y.addmm(hidden, u.T)


class FactorArrays:
    """L and a bias as arrays, contiguous, for a few tokens in bfloat16.

    Args:
        u: (out, r) in bfloat16, or int8 codes.
        v: (r, in), likewise.
        u_scale, v_scale: the scales of codes, (out,) and (r,); None without codes.
        bias: (out,), or None.
    """

    def __init__(
        self,
        u: Tensor,
        v: Tensor,
        u_scale: Tensor | None,
        v_scale: Tensor | None,
        bias: Tensor | None,
    ):
        self.arrays = (
            as_numpy(v.contiguous()),
            floats_of(v_scale),
            as_numpy(u.contiguous()),
            floats_of(u_scale),
            floats_of(bias),
        )

    def add(self, x: Tensor, y: Tensor) -> None:
        """y += x vᵀ uᵀ + b, for x (tokens, in) and y (tokens, out), both contiguous."""
        from hasslefree.packed.kernels.nibbles import add_low_rank

        add_low_rank(x.data_ptr(), y.data_ptr(), len(x), *self.arrays)


def floats_of(numbers: Tensor | None) -> Any:
    """A tensor as an array of float32; an empty array for None."""
    if numbers is None:
        numbers = torch.empty(0)
    return as_numpy(numbers.float().contiguous())
