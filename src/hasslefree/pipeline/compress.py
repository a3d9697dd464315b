"""The driver: from a model, a recipe and a calibration text to a folder that transformers loads."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.allocate.allocation import Allocation, by_sensitivity
from hasslefree.allocate.owl import by_outliers
from hasslefree.bar import with_bar
from hasslefree.checkpoint.entries import checksum
from hasslefree.checkpoint.output import FILES, check_output
from hasslefree.checkpoint.record import Record
from hasslefree.checkpoint.resume import StoredPlan, Unfinished, unfinished, unfinished_folder
from hasslefree.distributed import World, process_group
from hasslefree.errors import OutputError
from hasslefree.models.activations import check_storage
from hasslefree.models.blocks import other_modalities
from hasslefree.models.rules import Selection
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.packed.spec import LayerSpec
from hasslefree.pipeline.block import compress_blocks
from hasslefree.pipeline.held_out import Check
from hasslefree.pipeline.job import Job
from hasslefree.pipeline.metadata import configuration, described, recorded, write_rest
from hasslefree.pipeline.opening import Opened, restored, target_of
from hasslefree.pipeline.preflight import check_segments, preflight, token_ids
from hasslefree.pipeline.text import read_texts
from hasslefree.pipeline.training import matching_text, train_and_check
from hasslefree.planning.disk import bytes_to_write
from hasslefree.planning.duration import seconds_by_phase
from hasslefree.planning.machine import local_processes, memory_reused
from hasslefree.planning.memory import states_bytes
from hasslefree.planning.plan import LayerPlan, Plan, digest
from hasslefree.progress import (
    ALLOCATION,
    CHECK,
    PREDICTIONS,
    PROBES,
    REFERENCE,
    WRITING,
    Listener,
    Phase,
    Phases,
)
from hasslefree.recipe.recipe import Recipe
from hasslefree.train.reference import Reference
from hasslefree.train.trainer import reference_of
from hasslefree.validation import typed

logger = logging.getLogger(__name__)

# Fields of a record that all blocks depend on, known before the first block.
IDENTITY = (
    "model",
    "method",
    "versions",
    "device",
    "dtype",
    "seqlen",
    "tokens",
    "dense",
    "towers",
    "own_segments",
    "from_memory",
)


@typed
@with_bar
def compress(
    model: str | Path | PreTrainedModel,
    out: str | Path,
    recipe: Recipe | str | Path | None = None,
    *,
    tokenizer: Any = None,
    segments: Tensor | None = None,
    device: str | None = None,
    activations: str = "device",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> Record:
    """Compress a causal language model and write it to a folder that transformers loads.

    One dense block is in memory at a time, and the next one if there is room. A compressed block is
    written to `OUT.unfinished` while the next one is compressed.

    Args:
        model: a hub name, a local folder, or a loaded model, which is changed in place. After an
            interruption, a loaded model must be loaded again.
        out: the folder to write.
        recipe: a `Recipe` or the path of a YAML file.
        tokenizer: of a loaded model, if it cannot be loaded under the model's own name.
        segments: calibration tokens (samples, seqlen) instead of the recipe's text. A loaded model
            then needs no tokenizer, and the folder holds one only if it is given.
        device: where to compute; None for the GPU if there is one. A loaded model stays on its
            device.
        activations: where the hidden states between blocks are kept: on the "device", in RAM
            ("cpu"), or in a file next to OUT ("disk").
        resume: continue an interrupted compression after its last finished block, if there is one.
            The result is the same, bit for bit. It is an error if OUT is finished already.
        overwrite: replace a folder that is not empty, once the new one is complete; discard an
            unfinished compression.
        trust_remote_code: run code that comes with the model.
        progress: called with a `hasslefree.progress.Step` whenever a phase of the run begins,
            counts or ends; its field `layer` is the record of the layer that was just compressed.
            Under torchrun, each process calls its own listener. None for a bar on a terminal or in
            a notebook, unless bars of huggingface_hub or tqdm are switched off. The logger
            "hasslefree.progress" logs a line of level INFO per minute, in the first process.

    Returns:
        The record of every layer; `summary()` gives the main results as text, and a notebook shows
        them as a table.

    Raises:
        HasslefreeError: the input is wrong. Most errors are raised before the first layer is
            changed.
    """
    with_text = segments is None
    if recipe is None:
        recipe = Recipe()
    elif not isinstance(recipe, Recipe):
        recipe = Recipe.from_yaml(recipe, with_text)
    resolved = recipe.resolve(with_text)
    folder = Path(out).resolve()
    check_request(model, folder, resume, overwrite)
    check_storage(activations)
    target = target_of(model, device)
    with (
        torch.inference_mode(False),
        memory_reused(),
        restored(model),
        process_group(target) as world,
        workplace(folder, overwrite, resume, world) as work,
    ):
        phases = Phases(progress)
        scratch = work.scratch / str(world.rank)
        opened = Opened.of(model, resolved, target, tokenizer, trust_remote_code, scratch, phases)
        loaded = opened.model
        resolved = opened.resolved
        plan = opened.plan
        selection = opened.selection
        log_what_stays_dense(loaded, selection)
        bytes_left = bytes_to_write(loaded, selection.blocks, plan, resolved) - work.bytes
        check_output(folder, overwrite, bytes_left)
        tokenizer = opened.tokenizer
        texts = None
        if segments is None:
            tokenizer = tokenizer or load_tokenizer(opened.name, trust_remote_code)
            texts = read_texts(loaded, tokenizer, resolved, target)
            segments = texts.draw(phases)
        else:
            segments = token_ids(segments)
        check_segments(loaded, segments, world)
        setup = opened.setup(segments, activations, world.size)
        if activations == "disk":
            states = local_processes(world.size) * states_bytes(setup)
            check_output(folder, overwrite, bytes_left + states)
        walk, digests = preflight(setup, opened.weights, segments, phases, work.scratch)
        work.background_writes = walk.weights.prefetch
        job = Job(
            name=opened.name,
            from_memory=isinstance(model, PreTrainedModel),
            walk=walk,
            tokenizer=tokenizer,
            resolved=resolved,
            selection=selection,
            plan=plan,
            room=opened.room,
            segments=segments,
            texts=texts,
            world=world,
            work=work,
        )
        phases.expected = seconds_by_phase(setup, without=phases_to_skip(job))
        record = run(job, digests)
    # Files are written from the first block on, so this phase begins early and ends last.
    times = sorted(phases.times(), key=lambda phase: phase.name == WRITING)
    return dataclasses.replace(record, seconds=work.seconds, phases=tuple(times))


def check_request(
    model: str | Path | PreTrainedModel, out: Path, resume: bool, overwrite: bool
) -> None:
    """Check the arguments that can be checked before the model is opened.

    Raises:
        OutputError: OUT is finished and is to be resumed, or it cannot be written.
    """
    is_finished = (out / FILES).is_file() and not unfinished_folder(out).exists()
    if resume and not overwrite and is_finished:
        raise OutputError(f"{out} is finished: there is nothing to resume")
    source = model.config._name_or_path if isinstance(model, PreTrainedModel) else model
    check_output(out, overwrite, source=Path(source) if source else None)


def log_what_stays_dense(model: PreTrainedModel, selection: Selection) -> None:
    """Log the matrices and modules that stay dense although the recipe does not name them."""
    for line in selection.reasons():
        logger.info("kept dense automatically: %s", line)
    towers = other_modalities(model, selection.blocks)
    if towers:
        logger.info(
            "only the text decoder is compressed, and only text is used for calibration; %s stay"
            " dense",
            ", ".join(towers),
        )


def run(job: Job, digests: dict[str, str]) -> Record:
    """Compress the model of a job, train it, check it, and write it to the folder.

    Args:
        digests: a checksum of each part of the dense model, by name.
    """
    work = job.work
    description = described(job)
    identity = identity_of(job, description, digests)
    if job.world.writes:
        work.progress.check_identity(identity)
        work.remove_unlisted(work.progress)  # this run has passed its checks
    reference, check = run_dense_model(job)
    if job.texts is not None:
        job.texts.documents.clear()  # no text is read any more, and a file may have gigabytes
    allocation = allocate(job)
    if job.world.writes:
        work.progress.record_identity(identity | {"plan": digest(allocation.plan)})
    with writing_files(job) as writing:
        compress_blocks(job, allocation, writing, check, reference)
        train_and_check(job, reference, writing, check)
        progress = job.world.broadcast(work.progress)
        record = recorded(description, progress, allocation.sensitivities)
        if job.world.writes:
            with writing.running():
                work.finish(lambda folder: write_rest(folder, job, record))
        for end in job.walk.blocks.ends:
            if end.name in job.ends:
                end.replace(job.walk.model, job.ends[end.name])
        # `save_pretrained` must keep transformers' names, which the configuration lists.
        job.walk.model._weight_conversions = []  # type: ignore[assignment]
    return record


def allocate(job: Job) -> Allocation:
    """Plan the layers as the recipe's `allocate` says. All processes get the same plan.

    A plan that is not uniform is stored in the unfinished folder, for a resumed run.
    """
    plan = job.plan
    if job.resolved.allocate == "uniform":
        return Allocation(plan)
    if job.work.progress.dealt is not None:
        return stored_allocation(job.work.progress.dealt, plan, job.work)
    segments = job.local_segments
    if job.resolved.allocate == "owl":
        allocation = by_outliers(job.walk, plan, job.resolved, segments, job.world)
    else:
        allocation = by_sensitivity(job.walk, plan, job.resolved, job.room, segments, job.world)
        allocation = dataclasses.replace(allocation, choices=())  # others need none
    allocation = job.world.broadcast(allocation)
    if job.world.writes:
        store_allocation(allocation, job.work)
    return allocation


def store_allocation(allocation: Allocation, work: Unfinished) -> None:
    """Store an allocation for a resumed run."""
    matrices: list[dict[str, LayerSpec]] = []
    for plans in allocation.plan.parts:
        matrices.append({name: plan.spec for name, plan in plans.items()})
    dealt = StoredPlan(matrices, allocation.sensitivities)
    work.store_plan(dealt, allocation.output_weights)


def stored_allocation(dealt: StoredPlan, uniform: Plan, work: Unfinished) -> Allocation:
    """The allocation of an earlier run, without look-ups, since that run has compressed the ends.

    Args:
        uniform: the plan from which the allocation was made.
    """
    parts: list[dict[str, LayerPlan]] = []
    for plans, specs in zip(uniform.parts, dealt.matrices, strict=True):
        parts.append({name: plans[name].like(spec) for name, spec in specs.items()})
    ends, *blocks = parts
    return Allocation(Plan(blocks, ends), dealt.sensitivities, work.output_weights(dealt))


def phases_to_skip(job: Job) -> list[str]:
    """The phases that this run skips although the setup expects them."""
    progress = job.work.progress
    skipped: list[str] = []
    if progress.dealt is not None:
        skipped += [PROBES, ALLOCATION]
    if progress.predictions is not None:
        skipped += [REFERENCE, PREDICTIONS, CHECK]
    elif job.texts is None:
        skipped.append(CHECK)
    return skipped


def run_dense_model(job: Job) -> tuple[Reference | None, Check | None]:
    """Run the dense model on the training text, and draw the held-out text.

    Returns:
        The predictions to match, and the check of the compressed model. Each is None if the recipe
        does not ask for it, or an earlier run has finished it.
    """
    if job.work.progress.predictions is not None:
        return None, None
    text = matching_text(job)
    check = None
    if job.resolved.check and job.texts is not None:
        used = job.segments if text is None else torch.cat([job.segments, text])
        check = Check.of(job.walk, job.texts, used)
    if text is None:
        return None, check
    local = job.world.share(text).to(job.device)
    return reference_of(job.walk, local, len(text), job.resolved.match_predictions), check


def identity_of(job: Job, description: Record, digests: dict[str, str]) -> dict[str, Any]:
    """Everything that the compressed blocks depend on, except the plan, as JSON."""
    # No block depends on the minutes.
    settings = {name: value for name, value in description.recipe.items() if name != "minutes"}
    return {name: getattr(description, name) for name in IDENTITY} | {
        "texts left out": sorted(description.left_out),
        "segments": checksum([job.segments.long()]),
        "weights": digests,
        "config": configuration(job.walk.model),
        "recipe": settings,
    }


@contextmanager
def writing_files(job: Job) -> Iterator[Phase]:
    """Open the phase that counts the files of the model.

    The timer runs only while the work waits for files to be written.
    """
    progress = job.work.progress
    blocks = len(job.plan.blocks)
    files = 2 + blocks
    if job.resolved.match_predictions:
        files += blocks
    with job.walk.phases.phase(WRITING, files, "files", running=False) as writing:
        if progress.blocks:
            done = len(progress.parts)
            matched = ""
            if progress.predictions:
                done += blocks
                matched = ", prediction matching included"
            logger.info(
                "%d of %d blocks were finished in an earlier run%s: they are loaded, not compressed"
                " again",
                len(progress.blocks),
                blocks,
                matched,
            )
            writing.skip(done)
        yield writing


@contextmanager
def workplace(out: Path, overwrite: bool, resume: bool, world: World) -> Iterator[Unfinished]:
    """Open the unfinished folder of OUT, read-only in processes that do not write."""
    if world.writes:
        with unfinished(out, overwrite, resume) as work:
            world.broadcast((work.progress, work.bytes))
            yield work
    else:
        progress, earlier_bytes = world.broadcast(None)
        yield Unfinished(out, progress, earlier_bytes)
