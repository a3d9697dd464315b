"""Zero-shot accuracy before and after a compression.

    python benchmarks/zero_shot.py MODEL --task-data FOLDER --calibration FILE [--limit 500]

FOLDER holds the tasks as `hasslefree evaluate --task-data` reads them; FILE is a hub name, a .txt or a .jsonl file.
Rows that the output file already holds are kept.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import resumed, write

import hasslefree
from hasslefree.evaluation.run import evaluate
from hasslefree.evaluation.tasks import TASKS

ROOT = Path(__file__).parents[1]
RECIPES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "2:4 + rank 4": {"pattern": "2:4", "rank": 4},
    "2:8 + rank 16": {"pattern": "2:8", "rank": 16},
    "2:8 + rank 16, 3basil": {"pattern": "2:8", "rank": 16, "method": "3basil"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task-data", type=Path, required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--limit", type=int, help="questions of each task (default: all)")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "zero_shot.json")
    args = parser.parse_args()
    header = {name: getattr(args, name) for name in ("tasks", "limit", "samples", "seqlen", "seed")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    for name, changes in RECIPES.items():
        if name in content["results"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = args.model
            if changes is not None:
                model = f"{folder}/out"
                recipe = hasslefree.Recipe(
                    calibration=args.calibration, samples=args.samples, seqlen=args.seqlen, seed=args.seed,
                    dtype="float32", **changes,
                )  # fmt: skip
                hasslefree.compress(args.model, model, recipe)
            found = evaluate(
                model, tasks=args.tasks, dtype="float32", limit=args.limit, task_data=args.task_data, batch=16
            )
        content["results"][name] = found["tasks"]
        write(args.output, content)
        print(name, {task: round(row["value"], 4) for task, row in found["tasks"].items()}, flush=True)


if __name__ == "__main__":
    main()
