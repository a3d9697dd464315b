"""llama.cpp's own types of a model, by its library, with an importance matrix or without.

Nothing is built: a release of llama.cpp holds the library, and so does npm's package @node-llama-cpp/linux-x64, whose
sources, with convert_hf_to_gguf.py, are a git bundle in npm's node-llama-cpp of the same version.
"""

from __future__ import annotations

import collections
import ctypes
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf.quants import dequantize
from torch import Tensor, nn

import hasslefree
from harness.engines import converted
from hasslefree.models.blocks import find_blocks
from hasslefree.models.sites import find_sites

# Files of a working folder, which rows share.
DENSE, MATRIX = "dense.gguf", "importance.pt"


class Importance(ctypes.Structure):
    """`llama_model_imatrix_data`: a weight for each input of the tensor of this name."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


class Settings(ctypes.Structure):
    """`llama_model_quantize_params` of llama.cpp 0.5."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("threads", "file_type", "head_type", "embedding_type")),
        *((name, ctypes.c_bool) for name in ("requantize", "head", "only_copy", "pure", "keep_split", "dry_run")),
        ("importance", ctypes.POINTER(Importance)),
        *((name, ctypes.c_void_p) for name in ("metadata", "types", "pruned")),
        ("buffer", ctypes.c_size_t),
    )


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's library and its converter.

    Args:
        folder: of the library. converter: folder of convert_hf_to_gguf.py, which runs in this environment and needs
            sentencepiece. work: where the dense file and the importance matrix are kept.
    """

    folder: Path
    converter: Path
    work: Path

    def opened(self) -> Any:
        """The library, with the backends for this processor."""
        found = [sorted(self.folder.glob(name)) for name in ("libggml-base.*", "libggml.*", "libllama.*")]
        if not all(found):
            raise SystemExit(f"{self.folder} lacks libggml-base, libggml or libllama: give the folder that holds them")
        _, ggml, llama = (ctypes.CDLL(str(files[0]), mode=ctypes.RTLD_GLOBAL) for files in found)
        ggml.ggml_backend_load_all_from_path(os.fsencode(self.folder))
        llama.llama_backend_init()
        llama.llama_model_quantize_default_params.restype = Settings
        return llama

    def dense(self, model: str) -> Path:
        """The file of the dense model, in bfloat16."""
        file = self.work / DENSE
        if not file.exists():
            part = file.with_suffix(".part")
            converted(Path(model), part, str(self.converter), "--outtype", "bf16")
            part.replace(file)
        return file

    def quantised(self, model: str, kind: str, importance: dict[str, Tensor]) -> Path:
        """The file of a model in a type. importance: by the names of llama.cpp's tensors; empty for none."""
        llama = self.opened()
        settings = llama.llama_model_quantize_default_params()
        # Of another version of llama.cpp the fields may have other places.
        if (settings.threads, settings.head, settings.pure, settings.dry_run) != (0, True, False, False):
            raise SystemExit(f"the settings of {self.folder} have another layout than those of llama.cpp 0.5")
        settings.threads, settings.file_type = 1, gguf.LlamaFileType[f"MOSTLY_{kind}"]
        if importance:
            settings.importance = as_table(importance)
        target = self.work / f"{kind}.gguf"
        arguments = os.fsencode(self.dense(model)), os.fsencode(target), ctypes.byref(settings)
        if llama.llama_model_quantize(*arguments):
            raise SystemExit(f"llama.cpp did not write {kind}; its reason is above")
        return target


def as_table(importance: dict[str, Tensor]) -> Any:
    """Entries that end with one without a name. Keep `importance` for as long as they are used."""
    table = (Importance * (len(importance) + 1))()
    for entry, (name, values) in zip(table, importance.items(), strict=False):
        entry.name, entry.size = name.encode(), len(values)
        entry.data = ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return table


def block_layers(model: Any) -> list[str]:
    """The names of the linear layers in the blocks."""
    blocks = find_blocks(model)
    return [
        f"{blocks.prefix(index)}.{name}" for index, block in enumerate(blocks.modules) for name in find_sites(block)
    ]


def tensor_names(model: Any, dense: Path) -> dict[str, str]:
    """By the name of each weight that is a matrix, that of llama.cpp's tensor."""
    architecture = gguf.GGUFReader(dense).fields["general.architecture"].contents()
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, len(find_blocks(model).modules))
    weights = [name for name, weight in model.named_parameters() if weight.ndim == 2]
    return {weight: f"{names.get_name(weight.removesuffix('.weight'))}.weight" for weight in weights}


@torch.no_grad()
def mean_squares(model: Any, segments: Tensor) -> dict[str, Tensor]:
    """Of the inputs of each linear layer in the blocks, over all tokens: layer → (in,), float32."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def add(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + inputs[0].double().square().flatten(0, -2).sum(0)

        return add

    hooks = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in block_layers(model)]
    for segment in segments:
        model.base_model(segment[None], use_cache=False)
    for each in hooks:
        each.remove()
    return {name: (total / segments.numel()).float().contiguous() for name, total in sums.items()}


def importance_matrix(program: LlamaCpp, model: Any, segments: Tensor) -> tuple[dict[str, Tensor], float]:
    """By the names of llama.cpp's tensors, with the CPU seconds that it took. segments: (segments, tokens)."""
    file = program.work / MATRIX
    if not file.exists():
        start = time.process_time()
        found = mean_squares(model, segments)
        torch.save((found, time.process_time() - start), file)
    squares, seconds = torch.load(file)
    names = tensor_names(model, program.work / DENSE)
    return {names[f"{layer}.weight"]: values for layer, values in squares.items()}, seconds


@torch.no_grad()
def read_back(model: Any, dense: Path, coded: Path) -> dict[str, Any]:
    """Put the matrices of a file into the model, and count what they take.

    llama.cpp orders the rows of q and k otherwise: a row is recognised in the dense file by its values.

    Returns:
        "file_bytes" and "tensor_bytes" of the whole file, "bytes_a_weight" of the linear layers in the blocks, and
        "kinds", their weights by llama.cpp's type.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(coded).tensors}
    plain = {tensor.name: tensor for tensor in gguf.GGUFReader(dense).tensors}
    layers = {f"{name}.weight" for name in block_layers(model)}
    stored, kinds = 0, collections.Counter[str]()
    for name, theirs in tensor_names(model, dense).items():
        tensor, weight = tensors[theirs], model.get_parameter(name)
        values = dequantize(plain[theirs].data, plain[theirs].tensor_type)
        places = {row.tobytes(): place for place, row in enumerate(values)}
        order = [places[row.tobytes()] for row in weight.float().numpy()]
        weight.copy_(torch.from_numpy(numpy.array(dequantize(tensor.data, tensor.tensor_type)[order])))
        if name in layers:
            stored += int(tensor.n_bytes)
            kinds[tensor.tensor_type.name] += weight.numel()
    weights = sum(math.prod(model.get_parameter(name).shape) for name in layers)
    return {
        "file_bytes": coded.stat().st_size,
        "tensor_bytes": sum(int(tensor.n_bytes) for tensor in tensors.values()),
        "bytes_a_weight": stored / weights,
        "kinds": dict(kinds),
    }


def exported(program: LlamaCpp, model: str, folder: str) -> dict[str, Any]:
    """What the GGUF file of a compressed folder takes. model: the dense one."""
    file = program.work / "exported.gguf"
    hasslefree.export(folder, file, "gguf", template=program.dense(model), overwrite=True)
    tensors = gguf.GGUFReader(file).tensors
    kinds = collections.Counter[str]()
    for tensor in tensors:
        kinds[tensor.tensor_type.name] += int(tensor.n_elements)
    stored = sum(int(tensor.n_bytes) for tensor in tensors)
    return {"file_bytes": file.stat().st_size, "tensor_bytes": stored, "kinds": dict(kinds)}


def row(program: LlamaCpp, name: str, model: Any, segments: Tensor, kind: str, matrix: bool) -> dict[str, Any]:
    """Quantise, put the weights into the dense model in float32, and say what the file takes.

    Args:
        name: the folder of the model. segments: that the matrix is of, (segments, tokens).
    """
    dense = program.dense(name)
    importance, seconds = importance_matrix(program, model, segments) if matrix else ({}, 0.0)
    start = time.process_time()
    coded = program.quantised(name, kind, importance)
    cpu_seconds = round(time.process_time() - start + seconds, 1)
    found = read_back(model, dense, coded)
    coded.unlink()
    return {"cpu_seconds": cpu_seconds, **found}
