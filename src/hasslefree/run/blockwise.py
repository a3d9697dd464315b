"""Block by block: the calibration text runs through, each linear layer becomes S + L, and the block is written."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.core.gram import Gram
from hasslefree.core.protocols import Decomposition, Method
from hasslefree.errors import HasslefreeError, MemoryShortError, ModelError, NonFiniteError, option
from hasslefree.folder.entries import crc32, entry_of, read_entries
from hasslefree.folder.journal import Unfinished
from hasslefree.folder.plugin import empty_layer
from hasslefree.folder.record import LayerRecord
from hasslefree.levers.matching import Matching, match_block, relative_distance, sink_share
from hasslefree.levers.targets import corrected, drift_correction, target_damping
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import hooks
from hasslefree.models.distributed import World
from hasslefree.models.experts import borrowed, experts_of, tokens_seen
from hasslefree.models.moments import (
    Moments,
    Stream,
    Sums,
    checked,
    gather,
    groups_by_input,
    inputs_of,
    run_block,
    sums_bytes,
    traffic,
)
from hasslefree.models.precision import as_multiplied, computing, solving
from hasslefree.models.sites import Site, find_sites
from hasslefree.models.streaming import Weights, outside, trim
from hasslefree.models.walk import Visit, Walk
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.recipe.plan import LayerPlan, Plan
from hasslefree.recipe.resolved import Resolved
from hasslefree.run.machine import in_one_pass, room_for_sums
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.row_chunks import InRowChunks

logger = logging.getLogger(__name__)

# A layer that the device has no room for is cut into this many chunks of rows.
CHUNKS = (2, 4, 8, 16)

# Called with the report of each layer.
Note = Callable[[LayerRecord], None]
# A layer that was compressed, and its report.
Done = tuple[SparseLowRankLinear, LayerRecord]


def look_over(
    model: PreTrainedModel, blocks: Blocks, weights: Weights, plan: Plan, segment: Tensor, walk_options: dict[str, Any]
) -> tuple[Walk, dict[str, str]]:
    """One segment (1, tokens) through the whole model, before hours of work are spent.

    Args:
        walk_options: `storage` and `folder` of `Walk`.

    Returns:
        How to walk through the model; and a checksum of each part of the model by its name.

    Raises:
        ModelError: it cannot be run block by block, or a planned layer is not reached.
        NonFiniteError: NaN or Inf in a weight.
    """
    with weights.present(outside(model, blocks)):
        digests = {"outside": checksum(outside_tensors(model, blocks))}
    reached: set[str] = set()
    handles = []
    for index, (block, plans) in enumerate(zip(blocks.modules, plan, strict=True)):
        sites = find_sites(block)
        handles += [sites[name].on_input(noting(reached, f"{blocks.prefix(index)}.{name}")) for name in plans]

    def look(index: int) -> None:
        tensors = block_tensors(blocks.modules[index], blocks.prefix(index))
        digests[blocks.prefix(index)] = checksum(tensors)
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise NonFiniteError(f"the weight {name} holds NaN or Inf; repair the checkpoint")

    with hooks(handles), borrowed(model):
        walk = Walk.open(model, blocks, weights, segment, look=look, **walk_options)
    planned = [f"{blocks.prefix(index)}.{name}" for index, plans in enumerate(plan) for name in plans]
    if silent := [name for name in planned if name not in reached]:
        raise ModelError(
            f"{len(silent)} layers of {type(model).__name__} are not used when it reads text, {silent[0]} the first; "
            "hasslefree compresses decoder-only language models. If this is one, keep these layers as they are with "
            f"{option('leave_dense')}"
        )
    return walk, digests


def noting(reached: set[str], name: str) -> Callable[[Tensor], None]:
    return lambda x: reached.add(name)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of the bytes of tensors, one after the other."""
    found = 0
    for tensor in tensors.values():
        found = crc32(tensor, found)
    return f"{found:08x}"


def block_tensors(block: nn.Module, prefix: str, tied: Container[str] = ()) -> dict[str, Tensor]:
    """The parameters and stored buffers of a block by their names in the model.

    tied: names of parameters that are another one's, which holds them.
    """
    named = ((f"{prefix}.{name}", tensor) for name, tensor in block.state_dict().items())
    return {name: tensor for name, tensor in named if name not in tied}


def outside_tensors(model: PreTrainedModel, blocks: Blocks) -> dict[str, Tensor]:
    """The parameters and stored buffers outside the blocks; of tied ones, the one that a checkpoint holds."""
    tied = model.all_tied_weights_keys
    inside = f"{blocks.name}."
    return {n: t for n, t in model.state_dict().items() if not n.startswith(inside) and n not in tied}


def compress_blocks(
    walk: Walk,
    plan: Plan,
    resolved: Resolved,
    segments: Tensor,
    work: Unfinished,
    world: World,
    note: Note,
    channels: Sequence[Tensor] | None = None,
) -> None:
    """Decompose, replace and write every planned layer; each block gets the outputs of the compressed ones before it.

    Args:
        segments: of this process. work: holds the finished blocks, and takes the others.
        channels: the importance of the channels of each block's output, for block matching; None for all alike.
    """
    count, finished = len(walk.blocks.modules), len(work.parts)
    with walk.outside():
        if not finished and world.writes:
            work.add(part_file(0, count), outside_tensors(walk.model, walk.blocks))
    hidden = walk.entering(segments)
    dense = hidden.copy() if resolved.two_streams else None
    for visit in walk.visits(hidden, to_end=False):
        if visit.index + 1 < finished:
            if dense is not None:
                run_block(visit.block, visit.call, dense)
            put_back(visit, work, note, walk.model.all_tied_weights_keys)
            continue
        done, matching = compress_block(
            Task(visit, plan[visit.index], resolved, world, note, None if channels is None else channels[visit.index]),
            hidden,
            dense,
        )
        if world.writes:
            work.add(
                part_file(visit.index + 1, count, last=not resolved.match_predictions),
                block_tensors(visit.block, visit.prefix, walk.model.all_tied_weights_keys),
                entries={report.name: entry_of(layer) for layer, report in done},
                layers=[report.to_dict() for _, report in done],
                matching=matching,
            )


def part_file(part: int, blocks: int, last: bool = True) -> str:
    """The name of a part's file. last: its values are those of the finished model."""
    return f"{'model' if last else 'fitted'}-{part + 1:05d}-of-{blocks + 1:05d}.safetensors"


def put_back(visit: Visit, work: Unfinished, note: Note, tied: Container[str]) -> None:
    """Put the compressed layers of a finished block in place, as they were written. tied: as for `block_tensors`."""
    part, prefix = work.parts[visit.index + 1], f"{visit.prefix}."
    sites = find_sites(visit.block)
    for name, entry in read_entries(part.entries).items():
        site = sites.pop(name.removeprefix(prefix))  # whose weight is freed as soon as it is replaced
        site.replace(empty_layer(site, name, entry))
    tensors = {name.removeprefix(prefix): tensor for name, tensor in work.read(part).items()}
    own = {name: tensor for name, tensor in visit.block.state_dict().items() if f"{prefix}{name}" in tied}
    visit.block.load_state_dict(own | tensors)
    for layer in part.layers:
        note(LayerRecord.from_dict(layer))


@dataclass(frozen=True)
class Task:
    """A block to compress.

    Args:
        plans: of its layers. note: called with the report of each.
        channels: the importance of the channels of its output, (width,); None for all alike.
    """

    visit: Visit
    plans: Mapping[str, LayerPlan]
    resolved: Resolved
    world: World
    note: Note
    channels: Tensor | None = None


def compress_block(
    task: Task, hidden: Activations, dense: Activations | None
) -> tuple[list[Done], dict[str, Any] | None]:
    """Decompose and replace the planned layers of one block, each process its share; and match the block, if asked.

    Args:
        hidden: what enters the block; afterwards what leaves it, if `Visit.passed` says so.
        dense: what enters the block in the dense model; afterwards what leaves it there. None for one stream.

    Returns:
        The layers with their reports, and the report of the matching.
    """
    visit, resolved = task.visit, task.resolved
    block, call = visit.block, visit.call
    groups = groups_by_input(block, call, hidden[0], task.plans)
    original = None if dense is None else copied_but_for(visit.sites(list(task.plans)), block)
    drifting = (original, dense) if original is not None and dense is not None and resolved.dense_target else None
    done: list[Done] = []
    output = None
    tokens = round(task.world.total(hidden.states[..., 0].numel(), hidden.device))
    with borrowed(block, tokens):
        if resolved.recipe.sequential == "layer" and runs_at_once(task, hidden):
            done, output = compress_in_one_pass(task, hidden, groups, drifting)
        else:
            for together in [groups] if resolved.recipe.sequential == "block" else waves(task, groups, hidden.device):
                moments = gather(block, visit.prefix, call, hidden, together, drifting, task.world.add)
                done += compress_groups(task, together, moments)
    if original is not None and dense is not None:
        run_block(original, call, dense)
        if resolved.match_blocks:
            settings = Matching.of(resolved.match_epochs)

            def loss(output: Tensor, target: Tensor) -> Tensor:
                return relative_distance(call.hidden(output), call.hidden(target), task.channels)

            report = match_block(block, call, hidden, dense, settings, resolved.recipe.seed, loss, world=task.world)
            return done, {"block": visit.prefix, **report.to_dict(), **crowded(call.hidden(dense[0]), visit.prefix)}
    if output is not None:
        hidden[:] = output
        visit.passed.append(hidden)
    return done, None


def crowded(states: Tensor, name: str) -> dict[str, str]:
    """A remark where more than half of the tokens of a segment (1, tokens, width) are attention sinks; else nothing."""
    if (share := sink_share(states)) <= 0.5:
        return {}
    remark = (
        f"{share:.0%} of the tokens have hidden states of more than ten times the norm of the others: matching counts "
        "every token by its own energy, and takes these for the usual ones"
    )
    logger.warning("%s: %s", name, remark)
    return {"remark": remark}


def runs_at_once(task: Task, hidden: Activations) -> bool:
    """Whether all segments, of every process, run through the block at once: it takes several, and they fit."""
    shapes = {name: plan.spec.shape for name, plan in task.plans.items()}
    numbers = traffic(task.visit.block, shapes, len(hidden) * hidden.states.shape[1])
    room = task.visit.call.batched and in_one_pass(numbers, hidden.device)
    return task.world.total(float(not room), hidden.device) == 0


def waves(task: Task, groups: list[list[str]], device: torch.device) -> list[list[list[str]]]:
    """The groups of layers that one pass gathers, pass after pass, so that each sees what the passes before it changed.

    Experts of one module do not see each other: their groups are in one pass, as many as `room_for_sums` holds.
    """
    found: dict[tuple[object, ...], list[list[list[str]]]] = {}
    block, room = task.visit.block, room_for_sums(device)
    taken: dict[tuple[object, ...], int] = {}
    for group in groups:
        experts = experts_of(block, group[0])
        # Of one expert, its matrices follow each other.
        kind = (group[0],) if experts is None else (id(experts[0]), group[0].rpartition(".")[2])
        size = sums_bytes(task.plans[group[0]].spec.shape[1])
        if kind not in found or taken[kind] + size > room:
            found.setdefault(kind, []).append([])
            taken[kind] = 0
        found[kind][-1].append(group)
        taken[kind] += size
    return [wave for each in found.values() for wave in each]


def compress_in_one_pass(
    task: Task, hidden: Activations, groups: list[list[str]], dense: Stream | None
) -> tuple[list[Done], Tensor]:
    """Decompose and replace every group of layers when their input comes by, in one pass of all segments.

    Args:
        dense: for targets that lead to the dense model.

    Returns:
        The layers with their reports; and what leaves the compressed block: (segments, tokens, width).
    """
    block, call, done = task.visit.block, task.visit.call, []
    sites = task.visit.sites([group[0] for group in groups])
    wanted: dict[str, Tensor] = {}
    if dense is not None:
        with computing(dense[0]), torch.no_grad():
            wanted = inputs_of(dense[0], call, dense[1][:], [name for name in sites if experts_of(block, name) is None])

    def arrived(group: list[str], x: Tensor) -> Tensor:
        """Compress the layers of a group, whose input this is; the output of the first."""
        sums, rows = Sums(hidden.states.shape[1]), as_multiplied(x.reshape(-1, x.shape[-1]))
        with solving(x.device):
            sums.take(rows, wanted.pop(group[0], None))
            moments = checked(sums.moments(task.world.add), f"{task.visit.prefix}.{group[0]}")
            done.extend(compress_groups(task, [group], [moments]))
        for layer, _ in done[-len(group) :]:
            ready.enter_context(computing(layer))
        return done[-len(group)][0](x)

    calls = (sites[group[0]].on_call(partial(arrived, group)) for group in groups)
    with torch.no_grad(), computing(block), ExitStack() as ready, hooks(calls):
        return done, call.run(block, hidden[:])


def copied_but_for(sites: Mapping[str, Site], block: nn.Module) -> nn.Module:
    """A copy of a block that shares the modules of some sites: they are replaced in the block, and stay in the copy."""
    shared: dict[int, Any] = {id(site.module): site.module for site in sites.values()}
    return copy.deepcopy(block, shared)


def compress_groups(task: Task, groups: list[list[str]], moments: Sequence[Moments]) -> list[Done]:
    """Decompose and replace the layers of groups with these moments of their inputs; each process does its share."""
    plans, world = task.plans, task.world
    names = [name for group in groups for name in group]
    # What every method does most of is products out × in × in.
    shapes = [plans[name].spec.shape for name in names]
    owners = world.assign([out * width**2 for out, width in shapes])
    mine = {name for name, owner in zip(names, owners, strict=True) if owner == world.rank}
    found: dict[str, Done] = {}
    for group, known in zip(groups, moments, strict=True):
        share = {name: plans[name] for name in group if name in mine}
        remarks = tuple(shrunk(task, group[0]))
        found |= compress_group(task, share, known, remarks) if share else {}
    done = [install_layer(task, name, owner, found.get(name)) for name, owner in zip(names, owners, strict=True)]
    trim()
    return done


def compress_group(
    task: Task, plans: Mapping[str, LayerPlan], known: Moments, remarks: tuple[str, ...]
) -> dict[str, Done]:
    """Decompose layers that share one input, with what depends on its moments computed once.

    Args:
        plans: of these layers. remarks: on their input.
    """
    visit, resolved = task.visit, task.resolved
    start, done = time.perf_counter(), {}
    gram, sites, method = known.gram, visit.sites(list(plans)), resolved.method
    try:
        # In the place of the drift, and before the solver makes what it holds: neither is needed beside the other.
        correction = known.drift
        if correction is not None:
            correction.copy_(drift_correction(gram, correction, resolved.dense_target, target_damping(gram)))
        prepared = prepare_with_room(method, gram)
        shared = (time.perf_counter() - start) / len(plans)
        for name, plan in plans.items():
            start = time.perf_counter()
            weight = sites[name].weight().to(plan.dtype)  # it may be `computing`
            target = None if correction is None else corrected(weight, correction)
            result = solve_with_room(weight, gram, method, prepared, plan, resolved.recipe.seed, target)
            layer = SparseLowRankLinear.from_decomposition(result, sites[name].bias, plan.spec.pattern)
            seconds = time.perf_counter() - start + shared
            report = LayerRecord.of(f"{visit.prefix}.{name}", layer.spec, result, seconds, layer.stored_bytes)
            report = dataclasses.replace(report, remarks=(*report.remarks, *remarks))
            done[name] = layer, report
            task.note(report)
    except HasslefreeError as error:
        raise error.within(f"{visit.prefix}: {', '.join(plans)}") from None
    return done


def shrunk(task: Task, name: str) -> Iterator[str]:
    """What is to be said of the tokens, of all processes, that the Gram of a layer of an expert was made of."""
    seen = tokens_seen(task.visit.block, name)
    if seen is None:
        return
    device = task.visit.sites([name])[name].parameter.device
    own, others = (round(task.world.total(count, device)) for count in seen)
    if others:
        share = others / (own + others)
        yield f"{own} tokens were routed to this expert; its Gram is of {others} others too ({share:.0%})"


def prepare_with_room(method: Method, gram: Gram) -> Any:
    """`method.prepare`; where the device has no room for it, once more without what torch keeps for later.

    Raises:
        MemoryShortError: that does not help.
    """
    for _ in range(2):
        try:
            return method.prepare(gram)
        except torch.OutOfMemoryError as error:
            logger.warning("out of memory with the Gram of %d inputs: %s", len(gram.matrix), error)
        torch.cuda.empty_cache()
    raise MemoryShortError(
        f"{gram.matrix.device} has no room to factor the Gram of {len(gram.matrix)} inputs; use "
        f"{option('activations', 'cpu')}, another method, a larger device, or {option('device', 'cpu')}"
    )


def solve_with_room(
    weight: Tensor, gram: Gram, method: Method, prepared: Any, plan: LayerPlan, seed: int, target: Tensor | None
) -> Decomposition:
    """`solve_layer`; where the device has no room for it, again in 2, 4, 8, … chunks of rows. The result remarks it.

    Raises:
        MemoryShortError: no number of chunks helps.
    """
    spec = plan.spec
    for chunks in (1, *CHUNKS):
        way = method if chunks == 1 else InRowChunks(method, chunks, gram)
        try:
            return solve_layer(weight, gram, way, prepared, plan.pattern, spec.rank, seed, target, spec.factor_bits)
        except torch.OutOfMemoryError as error:
            logger.warning("out of memory with %d chunk(s) of rows of a layer %s: %s", chunks, spec.shape, error)
        torch.cuda.empty_cache()
    raise MemoryShortError(
        f"{weight.device} has no room for a layer {spec.shape[0]}×{spec.shape[1]}, not even in {CHUNKS[-1]} chunks of "
        f"rows; use another method, a larger device, or {option('device', 'cpu')}"
    )


def install_layer(task: Task, name: str, owner: int, done: Done | None) -> Done:
    """Put a compressed layer in its place, in all processes. done: what its owner has."""
    site, world = find_sites(task.visit.block)[name], task.world
    entry, report = world.broadcast((entry_of(done[0]), done[1]) if done else None, owner)
    if done is None:
        layer = empty_layer(site, report.name, read_entries({report.name: entry})[report.name])
        task.note(report)
    else:
        layer = done[0]
    for tensor in layer.state_dict().values():
        world.broadcast_(tensor, owner)
    site.replace(layer)
    return layer, report
