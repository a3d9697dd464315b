"""A small trained mixture of experts: which tokens an expert's Gram should see, and `joint` against published methods.

    python scripts/train_demo_model.py --shape mixture --epochs 2 --out FOLDER --report FOLDER/report.json
    python benchmarks/mixture.py FOLDER/model FOLDER/held_out.txt --calibration FOLDER/calibration.jsonl

Perplexity of the held-out text in windows of 256 tokens, three seeds. Two patterns: 2:4 + rank 16, and half of the
entries without a pattern. What an expert sees at least is given in tokens for each input of its widest matrix: 0 is
only the tokens that are routed to it, inf all of them. That is measured with few calibration tokens and with many: with
many, every expert sees enough by itself. Each method has the same Grams, of many tokens.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import models
from harness.models import LAYERS, Measurement
from harness.record import RESULTS, resumed

from hasslefree.models import experts

PATTERNS: dict[str, dict[str, Any]] = {
    "2:4 + rank 16": {"pattern": "2:4", "rank": 16},
    "50 %": {"pattern": "unstructured", "sparsity": 0.5, "rank": 0},
}
WANTED = (0.0, 0.5, 1.0, 2.0, 4.0, math.inf)
# Segments of calibration: two tokens an input for each expert on average where they are few.
FEW, MANY = 12, 128
METHODS: dict[str, dict[str, Any]] = {
    "joint": {"effort": "fast"},
    "3basil": LAYERS | {"method": "3basil"},
    "hassle-free": LAYERS | {"method": "hassle-free", "rounds": 20},
    "oats": LAYERS | {"method": "oats"},
    "sparsegpt": {"method": "sparsegpt", "rank": 0},
}
# Those that need a low-rank part.
LOW_RANK = ("3basil", "hassle-free", "oats")


def row(measurement: Measurement, fields: dict[str, Any] | None, wanted: float) -> dict[str, Any]:
    """Compress, and measure. fields: of the recipe; None for the dense model."""
    if fields is None:
        return {"perplexity": models.rounded(measurement.dense())}
    experts.WANTED = max(wanted, 1e-9)
    found = models.compressed(measurement, measurement.recipe(**fields))
    kept = ("perplexity", "bytes_a_weight", "mean_relative_error", "seconds")
    return {name: found[name] for name in kept}


def jobs(measurement: Measurement, seeds: list[int], parts: list[str]) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """The rows of these parts: "grams" and "methods"."""
    found: dict[tuple[str, ...], tuple[Any, ...]] = {("dense", "0"): (measurement, None, 1.0)}
    for seed in seeds:
        for pattern, fields in PATTERNS.items():
            for samples in (FEW, MANY) if "grams" in parts else ():
                for wanted in WANTED if samples == FEW else (0.0, 1.0, math.inf):
                    one = replace(measurement, seed=seed, samples=samples)
                    name = f"{pattern}, {samples} segments, {wanted:g}"
                    found[name, str(seed)] = (one, fields | {"effort": "fast"}, wanted)
            for method, changes in METHODS.items() if "methods" in parts else ():
                if method in LOW_RANK and not fields["rank"]:
                    continue
                one = replace(measurement, seed=seed, samples=MANY)
                found[f"{pattern}, {method}", str(seed)] = (one, fields | changes, experts.WANTED)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        parents=[models.options(max_tokens=65536)],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", default=["grams", "methods"], choices=["grams", "methods"])
    parser.add_argument("--output", type=Path, default=RESULTS / "mixture.json")
    args = parser.parse_args()
    content = resumed(args.output, {"seqlen": args.seqlen, "max_tokens": args.max_tokens}, "results")
    models.fill(content, args.output, jobs(Measurement.of(args), args.seeds, args.parts), row)


if __name__ == "__main__":
    main()
