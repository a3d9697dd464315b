"""S on a grid of four bits: every quantised method on single layers, with and without 2:4, and the bytes that it takes.

    python benchmarks/quantised.py [--rank 16] [--output FILE]

Problems: four layers of the embedded model with the Grams of the dense model, and a synthetic one, as in layers.py.
Pruning and rounding in one sweep stands beside doing one after the other: rounding to the nearest value, and a second
sweep that keeps the support. Rows that the output file already holds are kept.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import resumed, write
from layers import Problem, few_problems
from torch import Tensor

import hasslefree
from hasslefree import Budget, Gram, Grid, Prune, SparseGPT
from hasslefree.core.factors import factor_bytes
from hasslefree.core.patterns import KnownSupport, Pattern
from hasslefree.core.protocols import grid_of
from hasslefree.core.storage import Storage
from hasslefree.methods import METHODS, build_method

ROOT = Path(__file__).parents[1]
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


@dataclass(frozen=True)
class Twice:
    """SparseGPT, and on what it kept plain rounding or a second sweep."""

    sweep: bool
    grid: Grid = Grid()

    def prepare(self, gram: Gram) -> Any:
        return SparseGPT().prepare(gram)

    def quantise(self, target: Tensor, prepared: Any, pattern: Pattern) -> Any:
        pruned = SparseGPT().prune(target, prepared, pattern)
        if self.sweep:
            return SparseGPT(grid=self.grid).quantise(pruned, prepared, KnownSupport(pruned != 0))
        scaling = self.grid.scaling(pruned)
        return scaling.nearest(pruned), scaling


def run(problem: Problem, method_name: str, pattern: str, rank: int, factor_bits: int | None) -> dict[str, Any]:
    """One method on one problem: its relative error, its CPU seconds, and the bits a weight that its tensors take."""
    name, _, after = method_name.partition(", ")
    method = Prune(Twice(after == "sweep")) if after else build_method(name)  # type: ignore[arg-type]
    weight = problem.weight.to(torch.bfloat16)
    start = time.process_time()
    result = hasslefree.decompose(weight, problem.gram, pattern, rank, method=method, factor_bits=factor_bits)
    seconds = time.process_time() - start
    (out, width), grid = weight.shape, grid_of(method)
    kept = Budget(pattern).resolve(out, width)[0].kept((out, width))
    stored = Storage.of(pattern, grid).bytes(out, width, kept, weight.dtype)
    stored += factor_bytes(out, width, rank, factor_bits, weight.dtype)
    return {
        "relative_error": result.relative_error,
        "seconds": round(seconds, 4),
        "bits": 8 * stored / weight.numel(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "quantised.json")
    args = parser.parse_args()
    problems = few_problems()
    grid = METHODS["gptq"].grid  # type: ignore[attr-defined]
    content = resumed(args.output, {"rank": args.rank, "grid": str(grid)}, "problems")
    run(problems[0], "caldera", "2:4", args.rank, None)  # what is slow the first time
    for problem in problems:
        name = problem.name.partition(f" {problem.pattern}")[0]
        held = content["problems"].get(name, {})
        rows = {
            key: held.get(key) or run(problem, method, pattern, args.rank * low, bits)
            for key, (method, pattern, low, bits) in ROWS.items()
        }
        content["problems"][name] = rows
        print(name, {key: f"{row['relative_error']:.5f} at {row['bits']:.2f}" for key, row in rows.items()}, flush=True)
    write(args.output, content)


if __name__ == "__main__":
    main()
