"""The optimum for a diagonal H (arXiv 2502.00899, theorem 3.1; OATS, arXiv 2409.13652)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import unit_diagonal_scale
from hasslefree.core.low_rank import LowRank, truncated_svd


@dataclass(frozen=True)
class DiagonalSVD:
    """L = C_r(T D) D⁻¹ with D = diag(H)^½."""

    def prepare(self, gram: Gram) -> Tensor:
        return unit_diagonal_scale(gram.diagonal)

    def fit(self, target: Tensor, prepared: Tensor, start: LowRank, round: int) -> LowRank:
        scaled = truncated_svd(target * prepared, start.rank)
        return LowRank(scaled.u, scaled.v / prepared)
