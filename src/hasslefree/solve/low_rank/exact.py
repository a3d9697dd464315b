"""The optimum for the full H, in closed form: generalised Eckart–Young by whitening."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import lower_cholesky
from hasslefree.core.low_rank import LowRank, truncated_svd
from hasslefree.core.protocols import LowRankSolver


@dataclass(frozen=True)
class Exact(LowRankSolver):
    """L = C_r(T C) C⁻¹ with H = C Cᵀ, because tr((T−L) H (T−L)ᵀ) = ‖(T−L) C‖².

    The paper (arXiv 2502.00899) approaches this point by Adam. EoRA (arXiv 2410.21271) takes the
    same step with an eigendecomposition of H in the place of the Cholesky factor.
    """

    def prepare(self, gram: Gram) -> Tensor:
        return lower_cholesky(gram.matrix).to(gram.matrix.dtype)

    def fit(
        self,
        target: Tensor,
        prepared: Tensor,
        start: LowRank,
        round: int,
    ) -> LowRank:
        white = truncated_svd(target @ prepared, start.rank)
        v = torch.linalg.solve_triangular(prepared, white.v, upper=False, left=False)
        return LowRank(white.u, v)
