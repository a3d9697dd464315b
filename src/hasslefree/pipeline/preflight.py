"""A check of a model before hours of work: it runs block by block, and its weights are finite."""

import dataclasses
import logging
from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.checkpoint.entries import checksum
from hasslefree.errors import ModelError, NonFiniteError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import hooks
from hasslefree.models.experts import every_expert_called
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights, outside
from hasslefree.planning.memory import check_memory
from hasslefree.planning.setup import Setup
from hasslefree.progress import Phases

logger = logging.getLogger(__name__)


def preflight(
    setup: Setup, weights: Weights, segments: Tensor, phases: Phases, folder: Path
) -> tuple[Walk, dict[str, str]]:
    """Run the first segment through the whole model, before hours of work are spent.

    Args:
        weights: of the model.
        segments: token ids (samples, tokens).
        folder: as for `Activations`.

    Returns:
        How to walk through the model, and a checksum of each part by its name.

    Raises:
        MemoryShortError: the compression does not fit in memory.
        ModelError: a planned layer does not run.
        NonFiniteError: a weight contains NaN or Inf.
    """
    model = setup.model
    blocks = setup.blocks
    weights.prefetch = check_memory(setup)
    with weights.present(outside(model, blocks)):
        digests = {"outside": checked(outside_tensors(model, blocks))}

    silent: dict[str, None] = {}  # in order

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
        digests[prefix] = checked(block_tensors(blocks.modules[index], prefix))

    with hooks(handles), every_expert_called(model):
        first = segments[:1].to(setup.device)
        walk = Walk.open(model, blocks, weights, first, setup.storage, folder, inspect, phases)
    if silent:
        first_silent = next(iter(silent))
        more = f" and {len(silent) - 1} more layers" if len(silent) > 1 else ""
        raise ModelError(
            f"{type(model).__name__} does not run {first_silent}{more} on text, so there are no"
            " inputs to calibrate on. hasslefree compresses decoder-only language models; if this is"
            f" one, keep these layers dense with {option('leave_dense')}"
        )
    if walk.width is not None:
        logger.info(
            "the blocks take extra inputs per token (%d values): more memory is used, results are"
            " unaffected",
            walk.width,
        )
        weights.prefetch = check_memory(dataclasses.replace(setup, width=walk.width))
    return walk, digests


def checked(tensors: Mapping[str, Tensor]) -> str:
    """Compute the CRC-32 of the bytes of tensors, one after the other.

    Raises:
        NonFiniteError: one of them contains NaN or Inf.
    """
    for name, tensor in tensors.items():
        if is_finite(tensor):
            continue
        remedy = "download the model again, or use another"
        if tensor.dtype == torch.float16:  # which has no larger numbers than 65,504
            remedy = f"use {option('dtype', 'bfloat16')}, or {remedy}"
        raise NonFiniteError(f"the weight {name} contains NaN or Inf in {tensor.dtype}; {remedy}")
    return checksum(tensors.values())


def is_finite(tensor: Tensor) -> bool:
    """Say whether a tensor holds neither NaN nor Inf."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # The smallest and the largest value are NaN if any is; unlike isfinite of all values, this
    # needs no memory.
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def block_tensors(block: nn.Module, prefix: str, tied: Container[str] = ()) -> dict[str, Tensor]:
    """The parameters and stored buffers of a block by their names in the model.

    Args:
        tied: names that are left out.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in block.state_dict().items():
        full_name = f"{prefix}.{name}"
        if full_name not in tied:
            tensors[full_name] = tensor
    return tensors


def outside_tensors(model: PreTrainedModel, blocks: Blocks) -> dict[str, Tensor]:
    """The parameters and stored buffers outside the blocks, without those tied to another."""
    tied = model.all_tied_weights_keys
    inside = f"{blocks.name}."
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(inside) and name not in tied:
            tensors[name] = tensor
    return tensors
