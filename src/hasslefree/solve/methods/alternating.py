"""Alternating minimisation: any pruner with any low-rank solver (arXiv 2502.00899, Algorithm 2).

    S ← prune(W − L),   L ← fit(W − S)

HASSLE-free is SparseGPT with Adam, OATS is Wanda with a truncated SVD in the norm of diag H, and
`solve.methods` names more published methods as such pairs.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import LowRankSolver, Method, Pruned, Pruner, Solution
from hasslefree.errors import NonFiniteError, option, with_arguments
from hasslefree.solve.low_rank.adam import Adam
from hasslefree.solve.objective import Objective
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from hasslefree.validation import Figure, Positive

REMEDY = (
    f"raise the damping ({option('damping', 0.01)}) or use another low-rank solver"
    f" ({option('low_rank', 'exact')})"
)

# H, damped; and the results of `prepare` of the pruner and of the low-rank solver.
Prepared = tuple[Gram, Any, Any]


@dataclass(frozen=True)
class AlternatingMinimization(Method):
    """Repeat S ← prune(W − L), L ← fit(W − S). The defaults are those of the paper.

    Args:
        pruner, low_rank: the two halves.
        rounds: T_AM in the paper.
        damping: λ over the mean of diag H. The paper prints λ = 0.01·Tr(H), but refers to the
            default of SparseGPT, which uses the mean.
        low_rank_first: fit L to W before S is pruned for the first time, as OATS does.
        keep_best: return the round with the smallest damped objective, or the pruner alone if no
            round is better; False returns the last round.
        last_fit: fit L once more at the end, to W minus the S that was kept, if this lowers the
            objective; for `low_rank_first`, where rounds end with S.

    Example:
        >>> method = AlternatingMinimization(pruner=SparseGPT(), low_rank=Adam(steps=50), rounds=80)
        >>> hasslefree.decompose(weight, gram, pattern="2:4", rank=64, method=method)
    """

    pruner: Pruner = SparseGPT()
    low_rank: LowRankSolver = Adam()
    rounds: Positive = 80
    damping: Figure = 0.01
    low_rank_first: bool = False
    keep_best: bool = True
    last_fit: bool = False

    @property
    def inner(self) -> Pruner:
        return self.pruner

    def start(self, weight: Tensor, rank: int, seed: int) -> LowRank:
        return self.low_rank.start(weight, rank, seed)

    def prepare(self, gram: Gram) -> Prepared:
        damped = gram.damped(self.damping)
        return damped, self.pruner.prepare(damped), self.low_rank.prepare(damped)

    def solve(
        self,
        weight: Tensor,
        prepared: Prepared,
        pattern: Pattern,
        start: LowRank,
    ) -> Solution:
        gram, for_pruner, for_solver = prepared
        objective = Objective(weight, gram)
        if start.rank == 0:
            return objective.measure(self.pruner.prune(weight, for_pruner, pattern), start)
        best, history = self._alternate(objective, prepared, pattern, start)
        remarks = best.remarks
        if self.last_fit:
            target = weight - best.sparse
            low_rank = self.low_rank.fit(target, for_solver, best.low_rank, len(history))
            last = objective.measure(Pruned(best.sparse, best.scaling), low_rank)
            if last.error < best.error:
                best = last
                history.append(last.error)
        if best.error and not (best.low_rank.u.any() and best.low_rank.v.any()):
            remarks += ("no round was better than the pruner alone: L is zero",)
        return replace(best, history=tuple(history), remarks=remarks)

    def _alternate(
        self,
        objective: Objective,
        prepared: Prepared,
        pattern: Pattern,
        start: LowRank,
    ) -> tuple[Solution, list[float]]:
        """Run the rounds.

        Args:
            start: the first L.

        Returns:
            The best round, or the last one without `keep_best`; and the objective of each round.
        """
        _, for_pruner, for_solver = prepared
        weight = objective.weight
        low_rank = start
        pruned = Pruned(torch.zeros_like(weight))
        best = Solution(pruned.sparse, low_rank, (math.inf,))
        history: list[float] = []
        for t in range(self.rounds):
            if self.low_rank_first:
                low_rank = self.low_rank.fit(weight - pruned.sparse, for_solver, low_rank, t)
            pruned = self.pruner.prune(weight - low_rank.product(), for_pruner, pattern)
            if not self.low_rank_first:
                if t == 0:
                    # Adam's steps have a fixed size and can overshoot: the result must not be worse
                    # than the pruner alone.
                    best = objective.measure(pruned, low_rank)
                low_rank = self.low_rank.fit(weight - pruned.sparse, for_solver, low_rank, t)
            last = objective.measure(pruned, low_rank)
            if not math.isfinite(last.error):
                if math.isinf(best.error) or not self.keep_best:
                    raise NonFiniteError(f"NaN or Inf appeared in round {t + 1}; {REMEDY}")
                remark = (
                    f"NaN or Inf appeared in round {t + 1}, so the best earlier round is returned; "
                    f"{with_arguments(REMEDY)}"
                )
                best = replace(best, remarks=(remark,))
                break
            history.append(last.error)
            if last.error < best.error or not self.keep_best:
                best = last
        return best, history
