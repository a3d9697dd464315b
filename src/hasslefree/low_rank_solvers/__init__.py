"""Low-rank solvers by name. A new one is a file and a line here; the contract tests then cover it."""

from hasslefree.core.protocols import LowRankSolver
from hasslefree.low_rank_solvers.adam import Adam
from hasslefree.low_rank_solvers.diagonal_svd import DiagonalSVD
from hasslefree.low_rank_solvers.exact import Exact
from hasslefree.low_rank_solvers.subspace import Subspace
from hasslefree.low_rank_solvers.svd import SVD, RandomizedSVD

LOW_RANK_SOLVERS: dict[str, LowRankSolver] = {
    "svd": SVD(),
    "randomized-svd": RandomizedSVD(),
    "diagonal-svd": DiagonalSVD(),
    "adam": Adam(),
    "adam-unscaled": Adam(scaled=False),
    "exact": Exact(),
    "subspace": Subspace(),
}
