"""Robust PCA by principal component pursuit (Candès, Li, Ma and Wright, arXiv 0912.3599).

Principal component pursuit is the convex relaxation of sparse plus low-rank. It has no budget and
does not use the inputs:

    minimise   ‖L‖_* + λ‖S‖₁   subject to   S + L = W

It is solved by the inexact augmented Lagrangian (Lin et al., arXiv 1009.5055, algorithm 5), which
alternates the proximal maps of the two norms. λ weighs rank against support; λ = 1/√max(out, in)
recovers a matrix that is exactly sparse plus low-rank (theorem 1.1 of the paper). A layer is not,
and it has a budget: bisection finds the λ for which L has the rank of the budget, and a round of
GoDec cuts S and L to the budget.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasslefree.core.low_rank import LowRank, truncated_svd
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method, Solution
from hasslefree.validation import Factor, Figure, Positive

# λ·√max(out, in) is searched between 2^−4 and 2^4.
RANGE = 4.0
# The first penalty over 1 / ‖W‖₂, and the largest one over the first (arXiv 1009.5055, section 4).
FIRST_PENALTY = 1.25
LARGEST_PENALTY = 1e7


@dataclass(frozen=True)
class PrincipalComponentPursuit(Method):
    """Solve the convex problem for several λ, cut each solution to the budget, and keep the best.

    The larger λ, the higher the rank of L. Bisection of log λ looks for the largest λ whose L has
    at most the rank of the budget. At every λ, S ← the largest entries of W − L in the pattern, and
    L ← C_r(W − S), which also undoes the shrinkage of the singular values. The history is
    ‖W − S − L‖² / ‖W‖² after each cut.

    Args:
        searches: the number of values of λ.
        rounds: the maximum number of rounds of the augmented Lagrangian for one λ.
        growth: the factor of the penalty in every round; the authors use 1.5.
        tolerance: the rounds end when ‖W − S − L‖ is below this share of ‖W‖.

    Example:
        >>> hasslefree.decompose(weight, pattern="2:4", rank=64, method=PrincipalComponentPursuit())
    """

    searches: Positive = 8
    rounds: Positive = 100
    growth: Factor = 1.5
    tolerance: Figure = 1e-6

    def solve(
        self,
        weight: Tensor,
        prepared: None,
        pattern: Pattern,
        start: LowRank,
    ) -> Solution:
        norm = squared_norm(weight)
        low = -RANGE
        high = RANGE
        power = 0.0
        best: Solution | None = None
        errors: list[float] = []
        for _ in range(self.searches if start.rank else 1):
            pursued = self.pursue(weight, 2.0**power / max(weight.shape) ** 0.5)
            if pursued.rank > start.rank:
                high = power
            else:
                low = power
            power = (low + high) / 2
            sparse, low_rank = cut(weight, pursued, pattern, start.rank)
            error = squared_norm(low_rank.residual(weight, sparse)) / norm
            if best is None or error < best.error:
                best = Solution(sparse, low_rank, (error,))
            errors.append(error)
        assert best is not None
        return replace(best, history=tuple(errors))

    def pursue(self, weight: Tensor, balance: float) -> LowRank:
        """Solve the convex problem without a budget.

        Args:
            weight: W, (out, in), not zero.
            balance: λ.

        Returns:
            L, with its rank; S is W − L.
        """
        largest = torch.linalg.matrix_norm(weight, 2)
        dual = weight / torch.maximum(largest, weight.abs().max() / balance)
        penalty = FIRST_PENALTY / largest
        limit = LARGEST_PENALTY * penalty
        enough = self.tolerance * weight.norm()
        sparse = torch.zeros_like(weight)
        for _ in range(self.rounds):
            low_rank = shrunk_svd(weight - sparse + dual / penalty, 1 / penalty)
            free = weight - low_rank.product()
            sparse = shrunk(free + dual / penalty, balance / penalty)
            residual = free - sparse
            dual = dual + penalty * residual
            penalty = torch.minimum(penalty * self.growth, limit)
            if residual.norm() <= enough:
                break
        return low_rank


def cut(
    weight: Tensor,
    pursued: LowRank,
    pattern: Pattern,
    rank: int,
) -> tuple[Tensor, LowRank]:
    """Cut a solution of the convex problem to the pattern and the rank, by a round of GoDec."""
    leading = LowRank(pursued.u[:, :rank], pursued.v[:rank])
    residual = weight - leading.product()
    sparse = residual * pattern.mask(residual.square())
    return sparse, truncated_svd(weight - sparse, rank)


def shrunk(matrix: Tensor, threshold: Tensor) -> Tensor:
    """Move every entry towards zero by a threshold: the proximal map of threshold·‖·‖₁."""
    return matrix - matrix.clamp(-threshold, threshold)


def shrunk_svd(matrix: Tensor, threshold: Tensor) -> LowRank:
    """Lower the singular values by a threshold, and drop those below it: the proximal map of
    threshold·‖·‖_*.
    """
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = int(torch.count_nonzero(s > threshold))
    return LowRank(u[:, :rank] * (s[:rank] - threshold), vh[:rank])


def squared_norm(matrix: Tensor) -> float:
    """Return the squared Frobenius norm of a matrix, summed in float64."""
    return matrix.square().sum(dtype=torch.float64).item()
