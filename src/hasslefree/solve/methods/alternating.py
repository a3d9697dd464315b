"""Alternating minimisation: any pruner with any low-rank solver (arXiv 2502.00899, Algorithm 2)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hasslefree.core.cost import Cost
from hasslefree.core.gram import Gram, relative
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import LowRankSolver, Method, Pruned, Pruner, Solution
from hasslefree.errors import NonFiniteError, option, with_arguments
from hasslefree.solve.low_rank.adam import Adam
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from hasslefree.validation import Figure, Positive

REMEDY = (
    f"raise the damping ({option('damping', 0.01)}) or use another low-rank solver"
    f" ({option('low_rank', 'exact')})"
)

# H, damped, and what the pruner and the low-rank solver prepared.
Prepared = tuple[Gram, Any, Any]


@dataclass(frozen=True)
class AlternatingMinimization(Method):
    """S ← prune(W − L), L ← fit(W − S), over and over. The defaults are the paper's.

    Args:
        pruner, low_rank: the two halves.
        rounds: T_AM in the paper.
        damping: λ over the mean of diag H. The paper prints λ = 0.01·Tr(H); SparseGPT's default,
            which it refers to, is the mean.
        low_rank_first: fit L to W before S is pruned for the first time, as OATS does.
        keep_best: return the round with the least damped objective, or the pruner alone if no round
            is better; False returns the last round.
        last_fit: fit L once more at the end, to W minus the S that was kept, where that lowers the
            objective. For alternations that end with S.

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

    def prepare(self, gram: Gram) -> Prepared:
        damped = gram.damped(self.damping)
        return damped, self.pruner.prepare(damped), self.low_rank.prepare(damped)

    def solve(
        self,
        weight: Tensor,
        prepared: Prepared,
        pattern: Pattern,
        rank: int,
        generator: Generator,
    ) -> Solution:
        gram, for_pruner, for_solver = prepared
        low_rank = LowRank.gaussian_start(weight, rank, generator)
        norm = gram.loss(weight)
        if rank == 0:
            alone = self.pruner.prune(weight, for_pruner, pattern)
            error = relative(gram.loss(weight - alone.sparse), norm)
            return Solution(alone.sparse, low_rank, (error,), scaling=alone.scaling)
        pruned = Pruned(torch.zeros_like(weight))
        best: tuple[Pruned, LowRank] = pruned, low_rank
        least = float("inf")
        history: list[float] = []
        remarks: list[str] = []
        for t in range(self.rounds):
            if self.low_rank_first:
                low_rank = self.low_rank.fit(weight - pruned.sparse, for_solver, low_rank, t)
                pruned = self.pruner.prune(weight - low_rank.product(), for_pruner, pattern)
            else:
                pruned = self.pruner.prune(weight - low_rank.product(), for_pruner, pattern)
                if t == 0:
                    # The pruner alone is the first candidate: Adam's steps have a fixed size, and
                    # can overshoot.
                    best, least = (
                        (pruned, low_rank),
                        relative(gram.loss(weight - pruned.sparse), norm),
                    )
                low_rank = self.low_rank.fit(weight - pruned.sparse, for_solver, low_rank, t)
            error = relative(gram.loss(low_rank.residual(weight, pruned.sparse)), norm)
            if not math.isfinite(error):
                if math.isinf(least) or not self.keep_best:
                    raise NonFiniteError(f"NaN or Inf appeared in round {t + 1}; {REMEDY}")
                remarks.append(
                    f"NaN or Inf appeared in round {t + 1}, so the best earlier round is returned; "
                    f"{with_arguments(REMEDY)}"
                )
                break
            history.append(error)
            if error < least or not self.keep_best:
                best, least = (pruned, low_rank), error
        pruned, low_rank = best
        if self.last_fit:
            last = self.low_rank.fit(weight - pruned.sparse, for_solver, low_rank, len(history))
            error = relative(gram.loss(last.residual(weight, pruned.sparse)), norm)
            low_rank, history = (last, [*history, error]) if error < least else (low_rank, history)
        if least and not low_rank.v.any():
            remarks.append("no round was better than the pruner alone: L is zero")
        return Solution(pruned.sparse, low_rank, tuple(history), tuple(remarks), pruned.scaling)

    @property
    def cost(self) -> Cost:
        """Each round runs both parts and measures the objective."""
        prune, fit = self.pruner.cost, self.low_rank.cost
        return prune.joined(fit, self.rounds * (prune.flops + fit.flops + 2))
