"""Magnitude pruning: optimal for H = I (Han et al. 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.cost import SCORED, Cost
from hasslefree.core.gram import Gram
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Pruned, Pruner


@dataclass(frozen=True)
class Magnitude(Pruner):
    """S keeps the entries with the largest T². It does not look at H."""

    def prepare(self, gram: Gram) -> None:
        return None

    def shares_rows(self, pattern: Pattern) -> bool:
        return True

    def prune(self, target: Tensor, prepared: None, pattern: Pattern) -> Pruned:
        return Pruned(target * pattern.mask(target.square()))

    def cost(self, out: int, width: int) -> Cost:
        return Cost(0, need=SCORED)
