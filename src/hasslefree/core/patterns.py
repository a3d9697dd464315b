"""Sparsity patterns: the entries of S that may be non-zero. Every pattern keeps an exact count, and
prefers the left of two equal scores.

Scores (out, in) are the losses that removing an entry causes; `Structured` adds them up.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hasslefree.errors import PatternError, option

# Groups up to this size are ranked by comparing all pairs; beyond it a partial sort is faster.
PAIRWISE = 8
# Number of samples that bracket the threshold of a single row, if the row is much longer.
SAMPLES = 1 << 11


class Pattern(ABC):
    """A rule for the entries that a pruner keeps, for weights whose shape `check` accepts."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    @property
    def group(self) -> int | None:
        """Number of consecutive inputs that are decided together; None without groups."""
        return None

    @abstractmethod
    def check(self, shape: Sequence[int]) -> None:
        """Raise PatternError if a weight (out, in) cannot have this pattern."""

    @abstractmethod
    def kept(self, shape: Sequence[int]) -> int:
        """Return the number of kept entries of a weight (out, in)."""

    @abstractmethod
    def mask(self, score: Tensor) -> Tensor:
        """Return the entries to keep, bool (out, in): those with the largest scores (out, in)."""

    def with_kept(self, shape: Sequence[int], kept: int) -> "Pattern":
        """Return the same kind of pattern that keeps `kept` entries of a weight (out, in)."""
        return self

    @abstractmethod
    def restricted(self, inputs: slice, width: int) -> "Pattern":
        """Return the part of the pattern in some of the `width` inputs of a weight."""


@dataclass(frozen=True)
class SemiStructured(Pattern):
    """N:M: at most n non-zeros per m consecutive inputs of a row. 1:1 keeps everything; its name is
    dense.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 <= self.n <= self.m or self.m < 1:
            meant = f"; use {self.m}:{self.n}" if 0 <= self.m < self.n else ""
            raise PatternError(
                f"pattern {self.n}:{self.m} is impossible: N:M needs 0 <= N <= M and M >= 1{meant}"
            )

    def __str__(self) -> str:
        if self.n == self.m == 1:
            return "dense"
        return f"{self.n}:{self.m}"

    @property
    def group(self) -> int:
        return self.m

    def check(self, shape: Sequence[int]) -> None:
        if shape[1] % self.m:
            raise PatternError(
                f"pattern {self} does not fit a layer of {shape[1]} inputs, no multiple of"
                f" {self.m}; use an M that divides {shape[1]}, or {option('pattern', 'row')}"
                f" {option('sparsity', round(1 - self.n / self.m, 2))}"
            )

    def kept(self, shape: Sequence[int]) -> int:
        return shape[0] * shape[1] // self.m * self.n

    def mask(self, score: Tensor) -> Tensor:
        groups = score.reshape(-1, self.m)
        kept = largest(groups, self.n) if self.m > PAIRWISE else largest_by_pairs(groups, self.n)
        return kept.reshape(score.shape)

    def restricted(self, inputs: slice, width: int) -> "SemiStructured":
        return self


@dataclass(frozen=True)
class Counted(Pattern):
    """A pattern that keeps a given count of entries or channels."""

    counted: ClassVar[str]
    count: int

    def limit(self, shape: Sequence[int]) -> int:
        """Return the largest possible count for a weight (out, in)."""
        return shape[1]

    def check(self, shape: Sequence[int]) -> None:
        limit = self.limit(shape)
        if not 0 <= self.count <= limit:
            raise PatternError(
                f"pattern {self} must keep from 0 to {limit} {self.counted}, got {self.count}"
            )

    def kept(self, shape: Sequence[int]) -> int:
        return shape[0] * self.count

    def with_kept(self, shape: Sequence[int], kept: int) -> "Counted":
        return replace(self, count=kept // shape[0])

    def restricted(self, inputs: slice, width: int) -> "Counted":
        """Consecutive parts add up to exactly the count. They have no unit."""
        return type(self)(self.count * inputs.stop // width - self.count * inputs.start // width)


@dataclass(frozen=True)
class Unstructured(Counted):
    """The `count` largest entries of the whole matrix."""

    name = "unstructured"
    counted = "entries"

    def limit(self, shape: Sequence[int]) -> int:
        return math.prod(shape)

    def kept(self, shape: Sequence[int]) -> int:
        return self.count

    def with_kept(self, shape: Sequence[int], kept: int) -> "Unstructured":
        return Unstructured(kept)

    def mask(self, score: Tensor) -> Tensor:
        return largest(score.flatten(), self.count).reshape(score.shape)


@dataclass(frozen=True)
class Row(Counted):
    """The `count` largest entries of each row (output)."""

    name = "row"
    counted = "entries of a row"

    def mask(self, score: Tensor) -> Tensor:
        return largest(score, self.count)


@dataclass(frozen=True)
class Structured(Counted):
    """The `count` input channels (columns of the weight) with the largest total scores.

    Args:
        unit: the number of consecutive channels that are kept or removed together, such as the
            channels of an attention head.
    """

    name = "structured"
    counted = "input channels"
    unit: int = 1

    def check(self, shape: Sequence[int]) -> None:
        super().check(shape)
        if self.unit < 1 or shape[1] % self.unit or self.count % self.unit:
            raise PatternError(
                f"pattern {self} cannot keep {self.count} of {shape[1]} input channels: both"
                f" numbers must be multiples of unit={self.unit}; choose another count or another"
                " unit"
            )

    def mask(self, score: Tensor) -> Tensor:
        totals = score.sum(0).view(-1, self.unit).sum(1)
        units = largest(totals, self.count // self.unit)
        return units.repeat_interleave(self.unit).expand(score.shape)


@dataclass(frozen=True)
class KnownSupport(Pattern):
    """A support that is already known: the true entries of `known`, bool (out, in)."""

    name = "known support"
    known: Tensor

    def check(self, shape: Sequence[int]) -> None:
        assert self.known.shape == tuple(shape)

    def kept(self, shape: Sequence[int]) -> int:
        return int(torch.count_nonzero(self.known))

    def mask(self, score: Tensor) -> Tensor:
        return self.known

    def restricted(self, inputs: slice, width: int) -> "KnownSupport":
        return KnownSupport(self.known[:, inputs])


def largest(score: Tensor, count: int) -> Tensor:
    """Return a bool mask of the `count` largest finite scores along the last dimension. Among equal
    scores, the left ones are kept.
    """
    if count == 0 or count == score.shape[-1]:
        return torch.full_like(score, count > 0, dtype=torch.bool)
    if score.ndim == 1 and len(score) > 32 * SAMPLES:
        threshold = smallest_of_largest(score, count)
    else:
        threshold = score.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    at_least = score >= threshold
    if torch.count_nonzero(at_least) == count * threshold.numel():  # no ties: the usual case
        return at_least
    above = score > threshold
    tied = score == threshold
    room = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def smallest_of_largest(score: Tensor, count: int) -> Tensor:
    """Return the exact `count`-th largest score of a long row (n,), as (1,).

    Samples bracket the threshold; only the entries in the bracket are sorted.
    """
    # An odd step samples all columns of a matrix, even if its width is a power of two.
    step = len(score) // SAMPLES | 1
    samples = score[::step].sort(descending=True).values
    share = count / len(score)
    position = share * len(samples)
    margin = 3 * math.sqrt(len(samples) * share * (1 - share)) + 1
    upper = samples[max(int(position - margin), 0)]
    lower = samples[min(int(position + margin), len(samples) - 1)]
    above = score > upper
    bracket = score[(score >= lower) ^ above]
    wanted = count - int(torch.count_nonzero(above))
    if not 1 <= wanted <= len(bracket):  # the samples were misleading
        bracket = score
        wanted = count
    return bracket.topk(wanted, sorted=False).values.amin(0, keepdim=True)


def largest_by_pairs(score: Tensor, count: int) -> Tensor:
    """`largest` for short rows (groups, m), without sorting: compare each pair of columns once,
    over all rows, and count how many entries rank before each entry.
    """
    columns = score.T
    m = len(columns)
    before = torch.empty(columns.shape, dtype=torch.int8, device=score.device)
    for i in range(m):
        before[i] = m - 1 - i  # as if all later entries were larger
    for i in range(m):
        for j in range(i + 1, m):
            first = torch.ge(columns[i], columns[j]).view(torch.int8)
            before[j].add_(first)
            before[i].sub_(first)
    return before.lt_(count).view(torch.bool).T
