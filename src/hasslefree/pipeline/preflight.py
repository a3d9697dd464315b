"""Check a model before hours of work: its weights are finite, it runs block by block, and the
calibration segments contain only its tokens.
"""

import dataclasses
import logging
from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.checkpoint.entries import checksum
from hasslefree.distributed import ALONE, World
from hasslefree.errors import CalibrationError, ModelError, NonFiniteError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import hooks
from hasslefree.models.experts import every_expert_called
from hasslefree.models.load import (
    check_ids,
    resolve_seqlen,
)
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights, outside
from hasslefree.planning.memory import check_memory
from hasslefree.planning.setup import Setup
from hasslefree.progress import Phases

logger = logging.getLogger(__name__)


def token_ids(segments: Tensor) -> Tensor:
    """Check calibration segments that were given, and copy them to int64.

    Raises:
        CalibrationError: they are not integers of shape (samples, seqlen).
    """
    has_shape = segments.ndim == 2 and len(segments) >= 1 and segments.shape[1] >= 2
    is_integer = not (
        segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool
    )
    if not (has_shape and is_integer):
        raise CalibrationError(
            "segments must be a tensor of integer token ids of shape (samples, seqlen), seqlen at"
            f" least 2; got {segments.dtype} of shape {tuple(segments.shape)}"
        )
    # A copy, because an inference tensor cannot be saved for a gradient.
    return segments.to(torch.int64, copy=True)


def check_segments(model: PreTrainedModel, segments: Tensor, world: World = ALONE) -> None:
    """Raise a CalibrationError unless segments (samples, seqlen) contain only tokens of the model,
    and there is one for each process.
    """
    if len(segments) < world.size:
        raise CalibrationError(
            f"{world.size} processes need at least {world.size} calibration segments, and there are"
            f" {len(segments)}; use fewer processes, or more segments ({option('samples')})"
        )
    resolve_seqlen(model, segments.shape[1])
    try:
        check_ids(model, segments)
    except ModelError as error:
        raise CalibrationError(error.message) from None


def preflight(
    setup: Setup, weights: Weights, segments: Tensor, phases: Phases, folder: Path
) -> tuple[Walk, dict[str, str]]:
    """Run the first segment through the whole model, before hours of work are spent.

    Args:
        weights: of the model.
        segments: token ids (samples, tokens).
        folder: as for `Activations`.

    Returns:
        The walk through the model, and a checksum of each part, by name.

    Raises:
        MemoryShortError: the compression does not fit in memory.
        ModelError: a planned layer does not run.
        NonFiniteError: a weight contains NaN or Inf.
    """
    model = setup.model
    blocks = setup.blocks
    weights.prefetch = check_memory(setup)
    with weights.present(outside(model, blocks)):
        digests = {"outside": finite_checksum(outside_tensors(model, blocks))}

    silent: dict[str, None] = {}  # an ordered set of the layers that have not run

    def note(name: str, _: Tensor) -> None:
        silent.pop(name, None)

    handles = []
    for index, (block, plans) in enumerate(zip(blocks.modules, setup.plan.blocks, strict=True)):
        sites = find_sites(block)
        for name in plans:
            full_name = f"{blocks.prefix(index)}.{name}"
            silent[full_name] = None
            handles.append(sites[name].on_input(partial(note, full_name)))

    def inspect(index: int) -> None:
        prefix = blocks.prefix(index)
        digests[prefix] = finite_checksum(block_tensors(blocks.modules[index], prefix))

    with hooks(handles), every_expert_called(model):
        first = segments[:1].to(setup.device)
        walk = Walk.open(model, blocks, weights, first, setup.storage, folder, inspect, phases)
    check_ran(model, list(silent))
    if walk.width is not None:
        logger.info(
            "the blocks take extra inputs per token (%d values): more memory is used, results are"
            " unaffected",
            walk.width,
        )
        weights.prefetch = check_memory(dataclasses.replace(setup, width=walk.width))
    return walk, digests


def check_ran(model: PreTrainedModel, silent: list[str]) -> None:
    """Raise a ModelError if planned layers did not run. silent: their names."""
    if not silent:
        return
    more = ""
    if len(silent) > 1:
        more = f" and {len(silent) - 1} more layers"
    raise ModelError(
        f"{type(model).__name__} does not run {silent[0]}{more} on text, so there are no"
        " inputs to calibrate on. hasslefree compresses decoder-only language models; if this"
        f" is one, keep these layers dense with {option('leave_dense')}"
    )


def finite_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Compute the CRC-32 of the concatenated bytes of tensors.

    Raises:
        NonFiniteError: one of them contains NaN or Inf.
    """
    for name, tensor in tensors.items():
        if is_finite(tensor):
            continue
        remedy = "download the model again, or use another"
        if tensor.dtype == torch.float16:  # its largest number is 65,504
            remedy = f"use {option('dtype', 'bfloat16')}, or {remedy}"
        raise NonFiniteError(f"the weight {name} contains NaN or Inf in {tensor.dtype}; {remedy}")
    return checksum(tensors.values())


def is_finite(tensor: Tensor) -> bool:
    """Return True if a tensor contains neither NaN nor Inf."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # The extremes are NaN if any value is. Unlike isfinite of all values, this needs no memory.
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def block_tensors(block: nn.Module, prefix: str, tied: Container[str] = ()) -> dict[str, Tensor]:
    """The parameters and stored buffers of a block, by name in the model.

    Args:
        tied: names that are left out.
    """
    tensors = block.state_dict(prefix=f"{prefix}.")
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def outside_tensors(model: PreTrainedModel, blocks: Blocks) -> dict[str, Tensor]:
    """The parameters and stored buffers outside the blocks, without those tied to another."""
    tied = model.all_tied_weights_keys
    inside = f"{blocks.name}."
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(inside) and name not in tied:
            tensors[name] = tensor
    return tensors
