"""A pruner alone: W ≈ S."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Pruner, Solution, grid_of, quantise
from hasslefree.errors import BudgetError


@dataclass(frozen=True)
class Prune:
    """S ← prune(W), and no low-rank part.

    Args:
        pruner: any. damping: λ over the mean of diag H.
    """

    pruner: Pruner
    damping: float = 0.01

    @property
    def grid(self) -> Grid | None:
        return grid_of(self.pruner)

    def check(self, rank: int) -> None:
        if rank:
            raise BudgetError(
                f"{type(self.pruner).__name__} alone has no low-rank part, got rank {rank}; "
                f"use rank 0, or a method such as {'caldera' if self.grid else 'joint'}"
            )

    def prepare(self, gram: Gram) -> tuple[Gram, Any]:
        damped = gram.damped(self.damping)
        return damped, self.pruner.prepare(damped)

    def solve(
        self, weight: Tensor, prepared: tuple[Gram, Any], pattern: Pattern, rank: int, generator: torch.Generator
    ) -> Solution:
        gram, for_pruner = prepared
        sparse, scaling = quantise(self.pruner, weight, for_pruner, pattern)
        nothing = LowRank(weight.new_zeros(len(weight), 0), weight.new_zeros(0, weight.shape[1]))
        return Solution(sparse, nothing, (gram.relative_error(weight - sparse, weight),), scaling=scaling)
