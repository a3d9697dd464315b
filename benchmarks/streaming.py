"""Peak memory and time of a whole compression, for models that are written here with random weights.

    python benchmarks/streaming.py [--blocks 4 8] [--processes 1] [--rounds 10]

A bf16 checkpoint with the shapes of Llama-3.2-1B (vocabulary, width 2048, MLP 8192) and so many blocks, 8 × 128 tokens
of the demo's calibration text, 2:4 + rank 64, joint without levers. Each run is a process of its own, `hasslefree
compress`; its peak is the largest resident set that the kernel saw. With several processes, under torchrun, it is that
of the largest one, and each has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import machine, write
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.footprint import plan_model

ROOT = Path(__file__).parents[1]
SHAPES = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip


def write_model(folder: Path, blocks: int) -> None:
    """Random weights, a tensor at a time, in one file a block; the tokenizer is the demo's."""
    config = LlamaConfig(**SHAPES, num_hidden_layers=blocks, dtype="bfloat16")
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    state.pop("lm_head.weight")
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        scale = 0.02 if tensor.ndim == 2 else 0.0
        weight = torch.randn(tensor.shape, generator=generator).mul_(scale).add_(0.0 if scale else 1.0)
        part = name.split(".")[2] if ".layers." in name else "rest"
        parts.setdefault(part, {})[name] = weight.bfloat16()
    folder.mkdir()
    where = {}
    for part, tensors in parts.items():
        save_file(tensors, folder / f"model-{part}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, f"model-{part}.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    for file in Path(MODEL).glob("tokenizer*"):
        shutil.copy(file, folder)


def run(model: Path, out: Path, processes: int, threads: int, rounds: int) -> dict[str, Any]:
    """One compression. Peak memory in MB, seconds of wall clock."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *start, "-m", "hasslefree", "compress", str(model), str(out), "--rank", "64",
               "--effort", "fast", "--rounds", str(rounds), "--calibration", str(CALIBRATION), "--samples", "8",
               "--seqlen", "128", "--device", "cpu"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    began = time.perf_counter()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    # wait4 gives the peak of this child, and of the children that it has waited for.
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return {"peak_mb": usage.ru_maxrss // 1024, "seconds": round(time.perf_counter() - began, 1)}


def planned_peak(model: Path, rounds: int, processes: int) -> int:
    """What `hasslefree plan` says of the same run: bytes of RAM."""
    recipe = Recipe(rank=64, effort="fast", rounds=rounds, samples=8, seqlen=128)
    return plan_model(str(model), recipe, torch.device("cpu"), "device", processes).ram_peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scratch", type=Path, help="where models are written (default: the system's)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "streaming.json")
    arguments = parser.parse_args()
    script = "import hasslefree.compress, resource as r; print(r.getrusage(r.RUSAGE_SELF).ru_maxrss)"
    idle = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # Rows of an earlier run with the same rounds stay.
    before = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    rows = before["rows"] if before.get("rounds") == arguments.rounds else []
    content = {"machine": machine(), "rounds": arguments.rounds, "idle_mb": int(idle.stdout) // 1024, "rows": rows}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for blocks in arguments.blocks:
            model = Path(scratch) / f"{blocks}"
            write_model(model, blocks)
            for processes in arguments.processes:
                # The same threads for each process, so that two are compared with one.
                found = run(model, Path(scratch) / f"out{blocks}-{processes}", processes, 1, arguments.rounds)
                planned = {"planned_mb": planned_peak(model, arguments.rounds, processes) // 2**20}
                content["rows"].append({"blocks": blocks, "processes": processes, **found, **planned})
                print(content["rows"][-1], flush=True)
                write(arguments.output, content)


if __name__ == "__main__":
    main()
