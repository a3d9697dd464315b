"""How the time of joint grows with the size of a square layer, 2:4 + rank in/16.

python benchmarks/growth.py [--sizes 256 512 1024 2048]
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import layers
import torch
from common import machine, write

import hasslefree
from hasslefree import Joint
from hasslefree.methods.cost import flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--output", type=Path, default=layers.ROOT / "benchmarks" / "results" / "growth.json")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        weight, gram = layers.synthetic(size, size, seed=0)
        method = Joint(rounds=args.rounds)
        start = time.perf_counter()
        hasslefree.decompose(weight, gram, "2:4", size // 16, method=method)
        seconds = time.perf_counter() - start
        rows.append({"size": size, "seconds": round(seconds, 3), "flops": flops(method, size, size, size // 16)})
        print(rows[-1], flush=True)
    # Least squares of log seconds on log size.
    x = torch.tensor([math.log(row["size"]) for row in rows])
    y = torch.tensor([math.log(row["seconds"]) for row in rows])
    exponent = (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()
    write(args.output, {"machine": machine(), "rounds": args.rounds, "exponent": exponent, "rows": rows})
    print(f"exponent {exponent:.2f}")


if __name__ == "__main__":
    main()
