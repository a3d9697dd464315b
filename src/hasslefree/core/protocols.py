"""The three kinds of plug-in and what they hand on. A plug-in is a frozen dataclass of its hyper-parameters.

Each splits its work in two: `prepare` does what depends on the Gram alone, once; the rest is done for every weight,
every round. What `prepare` returns is the plug-in's own affair: no result may depend on what was solved with it before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from hasslefree.core.factors import CodedFactors
from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid, Quantised, Scaling
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern, Structured
from hasslefree.errors import PatternError


class Pruner(Protocol):
    """Solves P1: a sparse S close to a target in the norm of H.

    One whose S lies on a grid has a field `grid: Grid`, and a method `quantise` with the arguments of `prune`, which
    returns S and its `Scaling`; `quantise` here calls it. One that removes whole input channels, and takes no pattern
    but `Structured`, has `whole_channels = True`: the heads of attention then stay or go in one piece.
    """

    def prepare(self, gram: Gram) -> Any:
        """What the pruner needs of the (damped) Gram."""

    def prune(self, target: Tensor, prepared: Any, pattern: Pattern) -> Tensor:
        """S: (out, in) with this pattern, for a target (out, in). The target is not changed."""


def grid_of(part: object) -> Grid | None:
    """The grid on which the S of a pruner or method lies; None where S may hold any number."""
    return getattr(part, "grid", None)


def quantise(pruner: Any, target: Tensor, prepared: Any, pattern: Pattern) -> tuple[Tensor, Scaling | None]:
    """A pruner's S for a target (out, in); and where its grid lies, if it has one."""
    if grid_of(pruner) is None:
        return pruner.prune(target, prepared, pattern), None
    return pruner.quantise(target, prepared, pattern)


def removes_channels(part: Any) -> bool:
    """Whether a pruner, or the one in a method or in another pruner, removes whole input channels and nothing else."""
    return removes_channels(part.pruner) if hasattr(part, "pruner") else getattr(part, "whole_channels", False)


def check_pattern(part: Any, pattern: Pattern) -> None:
    """Raise PatternError where the part removes whole channels, and the pattern does not."""
    if hasattr(part, "pruner"):
        check_pattern(part.pruner, pattern)
    elif removes_channels(part) and not isinstance(pattern, Structured):
        raise PatternError(f"{type(part).__name__} removes whole input channels, not {pattern}; use pattern structured")


class LowRankSolver(Protocol):
    """Solves P2: a low-rank L close to a target in the norm of H."""

    def prepare(self, gram: Gram) -> Any:
        """What the solver needs of the (damped) Gram."""

    def fit(self, target: Tensor, prepared: Any, start: LowRank, round: int) -> LowRank:
        """L of the rank of `start`, for a target (out, in), from a start, in round 0, 1, 2, … of an alternation."""


@dataclass(frozen=True)
class Solution:
    """What a method found, in the working dtype.

    Args:
        sparse: (out, in). low_rank: (out, r), (r, in).
        history: the damped objective over the damped norm of W, as often as the method measures it, or estimates it;
            empty where nothing was removed.
        remarks: what the method did that is out of the ordinary, a sentence each.
        scaling: where the grid lies on which S is; None where S may hold any number.
    """

    sparse: Tensor
    low_rank: LowRank
    history: tuple[float, ...]
    remarks: tuple[str, ...] = ()
    scaling: Scaling | None = None


class Method(Protocol):
    """Solves the whole problem. One whose S lies on a grid has `grid: Grid`, and its solutions say where that lies."""

    def check(self, rank: int) -> None:
        """Raise BudgetError where the method has no use for such a rank."""

    def prepare(self, gram: Gram) -> Any:
        """What the method needs of the (undamped) Gram; shared by all layers with the same input."""

    def solve(self, weight: Tensor, prepared: Any, pattern: Pattern, rank: int, generator: torch.Generator) -> Solution:
        """S and L for a weight (out, in). The weight is not changed."""


@dataclass(frozen=True)
class Decomposition:
    """W ≈ S + L.

    Args:
        sparse: (out, in), in the dtype of W.
        low_rank: factors (out, r) and (r, in), in the dtype of W.
        relative_error: tr(R H Rᵀ) / tr(W H Wᵀ) with the undamped H, measured on what is returned here.
        relative_error_before_cast: the same before the cast to the dtype of W.
        history: the objective of the method (damped, relative), as often as it measures it, or estimates it.
        remarks: what is out of the ordinary about the inputs, the way to the result, or the result; empty as a rule.
        quantised: the codes of S, where it is on a grid: `sparse` holds their values, rounded to the dtype of W.
        factors: the codes of u and v, where they are in eight bits: `low_rank` holds their values, likewise.
    """

    sparse: Tensor = field(repr=False)
    low_rank: LowRank = field(repr=False)
    relative_error: float
    relative_error_before_cast: float
    history: tuple[float, ...] = field(repr=False)
    remarks: tuple[str, ...] = ()
    quantised: Quantised | None = field(default=None, repr=False)
    factors: CodedFactors | None = field(default=None, repr=False)

    def product(self) -> Tensor:
        """S + L: (out, in)."""
        return self.sparse + self.low_rank.product()
