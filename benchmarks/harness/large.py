"""What a compression of Llama-3's sizes moves and computes, by arithmetic: nothing is run, and nothing is measured.

2:4 + rank 64, joint, 128 × 2048 tokens, on 1, 8 and 64 processes with a GPU each. Memory is that of `hasslefree plan`,
FLOPs those that the method states. The rates below are assumptions about an H100 and its network, and the times
follow from them: layers of a group are shared or dealt out as the driver does it, and a group ends with its slowest
process. Solvers of the larger sizes also run on fake GPUs, where each operation has a rate of its own
(`harness.sharing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from harness.fake_cuda import fake_cuda
from harness.sharing import block_seconds
from hasslefree import Recipe
from hasslefree.core.protocols import Method
from hasslefree.models.blocks import find_blocks
from hasslefree.pipeline.layers import assign_layers, shared_layers, weight_of
from hasslefree.planning.memory import Setup, estimate
from hasslefree.planning.plan import LayerPlan, make_plan
from hasslefree.solve.methods import build_method
from hasslefree.solve.methods.joint import FIRST_STEPS, Joint

# width, MLP, blocks, heads, KV heads
SIZES = {
    "8B": (4096, 14336, 32, 32, 8),
    "70B": (8192, 28672, 80, 64, 8),
    "405B": (16384, 53248, 126, 128, 8),
}
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
PROCESSES = (1, 8, 64)
# Sizes whose solvers run on fake GPUs, in the order "layer"; each takes minutes.
SIMULATED = ("70B", "405B")
# Rounds of `joint` in its longest runs; the recipe takes fewer.
LONGER = 100
# Bytes of a GPU.
MEMORY = 80 << 30
# FLOPs a second of float32 products, and of bfloat16 ones in a forward pass; bytes a second between nodes, and from
# the disk of each.
ASSUMED = {"float32": 40e12, "bfloat16": 400e12, "network": 50e9, "disk": 5e9}
# The weights are read when the model is opened, twice by the look at it before the work, and once for the work.
READS = 4


def row(size: str, processes: int, recipe: Recipe, simulated: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Bytes and seconds of one size on so many processes; those of the one that takes longest.

    simulated: hours of its solvers by kind of operation, where they are known already.
    """
    blocks = find_blocks(model := shapes_of(size))
    resolved = recipe.resolve(with_text=False)
    method = resolved.method
    plan = make_plan(blocks, resolved)
    tokens = (recipe.samples, recipe.seqlen or 2048)
    with fake_cuda("meta", memory=MEMORY):
        found = estimate(Setup(model, blocks, plan, resolved, tokens, torch.device("cuda"), "cpu", processes))
    layers = {name.rpartition(".")[2]: layer for name, layer in plan[0].items()}
    # In the order "block" all layers of a block are solved at the same time.
    groups = GROUPS if recipe.sequential == "layer" else (tuple(layers),)
    together = [{name: layers[name] for name in group} for group in groups]
    longer = build_method("joint", rounds=LONGER)
    solving, most = (sum(solving_flops(each, plans, processes) for plans in together) for each in (method, longer))
    passes = 2 if recipe.sequential == "block" else len(GROUPS) + 1
    share = math.ceil(tokens[0] / processes) * tokens[1]
    parameters = sum(p.numel() for p in blocks.modules[0].parameters())
    squares = [layers[group[0]].spec.shape[1] ** 2 for group in GROUPS]
    reduced = 2 * 8 * sum(squares) if processes > 1 else 0  # a ring sends and receives everything about twice
    spread = sum(sent(method, plans, processes) for plans in together) if processes > 1 else 0
    blocks_of_model = SIZES[size][2]
    if simulated is None and recipe.sequential == "layer" and size in SIMULATED:
        of_a_block = block_seconds(method, together, processes)
        simulated = {name: blocks_of_model * took / 3600 for name, took in sorted(of_a_block.items())}
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
        "solving_longer": blocks_of_model * most / ASSUMED["float32"] / 3600,
        "hours": {name: blocks_of_model * value / 3600 for name, value in seconds.items()},
        "simulated_solving": simulated,
    }


def solving_flops(method: Method, plans: Mapping[str, LayerPlan], processes: int) -> float:
    """FLOPs of the process that has most to do, for layers that are solved at the same time."""
    shared, loads = shared_layers(method, plans, processes), [0.0] * processes
    for name, owner in assign_layers(plans, shared, processes).items():
        for rank in range(processes) if owner is None else (owner,):
            loads[rank] += weight_of(plans[name]) / (processes if owner is None else 1)
    return method.cost.flops * max(loads)


def shapes_of(size: str) -> PreTrainedModel:
    """A model of this size without weights."""
    width, mlp, count, heads, kv = SIZES[size]
    config = LlamaConfig(
        vocab_size=128256, hidden_size=width, intermediate_size=mlp, num_hidden_layers=count, num_attention_heads=heads,
        num_key_value_heads=kv, tie_word_embeddings=False, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def sent(method: Method, plans: Mapping[str, LayerPlan], processes: int) -> float:
    """Bytes that each process sends for layers that are solved at the same time: once around a ring, or twice.

    The packed layers of those that are dealt out. Of one that `joint` shares: S in bfloat16, eight kernels, and in
    every step of orthogonal iteration v and three matrices (r, r).
    """
    assert isinstance(method, Joint)
    shared, found = shared_layers(method, plans, processes), 0.0
    for name, layer in plans.items():
        if name not in shared:
            found += layer.bytes
            continue
        (out, width), rank = layer.spec.shape, layer.spec.rank
        steps = method.rounds + FIRST_STEPS + method.sweeps
        found += 2 * out * width + min(method.rounds, 8) * 4 * width**2 + steps * 2 * 4 * rank * (width + 3 * rank)
    return found
