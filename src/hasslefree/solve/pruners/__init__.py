"""Pruners by name. A new one is a file and a line here; the contract tests then cover it."""

from hasslefree.core.about import About
from hasslefree.core.grids import Grid
from hasslefree.core.protocols import Pruner
from hasslefree.solve.pruners.alps import ALPS
from hasslefree.solve.pruners.dsnot import DSNoT
from hasslefree.solve.pruners.magnitude import Magnitude
from hasslefree.solve.pruners.osscar import OSSCAR
from hasslefree.solve.pruners.round_to_nearest import RoundToNearest
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from hasslefree.solve.pruners.wanda import Wanda

PRUNERS: dict[str, Pruner] = {
    "magnitude": Magnitude(),
    "wanda": Wanda(),
    "dsnot": DSNoT(),
    "sparsegpt": SparseGPT(),
    "alps": ALPS(),
    "rtn": RoundToNearest(),
    "gptq": SparseGPT(grid=Grid()),
    "osscar": OSSCAR(),
}

ABOUT: dict[str, About] = {
    "magnitude": About("keeps the largest entries; uses no data", "arXiv 1506.02626"),
    "wanda": About("keeps the largest entries times input norms", "arXiv 2306.11695"),
    "dsnot": About("improves the support of wanda by swaps", "arXiv 2310.08915"),
    "sparsegpt": About("prunes by columns, and corrects later columns", "arXiv 2301.00774"),
    "alps": About("ADMM on the support, then least squares on it", "arXiv 2406.07831"),
    "rtn": About("rounds to the nearest value of a grid", "docs: maths"),
    "gptq": About("rounds by columns, and corrects later columns", "arXiv 2210.17323"),
    "osscar": About("removes whole input channels, with refits", "arXiv 2403.12983"),
}
