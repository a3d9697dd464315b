"""Memory and time of every method on one layer, and of whole compressions.

    python benchmarks/memory.py layer [--shapes 1024x1024 …] [--methods joint …] [--device cuda]
    python benchmarks/memory.py compression [--blocks 1 2] [--processes 1] [--rounds 3]

layer: peak memory beside W and H, of what depends on H alone, and of the layer itself. Each method and shape has a
process of its own. On the CPU the peak of the resident set counts, less what it was before; on CUDA, torch's own count.
W is in bfloat16, H in float32, the pattern 2:4 (half of the channels where a method removes whole ones), or the one
that a row names. Few rounds take the same memory as many, but for the kernels that `joint` keeps for the next layer
with the same input. Rows that the output file already holds stay.

compression: a bf16 checkpoint that is written here with random weights, the shapes of Llama-3.2-1B (vocabulary, width
2048, MLP 8192) and so many blocks, 8 × 128 tokens of the demo's calibration text, 2:4 + rank 64, joint alone. Each run
is a process of its own, `hasslefree compress`; its peak is the largest resident set that the kernel saw. With several
processes, under torchrun, it is that of the largest one, and each has one thread.

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
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from harness.layers import METHODS, UNMEASURED, default_pattern, short, solved
from harness.memory import Peak, command_peak, idle_mb, planned_mb
from harness.models import CALIBRATION, MODEL
from harness.record import RESULTS, machine, resumed, write
from hasslefree import Budget, Gram, Prune, Recipe

NAMES = [name for name in METHODS if name not in UNMEASURED]
SHAPES = ["1024x1024", "2048x512", "512x2048"]
LLAMA = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip


def phases(method: Any, weight: torch.Tensor, gram: Gram, pattern: str, rank: int, device: str) -> dict[str, Any]:
    """Bytes at most while what depends on H is made, of what is kept of it, and at most while the layer is solved."""
    shape = (weight.shape[0], weight.shape[1])
    resolved, _ = Budget(pattern, rank, sparsity=None if ":" in pattern else 0.5).resolve(*shape)
    start, peak = time.perf_counter(), Peak(device)
    prepared = method.prepare(gram)
    found = {"prepare": peak.reached(), "kept": peak.now() - peak.before}
    solving = Peak(device)
    solved(weight, gram, method, prepared, resolved, rank)
    found["solve"] = solving.reached()
    return {
        **found,
        "peak": max(found["prepare"], found["kept"] + found["solve"]),
        "seconds": time.perf_counter() - start,
    }


def one(name: str, out: int, width: int, pattern: str, rank: int, rounds: int, device: str) -> None:
    """Measure in this process, after a small layer that loads what torch loads on first use; print JSON."""
    method = short(name, rounds)
    for o, n in ((64, 128), (out, width)):
        weight = torch.randn(o, n).bfloat16()
        x = torch.randn(64, n)
        matrix = torch.diag(1 + torch.rand(n)).addmm_(x.T, x, alpha=1 / 64)
        gram = Gram(matrix.to(device), 64, x.mean(0).to(device))
        found = phases(method, weight.to(device), gram, pattern, min(rank, o), device)
    print(json.dumps(found))


def layer(args: argparse.Namespace) -> None:
    if args.one:
        name, out, width, pattern = args.one
        one(name, int(out), int(width), pattern, args.rank, args.rounds, args.device)
        return
    content = resumed(args.output, {"rank": args.rank, "rounds": args.rounds, "device": args.device}, "rows")
    # Every large array comes from the system and goes back to it at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    jobs = [(n, s, p) for n in args.methods for s in args.shapes for p in args.patterns or [default_pattern(n)]]
    for name, shape, pattern in jobs:
        key = f"{name} {shape} {pattern}"
        if key in content["rows"]:
            continue
        out, width = map(int, shape.split("x"))
        rank = 0 if isinstance(METHODS[name], Prune) else args.rank
        command = [sys.executable, __file__, "layer", "--one", name, str(out), str(width), pattern]
        command += ["--rank", str(rank), "--rounds", str(args.rounds), "--device", args.device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        row = {"method": name, "out": out, "in": width, "pattern": pattern, "rank": rank}
        content["rows"][key] = {**row, **json.loads(done.stdout.splitlines()[-1])}
        print(content["rows"][key], flush=True)
        write(args.output, content)


def write_model(folder: Path, blocks: int) -> None:
    """Random weights, a tensor at a time, in one file a block; the tokenizer is the demo's."""
    config = LlamaConfig(**LLAMA, num_hidden_layers=blocks, dtype="bfloat16")
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


def compression(args: argparse.Namespace) -> None:
    # Rows of an earlier run with the same rounds stay.
    before = json.loads(args.output.read_text()) if args.output.exists() else {}
    rows = before["rows"] if before.get("rounds") == args.rounds else []
    content = {"machine": machine(), "rounds": args.rounds, "idle_mb": idle_mb(), "rows": rows}
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        for blocks in args.blocks:
            model = Path(scratch) / f"{blocks}"
            write_model(model, blocks)
            for processes in args.processes:
                # The same threads for each process, so that two are compared with one.
                command = compress_command(model, Path(scratch) / f"out{blocks}-{processes}", processes, args.rounds)
                found = command_peak(command, threads=1)
                recipe = Recipe(rank=64, effort="fast", rounds=args.rounds, samples=8, seqlen=128)
                planned = planned_mb(model, recipe, processes)
                ratio = {"planned_mb": planned, "planned_over_peak": round(planned / found["peak_mb"], 2)}
                content["rows"].append({"blocks": blocks, "processes": processes, **found, **ratio})
                print(content["rows"][-1], flush=True)
                write(args.output, content)


def compress_command(model: Path, out: Path, processes: int, rounds: int) -> list[str]:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    return [sys.executable, *start, "-m", "hasslefree", "compress", str(model), str(out), "--rank", "64",
            "--effort", "fast", "--rounds", str(rounds), "--calibration", str(CALIBRATION), "--samples", "8",
            "--seqlen", "128", "--device", "cpu"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_layer = commands.add_parser("layer")
    of_layer.set_defaults(run=layer)
    of_layer.add_argument("--shapes", nargs="+", default=SHAPES, help="out x in")
    of_layer.add_argument("--methods", nargs="+", default=NAMES, choices=list(METHODS))
    of_layer.add_argument("--patterns", nargs="+", help="default: 2:4, or structured for whole channels")
    of_layer.add_argument("--rank", type=int, default=64)
    of_layer.add_argument("--rounds", type=int, default=2)
    of_layer.add_argument("--device", default="cpu")
    of_layer.add_argument("--output", type=Path, default=RESULTS / "workspace.json")
    of_layer.add_argument("--one", nargs=4, help="name, out, in and pattern, in this process")
    whole = commands.add_parser("compression")
    whole.set_defaults(run=compression)
    whole.add_argument("--blocks", type=int, nargs="+", default=[1, 2])
    whole.add_argument("--processes", type=int, nargs="+", default=[1])
    whole.add_argument("--rounds", type=int, default=3)
    whole.add_argument("--scratch", type=Path, help="where models are written (default: the system's)")
    whole.add_argument("--output", type=Path, default=RESULTS / "streaming.json")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
