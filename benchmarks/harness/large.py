"""What a compression of Llama-3's sizes moves and computes, by arithmetic: nothing is run, and nothing is measured.

2:4 + rank 64, joint, 128 × 2048 tokens, on 1, 8 and 64 processes with a GPU each. Memory is that of `hasslefree plan`,
FLOPs those that the method states. The rates below are assumptions about an H100 and its network, and the times
follow from them: layers of a group are dealt out as the driver does it, and a group ends with its slowest process.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hasslefree import Recipe
from hasslefree.models.blocks import find_blocks
from hasslefree.models.distributed import World
from hasslefree.models.sites import find_sites
from hasslefree.recipe.plan import make_plan
from hasslefree.run.estimate import estimate

# width, MLP, blocks, heads, KV heads
SIZES = {
    "8B": (4096, 14336, 32, 32, 8),
    "70B": (8192, 28672, 80, 64, 8),
    "405B": (16384, 53248, 126, 128, 8),
}
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
PROCESSES = (1, 8, 64)
# FLOPs a second of float32 products, and of bfloat16 ones in a forward pass; bytes a second between nodes, and from
# the disk of each.
ASSUMED = {"float32": 40e12, "bfloat16": 400e12, "network": 50e9, "disk": 5e9}
# The weights are read when the model is opened, twice by the look at it before the work, and once for the work.
READS = 4


def row(size: str, processes: int, recipe: Recipe) -> dict[str, Any]:
    """Bytes and seconds of one size on so many processes; those of the one that takes longest."""
    blocks = find_blocks(model := shapes_of(size))
    resolved = recipe.resolve(with_text=False)
    plan = make_plan(blocks, resolved)
    tokens = (recipe.samples, recipe.seqlen or 2048)
    found = estimate(model, blocks, plan, resolved, tokens, torch.device("cuda"), "cpu", processes)
    shapes = {name.rpartition(".")[2]: site.shape for name, site in find_sites(blocks.modules[0]).items()}
    solving, idle = solver_flops(recipe, shapes, processes)
    passes = 2 if recipe.sequential == "block" else len(GROUPS) + 1
    share = math.ceil(tokens[0] / processes) * tokens[1]
    parameters = sum(p.numel() for p in blocks.modules[0].parameters())
    squares = [shapes[group[0]][1] ** 2 for group in GROUPS]
    reduced = 2 * 8 * sum(squares) if processes > 1 else 0  # a ring sends and receives everything about twice
    spread = sum(layer.bytes for layer in plan[0].values()) if processes > 1 else 0
    seconds = {
        "solving": solving / ASSUMED["float32"],
        "forward and Grams": share
        * (2 * parameters * passes / ASSUMED["bfloat16"] + 2 * sum(squares) / ASSUMED["float32"]),
        "network": (reduced + spread) / ASSUMED["network"],
        "disk": READS * 2 * parameters / ASSUMED["disk"],
    }
    return {
        "size": size,
        "order": recipe.sequential,
        "processes": processes,
        "gpu_gb": found.device_peak / 1e9,
        "ram_gb": found.ram_peak / 1e9,
        "disk_gb": found.disk / 1e9,
        "network_gb_a_block": (reduced + spread) / 1e9,
        "hours": {name: SIZES[size][2] * value / 3600 for name, value in seconds.items()},
        "solvers_idle": idle / (solving * processes),
    }


def shapes_of(size: str) -> PreTrainedModel:
    """A model of this size without weights."""
    width, mlp, count, heads, kv = SIZES[size]
    config = LlamaConfig(
        vocab_size=128256, hidden_size=width, intermediate_size=mlp, num_hidden_layers=count, num_attention_heads=heads,
        num_key_value_heads=kv, tie_word_embeddings=False, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def solver_flops(recipe: Recipe, shapes: dict[str, tuple[int, int]], processes: int) -> tuple[float, float]:
    """FLOPs of a block's layers on the process that has most of them, and those that the others could do meanwhile."""
    method, solving, idle = recipe.resolve(with_text=False).method, 0.0, 0.0
    # In the order "block" all layers of a block are dealt out at once.
    for group in (tuple(shapes),) if recipe.sequential == "block" else GROUPS:
        costs = [method.cost(*shapes[name], 64).flops for name in group]
        owners = World(0, processes).assign(costs)
        loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(processes)]
        solving += max(loads)
        idle += max(loads) * processes - sum(costs)
    return solving, idle
