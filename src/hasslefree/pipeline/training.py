"""Train a whole compressed model: the text, its blocks in memory, and their new files."""

import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hasslefree.checkpoint.record import HeldOut, HeldOutRecord, PredictionRecord
from hasslefree.errors import CalibrationError, option
from hasslefree.models.calibrate import activation_values
from hasslefree.models.walk import Walk
from hasslefree.packed.linear import compressed_layers
from hasslefree.pipeline.block import stored_state
from hasslefree.pipeline.held_out import Check
from hasslefree.pipeline.job import Job
from hasslefree.pipeline.preflight import block_tensors
from hasslefree.planning.machine import in_one_pass
from hasslefree.planning.schedule import Training, passes_over, segments_for
from hasslefree.progress import READ_BACK, Phase
from hasslefree.train.reference import Reference
from hasslefree.train.trainer import Trainer

logger = logging.getLogger(__name__)

REMEDY = "use more, or more varied, calibration text, or the effort 'fast'"
NO_BETTER = (
    "fine-tuning is undone: on the segments that are held out of it, the predictions came no closer"
    f" to those of the dense model; {REMEDY}"
)
WORSE_ON_CODE = (
    "fine-tuning is undone: the predictions of code became worse by more than those of the"
    f" calibration's kind of text became better; {REMEDY}"
)


def matching_text(job: Job) -> Tensor | None:
    """Read the text on which predictions are matched.

    The recipe's text is cut into windows that do not overlap, so the validation windows are new.
    Segments that were given in place of a text are used again.

    Returns:
        Token ids of all processes, (samples, seqlen); None if predictions are not matched.

    Raises:
        CalibrationError: the text is too short.
    """
    tokens = job.resolved.match_predictions
    if not tokens:
        return None
    segments = job.segments
    seqlen = segments.shape[1]
    count = segments_for(tokens, seqlen)
    if job.texts is not None:
        segments = job.texts.more(job.walk.phases, count)
    if len(segments) < count:
        again = ""
        if job.resolved.minutes or passes_over(len(segments), tokens, seqlen) > 1:
            again = ", and is read more than once"
        logger.warning(
            "the calibration text has %d of the %d segments for fine-tuning%s",
            len(segments),
            count,
            again,
        )
    segments = segments[:count]
    least = max(2, job.world.size)
    if len(segments) < least:
        raise CalibrationError(
            f"prediction matching needs at least {least} segments of {seqlen} tokens, and the"
            f" calibration text has {len(segments)}; use a longer text, a smaller seqlen, or"
            f" {option('match_predictions', 0)}"
        )
    return segments


def train_and_check(
    job: Job, reference: Reference | None, writing: Phase, check: Check | None
) -> None:
    """Train the compressed model and measure its perplexity, as far as the recipe asks for it.

    Training is undone if it made code worse by more than it made its own kind of text better: the
    model must work on other text too.

    Args:
        reference: predictions to match; None if nothing is left to train.
        writing: the phase that counts files.
        check: None if the perplexity is not measured.
    """
    predictions = None
    before = HeldOut()
    if reference is not None:
        if check is not None:
            before = check.measure()
        predictions = train_whole(job, reference)
    if check is not None:
        measured = before
        if predictions is None:
            measured = check.measure()
        elif predictions["after"] < predictions["before"]:  # else the training was undone
            check.run_again()
            measured = check.measure()
        if predictions and is_worse(predictions, before.code, measured.code):
            logger.warning(WORSE_ON_CODE)
            predictions["after"] = predictions["before"]
            bring_back(job)
            measured = before
        job.work.progress.held_out = measured
    if predictions is None:
        return
    job.world.total(0.0, job.device)  # all processes have read the files
    if job.world.writes:
        with writing.running():
            job.work.rewrite(trained_blocks(job.walk, writing), predictions)


def is_worse(
    own: PredictionRecord, before: HeldOutRecord | None, after: HeldOutRecord | None
) -> bool:
    """Return True if the divergence grew, in the geometric mean over the training's kind of text
    and code.

    Args:
        own: the divergences on the training's kind of text.
        before, after: the results on code; None if there are none.
    """
    if before is None or after is None:
        return False
    kl_before = before["kl"]
    kl_after = after["kl"]
    if kl_before is None or kl_after is None:
        return False
    return kl_after["mean"] * own["after"] > kl_before["mean"] * own["before"]


def train_whole(job: Job, reference: Reference) -> PredictionRecord:
    """Train the compressed model, whose blocks are read from the unfinished folder."""
    walk = job.walk
    progress = job.work.progress
    progress.parts = job.world.broadcast(progress.parts)
    blocks = walk.blocks.modules
    with walk.phases.phase(READ_BACK, len(blocks), "blocks") as phase:
        bring_back(job, phase.advance)
    settings = Training()
    values = 0.0
    for block in blocks:
        shapes = {name: layer.spec.shape for name, layer in compressed_layers(block).items()}
        values += activation_values(block, shapes, settings.tokens(reference.seqlen))
    keep_graphs = in_one_pass(values, walk.weights.device)
    optimizer_device = None if walk.storage == "device" else torch.device("cpu")
    trainer = Trainer(
        walk, reference, settings, job.world, optimizer_device, keep_graphs, job.deadline
    )
    predictions = trainer.train(partial(bring_back, job))
    if predictions["after"] >= predictions["before"]:
        logger.warning(NO_BETTER)
    return predictions


def bring_back(job: Job, passed: Callable[[], None] = lambda: None) -> None:
    """Load every compressed block to the device as it was written.

    Args:
        passed: called after each block.
    """
    walk = job.walk
    for index, block in enumerate(walk.blocks.modules):
        state = {name: tensor.to(job.device) for name, tensor in stored_state(job, index).items()}
        block.load_state_dict(state, assign=True, strict=not walk.blocks.shared)
        passed()
    for name, source in walk.model.all_tied_weights_keys.items():
        if {name, source} <= walk.blocks.shared:
            path, _, leaf = name.rpartition(".")
            parameter = walk.model.get_parameter(source)
            walk.model.get_submodule(path).register_parameter(leaf, parameter)


def trained_blocks(walk: Walk, writing: Phase) -> Iterator[dict[str, Tensor]]:
    """Yield the current tensors of each block, and count the block as written."""
    tied = walk.model.all_tied_weights_keys
    for index, block in enumerate(walk.blocks.modules):
        yield block_tensors(block, walk.blocks.prefix(index), tied)
        writing.advance()
