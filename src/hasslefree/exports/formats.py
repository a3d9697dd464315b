"""Write a dense model, a narrower dense one, or S with u v as a PEFT adapter of scaling 1."""

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.core.low_rank import LowRank
from hasslefree.errors import ModelError, option
from hasslefree.exports.template import Template, Tensors
from hasslefree.files import write_json
from hasslefree.models.blocks import find_blocks, head_unit
from hasslefree.models.ends import find_ends
from hasslefree.models.experts import experts_of, fuse_experts, split_experts
from hasslefree.models.sites import find_sites
from hasslefree.models.unloaded import unloaded_tensors, without_codes
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers

# u: (out, r) and v: (r, in) of the layers that have them.
Factors = dict[str, tuple[Tensor, Tensor]]
# The folders of an export that get a model card, by the kind of the card.
Folders = dict[str, Path]


@dataclass(frozen=True)
class Target:
    """The folder that an export fills.

    Args:
        folder: the path until the export is complete.
        final: the path afterwards, as it was given.
        max_shard_size: the maximum size of a weight file, such as "5GB".
        template: the GGUF file of the dense model, for an export to GGUF.
    """

    folder: Path
    final: Path
    max_shard_size: str
    template: Template | None

    @property
    def base(self) -> Path:
        """The folder of the model of S, if the export is an adapter."""
        return self.folder / "base"

    def save(self, model: PreTrainedModel, folder: Path, tensors: Tensors | None = None) -> None:
        """Write a model. tensors: replace the model's tensors."""
        model.save_pretrained(folder, state_dict=tensors, max_shard_size=self.max_shard_size)


@torch.no_grad()
def summed(layer: SparseLowRankLinear) -> Tensor:
    """S + u v, (out, in), in the layer's dtype."""
    sparse = layer.unpacked()
    factors = layer.factors()
    if factors is None:
        return sparse
    return LowRank(*factors).added_to(sparse)


def dense_shapes(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class with dense parameters on the meta device."""
    with torch.device("meta"):
        return type(model)._from_config(model.config)


def make_plain(model: PreTrainedModel, weight_of: Callable[[SparseLowRankLinear], Tensor]) -> None:
    """Replace every compressed layer, one at a time, by a dense one.

    Args:
        weight_of: returns the dense weight, (out, in).
    """
    quantizer: Any = model.hf_quantizer
    quantizer.remove_quantization_config(model)
    original = dense_shapes(model)
    split_experts(original)
    sites = find_sites(original)
    ends = {end.name: end for end in find_ends(original)}
    for name, layer in compressed_layers(model).items():
        weight = weight_of(layer).detach()
        if name in ends:
            ends[name].restore(model, original, weight)
            continue
        site = sites[name]
        site.set_weight(weight, layer.bias)
        site.module.train(model.training)
        model.set_submodule(name, site.module)
    fuse_experts(model)


def make_ends_plain(model: PreTrainedModel) -> None:
    """Replace a compressed embedding and head by dense modules, for formats without packed ones."""
    original = dense_shapes(model)
    for end in find_ends(original):
        layer = model.get_submodule(end.name)
        if isinstance(layer, SparseLowRankLinear):
            end.restore(model, original, layer.unpacked().detach())


def write_dense(model: PreTrainedModel, target: Target) -> Folders:
    """Write the model, which is changed in place, with S + u v as its weights."""
    unloaded = without_codes(unloaded_tensors(model))
    copied = {name: tensor.read() for name, tensor in unloaded.items()}
    make_plain(model, summed)
    tensors = model.state_dict() | copied
    target.save(model, target.folder, tensors)
    return {"dense": target.folder}


# The layers that read heads or neurons, with the layers that compute these, by their names in Llama
# and similar models.
ATTENTION = "self_attn.o_proj"
MAKERS = {
    ATTENTION: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.down_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def write_narrow(model: PreTrainedModel, target: Target) -> Folders:
    """Write the model, which is changed in place, without the channels whose weights are all zero.

    The input channels of o_proj are removed in units of all query heads of a key head, together
    with the rows of q_proj, k_proj and v_proj that compute them. The input channels of down_proj
    are removed together with the rows of gate_proj and up_proj.
    """
    make_plain(model, summed)
    blocks = find_blocks(model).modules
    kept = {reader: [units_kept(block, reader) for block in blocks] for reader in MAKERS}
    counts = {reader: common_count(reader, masks) for reader, masks in kept.items()}
    config = model.config.get_text_config()
    heads = len(kept[ATTENTION][0])
    counts[ATTENTION] = accepted_count(config, heads, counts[ATTENTION])
    if all(counts[reader] == len(masks[0]) for reader, masks in kept.items()):
        raise ModelError(
            "nothing to remove: every neuron is in use, and no attention head can be dropped;"
            f" compress with {option('method', 'osscar')} {option('pattern', 'structured')}"
            f" {option('rank', 0)} and a higher {option('sparsity')}"
        )
    for reader, masks in kept.items():
        for block, units in zip(blocks, masks, strict=True):
            unused = torch.nonzero(~units).flatten()
            units[unused[: counts[reader] - int(units.sum())]] = True
            remove_units(block, reader, units)
    set_heads(config, heads, counts[ATTENTION])
    config.intermediate_size = counts["mlp.down_proj"]
    check_shapes(model)
    target.save(model, target.folder)
    return {"narrow": target.folder}


def check_shapes(model: PreTrainedModel) -> None:
    """Raise a ModelError if the shape of a tensor does not match the model's configuration.

    For example, OLMo 2 has a norm over all heads.
    """
    expected = dense_shapes(model).state_dict()
    for name, tensor in model.state_dict().items():
        if name in expected and tensor.shape != expected[name].shape:
            raise ModelError(
                f"{option('to', 'narrow')} does not support {type(model).__name__}: {name} depends"
                f" on all heads or neurons; use {option('to', 'dense')}"
            )


def units_kept(block: nn.Module, reader: str) -> Tensor:
    """A mask of the units that a layer reads with a non-zero weight: (units,) bool.

    A unit is a neuron, or all query heads that share a key head.
    """
    names = [*MAKERS[reader], reader]
    modules: dict[str, Any] = dict(block.named_modules())
    if not modules.keys() >= set(names):
        raise ModelError(
            f"{type(block).__name__} does not have all of the modules {', '.join(names)}, by which"
            f" this export finds heads and neurons; use {option('to', 'dense')}"
        )
    layer = modules[reader]
    unit = head_unit(block, reader)
    units = layer.in_features // unit
    if any(modules[maker].out_features % units for maker in MAKERS[reader]):
        raise ModelError(
            f"{option('to', 'narrow')} does not support {type(block).__name__}:"
            f" {', '.join(MAKERS[reader])} do not split evenly into the {units} heads or neurons of"
            f" {reader}; use {option('to', 'dense')}"
        )
    return (layer.weight != 0).any(0).view(units, unit).any(1)


def common_count(reader: str, kept: list[Tensor]) -> int:
    """The number of units that each block keeps. Raises a ModelError if it differs or is 0."""
    counts = [int(torch.count_nonzero(mask)) for mask in kept]
    if len(set(counts)) > 1 or not counts[0]:
        raise ModelError(
            f"the blocks keep {', '.join(map(str, counts))} heads or neurons in {reader}, and a"
            " plain transformers model needs the same number, at least one, in every block; use"
            f" {option('to', 'dense')}"
        )
    return counts[0]


def set_heads(
    config: Any,
    groups: int,
    count: int,
) -> None:
    """Set the number of key heads to `count` instead of `groups`; each keeps its number of query
    heads.
    """
    config.head_dim = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    config.num_attention_heads = config.num_attention_heads // groups * count
    config.num_key_value_heads = count


def accepted_count(
    config: Any,
    groups: int,
    least: int,
) -> int:
    """The smallest number of key heads, from `least` to `groups`, that transformers accepts.

    Llama's number of query heads must divide the hidden size, even if head_dim is given.
    """
    for count in range(least, groups):
        tried = copy.deepcopy(config)
        set_heads(tried, groups, count)
        with suppress(StrictDataclassError):
            tried.validate()
            return count
    return groups


def remove_units(
    block: nn.Module,
    reader: str,
    kept: Tensor,
) -> None:
    """Remove the units that are not kept from the layer that reads them, and from the layers that
    compute them.
    """
    layer: Any = block.get_submodule(reader)
    columns = kept.repeat_interleave(layer.in_features // len(kept))
    layer.weight = nn.Parameter(layer.weight.detach()[:, columns].contiguous())
    layer.in_features = int(columns.sum())
    for name in MAKERS[reader]:
        maker: Any = block.get_submodule(name)
        rows = kept.repeat_interleave(maker.out_features // len(kept))
        for leaf, tensor in list(maker.named_parameters()):
            setattr(maker, leaf, nn.Parameter(tensor.detach()[rows].contiguous()))
        maker.out_features = int(rows.sum())


def write_adapter(model: PreTrainedModel, target: Target) -> Folders:
    """Write u v as a PEFT adapter, and the model of S into `base`."""
    experts = [name for name in compressed_layers(model) if experts_of(model, name)]
    if experts:
        raise ModelError(
            f"{len(experts)} compressed layers belong to experts, such as {experts[0]}: PEFT adds"
            f" adapters to linear layers, and the experts of {type(model).__name__} are not such"
            f" modules; use {option('to', 'dense')}"
        )
    factors = factors_of(model)
    if not factors:
        raise ModelError(
            f"every layer has rank 0: nothing to write as an adapter; use {option('to', 'dense')}"
        )
    make_plain(model, SparseLowRankLinear.unpacked)
    target.save(model, target.base)
    return write_peft(model, factors, target)


def factors_of(model: PreTrainedModel) -> Factors:
    """The factors of the layers that have them, by name."""
    found: Factors = {}
    for name, layer in compressed_layers(model).items():
        factors = layer.factors()
        if factors is not None:
            u, v = factors
            found[name] = u.detach(), v.detach()
    return found


def write_peft(
    model: PreTrainedModel,
    factors: Factors,
    target: Target,
) -> Folders:
    """Write the adapter, if there are factors, beside the base.

    Args:
        model: the model, after `make_plain`.
    """
    if not factors:
        return {"base alone": target.folder, "base": target.base}
    sites = find_sites(model)
    tensors: Tensors = {}
    ranks: dict[str, int] = {}
    for name, (u, v) in factors.items():
        # PEFT adds x Aᵀ Bᵀ · lora_alpha / r, with A: (r, in) and B: (out, r).
        tensors[f"base_model.model.{name}.lora_A.weight"] = v.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = u.contiguous()
        ranks[name] = len(v)
    transposed = any(sites[name].transposed for name in ranks)
    config = adapter_config(ranks, str(target.final / "base"), transposed)
    write_json(target.folder / "adapter_config.json", config)
    save_file(tensors, target.folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return {"peft": target.folder, "base": target.base}


def adapter_config(
    ranks: dict[str, int],
    base: str,
    fan_in_fan_out: bool,
) -> dict[str, Any]:
    """The content of adapter_config.json: LoRA with lora_alpha = r in every layer, for which PEFT
    scales u v by exactly 1.
    """
    most = max(ranks.values())
    # PEFT reads the keys as regular expressions, which may match from the middle of a name.
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
