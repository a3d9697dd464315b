"""Weights of a model as another program quantises them, in an environment that need not hold hasslefree.

    PYTHON benchmarks/harness/rivals.py PROGRAM FOLDER WORK < REQUEST > ANSWER

REQUEST is {"settings": {…}, "segments": [[token id, …], …] to calibrate on, "converter": folder of llama.cpp's
scripts, "layers": {name of a weight: [out, in]}}. ANSWER is {"versions": {package: version}, "bytes": of these weights
as the program stores them, "kinds": {kind of storage: weights}, "seconds": of the processor}, and
WORK/dequantised.safetensors holds every one of these weights, in float32 and under its name in FOLDER.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# Weights by name, their bytes, and how many of them are stored in which way.
Quantised = tuple[dict[str, Tensor], int, dict[str, int]]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def llama_cpp(folder: Path, work: Path, request: dict[str, Any]) -> Quantised:
    """As llama.cpp quantises a GGUF file in bfloat16, without an importance matrix. settings: "type"."""
    import numpy
    from engines import converted
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from gguf_types import quantised

    plain = Path(converted(folder, work / "plain.gguf", request["converter"], "--outtype", "bf16"))
    coded = {
        tensor.name: tensor
        for tensor in GGUFReader(quantised(plain, work / "coded.gguf", request["settings"]["type"])).tensors
    }
    # Names and the order of rows (of q and k) differ: a tensor is recognised by the values of its first column.
    values = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        for tensor in GGUFReader(plain).tensors
        if len(tensor.shape) == 2
    }
    names = {fingerprint(value): name for name, value in values.items()}
    weights, size, kinds = {}, 0, collections.Counter[str]()
    dense = tensors_of(folder)
    for layer in request["layers"]:
        target = dense[layer].float()
        tensor = coded[names[fingerprint(target)]]
        rows = {row.tobytes(): index for index, row in enumerate(values[tensor.name].numpy())}
        order = [rows[row.tobytes()] for row in target.numpy()]
        weights[layer] = torch.from_numpy(numpy.array(dequantize(tensor.data, tensor.tensor_type)))[order]
        size += int(tensor.n_bytes)
        kinds[tensor.tensor_type.name] += target.numel()
    return weights, size, dict(kinds)


def fingerprint(weight: Tensor) -> bytes:
    """The shape and the first column of a matrix (out, in), whatever the order of its rows."""
    return str(tuple(weight.shape)).encode() + weight[:, 0].sort().values.numpy().tobytes()


def llm_compressor(folder: Path, work: Path, request: dict[str, Any]) -> Quantised:
    """As llm-compressor's GPTQ quantises all linear layers but the head. settings: of the weights."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    segments = request["segments"]
    scheme = {"targets": ["Linear"], "weights": {"type": "int", "strategy": "group", **request["settings"]}}
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
        dataset=Dataset.from_dict({"input_ids": segments, "attention_mask": [[1] * len(ids) for ids in segments]}),
        num_calibration_samples=len(segments),
        max_seq_length=len(segments[0]),
        output_dir=str(work / "coded"),
    )
    stored = tensors_of(work / "coded")
    plain = AutoModelForCausalLM.from_pretrained(
        work / "coded", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    ).state_dict()
    return read_back(stored, plain, request)


def auto_round(folder: Path, work: Path, request: dict[str, Any]) -> Quantised:
    """As AutoRound quantises the linear layers of the blocks. settings: of AutoRound."""
    from auto_round import AutoRound

    segments = torch.tensor(request["segments"])
    batches = [{"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])} for ids in segments]
    coder = AutoRound(
        str(folder), dataset=batches, nsamples=len(segments), seqlen=segments.shape[1], device_map="cpu",
        **request["settings"],
    )  # fmt: skip
    _, folders = coder.quantize_and_save(str(work / "coded"), format="auto_gptq,fake", inplace=False)
    stored, plain = (tensors_of(Path(each)) for each in folders)
    return read_back(stored, plain, request)


def read_back(stored: dict[str, Tensor], plain: dict[str, Tensor], request: dict[str, Any]) -> Quantised:
    """Weights from a checkpoint that keeps a layer in several tensors, and from its dequantised form."""
    weights, size, kinds = {}, 0, collections.Counter[str]()
    for layer, shape in request["layers"].items():
        # Not the group of each column, which the layout of GPTQ lists even where the columns are in order.
        parts = {
            name: part
            for name, part in stored.items()
            if name.startswith(layer.removesuffix("weight")) and not name.endswith(".g_idx")
        }
        weights[layer] = plain[layer].float()
        size += sum(part.nbytes for part in parts.values())
        kinds[" + ".join(sorted(name.rpartition(".")[2] for name in parts))] += math.prod(shape)
    return weights, size, dict(kinds)


# The program, and the packages whose versions matter.
PROGRAMS: dict[str, tuple[Callable[[Path, Path, dict[str, Any]], Quantised], tuple[str, ...]]] = {
    "llama.cpp": (llama_cpp, ("llama-cpp-python", "gguf")),
    "llm-compressor": (llm_compressor, ("llmcompressor", "compressed-tensors", "torch", "transformers")),
    "AutoRound": (auto_round, ("auto-round", "torch", "transformers")),
}


def main() -> None:
    program, folder, work, request = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.load(sys.stdin)
    run, packages = PROGRAMS[program]
    start = time.process_time()
    weights, size, kinds = run(folder, work, request)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, work / "dequantised.safetensors")
    print(
        json.dumps(
            {
                "versions": {name: importlib.metadata.version(name) for name in packages},
                "bytes": size,
                "kinds": kinds,
                "cpu_seconds": round(time.process_time() - start, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
