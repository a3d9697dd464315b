"""Run commands on hostile input and end them in every way that a machine can, and count what does not hold.

    python benchmarks/faults.py cells [--part I/N] [--kind PATTERN] [--label after]
    python benchmarks/faults.py endings [--kills 20] [--seed 0]
    python benchmarks/faults.py cost --before OTHER/src

`cells` runs the table of `harness.hostile.table`: kinds of faults by command. A cell fails if any of these happens: a
traceback; an exit code other than 2 for what was typed wrong, 1 for what went wrong and 128 + signal; a message of more
than three lines of 80 columns; a change or loss of a file that hasslefree did not write; more than 30 seconds of the
processor, or 3 GB of memory; a control character that is printed or written.

`endings` interrupts the compression of the embedded model at random moments, and compares the folder that --resume
makes with that of an uninterrupted run, byte for byte. `cost` measures what the checks take.

With PYTHONPATH set to the sources of another commit, the same cells give what held there: `--label before`. Results
that the output file already holds stay, except with --anew.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}

from harness.hostile.cells import Workshop, signals
from harness.hostile.interrupted import all_faults, contents, run
from harness.hostile.table import SAMPLED, faults, sample
from harness.record import RESULTS, machine, write


def chosen(arguments: argparse.Namespace) -> list[tuple[Any, str]]:
    """The cells to run. A part takes other commands of neighbouring rows."""
    if arguments.sample:
        return sample()
    index, count = map(int, arguments.part.split("/"))
    cells = []
    for number, fault in enumerate(faults()):
        if re.search(arguments.kind, f"{fault.kind}: {fault.what}"):
            cells += [
                (fault, command) for place, command in enumerate(fault.lines) if (number + place) % count == index
            ]
    if arguments.same_as:
        done = kept(arguments.output)["cells"][arguments.same_as]
        cells = [
            (fault, command) for fault, command in cells if command in done.get(fault.kind, {}).get(fault.what, {})
        ]
    return [cell for cell in cells if arguments.command in ("", cell[1])]


def run_cells(arguments: argparse.Namespace) -> int:
    content = kept(arguments.output)
    rows = content.setdefault("cells", {}).setdefault(arguments.label, {})
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hf") as folder:
        workshop = Workshop(Path(folder), ["compress", *SAMPLED]) if arguments.sample else Workshop(Path(folder))
        for fault, command in chosen(arguments):
            row = rows.setdefault(fault.kind, {}).setdefault(fault.what, {})
            if command in row and not arguments.anew:
                continue
            row[command] = workshop.complaints(fault, command)
            failed += bool(row[command])
            if row[command] or arguments.verbose:
                print(f"{fault.kind} | {fault.what!a} | {command} | {'; '.join(row[command])!a}", flush=True)
                if arguments.verbose:
                    print(
                        workshop.last.seconds,
                        fault.words(command),
                        workshop.last.code,
                        ascii(workshop.last.out[-600:]),
                        ascii(workshop.last.err[-1500:]),
                    )
            write(arguments.output, content)
    return failed


def kept(output: Path) -> dict[str, Any]:
    if output.exists():
        content: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return content
    return {"machine": machine()}


def run_endings(arguments: argparse.Namespace) -> int:
    content = kept(arguments.output)
    endings = all_faults(arguments.kills, arguments.seed)
    if arguments.anew or content.get("seed") != arguments.seed:
        content["results"] = {}
    results = content["results"]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run(Path(folder) / "whole")
        seconds, expected = time.perf_counter() - start, contents(Path(folder) / "whole")
        for number, (name, ending) in enumerate(endings.items()):
            if name not in results:
                results[name] = ending(Path(folder) / f"{number}", expected, seconds)
                print(name, "survived" if results[name] else "LOST", flush=True)
            content |= {"seed": arguments.seed, "faults": len(endings), "survived": sum(results.values())}
            write(arguments.output, content)
    return len(results) - sum(results.values())


def measure_cost(arguments: argparse.Namespace) -> int:
    """Medians of the processor's seconds of whole processes: the help, and a compression of the embedded model."""
    from hasslefree.demo.run import CALIBRATION, MODEL

    content = kept(arguments.output)
    lines = {
        "--help": ["--help"],
        "compress": ["compress", str(MODEL), "OUT", "-q", "--method", "eora", "--rank", "8", "--calibration",
                     str(CALIBRATION), "--samples", "16", "--seqlen", "128"],
    }  # fmt: skip
    taken: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.times):
            for label, source in (("before", arguments.before), ("after", os.environ.get("PYTHONPATH", ""))):
                for name, words in lines.items():
                    shutil.rmtree(Path(folder) / "OUT", ignore_errors=True)
                    start = os.times()
                    subprocess.run([sys.executable, "-m", "hasslefree", *words], cwd=folder, check=True,
                                   stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": source})  # fmt: skip
                    end = os.times()
                    seconds = end.children_user + end.children_system - start.children_user - start.children_system
                    taken.setdefault(name, {}).setdefault(label, []).append(seconds)
    content["seconds"] = {
        name: {label: round(statistics.median(values), 2) for label, values in each.items()}
        for name, each in taken.items()
    } | {"times": arguments.times}
    write(arguments.output, content)
    print(content["seconds"])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    cells = commands.add_parser("cells")
    cells.add_argument("--part", default="0/1", help="I/N: one N-th of the cells, with some of every kind")
    cells.add_argument("--kind", default="", help="a pattern of the kind and description")
    cells.add_argument("--command", default="", help="only cells of this command")
    cells.add_argument("--label", default="after", help="before or after")
    cells.add_argument("--sample", action="store_true", help="a few quick cells of every kind")
    cells.add_argument("--same-as", help="only the cells that the output file holds under this label")
    cells.add_argument("--anew", action="store_true")
    cells.add_argument("--verbose", action="store_true")
    cells.set_defaults(run=run_cells)
    endings = commands.add_parser("endings")
    endings.add_argument("--kills", type=int, default=20)
    endings.add_argument("--seed", type=int, default=0)
    endings.add_argument("--anew", action="store_true")
    endings.set_defaults(run=run_endings)
    cost = commands.add_parser("cost")
    cost.add_argument("--before", required=True, help="the sources to compare with, as PYTHONPATH")
    cost.add_argument("--times", type=int, default=5)
    cost.set_defaults(run=measure_cost)
    for command in (cells, endings, cost):
        command.add_argument("--output", type=Path, default=RESULTS / "faults.json")
    arguments = parser.parse_args()
    signals()
    raise SystemExit(min(arguments.run(arguments), 100))


if __name__ == "__main__":
    main()
