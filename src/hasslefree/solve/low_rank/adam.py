"""The paper's low-rank step: Adam on the two factors (arXiv 2502.00899, Algorithm 1)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import unit_diagonal_scale
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import LowRankSolver

# In the authors' code, L is an adapter of PEFT with this alpha; here, the scaling alpha / r is
# divided between the factors.
ADAPTER_ALPHA = 16


@dataclass(frozen=True)
class Adam(LowRankSolver):
    """A few Adam steps on f(u, v) = tr((T − uv) H (T − uv)ᵀ) from the previous factors.

    With `scaled`, it solves the same problem for T D and D⁻¹HD⁻¹ with D = diag(H)^½, which makes
    one learning rate fit all layers (equation 5; the paper prints M = D·UVᵀ, but means the inverse:
    the product of the factors is D·M). T·H is computed once; every step then only needs products
    with r: ∂f/∂u = −2(TH vᵀ − u·vHvᵀ), ∂f/∂v = −2(uᵀTH − uᵀu·vH).

    The steps of Adam have a fixed size, and a step of one factor is multiplied by the other factor.
    So the random factor must be small at the start: with the gaussian u of the paper's text, one
    step can change L by more than all of T.

    Args:
        steps: the number of Adam steps per round, T_LR in the paper.
        learning_rate, delay: round t = 0, 1, … uses learning_rate / (t + 1 + delay).
        scaled: is_scaled in the paper.
        adapter_start: start as the authors' code does: u = 0, v small and uniform. False: as in the
            paper's text, u gaussian and v = 0.
    """

    steps: int = 50
    learning_rate: float = 1e-2
    delay: int = 10
    scaled: bool = True
    adapter_start: bool = True

    def start(self, weight: Tensor, rank: int, seed: int) -> LowRank:
        if not self.adapter_start or rank == 0:
            return super().start(weight, rank, seed)
        v = torch.empty(rank, weight.shape[1])
        nn.init.kaiming_uniform_(v, a=5**0.5, generator=torch.Generator().manual_seed(seed))
        v *= (ADAPTER_ALPHA / rank) ** 0.5
        return LowRank(weight.new_zeros(weight.shape[0], rank), v.to(weight))

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
