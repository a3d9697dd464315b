"""S on a grid as other programs store it, and L as an adapter of theirs: compressed-tensors with
PEFT, and MLX.

Both write the adapter into the folder and the model of S into `base`, as the PEFT export does.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hasslefree.errors import ModelError, option
from hasslefree.exports.codes import check_layers, grid_of, group_of, numbers_of
from hasslefree.exports.formats import factors_of, make_plain, write_peft
from hasslefree.models.sites import find_sites

# The tensors of S by their names after that of the layer, such as "weight_packed".
Packed = dict[str, dict[str, Tensor]]


def write_compressed_tensors(
    model: PreTrainedModel, part: Path, destination: Path, max_shard_size: str
) -> dict[str, Path]:
    """Write S in the pack-quantized layout of compressed-tensors into part/base, and L for PEFT
    into `part`.
    """
    packed: Packed = {}
    schemes: dict[str, dict[str, Any]] = {}
    for name, layer in check_layers(model, "vllm").items():
        grid = grid_of(layer)
        group = group_of(layer, "vllm")
        schemes[name] = {
            "num_bits": grid.bits,
            "type": "int",
            "symmetric": grid.symmetric,
            "dynamic": False,
        }
        schemes[name] |= (
            {"strategy": "group", "group_size": group} if grid.group else {"strategy": "channel"}
        )
        # Zeros are packed along the outputs: a column is that of a group.
        grouped = {"weight_scale": layer.get_parameter("weight_scale").detach()}
        grouped |= (
            {} if grid.symmetric else {"weight_zero_point": layer.get_buffer("weight_zero_point")}
        )
        times = grid.group // group if grid.group else 1
        packed[name] = {key: tensor.repeat_interleave(times, 1) for key, tensor in grouped.items()}
        packed[name]["weight_packed"] = layer.tensors()["weight_packed"]
        packed[name]["weight_shape"] = torch.tensor(layer.spec.shape)
    # Compressed layers are no nn.Linear.
    dense = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    status = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
    }
    config = {**status, "config_groups": config_groups(schemes), "ignore": dense}
    factors = factors_of(model)
    write_base(model, packed, part / "base", max_shard_size, {"quantization_config": config})
    return write_peft(model, factors, part, destination) | {"base": part / "base"}


def config_groups(schemes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The layers with each scheme, which compressed-tensors calls a group."""
    groups: list[dict[str, Any]] = []
    for scheme in schemes.values():
        names = [name for name, its in schemes.items() if its == scheme]
        group = {"targets": ["Linear"] if len(names) == len(schemes) else names, "weights": scheme}
        groups += [group] if group not in groups else []
    return {f"group_{index}": group for index, group in enumerate(groups)}


def write_mlx(
    model: PreTrainedModel, part: Path, _destination: Path, max_shard_size: str
) -> dict[str, Path]:
    """Write S in MLX's affine layout into part/base, and L as an adapter of mlx-lm into `part`.

    MLX packs codes as `weight_packed` does, for all bits. The adapter has one rank: lower ones get
    zeros.
    """
    packed: Packed = {}
    forms: dict[str, Any] = {}
    for name, layer in check_layers(model, "mlx").items():
        grid = grid_of(layer)
        scale, second = numbers_of(layer, "mlx")
        forms[name] = {"group_size": group_of(layer, "mlx"), "bits": grid.bits}
        words = layer.tensors()["weight_packed"].view(torch.uint32)
        # The zero of a symmetric grid is a power of two: its product with the scale is exact.
        packed[name] = {
            "weight": words,
            "scales": scale,
            "biases": second if grid.offset else -second * scale,
        }
    folders = write_mlx_adapter(factors_of(model), part)
    usual = max(forms.values(), key=list(forms.values()).count)
    config = {"quantization": usual | {name: form for name, form in forms.items() if form != usual}}
    write_base(model, packed, part / "base", max_shard_size, config)
    return folders | {"mlx-base": part / "base"}


def write_mlx_adapter(factors: dict[str, tuple[Tensor, Tensor]], part: Path) -> dict[str, Path]:
    """adapters.safetensors and adapter_config.json with a scale of 1; nothing without factors."""
    if not factors:
        return {}
    rank = max(len(v) for _, v in factors.values())
    tensors = {}
    for name, (u, v) in factors.items():
        tensors[f"{name}.lora_a"] = F.pad(v.T, (0, rank - len(v))).contiguous()
        tensors[f"{name}.lora_b"] = F.pad(u.T, (0, 0, 0, rank - len(v))).contiguous()
    # Full names: mlx-lm then leaves the layers of other blocks as they are, whatever num_layers is.
    parameters = {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": sorted(factors)}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (part / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, part / "adapters.safetensors", metadata={"format": "mlx"})
    return {"mlx": part}


def write_base(
    model: PreTrainedModel,
    packed: Packed,
    folder: Path,
    max_shard_size: str,
    config: dict[str, Any],
) -> None:
    """Write the model, changed in place, with `packed` for the compressed weights and `config` in
    config.json.
    """
    make_plain(model, lambda layer: torch.empty(layer.spec.shape, dtype=model.dtype, device="meta"))
    if transposed := [
        name for name, site in find_sites(model).items() if site.transposed and name in packed
    ]:
        raise ModelError(
            f"layer {transposed[0]} stores its weight as (in, out), for which this format has no"
            f" packed layout; use {option('to', 'gguf')} or {option('to', 'dense')}"
        )
    tensors = model.state_dict()
    for name, parts in packed.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{leaf}": tensor for leaf, tensor in parts.items()}
    model.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) | config
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
