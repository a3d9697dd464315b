"""The three kinds of plug-in and the data they exchange. A plug-in is a frozen dataclass of its
hyper-parameters.

The attributes and methods of the base class state what a plug-in can do. All have defaults: a new
pruner only needs `prune`. A plug-in splits its work in two: `prepare` does the work that depends on
the Gram alone, once; the rest is done for every weight, in every round. Only the plug-in reads the
result of its `prepare`, and no solution may depend on what was solved before with the same result.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hasslefree.core.factors import CodedFactors
from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid, Quantised, Scaling
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern, Structured
from hasslefree.errors import PatternError
from hasslefree.validation import Checked


@dataclass(frozen=True)
class About:
    """A row of `hasslefree methods`.

    Args:
        line: a description of the entry.
        reference: its source, such as "arXiv 2502.00899" or "docs: joint".
    """

    line: str
    reference: str


@dataclass(frozen=True)
class Pruned:
    """The result of a pruner.

    Args:
        sparse: S, (out, in).
        scaling: the scales and zeros of a quantised S; None for floats.
    """

    sparse: Tensor
    scaling: Scaling | None = None


class Sparsifier(Checked):
    """The base class of pruners and methods: what they declare about their S. A plug-in that leaves
    S to an `inner` plug-in inherits the declarations of the inner one.
    """

    def prepare(self, gram: Gram) -> Any:
        """Do the work that depends on the Gram alone, for all layers with the same input.

        Args:
            gram: damped for a pruner, undamped for a method.
        """
        return None

    @property
    def inner(self) -> "Sparsifier | None":
        """The plug-in that computes S; None if this one computes S itself."""
        return None

    @property
    def grid(self) -> Grid | None:
        """The grid of a quantised S; None if S may hold any number."""
        if self.inner is None:
            return None
        return self.inner.grid

    @property
    def whole_channels(self) -> bool:
        """True if whole input channels are removed. Attention heads are then kept or removed as a
        whole.
        """
        return self.inner is not None and self.inner.whole_channels

    def check_pattern(self, pattern: Pattern) -> None:
        """Raise PatternError if the plug-in removes whole channels and the pattern is not
        `Structured`.
        """
        if self.inner:
            self.inner.check_pattern(pattern)
        elif self.whole_channels and not isinstance(pattern, Structured):
            raise PatternError(
                f"{type(self).__name__} removes whole input channels and needs pattern structured,"
                f" got pattern {pattern}"
            )


class Pruner(Sparsifier, ABC):
    """Solves P1: a sparse S close to a target in the norm of H."""

    @abstractmethod
    def prune(
        self,
        target: Tensor,
        prepared: Any,
        pattern: Pattern,
    ) -> Pruned:
        """Compute S, (out, in), with this pattern, for a target (out, in), which is not changed."""


class LowRankSolver(Checked, ABC):
    """Solves P2: a low-rank L close to a target in the norm of H."""

    def prepare(self, gram: Gram) -> Any:
        """Do the work that depends on the damped Gram alone."""
        return None

    def start(self, weight: Tensor, rank: int, seed: int) -> LowRank:
        """Draw the L of round 0, for a weight (out, in): one factor is random, the other zero."""
        return LowRank.gaussian_start(weight, rank, seed)

    @abstractmethod
    def fit(
        self,
        target: Tensor,
        prepared: Any,
        start: LowRank,
        round: int,
    ) -> LowRank:
        """Compute L for a target.

        Args:
            target: (out, in); it is not changed.
            prepared: the result of `prepare`.
            start: the L of the previous round; in round 0, the result of the method `start`. The
                result must have the same rank.
            round: the round of the alternation: 0, 1, 2, …
        """


@dataclass(frozen=True)
class Solution:
    """The result of a method, in the working dtype.

    Args:
        sparse: S, (out, in).
        low_rank: L, with factors (out, r) and (r, in).
        history: the damped objective over the damped norm of W, whenever the method measures or
            estimates it; empty if nothing was removed.
        remarks: unusual events, one sentence each.
        scaling: the scales and zeros of a quantised S; None if S may hold any number.
    """

    sparse: Tensor
    low_rank: LowRank
    history: tuple[float, ...]
    remarks: tuple[str, ...] = ()
    scaling: Scaling | None = None

    @property
    def error(self) -> float:
        """The objective at the end."""
        return self.history[-1]


class Method(Sparsifier, ABC):
    """Solves the whole problem."""

    def check(self, rank: int) -> None:
        """Raise BudgetError if the method cannot use this rank. The default accepts every rank."""

    def start(self, weight: Tensor, rank: int, seed: int) -> LowRank:
        """Draw the first L, for a weight (out, in): one factor is random, the other zero."""
        return LowRank.gaussian_start(weight, rank, seed)

    @abstractmethod
    def solve(
        self,
        weight: Tensor,
        prepared: Any,
        pattern: Pattern,
        start: LowRank,
    ) -> Solution:
        """Compute S and L for a weight.

        Args:
            weight: W, (out, in); it is not changed.
            prepared: the result of `prepare`.
            start: the result of the method `start`. The solution must have the same rank.
        """


@dataclass(frozen=True)
class Decomposition:
    """W ≈ S + L.

    Args:
        sparse: (out, in), in the dtype of W.
        low_rank: factors (out, r) and (r, in), in the dtype of W.
        relative_error: tr(R H Rᵀ) / tr(W H Wᵀ) with the undamped H and R = W − S − L, for the S and
            L returned here.
        relative_error_before_cast: the same before the cast to the dtype of W.
        history: the objective of the method (damped, relative), whenever the method measures or
            estimates it.
        remarks: unusual facts about the inputs, the computation or the result, one sentence each;
            usually empty.
        quantised: the codes of an S on a grid. `sparse` holds their values, rounded to the dtype of
            W.
        factors: the codes of u and v in eight bits. `low_rank` holds their values, also rounded to
            the dtype of W.
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
