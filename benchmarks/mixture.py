"""A small trained mixture of experts: which tokens an expert's Gram should see, and `joint` against published methods.

    python scripts/train_demo_model.py --shape mixture --epochs 2 --out FOLDER --report FOLDER/report.json
    python benchmarks/mixture.py FOLDER/model FOLDER/held_out.txt --calibration FOLDER/calibration.jsonl

Perplexity of the held-out text in windows of 256 tokens, three seeds. Two patterns: 2:4 + rank 16, and half of the
entries without a pattern.

--parts grams: which tokens the Gram of an expert is summed over. An expert that fewer tokens are routed to than a
constant times the inputs of its widest matrix borrows tokens of other experts until it has so many; 0 borrows
one at most in a pass, inf all. Measured with 2, 12 and 128 segments: 1/3, 2 and 21 tokens an input for each expert on
average.

--parts methods: `joint` and published methods, all with the same Grams, of 128 segments.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import models
from harness.models import Measurement
from harness.paper import LAYERS_ALONE
from harness.record import RESULTS, resumed

from hasslefree.models import experts

PATTERNS: dict[str, dict[str, Any]] = {
    "2:4 + rank 16": {"pattern": "2:4", "rank": 16},
    "50 %": {"pattern": "unstructured", "sparsity": 0.5, "rank": 0},
}
# By the number of segments, the constants that are tried.
WANTED = (0.0, 0.5, 1.0, 2.0, 4.0, math.inf)
MANY = 128
DEFAULT = experts.WANTED, experts.ENOUGH
TRIED = {2: WANTED, 12: WANTED, MANY: (0.0, 1.0, math.inf)}
METHODS: dict[str, dict[str, Any]] = {
    "joint": {"effort": "fast"},
    "3basil": LAYERS_ALONE | {"method": "3basil"},
    "hassle-free": LAYERS_ALONE | {"method": "hassle-free", "rounds": 20},
    "oats": LAYERS_ALONE | {"method": "oats"},
    "sparsegpt": {"method": "sparsegpt", "rank": 0},
}
# Those that need a low-rank part.
LOW_RANK = ("3basil", "hassle-free", "oats")


def row(measurement: Measurement, fields: dict[str, Any] | None, wanted: float | None) -> dict[str, Any]:
    """Compress, and measure. fields: of the recipe; None for the dense model. wanted: None for the default rule."""
    if fields is None:
        return {"perplexity": models.rounded(measurement.dense())}
    experts.WANTED, experts.ENOUGH = (max(wanted, 1e-9), math.inf) if wanted is not None else DEFAULT
    found = models.compressed(measurement, measurement.recipe(**fields))
    kept = ("perplexity", "bytes_a_weight", "mean_relative_error", "seconds")
    return {name: found[name] for name in kept}


def jobs(measurement: Measurement, seeds: list[int], parts: list[str]) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """The rows of these parts: "grams" and "methods"."""
    found: dict[tuple[str, ...], tuple[Any, ...]] = {("dense", "0"): (measurement, None, 1.0)}
    for seed in seeds:
        for pattern, fields in PATTERNS.items():
            for samples, tried in TRIED.items() if "grams" in parts else ():
                for wanted in tried:
                    one = replace(measurement, seed=seed, samples=samples)
                    name = f"{pattern}, {samples} segments, {wanted:g}"
                    found[name, str(seed)] = (one, fields | {"effort": "fast"}, wanted)
            for method, changes in METHODS.items() if "methods" in parts else ():
                if method in LOW_RANK and not fields["rank"]:
                    continue
                one = replace(measurement, seed=seed, samples=MANY)
                found[f"{pattern}, {method}", str(seed)] = (one, fields | changes, None)
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
