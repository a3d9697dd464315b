"""The optimum for the full H by warm-started subspace iteration, far cheaper than an SVD."""

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import orthonormal
from hasslefree.core.low_rank import LowRank, subspace_steps
from hasslefree.core.protocols import LowRankSolver


@dataclass(frozen=True)
class Subspace(LowRankSolver):
    """Orthogonal iteration (`subspace_steps`) from the basis of the previous round; from noise in
    the first round.

    Args:
        steps: the number of iterations per round.
        first_steps: the number of iterations in the first round.
    """

    steps: int = 1
    first_steps: int = 4

    def prepare(self, gram: Gram) -> Tensor:
        return gram.matrix

    def fit(
        self,
        target: Tensor,
        prepared: Tensor,
        start: LowRank,
        round: int,
    ) -> LowRank:
        if round == 0:
            return subspace_steps(target, prepared, orthonormal(start.u), self.first_steps)
        return subspace_steps(target, prepared, start.u, self.steps)
