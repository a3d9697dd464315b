"""Patterns and ranks of a model that fit into a budget of bytes, ordered by the estimated loss."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hasslefree.core.cost import FLOAT
from hasslefree.distributed import ALONE
from hasslefree.errors import RecipeError
from hasslefree.levers.advice import Advice, Candidate, candidates, costs, probed_tokens
from hasslefree.models.activations import check_storage
from hasslefree.models.blocks import Blocks, find_blocks
from hasslefree.models.load import load_tokenizer, resolve_device
from hasslefree.models.moments import probes
from hasslefree.models.streaming import Weights
from hasslefree.phases import LOADING, Listener, Phases
from hasslefree.recipe.recipe import Recipe
from hasslefree.recipe.resolved import Resolved
from hasslefree.run.estimate import Footprint, estimate
from hasslefree.run.inputs import check_segments, draw, open_model
from hasslefree.run.machine import memory_reused
from hasslefree.run.memory import check_memory, runs_beside
from hasslefree.run.preflight import preflight


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
    recipe = looked_at(recipe or Recipe())
    resolved = recipe.resolve()
    check_storage(activations)
    target = model.device if isinstance(model, PreTrainedModel) else resolve_device(device)
    phases = Phases(progress)
    with memory_reused(), tempfile.TemporaryDirectory() as scratch:
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
        weights = Weights(loaded, target, prefetch=runs_beside(found, target))
        walk, _ = preflight(loaded, blocks, weights, chosen[0].plan, segments[:1], options)
        advice = costs(walk, chosen, segments, recipe.seed)
        return sorted(advice, key=lambda each: each.divergence)


# The fields of a recipe that advice uses.
READ = ("calibration", "samples", "seqlen", "leave_dense", "dtype", "seed")


def looked_at(given: Recipe) -> Recipe:
    """The recipe for the probing pass. Raises a RecipeError where fields are given that advice itself chooses."""
    fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(Recipe)}
    if said := [name for name, value in fields.items() if name not in READ and value != getattr(Recipe(), name)]:
        raise RecipeError(
            f"advice chooses the pattern and the rank itself, for method joint: leave out {', '.join(said)}; only "
            f"{', '.join(READ)} can be given"
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
    """What advice takes: as an allocation with more probes, plus all inputs and gradients of a block."""
    probing = dataclasses.replace(resolved, allocate="error")
    plan, tokens = chosen[0].plan, probed_tokens(chosen[0].plan)
    found = estimate(model, blocks, plan, probing, shape, device, activations)
    more = probes(*shape, tokens) / probes(*shape)
    sides = max(sum(sum(layer.spec.shape) for layer in plans.values()) for plans in plan)
    held = 2 * FLOAT * probes(*shape, tokens) * shape[1] * sides
    return dataclasses.replace(found, probes=int(found.probes * more), streams=0, solving=found.solving + held)
