"""A loaded model: resident memory of wide layers packed and dense, and tokens a second of `generate`.

    python benchmarks/loaded.py [--blocks 2] [--new-tokens 128]

Memory: a random Llama whose blocks have the shapes of Llama-3-8B's, in bfloat16, 2:4 + rank 64; each form is loaded in
a process of its own, and counts by what the resident set grew. Speed: the embedded model, in float32, dense and
compressed (2:4 + rank 16), one text at a time; the ways take turns, medians.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import machine, write
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hasslefree
from hasslefree.checkpoints.entries import entry_of
from hasslefree.checkpoints.transformers_plugin import HasslefreeConfig
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import SemiStructured
from hasslefree.core.protocols import Decomposition
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.models.blocks import find_blocks, replace_module
from hasslefree.models.linear import SparseLowRankLinear

ROOT = Path(__file__).parents[1]
RANK = 64
REPEATS = 7


def write_models(folder: Path, blocks: int) -> None:
    """The same random Llama twice: folder/dense and folder/packed."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=blocks,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "dense")
    entries = {}
    decoder = find_blocks(model)
    for index, block in enumerate(decoder.modules):
        for name, layer in list(block.named_modules()):
            if isinstance(layer, torch.nn.Linear):
                packed = random_layer(layer.weight.detach())
                full = f"{decoder.prefix(index)}.{name}"
                replace_module(model, full, packed)
                entries[full] = entry_of(packed)
    model.config.quantization_config = HasslefreeConfig(entries)
    model.save_pretrained(folder / "packed")


def random_layer(weight: torch.Tensor) -> SparseLowRankLinear:
    """Magnitude's S of a weight, and factors of rank 64 that hold anything."""
    sparse = weight * SemiStructured(2, 4).mask(weight.square())
    factors = LowRank(weight[:, :RANK].clone(), weight[:RANK].clone())
    return SparseLowRankLinear.from_decomposition(Decomposition(sparse, factors, 0.0, 0.0, ()), None, "2:4")


def resident() -> int:
    """Bytes of the resident set, after what was freed has gone back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def load_and_measure(folder: Path) -> None:
    """Print by how much this process has grown once the model is loaded and a token computed.

    The weights are mapped from the file, and come into memory when they are read. What the first load and the first
    product bring with them, compiled kernels among it, is there before.
    """
    AutoModelForCausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        random_layer(torch.randn(256, 256).bfloat16())(torch.randn(1, 256).bfloat16())
        before = resident()
        model = AutoModelForCausalLM.from_pretrained(folder)
        model(torch.ones(1, 1, dtype=torch.long))
        print(resident() - before)


def memory(blocks: int) -> dict[str, Any]:
    """MB of each form, and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        write_models(Path(name), blocks)
        found: dict[str, Any] = {"blocks": blocks}
        for form in ("dense", "packed"):
            command = [sys.executable, __file__, "--load", f"{name}/{form}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[form] = round(int(done.stdout.split()[-1]) / 1e6, 1)
        found["packed_over_dense"] = found["packed"] / found["dense"]
    return found


def generation(new_tokens: int) -> list[dict[str, Any]]:
    """Tokens a second of the embedded model, by each way."""
    with tempfile.TemporaryDirectory() as name:
        recipe = hasslefree.Recipe(
            rank=16, calibration=str(CALIBRATION), samples=16, seqlen=256, dtype="float32", method="eora"
        )
        hasslefree.compress(MODEL, f"{name}/out", recipe)
        models = {"dense": AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)}
        for way in ("dense", "unpacked", "numba"):
            model = AutoModelForCausalLM.from_pretrained(f"{name}/out")
            hasslefree.use_way(model, way)
            models[f"2:4 + rank 16, {way}"] = model
    seconds: dict[str, list[float]] = {key: [] for key in models}
    prompt = torch.arange(3, 19).unsqueeze(0)
    for repeat in range(REPEATS + 1):
        for key, model in models.items():
            start = time.perf_counter()
            model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
            if repeat:  # the first warms up
                seconds[key].append(time.perf_counter() - start)
    base = statistics.median(seconds["dense"])
    return [
        {"model": key, "tokens_a_second": round(new_tokens / m, 1), "time_over_dense": round(m / base, 3)}
        for key, times in seconds.items()
        for m in [statistics.median(times)]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "loaded.json")
    parser.add_argument("--load", type=Path, help="one load, in this process")
    args = parser.parse_args()
    if args.load:
        load_and_measure(args.load)
        return
    content = {"machine": machine(), "rank": RANK, "memory": memory(args.blocks)}
    print(content["memory"], flush=True)
    content["generate"] = generation(args.new_tokens)
    for row in content["generate"]:
        print(row)
    write(args.output, content)


if __name__ == "__main__":
    main()
