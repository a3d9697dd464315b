"""Pruners by name. A new one is a file and a line here; the contract tests then cover it."""

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
