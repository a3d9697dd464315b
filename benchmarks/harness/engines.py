"""Greedy tokens of a plain checkpoint in another engine, in an environment that need not hold hasslefree.

    PYTHON benchmarks/harness/engines.py ENGINE FOLDER WORK < REQUEST > ANSWER

REQUEST is {"prompts": [[token id, …], …], "count": new tokens of each, "converter": folder of llama.cpp's scripts}, and
ANSWER {"versions": {package: version}, "tokens": [[token id, …], …], "bytes": of the converted weights}. Everything is
computed in float32 on the CPU. FOLDER is an export of hasslefree: with adapter_config.json in it, that of PEFT.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tokens = list[list[int]]


def transformers_tokens(model: Any, request: dict[str, Any]) -> Tokens:
    """By `generate` of transformers, which Optimum's models have too."""
    import torch

    found = []
    for prompt in request["prompts"]:
        ids = torch.tensor([prompt])
        endless = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": request["count"]}
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **endless)
        found.append(whole[0, len(prompt) :].tolist())
    return found


def onnx(folder: Path, work: Path, request: dict[str, Any]) -> Tokens:
    from optimum.onnxruntime import ORTModelForCausalLM

    model = ORTModelForCausalLM.from_pretrained(folder, export=True)
    model.save_pretrained(work)
    return transformers_tokens(model, request)


def openvino(folder: Path, work: Path, request: dict[str, Any]) -> Tokens:
    from optimum.intel import OVModelForCausalLM

    # Without the hint, a processor with bfloat16 computes in it.
    precise = {"INFERENCE_PRECISION_HINT": "f32"}
    model = OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=False, ov_config=precise)
    model.save_pretrained(work)
    return transformers_tokens(model, request)


def mlx(folder: Path, work: Path, request: dict[str, Any]) -> Tokens:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    mx.set_default_device(mx.cpu)
    model, _ = load(str(folder))
    model.set_dtype(mx.float32)
    mx.save_safetensors(str(work / "model.safetensors"), dict(tree_flatten(model.parameters())))
    found = []
    for prompt in request["prompts"]:
        cache, given, new = make_prompt_cache(model), prompt, []
        for _ in range(request["count"]):
            given = [int(mx.argmax(model(mx.array([given]), cache=cache)[0, -1]))]
            new += given
        found.append(new)
    return found


def converted(source: Path, target: Path, converter: str, *options: str, script: str = "convert_hf_to_gguf.py") -> str:
    """Write a GGUF file with a script of llama.cpp. Returns its path."""
    command = [sys.executable, str(Path(converter) / script), str(source), "--outfile", str(target), *options]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return str(target)


def llama_cpp(folder: Path, work: Path, request: dict[str, Any]) -> Tokens:
    import numpy
    from llama_cpp import Llama

    adapter, converter = None, request["converter"]
    if (folder / "adapter_config.json").exists():
        options = ("--outtype", "f32", "--base", str(folder / "base"))
        adapter = converted(folder, work / "adapter.gguf", converter, *options, script="convert_lora_to_gguf.py")
        # llama.cpp scales every layer by one alpha over the layer's own rank, and by 1 where alpha is 0.
        unscaled = ["gguf.scripts.gguf_set_metadata", adapter, "adapter.lora.alpha", "0", "--force"]
        subprocess.run([sys.executable, "-m", *unscaled], check=True, stdout=sys.stderr)
        folder = folder / "base"
    file = converted(folder, work / "model.gguf", converter, "--outtype", "f32")
    model = Llama(file, lora_path=adapter, n_ctx=512, logits_all=False, verbose=False)
    found = []
    for prompt in request["prompts"]:
        model.reset()
        given, new = prompt, []
        for _ in range(request["count"]):
            model.eval(given)
            given = [int(numpy.argmax(model._ctx.get_logits_ith(-1)[: model.n_vocab()]))]
            new += given
        found.append(new)
    return found


# The engine, and the packages whose versions matter.
ENGINES: dict[str, tuple[Callable[[Path, Path, dict[str, Any]], Tokens], tuple[str, ...]]] = {
    "llama.cpp": (llama_cpp, ("llama-cpp-python", "gguf")),
    "MLX": (mlx, ("mlx", "mlx-lm", "transformers")),
    "ONNX Runtime": (onnx, ("optimum-onnx", "onnxruntime", "transformers")),
    "OpenVINO": (openvino, ("optimum-intel", "openvino", "transformers")),
}


def main() -> None:
    engine, folder, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    run, packages = ENGINES[engine]
    tokens = run(folder, work, json.load(sys.stdin))
    weights = [
        file for file in work.rglob("*") if file.suffix in (".gguf", ".safetensors", ".onnx", ".onnx_data", ".bin")
    ]
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps({"versions": versions, "tokens": tokens, "bytes": sum(file.stat().st_size for file in weights)}))


if __name__ == "__main__":
    main()
