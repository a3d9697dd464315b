"""Block by block: the calibration text runs through, each linear layer becomes S + L, and the block is written."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.checkpoints.entries import crc32, entry_of, read_entries
from hasslefree.checkpoints.transformers_plugin import empty_layer
from hasslefree.checkpoints.unfinished import Unfinished
from hasslefree.core.gram import Gram
from hasslefree.core.protocols import Decomposition, Method
from hasslefree.core.targets import corrected, drift_correction, target_damping
from hasslefree.decompose import solve_layer
from hasslefree.distributed import World
from hasslefree.errors import (
    HasslefreeError,
    MemoryShortError,
    ModelError,
    NonFiniteError,
)
from hasslefree.matching import Matching, match_block
from hasslefree.methods.row_chunks import InRowChunks
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import Blocks, dense_weight, replace_module
from hasslefree.models.calibration import (
    Moments,
    Stream,
    first_hidden_states,
    gather,
    groups_by_input,
    run_block,
)
from hasslefree.models.calls import BlockCall, block_calls
from hasslefree.models.linear import SparseLowRankLinear
from hasslefree.models.streaming import Weights, outside, trim
from hasslefree.plan import LayerPlan, Plan
from hasslefree.recipe import Recipe
from hasslefree.record import LayerReport

logger = logging.getLogger(__name__)

# Into so many chunks of rows is a layer cut that the device has no room for.
CHUNKS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Job:
    """What a compression works on. place: where the hidden states between blocks are."""

    model: PreTrainedModel
    blocks: Blocks
    plan: Plan
    weights: Weights
    recipe: Recipe
    method: Method
    place: str
    note: Callable[[LayerReport], None]
    world: World


def look_over(job: Job, segment: Tensor) -> tuple[list[BlockCall], dict[str, str]]:
    """One segment (1, tokens) through the whole model, before hours of work are spent.

    Returns:
        How each block is called; and a checksum of each part of the model by its name.

    Raises:
        ModelError: it cannot be run block by block, or a planned layer is not reached.
        NonFiniteError: NaN or Inf in a weight.
    """
    model, blocks = job.model, job.blocks
    with job.weights.present(outside(model, blocks)):
        digests = {"outside": checksum(outside_tensors(model, blocks))}

    def look(index: int) -> None:
        tensors = block_tensors(blocks, index)
        digests[blocks.prefix(index)] = checksum(tensors)
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise NonFiniteError(f"the weight {name} holds NaN or Inf; repair the checkpoint")

    seen = block_calls(model, blocks, segment, job.weights, look)
    if silent := [
        f"{blocks.prefix(index)}.{name}"
        for index, plans in enumerate(job.plan)
        for name in plans
        if blocks.modules[index].get_submodule(name) not in seen.reached
    ]:
        raise ModelError(f"no calibration token reaches {', '.join(silent[:8])}; name them with --leave-dense")
    return seen.calls, digests


def checksum(tensors: dict[str, Tensor]) -> str:
    """CRC-32 of the bytes of tensors, one after the other."""
    found = 0
    for tensor in tensors.values():
        found = crc32(tensor, found)
    return f"{found:08x}"


def block_tensors(blocks: Blocks, index: int) -> dict[str, Tensor]:
    """The parameters and stored buffers of a block by their names in the model."""
    state = blocks.modules[index].state_dict()
    return {f"{blocks.prefix(index)}.{name}": tensor for name, tensor in state.items()}


def outside_tensors(model: PreTrainedModel, blocks: Blocks) -> dict[str, Tensor]:
    """The parameters and stored buffers outside the blocks; of tied ones, the one that a checkpoint holds."""
    tied = model.all_tied_weights_keys
    inside = f"{blocks.name}."
    return {n: t for n, t in model.state_dict().items() if not n.startswith(inside) and n not in tied}


def entering(job: Job, segments: Tensor, folder: Path) -> Activations:
    """What enters the first block."""
    with job.weights.present(outside(job.model, job.blocks)):
        return first_hidden_states(job.model, job.blocks, segments, job.place, folder)


def each_block(job: Job, calls: list[BlockCall], hidden: Activations) -> Iterator[int]:
    """The numbers of the blocks as they are, each block in memory in its turn, and `hidden` what enters it.

    In the end `hidden` is what leaves the last.
    """
    for index, block in enumerate(job.blocks.modules):
        with job.weights.present(block.modules):
            yield index
            run_block(block, calls[index], hidden)


def compress_blocks(job: Job, work: Unfinished, calls: list[BlockCall], segments: Tensor) -> None:
    """Decompose, replace and write every planned layer; each block is fed with what those before it put out."""
    count, finished = len(job.blocks.modules), len(work.parts)
    with job.weights.present(outside(job.model, job.blocks)):
        hidden = first_hidden_states(job.model, job.blocks, segments, job.place, work.folder)
        if not finished and job.world.writes:
            work.add(_file(0, count), outside_tensors(job.model, job.blocks))
    dense = hidden.copy() if job.recipe.two_streams else None
    for index, block in enumerate(job.blocks.modules):
        with job.weights.present(block.modules):
            if index + 1 < finished:
                if dense is not None:
                    run_block(block, calls[index], dense)
                put_back(job, work, index)
            else:
                layers, matching = compress_block(job, index, calls[index], hidden, dense)
                if job.world.writes:
                    entries = {report.name: entry_of(layer) for layer, report in layers}
                    reports = [dataclasses.asdict(report) for _, report in layers]
                    tensors = block_tensors(job.blocks, index)
                    work.add(_file(index + 1, count), tensors, entries=entries, layers=reports, matching=matching)
            if index + 1 < count:
                run_block(block, calls[index], hidden)


def _file(part: int, blocks: int) -> str:
    return f"model-{part + 1:05d}-of-{blocks + 1:05d}.safetensors"


def put_back(job: Job, work: Unfinished, index: int) -> None:
    """Put the compressed layers of a finished block in place, as they were written."""
    part, block, prefix = work.parts[index + 1], job.blocks.modules[index], f"{job.blocks.prefix(index)}."
    for name, entry in read_entries(part.entries).items():
        leaf = name.removeprefix(prefix)
        replace_module(block, leaf, empty_layer(block.get_submodule(leaf), name, entry))
    block.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in work.read(part).items()})
    for layer in part.layers:
        job.note(LayerReport.from_dict(layer))


# A layer that was compressed, and its report.
Done = tuple[SparseLowRankLinear, LayerReport]


def compress_block(
    job: Job, index: int, call: BlockCall, hidden: Activations, dense: Activations | None
) -> tuple[list[Done], dict[str, Any] | None]:
    """Decompose and replace the planned layers of one block, each process its share; and match the block, if asked.

    Args:
        dense: what enters the block in the dense model; afterwards what leaves it there. None for one stream.

    Returns:
        The layers with their reports, and the report of the matching.
    """
    block, prefix, plans = job.blocks.modules[index], job.blocks.prefix(index), job.plan[index]
    groups = groups_by_input(block, call, hidden[0], plans)
    original = None if dense is None else copied_but_for(block, plans)
    drifting = (original, dense) if original is not None and dense is not None and job.recipe.dense_target else None
    done = []
    for together in [groups] if job.recipe.sequential == "block" else [[group] for group in groups]:
        done += compress_groups(job, index, call, hidden, together, drifting)
    matching = None
    if original is not None and dense is not None:
        run_block(original, call, dense)
        if job.recipe.match_blocks:
            report = match_block(block, call, hidden, dense, Matching(), job.recipe.seed, world=job.world)
            matching = {"block": prefix, **report.to_dict()}
    return done, matching


def copied_but_for(block: nn.Module, names: Iterable[str]) -> nn.Module:
    """A copy of a block that shares the named layers with it: in one they are replaced, in the other they stay."""
    shared: dict[int, Any] = {id(layer): layer for layer in map(block.get_submodule, names)}
    return copy.deepcopy(block, shared)


def compress_groups(
    job: Job, index: int, call: BlockCall, hidden: Activations, groups: list[list[str]], dense: Stream | None
) -> list[Done]:
    """Decompose and replace the layers of some groups, each process its share. dense: for targets that lead to it."""
    block, prefix, plans = job.blocks.modules[index], job.blocks.prefix(index), job.plan[index]
    moments = gather(block, prefix, call, hidden, groups, dense, job.world.add)
    names = [name for group in groups for name in group]
    # What every method does most of is products out × in × in.
    owners = job.world.deal([plans[name].shape[0] * plans[name].shape[1] ** 2 for name in names])
    mine = {name for name, owner in zip(names, owners, strict=True) if owner == job.world.rank}
    found: dict[str, Done] = {}
    for group, known in zip(groups, moments, strict=True):
        share = {name: plans[name] for name in group if name in mine}
        found |= compress_group(job, block, prefix, share, known) if share else {}
    done = [put_in_place(job, block, n, owner, found.get(n)) for n, owner in zip(names, owners, strict=True)]
    trim()
    return done


def compress_group(
    job: Job, block: nn.Module, prefix: str, plans: dict[str, LayerPlan], known: Moments
) -> dict[str, Done]:
    """Decompose layers that share one input, with what depends on its moments computed once."""
    start, done = time.perf_counter(), {}
    gram, share = known.gram, job.recipe.dense_target or 0.0
    try:
        # In the place of the drift, and before the solver makes what it holds: neither is needed beside the other.
        correction = known.drift
        if correction is not None:
            correction.copy_(drift_correction(gram, correction, share, target_damping(gram)))
        prepared = job.method.prepare(gram)
        shared = (time.perf_counter() - start) / len(plans)
        for name, plan in plans.items():
            start = time.perf_counter()
            linear: Any = block.get_submodule(name)
            weight, pattern = dense_weight(linear), str(plan.pattern)
            target = None if correction is None else corrected(weight, correction)
            result = solve_with_room(weight, gram, job.method, prepared, plan, job.recipe.seed, target)
            bias = None if linear.bias is None else linear.bias.detach()
            layer = SparseLowRankLinear.from_decomposition(result, bias, pattern)
            seconds = time.perf_counter() - start + shared
            done[name] = layer, LayerReport.of(f"{prefix}.{name}", pattern, result, seconds, layer.stored_bytes)
            job.note(done[name][1])
    except HasslefreeError as error:
        raise type(error)(f"{error} ({prefix}: {', '.join(plans)})") from None
    return done


def solve_with_room(
    weight: Tensor, gram: Gram, method: Method, prepared: Any, plan: LayerPlan, seed: int, target: Tensor | None
) -> Decomposition:
    """`solve_layer`; where the device has no room for it, again in 2, 4, 8, … chunks of rows. The result remarks it.

    Raises:
        MemoryShortError: no number of chunks helps.
    """
    for chunks in (1, *CHUNKS):
        way = method if chunks == 1 else InRowChunks(method, chunks, gram)
        try:
            return solve_layer(weight, gram, way, prepared, plan.pattern, plan.rank, seed, target, plan.factor_bits)
        except torch.OutOfMemoryError as error:
            logger.warning("out of memory with %d chunk(s) of rows of a layer %s: %s", chunks, plan.shape, error)
        torch.cuda.empty_cache()
    raise MemoryShortError(
        f"{weight.device} has no room for a layer {plan.shape[0]}×{plan.shape[1]}, not even in {CHUNKS[-1]} chunks of "
        "rows; use another method, a larger device, or --device cpu"
    )


def put_in_place(job: Job, block: nn.Module, name: str, owner: int, done: Done | None) -> Done:
    """Put a compressed layer in its place, in all processes. done: what its owner has."""
    entry, report = job.world.told((entry_of(done[0]), done[1]) if done else None, owner)
    if done is None:
        layer = empty_layer(block.get_submodule(name), report.name, read_entries({report.name: entry})[report.name])
        job.note(report)
    else:
        layer = done[0]
    for tensor in layer.state_dict().values():
        job.world.spread(tensor, owner)
    replace_module(block, name, layer)
    return layer, report
