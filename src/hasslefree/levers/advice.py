"""Advice: the pattern and the rank with which a model loses least, within a budget of bytes.

Every pattern of a list gets the largest rank that the bytes allow, the same for every layer. How much worse the model
then predicts is estimated as for allocation (`levers.sensitivity`), layer by layer, from one backward pass:

    KL(dense ‖ compressed) ≈ Σ over layers of ½ · mean over tokens of (g_tᵀ ΔW x_t)²

with ΔW the error of a few rounds of `joint` at that pattern and rank. The sum treats the layers as independent: it
ranks choices, and does not predict the divergence of a compressed model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.core.budgets import Budget
from hasslefree.distributed import ALONE
from hasslefree.errors import BudgetError
from hasslefree.levers.sensitivity import backwards, probed_layers
from hasslefree.models.blocks import Blocks, select_sites
from hasslefree.models.moments import PROBED
from hasslefree.models.walk import Walk
from hasslefree.phases import ADVICE
from hasslefree.recipe.plan import Plan, make_plan, weights_on_disk
from hasslefree.recipe.resolved import Resolved
from hasslefree.units import size

# The patterns that are tried, from the fewest bytes to the most; ranks are multiples of STEP, which suits kernels.
PATTERNS, STEP = ("1:4", "2:8", "3:8", "2:4", "4:8", "5:8", "6:8", "7:8"), 8
# Tokens of probes for each input of the widest layer.
TOKENS = 2


@dataclass(frozen=True)
class Candidate:
    """A pattern and a rank for every layer. bytes: of all weights of the model, as stored."""

    pattern: str
    rank: int
    bytes: int
    plan: Plan


@dataclass(frozen=True)
class Advice:
    """A pattern and a rank, and what they cost.

    Args:
        bytes: of all weights of the model, as stored. divergence: the estimate above, in nats a token.
    """

    pattern: str
    rank: int
    bytes: int
    divergence: float


def candidates(model: PreTrainedModel, blocks: Blocks, resolved: Resolved, budget: int) -> list[Candidate]:
    """Each pattern that every layer can have, with the largest rank within `budget`, in bytes.

    Raises:
        BudgetError: there is none; or the dense model is within the budget.
    """

    def planned(pattern: str, rank: int) -> tuple[Plan, int]:
        plan = make_plan(blocks, dataclasses.replace(resolved, budget=Budget(pattern, rank)))
        return plan, weights_on_disk(model, plan)

    shapes = [
        site.shape for sites in select_sites(blocks, resolved.recipe.leave_dense).sites for site in sites.values()
    ]
    most = min(map(min, shapes)) // STEP * STEP
    dense = weights_on_disk(model, [])
    if budget >= dense:
        raise BudgetError(
            f"the uncompressed model takes {size(dense)}, which already fits into the budget of {size(budget)}: "
            "give a smaller budget"
        )
    found, smallest = [], dense
    for pattern in PATTERNS:
        group = int(pattern.partition(":")[2])
        if any(width % group for _, width in shapes):
            continue
        plan, alone = planned(pattern, 0)
        smallest = min(smallest, alone)
        if alone > budget:
            continue
        rank = 0
        if most:
            step = planned(pattern, STEP)[1] - alone
            rank = min((budget - alone) // step * STEP, most)
            plan, alone = planned(pattern, rank)
        found.append(Candidate(pattern, rank, alone, plan))
    if not found:
        raise BudgetError(
            f"a budget of {size(budget)} is too small: of the patterns {', '.join(PATTERNS)}, the smallest result with "
            f"this model takes {size(smallest)} (uncompressed: {size(dense)}). Give a larger budget, or compress with "
            "method joint-grid, which also quantises S"
        )
    return found


def probed_tokens(plan: Plan) -> int:
    """Tokens of the probes, for a model that has this plan."""
    return max(PROBED, TOKENS * max(layer.spec.shape[1] for plans in plan for layer in plans.values()))


def costs(walk: Walk, chosen: Sequence[Candidate], segments: Tensor, seed: int) -> Iterator[Advice]:
    """What each candidate costs in predictions.

    Args:
        segments: token ids (samples, tokens).

    Raises:
        ModelError, NonFiniteError: as from `sensitivities`.
    """
    totals = [0.0] * len(chosen)
    passing = backwards(walk, segments, ALONE, seed, probed_tokens(chosen[0].plan))
    for reverse in walk.phases.counted(ADVICE, passing, len(walk.blocks.modules), "blocks"):
        plans = [candidate.plan[reverse.visit.index] for candidate in chosen]
        for layer in probed_layers(reverse, plans[0], ALONE):
            for place, each in enumerate(plans):
                plan = each[layer.name]
                totals[place] += layer.divergence(layer.solved(plan.pattern, plan.spec.rank, seed))
    for candidate, total in zip(chosen, totals, strict=True):
        yield Advice(candidate.pattern, candidate.rank, candidate.bytes, total)
