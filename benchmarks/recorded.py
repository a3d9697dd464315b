"""Our solvers against recorded results of their authors' public code, on the same layer problems.

    python benchmarks/recorded.py FOLDER [--methods oats hassle-free …]

FOLDER holds problems.safetensors (NAME.weight, NAME.gram), outputs.safetensors (NAME.sparsegpt, NAME.oats_sum) and
recorded.json (per problem the pattern, the rank, and per method the relative error at damping 0.01·mean diag H).

Where a problem is unstructured, the authors' code does not cut what its name says: OATS cuts row by row, and
SparseGPT, which cuts each block of 128 columns at a threshold with <=, removes at least one entry too many in each.
Such rows are run both ways: with our exact count, and as recorded ("cut": "as recorded"), the like-for-like one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import hasslefree
from harness.layers import build_method
from harness.record import RESULTS, geometric_mean, machine, write
from hasslefree import Adam, Exact, Row, Unstructured

# Our name → the name in recorded.json.
OURS = {
    "sparsegpt": "sparsegpt",
    "alps": "alps",
    "oats": "oats",
    "eora": "eora_sparsegpt",
    "hassle-free": "hassle_free_adam_scaled",
    "hassle-free unscaled": "hassle_free_adam_unscaled",
    "hassle-free exact": "hassle_free_sparsegpt_exact",
    "3basil": "3basil",
    "joint, 25 rounds": "3basil",
    "joint, 50 rounds": "3basil",
    "joint": "3basil",
    "joint, 200 rounds": "3basil",
}
ROUNDS = {"joint, 25 rounds": 25, "joint, 50 rounds": 50, "joint, 200 rounds": 200}
# The recorded runs of Adam started at a gaussian u.
LOW_RANK = {
    "hassle-free": Adam(adapter_start=False),
    "hassle-free unscaled": Adam(scaled=False, adapter_start=False),
    "hassle-free exact": Exact(),
}
OUTPUTS = {"sparsegpt": "sparsegpt", "alps": "alps", "oats": "oats_sum"}


@dataclass(frozen=True, kw_only=True)
class BlockThreshold(Unstructured):
    """What SparseGPT's public code keeps of a block: the scores above the ⌊sparsity·n⌋-th of its n sorted scores."""

    sparsity: float

    def mask(self, score: torch.Tensor) -> torch.Tensor:
        threshold = score.flatten().sort().values[int(score.numel() * self.sparsity)]
        return score > threshold

    def restricted(self, inputs: slice, width: int) -> Unstructured:
        return self


def cut_as_recorded(name: str, spec: dict[str, Any], weight: torch.Tensor) -> Row | Unstructured | None:
    """The pattern of the authors' code; None where it is the one that the problem names."""
    out, width = weight.shape
    if spec["pattern"] != "unstructured" or OURS[name] in ("alps", "3basil"):
        return None
    if name == "oats":
        return Row(width - int(spec["sparsity"] * width))
    return BlockThreshold(int((1 - spec["sparsity"]) * out * width), sparsity=spec["sparsity"])


def run(
    name: str,
    spec: dict[str, Any],
    weight: torch.Tensor,
    gram: hasslefree.Gram,
    seed: int,
    cut: Row | Unstructured | None,
) -> tuple[float, float, torch.Tensor]:
    """One method on one problem: its relative error, its seconds, and S + L."""
    method = build_method(name.replace(",", "").split()[0], rounds=ROUNDS.get(name))
    if name in LOW_RANK:
        method = dataclasses.replace(method, low_rank=LOW_RANK[name])
    rank = 0 if name in ("sparsegpt", "alps") else spec["rank"]
    start = time.perf_counter()
    result = hasslefree.decompose(
        weight, gram, cut or spec["pattern"], rank, sparsity=None if cut else spec["sparsity"], method=method, seed=seed
    )
    return result.relative_error, round(time.perf_counter() - start, 2), result.product()


def rows(
    name: str, spec: dict[str, Any], weight: torch.Tensor, gram: hasslefree.Gram, seed: int, output: torch.Tensor | None
) -> Iterator[dict[str, Any]]:
    """One method on one problem beside what is recorded, with the exact count and then as recorded, if that differs."""
    theirs, as_recorded = spec["methods"][OURS[name]], cut_as_recorded(name, spec, weight)
    for cut in [None, as_recorded] if as_recorded else [None]:
        error, seconds, product = run(name, spec, weight, gram, seed, cut)
        row = {
            "cut": "as recorded" if cut else "exact count",
            "relative_error": error,
            "recorded": theirs["relative_error"],
            "ratio": error / theirs["relative_error"],
            "seconds": seconds,
            "recorded_seconds": theirs["seconds"],
        }
        if output is not None:
            row["relative_distance"] = (torch.dist(product, output) / output.norm()).item()
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(OURS), choices=list(OURS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "recorded.json")
    args = parser.parse_args()
    problems, outputs = (load_file(args.folder / f"{name}.safetensors") for name in ("problems", "outputs"))
    recorded = json.loads((args.folder / "recorded.json").read_text())
    results: dict[str, Any] = {}
    for name in args.methods:
        alike = []
        for problem, spec in recorded.items():
            weight, gram = problems[f"{problem}.weight"], hasslefree.Gram(problems[f"{problem}.gram"], spec["tokens"])
            output = outputs.get(f"{problem}.{OUTPUTS.get(name)}")
            found = [*rows(name, spec, weight, gram, args.seed, output)]
            results.setdefault(name, {})[problem] = found
            print(f"{name:22s} {problem:18s}", *found, flush=True)
            alike.append(found[-1]["ratio"])
        mean = geometric_mean(alike)
        print(
            f"{name}: ours / recorded, like for like: {min(alike):.4f} … {max(alike):.4f}, mean {mean:.4f}", flush=True
        )
    write(args.output, {"machine": machine(), "seed": args.seed, "results": results})


if __name__ == "__main__":
    main()
