"""Magnitude pruning: optimal for H = I (Han et al. 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.patterns import Pattern


@dataclass(frozen=True)
class Magnitude:
    """S keeps the entries with the largest T². It does not look at H."""

    def prepare(self, gram: Gram) -> None:
        return None

    def prune(self, target: Tensor, prepared: None, pattern: Pattern) -> Tensor:
        return target * pattern.mask(target.square())
