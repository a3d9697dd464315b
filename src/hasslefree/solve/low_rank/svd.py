"""Truncated SVD, the optimum for H = I (Eckart–Young), exact or randomised; and the optima for a
diagonal H and for the full H, by whitening.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import lower_cholesky, orthonormal, unit_diagonal_scale
from hasslefree.core.low_rank import LowRank, truncated_svd
from hasslefree.core.protocols import LowRankSolver


@dataclass(frozen=True)
class SVD(LowRankSolver):
    """L = C_r(T). H is not used."""

    def fit(
        self,
        target: Tensor,
        prepared: None,
        start: LowRank,
        round: int,
    ) -> LowRank:
        return truncated_svd(target, start.rank)


@dataclass(frozen=True)
class RandomizedSVD(LowRankSolver):
    """L = Q·C_r(QᵀT), with Q an orthonormal basis of the range of (T Tᵀ)^p T Ω (Halko et al., arXiv
    0909.4061, 4.4).

    Args:
        oversampling: the number of columns of Ω beyond the rank.
        iterations: p, the number of power iterations; more are closer to the truncated SVD.
        seed: the seed of Ω, which is drawn again for every fit.
    """

    oversampling: int = 10
    iterations: int = 2
    seed: int = 0

    def fit(
        self,
        target: Tensor,
        prepared: None,
        start: LowRank,
        round: int,
    ) -> LowRank:
        columns = min(start.rank + self.oversampling, min(target.shape))
        generator = torch.Generator().manual_seed(self.seed)
        omega = torch.randn(target.shape[1], columns, generator=generator).to(target)
        basis = orthonormal(target @ omega)
        for _ in range(self.iterations):
            basis = orthonormal(target @ orthonormal(target.T @ basis))
        small = truncated_svd(basis.T @ target, start.rank)
        return LowRank(basis @ small.u, small.v)


@dataclass(frozen=True)
class DiagonalSVD(LowRankSolver):
    """L = C_r(T D) D⁻¹ with D = diag(H)^½: the optimum for a diagonal H (arXiv 2502.00899, theorem
    3.1; OATS).

    Args:
        svd: the SVD that computes C_r: exact, or randomised.
    """

    svd: SVD | RandomizedSVD = SVD()

    def prepare(self, gram: Gram) -> Tensor:
        return unit_diagonal_scale(gram.diagonal)

    def fit(
        self,
        target: Tensor,
        prepared: Tensor,
        start: LowRank,
        round: int,
    ) -> LowRank:
        scaled = self.svd.fit(target * prepared, None, start, round)
        return LowRank(scaled.u, scaled.v / prepared)


@dataclass(frozen=True)
class Exact(LowRankSolver):
    """L = C_r(T C) C⁻¹ with H = C Cᵀ, because tr((T−L) H (T−L)ᵀ) = ‖(T−L) C‖².

    The paper (arXiv 2502.00899) approaches this point by Adam. EoRA (arXiv 2410.21271) takes the
    same step with an eigendecomposition of H instead of the Cholesky factor.

    Args:
        svd: the SVD that computes C_r: exact, or randomised.
    """

    svd: SVD | RandomizedSVD = SVD()

    def prepare(self, gram: Gram) -> Tensor:
        return lower_cholesky(gram.matrix).to(gram.matrix.dtype)

    def fit(
        self,
        target: Tensor,
        prepared: Tensor,
        start: LowRank,
        round: int,
    ) -> LowRank:
        white = self.svd.fit(target @ prepared, None, start, round)
        v = torch.linalg.solve_triangular(prepared, white.v, upper=False, left=False)
        return LowRank(white.u, v)
