"""Low-rank solvers by name. A new one is a file and a line here; the contract tests then cover it."""

from hasslefree.core.protocols import LowRankSolver
from hasslefree.solve.low_rank.adam import Adam
from hasslefree.solve.low_rank.diagonal_svd import DiagonalSVD
from hasslefree.solve.low_rank.exact import Exact
from hasslefree.solve.low_rank.subspace import Subspace
from hasslefree.solve.low_rank.svd import SVD, RandomizedSVD

LOW_RANK_SOLVERS: dict[str, LowRankSolver] = {
    "svd": SVD(),
    "randomized-svd": RandomizedSVD(),
    "diagonal-svd": DiagonalSVD(),
    "adam": Adam(),
    "adam-unscaled": Adam(scaled=False),
    "exact": Exact(),
    "subspace": Subspace(),
}
