"""Block by block over a dense and a compressed stream: what was tried beyond what `hasslefree.compress` offers.

`compress_two_streams` is a whole compression with levers that the library does not have; `match_each_block` matches the
blocks of a compressed model anew with other settings.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import hasslefree
from harness.losses import block_losses, head_of, logit_divergence
from harness.models import loaded
from hasslefree import Budget, Gram, Recipe, SparseLowRankLinear
from hasslefree.core.protocols import Method
from hasslefree.data import calibration_documents
from hasslefree.levers.matching import Matching, MatchRecord, match_block
from hasslefree.models import moments
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calls import BlockCall, hooks
from hasslefree.models.probe import block_calls
from hasslefree.models.sites import Site, find_sites
from hasslefree.models.streaming import Weights
from hasslefree.models.walk import Walk
from hasslefree.packed.linear import compressed_layers, unpacked_once
from hasslefree.run.inputs import draw
from hasslefree.solve.decompose import solve_layer

__all__ = ["Matching", "calibration_text", "draw"]


@dataclass(frozen=True)
class Levers:
    """What is done beside the decomposition of single layers.

    Args:
        matching: of each block; None for none.
        teacher: the dense block on the dense stream, or on the compressed one.
        window: matched blocks, so many at a time, each window ending at the block that was just decomposed.
        loss: of the blocks: squared, the same over each token's own norm (`per token`), or in the metric of the Fisher
            information at the block's output (`fisher`).
        logits: a last step on the whole model, by KL to the dense one's logits.
        whole: what the last step trains: the factors and vectors, or the values of S too.
    """

    matching: Matching | None = None
    teacher: Literal["dense", "compressed"] = "dense"
    window: int = 1
    loss: Literal["squared", "per token", "fisher"] = "squared"
    logits: Matching | None = None
    whole: bool = False


@dataclass(frozen=True)
class Chain:
    """Consecutive blocks as one: `match_block` runs them one after the other."""

    calls: Sequence[BlockCall]
    batched: bool = False

    def run(self, blocks: nn.Module, hidden: Tensor) -> Tensor:
        for block, call in zip(blocks, self.calls, strict=True):  # type: ignore[call-overload]
            hidden = call.run(block, hidden)
        return hidden


def compress_two_streams(
    model: Any, segments: Tensor, budget: Budget, method: Method, levers: Levers, seed: int
) -> list[MatchRecord]:
    """Decompose every layer of a model in place, block by block, and pull the levers."""
    blocks = find_blocks(model)
    walk = Walk.open(model, blocks, Weights(model, model.device), segments[:1])
    calls, dense = walk.calls, list(walk.entering(segments))
    losses = block_losses(model, blocks.modules, segments, levers.loss)
    first, entering, reports = dense, [dense], []  # entering[i]: the compressed stream before block i
    for visit in walk.visits():
        index, block, call = visit.index, visit.block, visit.call
        original, sites = copy.deepcopy(block), find_sites(block)
        inputs, wanted = entering[-1], run_block(original, call, dense)
        for group in moments.groups_by_input(block, call, inputs[0], sites):
            decompose_group(
                [sites[name] for name in group], gather(block, call, inputs, group[0]), budget, method, seed
            )
        if levers.matching is not None:
            targets = wanted if levers.teacher == "dense" else run_block(original, call, inputs)
            start = max(index + 1 - levers.window, 0)
            window = nn.ModuleList(blocks.modules[start : index + 1])
            chain = Chain(calls[start : index + 1])
            reports.append(match_block(window, chain, entering[start], targets, levers.matching, seed, losses[index]))
            for i in range(start, index):
                entering[i + 1] = run_block(blocks.modules[i], calls[i], entering[i])
        dense = wanted
        entering.append(run_block(block, call, entering[-1]))
    if levers.logits is not None:
        reports.append(match_logits(model, Chain(calls), blocks.modules, first, dense, levers, seed))
    return reports


def decompose_group(sites: Sequence[Site], gram: Gram, budget: Budget, method: Method, seed: int) -> None:
    """Put S + L in the place of the matrices of a block that have one input, with its Gram."""
    prepared = method.prepare(gram)
    for site in sites:
        weight = site.weight()
        pattern, rank = budget.resolve(*weight.shape)
        result = solve_layer(weight, gram, method, prepared, pattern, rank, seed)
        site.replace(SparseLowRankLinear.from_decomposition(result, site.bias, str(pattern)))


def run_block(block: nn.Module, call: BlockCall, hidden: Sequence[Tensor]) -> list[Tensor]:
    """The block's outputs for its inputs."""
    with unpacked_once(block), torch.no_grad():
        return [call.run(block, states) for states in hidden]


def gather(block: nn.Module, call: BlockCall, inputs: list[Tensor], name: str) -> Gram:
    """H = X̂ᵀX̂ / tokens of a layer in the compressed block."""
    caught: list[Tensor] = []
    second, tokens = torch.zeros(()), 0
    with hooks([find_sites(block)[name].on_input(caught.append)]), unpacked_once(block), torch.no_grad():
        for states in inputs:
            call.run(block, states)
            x = caught.pop().flatten(0, -2)
            second, tokens = second + x.T @ x, tokens + len(x)
    return Gram(second / tokens, tokens)


def match_logits(
    model: Any,
    chain: Chain,
    modules: Sequence[nn.Module],
    first: list[Tensor],
    wanted: list[Tensor],
    levers: Levers,
    seed: int,
) -> MatchRecord:
    """Train the factors and vectors of the whole model against the dense model's logits."""
    assert levers.logits is not None
    every = nn.ModuleList(modules)
    fixed = set() if levers.whole else {id(layer.values) for layer in compressed_layers(every).values()}
    chosen = [p for p in every.parameters() if id(p) not in fixed]
    return match_block(every, chain, first, wanted, levers.logits, seed, logit_divergence(head_of(model)), chosen)


def stream(blocks: Iterable[nn.Module], calls: Sequence[BlockCall], states: Activations) -> list[list[Tensor]]:
    """The hidden states before each block and after the last, from those before the first."""
    found = [[each.clone() for each in states]]
    for block, call in zip(blocks, calls, strict=True):
        moments.run_block(block, call, states)
        found.append([each.clone() for each in states])
    return found


def match_each_block(
    model: Any, tokenizer: Any, recipe: Recipe, settings: dict[str, Matching]
) -> tuple[int, dict[str, list[MatchRecord]]]:
    """Compress a model, and match each of its blocks from there with every setting against the dense stream.

    Returns:
        The number of blocks; and by setting the report of each block.
    """
    dense, segments = copy.deepcopy(model), draw(model, tokenizer, recipe)
    with tempfile.TemporaryDirectory() as folder:
        hasslefree.compress(model, f"{folder}/out", recipe, tokenizer=tokenizer)
        compressed = loaded(f"{folder}/out")
    blocks = find_blocks(dense)
    modules: Any = compressed.get_submodule(blocks.name)
    calls = block_calls(dense, blocks, segments[:1], Weights(dense, dense.device))
    first = moments.first_hidden_states(dense, blocks, segments)
    entering, wanted = stream(modules, calls, first.copy()), stream(blocks.modules, calls, first)
    found: dict[str, list[MatchRecord]] = {}
    for name, matching in settings.items():
        found[name] = [
            match_block(copy.deepcopy(block), calls[i], entering[i], wanted[i + 1], matching, seed=0)
            for i, block in enumerate(modules)
        ]
    return len(blocks.modules), found


def calibration_text(name: str) -> str:
    """The documents of a hub name or a local file as one text."""
    return "\n".join(calibration_documents(name))
