"""A GGUF file whose blocks hold the codes of S, and L as its adapter; the rest is a template's, a
GGUF file of W.
"""

import re
import shlex
from collections import Counter
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
from hasslefree.exports.formats import Factors, Target, factors_of, summed
from hasslefree.exports.template import Place, Template, find_matrices, find_vector
from hasslefree.models.sites import find_sites
from hasslefree.packed.storage import unpack_codes
from hasslefree.recipe.engines import block_of

# The zero of the codes of a block without a minimum.
ZEROS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}
# Metadata that the writer adds itself.
REPLACED = ("general.architecture", "general.quantization_version", "general.file_type")
Layers = dict[str, Coded]
# The ending of a destination that is a file, and the beginning of a Modelfile.
SUFFIX = ".gguf"
FROM = "FROM ./"


@dataclass(frozen=True)
class Files:
    """The files of an export: S, L unless every rank is 0, and both for Ollama."""

    model: Path
    adapter: Path
    modelfile: Path

    @classmethod
    def of(cls, destination: Path) -> "Files":
        """Those in a folder, or beside a file whose name ends with .gguf."""
        if destination.suffix != SUFFIX:
            names = ("model.gguf", "adapter.gguf", "Modelfile")
            return cls(*[destination / name for name in names])
        stem = destination.stem
        names = (destination.name, f"{stem}-adapter.gguf", f"{stem}.Modelfile")
        return cls(*[destination.with_name(name) for name in names])

    def within(self, folder: Path) -> "Files":
        """Files of the same names in another folder."""
        return Files(*[folder / file.name for file in (self.model, self.adapter, self.modelfile)])

    @property
    def starts(self) -> dict[Path, bytes]:
        """What each file begins with."""
        return {self.model: b"GGUF", self.adapter: b"GGUF", self.modelfile: FROM.encode()}

    @property
    def commands(self) -> str:
        """The commands that run the files that exist, in llama.cpp and in Ollama."""
        words = ["llama-cli", "-m", str(self.model)]
        if self.adapter.exists():
            words += ["--lora", str(self.adapter)]
        ollama = ["ollama", "create", "NAME", "-f", str(self.modelfile)]
        return f"{shlex.join(words)}\n{shlex.join(ollama)}"


def write_gguf(model: PreTrainedModel, target: Target) -> dict[str, Path]:
    """Write S, L unless every rank is 0, and a Modelfile."""
    files = Files.of(target.final).within(target.folder)
    template = target.template
    assert template is not None
    layers = check_layers(model, "llama.cpp")
    for name, coded in layers.items():
        for numbers in (coded.scale, coded.second):
            if not torch.equal(numbers.half().double(), numbers.double()):
                raise ModelError(
                    f"layer {name} has quantisation scales or offsets that are too small or too"
                    " large for GGUF's float16; compress again with"
                    f" {option('leave_dense', [name])}, or export with {option('to', 'dense')}"
                )
    places, changed = find_places(model, layers, template)
    write_model(layers, places, changed, template, files.model)
    modelfile = f"{FROM}{files.model.name}\n"
    factors = factors_of(model)
    if factors:
        write_adapter(factors, places, template, files.adapter)
        modelfile += f"ADAPTER ./{files.adapter.name}\n"
    files.modelfile.write_text(modelfile, encoding="utf-8")
    return {"gguf": target.folder}


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
    shapes: dict[str, tuple[int, ...]] = {}
    for name, coded in layers.items():
        shapes[name] = coded.layer.spec.shape
    for name, tensor in plain.items():
        if tensor.ndim == 2:
            shapes[name] = tensor.shape

    def values(name: str) -> Tensor:
        return summed(layers[name].layer) if name in layers else plain[name]

    places = find_matrices(template, shapes, values)
    for name in shapes.keys() - layers.keys():
        place = places[name]
        if not template.holds(place.name, place.ordered(plain[name])):
            raise template.error(f"is of another model: {place.name} has other values than {name}")
    # The names of a block begin alike: model.layers.0. here, and blk.0. there.
    blocks = {begin(name): begin(place.name) for name, place in places.items() if begin(name)}
    record = read_record(Path(str(model.name_or_path)))
    trained = record.predictions is not None  # vectors of blocks too
    changed: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if tensor.ndim != 2:
            moved = trained and begin(name) in blocks
            changed |= find_vector(template, name, blocks.get(begin(name), ""), tensor, moved)
    for name, coded in layers.items():
        bias = coded.layer.bias
        if bias is not None:
            place = places[name]
            theirs = place.name.removesuffix("weight") + "bias"
            ours = place.ordered(bias.detach())
            changed |= find_vector(template, f"{name}.bias", theirs, ours, trained)
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

    ours = {places[name].name: name for name in layers}
    types = {theirs: str(block_of(layers[name].grid)) for theirs, name in ours.items()}
    with written(path, template) as writer:
        for field in template.reader.fields.values():
            if field.name not in REPLACED and not field.name.startswith("GGUF."):
                writer.add_key_value(
                    field.name, field.contents(), field.types[0], sub_type=field.types[-1]
                )
        writer.add_quantization_version(2)
        usual, _ = Counter(types.values()).most_common(1)[0]
        writer.add_file_type(LlamaFileType[f"MOSTLY_{usual}"])
        for name, tensor in template.tensors.items():
            data = tensor.data
            kind = tensor.tensor_type
            if name in ours:
                layer = ours[name]
                data = places[layer].ordered(blocks_of(layers[layer])).numpy()
                kind = GGMLQuantizationType[types[name]]
            elif name in changed:
                data = quantize(changed[name].numpy(), kind)
            writer.add_tensor(name, data, raw_dtype=kind)


def write_adapter(
    factors: Factors,
    places: dict[str, Place],
    template: Template,
    path: Path,
) -> None:
    """u and v, scaled by 1: llama.cpp scales by alpha over the rank of the layer, and by 1 if alpha
    is 0.
    """
    ranks = {len(v) for _, v in factors.values()}
    with written(path, template) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(ranks.pop()) if len(ranks) == 1 else 0.0)
        for name, (u, v) in factors.items():
            place = places[name]
            writer.add_tensor(f"{place.name}.lora_a", v.float().contiguous().numpy())
            writer.add_tensor(f"{place.name}.lora_b", place.ordered(u.float()).numpy())


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


def blocks_of(coded: Coded) -> Tensor:
    """S in the blocks of its type: (out, bytes) uint8.

    A block has the scale, the minimum if any, the fifth bits of the codes if any, and the codes: 32
    bytes, or 16 with the low four bits of codes j and j + 16 in byte j.
    """
    grid = coded.grid
    kind = str(block_of(grid))
    words = coded.layer.tensors()["weight_packed"]
    codes = unpack_codes(words, grid.bits, coded.layer.in_features)
    codes = codes.view(len(codes), -1, 32).short()
    numbers = [coded.scale]
    if grid.offset:
        numbers.append(coded.second)
    else:
        codes += (ZEROS[kind] - coded.second).short().unsqueeze(-1)
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
