"""Refit: the values that are best on the support that another pruner chose (CHITA, arXiv
2302.14623, section 3).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import masked_cg
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.errors import GridError, option
from hasslefree.validation import Figure


@dataclass(frozen=True)
class Refit(Pruner):
    """S minimises tr((T − S) H (T − S)ᵀ) on the support of another pruner's S: least squares for
    every row.

    Conjugate gradients solve all rows at once, down to rounding errors. A direct solver would need
    one factorisation per row, because every row has its own support.

    Args:
        pruner: the pruner that chooses the support and the initial values.
        damping: λ over the mean of diag H, for the refit alone, if the Gram is not damped yet: with
            fewer tokens than kept entries in a row, H alone does not determine the values.
        steps: the maximum number of steps of conjugate gradients.
        tolerance: stop when the gradient of every row, relative to the output of the row, is
            smaller than this.

    Raises:
        GridError: the pruner quantises.

    Example:
        >>> hasslefree.decompose(weight, gram, pattern="2:4", method=Prune(Refit(Wanda(),
        damping=0.01), damping=0.0))
    """

    pruner: Pruner
    damping: Figure = 0.0
    steps: int = 300
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pruner.grid:
            raise GridError(
                "refit would change the values of S, which this pruner quantises; "
                f"leave out refit ({option('refit', True)})",
                ("refit", "method"),
            )

    @property
    def inner(self) -> Pruner:
        return self.pruner

    def prepare(self, gram: Gram) -> tuple[Tensor, Any]:
        return gram.damped(self.damping).matrix, self.pruner.prepare(gram)

    def prune(
        self,
        target: Tensor,
        prepared: tuple[Tensor, Any],
        pattern: Pattern,
    ) -> Pruned:
        matrix, for_pruner = prepared
        start = self.pruner.prune(target, for_pruner, pattern).sparse
        return Pruned(masked_cg(matrix, target, start, start != 0, self.steps, self.tolerance))
