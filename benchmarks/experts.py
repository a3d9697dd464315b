"""The experts of a mixture on a CPU: transformers' own, fused and dense, against ours, apart and packed.

    python benchmarks/experts.py [--experts 64] [--tokens 1 16 512] [--threads N]

One block of experts in the shape of Qwen3-30B-A3B's (width 2048, experts of 768, eight a token), in bfloat16, with
random weights; 2:4 + rank 64. The ways take turns; medians of milliseconds. "eager" and "grouped" are those of
transformers, with fused weights; "packed" and "unpacked" are ours.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import hasslefree
from harness.products import random_layer
from harness.record import RESULTS, machine, write
from hasslefree.models.experts import split_experts
from hasslefree.models.sites import find_sites
from hasslefree.packed.linear import compressed_layers

CHOSEN = 8
REPEATS = 15


class Holder(torch.nn.Module):
    """What holds the experts, as a block of a model does."""

    def __init__(self, experts: Any):
        super().__init__()
        self.experts = experts
        self.config = experts.config


def fused(count: int) -> Any:
    """Random experts as transformers has them."""
    config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=count, num_experts_per_tok=CHOSEN)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.02)
    return experts


def ways(count: int) -> dict[str, Any]:
    """The same experts in each way."""
    eager = fused(count)
    grouped = copy.copy(eager)
    grouped.config = copy.copy(eager.config)
    grouped.config._experts_implementation = "grouped_mm"
    holder = Holder(copy.deepcopy(eager))
    split_experts(holder)
    for site in find_sites(holder).values():
        site.replace(random_layer(site.weight()))
    unpacked = copy.deepcopy(holder)
    hasslefree.use_backend(unpacked, "unpacked")
    assert compressed_layers(holder)
    return {"eager": eager, "grouped": grouped, "packed": holder.experts, "unpacked": unpacked.experts}


def measured(found: dict[str, Any], inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Median milliseconds of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(REPEATS + 2):
        for name in list(found) if turn % 2 else list(found)[::-1]:
            start = time.perf_counter()
            found[name](*inputs)
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(each), 3) for name, each in seconds.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 512])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=RESULTS / "experts.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    content: dict[str, Any] = {"machine": machine(), "experts": args.experts, "chosen": CHOSEN, "rows": []}
    found = ways(args.experts)
    for tokens in args.tokens:
        states = torch.randn(tokens, 2048, dtype=torch.bfloat16)
        index = torch.stack([torch.randperm(args.experts)[:CHOSEN] for _ in range(tokens)])
        weights = torch.full((tokens, CHOSEN), 1 / CHOSEN, dtype=torch.bfloat16)
        row = {"tokens": tokens, "milliseconds": measured(found, (states, index, weights))}
        content["rows"].append(row)
        write(args.output, content)
        print(row, flush=True)


if __name__ == "__main__":
    main()
