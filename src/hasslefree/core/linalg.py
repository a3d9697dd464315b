"""Factorisations of a damped Gram. Each is computed in float64 and cast once: they are ill-conditioned and rare."""

from __future__ import annotations

import torch
from torch import Tensor

from hasslefree.errors import FactorizationError


def lower_cholesky(matrix: Tensor) -> Tensor:
    """C with matrix = C Cᵀ: (n, n), lower triangular, in float64.

    Raises:
        FactorizationError: the matrix is not positive definite.
    """
    factor, info = torch.linalg.cholesky_ex(matrix.double())
    if info.item() != 0:
        raise FactorizationError(
            f"the damped Gram ({len(matrix)}×{len(matrix)}) is not positive definite; "
            "raise the damping or use more calibration tokens than inputs"
        )
    return factor


def inverse_factor(matrix: Tensor) -> Tensor:
    """The upper U with matrix⁻¹ = UᵀU: (n, n), in the dtype of `matrix`.

    It is the inverse of a triangle: matrix = A Aᵀ with A upper (a Cholesky factor of the flipped matrix),
    so that matrix⁻¹ = A⁻ᵀA⁻¹ and U = A⁻¹. The inverse of `matrix` is never formed.
    """
    upper = lower_cholesky(matrix.flip(0, 1)).flip(0, 1)
    identity = torch.eye(len(matrix), dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, identity, upper=True).to(matrix.dtype)


def unit_diagonal_scale(diagonal: Tensor) -> Tensor:
    """D = diag(H)^½: (in,), with 1 in the place of a zero so that it can be divided by."""
    return torch.where(diagonal > 0, diagonal, 1.0).sqrt()
