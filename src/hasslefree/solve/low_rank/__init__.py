"""Low-rank solvers by name. A new one is a file and a line here; the contract tests then cover it."""

from hasslefree.core.about import About
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

ABOUT: dict[str, About] = {
    "svd": About("truncated SVD; uses no data", "Eckart–Young 1936"),
    "randomized-svd": About("randomised truncated SVD; uses no data", "arXiv 0909.4061"),
    "diagonal-svd": About("the optimum for the diagonal of H", "arXiv 2409.13652"),
    "adam": About("Adam on both factors, in scaled units", "arXiv 2502.00899"),
    "adam-unscaled": About("Adam on both factors, without scaling", "arXiv 2502.00899"),
    "exact": About("the optimum for H, in closed form", "arXiv 2410.21271"),
    "subspace": About("orthogonal iteration towards the optimum", "docs: maths"),
}
