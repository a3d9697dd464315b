"""ALPS: ADMM on the support, then conjugate gradients on it (Meng et al., arXiv 2406.07831)."""

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import masked_cg
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.solve.admm import ScaledSpectrum, SupportPenalty


@dataclass(frozen=True)
class ALPS(Pruner):
    """S by ADMM with a penalty that grows while the support changes (algorithm 1). The defaults are
    those of the authors.

    Args:
        penalty: how ρ grows, and when to stop.
        cg_steps: the number of steps of the refit on the support of the ADMM.
    """

    penalty: SupportPenalty = SupportPenalty(
        0.1, every=3, most=300, growth=(1.3, 1.2, 1.1), settled=30
    )
    cg_steps: int = 10

    def prepare(self, gram: Gram) -> ScaledSpectrum:
        return ScaledSpectrum.of(gram)

    def prune(
        self,
        target: Tensor,
        prepared: ScaledSpectrum,
        pattern: Pattern,
    ) -> Pruned:
        if pattern.kept(target.shape) == target.numel():
            return Pruned(target.clone())  # nothing to remove; the support could not change
        weight = target * prepared.scale
        nothing = LowRank.gaussian_start(weight, 0, 0)
        dense, _ = self.penalty.run(weight, prepared, pattern, nothing, lambda _: nothing)
        mask = pattern.mask(dense.square())
        refitted = masked_cg(prepared.matrix, weight, dense * mask, mask, self.cg_steps)
        return Pruned(refitted / prepared.scale)
