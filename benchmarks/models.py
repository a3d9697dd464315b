"""Every method on one whole model: perplexity, bytes, accuracy, and the rows of the demo.

    python benchmarks/models.py methods MODEL TEXT… --calibration FILE [--methods …] [--settings 2:4/4 2:8/16]
    python benchmarks/models.py systems MODEL TEXT… --calibration FILE [--rank 16] [--only NAME …]
    python benchmarks/models.py efforts MODEL TEXT… --calibration FILE [--only NAME …] [--seeds 0 1 2]
    python benchmarks/models.py tasks MODEL --task-data FOLDER --calibration FILE [--limit 500]
    python benchmarks/models.py mixture FOLDER/model FOLDER/held_out.txt --calibration FOLDER/calibration.jsonl
    python benchmarks/models.py demo
    python benchmarks/models.py verdict

TEXT and FILE are hub names, .txt or .jsonl files; FILE.jsonl[700:] takes some of its documents. Rows that the output
file already holds are kept. Each row of `methods`, `systems` and `efforts` is measured in a separate process, for
its peak memory.

methods: all on the same segments, with the same budget and seed. The README's table of gaps is of --methods 3basil
joint with --seed N and --output benchmarks/results/reference_seedN.json.

systems: each method with a budget of its kind. Bytes are those of the compressed layers as they are stored, in the
dtype of the checkpoint, over their weights; of `osscar`, those of the linear layers of the narrow model that it is
exported to. `joint` is the layers alone, as the methods of others are; `joint, balanced` is what `compress` does by
default.

efforts: every effort, and published methods, at three settings: the gap, which is the mean over the texts of
log(perplexity / dense perplexity), and the CPU seconds of the compression.

tasks: zero-shot accuracy before and after a compression. FOLDER holds the tasks as `hasslefree evaluate --task-data`
reads them.

mixture: a small trained mixture of experts, three seeds, at 2:4 + rank 16 and with half of the entries. FOLDER is what
`scripts/train_demo_model.py --shape mixture --epochs 2 --out FOLDER --report FOLDER/report.json` writes.

demo: the rows of `hasslefree demo`, and how long it takes.

verdict: what `hasslefree compress` prints at the end of a run on the demo's model.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hasslefree
from harness import models
from harness.models import Measurement
from harness.paper import LAYERS_ALONE
from harness.record import RESULTS, machine, resumed, write
from hasslefree.demo.run import CALIBRATION, MODEL

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
# Of `models.compressed`, in the results of `methods` and of `systems`.
FIELDS = ("mean_relative_error", "seconds", "solver_seconds", "kept_share", "peak_mb", "perplexity")
SYSTEM_FIELDS = ("bytes_a_weight", "perplexity", "mean_relative_error", "relative_errors")
PRUNERS = ["magnitude", "wanda", "dsnot", "sparsegpt", "alps"]
PAIRS = ["godec", "pcp", "oats", "eora", "hassle-free", "3basil"]
ON_GRID = ["rtn", "gptq"]
PAIRS_ON_GRID = ["loftq", "lq-lora", "caldera", "joint-grid"]
# What makes the channels that OSSCAR removes.
MADE = ["q", "k", "v", "gate", "up"]
EFFORTS: dict[str, dict[str, Any]] = {
    **{effort: {"effort": effort} for effort in ("fast", "balanced", "best")},
    **{method: LAYERS_ALONE | {"method": method} for method in ("3basil", "hassle-free")},
}
EFFORT_SETTINGS: dict[str, dict[str, Any]] = {
    "2:4 + rank 4": {"pattern": "2:4", "rank": 4},
    "2:8 + rank 16": {"pattern": "2:8", "rank": 16},
    "70 %, rank share 0.3": {"pattern": "unstructured", "ratio": 0.7, "rank_share": 0.3},
}
TASK_RECIPES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "2:4 + rank 4": {"pattern": "2:4", "rank": 4},
    "2:8 + rank 16": {"pattern": "2:8", "rank": 16},
    "2:8 + rank 16, 3basil": {"pattern": "2:8", "rank": 16, "method": "3basil"},
}

MIXTURE_PATTERNS: dict[str, dict[str, Any]] = {
    "2:4 + rank 16": {"pattern": "2:4", "rank": 16},
    "50 %": {"pattern": "unstructured", "sparsity": 0.5, "rank": 0},
}
MIXTURE_METHODS: dict[str, dict[str, Any]] = {
    "joint": {"effort": "fast"},
    "3basil": LAYERS_ALONE | {"method": "3basil"},
    "hassle-free": LAYERS_ALONE | {"method": "hassle-free", "rounds": 20},
    "oats": LAYERS_ALONE | {"method": "oats"},
    "sparsegpt": {"method": "sparsegpt", "rank": 0},
}
NEED_RANK = ("3basil", "hassle-free", "oats")
MIXTURE_FIELDS = ("perplexity", "bytes_a_weight", "mean_relative_error", "seconds")


def method_row(measurement: Measurement, setting: str, method: str) -> dict[str, Any]:
    """One row of `methods`."""
    if method == "dense":
        return {"perplexity": models.rounded(measurement.dense())}
    pattern, rank = setting.split("/")
    fields = LAYERS_ALONE | {"pattern": pattern, "rank": int(rank), "dtype": "float32"} | METHODS[method]
    found = models.compressed(measurement, measurement.recipe(**fields))
    return {field: found[field] for field in FIELDS}


def run_methods(args: argparse.Namespace) -> None:
    measurement = Measurement.of(args)
    content = resumed(args.output, {"seed": args.seed, "samples": args.samples, "seqlen": args.seqlen}, "results")
    jobs = {(s, m): (measurement, s, m) for s in args.settings for m in args.methods}
    models.fill(content, args.output, jobs, method_row)


def systems(rank: int) -> dict[str, dict[str, Any]]:
    """Name → fields of its recipe."""
    found: dict[str, dict[str, Any]] = {
        f"{name}, 2:4": {"method": name, "pattern": "2:4", "rank": 0} for name in [*PRUNERS, "joint"]
    }
    found["wanda, refit, 2:4"] = found["wanda, 2:4"] | {"refit": True}
    found |= {f"{name}, 2:4 + {rank}": {"method": name, "pattern": "2:4", "rank": rank} for name in [*PAIRS, "joint"]}
    found |= {f"{name}, int4": {"method": name} for name in ON_GRID}
    found |= {f"{name}, int4 + {rank}": {"method": name, "rank": rank} for name in PAIRS_ON_GRID}
    found["wanda, 50 %"] = {"method": "wanda", "pattern": "unstructured", "sparsity": 0.5}
    # A quarter of the heads and neurons.
    found["osscar, 25 %"] = {
        "method": "osscar", "pattern": "structured", "sparsity": 0.25, "leave_dense": tuple(f"*.{n}_proj" for n in MADE)
    }  # fmt: skip
    found[f"losparse, 40 % + {rank}"] = {
        "method": "losparse", "pattern": "structured", "sparsity": 0.4, "rank": rank
    }  # fmt: skip
    found["gptq, 2:4 + int4"] = {"method": "gptq", "pattern": "2:4"}
    found[f"joint-grid, 2:4 + int4 + {rank}"] = {"method": "joint-grid", "pattern": "2:4", "rank": rank}
    found = {name: LAYERS_ALONE | fields for name, fields in found.items()}
    found[f"joint, balanced, 2:4 + {rank}"] = {"pattern": "2:4", "rank": rank}
    return found


def system_row(measurement: Measurement, dense: dict[str, float], fields: dict[str, Any]) -> dict[str, Any]:
    """One row of `systems`."""
    found = models.compressed(measurement, measurement.recipe(**fields))
    return {"gap": models.gap(found["perplexity"], dense), **{field: found[field] for field in SYSTEM_FIELDS}}


def run_systems(args: argparse.Namespace) -> None:
    measurement = Measurement.of(args)
    header = {name: getattr(args, name) for name in ("rank", "samples", "seqlen", "max_tokens", "seed")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    if "dense" not in content:
        content["dense"] = measurement.dense()
    chosen = {name: fields for name, fields in systems(args.rank).items() if not args.only or name in args.only}
    jobs = {(name,): (measurement, content["dense"], fields) for name, fields in chosen.items()}
    models.fill(content, args.output, jobs, system_row)


def effort_row(measurement: Measurement, dense: dict[str, float], fields: dict[str, Any]) -> dict[str, Any]:
    """One row of `efforts`."""
    found = models.compressed(measurement, measurement.recipe(dtype="float32", **fields))
    figures = {field: found[field] for field in ("perplexity", "cpu_seconds", "peak_mb")}
    return {"gap": models.gap(found["perplexity"], dense), **figures}


def run_efforts(args: argparse.Namespace) -> None:
    measurement = Measurement.of(args)
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "max_tokens")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    if "dense" not in content:
        content["dense"] = measurement.dense()
    jobs = {
        (setting, name, str(seed)): (replace(measurement, seed=seed), content["dense"], fields | EFFORTS[name])
        for seed, (setting, fields), name in itertools.product(args.seeds, EFFORT_SETTINGS.items(), args.only)
    }
    models.fill(content, args.output, jobs, effort_row)


def mixture_row(measurement: Measurement, fields: dict[str, Any] | None) -> dict[str, Any]:
    """One row of `mixture`. fields: of the recipe; None for the dense model."""
    if fields is None:
        return {"perplexity": models.rounded(measurement.dense())}
    found = models.compressed(measurement, measurement.recipe(**fields))
    return {field: found[field] for field in MIXTURE_FIELDS}


def run_mixture(args: argparse.Namespace) -> None:
    measurement = Measurement.of(args)
    content = resumed(args.output, {"seqlen": args.seqlen, "max_tokens": args.max_tokens}, "results")
    jobs: dict[tuple[str, ...], tuple[Any, ...]] = {("dense", "0"): (measurement, None)}
    for seed in args.seeds:
        for pattern, fields in MIXTURE_PATTERNS.items():
            for method, changes in MIXTURE_METHODS.items():
                if fields["rank"] or method not in NEED_RANK:
                    jobs[f"{pattern}, {method}", str(seed)] = (replace(measurement, seed=seed), fields | changes)
    models.fill(content, args.output, jobs, mixture_row)


def task_row(args: argparse.Namespace, changes: dict[str, Any] | None) -> dict[str, Any]:
    """One row of `tasks`."""
    if changes is None:
        return models.zero_shot(args.model, args.tasks, args.limit, args.task_data)
    recipe = hasslefree.Recipe(
        calibration=args.calibration, samples=args.samples, seqlen=args.seqlen, seed=args.seed, dtype="float32",
        **changes,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        hasslefree.compress(args.model, f"{folder}/out", recipe)
        return models.zero_shot(f"{folder}/out", args.tasks, args.limit, args.task_data)


def run_tasks(args: argparse.Namespace) -> None:
    header = {name: getattr(args, name) for name in ("tasks", "limit", "samples", "seqlen", "seed")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    plain = argparse.Namespace(**{name: value for name, value in vars(args).items() if name != "run"})
    jobs = {(name,): (plain, changes) for name, changes in TASK_RECIPES.items()}
    models.fill(content, args.output, jobs, task_row)


def run_demo(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    rows = models.demo_rows(args.rounds)
    seconds = round(time.perf_counter() - start, 1)
    result = {"machine": machine(), "seed": 0, "seconds": seconds, "rows": rows}
    write(args.output, result)
    print(result)


def run_verdict(args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "hasslefree", "compress", str(MODEL), "OUT", "--calibration", str(CALIBRATION)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    result = {"machine": machine(), "seed": 0, "lines": done.stdout[done.stdout.index("Written to") :].splitlines()}
    write(args.output, result)
    print(done.stdout)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    methods = commands.add_parser("methods", parents=[models.options(max_tokens=65536)])
    methods.set_defaults(run=run_methods)
    methods.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    methods.add_argument("--settings", nargs="+", default=["2:4/4", "2:8/16"], help="PATTERN/RANK")
    methods.add_argument("--output", type=Path, default=RESULTS / "reference_model.json")

    by_bytes = commands.add_parser("systems", parents=[models.options(max_tokens=32768)])
    by_bytes.set_defaults(run=run_systems)
    by_bytes.add_argument("--rank", type=int, default=16)
    by_bytes.add_argument("--only", nargs="+")
    by_bytes.add_argument("--output", type=Path, default=RESULTS / "systems.json")

    efforts = commands.add_parser("efforts", parents=[models.options(max_tokens=32768)])
    efforts.set_defaults(run=run_efforts)
    efforts.add_argument("--only", nargs="+", default=list(EFFORTS), choices=list(EFFORTS))
    efforts.add_argument("--seeds", type=int, nargs="+", default=[0])
    efforts.add_argument("--output", type=Path, default=RESULTS / "efforts.json")

    mixture = commands.add_parser("mixture", parents=[models.options(max_tokens=65536)])
    mixture.set_defaults(run=run_mixture)
    mixture.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    mixture.add_argument("--output", type=Path, default=RESULTS / "mixture.json")

    tasks = commands.add_parser("tasks")
    tasks.set_defaults(run=run_tasks)
    tasks.add_argument("model")
    tasks.add_argument("--task-data", type=Path, required=True)
    tasks.add_argument("--calibration", required=True)
    tasks.add_argument("--tasks", nargs="+", default=list(models.TASKS), choices=list(models.TASKS))
    tasks.add_argument("--limit", type=int, help="questions of each task (default: all)")
    tasks.add_argument("--samples", type=int, default=128)
    tasks.add_argument("--seqlen", type=int, default=256)
    tasks.add_argument("--output", type=Path, default=RESULTS / "zero_shot.json")

    for command in (methods, by_bytes, tasks):
        command.add_argument("--seed", type=int, default=0)

    demo = commands.add_parser("demo")
    demo.set_defaults(run=run_demo)
    demo.add_argument("--rounds", type=int, default=5)
    demo.add_argument("--output", type=Path, default=RESULTS / "demo.json")

    verdict = commands.add_parser("verdict")
    verdict.set_defaults(run=run_verdict)
    verdict.add_argument("--output", type=Path, default=RESULTS / "verdict.json")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.run(args)


if __name__ == "__main__":
    main()
