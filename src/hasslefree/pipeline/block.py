"""Compress a model block by block: decompose and replace the layers, and write the block."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.allocate.allocation import Allocation
from hasslefree.checkpoint.entries import Entry
from hasslefree.checkpoint.plugin import empty_layer
from hasslefree.checkpoint.resume import FINAL, FITTED
from hasslefree.core.gram import Gram
from hasslefree.errors import RecipeError, option
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import (
    Collector,
    activation_values,
    checked,
    gather,
    groups_by_input,
    sums_bytes,
    tensors_read,
)
from hasslefree.models.experts import every_expert_called, experts_of
from hasslefree.models.precision import computing, solving
from hasslefree.models.rules import by_kind
from hasslefree.models.sites import find_site, find_sites
from hasslefree.models.unloaded import unloaded_tensors, without_codes
from hasslefree.models.walk import Visit
from hasslefree.pipeline.ends import compress_ends, replace_ends, stored_ends, use_ends
from hasslefree.pipeline.held_out import Check
from hasslefree.pipeline.job import Job
from hasslefree.pipeline.layers import Done, Group, Plans, Task, compress_groups
from hasslefree.pipeline.preflight import block_tensors, outside_tensors
from hasslefree.planning.machine import in_one_pass, room_for_sums
from hasslefree.progress import INPUTS, RESUMED, SOLVING, Phase
from hasslefree.train.reference import Reference

logger = logging.getLogger(__name__)

# Number of blocks after which we check whether the others can end before the deadline.
TIMED = 3


def compress_blocks(
    job: Job,
    allocation: Allocation,
    writing: Phase,
    check: Check | None,
    reference: Reference | None,
) -> None:
    """Decompose, replace and write every planned layer, embedding and head first.

    The input of each block is the output of the compressed blocks before it. While a block is
    decomposed, the next one is read and the previous one is written. On return, all are written.

    Args:
        writing: the phase that counts files.
        check: runs its text through every block before and after the compression.
        reference: the predictions to match, if any.
    """
    walk = job.walk
    count = len(walk.blocks.modules)
    layers = len(allocation.plan.matrices)
    with (
        walk.phases.phase(INPUTS, layers, "layers") as collecting,
        walk.phases.phase(SOLVING, layers, "layers", running=False) as solving,
    ):
        write_outside(job, allocation, reference, writing, solving)
        collecting.skip(len(allocation.plan.ends))
        with walk.outside():
            hidden = walk.entering(job.local_segments)
            if check is not None:
                check.enter_again()
        visits = walk.visits(hidden, to_end=False)
        if check is not None:
            visits = check.following(visits)
        put_back(job, allocation, visits, hidden, collecting, solving)
        begun = time.perf_counter()
        for number, visit in enumerate(visits):
            if number == TIMED:
                seconds_per_block = (time.perf_counter() - begun) / TIMED
                check_time(job, seconds_per_block * (count - visit.index))
            plans = allocation.plan.blocks[visit.index]
            task = Task(job, visit, plans, allocation.output_weights, collecting, solving)
            done = compress_block(task, hidden)
            if job.world.writes:
                with writing.running():
                    write_block(job, visit, done)
                    writing.advance()
        with writing.running():
            job.work.wait()


def write_block(job: Job, visit: Visit, done: list[Done]) -> None:
    """Write a compressed block. A separate function, so that its tensors are freed on return."""
    tied = job.walk.model.all_tied_weights_keys
    tensors = block_tensors(visit.block, visit.prefix, tied)
    add_part(job, visit.index + 1, tensors, done)


def add_part(job: Job, part: int, tensors: dict[str, Tensor], done: list[Done]) -> None:
    """Write a part of the model.

    Args:
        part: 0 for the tensors outside the blocks, or the index of a block plus 1.
        done: the compressed layers in the part.
    """
    kind = FINAL
    if part and job.resolved.match_predictions:  # training will change the blocks
        kind = FITTED
    parts = 1 + len(job.walk.blocks.modules)
    job.work.add(
        f"{kind}-{part + 1:05d}-of-{parts:05d}.safetensors",
        tensors,
        entries={record.name: Entry.of(layer) for layer, record in done},
        layers=[record for _, record in done],
    )


def check_time(job: Job, needed: float) -> None:
    """Check that the blocks can end before the deadline of a job, if it has one.

    Args:
        needed: the expected seconds for the remaining blocks.

    Raises:
        RecipeError: there is too little time.
    """
    deadline = job.deadline
    if deadline is None:
        return
    given = deadline - job.walk.phases.began
    left = job.world.broadcast(deadline - time.perf_counter() - needed)  # clocks differ
    if left <= 0:
        least = math.ceil((given - left) / 60)
        raise RecipeError(
            f"{given / 60:g} minutes are too short: at the speed of the first {TIMED}"
            f" blocks, the layers alone take {least} minutes, and fine-tuning comes after them; the"
            " finished blocks are kept: continue with"
            f" {option('resume', True)} and {option('minutes', 2 * least)}",
            ("minutes",),
        )


def write_outside(
    job: Job,
    allocation: Allocation,
    reference: Reference | None,
    writing: Phase,
    solving: Phase,
) -> None:
    """Compress embedding and head, and write the tensors outside the blocks, unless an earlier run
    has written them.

    Args:
        allocation, reference: as for `compress_ends`.
        writing, solving: the phases that count files and layers.
    """
    work = job.work
    walk = job.walk
    if work.progress.parts:
        use_ends(job, stored_ends(job))
        for layer in work.progress.parts[0].layers:
            solving.skip(1, layer)
        return
    done = compress_ends(job, allocation, reference, solving)
    layers = {record.name: layer for layer, record in done}
    if job.world.writes:
        with walk.outside():
            tensors = outside_tensors(walk.model, walk.blocks)
            replace_ends(job, tensors, layers)
            if walk.weights.streamed:
                tensors |= copied_tensors(walk.model)
            add_part(job, 0, tensors, done)
            writing.advance()
            with writing.running():
                work.wait()  # else these tensors stay in memory beside the first block
    use_ends(job, layers)


def copied_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Read the tensors that transformers does not load, and that are copied from the checkpoint."""
    unloaded = unloaded_tensors(model)
    copied = without_codes(unloaded)
    if copied:
        logger.info(
            "not loaded by transformers, copied as they are: %s", ", ".join(by_kind(copied))
        )
    left_out = [name for name in unloaded if name not in copied]
    if left_out:
        logger.warning(
            "not loaded by transformers, and left out, because they are quantised: %s",
            ", ".join(by_kind(left_out)),
        )
    return {name: tensor.read() for name, tensor in copied.items()}


def put_back(
    job: Job,
    allocation: Allocation,
    visits: Iterator[Visit],
    hidden: Activations,
    collecting: Phase,
    solving: Phase,
) -> None:
    """Visit the blocks that an earlier run has finished, and load their compressed layers.

    Each block runs on as many segments at a time as when it was compressed: more rows may be
    rounded differently, and a resumed run must give the same bytes. If all blocks are finished,
    none is run.

    Args:
        hidden: inputs of the first block. They become those of the first block to compress.
    """
    blocks = job.work.progress.blocks
    are_all = len(blocks) == len(job.walk.blocks.modules)
    finished = islice(visits, len(blocks))
    counted = job.walk.phases.counted(RESUMED, finished, len(blocks), "blocks")
    for visit, part in zip(counted, blocks, strict=True):
        at_once = False
        if not are_all:
            plans = allocation.plan.blocks[visit.index]
            reads = tensors_read(visit.block, visit.call, hidden[0], plans)
            at_once = runs_at_once(job, visit, plans, reads, hidden)
        put_block_back(job, visit, part.entries)
        if at_once:
            with torch.no_grad(), computing(visit.block):
                hidden[:] = visit.call.run(visit.block, hidden[:])
        visit.has_run = at_once or are_all
        collecting.skip(len(part.layers))
        for layer in part.layers:
            solving.skip(1, layer)


def put_block_back(job: Job, visit: Visit, entries: Mapping[str, Entry]) -> None:
    """Replace the layers of a finished block with their compressed ones, as they were written."""
    sites = find_sites(visit.block)
    for full_name, entry in entries.items():
        # Removed from the dict, so that the dense weight is freed as soon as it is replaced.
        site = sites.pop(full_name.removeprefix(f"{visit.prefix}."))
        site.replace(empty_layer(site, full_name, entry.spec))
    state = stored_state(job, visit.index)
    visit.block.load_state_dict(state, strict=not job.walk.blocks.shared)


def stored_state(job: Job, index: int) -> dict[str, Tensor]:
    """Read the tensors of a finished block, by name in the block."""
    prefix = f"{job.walk.blocks.prefix(index)}."
    tensors = job.work.read(job.work.progress.blocks[index])
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def compress_block(task: Task, hidden: Activations) -> list[Done]:
    """Decompose and replace the layers of a block; each process solves its share.

    Args:
        hidden: inputs of the block. They become the outputs if `has_run` of the visit is set.
    """
    visit = task.visit
    world = task.job.world
    reads = tensors_read(visit.block, visit.call, hidden[0], task.plans)
    groups = groups_by_input(reads)
    with every_expert_called(visit.block):
        if runs_at_once(task.job, visit, task.plans, reads, hidden):
            return compress_in_one_pass(task, hidden, groups)
        done: list[Done] = []
        for together in passes(task, groups, hidden.device):
            grams = gather(visit.block, visit.prefix, visit.call, hidden, together, world)
            task.collecting.advance(sum(len(group) for group in together))
            with task.solving.running():
                done += compress_groups(task, together, grams)
            del grams  # free them before the next ones are computed
    return done


def runs_at_once(
    job: Job,
    visit: Visit,
    plans: Plans,
    reads: Mapping[str, tuple[int, ...]],
    hidden: Activations,
) -> bool:
    """Return True if a dense block is compressed in one pass of all segments, in every process.

    The layers must be compressed in order, and each must be called once. The block must take
    several segments at a time, and these must fit in memory.

    Args:
        plans: of the layers of the block.
        reads: from `tensors_read`.
        hidden: inputs of the block.
    """
    if job.resolved.sequential != "layer":
        return False
    if any(len(tensors) > 1 for tensors in reads.values()):
        return False
    shapes = {name: plan.shape for name, plan in plans.items()}
    tokens = len(hidden) * hidden.states.shape[1]
    values = activation_values(visit.block, shapes, tokens)
    fits = visit.call.batched and in_one_pass(values, hidden.device)
    return job.world.total(float(not fits), hidden.device) == 0


def passes(task: Task, groups: list[Group], device: torch.device) -> list[list[Group]]:
    """Divide groups of layers among the passes that collect their inputs. Each pass runs with the
    layers that earlier passes have compressed.

    Experts of one module do not depend on each other, so one pass collects as many of their groups
    as `room_for_sums` holds.
    """
    if task.job.resolved.sequential == "block":
        return [groups]
    room = task.job.world.broadcast(room_for_sums(device))  # the same passes in all processes
    groups_of_kind = defaultdict[tuple[object, ...], list[Group]](list)
    for group in groups:
        groups_of_kind[kind_of(task, group[0])].append(group)
    divided: list[list[Group]] = []
    for of_one_kind in groups_of_kind.values():
        left = 0
        for group in of_one_kind:
            size = sums_bytes(task.plans[group[0]].shape[1])
            if size > left:
                divided.append([])
                left = room
            divided[-1].append(group)
            left -= size
    return divided


def kind_of(task: Task, name: str) -> tuple[object, ...]:
    """A key that is equal for layers that may share a pass: the same matrix of all experts."""
    experts = experts_of(task.visit.block, name)
    if experts is None:
        return (name,)
    # Matrices of one expert depend on each other.
    return (id(experts), name.rpartition(".")[2])


def compress_in_one_pass(task: Task, hidden: Activations, groups: list[Group]) -> list[Done]:
    """Decompose and replace every group of layers as soon as its input is computed.

    Args:
        hidden: inputs of the block, which become its outputs.
    """
    visit = task.visit
    seqlen = hidden.states.shape[1]
    done: list[Done] = []
    with torch.no_grad(), computing(visit.block), ExitStack() as opened:
        for group in groups:
            arrived = partial(replace_group, task, group, seqlen, done, opened)
            opened.enter_context(find_site(visit.block, group[0]).on_call(arrived))
        output = visit.call.run(visit.block, hidden[:])
    hidden[:] = output
    visit.has_run = True
    return done


def replace_group(
    task: Task, group: Group, seqlen: int, done: list[Done], opened: ExitStack, x: Tensor
) -> Tensor:
    """Compress the layers of a group, given their input.

    Args:
        done: the compressed layers are appended.
        opened: the contexts in which the layers compute are entered, until the pass ends.
        x: inputs (…, in) of all segments.

    Returns:
        The outputs (…, out) of the first layer of the group.
    """
    gram = gram_of_input(task, group[0], seqlen, x)
    task.collecting.advance(len(group))
    with solving(x.device), task.solving.running():
        new = compress_groups(task, [group], [gram])
    done += new
    for layer, _ in new:
        opened.enter_context(computing(layer))
    first, _ = new[0]
    return first(x)


def gram_of_input(task: Task, name: str, seqlen: int, x: Tensor) -> Gram:
    """Compute the Gram matrix of inputs (…, in) of a layer.

    This is a separate function so that its temporaries, twice the matrix in float64 and a copy of
    the inputs, are freed on return.
    """
    collector = Collector([name], seqlen)
    collector.take(name, x)
    with solving(x.device):
        gram = collector.sums[name].gram(task.job.world)
        return checked(gram, f"{task.visit.prefix}.{name}")
