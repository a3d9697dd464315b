"""The figures of `hasslefree demo`: its rows, and how long it takes.

python benchmarks/demo.py
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

from common import machine, write

from hasslefree.demo.run import run_demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/demo.json"))
    args = parser.parse_args()
    start = time.perf_counter()
    rows = run_demo(None, args.rounds)
    seconds = round(time.perf_counter() - start, 1)
    result = {"machine": machine(), "seed": 0, "seconds": seconds, "rows": [dataclasses.asdict(row) for row in rows]}
    write(args.output, result)
    print(result)


if __name__ == "__main__":
    main()
