"""The problem of `joint` in units where one penalty suits all inputs, and its kernels
K = H(H + ρI)⁻¹.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hasslefree.core import linalg
from hasslefree.core.gram import Gram

# The most bytes of kernels that are cached for the next layer with the same input. On a CPU this is
# little: the widest layers, with the largest kernels, often share their input with no other layer.
CACHE = {"cpu": 1 << 27, "cuda": 1 << 31}


@dataclass(frozen=True)
class ScaledProblem:
    """The part of the problem that depends on the Gram alone, in units where one penalty suits all
    inputs.

    Args:
        scale: D, (in,).
        gram: D⁻¹HD⁻¹.
        dtype: the dtype of the kernels.
        kernels: the cached K, by ρ.
    """

    scale: Tensor
    gram: Gram
    dtype: torch.dtype
    kernels: dict[float, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def kernel(self, rho: float) -> Tensor:
        """Return K = H(H + ρI)⁻¹ = I − ρ(H + ρI)⁻¹, (in, in), cached while there is room."""
        if rho in self.kernels:
            return self.kernels[rho]
        shifted = self.gram.matrix.clone()
        shifted.diagonal().add_(rho)
        inverse = linalg.inverse_(shifted).mul_(-rho)
        inverse.diagonal().add_(1)
        kernel = inverse.to(self.dtype)
        if (len(self.kernels) + 1) * kernel.nbytes <= cache_bytes(kernel.device.type):
            self.kernels[rho] = kernel
        return kernel


def cache_bytes(device: str) -> int:
    """Return the most bytes that cached kernels may take on a type of device."""
    return CACHE.get(device, CACHE["cpu"])


def refit_scale(gram: Gram) -> Tensor:
    """Return D, (in,), with D² = 1/[H⁻¹]_jj, for a positive semi-definite H (in, in) with a
    positive diagonal.
    """
    diagonal = linalg.unit_diagonal_scale(gram.diagonal)
    unit = gram.scaled(diagonal).matrix
    unit.diagonal().add_(1e-2)
    return diagonal * linalg.inverse_(unit).diagonal().rsqrt()
