"""Every method on single layers: relative error, seconds and FLOPs, on the same H and from the same start.

    python benchmarks/layers.py [--set small|full] [--model MODEL --calibration FILE --seqlen N] [--methods …]

Problems: layers of a model (default: the embedded one) with the Grams of the dense model, and synthetic ones with
power-law spectra and outlier channels. A pruner alone has rank 0. Rows that the output file already holds are kept.
The plot is written beside the documentation: error against time, relative to 3basil's, geometric means over the
problems.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import geometric_mean, machine, resumed, write

import hasslefree
from hasslefree import Gram, Prune
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Method
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.low_rank_solvers.svd import RandomizedSVD
from hasslefree.methods import build_method
from hasslefree.methods.cost import flops

# Pattern, sparsity where the pattern does not say, rank.
Budget = tuple[str, float | None, int]
ROOT = Path(__file__).parents[1]
BUDGETS: list[Budget] = [
    ("2:4", None, 32), ("4:8", None, 64), ("3:8", None, 32), ("2:8", None, 16),
    ("unstructured", 0.6, 32), ("unstructured", 0.7, 64),
]  # fmt: skip
SHAPES = [(512, 512), (1024, 256), (256, 1024), (1024, 1024)]
LAYERS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
# Method → (the name in the table, its numbers of rounds; None where the method has none).
CURVES: dict[str, list[int | None]] = {
    "oats": [5, 20, 80],
    "hassle-free": [5, 20, 80],
    "hassle-free, exact step": [5, 20, 80],
    "eora": [None],
    "3basil": [25, 50, 100, 200, 2000],
    "joint": [25, 50, 100, 200],
    "godec": [5, 20, 80],
    "pcp": [None],
    "dsnot": [None],
    "wanda, refit": [None],
}


@dataclass(frozen=True)
class Problem:
    """A layer with a budget. source: "synthetic" or the name of the model."""

    name: str
    source: str
    weight: torch.Tensor
    gram: Gram
    pattern: str
    sparsity: float | None
    rank: int

    def as_json(self) -> dict[str, Any]:
        out, width = self.weight.shape
        fields = {"out": out, "in": width, "pattern": self.pattern, "sparsity": self.sparsity, "rank": self.rank}
        return {"source": self.source, **fields, "tokens": self.gram.tokens}


@dataclass
class CountedSVD:
    """A randomised SVD that counts: 3basil stops by itself, and one fit is one round."""

    solver: RandomizedSVD
    rounds: int = 0

    def fit(self, target: torch.Tensor, prepared: None, start: LowRank, round: int) -> LowRank:
        self.rounds += 1
        return self.solver.fit(target, prepared, start, round)


def synthetic(out: int, width: int, seed: int) -> tuple[torch.Tensor, Gram]:
    """A weight and a Gram from 8·in tokens: eigenvalues of H fall as 1/k, singular values of W as k^−½ over noise.

    Inputs have a mean square of one, but for one in a hundred: an outlier of ten times the size.
    """
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int, columns: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(rows, columns, generator=generator)).Q

    decay = torch.arange(1, width + 1) ** -0.5
    x = torch.randn(8 * width, width, generator=generator) * decay @ orthonormal(width, width).T
    x /= x.square().mean().sqrt()
    x[:, torch.randperm(width, generator=generator)[: max(width // 100, 1)]] *= 10
    least = min(out, width)
    smooth = (orthonormal(out, least) * decay[:least]) @ orthonormal(width, least).T
    weight = 8 * smooth + 0.02 * torch.randn(out, width, generator=generator)
    return weight * (0.02 / weight.std()), Gram.from_activations(x)


def synthetic_problems(shapes: list[tuple[int, int]], budgets: list[Budget]) -> Iterator[Problem]:
    for out, width in shapes:
        weight, gram = synthetic(out, width, seed=out + width)
        for pattern, sparsity, rank in budgets:
            label = pattern if sparsity is None else f"{pattern} {sparsity:.0%}"
            yield Problem(f"{out}×{width} {label} + rank {rank}", "synthetic", weight, gram, pattern, sparsity, rank)


def model_problems(
    model_name: str, calibration: str, samples: int, seqlen: int, budgets: list[Budget]
) -> Iterator[Problem]:
    """Four layers of the first, a middle and the last block, each with the next of the budgets, at half the rank."""
    from hasslefree.models.blocks import find_blocks
    from hasslefree.models.calibration import first_hidden_states, gather, run_block
    from hasslefree.models.calls import block_calls
    from hasslefree.models.load import encode, load_model, load_tokenizer
    from hasslefree.models.streaming import Weights
    from hasslefree.texts import calibration_documents, draw_segments

    model, tokenizer = load_model(model_name, dtype="float32"), load_tokenizer(model_name)
    documents = calibration_documents(calibration)
    segments = draw_segments(documents, lambda text: encode(tokenizer, text), samples, seqlen, seed=0)
    blocks = find_blocks(model)
    calls = block_calls(model, blocks, segments[:1], Weights(model, model.device)).calls
    hidden = first_hidden_states(model, blocks, segments)
    last, number = len(blocks.modules) - 1, 0
    for index, block in enumerate(blocks.modules):
        if index in (0, last // 2, last):
            found = gather(block, blocks.prefix(index), calls[index], hidden, [[name] for name in LAYERS])
            grams = [moments.gram for moments in found]
            for name, gram in zip(LAYERS, grams, strict=True):
                pattern, sparsity, rank = budgets[number % len(budgets)]
                label = pattern if sparsity is None else f"{pattern} {sparsity:.0%}"
                title = f"block {index} {name.split('.')[1]} {label} + rank {rank // 2}"
                weight = block.get_submodule(name).weight.detach()
                yield Problem(title, Path(model_name).name, weight, gram, pattern, sparsity, rank // 2)
                number += 1
        run_block(block, calls[index], hidden)


def configured(name: str, rounds: int | None) -> Method:
    """The method of this name with its knob for time against quality at `rounds`."""
    if name == "3basil":
        method: Any = build_method("3basil")
        penalty = dataclasses.replace(method.penalty, most=rounds)
        return dataclasses.replace(method, penalty=penalty)
    low_rank = "exact" if name.endswith("exact step") else None
    return build_method(name.split(",")[0], low_rank=low_rank, rounds=rounds, refit=name.endswith("refit"))


def run(problem: Problem, name: str, rounds: int | None, seed: int) -> dict[str, Any]:
    """One method on one problem, with all that depends on H made anew."""
    method: Any = configured(name, rounds)
    if name == "3basil":
        method = dataclasses.replace(method, svd=CountedSVD(method.svd))
    start = time.perf_counter()
    rank = 0 if isinstance(method, Prune) else problem.rank
    result = hasslefree.decompose(
        problem.weight, problem.gram, problem.pattern, rank,
        sparsity=problem.sparsity, method=method, seed=seed,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    if name == "3basil":
        rounds = method.svd.rounds
    return {"relative_error": result.relative_error, "seconds": round(seconds, 4), "rounds": rounds}


def measure(problems: list[Problem], methods: list[str], content: dict[str, Any], output: Path, seed: int) -> None:
    """Fill content["problems"], and write it after every problem."""
    for problem in problems:
        entry = content["problems"].setdefault(problem.name, {**problem.as_json(), "rows": {}})
        for name in methods:
            for rounds in CURVES[name]:
                key = name if rounds is None else f"{name} @ {rounds}"
                if key not in entry["rows"]:
                    entry["rows"][key] = run(problem, name, rounds, seed)
        for key, row in entry["rows"].items():
            method = configured(key.partition(" @ ")[0], row["rounds"])
            rank = 0 if isinstance(method, Prune) else entry["rank"]
            row["flops"] = flops(method, entry["out"], entry["in"], rank)
        write(output, content)
        shown = {key: f"{row['relative_error']:.5f} in {row['seconds']:.2f} s" for key, row in entry["rows"].items()}
        print(problem.name, shown, flush=True)


def means(content: dict[str, Any], source: str | None = None) -> dict[str, list[float]]:
    """Geometric means over problems of error, seconds and FLOPs, each over 3basil's. source: model or synthetic."""
    ratios: dict[str, list[list[float]]] = {}
    for entry in content["problems"].values():
        if source is not None and (entry["source"] == "synthetic") != (source == "synthetic"):
            continue
        base = entry["rows"].get("3basil @ 2000")
        if base is None:  # not measured yet
            continue
        for key, row in entry["rows"].items():
            ratios.setdefault(key, []).append([row[f] / base[f] for f in ("relative_error", "seconds", "flops")])
    return {key: [geometric_mean(column) for column in zip(*rows, strict=True)] for key, rows in ratios.items()}


def plot(content: dict[str, Any], path: Path) -> None:
    """Error against time, both over 3basil's; a curve for every method, a point for every number of rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = means(content)
    figure, axes = pyplot.subplots(figsize=(8.5, 4.5), layout="constrained")
    for name, counts in CURVES.items():
        points = [(found[key], c) for c in counts if (key := name if c is None else f"{name} @ {c}") in found]
        if points:
            bold = {"linewidth": 2.5, "zorder": 3} if name == "joint" else {}
            axes.plot([p[1] for p, _ in points], [p[0] for p, _ in points], "o-", label=name, **bold)
        for (error, seconds, _), count in points:
            text = "" if count is None else "to its end" if count == 2000 else f"{count}"
            axes.annotate(text, (seconds, error), textcoords="offset points", xytext=(3, 5), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="time / time of 3basil", ylabel="relative error / that of 3basil")
    axes.set_title(f"{len(content['problems'])} layers, geometric means; labels are rounds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_yticks([0.25, 0.5, 1, 2, 4, 8])
    axes.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150, metadata={"Software": None})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=["small", "full"], default="small")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--calibration", default=str(CALIBRATION))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--methods", nargs="+", default=list(CURVES), choices=list(CURVES))
    parser.add_argument("--shapes", nargs="+", help="of the synthetic problems, such as 512x512")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    small = args.set == "small"
    stem = "layers" if small else "layers_full"
    output = args.output or ROOT / "benchmarks" / "results" / f"{stem}.json"
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes] if args.shapes else SHAPES[: 1 if small else None]
    header = {"seed": args.seed, "model": Path(args.model).name, "samples": args.samples, "seqlen": args.seqlen}
    content = {"machine": machine(), **header, "problems": {}} if small else resumed(output, header, "problems")
    problems = list(model_problems(args.model, args.calibration, args.samples, args.seqlen, BUDGETS))
    problems = problems[:4] if small else problems
    problems += synthetic_problems(shapes, BUDGETS[:5:4] if small else BUDGETS)  # type: ignore[arg-type]
    for name in args.methods:
        run(problems[0], name, CURVES[name][0], args.seed)  # what is slow the first time
    measure(problems, args.methods, content, output, args.seed)
    plot(content, args.plot or ROOT / "docs" / f"{stem}.png")
    for source in ("model", "synthetic"):
        for key, (error, seconds, count) in means(content, source).items():
            print(f"{source:10s} {key:32s} error {error:.3f}  seconds {seconds:.3f}  FLOPs {count:.3f}  (over 3basil)")


if __name__ == "__main__":
    main()
