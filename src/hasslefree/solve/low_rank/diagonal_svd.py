"""The optimum for a diagonal H (arXiv 2502.00899, theorem 3.1; OATS, arXiv 2409.13652)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.cost import Cost, Need
from hasslefree.core.gram import Gram
from hasslefree.core.linalg import unit_diagonal_scale
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import SharingSolver, fit_rows
from hasslefree.core.rows import WHOLE, Rows
from hasslefree.solve.low_rank.svd import SVD, RandomizedSVD


@dataclass(frozen=True)
class DiagonalSVD(SharingSolver):
    """L = C_r(T D) D⁻¹ with D = diag(H)^½.

    Args:
        svd: how C_r is computed: exactly, or by `RandomizedSVD`.
    """

    svd: SVD | RandomizedSVD = SVD()

    def prepare(self, gram: Gram) -> Tensor:
        return unit_diagonal_scale(gram.diagonal)

    @property
    def shares_rows(self) -> bool:
        return self.svd.shares_rows

    def fit(self, target: Tensor, prepared: Tensor, start: LowRank, round: int, rows: Rows = WHOLE) -> LowRank:
        scaled = fit_rows(self.svd, target * prepared, None, start, round, rows)
        return LowRank(scaled.u, scaled.v / prepared)

    def cost(self, out: int, width: int, rank: int) -> Cost:
        """That of the SVD, with T D beside T."""
        found = self.svd.cost(out, width, rank)
        return dataclasses.replace(found, need=found.need.joined(Need(large=2)))
