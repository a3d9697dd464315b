"""A model without the heads and neurons that nothing reads any more: plain, dense and smaller."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.errors import ModelError, option
from hasslefree.exports.dense import make_plain, summed
from hasslefree.models.blocks import find_blocks, head_unit

# The layer that reads heads or neurons → the layers that compute them, by their names in Llama and similar models.
MAKERS = {"self_attn.o_proj": ("q_proj", "k_proj", "v_proj"), "mlp.down_proj": ("gate_proj", "up_proj")}


def write_narrow(model: PreTrainedModel, part: Path, _destination: Path, max_shard_size: str) -> dict[str, Path]:
    """Write the model, which is changed in place, without the channels whose weights are all zero.

    The input channels of o_proj are removed in units of all query heads of a key head, with the rows of q_proj, k_proj
    and v_proj that compute them; those of down_proj with the rows of gate_proj and up_proj. The configuration gets the
    new numbers. Some unused heads stay where transformers does not accept the number of used heads.

    Raises:
        ModelError: layers of other names; blocks that keep different numbers, which no plain model can have; or
            nothing to remove.
    """
    make_plain(model, summed)
    blocks = find_blocks(model)
    kept = {reader: [units_kept(block, reader) for block in blocks.modules] for reader in MAKERS}
    counts = {reader: common_count(reader, masks) for reader, masks in kept.items()}
    heads, config = kept["self_attn.o_proj"], model.config
    counts["self_attn.o_proj"] = accepted_count(config, len(heads[0]), counts["self_attn.o_proj"])
    if all(counts[reader] == len(masks[0]) for reader, masks in kept.items()):
        raise ModelError(
            "this model cannot be made narrower: the compressed layers use every neuron, and every attention head or "
            f"as many as transformers accepts; compress with {option('method', 'osscar')} "
            f"{option('pattern', 'structured')} {option('rank', 0)} and a higher {option('sparsity')}"
        )
    for index, block in enumerate(blocks.modules):
        for reader in MAKERS:
            remove_units(block, reader, filled_up(kept[reader][index], counts[reader]))
    set_heads(config, len(heads[0]), counts["self_attn.o_proj"])
    config.intermediate_size = counts["mlp.down_proj"]
    model.save_pretrained(part, max_shard_size=max_shard_size)
    return {"narrow": part}


def units_kept(block: nn.Module, reader: str) -> Tensor:
    """(units,) bool: the heads (all that share a key head) or neurons with an entry in the layer that reads them."""
    parent, _, _ = reader.rpartition(".")
    try:
        layer: Any = block.get_submodule(reader)
        makers: list[Any] = [block.get_submodule(f"{parent}.{name}") for name in MAKERS[reader]]
    except AttributeError:
        names = ", ".join([*(f"{parent}.{name}" for name in MAKERS[reader]), reader])
        raise ModelError(
            f"{type(block).__name__} does not have all of the modules {names}, by which this export finds heads and "
            f"neurons; use {option('to', 'dense')}"
        ) from None
    unit = head_unit(block, reader)
    units = layer.in_features // unit
    if any(maker.out_features % units for maker in makers):
        raise ModelError(
            f"the outputs of {', '.join(MAKERS[reader])} are not a multiple of the {units} heads or neurons that "
            f"{reader} reads; use {option('to', 'dense')}"
        )
    used: Tensor = (layer.weight != 0).any(0).view(units, unit).any(1)
    return used


def common_count(reader: str, kept: list[Tensor]) -> int:
    """How many units each block keeps."""
    counts = [int(torch.count_nonzero(mask)) for mask in kept]
    if len(set(counts)) > 1 or not counts[0]:
        raise ModelError(
            f"the blocks keep {', '.join(map(str, counts))} heads or neurons in {reader}, and a plain transformers "
            f"model needs the same number, at least one, in every block; use {option('to', 'dense')}"
        )
    return counts[0]


def set_heads(config: Any, groups: int, count: int) -> None:
    """Set the number of key heads to `count` instead of `groups`; each keeps its number of query heads."""
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.num_attention_heads = config.num_attention_heads // groups * count
    config.num_key_value_heads = count


def accepted_count(config: Any, groups: int, least: int) -> int:
    """The least number of key heads, from `least` to `groups`, that transformers accepts: Llama's must divide the
    hidden size, though nothing depends on that if head_dim is given."""
    for count in range(least, groups):
        tried = copy.deepcopy(config)
        set_heads(tried, groups, count)
        try:
            tried.validate()
            return count
        except StrictDataclassError:
            continue
    return groups


def filled_up(kept: Tensor, count: int) -> Tensor:
    """`kept`, with the first of the other units added until there are `count`."""
    others = torch.nonzero(~kept).flatten()
    return kept.index_fill(0, others[: count - int(kept.sum())], True)


def remove_units(block: nn.Module, reader: str, kept: Tensor) -> None:
    """Remove the units that are not kept from the layer that reads them, and from the layers that compute them."""
    parent, _, _ = reader.rpartition(".")
    layer: Any = block.get_submodule(reader)
    columns = kept.repeat_interleave(layer.in_features // len(kept))
    layer.weight = nn.Parameter(layer.weight.detach()[:, columns].contiguous())
    layer.in_features = int(columns.sum())
    for name in MAKERS[reader]:
        maker: Any = block.get_submodule(f"{parent}.{name}")
        rows = kept.repeat_interleave(maker.out_features // len(kept))
        maker.weight = nn.Parameter(maker.weight.detach()[rows].contiguous())
        if maker.bias is not None:
            maker.bias = nn.Parameter(maker.bias.detach()[rows].contiguous())
        maker.out_features = int(rows.sum())
