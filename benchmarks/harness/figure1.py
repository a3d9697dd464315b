"""Figure 1 of the paper: the relative error of every layer of one block, by method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hasslefree import ALPS, Adam, AlternatingMinimization, Exact, Gram, Recipe, decompose
from hasslefree.core.protocols import Method
from hasslefree.errors import ModelError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.load import load_model
from hasslefree.models.sites import Site, find_sites
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.pipeline.text import read_texts
from hasslefree.progress import SOLVING, Listener, Phases
from hasslefree.report.content import short_names
from hasslefree.solve.methods import METHODS

# The methods of the figure. The gaussian start is that of the paper's text, the other one that of its code.
COMPARED: dict[str, Method] = {
    "oats": METHODS["oats"],
    "hassle-free, gaussian start": AlternatingMinimization(low_rank=Adam(adapter_start=False)),
    "hassle-free, unscaled": AlternatingMinimization(low_rank=Adam(scaled=False)),
    "hassle-free, 20 rounds": AlternatingMinimization(rounds=20),
    "hassle-free": METHODS["hassle-free"],
    "hassle-free, little damping": AlternatingMinimization(damping=1e-4),
    "hassle-free, ALPS": AlternatingMinimization(pruner=ALPS()),
    "hassle-free, exact step": AlternatingMinimization(low_rank=Exact()),
    "3basil": METHODS["3basil"],
    "pcp": METHODS["pcp"],
    "joint": METHODS["joint"],
}


# Method → layer → relative error.
Errors = dict[str, dict[str, float]]


class BlockDoneError(Exception):
    """Ends a forward pass after the block whose inputs are collected."""


def layer_errors(
    model: str,
    recipe: Recipe,
    methods: tuple[str, ...],
    block: int = 0,
    rounds: int | None = None,
    device: str | None = None,
    progress: Listener | None = None,
    known: Errors | None = None,
    keep: Callable[[Errors], None] = lambda errors: None,
) -> Errors:
    """All methods decompose the layers of one block on the Grams of the dense model.

    Args:
        recipe: pattern, rank, calibration and seed; its method is ignored.
        methods: keys of `COMPARED`. block: its number, from 0. rounds: of every method; None for the defaults.
        known: errors that are not measured again. keep: called with all errors after each one.

    Raises:
        ModelError: the model has no such block.
    """
    dense = load_model(model, "float32", device)
    blocks = find_blocks(dense).modules
    if not 0 <= block < len(blocks):
        raise ModelError(f"{model} has blocks 0 to {len(blocks) - 1}, and no block {block}")
    sites = find_sites(blocks[block])
    segments = read_texts(dense, load_tokenizer(model), recipe, dense.device).draw().to(dense.device)
    grams = block_grams(dense, blocks[block], sites, segments)
    short = short_names(sites)
    errors: Errors = {method: dict((known or {}).get(method, {})) for method in methods}
    missing = [(method, name) for method in methods for name in sites if short[name] not in errors[method]]
    for method, name in Phases(progress).counted(SOLVING, missing, len(missing), "layers"):
        solver = COMPARED[method]
        if rounds is not None:
            solver = dataclasses.replace(solver, rounds=rounds)
        solved = decompose(
            sites[name].weight(), grams[name], recipe.pattern, recipe.rank, method=solver, seed=recipe.seed
        )
        errors[method][short[name]] = solved.relative_error
        keep(errors)
    return {method: {short[name]: errors[method][short[name]] for name in sites} for method in methods}


@torch.no_grad()
def block_grams(model: Any, block: Any, sites: dict[str, Site], segments: Tensor) -> dict[str, Gram]:
    """Name of a layer → the Gram of its inputs in the dense model, for segments (samples, tokens)."""
    sums: dict[str, Tensor] = {}

    def stop(*_: Any) -> None:
        raise BlockDoneError

    def add(name: str, x: Tensor) -> None:
        matrix = Gram.from_activations(x).matrix
        sums[name] = sums[name] + matrix if name in sums else matrix

    hooks = [site.on_input(lambda x, name=name: add(name, x)) for name, site in sites.items()]
    hooks.append(block.register_forward_hook(stop))
    for segment in segments:
        with suppress(BlockDoneError):
            model(input_ids=segment[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: Gram(matrix / len(segments), segments.numel()) for name, matrix in sums.items()}
