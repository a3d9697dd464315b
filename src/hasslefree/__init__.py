"""hasslefree: make a language model smaller without retraining it; every linear layer becomes sparse plus low-rank."""

from hasslefree.core.budgets import Budget
from hasslefree.core.gram import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Row, SemiStructured, Structured, Unstructured
from hasslefree.core.protocols import Decomposition
from hasslefree.decompose import decompose
from hasslefree.errors import HasslefreeError
from hasslefree.methods.alternating import AlternatingMinimization
from hasslefree.methods.prune import Prune

__all__ = [
    "AlternatingMinimization",
    "Budget",
    "Decomposition",
    "Gram",
    "HasslefreeError",
    "LowRank",
    "Prune",
    "Row",
    "SemiStructured",
    "Structured",
    "Unstructured",
    "decompose",
]
