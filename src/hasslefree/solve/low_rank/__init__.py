"""Low-rank solvers by name. A new one needs a file and a line here; the contract tests then
include it.
"""

from hasslefree.core.protocols import About, LowRankSolver
from hasslefree.solve.low_rank.adam import Adam
from hasslefree.solve.low_rank.subspace import Subspace
from hasslefree.solve.low_rank.svd import SVD, DiagonalSVD, Exact, RandomizedSVD

_TABLE: dict[str, tuple[LowRankSolver, str, str]] = {
    "svd": (SVD(), "truncated SVD; uses no data", "Eckart–Young 1936"),
    "randomized-svd": (
        RandomizedSVD(),
        "randomised truncated SVD; uses no data",
        "arXiv 0909.4061",
    ),
    "diagonal-svd": (DiagonalSVD(), "the optimum for the diagonal of H", "arXiv 2409.13652"),
    "adam": (Adam(), "Adam on both factors, in scaled units", "arXiv 2502.00899"),
    "adam-unscaled": (
        Adam(scaled=False),
        "Adam on both factors, without scaling",
        "arXiv 2502.00899",
    ),
    "exact": (Exact(), "the optimum for H, in closed form", "arXiv 2410.21271"),
    "subspace": (Subspace(), "orthogonal iteration towards the optimum", "docs: maths"),
}
LOW_RANK_SOLVERS = {name: solver for name, (solver, _, _) in _TABLE.items()}
ABOUT = {name: About(*about) for name, (_, *about) in _TABLE.items()}
