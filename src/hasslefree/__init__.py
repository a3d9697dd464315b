"""hasslefree: make a language model smaller without retraining it; every linear layer becomes sparse plus low-rank.

Importing it teaches transformers to load the folders that it writes.
"""

from hasslefree.checkpoints.export import export
from hasslefree.checkpoints.transformers_plugin import register as _register
from hasslefree.compress import compress
from hasslefree.core.budgets import Budget
from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Row, SemiStructured, Structured, Unstructured
from hasslefree.core.protocols import Decomposition
from hasslefree.decompose import decompose
from hasslefree.errors import HasslefreeError
from hasslefree.evaluation.perplexity import perplexity
from hasslefree.low_rank_solvers.adam import Adam
from hasslefree.low_rank_solvers.diagonal_svd import DiagonalSVD
from hasslefree.low_rank_solvers.exact import Exact
from hasslefree.low_rank_solvers.subspace import Subspace
from hasslefree.low_rank_solvers.svd import SVD, RandomizedSVD
from hasslefree.methods.alternating import AlternatingMinimization
from hasslefree.methods.joint import Joint
from hasslefree.methods.joint_on_grid import JointOnGrid
from hasslefree.methods.prune import Prune
from hasslefree.methods.pursuit import PrincipalComponentPursuit
from hasslefree.methods.three_block import ThreeBlock
from hasslefree.models.linear import SparseLowRankLinear, use_way
from hasslefree.pruners.alps import ALPS
from hasslefree.pruners.dsnot import DSNoT
from hasslefree.pruners.magnitude import Magnitude
from hasslefree.pruners.osscar import OSSCAR
from hasslefree.pruners.refit import Refit
from hasslefree.pruners.round_to_nearest import RoundToNearest
from hasslefree.pruners.sparsegpt import SparseGPT
from hasslefree.pruners.wanda import Wanda
from hasslefree.recipe.recipe import Recipe

__version__ = "0.1.0"

__all__ = [
    "ALPS",
    "OSSCAR",
    "SVD",
    "Adam",
    "AlternatingMinimization",
    "Budget",
    "DSNoT",
    "Decomposition",
    "DiagonalSVD",
    "Exact",
    "Gram",
    "Grid",
    "HasslefreeError",
    "Joint",
    "JointOnGrid",
    "LowRank",
    "Magnitude",
    "PrincipalComponentPursuit",
    "Prune",
    "RandomizedSVD",
    "Recipe",
    "Refit",
    "RoundToNearest",
    "Row",
    "SemiStructured",
    "SparseGPT",
    "SparseLowRankLinear",
    "Structured",
    "Subspace",
    "ThreeBlock",
    "Unstructured",
    "Wanda",
    "compress",
    "decompose",
    "export",
    "perplexity",
    "use_way",
]

_register()
