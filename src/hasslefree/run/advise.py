"""What a budget of bytes buys on a model: patterns and ranks, the one that loses least first."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hasslefree.core.cost import FLOAT
from hasslefree.errors import RecipeError
from hasslefree.levers.advice import Advice, Candidate, candidates, costs, probed_tokens
from hasslefree.models.activations import check_storage
from hasslefree.models.blocks import Blocks, find_blocks
from hasslefree.models.distributed import ALONE
from hasslefree.models.load import load_tokenizer, resolve_device
from hasslefree.models.moments import probes
from hasslefree.models.streaming import Weights
from hasslefree.phases import LOADING, Listener, heard
from hasslefree.recipe.recipe import Recipe
from hasslefree.recipe.resolved import Resolved
from hasslefree.run.compress import check_segments, draw, open_model
from hasslefree.run.estimate import Footprint, estimate
from hasslefree.run.look import look_over
from hasslefree.run.machine import memory_reused
from hasslefree.run.memory import check_memory, runs_beside


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
    """Patterns and ranks that fit into a budget, the one first that the model's predictions lose least by.

    The model is read once, one block in memory at a time, and not changed.

    Args:
        model, tokenizer, device, activations, trust_remote_code: as for `compress`.
        budget: bytes of all weights as stored. recipe: its text, what stays dense, dtype and seed.
        progress: as for `compress`.

    Raises:
        HasslefreeError: a budget that no pattern meets, or anything that `compress` refuses.
    """
    recipe = looked_at(recipe or Recipe())
    resolved = recipe.resolve()
    check_storage(activations)
    target = model.device if isinstance(model, PreTrainedModel) else resolve_device(device)
    with memory_reused(), heard(progress) as phases, tempfile.TemporaryDirectory() as scratch:
        with phases.phase(LOADING):
            name, loaded, tokenizer = open_model(model, recipe.dtype, Path(scratch), tokenizer, trust_remote_code)
        blocks = find_blocks(loaded)
        chosen = candidates(loaded, blocks, resolved, budget)
        tokenizer = tokenizer or load_tokenizer(name, trust_remote_code)
        segments = draw(loaded, tokenizer, recipe, phases).to(target)
        check_segments(loaded, segments, ALONE)
        shape = (segments.shape[0], segments.shape[1])
        found = footprint(loaded, blocks, chosen, resolved, shape, target, activations)
        check_memory(found, target)
        options = {"storage": activations, "folder": Path(scratch), "phases": phases}
        weights = Weights(loaded, target, ahead=runs_beside(found, target))
        walk, _ = look_over(loaded, blocks, weights, chosen[0].plan, segments[:1], options)
        advice = costs(walk, chosen, segments, recipe.seed)
        return sorted(advice, key=lambda each: each.divergence)


# The fields of a recipe that say how a model is looked at.
READ = ("calibration", "samples", "seqlen", "leave_dense", "dtype", "seed")


def looked_at(given: Recipe) -> Recipe:
    """The recipe of the look. Raises a RecipeError where one says what is to be found."""
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(Recipe)}
    if said := [name for name, value in fields.items() if name not in READ and value != getattr(Recipe(), name)]:
        raise RecipeError(
            f"advice chooses the pattern and the rank, for joint: leave out {', '.join(said)}; it reads "
            f"{', '.join(READ)}"
        )
    return Recipe(rank=0, effort="fast", **{name: fields[name] for name in READ})


def footprint(
    model: PreTrainedModel,
    blocks: Blocks,
    chosen: list[Candidate],
    resolved: Resolved,
    shape: tuple[int, int],
    device: torch.device,
    activations: str,
) -> Footprint:
    """What the look takes: that of an allocation with more probes, and all inputs and gradients of a block beside."""
    probing = dataclasses.replace(resolved, allocate="error")
    plan, tokens = chosen[0].plan, probed_tokens(chosen[0].plan)
    found = estimate(model, blocks, plan, probing, shape, device, activations)
    more = probes(*shape, tokens) / probes(*shape)
    sides = max(sum(sum(layer.spec.shape) for layer in plans.values()) for plans in plan)
    held = 2 * FLOAT * probes(*shape, tokens) * shape[1] * sides
    return dataclasses.replace(found, probes=int(found.probes * more), streams=0, solving=found.solving + held)
