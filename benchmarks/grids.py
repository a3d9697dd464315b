"""S on a grid of four bits and L in eight, on single layers: four of the embedded model, and a synthetic one.

    python benchmarks/grids.py methods [--rank 16] [--output FILE]
    python benchmarks/grids.py factors [--rank 16] [--output FILE]

methods: every quantised method, with and without 2:4, and the bytes that it takes. Pruning and rounding in one sweep
stands beside doing one after the other: rounding to the nearest value, and a second sweep that keeps the support. Rows
that the output file already holds are kept.

factors: ways to round the factors of L to eight bits: what each adds to the loss of the layer, and what its scales
take. Each method is run once; every way then rounds the factors that it found.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import hasslefree
from harness.layers import METHODS, build_method, stored_bytes
from harness.problems import Problem, few_problems
from harness.record import RESULTS, geometric_mean, machine, resumed, write
from harness.rounding import BRAIN, WAYS, Twice
from hasslefree import Budget, Gram, LowRank, Prune

# Name → the method, the pattern, how many times the rank, and the bits of the factors.
ROWS: dict[str, tuple[str, str, int, int | None]] = {
    "rtn": ("rtn", "dense", 0, None),
    "gptq": ("gptq", "dense", 0, None),
    "loftq": ("loftq", "dense", 1, None),
    "lq-lora": ("lq-lora", "dense", 1, None),
    "caldera": ("caldera", "dense", 1, None),
    "caldera, int8 factors": ("caldera", "dense", 1, 8),
    "2:4, then nearest": ("sparsegpt, nearest", "2:4", 0, None),
    "2:4, then a second sweep": ("sparsegpt, sweep", "2:4", 0, None),
    "2:4 in one sweep": ("gptq", "2:4", 0, None),
    "caldera, 2:4": ("caldera", "2:4", 1, None),
    "joint-grid, 2:4": ("joint-grid", "2:4", 1, None),
    "joint-grid, 2:4, int8 factors": ("joint-grid", "2:4", 1, 8),
    "joint-grid, 2:4, int8 factors, twice the rank": ("joint-grid", "2:4", 2, 8),
    "sparsegpt, 2:4, no grid": ("sparsegpt", "2:4", 0, None),
    "joint, 2:4, no grid": ("joint", "2:4", 1, None),
    "joint, 2:4, no grid, int8 factors": ("joint", "2:4", 1, 8),
}
# Those whose factors are rounded, and their patterns.
ROUNDED = {"caldera": "dense", "joint-grid": "2:4", "joint": "2:4"}


def run(problem: Problem, method_name: str, pattern: str, rank: int, factor_bits: int | None) -> dict[str, Any]:
    """One method on one problem: its relative error, its CPU seconds, and the bits per weight that its tensors take."""
    name, _, after = method_name.partition(", ")
    method = Prune(Twice(after == "sweep")) if after else build_method(name)  # type: ignore[arg-type]
    weight = problem.weight.to(BRAIN)
    start = time.process_time()
    result = hasslefree.decompose(weight, problem.gram, pattern, rank, method=method, factor_bits=factor_bits)
    seconds = time.process_time() - start
    shape = (weight.shape[0], weight.shape[1])
    stored = stored_bytes(shape, Budget(pattern).resolve(*shape)[0], rank, method, factor_bits)
    return {
        "relative_error": result.relative_error,
        "seconds": round(seconds, 4),
        "bits": 8 * stored / weight.numel(),
    }


def methods(rank: int, output: Path) -> None:
    problems = few_problems()
    content = resumed(output, {"rank": rank, "grid": str(METHODS["gptq"].grid)}, "problems")
    run(problems[0], "caldera", "2:4", rank, None)  # what is slow the first time
    for problem in problems:
        name = problem.name.partition(f" {problem.pattern}")[0]
        held = content["problems"].get(name, {})
        rows = {
            key: held.get(key) or run(problem, method, pattern, rank * low, bits)
            for key, (method, pattern, low, bits) in ROWS.items()
        }
        content["problems"][name] = rows
        print(name, {key: f"{row['relative_error']:.5f} at {row['bits']:.2f}" for key, row in rows.items()}, flush=True)
    write(output, content)


def factors(rank: int, output: Path) -> None:
    problems = few_problems()
    content: dict[str, Any] = {"machine": machine(), "rank": rank, "ways": {n: s for n, (_, s) in WAYS.items()}}
    content["losses"] = {}
    for name, pattern in ROUNDED.items():
        losses: dict[str, list[float]] = {way: [] for way in WAYS}
        for problem in problems:
            for way, added in added_losses(problem, name, pattern, rank).items():
                losses[way].append(added)
        content["losses"][name] = losses
        print(name, {way: f"{geometric_mean(values):.4f}" for way, values in losses.items()}, flush=True)
    write(output, content)


def added_losses(problem: Problem, name: str, pattern: str, rank: int) -> dict[str, float]:
    """The loss with factors rounded in every way, over that of the factors as the method found them."""
    method, weight, gram = build_method(name), problem.weight.to(BRAIN).float(), problem.gram.to(problem.weight)
    allowed, rank = Budget(pattern, rank).resolve(*weight.shape)
    solution = method.solve(weight, method.prepare(gram), allowed, LowRank.gaussian_start(weight, rank, 0))
    target, h = (weight - solution.sparse).double(), gram.matrix.double()
    low_rank, exact = solution.low_rank.to(torch.float64).balanced(), Gram(h, gram.tokens)
    before = exact.loss(target - low_rank.product())
    return {way: exact.loss(target - rounded(target, h, low_rank)) / before for way, (rounded, _) in WAYS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run_all, results in ((methods, "quantised"), (factors, "factors")):
        command = commands.add_parser(run_all.__name__)
        command.set_defaults(run=run_all)
        command.add_argument("--rank", type=int, default=16)
        command.add_argument("--output", type=Path, default=RESULTS / f"{results}.json")
    args = parser.parse_args()
    args.run(args.rank, args.output)


if __name__ == "__main__":
    main()
