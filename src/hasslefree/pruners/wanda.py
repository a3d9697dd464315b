"""Wanda: optimal for a diagonal H (Sun et al., arXiv 2306.11695)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.patterns import Pattern


@dataclass(frozen=True)
class Wanda:
    """S keeps the entries with the largest T²·H_jj, the square of Wanda's |T|·‖X_j‖."""

    def prepare(self, gram: Gram) -> Tensor:
        return gram.diagonal

    def prune(self, target: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        return target * pattern.mask(target.square() * prepared)
