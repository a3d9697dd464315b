"""A layer with its arrays prepared for Numba: for few tokens the product is so short that Python's overhead counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hasslefree.packed.kernels.ops import FEW, numba_kernels, numbers_of


class Prepared:
    """y = x (S + u v)ᵀ + b for a layer with the pattern 2:4 on a CPU, and at most `FEW` tokens.

    The arrays share the memory of the tensors: changes in place take effect here.

    Args:
        key: of the tensors, by which the caller sees that they were replaced.
        values: (out, in/2) and positions: (out, ⌈in/8⌉), of S. factors: u: (out, r) and v: (r, in), or None.
        bias: (out,), or None. All but the positions in one dtype, float32 or bfloat16, and all contiguous.
    """

    def __init__(
        self,
        key: tuple[int, ...],
        values: Tensor,
        positions: Tensor,
        factors: tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
    ):
        self.key, self.out = key, len(values)
        u, v = factors or (values.new_empty(self.out, 0), values.new_empty(0, 2 * values.shape[1]))
        numbers = [numbers_of(each.detach()) for each in (u, v, values.new_empty(0) if bias is None else bias)]
        self.arrays = (numbers_of(values.detach()), positions.numpy(), *numbers)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (..., in) → (..., out)."""
        y = torch.empty(*x.shape[:-1], self.out, dtype=x.dtype)
        arrays = (self._array(each) for each in (x.contiguous(), y))
        kernels = numba_kernels()
        kernels.layer_2_4(*self.arrays, *arrays, kernels.WIDE)
        return y

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a layer prepares its own arrays."""
        return type(None), ()

    def _array(self, tensor: Tensor) -> Any:
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        return bits.numpy().reshape(-1, tensor.shape[-1])


def takes_few(x: Tensor, values: Tensor) -> bool:
    """Whether x: (..., in) can be multiplied by a `Prepared` layer with these values."""
    alike = x.dtype == values.dtype and x.dtype in (torch.float32, torch.bfloat16)
    return alike and x.numel() <= FEW * x.shape[-1] and x.device.type == values.device.type == "cpu"
