"""Rounding to the nearest value of a grid: for a fixed grid optimal for H = I, and for a diagonal H too."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.cost import SCORED, Cost
from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Pruned, Pruner


@dataclass(frozen=True)
class RoundToNearest(Pruner):
    """S is the value of the grid nearest to T, on the entries whose removal would cost most.

    The grid is fitted to T. An entry that is kept costs (T − Q(T))², one that is removed T²: those with the largest
    difference, times H_jj if weighted, are kept.

    Args:
        weighted: choose the support by the diagonal of H. Without pruning it makes no difference.
    """

    grid: Grid = Grid()
    weighted: bool = False

    def prepare(self, gram: Gram) -> Tensor | None:
        return gram.diagonal if self.weighted else None

    def shares_rows(self, pattern: Pattern) -> bool:
        return True

    def prune(self, target: Tensor, prepared: Tensor | None, pattern: Pattern) -> Pruned:
        scaling = self.grid.scaling(target)
        rounded = scaling.nearest(target)
        gain = target.square() - (target - rounded).square()
        return Pruned(rounded.mul_(pattern.mask(gain if prepared is None else gain * prepared)), scaling)

    def cost(self, out: int, width: int) -> Cost:
        return Cost(0, need=SCORED)
