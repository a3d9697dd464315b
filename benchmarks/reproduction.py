"""Every table of the paper and its first figure on one small model, by `hasslefree reproduce`.

    python benchmarks/reproduction.py NAME MODEL --work FOLDER --calibration FILE --texts NAME=FILE… [--rank …]

What FOLDER holds is not measured again, so that each table can have methods and settings of its own: one call for each
of --parts, all with the same FOLDER. Results go to benchmarks/results/reproduction_NAME.json, and the figure to
docs/results/figure1_NAME.png. Without --rounds every method has its own, and without --task-data no task is
measured. The embedded model is measured on --texts held_out=…/demo/held_out.txt, and the reference model on the three
texts of the paper with --max-tokens 8192.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.record import RESULTS, ROOT, machine, write

# Table 3 has rows of table 1 alone, for one model.
PARTS = ("table1", "table2", "table4", "figure1")
# What `hasslefree reproduce` calls the same; None is not passed on. limit: of the rows of each task.
NUMBERS = {"rank": 16, "samples": 32, "seqlen": 256, "rounds": None, "max_tokens": 16384, "limit": 100}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("model")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--methods", nargs="+", help="of the table, and those that reproduce adds")
    parser.add_argument("--settings", nargs="+", help="of the table")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--task-data", type=Path)
    for option, number in NUMBERS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=int, default=number)
    return parser.parse_args()


def command(args: argparse.Namespace, part: str) -> list[str]:
    """The command that measures one table, or the figure."""
    words = [sys.executable, "-m", "hasslefree", "reproduce", part, "--model", args.model, "--output", str(args.work)]
    words += ["--calibration", args.calibration, "--texts", *args.texts, "--dtype", args.dtype]
    for option in ("methods", "settings"):
        words += [f"--{option}", *given] if (given := getattr(args, option)) else []
    words += ["--task-data", str(args.task_data)] if args.task_data else ["--tasks", "none"]
    options = [option for option in NUMBERS if option != "limit" or args.task_data]
    given = {option: getattr(args, option) for option in options if getattr(args, option) is not None}
    return words + [word for option, number in given.items() for word in (f"--{option.replace('_', '-')}", str(number))]


def collected(args: argparse.Namespace) -> dict[str, Any]:
    """All that the folder holds, without the machine's paths."""
    settings = {option: getattr(args, option) for option in ("dtype", *NUMBERS)}
    found: dict[str, Any] = {"machine": machine(), "model": args.name, **settings, "tables": {}}
    for part, file in ((part, args.work / f"{part}.json") for part in PARTS):
        if not file.exists():
            continue
        content = json.loads(file.read_text())
        if part == "figure1":
            found[part] = content | {"model": args.name}
        else:
            found["tables"][part] = [row | {"model": args.name} for row in content["rows"]]
    return found


def main() -> None:
    args = arguments()
    for part in args.parts:
        if part != "figure1" or not (args.work / "figure1.json").exists():
            subprocess.run(command(args, part), check=True)
    write(RESULTS / f"reproduction_{args.name}.json", collected(args))
    if "figure1" in args.parts:
        shutil.copyfile(args.work / "figure1.png", ROOT / f"docs/results/figure1_{args.name}.png")


if __name__ == "__main__":
    main()
