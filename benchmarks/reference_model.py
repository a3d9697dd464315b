"""Every method on one whole model: perplexity, relative error, seconds and peak memory.

    python benchmarks/reference_model.py MODEL TEXT… --calibration FILE [--methods …] [--settings 2:4/4 2:8/16]

TEXT and FILE are hub names, .txt or .jsonl files; FILE.jsonl[700:] takes some of its documents. Each method runs in a
process of its own, so that its peak memory is its own, on the same segments and the same seed. Rows that the output
file already holds are kept. The README's table of gaps is of --methods 3basil joint with --seed N and --output
benchmarks/results/reference_seedN.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import resumed, write

METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "magnitude": {"method": "magnitude", "rank": 0},
    "wanda": {"method": "wanda", "rank": 0},
    "dsnot": {"method": "dsnot", "rank": 0},
    "wanda, refit": {"method": "wanda", "rank": 0, "refit": True},
    "sparsegpt, refit": {"method": "sparsegpt", "rank": 0, "refit": True},
    "sparsegpt": {"method": "sparsegpt", "rank": 0},
    "oats": {"method": "oats"},
    "godec": {"method": "godec"},
    "pcp": {"method": "pcp"},
    "osscar, 50 %": {"method": "osscar", "rank": 0, "pattern": "structured", "sparsity": 0.5},
    "losparse, 50 %": {"method": "losparse", "pattern": "structured", "sparsity": 0.5},
    "eora": {"method": "eora"},
    "hassle-free, unscaled": {"method": "hassle-free", "low_rank": "adam-unscaled"},
    "hassle-free": {"method": "hassle-free"},
    "hassle-free, exact step": {"method": "hassle-free", "low_rank": "exact"},
    "3basil": {"method": "3basil"},
    "joint": {"method": "joint"},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--settings", nargs="+", default=["2:4/4", "2:8/16"], help="PATTERN/RANK")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=65536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/reference_model.json"))
    parser.add_argument("--only", nargs=2, metavar=("SETTING", "METHOD"), help="one run, in this process")
    return parser.parse_args()


def run_one(args: argparse.Namespace, setting: str, method: str) -> dict[str, Any]:
    """Compress and evaluate; the row of the results."""
    import hasslefree
    from hasslefree.evaluation.run import evaluate_perplexity

    pattern, rank = setting.split("/")
    row: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        target = args.model
        if method != "dense":
            recipe = dataclasses.replace(
                hasslefree.Recipe(
                    pattern=pattern, rank=int(rank), dtype="float32", seed=args.seed,
                    calibration=args.calibration, samples=args.samples, seqlen=args.seqlen,
                    allocate="uniform", dense_target=0.0, match_blocks=False,
                ),
                **METHODS[method],
            )  # fmt: skip
            target = f"{folder}/out"
            report = hasslefree.compress(args.model, target, recipe)
            row = {
                "mean_relative_error": report.mean_relative_error,
                "seconds": round(report.seconds, 1),
                "solver_seconds": round(sum(layer.seconds for layer in report.layers), 1),
                "kept_share": report.kept_share,
                "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            }
        found = evaluate_perplexity(target, args.texts, args.seqlen, args.max_tokens, batch=16, dtype="float32")
    # The file's name is enough: the results are committed, the paths of the machine are not.
    return row | {"perplexity": {Path(t).name: round(r["perplexity"], 3) for t, r in found["perplexity"].items()}}


def run_all(args: argparse.Namespace) -> None:
    content = resumed(args.output, {"seed": args.seed, "samples": args.samples, "seqlen": args.seqlen}, "results")
    results = content["results"]
    for setting in args.settings:
        for method in args.methods:
            rows = results.setdefault(setting, {})
            if method in rows:
                continue
            start = time.perf_counter()
            command = [sys.executable, *sys.argv, "--only", setting, method]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows[method] = json.loads(done.stdout.splitlines()[-1])
            write(args.output, content)
            print(f"{setting} {method}: {rows[method]} ({time.perf_counter() - start:.0f} s in all)", flush=True)


def main() -> None:
    args = arguments()
    if args.only:
        print(json.dumps(run_one(args, *args.only)))
    else:
        run_all(args)


if __name__ == "__main__":
    main()
