"""A pruner alone: W ≈ S."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method, Pruner, Solution
from hasslefree.errors import BudgetError
from hasslefree.solve.objective import Objective
from hasslefree.validation import Figure

# H, damped; and the result of `prepare` of the pruner.
Prepared = tuple[Gram, Any]


@dataclass(frozen=True)
class Prune(Method):
    """S ← prune(W), and no low-rank part.

    Args:
        pruner: any pruner.
        damping: λ over the mean of diag H.
    """

    pruner: Pruner
    damping: Figure = 0.01

    @property
    def inner(self) -> Pruner:
        return self.pruner

    def check(self, rank: int) -> None:
        if rank:
            other = "caldera" if self.grid else "joint"
            raise BudgetError(
                f"{type(self.pruner).__name__} only prunes and has no low-rank part, so rank must"
                f" be 0, got {rank}; use rank 0, or a method with a low-rank part, such as {other}",
                ("rank", "method"),
            )

    def prepare(self, gram: Gram) -> Prepared:
        damped = gram.damped(self.damping)
        return damped, self.pruner.prepare(damped)

    def solve(
        self,
        weight: Tensor,
        prepared: Prepared,
        pattern: Pattern,
        start: LowRank,
    ) -> Solution:
        gram, for_pruner = prepared
        pruned = self.pruner.prune(weight, for_pruner, pattern)
        return Objective(weight, gram).measure(pruned, start)
