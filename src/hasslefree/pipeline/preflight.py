"""A check of a model before hours of work: it runs block by block, and its weights are finite."""

from collections.abc import Container, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.checkpoint.entries import crc32
from hasslefree.errors import ModelError, NonFiniteError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.calls import hooks
from hasslefree.models.experts import every_expert_called
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights, outside
from hasslefree.planning.plan import Plan


def preflight(
    model: PreTrainedModel,
    blocks: Blocks,
    weights: Weights,
    plan: Plan,
    segment: Tensor,
    walk_options: dict[str, Any],
) -> tuple[Walk, dict[str, str]]:
    """One segment (1, tokens) through the whole model, before hours of work are spent.

    Returns how to walk through the model, and a checksum of each part by its name. walk_options: of
    `Walk.open`.
    """
    with weights.present(outside(model, blocks)):
        digests = {"outside": checked(outside_tensors(model, blocks))}

    def note(name: str, _: Tensor) -> None:
        reached.add(name)

    reached, handles = set[str](), []
    for index, (block, plans) in enumerate(zip(blocks.modules, plan, strict=True)):
        sites = find_sites(block)
        handles += [
            sites[name].on_input(partial(note, f"{blocks.prefix(index)}.{name}")) for name in plans
        ]

    def inspect(index: int) -> None:
        digests[blocks.prefix(index)] = checked(
            block_tensors(blocks.modules[index], blocks.prefix(index))
        )

    with hooks(handles), every_expert_called(model):
        walk = Walk.open(model, blocks, weights, segment, inspect=inspect, **walk_options)
    planned = [
        f"{blocks.prefix(index)}.{name}" for index, plans in enumerate(plan) for name in plans
    ]
    if silent := [name for name in planned if name not in reached]:
        more = f" and {len(silent) - 1} more layers" if len(silent) > 1 else ""
        raise ModelError(
            f"{type(model).__name__} does not run {silent[0]}{more} on text, so there are no inputs"
            " to calibrate on. hasslefree compresses decoder-only language models; if this is one,"
            f" keep these layers dense with {option('leave_dense')}"
        )
    return walk, digests


def checked(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of the bytes of tensors, one after the other. Raises a NonFiniteError if one contains
    NaN or Inf.
    """
    crc = 0
    for name, tensor in tensors.items():
        # The least and the largest value are NaN if any is; unlike isfinite of the whole, this
        # needs no memory.
        if (
            tensor.is_floating_point()
            and tensor.numel()
            and not torch.stack(tensor.aminmax()).isfinite().all()
        ):
            raise NonFiniteError(
                f"the weight {name} contains NaN or Inf; download the model again, or use another"
            )
        crc = crc32(tensor, crc)
    return f"{crc:08x}"


def block_tensors(block: nn.Module, prefix: str, tied: Container[str] = ()) -> dict[str, Tensor]:
    """The parameters and stored buffers of a block by their names in the model, without those in
    `tied`.
    """
    named = ((f"{prefix}.{name}", tensor) for name, tensor in block.state_dict().items())
    return {name: tensor for name, tensor in named if name not in tied}


def outside_tensors(model: PreTrainedModel, blocks: Blocks) -> dict[str, Tensor]:
    """The parameters and stored buffers outside the blocks; of tied ones, the one that a checkpoint
    holds.
    """
    tied = model.all_tied_weights_keys
    inside = f"{blocks.name}."
    return {
        n: t for n, t in model.state_dict().items() if not n.startswith(inside) and n not in tied
    }
