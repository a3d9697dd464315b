"""Advice: the bits and ranks that a size gives to each layer, and the expected loss, without a
compression.

Bits and ranks are chosen as in `compress` (`allocate.allocation.by_sensitivity`), by one backward
pass. The loss is the sum over layers of ½ · mean over tokens of (g_tᵀ ΔW x_t)², as if layers were
independent, before any training. It ranks choices; it does not predict the divergence of a
compressed model.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hasslefree.allocate.allocation import by_sensitivity
from hasslefree.bar import with_bar
from hasslefree.distributed import ALONE
from hasslefree.errors import RecipeError, option
from hasslefree.models.activations import check_storage
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.pipeline.opening import Opened, restored, target_of
from hasslefree.pipeline.preflight import check_segments, preflight
from hasslefree.pipeline.text import read_texts
from hasslefree.planning.advice import Advice
from hasslefree.planning.disk import weights_on_disk
from hasslefree.planning.duration import seconds_by_phase
from hasslefree.planning.machine import memory_reused
from hasslefree.planning.plan import Plan
from hasslefree.planning.uniform import uniform_plans
from hasslefree.progress import INPUTS, SOLVING, Listener, Phases
from hasslefree.recipe.recipe import Recipe
from hasslefree.validation import typed


@typed
@with_bar
def advise(
    model: str | Path | PreTrainedModel,
    recipe: Recipe,
    *,
    tokenizer: Any = None,
    device: str | None = None,
    activations: str = "device",
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> list[Advice]:
    """Return the plan that `compress` makes for a recipe with a size, then the best uniform plans,
    most bits first. Of entropy-coded rates, the largest and all whole numbers are shown.

    The model is read once, one block in memory at a time, and not changed.

    Args:
        model, tokenizer, device, activations, trust_remote_code, progress: as for `compress`.

    Raises:
        HasslefreeError: the recipe has no size, or `compress` would raise the error.
    """
    resolved = recipe.resolve()
    if resolved.size is None or resolved.allocate != "error":
        raise RecipeError(
            f"advice shows how a size is divided among layers: give {option('size')}, and leave"
            " out allocate"
        )
    check_storage(activations)
    target = target_of(model, device)
    phases = Phases(progress)
    with (
        torch.inference_mode(False),
        memory_reused(),
        restored(model),
        tempfile.TemporaryDirectory() as scratch,
    ):
        opened = Opened.of(
            model, resolved, target, tokenizer, trust_remote_code, Path(scratch), phases
        )
        loaded = opened.model
        resolved = opened.resolved
        plan = opened.plan
        with_fewer_bits = uniform_plans(loaded, opened.selection, resolved)[1:]
        dense = weights_on_disk(loaded, plan) - plan.size
        tokenizer = opened.tokenizer or load_tokenizer(opened.name, trust_remote_code)
        texts = read_texts(loaded, tokenizer, resolved, target)
        segments = texts.draw(phases).to(target)
        check_segments(loaded, segments)
        untrained = dataclasses.replace(resolved, match_predictions=0)
        setup = dataclasses.replace(opened, resolved=untrained).setup(segments, activations)
        phases.expected = seconds_by_phase(setup, without=(INPUTS, SOLVING))
        walk, _ = preflight(setup, opened.weights, segments, phases, Path(scratch))
        dealt = by_sensitivity(walk, plan, resolved, opened.room, segments, ALONE)
        shown = [dealt.plan, plan, *filter(has_whole_bits, with_fewer_bits)]
        return [Advice.of(each, dense, dealt.divergence(each)) for each in shown]


def has_whole_bits(plan: Plan) -> bool:
    """Return True if all layers have a whole number of bits."""
    return all(layer.grid is None or layer.grid.stored_bits % 1 == 0 for layer in plan.layers)
