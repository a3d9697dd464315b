"""Block by block: the calibration text runs through, each linear layer becomes S + L, and the block
is written.
"""

import logging
import math
from collections.abc import Container, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.allocate.allocation import Allocation
from hasslefree.checkpoint.entries import entry_of, read_entries
from hasslefree.checkpoint.plugin import empty_layer
from hasslefree.checkpoint.record import LayerRecord
from hasslefree.checkpoint.resume import FinishedPart, Unfinished
from hasslefree.distributed import World
from hasslefree.errors import RecipeError, option
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import (
    MomentSums,
    activation_values,
    checked,
    gather,
    groups_by_input,
    sums_bytes,
    tensors_read,
)
from hasslefree.models.experts import every_expert_called, experts_of
from hasslefree.models.precision import as_multiplied, computing, solving
from hasslefree.models.rules import by_kind
from hasslefree.models.sites import find_sites
from hasslefree.models.unloaded import unloaded_tensors
from hasslefree.models.walk import Visit, Walk
from hasslefree.pipeline.held_out import Check
from hasslefree.pipeline.layers import Done, Task, compress_groups
from hasslefree.pipeline.preflight import block_tensors, outside_tensors
from hasslefree.planning.machine import in_one_pass, room_for_sums
from hasslefree.progress import INPUTS, RESUMED, SOLVING, Phase
from hasslefree.recipe.resolve import Resolved

logger = logging.getLogger(__name__)

# After this number of blocks, we check whether the others end before a deadline.
TIMED = 3


def compress_blocks(
    walk: Walk,
    allocation: Allocation,
    resolved: Resolved,
    segments: Tensor,
    work: Unfinished,
    world: World,
    writing: Phase,
    check: Check | None = None,
    deadline: float | None = None,
) -> None:
    """Decompose, replace and write every planned layer; each block gets the outputs of the
    compressed ones before it.

    A block is read and the one before it written while a block is decomposed; all are written at
    the end. segments: of this process. work: holds the finished blocks, and takes the others.
    check: follows the blocks. deadline: when the whole run is to end, by the clock of the phases of
    `walk`; None for no such time.
    """
    plan, count = allocation.plan, len(walk.blocks.modules)
    layers = sum(map(len, plan))
    with (
        walk.phases.phase(INPUTS, layers, "layers") as collecting,
        walk.phases.phase(SOLVING, layers, "layers", running=False) as solving,
    ):
        hidden = write_outside_and_embed(walk, segments, work, world, writing)

        def report_layer(record: LayerRecord) -> None:
            work.check()
            solving.advance(layer=record)

        visits = walk.visits(hidden, to_end=False)
        visits = visits if check is None else check.following(visits)
        put_back(walk, visits, work, collecting, solving)
        begun = walk.phases.clock()
        for number, visit in enumerate(visits):
            if deadline is not None and number == TIMED:
                check_time(
                    walk,
                    (walk.phases.clock() - begun) / TIMED * (count - visit.index),
                    deadline,
                    world,
                )
            plans, weights = plan[visit.index], allocation.output_weights
            task = Task(visit, plans, weights, resolved, world, report_layer, collecting, solving)
            done = compress_block(task, hidden)
            if world.writes:
                with writing.running():
                    work.add(
                        part_file(visit.index + 1, count, last=not resolved.match_predictions),
                        block_tensors(visit.block, visit.prefix, walk.model.all_tied_weights_keys),
                        entries={record.name: entry_of(layer) for layer, record in done},
                        layers=[record.to_dict() for _, record in done],
                    )
                    writing.advance()
        with writing.running():
            work.wait()


def check_time(walk: Walk, needed: float, deadline: float, world: World) -> None:
    """Raise a RecipeError if blocks that need so many seconds more do not end before the
    deadline.
    """
    began = walk.phases.began
    end = world.broadcast(walk.phases.clock() + needed)  # by the clock of one process
    if end >= deadline:
        least = math.ceil((end - began) / 60)
        raise RecipeError(
            f"{(deadline - began) / 60:g} minutes are too short: by the speed of the first {TIMED}"
            f" blocks, the layers alone take {least}, and fine-tuning comes after them; give"
            f" {option('resume', True)} and {option('minutes', 2 * least)}",
            ("minutes",),
        )


def write_outside_and_embed(
    walk: Walk, segments: Tensor, work: Unfinished, world: World, writing: Phase
) -> Activations:
    """What enters the first block. Where nothing is finished, what is outside the blocks is
    written.
    """
    with walk.outside():
        if not work.parts and world.writes:
            tensors = outside_tensors(walk.model, walk.blocks)
            if walk.weights.streamed:
                tensors |= copied_tensors(walk.model)
            work.add(part_file(0, len(walk.blocks.modules)), tensors)
            writing.advance()
        hidden = walk.entering(segments)
        with writing.running():
            work.wait()  # else what is outside the blocks stays in memory beside the first one
    return hidden


def copied_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Read the tensors of the checkpoint that transformers does not load, which are copied."""
    unloaded = unloaded_tensors(model)
    if unloaded:
        logger.info(
            "not loaded by transformers, copied as they are: %s", ", ".join(by_kind(unloaded))
        )
    return {name: tensor.read() for name, tensor in unloaded.items()}


def part_file(part: int, blocks: int, last: bool = True) -> str:
    """The name of a part's file. last: its values are those of the finished model."""
    return f"{'model' if last else 'fitted'}-{part + 1:05d}-of-{blocks + 1:05d}.safetensors"


def put_back(
    walk: Walk, visits: Iterator[Visit], work: Unfinished, collecting: Phase, solving: Phase
) -> None:
    """Visit the finished blocks, and put their compressed layers in place."""
    parts = work.parts[1:]
    for visit, part in zip(
        walk.phases.counted(RESUMED, islice(visits, len(parts)), len(parts), "blocks"),
        parts,
        strict=True,
    ):
        put_block_back(visit, work, part, walk.model.all_tied_weights_keys)
        collecting.skip(len(part.layers))
        for layer in part.layers:
            solving.skip(1, LayerRecord.from_dict(layer))


def put_block_back(
    visit: Visit, work: Unfinished, part: FinishedPart, tied: Container[str]
) -> None:
    """Put the compressed layers of a finished block in place, as they were written. tied: as for
    `block_tensors`.
    """
    prefix = f"{visit.prefix}."
    sites = find_sites(visit.block)
    for name, entry in read_entries(part.entries).items():
        site = sites.pop(
            name.removeprefix(prefix)
        )  # whose weight is freed as soon as it is replaced
        site.replace(empty_layer(site, name, entry))
    tensors = {name.removeprefix(prefix): tensor for name, tensor in work.read(part).items()}
    own = {
        name: tensor
        for name, tensor in visit.block.state_dict().items()
        if f"{prefix}{name}" in tied
    }
    visit.block.load_state_dict(own | tensors)


def compress_block(task: Task, hidden: Activations) -> list[Done]:
    """Decompose and replace the layers of a block, each process its share. hidden: inputs; outputs
    if it `has_run`.
    """
    visit, resolved = task.visit, task.resolved
    block, call, done = visit.block, visit.call, list[Done]()
    reads = tensors_read(block, call, hidden[0], task.plans)
    groups = groups_by_input(reads)
    called_once = all(len(tensors) == 1 for tensors in reads.values())
    with every_expert_called(block):
        if resolved.sequential == "layer" and called_once and runs_at_once(task, hidden):
            done, output = compress_in_one_pass(task, hidden, groups)
            hidden[:] = output
            visit.has_run = True
            return done
        for together in (
            [groups] if resolved.sequential == "block" else passes(task, groups, hidden.device)
        ):
            grams = gather(block, visit.prefix, call, hidden, together, task.world)
            task.collecting.advance(sum(map(len, together)))
            with task.solving.running():
                done += compress_groups(task, together, grams)
    return done


def runs_at_once(task: Task, hidden: Activations) -> bool:
    """Whether all segments, of every process, run through the block at once: it takes several, and
    they fit.
    """
    shapes = {name: plan.spec.shape for name, plan in task.plans.items()}
    numbers = activation_values(task.visit.block, shapes, len(hidden) * hidden.states.shape[1])
    room = task.visit.call.batched and in_one_pass(numbers, hidden.device)
    return task.world.total(float(not room), hidden.device) == 0


def passes(task: Task, groups: list[list[str]], device: torch.device) -> list[list[list[str]]]:
    """The groups of layers for each pass, so that a pass sees the layers that earlier passes have
    changed.

    Experts of one module do not see each other: their groups are in one pass, as many as
    `room_for_sums` holds.
    """
    by_kind: dict[tuple[object, ...], list[list[list[str]]]] = {}
    block, room = (
        task.visit.block,
        task.world.broadcast(room_for_sums(device)),
    )  # the same passes in all processes
    taken: dict[tuple[object, ...], int] = {}
    for group in groups:
        experts = experts_of(block, group[0])
        # The matrices of one expert follow each other.
        kind = (group[0],) if experts is None else (id(experts[0]), group[0].rpartition(".")[2])
        size = sums_bytes(task.plans[group[0]].spec.shape[1])
        if kind not in by_kind or taken[kind] + size > room:
            by_kind.setdefault(kind, []).append([])
            taken[kind] = 0
        by_kind[kind][-1].append(group)
        taken[kind] += size
    return [groups_of_pass for kind in by_kind.values() for groups_of_pass in kind]


def compress_in_one_pass(
    task: Task, hidden: Activations, groups: list[list[str]]
) -> tuple[list[Done], Tensor]:
    """Decompose and replace every group of layers as soon as its input is computed, in one pass of
    all segments.
    """
    block, call, done = task.visit.block, task.visit.call, list[Done]()
    sites = task.visit.sites([group[0] for group in groups])

    def arrived(group: list[str], x: Tensor) -> Tensor:
        """Compress the layers of a group, given their input; the output of the first."""
        sums = MomentSums(hidden.states.shape[1])
        rows = as_multiplied(
            x.reshape(-1, x.shape[-1])
        )  # in the dtype of products, which `solving` turns off
        with solving(x.device):
            sums.take(rows)
            gram = checked(sums.gram(task.world), f"{task.visit.prefix}.{group[0]}")
            del (
                sums,
                rows,
                # Twice the Gram matrix in float64, and a copy: not needed while layers are solved.
            )
            task.collecting.advance(len(group))
            with task.solving.running():
                done.extend(compress_groups(task, [group], [gram]))
        for layer, _ in done[-len(group) :]:
            ready.enter_context(computing(layer))
        return done[-len(group)][0](x)

    with torch.no_grad(), computing(block), ExitStack() as ready:
        for group in groups:
            ready.enter_context(sites[group[0]].on_call(partial(arrived, group)))
        return done, call.run(block, hidden[:])
