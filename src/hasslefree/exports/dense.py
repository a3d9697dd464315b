"""A compressed model as a plain one again: the original kind of layers, with dense weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.models.experts import fuse_experts, split_experts
from hasslefree.models.load import auto_class
from hasslefree.models.sites import find_sites
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers


def summed(layer: SparseLowRankLinear) -> Tensor:
    """S + u v: (out, in), summed in float32 at least and rounded once to the layer's dtype."""
    sparse = layer.unpacked().detach()
    if (factors := layer.factors()) is None:
        return sparse
    wide = torch.promote_types(sparse.dtype, torch.float32)
    u, v = (factor.detach().to(wide) for factor in factors)
    return torch.addmm(sparse.to(wide), u, v).to(sparse.dtype)


def make_plain(model: PreTrainedModel, weight_of: Callable[[SparseLowRankLinear], Tensor]) -> None:
    """Replace every compressed layer by the model's original kind of layer, and remove the quantisation config.

    One layer at a time, in place: in addition to the model, one dense weight is in memory.

    Args:
        weight_of: the (out, in) weight of the new layer.
    """
    quantizer: Any = model.hf_quantizer
    quantizer.remove_quantization_config(model)
    with torch.device("meta"):
        original = auto_class(model.config).from_config(model.config)
    split_experts(original)
    sites = find_sites(original)
    for name, layer in compressed_layers(model).items():
        site = sites[name]
        site.set_weight(weight_of(layer).detach(), layer.bias)
        site.module.train(model.training)
        site.under(model).put_back()
    fuse_experts(model)


def write_dense(model: PreTrainedModel, part: Path, _destination: Path, max_shard_size: str) -> dict[str, Path]:
    """Write the model, which is changed in place, with S + u v as its weights; gives the folder by its kind."""
    make_plain(model, summed)
    model.save_pretrained(part, max_shard_size=max_shard_size)
    return {"dense": part}
