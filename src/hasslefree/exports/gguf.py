"""A GGUF file whose blocks hold the codes of S, and L as its adapter; the rest is a template's, a GGUF file of W."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.core.engines import block_of
from hasslefree.errors import ModelError, option
from hasslefree.exports.codes import check_layers, codes_of, grid_of, numbers_of
from hasslefree.exports.formats import summed
from hasslefree.exports.template import ROUNDING, Matrix, Place, Template, Vector, find_matrices, find_vectors
from hasslefree.models.sites import find_sites
from hasslefree.packed.linear import SparseLowRankLinear

# The zero of the codes of a block without a minimum, and the bytes of a block of 32 codes.
ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}
BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}

# Metadata that the writer adds itself.
REPLACED = ("general.architecture", "general.quantization_version", "general.file_type")


def write_gguf(
    model: PreTrainedModel, part: Path, _destination: Path, _max_shard_size: str, *, template: Template, trained: bool
) -> dict[str, Path]:
    """Write model.gguf with S, and adapter.gguf with L unless every rank is 0.

    trained: whether the compression may have changed norms and biases.
    """
    layers = check_layers(model, "llama.cpp")
    for name, layer in layers.items():
        numbers = numbers_of(layer, "llama.cpp")[: 1 + grid_of(layer).offset]
        if wrong := sum(int(torch.count_nonzero(number.half().double() != number.double())) for number in numbers):
            raise ModelError(
                f"layer {name} has {wrong} quantisation scales or offsets that are too small or too large for GGUF's "
                f"float16; compress again with {option('leave_dense', [name])}, or export with {option('to', 'dense')}"
            )
    places, changed = find_places(model, layers, template, trained)
    write_model(layers, places, changed, template, part / "model.gguf")
    if any(layer.spec.rank for layer in layers.values()):
        write_adapter(layers, places, template, part / "adapter.gguf")
    return {"gguf": part}


def find_places(
    model: PreTrainedModel, layers: dict[str, SparseLowRankLinear], template: Template, trained: bool
) -> tuple[dict[str, Place], dict[str, Tensor]]:
    """Where each layer is in the template, and the vectors that are not the template's, by their name there.

    Raises:
        ModelError: the template is of another model.
    """
    sites, inside = find_sites(model), {f"{name}.{leaf}" for name in layers for leaf in layers[name].state_dict()}
    plain = {name: tensor for name, tensor in without_ties(model).items() if name not in inside}
    matrices = {name: Matrix(layer.spec.shape, partial(summed, layer)) for name, layer in layers.items()}
    for name, tensor in plain.items():
        if tensor.ndim == 2:
            site = sites.get(name.removesuffix(".weight"))
            values = tensor.T if site is not None and site.transposed else tensor
            matrices[name] = Matrix((len(values), values.shape[1]), partial(torch.clone, values))
    places = find_matrices(template, matrices)
    for name in matrices.keys() - layers.keys():
        check_alike(template, name, places[name], matrices[name].values())
    # The names of a block begin alike: model.layers.0. here, and blk.0. there.
    blocks = {begin(name): begin(place.name) for name, place in places.items() if begin(name)}
    vectors = [Vector(name, blocks.get(begin(name), ""), t.float()) for name, t in plain.items() if t.ndim != 2]
    for name, layer in layers.items():
        if layer.bias is not None:
            theirs = places[name].name.removesuffix("weight") + "bias"
            vectors.append(Vector(f"{name}.bias", theirs, places[name].ordered(layer.bias.detach().float())))
    return places, find_vectors(template, vectors, trained)


def without_ties(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the model, each by its first name."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor.detach()))
    return dict(tensors.values())


def begin(name: str) -> str:
    """The beginning of a name, up to its first number; empty without one."""
    return match[0] if (match := re.match(r".*?\.\d+\.", name)) else ""


def check_alike(template: Template, name: str, place: Place, values: Tensor) -> None:
    """Raise a ModelError if a matrix that stayed dense is not the template's, but for rounding."""
    theirs = template.values(place.name)
    if (place.ordered(values.float()) - theirs).abs().max() > ROUNDING * theirs.abs().max():
        raise template.error(f"is of another model: {place.name} has other values than {name}")


def write_model(
    layers: dict[str, SparseLowRankLinear],
    places: dict[str, Place],
    changed: dict[str, Tensor],
    template: Template,
    path: Path,
) -> None:
    """The template, with S in the place of the weights of the layers, and other vectors."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quantize

    ours = {places[name].name: layer for name, layer in layers.items()}
    rows = {places[name].name: places[name] for name in layers}
    types = {theirs: str(block_of(grid_of(layer))) for theirs, layer in ours.items()}
    writer = GGUFWriter(path, architecture(template))
    for field in template.reader.fields.values():
        if field.name not in REPLACED and not field.name.startswith("GGUF."):
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[-1])
    writer.add_quantization_version(2)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{Counter(types.values()).most_common(1)[0][0]}"])

    def array(name: str) -> Any:
        tensor = template.tensors[name]
        if name in ours:
            return rows[name].ordered(blocks_of(ours[name])).numpy()
        return quantize(changed[name].numpy(), tensor.tensor_type) if name in changed else tensor.data

    for name, tensor in template.tensors.items():
        shape, kind, dtype = tensor.data.shape, tensor.tensor_type, tensor.data.dtype
        if name in ours:
            out, width = ours[name].spec.shape
            shape, kind = (out, width // 32 * BYTES[types[name]]), GGMLQuantizationType[types[name]]
            dtype = np.dtype(np.uint8)
        writer.add_tensor_info(name, shape, dtype, math.prod(shape) * dtype.itemsize, kind)
    write_tensors(writer, map(array, template.tensors))


def write_adapter(
    layers: dict[str, SparseLowRankLinear], places: dict[str, Place], template: Template, path: Path
) -> None:
    """u and v, scaled by 1: llama.cpp scales by alpha over the rank of the layer, and by 1 if alpha is 0."""
    from gguf import GGUFWriter

    ranks = {layer.spec.rank for layer in layers.values()} - {0}
    writer = GGUFWriter(path, architecture(template))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(ranks.pop()) if len(ranks) == 1 else 0.0)
    for name, layer in layers.items():
        if (factors := layer.factors()) is not None:
            u, v = (factor.detach().float() for factor in factors)
            writer.add_tensor(f"{places[name].name}.lora_a", v.contiguous().numpy())
            writer.add_tensor(f"{places[name].name}.lora_b", places[name].ordered(u).contiguous().numpy())
    write_tensors(writer)


def architecture(template: Template) -> str:
    return str(template.reader.get_field("general.architecture").contents())


def write_tensors(writer: Any, arrays: Iterable[Any] | None = None) -> None:
    """Write the file: the tensors that were added, or the arrays of those that were described, one at a time."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if arrays is None:
        writer.write_tensors_to_file()
    else:
        writer.write_ti_data_to_file()
        for array in arrays:
            writer.write_tensor_data(array)
    writer.close()


def blocks_of(layer: SparseLowRankLinear) -> Tensor:
    """S in the blocks of its type: (out, bytes) uint8.

    A block has the scale, the minimum if any, the fifth bits of the codes if any, and the codes: 32 bytes, or 16 with
    the low four bits of codes j and j + 16 in byte j.
    """
    grid = grid_of(layer)
    kind = str(block_of(grid))
    scale, second = numbers_of(layer, "llama.cpp")
    codes = codes_of(layer).view(len(scale), -1, 32).short()
    if not grid.offset:
        codes += (ZEROS[kind] - second).short().unsqueeze(-1)
    numbers = [scale, second] if grid.offset else [scale]
    parts = [number.half().unsqueeze(-1).view(torch.uint8) for number in numbers]
    if kind == "Q8_0":
        parts.append(codes.to(torch.int8).view(torch.uint8))
    else:
        if kind.startswith("Q5"):
            fifth = ((codes >> 4).long() << torch.arange(32)).sum(-1, keepdim=True)
            parts.append(fifth.view(torch.uint8)[..., :4])
        low = codes.to(torch.uint8) & 15
        parts.append(low[..., :16] | low[..., 16:] << 4)
    return torch.cat(parts, -1).flatten(1)
