"""Write S in the packed layouts of compressed-tensors and MLX, and L as an adapter for PEFT or
mlx-lm.

Both exports write the adapter into the folder and the model of S into `base`, as the PEFT export
does.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hasslefree.errors import ModelError, option
from hasslefree.exports.codes import Coded, check_layers, dense_linear
from hasslefree.exports.formats import (
    Factors,
    Folders,
    Target,
    factors_of,
    make_ends_plain,
    make_plain,
    write_peft,
)
from hasslefree.exports.template import Tensors
from hasslefree.files import edited_json, read_json, write_json
from hasslefree.models.sites import find_sites
from hasslefree.recipe.engines import vllm_kernels

# For each layer, the tensors of S by their name within the layer, such as "weight_packed".
Packed = dict[str, Tensors]


def write_compressed_tensors(model: PreTrainedModel, target: Target) -> Folders:
    """Write S in the pack-quantized layout of compressed-tensors into `base`, and L for PEFT.

    Embedding and head become dense, since vLLM cannot read packed ones.
    """
    make_ends_plain(model)
    packed: Packed = {}
    layers_of: dict[tuple[int, bool, int | None], list[str]] = {}
    for name, coded in check_layers(model, "vllm").items():
        grid = coded.grid
        size = coded.group if grid.group else None
        layers_of.setdefault((grid.bits, grid.symmetric, size), []).append(name)
        packed[name] = pack_quantized(coded)
    groups: dict[str, Any] = {}
    for (bits, symmetric, size), names in layers_of.items():
        scheme = {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "dynamic": False,
            "strategy": "channel",
        }
        if size is not None:
            scheme |= {"strategy": "group", "group_size": size}
        targets = names if len(layers_of) > 1 else ["Linear"]
        groups[f"group_{len(groups)}"] = {"targets": targets, "weights": scheme}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": dense_linear(model),
    }
    factors = factors_of(model)
    write_base(model, packed, target, {"quantization_config": config})
    return write_peft(model, factors, target)


def pack_quantized(coded: Coded) -> Tensors:
    """The tensors of a layer in compressed-tensors, by their name within the layer."""
    tensors = coded.layer.tensors()
    parts = {"weight_scale": coded.layer.weight.detach()}
    if not coded.grid.symmetric:
        # Packed along the outputs: each column belongs to a group.
        parts["weight_zero_point"] = tensors["weight_zero_point"]
    if coded.grid.group:
        for leaf, numbers in parts.items():
            parts[leaf] = coded.repeated(numbers)
    parts["weight_packed"] = tensors["weight_packed"]
    parts["weight_shape"] = torch.tensor(coded.layer.spec.shape)
    return parts


def kernels_in_vllm(base: Path) -> str:
    """The kernels and the hardware with which vLLM multiplies the layers of a model that
    `write_compressed_tensors` has written: one line per kind of grid.
    """
    config = read_json(base / "config.json")["quantization_config"]
    lines: set[str] = set()
    for group in config["config_groups"].values():
        bits = group["weights"]["num_bits"]
        symmetric = group["weights"]["symmetric"]
        kind = "symmetric" if symmetric else "whole zeros"
        lines.add(f"    {bits} bits, {kind}: {vllm_kernels(bits, symmetric)}")
    return "\n".join(sorted(lines))


def write_mlx(model: PreTrainedModel, target: Target) -> Folders:
    """Write S in MLX's affine layout into `base`, and L as an adapter of mlx-lm.

    All layers of the adapter have the same rank: smaller factors are padded with zeros.
    """
    packed: Packed = {}
    forms: dict[str, Any] = {}
    for name, coded in check_layers(model, "mlx").items():
        forms[stored_name(model, name)] = {"group_size": coded.group, "bits": coded.grid.bits}
        packed[name] = pack_affine(coded)
    factors = {stored_name(model, name): pair for name, pair in factors_of(model).items()}
    folders = write_mlx_adapter(factors, target.folder)
    usual = max(forms.values(), key=list(forms.values()).count)
    others = {name: form for name, form in forms.items() if form != usual}
    write_base(model, packed, target, {"quantization": usual | others})
    return folders | {"mlx-base": target.base}


def stored_name(model: PreTrainedModel, layer: str) -> str:
    """The name of a layer in the files that `save_pretrained` writes, which mlx-lm uses too."""
    weight = torch.empty((), device="meta")
    (name,) = revert_weight_conversion(model, {f"{layer}.weight": weight})
    return name.removesuffix(".weight")


def pack_affine(coded: Coded) -> Tensors:
    """The tensors of a layer in MLX, by their name within the layer. MLX packs codes of all bits in
    the layout of `weight_packed`.
    """
    biases = coded.offset_or_zero
    if not coded.grid.offset:
        # The zero of a symmetric grid is a power of two: its product with the scale is exact.
        biases = -biases * coded.scale
    words = coded.layer.tensors()["weight_packed"].view(torch.uint32)
    return {"weight": words, "scales": coded.scale, "biases": biases}


def write_mlx_adapter(factors: Factors, folder: Path) -> Folders:
    """adapters.safetensors and adapter_config.json with a scale of 1; nothing without factors."""
    if not factors:
        return {"mlx-base alone": folder}
    rank = max(len(v) for _, v in factors.values())
    tensors = {}
    for name, (u, v) in factors.items():
        missing = rank - len(v)
        tensors[f"{name}.lora_a"] = F.pad(v.T, (0, missing)).contiguous()
        tensors[f"{name}.lora_b"] = F.pad(u.T, (0, 0, 0, missing)).contiguous()
    # With full names, mlx-lm does not change the same layers of other blocks, whatever num_layers
    # is.
    parameters = {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": sorted(factors)}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    write_json(folder / "adapter_config.json", config)
    save_file(tensors, folder / "adapters.safetensors", metadata={"format": "mlx"})
    return {"mlx": folder}


def write_base(
    model: PreTrainedModel,
    packed: Packed,
    target: Target,
    config: dict[str, Any],
) -> None:
    """Write the model, which is changed in place, with `packed` in place of the compressed weights
    and the entries `config` in config.json.
    """
    make_plain(model, lambda layer: torch.empty(layer.spec.shape, dtype=model.dtype, device="meta"))
    sites = find_sites(model)
    tensors = model.state_dict()
    for name, parts in packed.items():
        if name in sites and sites[name].transposed:
            raise ModelError(
                f"layer {name} stores its weight as (in, out), for which this format has no packed"
                f" layout; use {option('to', 'gguf')} or {option('to', 'dense')}"
            )
        del tensors[f"{name}.weight"]
        for tied, source in model.all_tied_weights_keys.items():
            if source == f"{name}.weight":
                tensors.pop(tied, None)
        for leaf, tensor in parts.items():
            tensors[f"{name}.{leaf}"] = tensor
    target.save(model, target.base, tensors)
    with edited_json(target.base / "config.json") as content:
        content.update(config)
