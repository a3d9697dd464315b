"""The estimated time of a compression, from the FLOPs of float32 matrix products: 2 · tokens ·
parameters for a forward pass, twice that for a backward pass, and 2 · out · in² for each product of
a layer (out, in).
"""

from collections.abc import Collection

from hasslefree.models.experts import share_of_tokens
from hasslefree.models.rules import by_kind
from hasslefree.planning.machine import product_rate
from hasslefree.planning.setup import Setup
from hasslefree.progress import ALLOCATION, CHECK, INPUTS, PREDICTIONS, PROBES, REFERENCE, SOLVING
from hasslefree.solve.methods.joint import QUICK_PRUNING

# The time of each method in products out × in × in: once per layer, and for each of its rounds
# (measured: benchmarks/results/layers.json, and whole_files_*.json for ours).
PRODUCTS = {
    "joint": (50, 1),
    "joint-grid": (50, 1),
    "hassle-free": (0, 36),
    "oats": (0, 18),
    "godec": (0, 17),
    "eora": (0, 30),
    "losparse": (0, 107),
    "loftq": (0, 22),
    "lq-lora": (0, 4),
    "caldera": (0, 51),
    "3basil": (900, 0),
    "alps": (160, 0),
    "osscar": (300, 0),
    "pcp": (1000, 0),
    "sparsegpt": (26, 0),
    "gptq": (30, 0),
}
OTHERS = (6, 0)
# The products, once per layer, of the descent of codes on a pruned support.
DESCENT = 450


def flops_by_phase(setup: Setup) -> dict[str, float]:
    """The floating-point operations per process in each phase; phases without any are omitted."""
    parameters = 0.0
    squares = 0.0
    for block, plans in zip(setup.blocks.modules, setup.plan.blocks, strict=True):
        for name, parameter in block.named_parameters():
            parameters += share_of_tokens(block, name.rpartition(".")[0]) * parameter.numel()
        for name, layer in plans.items():
            squares += share_of_tokens(block, name) * layer.shape[1] ** 2
    head = setup.embeddings.weight.numel()
    volume = sum(matrix.cost for matrix in setup.plan.matrices) / setup.processes
    resolved = setup.resolved
    once, per_round = PRODUCTS.get(resolved.method, OTHERS)
    products = once + per_round * getattr(resolved.solver, "rounds", 0)
    if resolved.method == "joint-grid" and resolved.pattern != "dense":
        products += DESCENT
    grams = 2 * setup.text_tokens * squares
    forward = 2 * setup.text_tokens * parameters
    checking = 4 * setup.checked_tokens  # of the dense and the compressed model
    probing = 2 * setup.probe_tokens * (parameters + head)
    choosing = 0.0
    if probing:
        tries = PRODUCTS["joint"][0] + QUICK_PRUNING.rounds + len(resolved.grids)
        choosing = 2 * probing + 2 * tries * volume
    if resolved.allocate == "owl":
        choosing = grams + passes_by_group(setup) * forward
    dense_tokens = setup.matched_tokens
    if setup.plan.ends and not dense_tokens:
        dense_tokens = setup.text_tokens  # for the inputs of the head
    phases = {
        REFERENCE: 2 * dense_tokens * parameters,
        PROBES: probing,
        ALLOCATION: choosing,
        INPUTS: grams + passes(setup) * forward + checking * parameters,
        SOLVING: 2 * products * volume,
        # A step runs a block forward, again and backward; predictions of both models, and a
        # backward pass of the head.
        PREDICTIONS: 2 * setup.matched_tokens * (4 * parameters + 3 * head),
        CHECK: checking * head,
    }
    return {name: flops for name, flops in phases.items() if flops}


def passes(setup: Setup) -> float:
    """Number of passes of the text through a block."""
    if setup.at_once:
        return 1
    if setup.resolved.sequential == "block":
        return 2
    return passes_by_group(setup)


def passes_by_group(setup: Setup) -> float:
    """One pass for each group of layers with the same input, about half as many as kinds of layers,
    and one for the outputs of the block.
    """
    kinds = max(len(by_kind(plans)) for plans in setup.plan.blocks)
    return 1 + kinds / 2


def seconds_by_phase(setup: Setup, without: Collection[str] = ()) -> dict[str, float]:
    """The expected time of each phase of a compression on this machine.

    If the recipe has minutes, fine-tuning takes the time that the earlier phases leave.

    Args:
        without: phases that do not run.
    """
    rate = product_rate(setup.device)
    flops = flops_by_phase(setup)
    seconds = {name: flops[name] / rate for name in flops if name not in without}
    minutes = setup.resolved.minutes
    if minutes and PREDICTIONS in seconds:
        before = sum(seconds.values()) - seconds[PREDICTIONS] - seconds.get(CHECK, 0)
        seconds[PREDICTIONS] = max(60 * minutes - before, 0)
    return seconds
