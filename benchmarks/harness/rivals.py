"""Weights of a model as another program quantises them, in an environment that need not hold hasslefree.

    PYTHON benchmarks/harness/rivals.py PROGRAM FOLDER WORK < REQUEST > ANSWER

REQUEST is {"settings": {…}, "segments": [[token id, …], …] to calibrate on, "layers": {name of a weight: [out, in]}}.
ANSWER is {"versions": {package: version}, "bytes": of these weights as the program stores them, "file_bytes": of all
tensors, "kinds": {kind of storage: weights}, "seconds": of the processor}, and WORK/dequantised.safetensors holds every
one of these weights, in float32 and under its name in FOLDER.
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

# Weights by name; and their bytes, those of the file, and how many of them are stored in which way.
Quantised = tuple[dict[str, Tensor], dict[str, Any]]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


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
    whole = sum(tensor.nbytes for tensor in stored.values())
    return weights, {"bytes": size, "file_bytes": whole, "kinds": dict(kinds)}


# The program, and the packages whose versions matter.
PROGRAMS: dict[str, tuple[Callable[[Path, Path, dict[str, Any]], Quantised], tuple[str, ...]]] = {
    "llm-compressor": (llm_compressor, ("llmcompressor", "compressed-tensors", "torch", "transformers")),
    "AutoRound": (auto_round, ("auto-round", "torch", "transformers")),
}


def main() -> None:
    program, folder, work, request = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.load(sys.stdin)
    run, packages = PROGRAMS[program]
    start = time.process_time()
    weights, sizes = run(folder, work, request)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, work / "dequantised.safetensors")
    print(
        json.dumps(
            {
                "versions": {name: importlib.metadata.version(name) for name in packages},
                **sizes,
                "cpu_seconds": round(time.process_time() - start, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
