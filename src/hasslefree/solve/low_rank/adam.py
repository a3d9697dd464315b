"""The paper's low-rank step: Adam on the two factors (arXiv 2502.00899, Algorithm 1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import unit_diagonal_scale
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import LowRankSolver


@dataclass(frozen=True)
class Adam(LowRankSolver):
    """A few Adam steps on f(u, v) = tr((T − uv) H (T − uv)ᵀ) from the factors of the round before.

    Scaled, it solves the same problem for T D and D⁻¹HD⁻¹ with D = diag(H)^½, which makes one
    learning rate fit all layers (equation 5; where the paper prints M = D·UVᵀ, the inverse is
    meant: D·M is what the factors stand for). T·H is formed once; every step then costs products of
    size r only: ∂f/∂u = −2(TH vᵀ − u·vHvᵀ), ∂f/∂v = −2(uᵀTH − uᵀu·vH).

    Args:
        steps: the Adam steps of a round, T_LR in the paper.
        learning_rate, delay: round t = 0, 1, … uses learning_rate / (t + 1 + delay).
        scaled: the paper's is_scaled.
    """

    steps: int = 50
    learning_rate: float = 1e-2
    delay: int = 10
    scaled: bool = True

    def prepare(self, gram: Gram) -> tuple[Tensor, Tensor]:
        scale = torch.ones_like(gram.diagonal)
        if self.scaled:
            scale = unit_diagonal_scale(gram.diagonal)
        return gram.scaled(scale).matrix, scale

    def fit(
        self,
        target: Tensor,
        prepared: tuple[Tensor, Tensor],
        start: LowRank,
        round: int,
    ) -> LowRank:
        h, scale = prepared
        th = (target * scale) @ h
        u = start.u.clone()
        v = start.v * scale
        optimizer = torch.optim.Adam([u, v], lr=self.learning_rate / (round + 1 + self.delay))
        for _ in range(self.steps):
            vh = v @ h
            u.grad = -2 * (th @ v.T - u @ (vh @ v.T))
            v.grad = -2 * (u.T @ th - (u.T @ u) @ vh)
            optimizer.step()
        return LowRank(u.detach(), v.detach() / scale)
