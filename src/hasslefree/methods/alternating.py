"""Alternating minimisation: any pruner with any low-rank solver (arXiv 2502.00899, Algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import LowRankSolver, Pruner, Solution
from hasslefree.errors import BudgetError, NonFiniteError
from hasslefree.low_rank_solvers.adam import Adam
from hasslefree.pruners.sparsegpt import SparseGPT

REMEDY = "raise the damping (--damping 0.01) or take another low-rank solver (--low-rank exact)"


@dataclass(frozen=True)
class AlternatingMinimization:
    """S ← prune(W − L), L ← fit(W − S), over and over. The defaults are the paper's.

    Args:
        pruner, low_rank: the two halves.
        rounds: T_AM in the paper.
        damping: λ over the mean of diag H. The paper prints λ = 0.01·Tr(H); SparseGPT's default, which it refers to,
            is the mean.
        low_rank_first: fit L to W before S is pruned for the first time, as OATS does.
        keep_best: return the round with the least damped objective, or the pruner alone if no round is better; not the
            last round.

    Example:
        >>> method = AlternatingMinimization(pruner=SparseGPT(), low_rank=Adam(steps=50), rounds=80)
        >>> hasslefree.decompose(weight, gram, pattern="2:4", rank=64, method=method)
    """

    pruner: Pruner = SparseGPT()
    low_rank: LowRankSolver = Adam()
    rounds: int = 80
    damping: float = 0.01
    low_rank_first: bool = False
    keep_best: bool = True

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise BudgetError(f"rounds must be at least 1, got {self.rounds}")

    def check(self, rank: int) -> None:
        """Every rank will do; 0 leaves the pruner alone."""

    def prepare(self, gram: Gram) -> tuple[Gram, Any, Any]:
        damped = gram.damped(self.damping)
        return damped, self.pruner.prepare(damped), self.low_rank.prepare(damped)

    def solve(
        self, weight: Tensor, prepared: tuple[Gram, Any, Any], pattern: Pattern, rank: int, generator: torch.Generator
    ) -> Solution:
        gram, for_pruner, for_solver = prepared
        low_rank = LowRank.gaussian_start(weight, rank, generator)
        if rank == 0:
            sparse = self.pruner.prune(weight, for_pruner, pattern)
            return Solution(sparse, low_rank, (gram.relative_error(weight - sparse, weight),))
        sparse = torch.zeros_like(weight)
        best, least = (sparse, low_rank), float("inf")
        history: list[float] = []
        remarks: list[str] = []
        for t in range(self.rounds):
            if self.low_rank_first:
                low_rank = self.low_rank.fit(weight - sparse, for_solver, low_rank, t)
                sparse = self.pruner.prune(weight - low_rank.product(), for_pruner, pattern)
            else:
                sparse = self.pruner.prune(weight - low_rank.product(), for_pruner, pattern)
                if t == 0:
                    # The pruner alone is the first candidate: Adam's steps have a fixed size, and can overshoot.
                    best, least = (sparse, low_rank), gram.relative_error(weight - sparse, weight)
                low_rank = self.low_rank.fit(weight - sparse, for_solver, low_rank, t)
            error = gram.relative_error(low_rank.residual(weight, sparse), weight)
            if not math.isfinite(error):
                if math.isinf(least) or not self.keep_best:
                    raise NonFiniteError(f"round {t + 1} came upon NaN or Inf; {REMEDY}")
                remarks.append(f"round {t + 1} came upon NaN or Inf: the best before it is kept; {REMEDY}")
                break
            history.append(error)
            if error < least or not self.keep_best:
                best, least = (sparse, low_rank), error
        if least and not best[1].v.any():
            remarks.append("no round was better than the pruner alone: L is nothing")
        return Solution(*best, tuple(history), tuple(remarks))
