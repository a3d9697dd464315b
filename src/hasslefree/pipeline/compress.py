"""The driver: a model, a recipe and a calibration text in, a folder that transformers loads out."""

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.allocate.allocation import Allocation, by_sensitivity
from hasslefree.allocate.owl import by_outliers
from hasslefree.bar import with_bar
from hasslefree.checkpoint.output import FILES, check_output
from hasslefree.checkpoint.record import Record
from hasslefree.checkpoint.resume import (
    Progress,
    Unfinished,
    fingerprint,
    unfinished,
    unfinished_folder,
)
from hasslefree.distributed import World, local_device, process_group
from hasslefree.errors import ModelError, OutputError
from hasslefree.models.activations import check_storage
from hasslefree.models.blocks import Blocks, find_blocks, other_modalities
from hasslefree.models.load import resolve_device
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from hasslefree.pipeline.block import compress_blocks
from hasslefree.pipeline.held_out import Check
from hasslefree.pipeline.inputs import check_segments, draw, open_model
from hasslefree.pipeline.metadata import configuration, described, recorded, write_rest
from hasslefree.pipeline.preflight import preflight
from hasslefree.pipeline.training import matching_text, train_whole
from hasslefree.planning.machine import memory_reused
from hasslefree.planning.memory import Setup, check_memory, seconds_by_phase
from hasslefree.planning.plan import (
    Plan,
    bytes_of,
    bytes_on_disk,
    digest,
    layer_room,
    plan_of,
    select,
)
from hasslefree.progress import (
    CHECK,
    LOADING,
    PREDICTIONS,
    REFERENCE,
    WRITING,
    Listener,
    Phase,
    Phases,
)
from hasslefree.recipe.recipe import Recipe
from hasslefree.recipe.resolve import Resolved
from hasslefree.train.trainer import reference_of
from hasslefree.validation import typed

logger = logging.getLogger(__name__)


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
    written to the disk, into `OUT.unfinished`, while the next one is compressed.

    Args:
        model: a hub name, a local folder, or a loaded model, which is then changed in place.
        out: the folder to write. recipe: a `Recipe` or the path of a YAML file.
        tokenizer: of a loaded model, if it cannot be loaded under the model's own name.
        segments: calibration tokens (samples, seqlen) instead of the recipe's text. A loaded model
            then needs no tokenizer, and the folder holds one only if it is given.
        device: where to compute; None for the GPU if there is one. A loaded model stays where it
            is.
        activations: where the hidden states between blocks are kept: on the "device", in RAM
            ("cpu"), or in a file next to OUT ("disk").
        resume: continue an interrupted compression after its last finished block, if there is one.
            The result is the same, bit for bit. If OUT is finished already, that is an error.
        overwrite: replace a folder that is not empty, once the new one is complete; discard an
            unfinished compression.
        trust_remote_code: run code that comes with the model.
        progress: called with a `hasslefree.progress.Step` whenever a phase of the run begins,
            counts or ends; its field `layer` is the record of the layer that was just compressed.
            Under torchrun every process calls its own. None for a bar on a terminal or in a
            notebook, unless bars of huggingface_hub or tqdm are switched off. The logger
            "hasslefree.progress" has a line of level INFO per minute, in the first process.

    Returns:
        What was done, layer by layer; `summary()` is the verdict as text, and a notebook shows it
        as a table.

    Raises:
        HasslefreeError: anything wrong with the input; as far as possible, before the first layer
            is changed.
    """
    start = time.perf_counter()
    with_text = segments is None
    if recipe is None:
        recipe = Recipe()
    elif not isinstance(recipe, Recipe):
        recipe = Recipe.from_yaml(recipe, with_text)
    resolved = recipe.resolve(with_text)
    folder = Path(out).resolve()
    source = model.config._name_or_path if isinstance(model, PreTrainedModel) else model
    if (
        resume
        and not overwrite
        and (folder / FILES).is_file()
        and not unfinished_folder(folder).exists()
    ):
        raise OutputError(f"{folder} is finished: there is nothing to resume")
    check_output(folder, overwrite, source=Path(source) if source else None)
    check_storage(activations)
    target = (
        model.device
        if isinstance(model, PreTrainedModel)
        else resolve_device(device or local_device())
    )
    if isinstance(model, PreTrainedModel) and any(p.is_inference() for p in model.parameters()):
        raise ModelError(
            "the model was loaded inside torch.inference_mode(), so its weights cannot be trained;"
            " load it outside"
        )
    with (
        torch.inference_mode(False),
        memory_reused(),
        process_group(target) as world,
        workplace(folder, overwrite, resume, world) as work,
    ):
        phases = Phases(progress, log=world.writes)
        with phases.phase(LOADING):
            name, loaded, tokenizer = open_model(
                model, recipe.dtype, work.scratch / str(world.rank), tokenizer, trust_remote_code
            )
        blocks, plan, left = plan_model(loaded, resolved)
        room = layer_room(
            loaded, plan, resolved
        )  # before any block is read: tied weights are counted once
        # Blocks whose predictions were matched are written before those that they replace are
        # removed.
        twice = bytes_of(plan) if resolved.match_predictions else 0
        check_output(folder, overwrite, bytes_on_disk(loaded, plan) + twice - work.bytes_done)
        own_segments = segments is not None
        if segments is not None:
            segments = segments.clone()  # an inference tensor cannot be saved for a gradient
        else:
            tokenizer = tokenizer or load_tokenizer(name, trust_remote_code)
            segments = draw(loaded, tokenizer, recipe, phases, target)
        check_segments(loaded, segments, world)
        from_memory = isinstance(model, PreTrainedModel)
        dense = Dense(
            name, from_memory, loaded, tokenizer, blocks, plan, room, left, segments, own_segments
        )
        report = compress_dense(dense, resolved, target, activations, work, world, phases)
    times = sorted(
        phases.times(), key=lambda each: each.name == WRITING
    )  # which begins with the first block
    return dataclasses.replace(report, seconds=time.perf_counter() - start, phases=tuple(times))


@dataclass(frozen=True)
class Dense:
    """A model to compress, and the text that it reads.

    plan, room: of its layers before any allocation, and the bytes that they may take. left: what
    stays as it is, as in `Record`. segments: token ids (samples, seqlen). own_segments: they were
    given, not drawn from the recipe's text.
    """

    name: str
    from_memory: bool
    model: PreTrainedModel
    tokenizer: Any
    blocks: Blocks
    plan: Plan
    room: int
    left: dict[str, Any]
    segments: Tensor
    own_segments: bool


def compress_dense(
    dense: Dense,
    resolved: Resolved,
    device: torch.device,
    storage: str,
    work: Unfinished,
    world: World,
    phases: Phases,
) -> Record:
    """Compress a model and write it. storage: of hidden states, as for `Activations`."""
    model, plan, segments = dense.model, dense.plan, dense.segments
    start, shape = time.perf_counter(), (segments.shape[0], segments.shape[1])
    setup = Setup(model, dense.blocks, plan, resolved, shape, device, storage, world.size)
    options = {"storage": storage, "folder": work.scratch, "phases": phases}
    walk, digests = open_walk(setup, segments[:1].to(device), options)
    work.background_writes = walk.weights.prefetch
    local = world.share(segments).to(device)
    # Of an earlier run, which had trained the model already.
    predictions, work.held_out = world.broadcast((work.predictions, work.held_out))
    skipped = (
        (REFERENCE, PREDICTIONS, CHECK) if predictions else (CHECK,) if dense.own_segments else ()
    )
    phases.expect(seconds_by_phase(setup, without=skipped))
    check, reference = None, None
    minutes = resolved.minutes
    deadline = None if minutes is None else phases.began + 60 * minutes
    if predictions is None:
        tokenizer = None if dense.own_segments else dense.tokenizer
        text = matching_text(walk, resolved, tokenizer, segments, world)
        if resolved.check and tokenizer is not None:
            used = segments if text is None else torch.cat([segments, text])
            check = Check.of(walk, resolved, tokenizer, used)
        if text is not None:
            reference = reference_of(
                walk, world.share(text).to(device), len(text), resolved.match_predictions
            )
    allocation = world.broadcast(allocate(walk, plan, dense.room, resolved, local, world))
    about = described(dense.name, model, resolved, segments) | dense.left
    about |= {
        "device": device.type,
        "own_segments": dense.own_segments,
        "from_memory": dense.from_memory,
    }
    if world.writes:
        dense_digests = {
            "segments": fingerprint(segments),
            "weights": digests,
            "config": configuration(model),
        }
        # No block depends on the minutes.
        settings = {name: value for name, value in about["recipe"].items() if name != "minutes"}
        work.begin(about | dense_digests | {"plan": digest(allocation.plan), "recipe": settings})
    with writing_files(phases, resolved, work, len(plan)) as writing:
        compress_blocks(walk, allocation, resolved, local, work, world, writing, check, deadline)
        if reference is not None:
            predictions = train_whole(walk, reference, work, world, writing, check, deadline)
        elif check is not None:
            work.held_out = check.measure()
        parts = world.broadcast(work.parts)
        about |= {
            "predictions": predictions,
            "held_out": work.held_out,
            "seconds": time.perf_counter() - start,
        }
        record = recorded(about, parts, allocation.sensitivities)
        if world.writes:
            with writing.running():
                work.finish(lambda part: write_rest(part, model, dense.tokenizer, parts, record))
    return record


def allocate(
    walk: Walk, plan: Plan, room: int, resolved: Resolved, segments: Tensor, world: World
) -> Allocation:
    """The plan that the recipe's `allocate` asks for.

    Args:
        plan: the uniform one.
        room: bytes for all layers.
        segments: those of this process, (samples, tokens).
    """
    if resolved.allocate == "uniform":
        return Allocation(plan)
    bits = resolved.factor_bits
    if resolved.allocate == "owl":
        return by_outliers(walk, plan, resolved.budget, resolved.solver, bits, segments, world)
    found = by_sensitivity(
        walk,
        plan,
        room,
        segments,
        world,
        grids=resolved.grids,
        rank=resolved.rank_on_grids,
        factor_bits=bits,
        seed=resolved.seed,
    )
    return dataclasses.replace(found, choices=())  # other processes need none


def open_walk(
    setup: Setup, segment: Tensor, options: dict[str, Any]
) -> tuple[Walk, dict[str, str]]:
    """`preflight` a model if memory suffices for its compression."""
    weights = Weights(setup.model, setup.device, prefetch=check_memory(setup).prefetch)
    walk, digests = preflight(setup.model, setup.blocks, weights, setup.plan, segment, options)
    if walk.width is not None:
        logger.info(
            "the blocks take extra inputs per token (%d values): more memory is used, results are"
            " unaffected",
            walk.width,
        )
        weights.prefetch = check_memory(dataclasses.replace(setup, width=walk.width)).prefetch
    return walk, digests


@contextmanager
def writing_files(
    phases: Phases, resolved: Resolved, work: Unfinished, blocks: int
) -> Iterator[Phase]:
    """The phase in which the files of the model are counted: where they are written, while the work
    waits for that.
    """
    files = 2 + blocks + (blocks if resolved.match_predictions else 0)
    with phases.phase(WRITING, files, "files", running=False) as writing:
        if len(work.parts) > 1:
            finished = f"{len(work.parts) - 1} of {blocks} blocks"
            matched = ", prediction matching included" if work.predictions else ""
            logger.info(
                "%s were finished in an earlier run%s: they are loaded, not compressed again",
                finished,
                matched,
            )
            writing.skip(len(work.parts) + (blocks if work.predictions else 0))
        yield writing


def plan_model(model: PreTrainedModel, resolved: Resolved) -> tuple[Blocks, Plan, dict[str, Any]]:
    """The blocks, the plans of their layers, and what stays dense, as in `Record`."""
    blocks = find_blocks(model)
    selection = select(blocks, resolved)
    plan = plan_of(model, selection, resolved)
    for line in selection.reasons():
        logger.info("kept dense automatically: %s", line)
    if beside := other_modalities(model, blocks):
        logger.info(
            "only the text decoder is compressed, and only text is used for calibration; %s stay"
            " dense",
            ", ".join(beside),
        )
    return blocks, plan, {"dense": selection.automatically_dense, "towers": beside}


@contextmanager
def workplace(out: Path, overwrite: bool, resume: bool, world: World) -> Iterator[Unfinished]:
    """The unfinished folder of OUT: for the process that writes it, and as a read-only view for the
    others.
    """
    if world.writes:
        with unfinished(out, overwrite, resume) as work:
            world.broadcast(work.parts)
            yield work
    else:
        yield Unfinished(out, Progress(parts=world.broadcast(None)))
