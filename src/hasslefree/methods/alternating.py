"""Alternating minimisation: any pruner with any low-rank solver (arXiv 2502.00899, Algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid, Scaling
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import LowRankSolver, Pruner, Solution, grid_of, quantise
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
        last_fit: fit L once more at the end, to W minus the S that was kept, where that lowers the objective. For
            alternations that end with S.

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
    last_fit: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise BudgetError(f"rounds must be at least 1, got {self.rounds}")

    @property
    def grid(self) -> Grid | None:
        return grid_of(self.pruner)

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
            sparse, scaling = quantise(self.pruner, weight, for_pruner, pattern)
            return Solution(sparse, low_rank, (gram.relative_error(weight - sparse, weight),), scaling=scaling)
        sparse = torch.zeros_like(weight)
        best: tuple[Tensor, LowRank, Scaling | None] = (sparse, low_rank, None)
        least = float("inf")
        history: list[float] = []
        remarks: list[str] = []
        for t in range(self.rounds):
            if self.low_rank_first:
                low_rank = self.low_rank.fit(weight - sparse, for_solver, low_rank, t)
                sparse, scaling = quantise(self.pruner, weight - low_rank.product(), for_pruner, pattern)
            else:
                sparse, scaling = quantise(self.pruner, weight - low_rank.product(), for_pruner, pattern)
                if t == 0:
                    # The pruner alone is the first candidate: Adam's steps have a fixed size, and can overshoot.
                    best, least = (sparse, low_rank, scaling), gram.relative_error(weight - sparse, weight)
                low_rank = self.low_rank.fit(weight - sparse, for_solver, low_rank, t)
            error = gram.relative_error(low_rank.residual(weight, sparse), weight)
            if not math.isfinite(error):
                if math.isinf(least) or not self.keep_best:
                    raise NonFiniteError(f"round {t + 1} came upon NaN or Inf; {REMEDY}")
                remarks.append(f"round {t + 1} came upon NaN or Inf: the best before it is kept; {REMEDY}")
                break
            history.append(error)
            if error < least or not self.keep_best:
                best, least = (sparse, low_rank, scaling), error
        sparse, low_rank, scaling = best
        if self.last_fit:
            last = self.low_rank.fit(weight - sparse, for_solver, low_rank, len(history))
            error = gram.relative_error(last.residual(weight, sparse), weight)
            low_rank, history = (last, [*history, error]) if error < least else (low_rank, history)
        if least and not low_rank.v.any():
            remarks.append("no round was better than the pruner alone: L is nothing")
        return Solution(sparse, low_rank, tuple(history), tuple(remarks), scaling)
