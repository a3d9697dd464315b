"""3BASiL: ADMM over three blocks, Z, S and L (Makni, Meng, Mazumder, arXiv 2603.01376)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import lower_cholesky
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method, Pruned, Solution
from hasslefree.solve.admm import ScaledSpectrum, SupportPenalty
from hasslefree.solve.low_rank.svd import Exact, RandomizedSVD
from hasslefree.solve.objective import Objective
from hasslefree.validation import Figure

# H, damped; its scaled spectrum; and the Cholesky factor of the scaled H.
Prepared = tuple[Gram, ScaledSpectrum, Tensor]


@dataclass(frozen=True)
class ThreeBlock(Method):
    """Each round minimises over Z, then S, updates the dual, and fits L to W − Z. The defaults are
    those of the authors.

    L minimises tr((W−Z−L) H (W−Z−L)ᵀ). The authors whiten with an eigendecomposition of H instead
    of the Cholesky factor, which gives the same L. At rank 0, the method is ALPS without the refit.

    Args:
        penalty: how ρ grows, and when to stop.
        damping: λ over the mean of diag H.
        svd: the SVD of W − Z in whitened space.
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
        start: LowRank,
    ) -> Solution:
        gram, spectrum, factor = prepared
        exact = Exact(self.svd)

        def fit(target: Tensor) -> LowRank:
            if start.rank == 0:
                return start
            return exact.fit(target, factor, start, 0)

        scaled = weight * spectrum.scale
        if pattern.kept(weight.shape):
            dense, low_rank = self.penalty.run(scaled, spectrum, pattern, start, fit)
        else:  # no support that could change
            dense = torch.zeros_like(weight)
            low_rank = fit(scaled)
        sparse = dense * pattern.mask(dense.square()) / spectrum.scale
        low_rank = LowRank(low_rank.u, low_rank.v / spectrum.scale)
        return Objective(weight, gram).measure(Pruned(sparse), low_rank)
