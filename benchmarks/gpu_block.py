"""One block with the shapes of Llama-3-8B on a GPU: seconds a layer, and the share of the matmul rate that is reached.

    python benchmarks/gpu_block.py [--device cuda] [--shrink 1] [--methods NAME …]

Random weights, Grams from correlated activations, 2:4 + rank 64. joint also runs with TF32 and with bfloat16 in its
rounds: the objectives stand side by side. --shrink divides every size, for a trial on a small machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from harness.layers import build_method, matmul_precision, solved
from harness.record import RESULTS, machine, write
from hasslefree import Gram, Joint, SemiStructured

# (layers with one input, their rows; the width of the input)
GROUPS = [
    (["q_proj", "k_proj", "v_proj"], [4096, 1024, 1024], 4096),
    (["o_proj"], [4096], 4096),
    (["gate_proj", "up_proj"], [14336, 14336], 4096),
    (["down_proj"], [4096], 14336),
]
BLOCKS = 32
JOINT = ["joint, float32", "joint, tf32", "joint, bfloat16"]


def activations(tokens: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Correlated inputs with outliers: an eighth of the directions carry most of the energy."""
    device = generator.device
    factors = torch.randn(width // 8, width, generator=generator, device=device)
    x = torch.randn(tokens, width // 8, generator=generator, device=device) @ factors / (width // 8) ** 0.5
    x += 0.3 * torch.randn(tokens, width, generator=generator, device=device)
    x[:, :: max(width // 40, 1)] *= 10
    return x


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def product_rate(out: int, width: int, device: str, precision: str) -> float:
    """FLOPs a second of a plain product (out, width) × (width, width) in this precision."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    a, b = (torch.randn(rows, width, device=device, dtype=dtype) for rows in (out, width))
    with matmul_precision(a.device, tf32=precision == "tf32"):
        a @ b
        start = clock(device)
        for _ in range(10):
            a @ b
        return 20 * out * width**2 / (clock(device) - start)


def configured(name: str) -> Any:
    """Joint with the precision that stands behind its name, or another method."""
    family, _, precision = name.partition(", ")
    return Joint(precision=precision) if family == "joint" else build_method(name)


def warm_up(names: list[str], device: str) -> None:
    """Each method once on a small layer, so that none pays for what CUDA sets up."""
    weight, gram = torch.randn(256, 256, device=device), Gram(torch.eye(256, device=device), 256)
    for name in names:
        method = configured(name)
        solved(weight, gram, method, method.prepare(gram), SemiStructured(2, 4), 8)


def group_rows(
    method: Any, names: list[str], weights: list[torch.Tensor], gram: Gram, rank: int, device: str
) -> dict[str, dict[str, Any]]:
    """Every layer of a group with one method, the preparation shared out between them."""
    start = clock(device)
    prepared = method.prepare(gram)
    shared, rows = (clock(device) - start) / len(names), {}
    for name, weight in zip(names, weights, strict=True):
        start = clock(device)
        found = solved(weight / 50, gram, method, prepared, SemiStructured(2, 4), rank)
        solving = clock(device) - start
        rows[name] = {"seconds": solving + shared, "relative_error": found.relative_error}
        if isinstance(method, Joint):
            # The large products alone, over all that a layer takes beside the shared preparation.
            rate = product_rate(*weight.shape, device, method.precision)
            rows[name]["share_of_rate"] = 200 * len(weight) * weight.shape[1] ** 2 / solving / rate
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--methods", nargs="+", default=[*JOINT, "3basil", "hassle-free"])
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_block.json")
    args = parser.parse_args()
    generator = torch.Generator(args.device).manual_seed(0)
    rank = max(args.rank // args.shrink, 1)
    warm_up(args.methods, args.device)
    results: dict[str, dict[str, Any]] = {name: {} for name in args.methods}
    for names, outs, wide in GROUPS:
        width = wide // args.shrink
        gram = Gram.from_activations(activations(2 * width, width, generator))
        weights = [torch.randn(out // args.shrink, width, generator=generator, device=args.device) for out in outs]
        for method_name in args.methods:
            rows = group_rows(configured(method_name), names, weights, gram, rank, args.device)
            results[method_name] |= rows
            print(method_name, rows, flush=True)
    totals = {name: sum(row["seconds"] for row in rows.values()) for name, rows in results.items()}
    minutes = {name: total * BLOCKS / 60 for name, total in totals.items()}
    print("seconds a block:", totals, f"minutes for {BLOCKS} blocks:", minutes)
    content = {"machine": machine(), "shrink": args.shrink, "rank": rank, "results": results}
    write(args.output, {**content, "block_seconds": totals, "model_minutes": minutes})


if __name__ == "__main__":
    main()
