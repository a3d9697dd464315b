"""How long a compression would take on one H100: the real code on a fake GPU, every operation by a roofline.

    python benchmarks/gpu_simulated.py [--efforts fast balanced best] [--json]

Shapes of Llama-3-8B, 2:4 + rank 64, 128 × 2,048 tokens. Models of two and of three blocks run, and what the third adds
is counted for the other 29. Tensors have shapes alone (`harness.fake_cuda`), so that it takes minutes on a laptop; what
the code reads of them is guessed (`harness.guesses`), and seconds are those of `harness.roofline`. Nothing ran on a
GPU, and what the CPU and the disk do beside it is not counted.

--json prints one line: minutes of each effort, `device_mixes`, and the peak of memory over what `hasslefree plan` says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hasslefree
from harness.fake_cuda import CudaTensor, FakeGpu, fake_cuda
from harness.guesses import Guesses
from harness.record import RESULTS, resumed, write
from harness.roofline import BANDWIDTH, RATES, Roofline
from hasslefree.pipeline import compress as driver
from hasslefree.planning.memory import LIBRARIES, Setup, estimate

BLOCKS = 32
SHAPES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
SEGMENTS = (128, 2048)


def model(gpu: FakeGpu, blocks: int) -> LlamaForCausalLM:
    """Llama-3-8B with so many blocks, of shapes alone, in bfloat16 on the fake GPU."""
    with torch.device("meta"):
        made = LlamaForCausalLM(LlamaConfig(**SHAPES, num_hidden_layers=blocks)).to(torch.bfloat16)
    for module in made.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            on_gpu = CudaTensor(torch.empty_like(tensor, device="meta"), torch.device("cuda", 0))
            gpu.living(on_gpu)
            if isinstance(tensor, torch.nn.Parameter):
                module.register_parameter(name, torch.nn.Parameter(on_gpu, requires_grad=False))
            else:
                setattr(module, name, on_gpu)
    return made.eval()


def simulated(effort: str, blocks: int) -> dict[str, Any]:
    """Seconds of a compression by kind of work, its launches, and its peak of memory over the estimate."""
    setups: list[Setup] = []
    recipe = hasslefree.Recipe(pattern="2:4", rank=64, effort=effort)
    with (
        fake_cuda("meta", capability=(9, 0)) as gpu,
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(driver, "check_memory", lambda setup: setups.append(setup) or setup),
    ):
        gpu.instead |= Guesses().operations()
        roofline = Roofline()
        gpu.listeners.append(roofline)
        tokens = torch.zeros(SEGMENTS, dtype=torch.int64)
        hasslefree.compress(model(gpu, blocks), f"{folder}/out", recipe, segments=tokens)
        peak = gpu.peak / (estimate(setups[-1]).device_peak - LIBRARIES)
    kinds = {work: dict(kinds) for work, kinds in roofline.seconds.items()}
    return {"seconds": kinds, "launches": roofline.launches, "peak_over_estimate": round(peak, 3)}


def whole(two: dict[str, Any], three: dict[str, Any]) -> dict[str, Any]:
    """What all blocks take, where a third takes what it adds to two."""
    seconds: dict[str, dict[str, float]] = {}
    for work, kinds in three["seconds"].items():
        before = two["seconds"].get(work, {})
        seconds[work] = {
            kind: round(took + (BLOCKS - 3) * (took - before.get(kind, 0.0)), 2) for kind, took in kinds.items()
        }
    total = sum(Counter({work: sum(kinds.values()) for work, kinds in seconds.items()}).values())
    return {
        "minutes": round(total / 60, 2),
        "seconds": seconds,
        "launches": three["launches"] + (BLOCKS - 3) * (three["launches"] - two["launches"]),
        "peak_over_estimate": max(two["peak_over_estimate"], three["peak_over_estimate"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--efforts", nargs="+", default=["fast", "balanced", "best"])
    parser.add_argument("--json", action="store_true", help="print one line, of new runs, and write nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_simulated.json")
    args = parser.parse_args()
    header = {"blocks": BLOCKS, "segments": list(SEGMENTS), "bandwidth": BANDWIDTH, "rates": RATES}
    content = {"results": {}} if args.json else resumed(args.output, header, "results")
    results = content["results"]
    for effort in args.efforts:
        if effort not in results:
            results[effort] = whole(simulated(effort, 2), simulated(effort, 3))
            if not args.json:
                write(args.output, content)
    if args.json:
        # A mix of devices ends a run with CUDA's own error: where there is a result there was none.
        line = {effort: found["minutes"] for effort, found in results.items()} | {"device_mixes": 0}
        print(json.dumps(line | {"peak_over_estimate": max(found["peak_over_estimate"] for found in results.values())}))


if __name__ == "__main__":
    main()
