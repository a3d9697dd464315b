"""hasslefree: make a language model smaller without retraining it; every linear layer becomes sparse plus low-rank.

Importing it teaches transformers to load the folders that it writes.
"""

from hasslefree.checkpoints.transformers_plugin import register as _register
from hasslefree.compress import compress
from hasslefree.core.budgets import Budget
from hasslefree.core.gram import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Row, SemiStructured, Structured, Unstructured
from hasslefree.core.protocols import Decomposition
from hasslefree.decompose import decompose
from hasslefree.errors import HasslefreeError
from hasslefree.evaluation.perplexity import perplexity
from hasslefree.methods.alternating import AlternatingMinimization
from hasslefree.methods.prune import Prune
from hasslefree.models.linear import SparseLowRankLinear
from hasslefree.recipe import Recipe

__version__ = "0.1.0"

__all__ = [
    "AlternatingMinimization",
    "Budget",
    "Decomposition",
    "Gram",
    "HasslefreeError",
    "LowRank",
    "Prune",
    "Recipe",
    "Row",
    "SemiStructured",
    "SparseLowRankLinear",
    "Structured",
    "Unstructured",
    "compress",
    "decompose",
    "perplexity",
]

_register()
