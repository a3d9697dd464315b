"""Sparsity patterns: which entries of S may be non-zero. Every pattern keeps an exact count, ties going to the left.

A score (out, in) is the loss that removing an entry costs, so that `Structured` may add scores up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hasslefree.errors import PatternError


class Pattern(Protocol):
    """What a pruner may keep of a weight of one shape."""

    @property
    def group(self) -> int | None:
        """How many consecutive inputs are decided together; None where the pattern does not say."""

    def check(self, shape: tuple[int, int]) -> None:
        """Raise PatternError where a weight (out, in) cannot have this pattern."""

    def kept(self, shape: tuple[int, int]) -> int:
        """The number of kept entries of a weight (out, in)."""

    def mask(self, score: Tensor) -> Tensor:
        """The entries to keep, bool (out, in), of the largest scores (out, in)."""

    def restricted(self, start: int, stop: int, width: int) -> Pattern:
        """The share of the pattern of a weight with `width` inputs that falls to inputs start … stop − 1."""


@dataclass(frozen=True)
class SemiStructured:
    """N:M: at most n non-zeros in each m consecutive inputs of a row."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 <= self.n <= self.m or self.m < 1:
            raise PatternError(f"pattern {self.n}:{self.m} is impossible: N:M needs 0 <= N <= M and M >= 1")

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def group(self) -> int | None:
        return self.m

    def check(self, shape: tuple[int, int]) -> None:
        if shape[1] % self.m:
            raise PatternError(
                f"{self} needs in_features divisible by {self.m}, got {shape[1]}; use pattern row or unstructured"
            )

    def kept(self, shape: tuple[int, int]) -> int:
        return shape[0] * shape[1] // self.m * self.n

    def mask(self, score: Tensor) -> Tensor:
        self.check((score.shape[0], score.shape[1]))
        groups = score.reshape(len(score), -1, self.m)
        return largest(groups, self.n).reshape(score.shape)

    def restricted(self, start: int, stop: int, width: int) -> SemiStructured:
        return self


@dataclass(frozen=True)
class Unstructured:
    """The `count` largest entries over the whole matrix."""

    count: int

    def __str__(self) -> str:
        return "unstructured"

    @property
    def group(self) -> int | None:
        return None

    def check(self, shape: tuple[int, int]) -> None:
        _check_count(self, self.count, shape[0] * shape[1], "entries")

    def kept(self, shape: tuple[int, int]) -> int:
        return self.count

    def mask(self, score: Tensor) -> Tensor:
        self.check((score.shape[0], score.shape[1]))
        return largest(score.flatten(), self.count).reshape(score.shape)

    def restricted(self, start: int, stop: int, width: int) -> Unstructured:
        return Unstructured(_share(self.count, start, stop, width))


@dataclass(frozen=True)
class Row:
    """The `count` largest entries of each row (output)."""

    count: int

    def __str__(self) -> str:
        return "row"

    @property
    def group(self) -> int | None:
        return None

    def check(self, shape: tuple[int, int]) -> None:
        _check_count(self, self.count, shape[1], "entries of a row")

    def kept(self, shape: tuple[int, int]) -> int:
        return shape[0] * self.count

    def mask(self, score: Tensor) -> Tensor:
        self.check((score.shape[0], score.shape[1]))
        return largest(score, self.count)

    def restricted(self, start: int, stop: int, width: int) -> Row:
        return Row(_share(self.count, start, stop, width))


@dataclass(frozen=True)
class Structured:
    """`count` whole input channels (columns of the weight) of the largest total score."""

    count: int

    def __str__(self) -> str:
        return "structured"

    @property
    def group(self) -> int | None:
        return None

    def check(self, shape: tuple[int, int]) -> None:
        _check_count(self, self.count, shape[1], "input channels")

    def kept(self, shape: tuple[int, int]) -> int:
        return shape[0] * self.count

    def mask(self, score: Tensor) -> Tensor:
        self.check((score.shape[0], score.shape[1]))
        return largest(score.sum(0), self.count).expand(score.shape)

    def restricted(self, start: int, stop: int, width: int) -> Structured:
        return Structured(_share(self.count, start, stop, width))


def largest(score: Tensor, count: int) -> Tensor:
    """The `count` largest along the last dimension, as a bool mask; equal scores are kept from the left.

    The choice is by count and never by a threshold alone, so that the count is exact. score: (..., n), finite.
    """
    if count == 0 or count == score.shape[-1]:
        return torch.full_like(score, count > 0, dtype=torch.bool)
    threshold = score.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = score > threshold
    tied = score == threshold
    room = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _share(count: int, start: int, stop: int, width: int) -> int:
    """The part of `count` that falls to start … stop of width, so that consecutive parts add up to it exactly."""
    return count * stop // width - count * start // width


def _check_count(pattern: object, count: int, limit: int, what: str) -> None:
    if not 0 <= count <= limit:
        raise PatternError(f"pattern {pattern} cannot keep {count} of {limit} {what}; choose another sparsity")
