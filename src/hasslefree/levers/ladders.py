"""One budget over many layers: what the next rank, or the next non-zeros, of each would win decides who gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram


@dataclass(frozen=True)
class Ladder:
    """Steps that can be taken one after the other, each of the same cost.

    Args:
        gains: what each further step wins, falling: (steps,) float64. cost: of a step, in bytes.
    """

    gains: Tensor
    cost: int

    def weighed(self, weight: float) -> Ladder:
        """The same steps, each winning so many times as much."""
        return Ladder(self.gains * weight, self.cost)


def climb(ladders: Sequence[Ladder], budget: int) -> list[int]:
    """How many steps to take on each ladder, for the most gain within the budget, in bytes.

    The steps with the most gain a byte come first; since gains fall, none is taken before the one below it. That is
    the best choice but for the bytes that are left over at the end, fewer than the dearest step costs. Ties go to the
    earlier ladder. A step that wins nothing is not taken. Gains may be on any device; the choice is made on the CPU.
    """
    taken, closed = [0] * len(ladders), [False] * len(ladders)
    rates = torch.cat([ladder.gains.cpu() / ladder.cost for ladder in ladders])
    owners = torch.cat([torch.full((len(ladder.gains),), i) for i, ladder in enumerate(ladders)])
    order = rates.argsort(descending=True, stable=True)
    for index in owners[order[rates[order] > 0]].tolist():
        if ladders[index].cost > budget:
            closed[index] = True
        if not closed[index]:
            taken[index] += 1
            budget -= ladders[index].cost
    return taken


def root_of(gram: Gram) -> Tensor:
    """F with H = F Fᵀ: (in, in), float64. H may be singular."""
    values, vectors = torch.linalg.eigh(gram.matrix.double())
    return vectors * values.clamp_min(0).sqrt()


def rank_gains(residual: Tensor, gram: Gram, root: Tensor | None = None) -> Tensor:
    """By how much each further rank of L lowers tr(R H Rᵀ), for R = W − S: (min(out, in),), falling, float64.

    They are the squared singular values of R H^½ (Eckart and Young), the eigenvalues of R H Rᵀ.

    Args:
        root: `root_of(gram)`, where it is known; more rows than columns need it.
    """
    wide, matrix = residual.double(), gram.matrix.double()
    if wide.shape[0] <= wide.shape[1]:
        square = wide @ matrix @ wide.T
    else:
        # The same but for zeros: of FᵀRᵀRF, with H = F Fᵀ.
        factor = root_of(gram) if root is None else root
        square = factor.T @ (wide.T @ wide) @ factor
    return torch.linalg.eigvalsh(square).flip(0).clamp_min(0)
