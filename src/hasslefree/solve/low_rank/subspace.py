"""The optimum for the full H by warm-started subspace iteration: a fraction of the cost of an
SVD.
"""

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import orthonormal
from hasslefree.core.low_rank import LowRank, subspace_steps
from hasslefree.core.protocols import LowRankSolver


@dataclass(frozen=True)
class Subspace(LowRankSolver):
    """Steps of orthogonal iteration (`subspace_steps`) from the basis of the round before; from
    noise in the first.

    Args:
        steps: the iterations of a round.
        first_steps: the iterations of the first round.
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
