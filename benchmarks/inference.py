"""One layer, 2:4 + rank 64, in the shapes of Llama-3-8B: milliseconds a product against the dense layer.

    python benchmarks/inference.py [--device cpu|cuda] [--threads N] [--clock wall|cpu]

Each way of the device and the dense layer take turns, first to last and last to first; medians. Every turn takes the
next of several layers, together larger than the caches, as in a model. GB/s are the bytes of the layer over the time,
beside those of a plain sum over a large vector. `--clock cpu` counts the time of the one thread on the processor: for
a core that is shared with others. It is not for more threads than one, nor for a GPU.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import geometric_mean, machine, write
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.packing import PackedGroups
from hasslefree.kernels import Case, cuda, product
from hasslefree.kernels.choose import WAYS

ROOT = Path(__file__).parents[1]
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096)]
TOKENS = [1, 8, 64, 512, 2048]
RANK = 64
TWO_OF_FOUR = PackedGroups(2, 4)
# More than the caches of a processor hold, in packed layers.
COLD_BYTES = 192 << 20
# Two of four, as a code of two 2-bit positions: 0,1 · 0,2 · 0,3 · 1,2 · 1,3 · 2,3.
CODES = torch.tensor([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110], dtype=torch.uint8)


@dataclass(frozen=True)
class Layer:
    """A random layer, packed, and a dense one of the same shape."""

    values: Tensor
    positions: Tensor
    u: Tensor
    v: Tensor
    dense: Tensor
    converted: Tensor | None = None

    @classmethod
    def random(cls, out: int, width: int, dtype: torch.dtype, device: str, convert: bool) -> Layer:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(dtype) / width**0.5

        codes = CODES.to(device)[torch.randint(len(CODES), (out, width // 4), device=device)]
        values, positions = normal(out, width // 2), codes[:, 0::2] | (codes[:, 1::2] << 4)
        converted = None
        if convert:
            pruned = normal(out, width).view(-1, 4)
            pruned[:, 2:] = 0
            converted = cuda.semi_structured(pruned.view(out, width))
        return cls(values, positions, normal(out, RANK), normal(RANK, width), normal(out, width), converted)

    def bytes(self, way: str) -> int:
        """What a product reads of the layer."""
        tensors = [self.dense] if way == "dense layer" else [self.values, self.positions, self.u, self.v]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def product(self, way: str, x: Tensor) -> Tensor:
        if way == "dense layer":
            return F.linear(x, self.dense)
        if way == "semi-structured":
            assert self.converted is not None
            y = F.linear(x, self.converted)
        else:
            y = product(way, x, self.values, self.positions, TWO_OF_FOUR)
        return y.addmm_(F.linear(x, self.v), self.u.T)


def possible(device: str, dtype: torch.dtype, tokens: int) -> list[str]:
    """The ways of the device that read S from a packed form."""
    case = Case(device, dtype, TWO_OF_FOUR, tokens, grad=False)
    return [way for way, obstacle in WAYS.items() if way not in ("dense", "unpacked") and obstacle(case) is None]


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
            convert = "semi-structured" in possible(device, dtype, 1)
            layers = [Layer.random(out, width, dtype, device, convert)]
            while sum(layer.bytes("packed") for layer in layers) < COLD_BYTES:
                layers.append(Layer.random(out, width, dtype, device, convert))
            for count in tokens:
                x = torch.randn(count, width, device=device).to(dtype)
                found = measure(layers, x, possible(device, dtype, count), clock)
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


def plot(content: dict[str, Any], path: Path) -> None:
    """Speed over that of the dense layer, against the number of tokens; a panel for each dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtypes = ["float32", "bfloat16"]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    found = [row for row in content["rows"] if row["way"] != "dense layer"]
    for axis, dtype in zip(axes, dtypes, strict=True):
        for key in dict.fromkeys((row["way"], row["out"], row["in"]) for row in found):
            points = [row for row in found if (row["way"], row["out"], row["in"]) == key and row["dtype"] == dtype]
            speeds = [1 / row["over_dense"] for row in points]
            axis.plot([row["tokens"] for row in points], speeds, "o-", label=f"{key[0]}, {key[1]}×{key[2]}")
        axis.axhline(1, color="black", linewidth=1)
        axis.set(xscale="log", xlabel="tokens", title=dtype)
        axis.set_xticks(content["tokens"], [str(count) for count in content["tokens"]])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("speed / speed of the dense layer")
    axes[0].set_ylim(bottom=0)
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--shapes", nargs="+", default=[f"{out}x{width}" for out, width in SHAPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "inference.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "inference.png")
    args = parser.parse_args()
    if args.clock == "cpu" and (args.threads > 1 or args.device != "cpu"):
        parser.error("--clock cpu counts one thread: it needs --threads 1 and --device cpu")
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
    plot(content, args.plot)
    for count in args.tokens:
        for way in dict.fromkeys(row["way"] for row in content["rows"]):
            ratios = [row["over_dense"] for row in content["rows"] if (row["tokens"], row["way"]) == (count, way)]
            if ratios and way != "dense layer":
                print(f"{count} tokens, {way}: {1 / geometric_mean(ratios):.2f} times as fast as dense, in the mean")


if __name__ == "__main__":
    main()
