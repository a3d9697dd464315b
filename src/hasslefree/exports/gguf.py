"""A GGUF file whose blocks hold the codes of S, and L as its adapter; the rest is a template's, a
GGUF file of W.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.checkpoint.record import read_record
from hasslefree.errors import ModelError, option
from hasslefree.exports.codes import check_layers, grid_of, numbers_of
from hasslefree.exports.formats import summed
from hasslefree.exports.template import Place, Template, find_matrices, find_vector
from hasslefree.models.sites import find_sites
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.storage import unpack_codes
from hasslefree.recipe.engines import block_of

# The zero of the codes of a block without a minimum.
ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}
# Metadata that the writer adds itself.
REPLACED = ("general.architecture", "general.quantization_version", "general.file_type")
Layers = dict[str, SparseLowRankLinear]


def write_gguf(
    model: PreTrainedModel,
    part: Path,
    _destination: Path,
    _max_shard_size: str,
    *,
    template: Template,
) -> dict[str, Path]:
    """Write model.gguf with S, and adapter.gguf with L unless every rank is 0."""
    layers = check_layers(model, "llama.cpp")
    for name, layer in layers.items():
        if any(
            (number.half().double() != number.double()).any()
            for number in numbers_of(layer, "llama.cpp")
        ):
            raise ModelError(
                f"layer {name} has quantisation scales or offsets that are too small or too large"
                f" for GGUF's float16; compress again with {option('leave_dense', [name])}, or"
                f" export with {option('to', 'dense')}"
            )
    places, changed = find_places(model, layers, template)
    write_model(layers, places, changed, template, part / "model.gguf")
    if any(layer.spec.rank for layer in layers.values()):
        write_adapter(layers, places, template, part / "adapter.gguf")
    return {"gguf": part}


def find_places(
    model: PreTrainedModel, layers: Layers, template: Template
) -> tuple[dict[str, Place], dict[str, Tensor]]:
    """Where each layer is in the template, and by their name there, the vectors that differ; or a
    ModelError.
    """
    sites = find_sites(model)
    plain: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] not in layers:
            site = sites.get(name.removesuffix(".weight"))
            plain[name] = parameter.detach() if site is None else site.weight()
    shapes: dict[str, tuple[int, ...]] = {name: layer.spec.shape for name, layer in layers.items()}
    shapes |= {name: tensor.shape for name, tensor in plain.items() if tensor.ndim == 2}
    places = find_matrices(
        template, shapes, lambda name: summed(layers[name]) if name in layers else plain[name]
    )
    for name in shapes.keys() - layers.keys():
        place = places[name]
        if not template.holds(place.name, place.ordered(plain[name])):
            raise template.error(f"is of another model: {place.name} has other values than {name}")
    # The names of a block begin alike: model.layers.0. here, and blk.0. there.
    blocks = {begin(name): begin(place.name) for name, place in places.items() if begin(name)}
    trained = (
        read_record(Path(str(model.name_or_path))).predictions is not None
    )  # vectors of blocks too
    changed: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if tensor.ndim != 2:
            moved = trained and begin(name) in blocks
            changed |= find_vector(template, name, blocks.get(begin(name), ""), tensor, moved)
    for name, layer in layers.items():
        if layer.bias is not None:
            theirs = places[name].name.removesuffix("weight") + "bias"
            changed |= find_vector(
                template, f"{name}.bias", theirs, places[name].ordered(layer.bias.detach()), trained
            )
    return places, changed


def begin(name: str) -> str:
    """The beginning of a name, up to its first number; empty without one."""
    if match := re.match(r".*?\.\d+\.", name):
        return match[0]
    return ""


def write_model(
    layers: Layers,
    places: dict[str, Place],
    changed: dict[str, Tensor],
    template: Template,
    path: Path,
) -> None:
    """The template, with S in the place of the weights of the layers, and other vectors."""
    from gguf import GGMLQuantizationType, LlamaFileType, quantize

    ours = {places[name].name: (layer, places[name]) for name, layer in layers.items()}
    types = {theirs: str(block_of(grid_of(layer))) for theirs, (layer, _) in ours.items()}
    with written(path, template) as writer:
        for field in template.reader.fields.values():
            if field.name not in REPLACED and not field.name.startswith("GGUF."):
                writer.add_key_value(
                    field.name, field.contents(), field.types[0], sub_type=field.types[-1]
                )
        writer.add_quantization_version(2)
        writer.add_file_type(
            LlamaFileType[f"MOSTLY_{Counter(types.values()).most_common(1)[0][0]}"]
        )
        for name, tensor in template.tensors.items():
            data = tensor.data
            kind = tensor.tensor_type
            if name in ours:
                layer, place = ours[name]
                data = place.ordered(blocks_of(layer)).numpy()
                kind = GGMLQuantizationType[types[name]]
            elif name in changed:
                data = quantize(changed[name].numpy(), kind)
            writer.add_tensor(name, data, raw_dtype=kind)


def write_adapter(
    layers: Layers,
    places: dict[str, Place],
    template: Template,
    path: Path,
) -> None:
    """u and v, scaled by 1: llama.cpp scales by alpha over the rank of the layer, and by 1 if alpha
    is 0.
    """
    ranks = {layer.spec.rank for layer in layers.values()} - {0}
    with written(path, template) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(ranks.pop()) if len(ranks) == 1 else 0.0)
        for name, layer in layers.items():
            if (factors := layer.factors()) is not None:
                u, v = (factor.detach().float() for factor in factors)
                writer.add_tensor(f"{places[name].name}.lora_a", v.contiguous().numpy())
                writer.add_tensor(f"{places[name].name}.lora_b", places[name].ordered(u).numpy())


@contextmanager
def written(path: Path, template: Template) -> Iterator[Any]:
    """A writer of the template's architecture, whose file is written at the end."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, template.reader.get_field("general.architecture").contents())
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks_of(layer: SparseLowRankLinear) -> Tensor:
    """S in the blocks of its type: (out, bytes) uint8.

    A block has the scale, the minimum if any, the fifth bits of the codes if any, and the codes: 32
    bytes, or 16 with the low four bits of codes j and j + 16 in byte j.
    """
    grid = grid_of(layer)
    kind = str(block_of(grid))
    scale, second = numbers_of(layer, "llama.cpp")
    codes = unpack_codes(layer.tensors()["weight_packed"], grid.bits, layer.in_features)
    codes = codes.view(len(scale), -1, 32).short()
    if not grid.offset:
        codes += (ZEROS[kind] - second).short().unsqueeze(-1)
    parts = [
        number.half().unsqueeze(-1).view(torch.uint8)
        for number in (scale, second)[: 1 + grid.offset]
    ]
    if kind == "Q8_0":
        parts.append(codes.to(torch.int8).view(torch.uint8))
    else:
        if kind.startswith("Q5"):
            fifth = ((codes >> 4).long() << torch.arange(32)).sum(-1, keepdim=True)
            parts.append(fifth.view(torch.uint8)[..., :4])
        low = codes.to(torch.uint8) & 15
        parts.append(low[..., :16] | low[..., 16:] << 4)
    return torch.cat(parts, -1).flatten(1)
