"""3BASiL: ADMM over three blocks, Z, S and L (Makni, Meng, Mazumder, arXiv 2603.01376)."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import lower_cholesky
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method, Solution
from hasslefree.solve.admm import ScaledSpectrum, SupportPenalty
from hasslefree.solve.low_rank.svd import RandomizedSVD
from hasslefree.validation import Figure

# H, damped; its scaled spectrum; and the Cholesky factor of the scaled H.
Prepared = tuple[Gram, ScaledSpectrum, Tensor]


@dataclass
class WhitenedFit:
    """The fit of L to a target T in the norm of H = C Cᵀ, by a randomised SVD of T C.

    Args:
        svd: the SVD in whitened space.
        factor: C, (in, in).
        low_rank: the L of the last target.
    """

    svd: RandomizedSVD
    factor: Tensor
    low_rank: LowRank

    def __call__(self, target: Tensor) -> Tensor:
        """L for a target (out, in), as a matrix (out, in)."""
        if self.low_rank.rank:
            white = self.svd.fit(target @ self.factor, None, self.low_rank, 0)
            v = torch.linalg.solve_triangular(self.factor, white.v, upper=False, left=False)
            self.low_rank = LowRank(white.u, v)
        return self.low_rank.product()


@dataclass(frozen=True)
class ThreeBlock(Method):
    """One round minimises over Z, then S, updates the dual, and fits L to W − Z; the
    hyper-parameters are the authors'.

    L minimises tr((W−Z−L) H (W−Z−L)ᵀ). The authors whiten with an eigendecomposition of H in place
    of the Cholesky factor, which gives the same L. With rank 0 the method is ALPS without the
    refit.

    Args:
        penalty: how ρ grows, and when to stop.
        damping: λ over the mean of diag H.
        svd: of W − Z in whitened space.
    """

    penalty: SupportPenalty = SupportPenalty(
        0.1, every=10, most=2000, growth=(1.1, 1.05, 1.02), settled=100
    )
    damping: Figure = 0.01
    svd: RandomizedSVD = RandomizedSVD(oversampling=5, iterations=2)

    def prepare(self, gram: Gram) -> Prepared:
        damped = gram.damped(self.damping)
        spectrum = ScaledSpectrum.of(damped)
        factor = lower_cholesky(spectrum.matrix).to(spectrum.matrix.dtype)
        return damped, spectrum, factor

    def solve(
        self,
        weight: Tensor,
        prepared: Prepared,
        pattern: Pattern,
        rank: int,
        generator: Generator,
    ) -> Solution:
        gram, spectrum, factor = prepared
        fit = WhitenedFit(self.svd, factor, LowRank.gaussian_start(weight, rank, generator))
        scaled = weight * spectrum.scale
        if pattern.kept((weight.shape[0], weight.shape[1])):
            dense = self.penalty.run(scaled, spectrum, pattern, fit)
        else:  # no support that could move
            dense = torch.zeros_like(weight)
            fit(scaled)
        sparse = dense * pattern.mask(dense.square()) / spectrum.scale
        low_rank = LowRank(fit.low_rank.u, fit.low_rank.v / spectrum.scale)
        error = gram.relative_error(low_rank.residual(weight, sparse), weight)
        return Solution(sparse, low_rank, (error,))
