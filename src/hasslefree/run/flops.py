"""The floating-point operations of a compression, from shapes alone."""

from __future__ import annotations

import math

from hasslefree.levers.masters import SAMPLES
from hasslefree.levers.matching import Matching
from hasslefree.levers.predictions import JUDGED, Predictions
from hasslefree.models.blocks import Blocks, by_kind
from hasslefree.models.experts import share_of_tokens
from hasslefree.recipe.plan import Plan
from hasslefree.recipe.resolved import Resolved
from hasslefree.run.sharing import solving_flops
from hasslefree.solve.methods.joint import LOOK


def matching_passes(settings: Matching, segments: int) -> float:
    """Forward passes over the calibration text that matching takes at most, but for retreats; a backward one is two."""
    measured = min(SAMPLES, segments - math.ceil(settings.held_out * segments)) / segments
    return measured + settings.held_out + settings.epochs * (3 * (1 - settings.held_out) + settings.held_out)


def flops_of(
    blocks: Blocks, plan: Plan, resolved: Resolved, text: tuple[int, int], processes: int, at_once: bool
) -> float:
    """Of solvers, Grams, forward passes, and matching.

    A forward pass is two FLOPs a parameter and token. Where the segments of a block do not run at once, one is taken
    for each group of layers with the same input, and one at the end of a block; groups are not known from shapes, and
    one for each two layers is near. Solvers are counted as if all layers of a block were solved at the same time: where
    layers are dealt out, and not shared, it takes longer in the order of groups.

    Args:
        text: segments, and tokens in each. at_once: whether the segments of a block run at once.
    """
    segments, tokens = text[0], -(-text[0] // processes) * text[1]
    layers = [layer.spec for plans in plan for layer in plans.values()]
    solvers = sum(solving_flops(resolved.method, plans, processes) for plans in plan)
    grams = sum(
        2 * tokens * share_of_tokens(block, name) * layer.spec.shape[1] ** 2
        for block, plans in zip(blocks.modules, plan, strict=True)
        for name, layer in plans.items()
    )
    # The experts of a block are gathered together.
    alone = 2.0 if resolved.recipe.sequential == "block" else 1 + len(by_kind(plan[0])) / 2
    passes = (1.0 if at_once else alone) * (1 + resolved.two_streams)
    if resolved.allocate == "error":
        solvers += sum(LOOK.cost(*layer.shape, 0).flops for layer in layers) / processes
    if resolved.match_blocks:
        # The segments of a step are whose they are: about the square root of the processes work at the same time.
        settings = Matching.of(resolved.match_epochs)
        passes += matching_passes(settings, segments) * processes / min(math.sqrt(processes), settings.batch)
    return solvers + grams + passes * 2 * tokens * numbers_of(blocks)


def predicting(segments: int, seqlen: int, processes: int, inside: int, head: int) -> float:
    """The FLOPs of matching predictions, while the other processes wait where a step has too few segments for all.

    The dense model once, the compressed one forwards, and once more for its backward pass, which is two; of the head
    both models' predictions, and one backward pass to the hidden states.

    Args:
        segments: of one process, the judging ones included. inside, head: parameters of the blocks, and of the head.
    """
    waiting = max(processes * seqlen / Predictions().tokens(seqlen), 1)
    judging = Predictions().looks / (JUDGED + 1)
    return waiting * 2 * segments * seqlen * ((5 + judging) * inside + (3 + 2 * judging) * head)


def numbers_of(blocks: Blocks) -> int:
    """The parameters of all blocks; of experts, those that a token meets."""
    found = 0.0
    for block in blocks.modules:
        for name, parameter in block.named_parameters():
            found += share_of_tokens(block, name.rpartition(".")[0]) * parameter.numel()
    return round(found)
