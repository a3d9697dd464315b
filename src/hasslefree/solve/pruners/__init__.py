"""Pruners by name. A new one needs a file and a line here; the contract tests then include it."""

from hasslefree.core.grids import Grid
from hasslefree.core.protocols import About, Pruner
from hasslefree.solve.pruners.alps import ALPS
from hasslefree.solve.pruners.diagonal import Magnitude, RoundToNearest, Wanda
from hasslefree.solve.pruners.dsnot import DSNoT
from hasslefree.solve.pruners.osscar import OSSCAR
from hasslefree.solve.pruners.sparsegpt import SparseGPT

_TABLE: dict[str, tuple[Pruner, str, str]] = {
    "magnitude": (Magnitude(), "keeps the largest entries; uses no data", "arXiv 1506.02626"),
    "wanda": (Wanda(), "keeps the largest entries times input norms", "arXiv 2306.11695"),
    "dsnot": (DSNoT(), "improves the support of wanda by swaps", "arXiv 2310.08915"),
    "sparsegpt": (
        SparseGPT(),
        "prunes by columns, and corrects later columns",
        "arXiv 2301.00774",
    ),
    "alps": (ALPS(), "ADMM on the support, then least squares on it", "arXiv 2406.07831"),
    "rtn": (RoundToNearest(), "rounds to the nearest value of a grid", "docs: grids"),
    "gptq": (
        SparseGPT(grid=Grid()),
        "rounds by columns, and corrects later columns",
        "arXiv 2210.17323",
    ),
    "osscar": (OSSCAR(), "removes whole input channels, with refits", "arXiv 2403.12983"),
}
PRUNERS = {name: pruner for name, (pruner, _, _) in _TABLE.items()}
ABOUT = {name: About(*about) for name, (_, *about) in _TABLE.items()}
