"""A small trained mixture of experts: `joint` against published methods.

    python scripts/train_demo_model.py --shape mixture --epochs 2 --out FOLDER --report FOLDER/report.json
    python benchmarks/mixture.py FOLDER/model FOLDER/held_out.txt --calibration FOLDER/calibration.jsonl

Perplexity of the held-out text in windows of 256 tokens, three seeds. Two patterns: 2:4 + rank 16, and half of the
entries without a pattern. Every
method has the same 128 calibration segments.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from harness import models
from harness.models import Measurement
from harness.paper import LAYERS_ALONE
from harness.record import RESULTS, resumed

PATTERNS: dict[str, dict[str, Any]] = {
    "2:4 + rank 16": {"pattern": "2:4", "rank": 16},
    "50 %": {"pattern": "unstructured", "sparsity": 0.5, "rank": 0},
}
METHODS: dict[str, dict[str, Any]] = {
    "joint": {"effort": "fast"},
    "3basil": LAYERS_ALONE | {"method": "3basil"},
    "hassle-free": LAYERS_ALONE | {"method": "hassle-free", "rounds": 20},
    "oats": LAYERS_ALONE | {"method": "oats"},
    "sparsegpt": {"method": "sparsegpt", "rank": 0},
}
# Those that need a low-rank part.
LOW_RANK = ("3basil", "hassle-free", "oats")


def row(measurement: Measurement, fields: dict[str, Any] | None) -> dict[str, Any]:
    """Compress, and measure. fields: of the recipe; None for the dense model."""
    if fields is None:
        return {"perplexity": models.rounded(measurement.dense())}
    found = models.compressed(measurement, measurement.recipe(**fields))
    return {name: found[name] for name in ("perplexity", "bytes_a_weight", "mean_relative_error", "seconds")}


def jobs(measurement: Measurement, seeds: list[int]) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """Name and seed of every row → the arguments of `row`."""
    found: dict[tuple[str, ...], tuple[Any, ...]] = {("dense", "0"): (measurement, None)}
    for seed, (pattern, fields), (method, changes) in product(seeds, PATTERNS.items(), METHODS.items()):
        if fields["rank"] or method not in LOW_RANK:
            found[f"{pattern}, {method}", str(seed)] = (replace(measurement, seed=seed), fields | changes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        parents=[models.options(max_tokens=65536)],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS / "mixture.json")
    args = parser.parse_args()
    content = resumed(args.output, {"seqlen": args.seqlen, "max_tokens": args.max_tokens}, "results")
    models.fill(content, args.output, jobs(Measurement.of(args), args.seeds), row)


if __name__ == "__main__":
    main()
