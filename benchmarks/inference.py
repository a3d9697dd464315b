"""Computing with packed layers, against dense ones: products of one layer, and whole models that are loaded.

    python benchmarks/inference.py products [--device cpu|cuda] [--threads N] [--clock wall|cpu]
    python benchmarks/inference.py models [--blocks 2] [--new-tokens 128]
    python benchmarks/inference.py generate [MODEL FOLDER] [--blocks 16] [--device cpu|cuda] [--threads N]
        [--clock wall|cpu]
    python benchmarks/inference.py profile MODEL FOLDER [--prompt 512] [--new-tokens 16]

products: milliseconds of one layer, 2:4 + rank 64, in the shapes of Llama-3-8B. Each way of the device and the dense
layer take turns, first to last and last to first; medians. Every turn takes the next of several layers, together larger
than the caches, as in a model. GB/s are the bytes of the layer over the time, beside those of a plain sum over a large
vector. `--clock cpu` counts the time of the one thread on the processor: for a core that is shared with others. It is
not for more threads than one, nor for a GPU.

models: memory of a random Llama whose blocks have the shapes of Llama-3-8B's, in bfloat16, 2:4 + rank 64; each form is
loaded in a process of its own, and counts by what the resident set grew. Speed of the embedded model, in float32, dense
and compressed (2:4 + rank 16), one text at a time; the ways take turns, medians.

generate: a model and FOLDER, what `hasslefree compress` made of it; without them, a random Llama with the shapes of
Llama-3.2-1B, 2:4 + rank 64. Tokens a second of one text, seconds of a prompt, and memory once loaded, each in the dtype
of the files; the ways take turns, medians. Rows are added to those of other models in the output file.

profile: where the time of `generate` goes, of a model and of FOLDER, on one thread by its time on the processor: in
calls of torch and of Numba's kernels, by part of the model, and in the Python code between them. A token is one of
--new-tokens after a prompt of 16 tokens, a prompt is read up to its first new token.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import hasslefree
from harness.memory import resident
from harness.models import CALIBRATION, MODEL
from harness.products import RANK, Layer, possible, random_layer, write_models
from harness.record import RESULTS, geometric_mean, machine, resumed, write
from hasslefree.core.grids import Grid

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096)]
TOKENS = [1, 8, 64, 512, 2048]
# More than the caches of a processor hold, in packed layers.
COLD_BYTES = 192 << 20
REPEATS = 7


def timed(run: Callable[[], Any], device: str, clock: str) -> float:
    now = time.thread_time if clock == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    start = now()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return now() - start


def bandwidth(device: str, clock: str) -> float:
    """GB/s of a sum over a vector of 512 MB."""
    vector = torch.ones(128 << 20, device=device)
    seconds = sorted(timed(vector.sum, device, clock) for _ in range(9))[4]
    return vector.numel() * 4 / seconds / 1e9


def measure(layers: list[Layer], x: Tensor, ways: list[str], clock: str) -> dict[str, float]:
    """Median seconds of each way, and of the dense layer; the ways take turns."""
    turns = ["dense layer", *ways]
    device = x.device.type
    first = {way: timed(lambda way=way: layers[0].product(way, x), device, clock) for way in turns}
    first = {way: timed(lambda way=way: layers[0].product(way, x), device, clock) for way in turns}
    rounds = min(max(math.ceil(1 / sum(first.values())), 7), 101)
    seconds: dict[str, list[float]] = {way: [] for way in turns}
    for number in range(rounds):
        layer = layers[number % len(layers)]
        for way in turns if number % 2 else turns[::-1]:
            seconds[way].append(timed(lambda way=way, layer=layer: layer.product(way, x), device, clock))
    return {way: sorted(found)[rounds // 2] for way, found in seconds.items()}


def rows(device: str, clock: str, shapes: list[tuple[int, int]], tokens: list[int]) -> Iterator[dict[str, Any]]:
    for out, width in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            backends = possible(device, dtype)
            layers = [Layer.random(out, width, dtype, device, backends)]
            while sum(layer.bytes(backends[0]) for layer in layers) < COLD_BYTES:
                layers.append(Layer.random(out, width, dtype, device, backends))
            for count in tokens:
                x = torch.randn(count, width, device=device).to(dtype)
                found = measure(layers, x, backends, clock)
                for way, seconds in found.items():
                    yield {
                        "out": out,
                        "in": width,
                        "dtype": str(dtype).removeprefix("torch."),
                        "tokens": count,
                        "way": way,
                        "milliseconds": round(seconds * 1e3, 4),
                        "over_dense": round(seconds / found["dense layer"], 4),
                        "megabytes": round(layers[0].bytes(way) / 1e6, 2),
                        "gigabytes_a_second": round(layers[0].bytes(way) / seconds / 1e9, 2),
                    }


def products(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    shapes = [(int(out), int(width)) for out, width in (shape.split("x") for shape in args.shapes)]
    header = {"device": args.device, "clock": args.clock, "rank": RANK, "tokens": args.tokens}
    content: dict[str, Any] = {"machine": machine(), **header, "rows": []}
    content["read_gigabytes_a_second"] = round(bandwidth(args.device, args.clock), 2)
    with torch.no_grad():
        for row in rows(args.device, args.clock, shapes, args.tokens):
            content["rows"].append(row)
            print(row, flush=True)
    content["preemptions"] = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    write(args.output, content)
    for count in args.tokens:
        for way in dict.fromkeys(row["way"] for row in content["rows"]):
            ratios = [row["over_dense"] for row in content["rows"] if (row["tokens"], row["way"]) == (count, way)]
            if ratios and way != "dense layer":
                print(f"{count} tokens, {way}: {1 / geometric_mean(ratios):.2f} times as fast as dense, in the mean")


def load_and_measure(folder: Path) -> None:
    """Print by how much this process has grown once the model is loaded and a token computed.

    The weights are mapped from the file, and come into memory when they are read. What the first load and the first
    product bring with them, compiled kernels among it, is there before.
    """
    AutoModelForCausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        for grid in (None, Grid(6, 64, offset=True)):
            random_layer(torch.randn(256, 256).bfloat16(), grid)(torch.randn(1, 256).bfloat16())
        before = resident()
        model = AutoModelForCausalLM.from_pretrained(folder)
        model(torch.ones(1, 1, dtype=torch.long))
        print(resident() - before)


def loaded_megabytes(folder: Path) -> float:
    """`load_and_measure` in a process of its own."""
    command = [sys.executable, __file__, "models", "--load", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return round(int(done.stdout.split()[-1]) / 1e6, 1)


def memory(blocks: int) -> dict[str, Any]:
    """MB of each form, and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        write_models(Path(name), blocks)
        found: dict[str, Any] = {"blocks": blocks}
        found |= {form: loaded_megabytes(Path(name, form)) for form in ("dense", "packed")}
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
            hasslefree.use_backend(model, way)
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


def turns(runs: dict[str, Callable[[], Any]], device: str, clock: str, shared: bool = False) -> dict[str, float]:
    """Median seconds of each, which take turns; the first turn warms up. The least where the machine is shared."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, run in runs.items():
            found = timed(run, device, clock)
            seconds[name] += [found] if repeat else []
    return {name: (min if shared else statistics.median)(found) for name, found in seconds.items()}


def speeds(dense: Path, packed: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way: dense, packed, and S unpacked once."""
    ways = {"dense": dense, "packed": packed} | ({} if args.bits or args.label else {"unpacked": packed})
    loaded = {
        way: AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(args.device) for way, folder in ways.items()
    }
    if "unpacked" in ways:
        hasslefree.use_backend(loaded["unpacked"], "unpacked")
    prompts = {
        count: (torch.arange(count) % loaded["dense"].config.vocab_size).unsqueeze(0).to(args.device)
        for count in (16, args.prompt)
    }
    new = {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens, "do_sample": False}
    with torch.no_grad():
        writing = turns(
            {way: lambda m=m: m.generate(prompts[16], **new) for way, m in loaded.items()},
            args.device, args.clock, args.shared,
        )  # fmt: skip
        reading = turns(
            {way: lambda m=m: m(prompts[args.prompt]) for way, m in loaded.items()},
            args.device, args.clock, args.shared,
        )  # fmt: skip
    return [
        {
            "way": way,
            "new_tokens": args.new_tokens,
            "tokens_a_second": round(args.new_tokens / writing[way], 2),
            "tokens_over_dense": round(writing["dense"] / writing[way], 3),
            "prompt_seconds": round(reading[way], 4),
            "prompt_over_dense": round(reading["dense"] / reading[way], 3),
        }
        for way in ways
    ]


def generate(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    header = {"device": args.device, "clock": args.clock, "prompt": args.prompt}
    header |= {"bits": args.bits, "shared": args.shared} if args.bits else {}
    instructions = torch.backends.cpu.get_cpu_capability()
    header |= {"instructions": instructions} if args.device == "cpu" and instructions != "AVX512" else {}
    content = resumed(args.output, header, "models")
    with tempfile.TemporaryDirectory() as name:
        folders = args.model, args.folder
        if args.model is None:
            torch.manual_seed(0)
            write_models(Path(name), args.blocks, "Llama-3.2-1B", 128_256, args.bits)
            folders = Path(name, "dense"), Path(name, "packed")
        found = speeds(*folders, args)
        for row, folder in zip(found, folders, strict=False):
            row["megabytes"] = loaded_megabytes(folder)  # of RAM
    name = args.model.name if args.model else f"random, Llama-3.2-1B, {args.blocks} blocks"
    content["models"][f"{name}, {args.label}" if args.label else name] = found
    for row in found:
        print(row)
    write(args.output, content)


def profile(args: argparse.Namespace) -> None:
    from harness.profiles import seconds_by_part  # needs Numba

    torch.set_num_threads(1)
    content: dict[str, Any] = {"machine": machine(), "model": args.model.name, "prompt": args.prompt, "rows": []}
    for way, folder in {"dense": args.model, "packed": args.folder}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

        def parts(prompt: int, new: int, model: Any = model) -> dict[str, float]:
            ids = (torch.arange(prompt) % model.config.vocab_size).unsqueeze(0)
            count = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            return seconds_by_part(model, lambda: model.generate(ids, **count))

        first, all_tokens = parts(16, 1), parts(16, 1 + args.new_tokens)
        token = {part: (seconds - first[part]) / args.new_tokens for part, seconds in all_tokens.items()}
        for what, found in (("one token", token), (f"a prompt of {args.prompt}", parts(args.prompt, 1))):
            whole = sum(found.values())
            share = {part: round(seconds / whole, 4) for part, seconds in found.items()}
            row = {"way": way, "what": what, "milliseconds": round(whole * 1e3, 2), "share": share}
            content["rows"].append(row)
            print(row, flush=True)
    write(args.output, content)


def models(args: argparse.Namespace) -> None:
    if args.load:
        load_and_measure(args.load)
        return
    content = {"machine": machine(), "rank": RANK, "memory": memory(args.blocks)}
    print(content["memory"], flush=True)
    content["generate"] = generation(args.new_tokens)
    for row in content["generate"]:
        print(row)
    write(args.output, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("products")
    one.set_defaults(run=products)
    one.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    one.add_argument("--threads", type=int, default=torch.get_num_threads())
    one.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    one.add_argument("--shapes", nargs="+", default=[f"{out}x{width}" for out, width in SHAPES])
    one.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    one.add_argument("--output", type=Path, default=RESULTS / "inference.json")
    other = commands.add_parser("models")
    other.set_defaults(run=models)
    other.add_argument("--blocks", type=int, default=2)
    other.add_argument("--new-tokens", type=int, default=128)
    other.add_argument("--output", type=Path, default=RESULTS / "loaded.json")
    other.add_argument("--load", type=Path, help="one load, in this process")
    third = commands.add_parser("generate")
    third.set_defaults(run=generate)
    third.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    third.add_argument("model", type=Path, nargs="?")
    third.add_argument("folder", type=Path, nargs="?")
    third.add_argument("--blocks", type=int, default=16, help="of the random model")
    third.add_argument("--new-tokens", type=int, default=128)
    third.add_argument("--prompt", type=int, default=512)
    third.add_argument("--threads", type=int, default=torch.get_num_threads())
    third.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    third.add_argument("--bits", type=int, help="of the grid of the folder; of the random model, instead of 2:4")
    third.add_argument("--label", help="of the setting of the folder; without the way that unpacks S once")
    third.add_argument("--shared", action="store_true", help="the machine has other work: least times, not medians")
    third.add_argument("--output", type=Path, default=RESULTS / "generation.json")
    fourth = commands.add_parser("profile")
    fourth.set_defaults(run=profile)
    fourth.add_argument("model", type=Path)
    fourth.add_argument("folder", type=Path)
    fourth.add_argument("--prompt", type=int, default=512)
    fourth.add_argument("--new-tokens", type=int, default=16)
    fourth.add_argument("--output", type=Path, default=RESULTS / "profile.json")
    args = parser.parse_args()
    if args.run is generate and (args.model is None) != (args.folder is None):
        parser.error("generate takes a model and the folder that was made of it, or neither")
    if args.run in (products, generate) and args.clock == "cpu" and (args.threads > 1 or args.device != "cpu"):
        parser.error("--clock cpu counts one thread: it needs --threads 1 and --device cpu")
    args.run(args)


if __name__ == "__main__":
    main()
