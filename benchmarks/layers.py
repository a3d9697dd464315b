"""Every method on single layers: relative error and seconds, on the same H and with the same seed.

    python benchmarks/layers.py curves [--set small|full] [--model MODEL --calibration FILE --seqlen N] [--methods …]
                                       [--clock wall|cpu] [--anew]
    python benchmarks/layers.py growth [--sizes 256 512 1024 2048]

curves: layers of a model (default: the embedded one) with the Grams of the dense model, and synthetic ones with
power-law spectra and outlier channels. Rows that the output file already holds are kept, but for --anew.
A system whose budget is of another kind than a support and a rank, as 3basil has, has a room of its own, with the bytes
that it takes. `--clock cpu` counts the time of the one thread on the processor: for machines with other work on them.

growth: how the time of joint grows with the size of a square layer, 2:4 + rank in/16.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch

import hasslefree
from harness.layers import CURVES, ROOMS, possible, run
from harness.models import CALIBRATION, MODEL
from harness.problems import BUDGETS, SHAPES, Problem, model_problems, synthetic, synthetic_problems
from harness.record import RESULTS, geometric_mean, machine, resumed, write
from hasslefree import Joint


def measure(problems: list[Problem], methods: list[str], content: dict[str, Any], output: Path) -> None:
    """Fill content["problems"], and write it after every problem."""
    seed, clock = content["seed"], content["clock"]
    for problem in problems:
        entry = content["problems"].setdefault(problem.name, {**problem.as_json(), "rows": {}})
        rooms = entry.setdefault("rooms", {})
        for name in methods:
            for rounds in CURVES.get(name, []):
                key = name if rounds is None else f"{name} @ {rounds}"
                if key not in entry["rows"]:
                    entry["rows"][key] = run(problem, name, rounds, seed, clock)
            if name in ROOMS and name not in rooms and possible(problem, name):
                rooms[name] = {"room": str(ROOMS[name]), **run(problem, name, None, seed, clock)}
        write(output, content)
        rows = {**entry["rows"], **rooms}
        shown = {key: f"{row['relative_error']:.5f} in {row['seconds']:.2f} s" for key, row in rows.items()}
        print(problem.name, shown, flush=True)


def means(content: dict[str, Any], source: str | None = None) -> dict[str, list[float]]:
    """Geometric means over problems of error and seconds, each over 3basil's. source: model or synthetic."""
    ratios: dict[str, list[list[float]]] = {}
    for entry in content["problems"].values():
        if source is not None and (entry["source"] == "synthetic") != (source == "synthetic"):
            continue
        base = entry["rows"].get("3basil @ 2000")
        if base is None:  # not measured yet
            continue
        for key, row in entry["rows"].items():
            ratios.setdefault(key, []).append([row[f] / base[f] for f in ("relative_error", "seconds")])
    return {key: [geometric_mean(column) for column in zip(*rows, strict=True)] for key, rows in ratios.items()}


def chosen_problems(args: argparse.Namespace) -> list[Problem]:
    """Those of the small set or of the full one."""
    small = args.set == "small"
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes] if args.shapes else SHAPES[: 1 if small else None]
    problems = list(model_problems(args.model, args.calibration, args.samples, args.seqlen, BUDGETS))
    problems = problems[:4] if small else problems
    return [*problems, *synthetic_problems(shapes, BUDGETS[:5:4] if small else BUDGETS)]  # type: ignore[arg-type]


def curves(args: argparse.Namespace) -> None:
    output = args.output or RESULTS / ("layers.json" if args.set == "small" else "layers_full.json")
    header = {"seed": args.seed, "model": Path(args.model).name, "samples": args.samples, "seqlen": args.seqlen}
    header["clock"] = args.clock
    content = {"machine": machine(), **header, "problems": {}} if args.anew else resumed(output, header, "problems")
    problems = chosen_problems(args)
    for name in args.methods:
        if name in CURVES or possible(problems[0], name):  # what is slow the first time
            run(problems[0], name, CURVES.get(name, [None])[0], args.seed, args.clock)
    measure(problems, args.methods, content, output)
    for source in ("model", "synthetic"):
        for key, (error, seconds) in means(content, source).items():
            print(f"{source:10s} {key:32s} error {error:.3f}  seconds {seconds:.3f}  (over 3basil)")


def growth(args: argparse.Namespace) -> None:
    rows = []
    for size in args.sizes:
        weight, gram = synthetic(size, size, seed=0)
        method = Joint(rounds=args.rounds)
        start = time.perf_counter()
        hasslefree.decompose(weight, gram, "2:4", size // 16, method=method)
        seconds = time.perf_counter() - start
        rows.append({"size": size, "seconds": round(seconds, 3)})
        print(rows[-1], flush=True)
    # Least squares of log seconds on log size.
    x = torch.tensor([math.log(row["size"]) for row in rows])
    y = torch.tensor([math.log(row["seconds"]) for row in rows])
    exponent = (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()
    write(args.output, {"machine": machine(), "rounds": args.rounds, "exponent": exponent, "rows": rows})
    print(f"exponent {exponent:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("curves")
    one.set_defaults(run=curves)
    one.add_argument("--set", choices=["small", "full"], default="small")
    one.add_argument("--model", default=str(MODEL))
    one.add_argument("--calibration", default=str(CALIBRATION))
    one.add_argument("--samples", type=int, default=64)
    one.add_argument("--seqlen", type=int, default=256)
    names = [*CURVES, *ROOMS]
    one.add_argument("--methods", nargs="+", default=names, choices=names)
    one.add_argument("--shapes", nargs="+", help="of the synthetic problems, such as 512x512")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    one.add_argument("--anew", action="store_true", help="measure all, whatever the output file holds")
    one.add_argument("--output", type=Path)
    other = commands.add_parser("growth")
    other.set_defaults(run=growth)
    other.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    other.add_argument("--rounds", type=int, default=100)
    other.add_argument("--output", type=Path, default=RESULTS / "growth.json")
    args = parser.parse_args()
    if args.run is curves and args.clock == "cpu" and torch.get_num_threads() > 1:
        parser.error("--clock cpu counts one thread: it needs OMP_NUM_THREADS=1")
    args.run(args)


if __name__ == "__main__":
    main()
