"""`joint` for a support and a grid at once: its support and its low-rank part, and S on the grid
there.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from hasslefree.core.cost import Cost
from hasslefree.core.gram import Gram, relative
from hasslefree.core.grids import Grid, Scaling
from hasslefree.core.linalg import masked_cg
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import KnownSupport, Pattern
from hasslefree.core.protocols import Method, Solution
from hasslefree.solve.grid_descent import descend
from hasslefree.solve.low_rank.exact import Exact
from hasslefree.solve.methods.joint import Joint
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from hasslefree.validation import Count, Figure, Positive

# Of conjugate gradients, before each sweep; they begin where the last sweep ended.
CG_STEPS = 20

# H, damped, and what `Joint`, the sweep and the exact fit prepared.
Prepared = tuple[Gram, Any, Tensor, Tensor]


@dataclass(frozen=True)
class JointOnGrid(Method):
    """The support and L of `Joint`; then, in turn, S on that support and on a grid, and L exactly.

    With L given, the best S off the grid, on the support, has a gradient that vanishes there. So
    for every S' on it,

        tr((T − S') H (T − S')ᵀ) = tr((T − S) H (T − S)ᵀ) + tr((S − S') H (S − S')ᵀ),    T = W − L

    and it remains to put S on the grid in the norm of H: GPTQ's sweep, with the support known, and
    then coordinate descent on codes, scales and offsets (`solve.grid_descent`). L is the exact fit
    to W − S'. Where the pattern keeps everything, the turns begin with the exact fit to W. The best
    turn is kept.

    Args:
        rounds: of `Joint`. damping: λ over the mean of diag H. turns: of S and L.
        passes: of the descent, in each turn. ranges: of values that the sweep tries for each group.
    """

    grid: Grid = Grid()
    rounds: Positive = 100
    damping: Figure = 0.01
    turns: Positive = 5
    passes: Count = 3
    ranges: Positive = 20

    def prepare(self, gram: Gram) -> Prepared:
        damped = gram.damped(self.damping)
        return (
            damped,
            self._joint().prepare(gram),
            SparseGPT().prepare(damped),
            Exact().prepare(damped),
        )

    def solve(
        self,
        weight: Tensor,
        prepared: Prepared,
        pattern: Pattern,
        rank: int,
        generator: Generator,
    ) -> Solution:
        gram, for_joint, for_sweep, for_fit = prepared
        whole = pattern.kept((weight.shape[0], weight.shape[1])) == weight.numel()
        if whole:
            support, low_rank = (
                torch.ones_like(weight, dtype=torch.bool),
                _fitted(weight, for_fit, rank),
            )
            sparse = weight - low_rank.product()
        else:
            free = self._joint().solve(weight, for_joint, pattern, rank, generator)
            sparse, low_rank, support = free.sparse, free.low_rank, free.sparse != 0
        best: tuple[Tensor, LowRank, Scaling | None] = (sparse, low_rank, None)
        history: list[float] = []
        norm = gram.loss(weight)
        for _ in range(self.turns if rank else 1):
            target = weight - low_rank.product()
            fitted = target if whole else masked_cg(gram.matrix, target, sparse, support, CG_STEPS)
            swept = SparseGPT(grid=self.grid, ranges=self.ranges).prune(
                fitted, for_sweep, KnownSupport(support)
            )
            swept = descend(fitted, swept, gram.matrix, None if whole else support, self.passes)
            sparse = swept.sparse
            low_rank = _fitted(weight - sparse, for_fit, rank)
            error = relative(gram.loss(low_rank.residual(weight, sparse)), norm)
            if not history or error < min(history):
                best = sparse, low_rank, swept.scaling
            history.append(error)
        return Solution(best[0], best[1], tuple(history), scaling=best[2])

    @property
    def cost(self) -> Cost:
        """That of `joint`, and in each turn a sweep, descent, conjugate gradients and an exact
        fit.
        """
        joint, sweep, fit = self._joint().cost, SparseGPT().cost, Exact().cost
        flops = joint.flops + self.turns * (
            sweep.flops + fit.flops + 2 * (CG_STEPS + 2 + self.passes)
        )
        return Cost(flops, squares=10, arrays=12, cached=joint.cached)

    def _joint(self) -> Joint:
        return Joint(rounds=self.rounds, damping=self.damping)


def _fitted(target: Tensor, prepared: Tensor, rank: int) -> LowRank:
    """The exact L of a rank for a target (out, in)."""
    start = LowRank(target.new_zeros(len(target), rank), target.new_zeros(rank, target.shape[1]))
    return Exact().fit(target, prepared, start, 0) if rank else start
