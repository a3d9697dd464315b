"""Pruners that are optimal for a diagonal H: magnitude (for H = I), Wanda, and rounding to nearest
for a given grid.
"""

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.solve.at_rate import at_rate


@dataclass(frozen=True)
class Magnitude(Pruner):
    """S keeps the entries with the largest T². H is not used (Han et al. 2015)."""

    def prune(
        self,
        target: Tensor,
        prepared: None,
        pattern: Pattern,
    ) -> Pruned:
        return Pruned(target * pattern.mask(target.square()))


@dataclass(frozen=True)
class Wanda(Pruner):
    """S keeps the entries with the largest T²·H_jj, the square of Wanda's `|T|·‖X_j‖` (arXiv
    2306.11695).
    """

    def prepare(self, gram: Gram) -> Tensor:
        return gram.diagonal

    def prune(
        self,
        target: Tensor,
        prepared: Tensor,
        pattern: Pattern,
    ) -> Pruned:
        return Pruned(target * pattern.mask(target.square() * prepared))


@dataclass(frozen=True)
class RoundToNearest(Pruner):
    """S is T rounded to a grid, on the entries whose removal would cost most.

    The grid is fitted to T. A kept entry costs (T − Q(T))², and a removed one T²: the entries with
    the largest difference, times H_jj if weighted, are kept.

    Args:
        weighted: use the diagonal of H to choose the support; no effect without pruning.
    """

    grid: Grid = Grid()
    weighted: bool = False

    def prepare(self, gram: Gram) -> Tensor | None:
        if self.weighted:
            return gram.diagonal
        return None

    def prune(
        self,
        target: Tensor,
        prepared: Tensor | None,
        pattern: Pattern,
    ) -> Pruned:
        if self.grid.rate is not None:
            equal = target.new_ones(target.shape[1])
            quantised = at_rate(
                self.grid, target, equal, lambda rows, part: part.nearest(target[rows])
            )
            return Pruned(quantised.values(), quantised.scaling)
        scaling = self.grid.scaling(target)
        rounded = scaling.nearest(target)
        gain = target.square() - (target - rounded).square()
        if prepared is not None:
            gain = gain * prepared
        return Pruned(rounded.mul_(pattern.mask(gain)), scaling)
