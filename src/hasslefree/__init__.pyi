"""The public names, read by `lazy_loader`, which imports a name when it is first used."""

from .checkpoint.hub import push as push
from .core.budgets import Budget as Budget
from .core.gram import Gram as Gram
from .core.grids import Grid as Grid
from .core.low_rank import LowRank as LowRank
from .core.patterns import Row as Row
from .core.patterns import SemiStructured as SemiStructured
from .core.patterns import Structured as Structured
from .core.patterns import Unstructured as Unstructured
from .core.protocols import Decomposition as Decomposition
from .errors import HasslefreeError as HasslefreeError
from .evaluation.run import perplexity as perplexity
from .exports.export import export as export
from .packed.linear import SparseLowRankLinear as SparseLowRankLinear
from .packed.linear import use_backend as use_backend
from .pipeline.advise import advise as advise
from .pipeline.compress import compress as compress
from .recipe.recipe import Recipe as Recipe
from .solve.decompose import decompose as decompose
from .solve.low_rank.adam import Adam as Adam
from .solve.low_rank.subspace import Subspace as Subspace
from .solve.low_rank.svd import SVD as SVD
from .solve.low_rank.svd import DiagonalSVD as DiagonalSVD
from .solve.low_rank.svd import Exact as Exact
from .solve.low_rank.svd import RandomizedSVD as RandomizedSVD
from .solve.methods.alternating import AlternatingMinimization as AlternatingMinimization
from .solve.methods.joint import Joint as Joint
from .solve.methods.joint_on_grid import JointOnGrid as JointOnGrid
from .solve.methods.prune import Prune as Prune
from .solve.methods.pursuit import PrincipalComponentPursuit as PrincipalComponentPursuit
from .solve.methods.three_block import ThreeBlock as ThreeBlock
from .solve.pruners.alps import ALPS as ALPS
from .solve.pruners.diagonal import Magnitude as Magnitude
from .solve.pruners.diagonal import RoundToNearest as RoundToNearest
from .solve.pruners.diagonal import Wanda as Wanda
from .solve.pruners.dsnot import DSNoT as DSNoT
from .solve.pruners.osscar import OSSCAR as OSSCAR
from .solve.pruners.refit import Refit as Refit
from .solve.pruners.sparsegpt import SparseGPT as SparseGPT

__version__: str
