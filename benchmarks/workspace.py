"""Peak memory of every method on one layer, beside W and H: of what depends on H alone, and of the layer itself.

    python benchmarks/workspace.py [--shapes 1024x1024 …] [--methods joint …] [--device cuda]

Each method and shape has a process of its own. On the CPU the peak of the resident set counts, less what it was before;
on CUDA, torch's own count. W is in bfloat16, H in float32, the pattern 2:4 or, where it says so, unstructured 50 %.
Few rounds take the same memory as many, but for the kernels that `joint` keeps for the next layer with the same input.
Rows that the output file already holds are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import resumed, write

from hasslefree import Budget, Gram, Prune
from hasslefree.core.admm import SupportPenalty
from hasslefree.core.protocols import Method
from hasslefree.decompose import solve_layer
from hasslefree.methods import METHODS, build_method
from hasslefree.methods.three_block import ThreeBlock

ROOT = Path(__file__).parents[1]
NAMES = [
    "joint",
    "3basil",
    "hassle-free",
    "oats",
    "eora",
    "sparsegpt",
    "alps",
    "wanda",
    "dsnot",
    "godec",
    "pcp",
    "osscar",
]
NAMES += ["osscar", "rtn", "gptq", "loftq", "lq-lora", "caldera", "joint-grid"]
SHAPES = ["1024x1024", "2048x512", "512x2048"]


def method_of(name: str, rounds: int) -> Method:
    """The method with few rounds."""
    if name == "3basil":
        return ThreeBlock(SupportPenalty(0.1, every=2, most=rounds, growth=(1.1, 1.05, 1.02), settled=100))
    return build_method(name, rounds=rounds) if hasattr(METHODS[name], "rounds") and name != "eora" else METHODS[name]


class Peak:
    """The bytes that a phase takes at most, beyond those that were taken when it was made."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.before = self.now()

    def now(self) -> int:
        """Bytes in use; the high-water mark begins here."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS")

    def reached(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.cuda else self._status("VmHWM")) - self.before

    def _status(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def run(method: Method, weight: torch.Tensor, gram: Gram, pattern: str, rank: int, device: str) -> dict[str, Any]:
    """Bytes at most while what depends on H is made, of what is kept of it, and at most while the layer is solved."""
    shape = (weight.shape[0], weight.shape[1])
    resolved, _ = Budget(pattern, rank, sparsity=None if ":" in pattern else 0.5).resolve(*shape)
    start, peak = time.perf_counter(), Peak(device)
    prepared = method.prepare(gram)
    found = {"prepare": peak.reached(), "kept": peak.now() - peak.before}
    solving = Peak(device)
    solve_layer(weight, gram, method, prepared, resolved, rank, 0)
    found["solve"] = solving.reached()
    return {
        **found,
        "peak": max(found["prepare"], found["kept"] + found["solve"]),
        "seconds": time.perf_counter() - start,
    }


def one(name: str, out: int, width: int, pattern: str, rank: int, rounds: int, device: str) -> None:
    """Measure in this process, after a small layer that loads what torch loads on first use; print JSON."""
    method = method_of(name, rounds)
    for o, n in ((64, 128), (out, width)):
        weight = torch.randn(o, n).bfloat16()
        x = torch.randn(64, n)
        matrix = torch.diag(1 + torch.rand(n)).addmm_(x.T, x, alpha=1 / 64)
        gram = Gram(matrix.to(device), 64, x.mean(0).to(device))
        found = run(method, weight.to(device), gram, pattern, min(rank, o), device)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="out x in")
    parser.add_argument("--methods", nargs="+", default=NAMES)
    parser.add_argument("--patterns", nargs="+", default=["2:4"])
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "workspace.json")
    parser.add_argument("--one", nargs=4, help="name, out, in and pattern, in this process")
    args = parser.parse_args()
    if args.one:
        name, out, width, pattern = args.one
        one(name, int(out), int(width), pattern, args.rank, args.rounds, args.device)
        return
    content = resumed(args.output, {"rank": args.rank, "rounds": args.rounds, "device": args.device}, "rows")
    # Every large array comes from the system and goes back to it at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for name, shape, pattern in [(n, s, p) for n in args.methods for s in args.shapes for p in args.patterns]:
        key = f"{name} {shape} {pattern}"
        if key in content["rows"]:
            continue
        out, width = map(int, shape.split("x"))
        rank = 0 if isinstance(METHODS[name], Prune) else args.rank
        command = [sys.executable, __file__, "--one", name, str(out), str(width), pattern, "--rank", str(rank)]
        command += ["--rounds", str(args.rounds), "--device", args.device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        row = {"method": name, "out": out, "in": width, "pattern": pattern, "rank": rank}
        content["rows"][key] = {**row, **json.loads(done.stdout.splitlines()[-1])}
        print(content["rows"][key], flush=True)
        write(args.output, content)


if __name__ == "__main__":
    main()
