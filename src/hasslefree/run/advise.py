"""Advice: the pattern and the rank with which a model loses least, within a budget of bytes.

Every pattern of a list gets the largest rank that the bytes allow, the same for every layer. How much worse the model
then predicts is estimated as for allocation (`levers.sensitivity`), layer by layer, from one backward pass:

    KL(dense ‖ compressed) ≈ Σ over layers of ½ · mean over tokens of (g_tᵀ ΔW x_t)²

with ΔW the error of a few rounds of `joint` at that pattern and rank. The sum treats the layers as independent: it
ranks choices, and does not predict the divergence of a compressed model.
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.core.budgets import Budget
from hasslefree.distributed import ALONE
from hasslefree.errors import BudgetError, RecipeError
from hasslefree.levers.sensitivity import backwards, probed_layers
from hasslefree.models.activations import check_storage
from hasslefree.models.blocks import Blocks, find_blocks, select_sites
from hasslefree.models.load import load_tokenizer, resolve_device
from hasslefree.models.moments import PROBED
from hasslefree.models.streaming import Weights
from hasslefree.models.walk import Walk
from hasslefree.phases import ADVICE, LOADING, Listener, Phases
from hasslefree.recipe.plan import Plan, make_plan, weights_on_disk
from hasslefree.recipe.recipe import Recipe
from hasslefree.recipe.resolved import Resolved
from hasslefree.run.estimate import Setup, check_memory
from hasslefree.run.inputs import check_segments, draw, open_model
from hasslefree.run.machine import memory_reused
from hasslefree.run.preflight import preflight
from hasslefree.units import size

# The patterns that are tried, from the fewest bytes to the most; ranks are multiples of STEP, which suits kernels.
PATTERNS, STEP = ("1:4", "2:8", "3:8", "2:4", "4:8", "5:8", "6:8", "7:8"), 8
# Tokens of probes for each input of the widest layer.
TOKENS = 2
# The fields of a recipe that advice uses.
FIELDS = ("calibration", "samples", "seqlen", "leave_dense", "dtype", "seed")


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


def advise(
    model: str | Path | PreTrainedModel,
    budget: int,
    recipe: Recipe | None = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
    activations: str = "device",
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> list[Advice]:
    """Patterns and ranks that fit into a budget, ordered by how much the model's predictions are estimated to lose.

    The model is read once, one block in memory at a time, and not changed.

    Args:
        model, tokenizer, device, activations, trust_remote_code: as for `compress`.
        budget: bytes of all weights as stored. recipe: only its text, leave_dense, dtype and seed are used.
        progress: as for `compress`.

    Raises:
        HasslefreeError: a budget that no pattern meets, or anything that `compress` refuses.
    """
    recipe = probing_recipe(recipe or Recipe())
    resolved = recipe.resolve()
    check_storage(activations)
    target = model.device if isinstance(model, PreTrainedModel) else resolve_device(device)
    phases = Phases(progress)
    with memory_reused(), tempfile.TemporaryDirectory() as scratch:
        with phases.phase(LOADING):
            name, loaded, tokenizer = open_model(model, recipe.dtype, Path(scratch), tokenizer, trust_remote_code)
        blocks = find_blocks(loaded)
        choices = candidates(loaded, blocks, resolved, budget)
        plan = choices[0].plan
        tokenizer = tokenizer or load_tokenizer(name, trust_remote_code)
        segments = draw(loaded, tokenizer, recipe, phases).to(target)
        check_segments(loaded, segments, ALONE)
        probing = dataclasses.replace(resolved, allocate="error")
        shape = (segments.shape[0], segments.shape[1])
        setup = Setup(loaded, blocks, plan, probing, shape, target, activations, probed=probed_tokens(plan))
        weights = Weights(loaded, target, prefetch=check_memory(setup).prefetch)
        options = {"storage": activations, "folder": Path(scratch), "phases": phases}
        walk, _ = preflight(loaded, blocks, weights, plan, segments[:1], options)
        return sorted(costs(walk, choices, segments, recipe.seed), key=lambda advice: advice.divergence)


def probing_recipe(given: Recipe) -> Recipe:
    """The recipe for the probing pass. Raises a RecipeError for fields that advice itself chooses."""
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(Recipe)}
    if unused := [name for name, value in fields.items() if name not in FIELDS and value != getattr(Recipe(), name)]:
        raise RecipeError(
            f"advice chooses the pattern and the rank itself, for method joint: leave out {', '.join(unused)}; only "
            f"{', '.join(FIELDS)} can be given"
        )
    return Recipe(rank=0, effort="fast", **{name: fields[name] for name in FIELDS})


def candidates(model: PreTrainedModel, blocks: Blocks, resolved: Resolved, budget: int) -> list[Candidate]:
    """Each pattern that every layer can have, with the largest rank within `budget`, in bytes.

    Raises a BudgetError if there is none, or if the dense model is within the budget.
    """

    def candidate(pattern: str, rank: int) -> Candidate:
        plan = make_plan(blocks, dataclasses.replace(resolved, budget=Budget(pattern, rank)))
        return Candidate(pattern, rank, weights_on_disk(model, plan), plan)

    sites = select_sites(blocks, resolved.recipe.leave_dense).sites
    shapes = [site.shape for block in sites for site in block.values()]
    most = min(map(min, shapes)) // STEP * STEP
    dense = weights_on_disk(model, [])
    if budget >= dense:
        raise BudgetError(
            f"the uncompressed model takes {size(dense)}, which already fits into the budget of {size(budget)}: "
            "give a smaller budget"
        )
    whole = [p for p in PATTERNS if all(width % int(p.partition(":")[2]) == 0 for _, width in shapes)]
    unranked = [candidate(pattern, 0) for pattern in whole]
    choices = []
    for choice in unranked:
        if choice.bytes <= budget:
            step = candidate(choice.pattern, STEP).bytes - choice.bytes if most else 1
            rank = min((budget - choice.bytes) // step * STEP, most)
            choices.append(candidate(choice.pattern, rank) if rank else choice)
    if not choices:
        smallest = min([dense, *(choice.bytes for choice in unranked)])
        raise BudgetError(
            f"a budget of {size(budget)} is too small: of the patterns {', '.join(PATTERNS)}, the smallest result with "
            f"this model takes {size(smallest)} (uncompressed: {size(dense)}). Give a larger budget, or compress with "
            "method joint-grid, which also quantises S"
        )
    return choices


def probed_tokens(plan: Plan) -> int:
    """Tokens of the probes, for a model that has this plan."""
    return max(PROBED, TOKENS * max(layer.spec.shape[1] for plans in plan for layer in plans.values()))


def costs(walk: Walk, choices: Sequence[Candidate], segments: Tensor, seed: int) -> Iterator[Advice]:
    """What each candidate costs in predictions. segments: token ids (samples, tokens)."""
    totals = [0.0] * len(choices)
    blocks = backwards(walk, segments, ALONE, seed, probed_tokens(choices[0].plan))
    for reverse in walk.phases.counted(ADVICE, blocks, len(walk.blocks.modules), "blocks"):
        plans = [choice.plan[reverse.visit.index] for choice in choices]
        for layer in probed_layers(reverse, plans[0], ALONE):
            for index, plan in enumerate(plans):
                spec, pattern = plan[layer.name].spec, plan[layer.name].pattern
                totals[index] += layer.divergence(layer.solved(pattern, spec.rank, seed))
    for choice, total in zip(choices, totals, strict=True):
        yield Advice(choice.pattern, choice.rank, choice.bytes, total)
