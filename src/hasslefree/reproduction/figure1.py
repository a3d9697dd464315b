"""Figure 1 of the paper: the relative error of every layer of one block, by method."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.compress import draw, open_model
from hasslefree.core.gram import Gram
from hasslefree.decompose import solve_layer
from hasslefree.errors import ModelError
from hasslefree.methods import build_method
from hasslefree.models.blocks import Blocks, dense_weight, find_blocks, find_linears
from hasslefree.models.calibration import first_hidden_states, gather, groups_by_input, run_block
from hasslefree.models.calls import block_calls
from hasslefree.models.load import resolve_device
from hasslefree.models.streaming import Weights, outside
from hasslefree.plan import make_plan
from hasslefree.recipe import Recipe
from hasslefree.report.grid import short_names

# What the figure compares, as `build_method` takes it.
METHODS: dict[str, dict[str, Any]] = {
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
) -> Errors:
    """Decompose every layer of one block with each method, all on the same Grams: those of the dense model.

    Args:
        recipe: gives pattern, rank, calibration and seed; its method is not looked at.
        methods: of `METHODS`. block: counted from 0. rounds: of every method; None for its own.

    Raises:
        ModelError: no such block. HasslefreeError: as `compress`.
    """
    recipe.check()
    target = resolve_device(device)
    errors: Errors = {method: {} for method in methods}
    with tempfile.TemporaryDirectory() as scratch:
        name, loaded, tokenizer = open_model(model, recipe.dtype, Path(scratch), None, trust_remote_code)
        blocks = find_blocks(loaded)
        if not 0 <= block < len(blocks.modules):
            raise ModelError(f"{name} has blocks 0 to {len(blocks.modules) - 1}, and no block {block}")
        plans = make_plan(blocks, recipe)[block]
        short = short_names(plans)
        segments = draw(loaded, tokenizer, recipe).to(target)
        with dense_moments(loaded, blocks, block, list(plans), segments) as groups:
            for group, gram in groups:
                for method in methods:
                    solver = build_method(rounds=rounds, **METHODS[method])
                    prepared = solver.prepare(gram)
                    for layer in group:
                        plan, weight = plans[layer], dense_weight(find_linears(blocks.modules[block])[layer])
                        found = solve_layer(weight, gram, solver, prepared, plan.pattern, plan.rank, recipe.seed)
                        errors[method][short[layer]] = found.relative_error
    return errors


@contextmanager
def dense_moments(
    model: PreTrainedModel, blocks: Blocks, block: int, names: list[str], segments: Tensor
) -> Iterator[list[tuple[list[str], Gram]]]:
    """The named layers of one block in groups with the same input, and their Grams in the dense model.

    The weights of the block are in memory within the context, and no others.
    """
    weights = Weights(model, segments.device)
    calls = block_calls(model, blocks, segments[:1], weights).calls
    with weights.present(outside(model, blocks)):
        hidden = first_hidden_states(model, blocks, segments)
    for module, call in zip(blocks.modules[:block], calls, strict=False):
        with weights.present(module.modules):
            run_block(module, call, hidden)
    module, call = blocks.modules[block], calls[block]
    with weights.present(module.modules):
        groups = groups_by_input(module, call, hidden[0], names)
        moments = gather(module, blocks.prefix(block), call, hidden, groups)
        yield [(group, known.gram) for group, known in zip(groups, moments, strict=True)]


def mean_error(errors: dict[str, float]) -> float:
    return float(torch.tensor(list(errors.values()), dtype=torch.float64).mean())
