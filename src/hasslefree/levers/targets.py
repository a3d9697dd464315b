"""Dense targets: the weight whose output, on the inputs of the compressed model, is closest to the dense model's.

The inputs X̂ of a layer come from compressed blocks; the output that is wanted is the dense model's, X Wᵀ. Blend the
two inputs, X_a = (1 − a)X̂ + aX, and take the W̃ that minimises

    ‖X̂ W̃ᵀ − X_a Wᵀ‖² / tokens + λ‖W̃ − W‖²

The gradient vanishes where W̃ (H + λI) = W (X_aᵀX̂/tokens + λI), H = X̂ᵀX̂/tokens. With the drift D = X̂ᵀ(X − X̂)/tokens,
X_aᵀX̂/tokens = H + aDᵀ, so

    W̃ = W + a · W Dᵀ (H + λI)⁻¹

which is W((1−a)H + aC + λI)ᵀ(H + λI)⁻¹ for C = X̂ᵀX/tokens = H + D. For a = 1 and λ = 0, and S + L = W̃ − R,

    ‖X̂ (S + L)ᵀ − X Wᵀ‖² / tokens = tr(R H Rᵀ) + what no choice of S and L can change

so that a solver that is given W̃ and H in the place of W and H minimises the distance to the dense output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import lower_cholesky
from hasslefree.errors import ShapeError

# λ over the mean of diag H is at least the first, and at least the second times inputs over tokens: the correction is a
# regression with `in` unknowns a row, and with few tokens it follows their noise.
LEAST_DAMPING, NOISE = 0.01, 0.3


def target_damping(gram: Gram) -> float:
    """λ over the mean of diag H for `drift_correction`."""
    return max(LEAST_DAMPING, NOISE * gram.matrix.shape[0] / gram.tokens)


def drift_correction(gram: Gram, drift: Tensor, share: float, damping: float) -> Tensor:
    """M = a · Dᵀ (H + λI)⁻¹, so that W̃ = W + W M; shared by all layers with the same input.

    Args:
        gram: H, (in, in), of the inputs X̂ in the compressed model.
        drift: D = X̂ᵀ(X − X̂) / tokens, (in, in), X: the inputs in the dense model.
        share: a, from 0 (W̃ = W) to 1. damping: λ over the mean of diag H.

    Returns:
        (in, in), in the dtype of H. An input that is always zero in X̂ gets nothing.

    Raises:
        ShapeError: H and D differ in shape. FactorizationError: H + λI is not positive definite.
    """
    if drift.shape != gram.matrix.shape:
        raise ShapeError(
            f"drift must have the shape of the Gram matrix {tuple(gram.matrix.shape)}, got {tuple(drift.shape)}"
        )
    factor = lower_cholesky(gram.damped(damping).matrix)
    # H + λI is symmetric: Dᵀ(H + λI)⁻¹ = ((H + λI)⁻¹D)ᵀ. Rows of D at inputs that are always zero are zero.
    return (share * torch.cholesky_solve(drift.to(factor.dtype), factor).T).to(gram.matrix.dtype)


def corrected(weight: Tensor, correction: Tensor) -> Tensor:
    """W̃ = W + W M: (out, in), in the dtype of the correction, which is the solvers' working dtype."""
    full = weight.to(correction.dtype)
    return full + full @ correction
