"""Ways to round the factors of L to eight bits: what each adds to the loss of the layer, and what its scales take.

    python benchmarks/factors.py [--rank 16] [--output FILE]

The layers are those of quantised.py. Each method is run once; every way then rounds the factors that it found.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import geometric_mean, machine, write
from layers import few_problems
from torch import Tensor

from hasslefree import Budget, Gram, LowRank
from hasslefree.core.factors import hartley, nearest, positive_definite, quantised, swept
from hasslefree.methods import build_method

ROOT = Path(__file__).parents[1]
BRAIN = torch.bfloat16
METHODS = {"caldera": "dense", "joint-grid": "2:4", "joint": "2:4"}


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
) -> Callable[[Tensor, Tensor, LowRank], Tensor]:
    """A way that takes some of the steps of `quantised`. It gives L for T, H and the balanced factors."""

    def way(target: Tensor, h: Tensor, start: LowRank) -> Tensor:
        mixing = hartley(start.u) if mix else torch.eye(start.rank, dtype=torch.float64)
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
WAYS: dict[str, tuple[Callable[[Tensor, Tensor, LowRank], Tensor], str]] = {
    "bfloat16": (cast, "none"),
    "int8, a scale for each component": (by_steps(columns, rows), "2r"),
    "int8, a scale for each row": (by_steps(rows, rows), "out + r"),
    "and u refitted": (by_steps(rows, rows, refit=True), "out + r"),
    "and mixed": (by_steps(rows, rows, refit=True, mix=True), "out + r"),
    "and swept: as built": (built, "out + r"),
    "as built, without mixing": (by_steps(rows, rows, refit=True, sweep=True), "out + r"),
    "as built, v with a scale for each input": (by_steps(rows, columns, refit=True, sweep=True, mix=True), "out + in"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "factors.json")
    args = parser.parse_args()
    problems = few_problems()
    content: dict[str, Any] = {"machine": machine(), "rank": args.rank, "ways": {n: s for n, (_, s) in WAYS.items()}}
    content["losses"] = {}
    for name, pattern in METHODS.items():
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for problem in problems:
            method, weight, gram = build_method(name), problem.weight.to(BRAIN).float(), problem.gram.to(problem.weight)
            allowed, rank = Budget(pattern, args.rank).resolve(*weight.shape)
            solution = method.solve(weight, method.prepare(gram), allowed, rank, torch.Generator().manual_seed(0))
            target, h = (weight - solution.sparse).double(), gram.matrix.double()
            low_rank, exact = solution.low_rank.to(torch.float64).balanced(), Gram(h, gram.tokens)
            before = exact.loss(target - low_rank.product())
            for way, (rounded, _) in WAYS.items():
                found[way].append(exact.loss(target - rounded(target, h, low_rank)) / before)
        content["losses"][name] = found
        print(name, {way: f"{geometric_mean(values):.4f}" for way, values in found.items()}, flush=True)
    write(args.output, content)


if __name__ == "__main__":
    main()
