"""Robust PCA: principal component pursuit by the inexact augmented Lagrangian (Candès et al. 2011, arXiv 0912.3599).

The convex relaxation of sparse plus low-rank, without a budget and without the inputs:

    minimise   ‖L‖_* + λ‖S‖₁   subject to S + L = W

It determines rank and support itself, and λ weighs one against the other; λ = 1/√max(out, in) recovers a matrix that
is exactly sparse plus low-rank (theorem 1.1 there). A layer is not, and its budget is given: λ is found by bisection so
that L has the rank of the budget, and S is then cut to the pattern.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from hasslefree.core.cost import Cost
from hasslefree.core.low_rank import LowRank, truncated_svd
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method, Solution
from hasslefree.core.rows import WHOLE, Rows
from hasslefree.validation import Factor, Figure, Positive


@dataclass(frozen=True)
class PrincipalComponentPursuit(Method):
    """For every λ that is tried: S ← the largest of W − L in the pattern, L ← C_r(W − S). The closest pair is kept.

    The larger λ, the more L takes. λ·√max(out, in) is searched between 1/16 and 16, by halving on a logarithmic scale,
    first at 1, for the largest one whose L has no more than the rank. At every λ, S + L = W exactly, with some support
    and rank; the cut to the budget is a round of GoDec, which also undoes the shrinkage by ‖·‖_*.
    The history is ‖W − S − L‖² / ‖W‖² after the cut, for every λ.

    Args:
        searches: values of λ. rounds: of the augmented Lagrangian at most; it stops when ‖W − S − L‖ is below
            `tolerance` of ‖W‖. growth: its penalty is multiplied by this in every round; 1.5 is the authors'
            (Lin et al., arXiv 1009.5055, algorithm 5).
    """

    searches: Positive = 8
    rounds: Positive = 100
    growth: Factor = 1.5
    tolerance: Figure = 1e-6

    def solve(
        self, weight: Tensor, prepared: None, pattern: Pattern, rank: int, generator: Generator, rows: Rows = WHOLE
    ) -> Solution:
        norm = weight.square().sum(dtype=torch.float64).item()
        history: list[float] = []
        least, most, power = -4.0, 4.0, 0.0
        best: tuple[Tensor, LowRank] | None = None
        for _ in range(self.searches if rank else 1):
            pursued = self.pursue(weight, 2.0**power / max(weight.shape) ** 0.5)
            least, most = (least, power) if pursued.rank > rank else (power, most)
            power = (least + most) / 2
            residual = weight - LowRank(pursued.u[:, :rank], pursued.v[:rank]).product()
            sparse = residual * pattern.mask(residual.square())
            low_rank = truncated_svd(weight - sparse, rank)
            history.append(low_rank.residual(weight, sparse).square().sum(dtype=torch.float64).item() / norm)
            if best is None or history[-1] < min(history[:-1]):
                best = sparse, low_rank
        assert best is not None
        return Solution(*best, tuple(history))

    @property
    def cost(self) -> Cost:
        """Each round has an SVD and a product."""
        return Cost(flops=self.searches * (self.rounds + 1) * 28, squares=0, arrays=21)

    def pursue(self, weight: Tensor, balance: float) -> LowRank:
        """The L of the pursuit, with the rank that it takes; S is W − L. balance: λ."""
        largest = torch.linalg.matrix_norm(weight, 2)
        dual = weight / torch.maximum(largest, weight.abs().max() / balance)
        penalty, sparse = 1.25 / largest, torch.zeros_like(weight)
        limit, enough = penalty * 1e7, self.tolerance * weight.norm()
        for _ in range(self.rounds):
            low_rank = shrunk_svd(weight - sparse + dual / penalty, 1 / penalty)
            free = weight - low_rank.product()
            wanted = free + dual / penalty
            sparse = wanted - wanted.clamp(-balance / penalty, balance / penalty)
            residual = free - sparse
            dual = dual + penalty * residual
            penalty = torch.minimum(penalty * self.growth, limit)
            if residual.norm() <= enough:
                break
        return low_rank


def shrunk_svd(matrix: Tensor, threshold: Tensor) -> LowRank:
    """The singular values less a threshold, where they exceed it: the proximal map of threshold·‖·‖_*."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int(torch.count_nonzero(s > threshold))
    return LowRank(u[:, :rank] * (s[:rank] - threshold), vh[:rank])
