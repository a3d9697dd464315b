"""Write the codes of S into the blocks of a GGUF file, and L as its adapter. Everything else is
copied from a template, the GGUF file of the dense model.
"""

import re
import shlex
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.checkpoint.record import read_record
from hasslefree.errors import ModelError, option
from hasslefree.exports.codes import Coded, check_layers
from hasslefree.exports.formats import (
    Factors,
    Folders,
    Target,
    dense_shapes,
    factors_of,
    summed,
)
from hasslefree.exports.template import Places, Template, Tensors, find_matrices, find_vector
from hasslefree.models.blocks import find_blocks, other_modalities
from hasslefree.models.experts import expert_modules
from hasslefree.models.sites import find_sites
from hasslefree.packed.layouts import pack_bits
from hasslefree.packed.storage import unpack_codes
from hasslefree.recipe.engines import block_of

# The zero of the codes of a block without a minimum.
ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}
# Metadata of the template that is not copied: the writer sets its own, or the default.
REPLACED = (
    "general.architecture",
    "general.quantization_version",
    "general.file_type",
    "general.alignment",
)
Layers = dict[str, Coded]
# The suffix of a destination that is a file.
SUFFIX = ".gguf"
# The beginning of a Modelfile.
FROM = "FROM ./"


@dataclass(frozen=True)
class Files:
    """The files of an export: S; L, unless every rank is 0; and a Modelfile of both for Ollama."""

    model: Path
    adapter: Path
    modelfile: Path

    @classmethod
    def of(cls, destination: Path) -> "Files":
        """The files in a destination folder, or for a destination file with `SUFFIX`.

        If the destination is a link, the files are beside the file that it points to.
        """
        if destination.is_symlink():
            destination = destination.resolve()
        if destination.suffix != SUFFIX:
            adapter = destination / "adapter.gguf"
            return cls(destination / "model.gguf", adapter, destination / "Modelfile")
        stem = destination.stem
        adapter = destination.with_name(f"{stem}-adapter.gguf")
        return cls(destination, adapter, destination.with_name(f"{stem}.Modelfile"))

    @property
    def starts(self) -> dict[Path, bytes]:
        """The first bytes of each file."""
        return {self.model: b"GGUF", self.adapter: b"GGUF", self.modelfile: FROM.encode()}

    @property
    def commands(self) -> str:
        """The commands that run the model in llama.cpp and add it to Ollama."""
        words = ["llama-cli", "-m", str(self.model)]
        if self.adapter.exists():
            words += ["--lora", str(self.adapter)]
        ollama = ["ollama", "create", "NAME", "-f", str(self.modelfile)]
        return f"{shlex.join(words)}\n{shlex.join(ollama)}"


def write_gguf(model: PreTrainedModel, target: Target) -> Folders:
    """Write S, L unless every rank is 0, and a Modelfile."""
    destination = target.folder
    if target.final.suffix == SUFFIX:
        destination /= target.final.name
    files = Files.of(destination)
    template = target.template
    assert template is not None
    layers = check_layers(model, "llama.cpp")
    for name, coded in layers.items():
        for numbers in floats_of(coded):
            if not torch.equal(numbers.half().double(), numbers.double()):
                raise ModelError(
                    f"layer {name} has quantisation scales or offsets that are too small or too"
                    " large for GGUF's float16; compress again with"
                    f" {option('leave_dense', [name])}, or export with {option('to', 'dense')}"
                )
    plain = plain_parameters(model, layers)
    places = find_places(layers, plain, template)
    trained = may_be_trained(Path(str(model.name_or_path)))
    changed = changed_vectors(layers, plain, places, template, trained)
    write_model(layers, places, changed, template, files.model)
    modelfile = f"{FROM}{files.model.name}\n"
    factors = factors_of(model)
    if factors:
        write_adapter(factors, places, template, files.adapter)
        modelfile += f"ADAPTER ./{files.adapter.name}\n"
    files.modelfile.write_text(modelfile, encoding="utf-8")
    return {"gguf": target.folder}


def find_places(layers: Layers, plain: Tensors, template: Template) -> Places:
    """Find the matrices of the model in the template.

    Args:
        plain: from `plain_parameters`.

    Raises:
        ModelError: the template is of another model.
    """
    matrices = {name: tensor for name, tensor in plain.items() if tensor.ndim == 2}
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {name: coded.layer.spec.shape for name, coded in layers.items()}
    shapes |= {name: tensor.shape for name, tensor in matrices.items()}

    def values(name: str) -> Tensor:
        if name in layers:
            return summed(layers[name].layer)
        return plain[name]

    places = find_matrices(template, shapes, values)
    for name, tensor in matrices.items():
        place = places[name]
        if not template.holds(place.name, tensor[place.rows]):
            raise template.error(f"is of another model: {place.name} has other values than {name}")
    return places


def changed_vectors(
    layers: Layers,
    plain: Tensors,
    places: Places,
    template: Template,
    trained: bool,
) -> Tensors:
    """The new values of vectors that differ from the template, by their name in it.

    Args:
        trained: vectors of blocks may have changed since the model was dense.

    Raises:
        ModelError: the template is of another model.
    """
    # All names of a block have the same prefix: model.layers.0. here, blk.0. in the template.
    blocks = {block_prefix(name): block_prefix(place.name) for name, place in places.items()}
    blocks.pop("", None)
    changed: Tensors = {}
    for name, vector in plain.items():
        if vector.ndim == 2:
            continue
        layer = name.removesuffix(".bias")
        owner = places.get(layer, places.get(f"{name.removesuffix('bias')}weight"))
        if owner is None:
            prefix = block_prefix(name)
            theirs = blocks.get(prefix, "")
            moved = trained and prefix in blocks
        else:  # the bias of a matrix, whose rows have the same order
            theirs = owner.name.removesuffix("weight") + "bias"
            moved = trained and layer in layers
            vector = vector[owner.rows]
        changed |= find_vector(template, name, theirs, vector, moved)
    return changed


def plain_parameters(model: PreTrainedModel, layers: Layers) -> Tensors:
    """The parameters that are not compressed; matrices are (out, in).

    Parameters that process images or sound are left out, since llama.cpp keeps them in another
    file. So are experts, which stay dense for llama.cpp and have another layout in GGUF files.
    """
    sites = find_sites(model)
    original = dense_shapes(model)
    left_out = [*other_modalities(original, find_blocks(original)), *expert_modules(model)]
    others = tuple(f"{name}." for name in left_out)
    found: Tensors = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        is_packed = module in layers and leaf != "bias"
        if not is_packed and not name.startswith(others):
            site = sites.get(name.removesuffix(".weight"))
            found[name] = parameter.detach() if site is None else site.weight()
    return found


def may_be_trained(folder: Path) -> bool:
    """Return True if vectors of blocks may have changed since the model was dense. Without a
    record, as after `save_pretrained`, this is unknown, and the result is True.
    """
    if not (folder / "compression.json").is_file():
        return True
    return read_record(folder).predictions is not None


def block_prefix(name: str) -> str:
    """The beginning of a name, up to its first number; empty without a number."""
    match = re.match(r".*?\.\d+\.", name)
    if match is None:
        return ""
    return match[0]


def write_model(
    layers: Layers,
    places: Places,
    changed: Tensors,
    template: Template,
    path: Path,
) -> None:
    """Write the template with the codes of S and the changed vectors in it."""
    from gguf import GGMLQuantizationType, LlamaFileType, quantize

    ours = {places[name].name: name for name in layers}
    types = {name: str(block_of(coded.grid)) for name, coded in layers.items()}
    with written(path, template) as writer:
        for field in template.reader.fields.values():
            if field.name not in REPLACED and not field.name.startswith("GGUF."):
                writer.add_key_value(
                    field.name, field.contents(), field.types[0], sub_type=field.types[-1]
                )
        writer.add_quantization_version(2)
        file_type = f"MOSTLY_{statistics.mode(types.values())}"
        if file_type not in LlamaFileType.__members__:
            file_type += "_M"  # a mixture that is mostly of this type
        writer.add_file_type(LlamaFileType[file_type])
        for name, tensor in template.tensors.items():
            data = tensor.data
            kind = tensor.tensor_type
            if name in ours:
                layer = ours[name]
                data = blocks_of(layers[layer])[places[layer].rows].numpy()
                kind = GGMLQuantizationType[types[layer]]
            elif name in changed:
                data = quantize(changed[name].numpy(), kind)
            writer.add_tensor(name, data, raw_dtype=kind)


def write_adapter(
    factors: Factors,
    places: Places,
    template: Template,
    path: Path,
) -> None:
    """Write u and v with a scale of 1: llama.cpp scales by alpha / rank, and by 1 if alpha is 0."""
    ranks = {len(v) for _, v in factors.values()}
    with written(path, template) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(ranks.pop()) if len(ranks) == 1 else 0.0)
        for name, (u, v) in factors.items():
            place = places[name]
            writer.add_tensor(f"{place.name}.lora_a", v.float().contiguous().numpy())
            writer.add_tensor(f"{place.name}.lora_b", u.float()[place.rows].numpy())


@contextmanager
def written(path: Path, template: Template) -> Iterator[Any]:
    """A writer for the template's architecture. The file is written when the context ends."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, template.reader.get_field("general.architecture").contents())
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def floats_of(coded: Coded) -> list[Tensor]:
    """The numbers that a block stores in float16, (out, blocks) each: the scale, and with an offset
    the minimum; for K types, their units.
    """
    grid = coded.grid
    if grid.block is None:
        return [coded.scale, coded.offset_or_zero] if grid.offset else [coded.scale]
    assert grid.scale_bits is not None
    tensors = coded.layer.tensors()
    steps = 1 << (grid.scale_bits - grid.signed_scales)
    units = [tensors[name] for name in ("weight_scale", "weight_offset") if name in tensors]
    return [unit.detach().float() / steps for unit in units]


def blocks_of(coded: Coded) -> Tensor:
    """S as blocks of ggml-common.h: (out, bytes) uint8."""
    grid = coded.grid
    tensors = coded.layer.tensors()
    codes = unpack_codes(tensors["weight_packed"], grid.bits, coded.layer.in_features)
    numbers = [number.half().unsqueeze(-1).view(torch.uint8) for number in floats_of(coded)]
    kind = str(block_of(grid))
    if grid.block is None:
        codes = codes.view(len(codes), -1, 32).short()
        if not grid.offset:
            codes += (ZEROS[kind] - coded.offset_or_zero).short().unsqueeze(-1)
        parts = numbers + plain_parts(kind, codes)
    else:
        assert grid.scale_bits is not None
        groups = grid.groups(coded.layer.in_features)
        by_block = (*numbers[0].shape[:2], -1)
        multiples: list[Tensor] = []
        for name in ("weight_scale_packed", "weight_offset_packed"):
            if name in tensors:
                unpacked = unpack_codes(tensors[name], grid.scale_bits, groups)
                multiples.append(unpacked.view(by_block))
        parts = k_parts(kind, codes.view(by_block), multiples, numbers)
    return torch.cat(parts, -1).flatten(1)


def plain_parts(kind: str, codes: Tensor) -> list[Tensor]:
    """The bytes after the floats in blocks of 32 codes: the fifth bits, if any, and the others.

    Args:
        kind: the type of the blocks, such as "Q4_0".
        codes: (out, blocks, 32).
    """
    if kind == "Q8_0":
        return [codes.to(torch.int8).view(torch.uint8)]
    codes = codes.to(torch.uint8)
    low = interleaved(codes & 15, 4, 16)
    if kind.startswith("Q5"):
        return [pack_bits(codes >> 4, 1), low]
    return [low]


def k_parts(
    kind: str,
    codes: Tensor,
    multiples: list[Tensor],
    floats: list[Tensor],
) -> list[Tensor]:
    """The bytes of blocks of 256 codes, in the order of the type.

    Args:
        kind: the type of the blocks, such as "Q4_K".
        codes: uint8 (out, blocks, 256).
        multiples: the scales and, if any, the minimums, as multiples of their units: uint8 (out,
            blocks, groups). Signed ones have 2^(b−1) added.
        floats: the units as bytes, (out, blocks, 2).
    """
    scales = multiples[0]
    if kind == "Q2_K":
        return [interleaved(torch.cat(multiples, -1), 4, 16), interleaved(codes, 2, 32), *floats]
    if kind == "Q3_K":
        parts = [interleaved(codes >> 2, 1, 32), interleaved(codes & 3, 2, 32)]
        return [*parts, interleaved(scales & 15, 4, 8), interleaved(scales >> 4, 2, 4), *floats]
    if kind == "Q6_K":
        parts = [interleaved(codes & 15, 4, 64), interleaved(codes >> 4, 2, 32)]
        return [*parts, scales ^ 128, *floats]
    firsts = [part[..., :4] | part[..., 4:] >> 4 << 6 for part in multiples]
    lasts = torch.cat([part[..., 4:] & 15 for part in multiples], -1)
    parts = [*floats, *firsts, interleaved(lasts, 4, 4)]
    if kind == "Q5_K":
        parts.append(interleaved(codes >> 4, 1, 32))
    return [*parts, interleaved(codes & 15, 4, 32)]


def interleaved(
    numbers: Tensor,
    bits: int,
    length: int,
) -> Tensor:
    """Pack numbers of few bits. Byte j of a run holds the numbers j, j + length, j + 2·length, …,
    the first of them in the lowest bits.

    Args:
        numbers: uint8 (…, n), n a multiple of length · 8 / bits.
        length: the length of a run in bytes.
    """
    fields = numbers.unflatten(-1, (-1, 8 // bits, length))
    packed = fields[..., 0, :].clone()
    for place in range(1, 8 // bits):
        packed |= fields[..., place, :] << bits * place
    return packed.flatten(-2)
