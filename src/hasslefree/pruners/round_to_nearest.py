"""Rounding to the nearest value of a grid: optimal for H = I once the grid lies, and for a diagonal H too."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid, Scaling
from hasslefree.core.patterns import Pattern


@dataclass(frozen=True)
class RoundToNearest:
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

    def prune(self, target: Tensor, prepared: Tensor | None, pattern: Pattern) -> Tensor:
        return self.quantise(target, prepared, pattern)[0]

    def quantise(self, target: Tensor, prepared: Tensor | None, pattern: Pattern) -> tuple[Tensor, Scaling]:
        """S: (out, in), and where the grid lies on which it is."""
        scaling = self.grid.scaling(target)
        rounded = scaling.nearest(target)
        gain = target.square() - (target - rounded).square()
        return rounded.mul_(pattern.mask(gain if prepared is None else gain * prepared)), scaling
