"""Training a whole compressed model: the text it reads, its blocks in memory, and their new
files.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hasslefree.checkpoint.record import PredictionRecord
from hasslefree.checkpoint.resume import Unfinished
from hasslefree.distributed import World
from hasslefree.errors import CalibrationError, option
from hasslefree.models.calibrate import activation_values
from hasslefree.models.walk import Walk
from hasslefree.packed.linear import compressed_layers
from hasslefree.pipeline.block import part_file
from hasslefree.pipeline.held_out import Check
from hasslefree.pipeline.inputs import more_text
from hasslefree.pipeline.preflight import block_tensors
from hasslefree.planning.machine import in_one_pass
from hasslefree.progress import READ_BACK, Phase
from hasslefree.recipe.resolve import Resolved
from hasslefree.train.schedule import Reference, Training, passes_over, segments_for
from hasslefree.train.trainer import train

logger = logging.getLogger(__name__)


def matching_text(
    walk: Walk, resolved: Resolved, tokenizer: Any, segments: Tensor, world: World
) -> Tensor | None:
    """The text that predictions are matched on, (samples, seqlen), of all processes; None if they
    are not matched.

    It is the recipe's, cut into windows that do not overlap, so that the validation windows are
    new.

    Args:
        segments: of the calibration, of all processes. tokenizer: None where they were given in the
            place of a text; they are then used for this too.
    """
    if not resolved.match_predictions:
        return None
    seqlen = segments.shape[1]
    count = segments_for(resolved.match_predictions, seqlen)
    if tokenizer is not None:
        segments = more_text(walk, resolved, tokenizer, count, seqlen)
    if len(segments) < count:
        passes = passes_over(len(segments), resolved.match_predictions, seqlen)
        again = ", and is read again" if passes > 1 or resolved.minutes else ""
        logger.warning(
            "the text has %d of the %d segments that the training asks for%s",
            len(segments),
            count,
            again,
        )
    segments = segments[:count]
    if len(segments) < (least := max(2, world.size)):
        raise CalibrationError(
            f"prediction matching needs at least {least} segments of {seqlen} tokens, and the"
            f" calibration text has {len(segments)}; use a longer text, a smaller seqlen, or"
            f" {option('match_predictions', 0)}"
        )
    return segments


def train_whole(
    walk: Walk,
    reference: Reference,
    work: Unfinished,
    world: World,
    writing: Phase,
    check: Check | None,
    deadline: float | None = None,
) -> PredictionRecord:
    """Train and check the compressed model that `work` holds, and write it again.

    writing: counts its files. deadline: as for `train`.
    """
    work.parts[:] = world.broadcast(work.parts)
    blocks = walk.blocks.modules
    with walk.phases.phase(READ_BACK, len(blocks), "blocks") as phase:
        bring_back(walk, work, phase.advance)
    optimizer_device = None if walk.storage == "device" else torch.device("cpu")
    settings = Training()
    tokens = settings.tokens(reference.seqlen)
    shapes = (
        {name: layer.spec.shape for name, layer in compressed_layers(block).items()}
        for block in blocks
    )
    numbers = sum(
        activation_values(block, sizes, tokens) for block, sizes in zip(blocks, shapes, strict=True)
    )
    keep_graphs = in_one_pass(numbers, walk.weights.device)
    restore = partial(bring_back, walk, work)
    record = train(
        walk, reference, settings, restore, world, optimizer_device, keep_graphs, deadline
    )
    if check is not None:
        check.run_again()
        work.held_out = check.measure()
    world.total(0.0, walk.weights.device)  # all processes have read the files
    if world.writes:
        with writing.running():
            work.rewrite(trained_parts(walk, writing), record)
    return record


def bring_back(walk: Walk, work: Unfinished, passed: Callable[[], None] | None = None) -> None:
    """Put every compressed block on the device as it was written. passed: called after each."""
    for index, block in enumerate(walk.blocks.modules):
        prefix, tensors = f"{walk.blocks.prefix(index)}.", work.read(work.parts[index + 1])
        own = {
            name.removeprefix(prefix): tensor.to(walk.weights.device)
            for name, tensor in tensors.items()
        }
        block.load_state_dict(own, assign=True, strict=not walk.blocks.shared)
        if passed is not None:
            passed()
    for name, source in walk.model.all_tied_weights_keys.items():
        if {name, source} <= walk.blocks.shared:
            path, _, leaf = name.rpartition(".")
            walk.model.get_submodule(path).register_parameter(
                leaf, walk.model.get_parameter(source)
            )


def trained_parts(walk: Walk, writing: Phase) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The file of each block and its tensors, as they are now. writing: counts them."""
    count = len(walk.blocks.modules)
    for index, block in enumerate(walk.blocks.modules):
        yield (
            part_file(index + 1, count),
            block_tensors(block, walk.blocks.prefix(index), walk.model.all_tied_weights_keys),
        )
        writing.advance()
