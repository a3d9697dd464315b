"""Pruners by name. A new one is a file and a line here; the contract tests then cover it."""

from hasslefree.core.grids import Grid
from hasslefree.core.protocols import Pruner
from hasslefree.pruners.alps import ALPS
from hasslefree.pruners.dsnot import DSNoT
from hasslefree.pruners.magnitude import Magnitude
from hasslefree.pruners.osscar import OSSCAR
from hasslefree.pruners.round_to_nearest import RoundToNearest
from hasslefree.pruners.sparsegpt import SparseGPT
from hasslefree.pruners.wanda import Wanda

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
