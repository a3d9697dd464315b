"""The objective of a layer, for methods that compare several solutions."""

from torch import Tensor

from hasslefree.core.gram import Gram, relative
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Pruned, Solution


class Objective:
    """tr(R H Rᵀ) / tr(W H Wᵀ) with R = W − S − L.

    Args:
        weight: W, (out, in).
        gram: H, damped.
    """

    def __init__(self, weight: Tensor, gram: Gram):
        self.weight = weight
        self.gram = gram
        self.norm = gram.loss(weight)

    def measure(self, pruned: Pruned, low_rank: LowRank) -> Solution:
        """Return S and L as a solution, with the objective as its history."""
        loss = self.gram.loss(low_rank.residual(self.weight, pruned.sparse))
        error = relative(loss, self.norm)
        return Solution(pruned.sparse, low_rank, (error,), scaling=pruned.scaling)
