"""One method on one layer: methods by their names in the results, their budgets, errors, seconds and bytes."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

import torch

import hasslefree
from harness.problems import Problem
from hasslefree import Budget, Decomposition, Gram, LowRank, Prune, RandomizedSVD
from hasslefree.core.patterns import Pattern
from hasslefree.core.products import matmul_precision
from hasslefree.core.protocols import Method
from hasslefree.errors import GridError
from hasslefree.planning.plan import LayerPlan
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.methods import METHODS, build_method, settings_of

__all__ = ["METHODS", "build_method", "matmul_precision"]

# What has a support of the problem's pattern and a low-rank part of its rank → its numbers of rounds; None where it
# has none.
CURVES: dict[str, list[int | None]] = {
    "oats": [5, 20, 80],
    "hassle-free": [5, 20, 80],
    "hassle-free, exact step": [5, 20, 80],
    "eora": [None],
    "3basil": [25, 50, 100, 200, 2000],
    "joint": [25, 50, 100, 200],
    "godec": [5, 20, 80],
    "pcp": [None],
}


@dataclass(frozen=True)
class Room:
    """What a system takes of a problem's budget.

    Args:
        holds: what S is in: a "support", "channels" (as large a share of them as the pattern keeps of the entries), a
            "grid" (nothing is pruned) or a "support on a grid". ranked: whether it has the rank.
    """

    holds: str
    ranked: bool = False

    def __str__(self) -> str:
        return f"{self.holds} + rank" if self.ranked else self.holds

    @classmethod
    def of(cls, method: Method) -> Room:
        """The room of a method that has no other."""
        holds = "channels" if method.whole_channels else "grid" if method.grid else "support"
        return cls(holds, ranked=not isinstance(method, Prune))


RANKED = Room("support", ranked=True)  # of all CURVES
# Every method that has no curve, and variants of methods.
ROOMS: dict[str, Room] = {name: Room.of(method) for name, method in METHODS.items() if name not in CURVES} | {
    "wanda, refit": Room("support"),
    "joint, S alone": Room("support"),
    "gptq, pruned": Room("support on a grid"),
    "joint-grid, pruned": Room("support on a grid", ranked=True),
}


# Methods whose memory is not measured: that of another method with the same parts (wanda, osscar) is.
UNMEASURED = ("magnitude", "losparse")


@dataclass(frozen=True)
class CountedSVD(RandomizedSVD):
    """A randomised SVD that counts: 3basil stops by itself, and one fit is one round."""

    fits: list[int] = field(default_factory=list)

    def fit(self, target: torch.Tensor, prepared: None, start: LowRank, round: int) -> LowRank:
        self.fits.append(round)
        return super().fit(target, prepared, start, round)


def configured(name: str, rounds: int | None) -> Method:
    """The method of this name with its knob for time against quality at `rounds`."""
    if name == "3basil":
        return of_three_blocks(most=rounds)
    low_rank = "exact" if name.endswith("exact step") else None
    return build_method(name.split(",")[0], low_rank=low_rank, rounds=rounds, refit=name.endswith("refit"))


def of_three_blocks(**penalty: Any) -> Any:
    """3basil with other fields of its penalty."""
    method: Any = build_method("3basil")
    return dataclasses.replace(method, penalty=dataclasses.replace(method.penalty, **penalty))


def short(name: str, rounds: int) -> Method:
    """The method with few rounds, which take the same memory as many."""
    if name == "3basil":
        return of_three_blocks(every=2, most=rounds)
    return (
        build_method(name, rounds=rounds)
        if "rounds" in settings_of(METHODS[name]) and name != "eora"
        else METHODS[name]
    )


def default_pattern(name: str) -> str:
    """2:4, or whole channels where the method takes no other pattern."""
    return "structured" if METHODS[name].whole_channels else "2:4"


def budget_in(problem: Problem, room: Room) -> tuple[Pattern, int]:
    """The pattern and the rank that a room has of a problem's budget."""
    shape = (problem.weight.shape[0], problem.weight.shape[1])
    budget = Budget(problem.pattern, sparsity=problem.sparsity)
    if room.holds == "channels":
        budget = Budget("structured", sparsity=1 - budget.resolve(*shape)[0].kept(shape) / problem.weight.numel())
    elif room.holds == "grid":
        budget = Budget("dense")
    return budget.resolve(*shape)[0], problem.rank if room.ranked else 0


def stored_bytes(
    shape: tuple[int, int], pattern: Pattern, rank: int, method: Method, factor_bits: int | None = None
) -> int:
    """The bytes of S and L as stored, in bfloat16 where they are not on a grid."""
    return LayerPlan.of(shape, pattern, rank, torch.bfloat16, method.grid, factor_bits).size


def run(problem: Problem, name: str, rounds: int | None, seed: int, clock: str) -> dict[str, Any]:
    """One method on one problem, with all that depends on H made anew. clock: "cpu" or "wall"."""
    method: Any = configured(name, rounds)
    if name == "3basil":
        method = dataclasses.replace(method, svd=CountedSVD(**dataclasses.asdict(method.svd)))
    now = time.thread_time if clock == "cpu" else time.perf_counter
    pattern, rank = budget_in(problem, ROOMS.get(name, RANKED))
    start = now()
    result = hasslefree.decompose(problem.weight, problem.gram, pattern, rank, method=method, seed=seed)
    seconds = now() - start
    if name == "3basil":
        rounds = len(method.svd.fits)
    row = {"relative_error": result.relative_error, "seconds": round(seconds, 4), "rounds": rounds}
    stored = stored_bytes((problem.weight.shape[0], problem.weight.shape[1]), pattern, rank, method)
    return row | {"bytes_a_weight": stored / problem.weight.numel()}


def possible(problem: Problem, name: str) -> bool:
    """Whether the groups of a system's grid divide the inputs and hold whole groups of the pattern."""
    pattern, _ = budget_in(problem, ROOMS[name])
    try:
        if grid := configured(name, None).grid:
            grid.check(problem.weight.shape, pattern)
    except GridError:
        return False
    return True


def solved(
    weight: torch.Tensor, gram: Gram, method: Method, prepared: Any, pattern: Pattern, rank: int
) -> Decomposition:
    """`decompose` with what depends on H prepared already, so that its time and its memory can be measured apart."""
    return solve_layer(weight, gram, method, prepared, pattern, rank, seed=0)
