"""Every system in its room: bytes a weight and perplexity of one model, each method with a budget of its kind.

    python benchmarks/systems.py MODEL TEXT… --calibration FILE [--rank 16] [--only NAME …]

TEXT and FILE are hub names, .txt or .jsonl files; FILE.jsonl[700:] takes some of its documents. Bytes are those of the
compressed layers as they are stored, in the dtype of the checkpoint, over their weights; of `osscar`, those of the
linear layers of the narrow model that it is exported to. Rows that the output file already holds are kept; each has a
process of its own. `joint` is the layers alone, as the methods of others are;
`joint, balanced` is what `compress` does where nothing is said.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import resumed, write
from levers import LAYERS, measured

import hasslefree
from hasslefree.checkpoints.export import export
from hasslefree.models.blocks import find_blocks, select_linears
from hasslefree.models.load import load_model

ROOT = Path(__file__).parents[1]
PRUNERS = ["magnitude", "wanda", "dsnot", "sparsegpt", "alps"]
PAIRS = ["godec", "pcp", "oats", "eora", "hassle-free", "3basil"]
ON_GRID = ["rtn", "gptq"]
# What makes the channels that OSSCAR removes.
MADE = ["q", "k", "v", "gate", "up"]
PAIRS_ON_GRID = ["loftq", "lq-lora", "caldera", "joint-grid"]


def systems(rank: int) -> dict[str, dict[str, Any]]:
    """Name → fields of its recipe."""
    found: dict[str, dict[str, Any]] = {
        f"{name}, 2:4": {"method": name, "pattern": "2:4", "rank": 0} for name in [*PRUNERS, "joint"]
    }
    found["wanda, refit, 2:4"] = found["wanda, 2:4"] | {"refit": True}
    found |= {f"{name}, 2:4 + {rank}": {"method": name, "pattern": "2:4", "rank": rank} for name in [*PAIRS, "joint"]}
    found |= {f"{name}, int4": {"method": name} for name in ON_GRID}
    found |= {f"{name}, int4 + {rank}": {"method": name, "rank": rank} for name in PAIRS_ON_GRID}
    found["wanda, 50 %"] = {"method": "wanda", "pattern": "unstructured", "sparsity": 0.5}
    found["wanda, 50 %, owl"] = found["wanda, 50 %"] | {"allocate": "owl"}
    # A quarter of the heads and neurons.
    found["osscar, 25 %"] = {
        "method": "osscar", "pattern": "structured", "sparsity": 0.25, "leave_dense": tuple(f"*.{n}_proj" for n in MADE)
    }  # fmt: skip
    found[f"losparse, 40 % + {rank}"] = {
        "method": "losparse", "pattern": "structured", "sparsity": 0.4, "rank": rank
    }  # fmt: skip
    found["gptq, 2:4 + int4"] = {"method": "gptq", "pattern": "2:4"}
    found[f"joint-grid, 2:4 + int4 + {rank}"] = {"method": "joint-grid", "pattern": "2:4", "rank": rank}
    found = {name: LAYERS | fields for name, fields in found.items()}
    found[f"joint, balanced, 2:4 + {rank}"] = {"pattern": "2:4", "rank": rank}
    return found


def run(args: argparse.Namespace, fields: dict[str, Any]) -> dict[str, Any]:
    """Compress, and measure."""
    recipe = hasslefree.Recipe(
        calibration=args.calibration, samples=args.samples, seqlen=args.seqlen, seed=args.seed, **fields
    )
    with tempfile.TemporaryDirectory() as folder:
        report = hasslefree.compress(args.model, f"{folder}/out", recipe)
        found = measured(args, load_model(f"{folder}/out", "float32", "cpu"))
        stored, weights = report.stored_bytes, report.dense_parameters
        if recipe.method == "osscar":
            export(f"{folder}/out", f"{folder}/narrow", "narrow")
            weights = linear_weights(args.model)
            stored = 2 * linear_weights(f"{folder}/narrow")  # of a checkpoint in two bytes
    return {
        "bytes_a_weight": stored / weights,
        "perplexity": {text: round(value, 3) for text, value in found.items()},
        "mean_relative_error": report.mean_relative_error,
        "relative_errors": {layer.name: layer.relative_error for layer in report.layers},
    }


def linear_weights(model: str) -> int:
    """The number of weights of every linear layer in the blocks of a dense model."""
    blocks = find_blocks(load_model(model, "float32", "cpu"))
    return sum(linear.weight.numel() for names in select_linears(blocks, ()) for linear in names.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "systems.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "systems.png")
    args = parser.parse_args()
    header = {name: getattr(args, name) for name in ("rank", "samples", "seqlen", "max_tokens", "seed")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    if "dense" not in content:
        content["dense"] = measured(args, load_model(args.model, "float32", "cpu"))
    spawn = multiprocessing.get_context("spawn")
    for name, fields in systems(args.rank).items():
        if name in content["results"] or (args.only and name not in args.only):
            continue
        with ProcessPoolExecutor(1, spawn) as own:
            row = own.submit(run, args, fields).result()
        logs = [math.log(value / content["dense"][text]) for text, value in row["perplexity"].items()]
        content["results"][name] = {"gap": sum(logs) / len(logs), **row}
        write(args.output, content)
        plot(content, args.plot)
        print(name, f"{row['bytes_a_weight']:.3f} bytes", content["results"][name]["gap"], flush=True)


def plot(content: dict[str, Any], path: Path) -> None:
    """The gap against bytes a weight."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 5.5), layout="constrained")
    free: dict[float, float] = {}  # by bytes: where the next label may stand
    for name, row in sorted(content["results"].items(), key=lambda item: item[1]["gap"]):
        place, column = (row["bytes_a_weight"], row["gap"]), round(row["bytes_a_weight"], 2)
        height = max(row["gap"], free.get(column, 0.0))
        free[column] = 1.13 * height
        axes.scatter(*place, s=18, color="C3" if name.startswith("joint") else "C0")
        label = name.removesuffix(", 2:4").removesuffix(", int4")
        axes.annotate(label, place, (place[0] + 0.015, height), va="center", fontsize=7)
    axes.set(xlabel="bytes a weight", ylabel="log(perplexity / dense perplexity)", yscale="log", xlim=(0.35, 1.8))
    axes.set_yticks([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2], minor=False)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
