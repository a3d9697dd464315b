"""Ways to round that the library does not offer: the factors of L step by step, S by one sweep or by two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree import Gram, Grid, LowRank, SparseGPT
from hasslefree.core.factors import hartley, nearest, positive_definite, quantised, swept
from hasslefree.core.patterns import KnownSupport, Pattern
from hasslefree.core.protocols import Pruned, Pruner

BRAIN = torch.bfloat16
# A way to round: L for T = W − S, H and the balanced factors.
Way = Callable[[Tensor, Tensor, LowRank], Tensor]


@dataclass(frozen=True)
class Twice(Pruner):
    """SparseGPT, and on what it kept plain rounding or a second sweep."""

    sweep: bool
    grid: Grid = Grid()

    def prepare(self, gram: Gram) -> Any:
        return SparseGPT().prepare(gram)

    def prune(self, target: Tensor, prepared: Any, pattern: Pattern) -> Pruned:
        pruned = SparseGPT().prune(target, prepared, pattern).sparse
        if self.sweep:
            return SparseGPT(grid=self.grid).prune(pruned, prepared, KnownSupport(pruned != 0))
        scaling = self.grid.scaling(pruned)
        return Pruned(scaling.nearest(pruned), scaling)


def rows(matrix: Tensor) -> Tensor:
    """Rounded to nearest, a scale for each row, as float64."""
    return nearest(matrix, BRAIN).values().double()


def columns(matrix: Tensor) -> Tensor:
    return rows(matrix.T).T


def refitted(target: Tensor, h: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The best u for a v; and v H vᵀ."""
    norm = positive_definite(v @ h @ v.T)
    return u + torch.linalg.solve(norm, (target - u @ v) @ h @ v.T, left=False), norm


def by_steps(
    round_u: Callable[[Tensor], Tensor],
    round_v: Callable[[Tensor], Tensor],
    refit: bool = False,
    sweep: bool = False,
    mix: bool = False,
) -> Way:
    """A way that takes some of the steps of `quantised`."""

    def way(target: Tensor, h: Tensor, start: LowRank) -> Tensor:
        mixing = hartley(start.rank, start.u.device) if mix else torch.eye(start.rank, dtype=torch.float64)
        u, v = start.u @ mixing, round_v(mixing @ start.v)
        if not refit:
            return round_u(u) @ v
        u, norm = refitted(target, h, u, v)
        return (swept(u, norm, BRAIN).values().double() if sweep else round_u(u)) @ v

    return way


def built(target: Tensor, h: Tensor, start: LowRank) -> Tensor:
    """What the library does."""
    found = quantised(start, target, torch.zeros_like(target), Gram(h, 1), BRAIN).values()
    return found.to(torch.float64).product()


def cast(_target: Tensor, _h: Tensor, start: LowRank) -> Tensor:
    return start.to(BRAIN).to(torch.float64).product()


# Name → the way, and how many scales it stores, of (out, in, rank).
WAYS: dict[str, tuple[Way, str]] = {
    "bfloat16": (cast, "none"),
    "int8, a scale for each component": (by_steps(columns, rows), "2r"),
    "int8, a scale for each row": (by_steps(rows, rows), "out + r"),
    "and u refitted": (by_steps(rows, rows, refit=True), "out + r"),
    "and mixed": (by_steps(rows, rows, refit=True, mix=True), "out + r"),
    "and swept: as built": (built, "out + r"),
    "as built, without mixing": (by_steps(rows, rows, refit=True, sweep=True), "out + r"),
    "as built, v with a scale for each input": (by_steps(rows, columns, refit=True, sweep=True, mix=True), "out + in"),
}
