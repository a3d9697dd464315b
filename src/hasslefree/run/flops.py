"""The floating-point operations of a compression, from shapes alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from hasslefree.levers.train import TRAINING_PER_VALIDATION, Training, segments_for
from hasslefree.models.blocks import Blocks, by_kind
from hasslefree.models.experts import share_of_tokens
from hasslefree.models.moments import probes
from hasslefree.phases import (
    ALLOCATION,
    INPUTS,
    PREDICTIONS,
    PREFLIGHT,
    PROBES,
    REFERENCE,
    SOLVING,
)
from hasslefree.recipe.plan import Plan
from hasslefree.recipe.resolved import Resolved
from hasslefree.run.sharing import solving_flops
from hasslefree.solve.methods.joint import QUICK_PRUNING


def flops_by_phase(
    model: nn.Module,
    blocks: Blocks,
    plan: Plan,
    resolved: Resolved,
    text: tuple[int, int],
    processes: int,
    at_once: bool,
) -> dict[str, float]:
    """The FLOPs of each phase, those without any left out.

    Solvers are counted as if all layers of a block were solved at the same time: where layers are dealt out, and not
    shared, it takes longer in the order of groups.

    Args:
        text: segments, and tokens in each. at_once: whether the segments of a block run at once.
    """
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    width, vocabulary = embeddings.weight.shape[1], embeddings.num_embeddings
    inside, head, seqlen = numbers_of(blocks), width * vocabulary, text[1]
    a_pass = 2 * -(-text[0] // processes) * seqlen * inside
    reference, predicting = predicting_flops(resolved, seqlen, processes, inside, head)
    grams, by_group = gram_flops(blocks, plan, text, processes), passes_by_group(plan)
    alone = 2.0 if resolved.recipe.sequential == "block" else by_group
    found = {
        PREFLIGHT: 2 * 2 * seqlen * inside,
        REFERENCE: reference,
        **probing_flops(plan, resolved, text, processes, inside + head),
        INPUTS: grams + (1.0 if at_once else alone) * a_pass,
        SOLVING: sum(solving_flops(resolved.method, plans, processes) for plans in plan),
        PREDICTIONS: predicting,
    }
    if resolved.allocate == "owl":
        found[ALLOCATION] = grams + by_group * a_pass
    return {name: float(flops) for name, flops in found.items() if flops}


def passes_by_group(plan: Plan) -> float:
    """Forward passes of a block that collect the Grams of one group of layers after the other, and move on.

    One for each group of layers with the same input, and one at the end of a block; groups are not known from shapes,
    and one for each two layers is near. The experts of a block are gathered together.
    """
    return 1 + len(by_kind(plan[0])) / 2


def gram_flops(blocks: Blocks, plan: Plan, text: tuple[int, int], processes: int) -> float:
    """Of the Grams of all layers. text: segments, and tokens in each."""
    tokens = -(-text[0] // processes) * text[1]
    return sum(
        2 * tokens * share_of_tokens(block, name) * layer.spec.shape[1] ** 2
        for block, plans in zip(blocks.modules, plan, strict=True)
        for name, layer in plans.items()
    )


def probing_flops(
    plan: Plan, resolved: Resolved, text: tuple[int, int], processes: int, numbers: int
) -> dict[str, float]:
    """Of what a backward pass of the dense model is for: allocation, or the importance of channels.

    Args:
        text: segments, and tokens in each. numbers: parameters of the blocks and the output head.
    """
    if resolved.allocate != "error":
        return {}
    # A forward and a backward pass of the blocks and the output head.
    forward = 2 * -(-probes(*text) // processes) * text[1] * numbers
    layers = [layer.spec for plans in plan for layer in plans.values()]
    first_look = sum(QUICK_PRUNING.cost(*layer.shape, 0).flops for layer in layers) / processes
    return {PROBES: forward, ALLOCATION: 2 * forward + first_look}


def predicting_flops(resolved: Resolved, seqlen: int, processes: int, inside: int, head: int) -> tuple[float, float]:
    """Of the dense predictions, and of matching them.

    The dense model once, the compressed one forwards, and once more for its backward pass, which is two; of the head
    both models' predictions, and one backward pass to the hidden states. Where a step has too few segments for all
    processes, some of them wait.

    Args:
        inside, head: parameters of the blocks, and of the head.
    """
    # At most: a short text has fewer.
    segments = -(-segments_for(resolved.match_predictions, seqlen) // processes)
    waiting = max(processes * seqlen / Training().tokens(seqlen), 1)
    judging = Training().validations / (TRAINING_PER_VALIDATION + 1)
    each = waiting * 2 * segments * seqlen
    return each * inside, each * ((4 + judging) * inside + (3 + 2 * judging) * head)


def numbers_of(blocks: Blocks) -> int:
    """The parameters of all blocks; of experts, those that a token meets."""
    found = 0.0
    for block in blocks.modules:
        for name, parameter in block.named_parameters():
            found += share_of_tokens(block, name.rpartition(".")[0]) * parameter.numel()
    return round(found)
