"""A compressed model as a PEFT one: S is the base model, and u v a LoRA adapter of scaling 1 on it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.errors import ModelError, option
from hasslefree.exports.dense import make_plain
from hasslefree.models.experts import experts_of
from hasslefree.models.sites import find_sites
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers


def write_adapter(model: PreTrainedModel, part: Path, destination: Path, max_shard_size: str) -> dict[str, Path]:
    """Write the adapter into `part`, and the model with S as its weights, changed in place, into part/base.

    Args:
        destination: the final path of `part`: the adapter names its base model by an absolute path.

    Returns:
        Both folders by their kind.

    Raises:
        ModelError: no layer has a low-rank part, or layers of experts are compressed.
    """
    if experts := [name for name in compressed_layers(model) if experts_of(model, name)]:
        raise ModelError(
            f"{len(experts)} compressed layers belong to experts, such as {experts[0]}: PEFT adds adapters to linear "
            f"layers, and the experts of {type(model).__name__} are not such modules; use {option('to', 'dense')}"
        )
    factors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, layer in compressed_layers(model).items():
        if (pair := layer.factors()) is not None:
            ranks[name] = layer.spec.rank
            # PEFT adds x Aᵀ Bᵀ · lora_alpha / r, with A: (r, in) and B: (out, r).
            factors[f"base_model.model.{name}.lora_A.weight"] = pair[1].detach().contiguous()
            factors[f"base_model.model.{name}.lora_B.weight"] = pair[0].detach().contiguous()
    if not ranks:
        raise ModelError(
            f"no layer has a low-rank part (rank 0), so there is nothing to write as an adapter; use "
            f"{option('to', 'dense')}"
        )
    make_plain(model, SparseLowRankLinear.unpacked)
    sites = find_sites(model)
    stored_transposed = any(sites[name].transposed for name in ranks)
    config = adapter_config(ranks, str(destination / "base"), stored_transposed)
    (part / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(factors, part / "adapter_model.safetensors", metadata={"format": "pt"})
    model.save_pretrained(part / "base", max_shard_size=max_shard_size)
    return {"peft": part, "base": part / "base"}


def adapter_config(ranks: dict[str, int], base: str, fan_in_fan_out: bool) -> dict[str, Any]:
    """adapter_config.json: LoRA with lora_alpha = r in every layer, so that PEFT scales u v by exactly 1.

    Args:
        ranks: full layer name → r, at least 1. base: the folder of the base model.
        fan_in_fan_out: the base model stores its weights as (in, out).
    """
    most = max(ranks.values())
    # PEFT takes these for regular expressions, which may start in the middle of a name.
    others = {f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != most}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": sorted(ranks),
        "r": most,
        "lora_alpha": most,
        "rank_pattern": others,
        "alpha_pattern": others,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
    }
