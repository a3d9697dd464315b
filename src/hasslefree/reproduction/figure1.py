"""Figure 1 of the paper: the relative error of every layer of one block, by method."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.core.gram import Gram
from hasslefree.errors import ModelError
from hasslefree.models.blocks import Blocks, find_blocks
from hasslefree.models.load import resolve_device
from hasslefree.models.moments import gather, groups_by_input
from hasslefree.models.sites import Site
from hasslefree.models.streaming import Weights
from hasslefree.models.walk import Walk
from hasslefree.phases import INPUTS, LOADING, SOLVING, Listener, Phases
from hasslefree.recipe.plan import make_plan
from hasslefree.recipe.recipe import Recipe
from hasslefree.report.layer_map import short_names
from hasslefree.run.inputs import draw, open_model
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.methods import build_method

# What the figure compares, as `build_method` takes it.
COMPARED: dict[str, dict[str, Any]] = {
    "oats": {"name": "oats"},
    "hassle-free, unscaled": {"name": "hassle-free", "low_rank": "adam-unscaled"},
    "hassle-free": {"name": "hassle-free"},
    "joint": {"name": "joint"},
}

# method → layer → relative error
Errors = dict[str, dict[str, float]]


def layer_errors(
    model: str,
    recipe: Recipe,
    methods: tuple[str, ...],
    *,
    block: int = 0,
    rounds: int | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> Errors:
    """Decompose every layer of one block with each method, all on the same Grams: those of the dense model.

    Args:
        recipe: gives pattern, rank, calibration and seed; its method is not looked at.
        methods: of `COMPARED`. block: counted from 0. rounds: of every method; None for its own.
        progress: as for `compress`.

    Raises:
        ModelError: no such block. HasslefreeError: as `compress`.
    """
    resolved = recipe.resolve()
    target = resolve_device(device)
    errors: Errors = {method: {} for method in methods}
    phases = Phases(progress)
    with tempfile.TemporaryDirectory() as scratch:
        with phases.phase(LOADING):
            name, loaded, tokenizer = open_model(model, recipe.dtype, Path(scratch), None, trust_remote_code)
        blocks = find_blocks(loaded)
        if not 0 <= block < len(blocks.modules):
            raise ModelError(f"{name} has blocks 0 to {len(blocks.modules) - 1}, and no block {block}")
        plans = make_plan(blocks, resolved)[block]
        short = short_names(plans)
        segments = draw(loaded, tokenizer, resolved.recipe, phases).to(target)
        with phases.phase(SOLVING, len(plans) * len(methods), "layers") as phase:
            for group, gram, sites in dense_moments(loaded, blocks, block, list(plans), segments, phases):
                for method in methods:
                    solver = build_method(rounds=rounds, **COMPARED[method])
                    prepared = solver.prepare(gram)
                    for layer in group:
                        plan, weight = plans[layer], sites[layer].weight()
                        found = solve_layer(weight, gram, solver, prepared, plan.pattern, plan.spec.rank, recipe.seed)
                        errors[method][short[layer]] = found.relative_error
                        phase.advance()
    return errors


def dense_moments(
    model: PreTrainedModel, blocks: Blocks, block: int, names: list[str], segments: Tensor, phases: Phases
) -> Iterator[tuple[list[str], Gram, dict[str, Site]]]:
    """The named layers of one block in groups with the same input, their Gram in the dense model, and their sites.

    The weights of the block are in memory between two groups, and no others.
    """
    walk = Walk.open(model, blocks, Weights(model, segments.device), segments[:1], phases=phases)
    hidden = walk.entering(segments)
    for visit in walk.visits(hidden):
        if visit.index == block:
            groups = groups_by_input(visit.block, visit.call, hidden[0], names)
            with phases.phase(INPUTS, len(names), "layers"):
                grams = gather(visit.block, visit.prefix, visit.call, hidden, groups)
            for group, gram in zip(groups, grams, strict=True):
                yield group, gram, visit.sites(group)
            return


def mean_error(errors: dict[str, float]) -> float:
    return float(torch.tensor(list(errors.values()), dtype=torch.float64).mean())
