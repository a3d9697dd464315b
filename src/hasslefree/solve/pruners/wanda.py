"""Wanda: optimal for a diagonal H (Sun et al., arXiv 2306.11695)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.cost import SCORED, Cost
from hasslefree.core.gram import Gram
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Pruned, Pruner


@dataclass(frozen=True)
class Wanda(Pruner):
    """S keeps the entries with the largest T²·H_jj, the square of Wanda's `|T|·‖X_j‖`."""

    def prepare(self, gram: Gram) -> Tensor:
        return gram.diagonal

    def shares_rows(self, pattern: Pattern) -> bool:
        return True

    def prune(self, target: Tensor, prepared: Tensor, pattern: Pattern) -> Pruned:
        return Pruned(target * pattern.mask(target.square() * prepared))

    def cost(self, out: int, width: int) -> Cost:
        return Cost(0, need=SCORED)
