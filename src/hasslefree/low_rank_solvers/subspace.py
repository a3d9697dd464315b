"""The optimum for the full H by warm-started subspace iteration: a fraction of the cost of an SVD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.low_rank import LowRank


@dataclass(frozen=True)
class Subspace:
    """B = qr(T H vᵀ), v = BᵀT: one step of orthogonal iteration on T H Tᵀ, started from v of the round before.

    For every orthonormal B the best L with that column space is B·BᵀT, whatever H is; at the fixed point B spans the
    leading eigenvectors of T H Tᵀ, and L is the exact solution (orthogonal iteration: Golub & Van Loan, section 8.2).

    Args:
        steps: iterations a round. first_steps: in the first round, which starts from noise.
    """

    steps: int = 1
    first_steps: int = 4

    def prepare(self, gram: Gram) -> Tensor:
        return gram.matrix

    def fit(self, target: Tensor, prepared: Tensor, start: LowRank, round: int) -> LowRank:
        # With v = 0 there is no row space yet: B starts from the random u, and one more step is taken.
        cold = round == 0
        v = torch.linalg.qr(start.u).Q.T @ target if cold else start.v
        for _ in range(self.first_steps if cold else self.steps):
            basis = torch.linalg.qr(target @ (prepared @ v.T)).Q
            v = basis.T @ target
        return LowRank(basis, v)
