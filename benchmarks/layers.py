"""Every method on single layers: relative error, seconds and FLOPs, on the same H and from the same start.

    python benchmarks/layers.py [--set small|full] [--model MODEL --calibration FILE --seqlen N] [--methods …]
                                [--clock wall|cpu] [--anew]

Problems: layers of a model (default: the embedded one) with the Grams of the dense model, and synthetic ones with
power-law spectra and outlier channels. Rows that the output file already holds are kept, but for --anew.
The plot is written beside the documentation: error against time, relative to 3basil's, geometric means over the
problems. It holds what has a support and a rank, as 3basil has; a system with a budget of another kind has a room of
its own, with the bytes that it takes. `--clock cpu` counts the time of the one thread on the processor: for machines
with other work on them.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import geometric_mean, machine, resumed, write

import hasslefree
from hasslefree import Budget, Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Method, grid_of
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.errors import GridError
from hasslefree.low_rank_solvers.svd import RandomizedSVD
from hasslefree.methods import build_method
from hasslefree.methods.cost import flops
from hasslefree.plan import LayerPlan, plan_layer

# Pattern, sparsity where the pattern does not say, rank.
Setting = tuple[str, float | None, int]
ROOT = Path(__file__).parents[1]
BUDGETS: list[Setting] = [
    ("2:4", None, 32), ("4:8", None, 64), ("3:8", None, 32), ("2:8", None, 16),
    ("unstructured", 0.6, 32), ("unstructured", 0.7, 64),
]  # fmt: skip
SHAPES = [(512, 512), (1024, 256), (256, 1024), (1024, 1024)]
LAYERS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
# What has a support of the problem's pattern and a low-rank part of its rank → its numbers of rounds; None where it
# has none.
CURVES: dict[str, list[int | None]] = {
    "oats": [5, 20, 80],
    "hassle-free": [5, 20, 80],
    "hassle-free, exact step": [5, 20, 80],
    "eora": [None],
    "3basil": [25, 50, 100, 200, 2000],
    "joint": [25, 50, 100, 200],
    "godec": [5, 20, 80],
    "pcp": [None],
}


@dataclass(frozen=True)
class Room:
    """What a system takes of a problem's budget.

    Args:
        holds: what S is in: a "support", "channels" (as large a share of them as the pattern keeps of the entries), a
            "grid" (nothing is pruned) or a "support on a grid". ranked: whether it has the rank.
    """

    holds: str
    ranked: bool = False

    def __str__(self) -> str:
        return f"{self.holds} + rank" if self.ranked else self.holds


RANKED = Room("support", ranked=True)  # of all CURVES
ROOMS: dict[str, Room] = {
    **dict.fromkeys(["magnitude", "wanda", "wanda, refit", "dsnot", "sparsegpt", "alps"], Room("support")),
    "joint, S alone": Room("support"),
    "osscar": Room("channels"),
    "losparse": Room("channels", ranked=True),
    **dict.fromkeys(["rtn", "gptq"], Room("grid")),
    **dict.fromkeys(["loftq", "lq-lora", "caldera", "joint-grid"], Room("grid", ranked=True)),
    "gptq, pruned": Room("support on a grid"),
    "joint-grid, pruned": Room("support on a grid", ranked=True),
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

    def planned(self, room: Room, method: Method) -> LayerPlan:
        """The pattern, the rank and the bytes that a method has in a room, S and L being in bfloat16."""
        shape = (self.weight.shape[0], self.weight.shape[1])
        budget = Budget(self.pattern, sparsity=self.sparsity)
        if room.holds == "channels":
            budget = Budget("structured", sparsity=1 - budget.resolve(*shape)[0].kept(shape) / self.weight.numel())
        elif room.holds == "grid":
            budget = Budget("dense")
        rank = self.rank if room.ranked else 0
        return plan_layer(shape, budget.resolve(*shape)[0], rank, torch.bfloat16, grid_of(method))


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


def synthetic_problems(shapes: list[tuple[int, int]], budgets: list[Setting]) -> Iterator[Problem]:
    for out, width in shapes:
        weight, gram = synthetic(out, width, seed=out + width)
        for pattern, sparsity, rank in budgets:
            label = pattern if sparsity is None else f"{pattern} {sparsity:.0%}"
            yield Problem(f"{out}×{width} {label} + rank {rank}", "synthetic", weight, gram, pattern, sparsity, rank)


def model_problems(
    model_name: str, calibration: str, samples: int, seqlen: int, budgets: list[Setting]
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


def few_problems() -> list[Problem]:
    """The four layers of the first block of the embedded model, and a synthetic one."""
    of_model = islice(model_problems(str(MODEL), str(CALIBRATION), 64, 256, BUDGETS), len(LAYERS))
    return [*of_model, *synthetic_problems(SHAPES[:1], BUDGETS[:1])]


def configured(name: str, rounds: int | None) -> Method:
    """The method of this name with its knob for time against quality at `rounds`."""
    if name == "3basil":
        method: Any = build_method("3basil")
        penalty = dataclasses.replace(method.penalty, most=rounds)
        return dataclasses.replace(method, penalty=penalty)
    low_rank = "exact" if name.endswith("exact step") else None
    return build_method(name.split(",")[0], low_rank=low_rank, rounds=rounds, refit=name.endswith("refit"))


def run(problem: Problem, name: str, rounds: int | None, seed: int, clock: str) -> dict[str, Any]:
    """One method on one problem, with all that depends on H made anew."""
    method: Any = configured(name, rounds)
    if name == "3basil":
        method = dataclasses.replace(method, svd=CountedSVD(method.svd))
    now = time.thread_time if clock == "cpu" else time.perf_counter
    planned = problem.planned(ROOMS.get(name, RANKED), method)
    start = now()
    result = hasslefree.decompose(problem.weight, problem.gram, planned.pattern, planned.rank, method=method, seed=seed)
    seconds = now() - start
    if name == "3basil":
        rounds = method.svd.rounds
    row = {"relative_error": result.relative_error, "seconds": round(seconds, 4), "rounds": rounds}
    return row | {"bytes_a_weight": planned.bytes / problem.weight.numel()}


def possible(problem: Problem, name: str) -> bool:
    """Whether the groups of a system's grid divide the inputs and hold whole groups of the pattern."""
    method = configured(name, None)
    planned = problem.planned(ROOMS[name], method)
    try:
        if grid := grid_of(method):
            grid.check(planned.shape, planned.pattern.group)
    except GridError:
        return False
    return True


def measure(problems: list[Problem], methods: list[str], content: dict[str, Any], output: Path) -> None:
    """Fill content["problems"], and write it after every problem."""
    seed, clock = content["seed"], content["clock"]
    for problem in problems:
        entry = content["problems"].setdefault(problem.name, {**problem.as_json(), "rows": {}})
        rooms = entry.setdefault("rooms", {})
        for name in methods:
            for rounds in CURVES.get(name, []):
                key = name if rounds is None else f"{name} @ {rounds}"
                if key not in entry["rows"]:
                    entry["rows"][key] = run(problem, name, rounds, seed, clock)
            if name in ROOMS and name not in rooms and possible(problem, name):
                rooms[name] = {"room": str(ROOMS[name]), **run(problem, name, None, seed, clock)}
        for key, row in entry["rows"].items():
            method = configured(key.partition(" @ ")[0], row["rounds"])
            row["flops"] = flops(method, entry["out"], entry["in"], entry["rank"])
        write(output, content)
        rows = {**entry["rows"], **rooms}
        shown = {key: f"{row['relative_error']:.5f} in {row['seconds']:.2f} s" for key, row in rows.items()}
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
    names = [*CURVES, *ROOMS]
    parser.add_argument("--methods", nargs="+", default=names, choices=names)
    parser.add_argument("--shapes", nargs="+", help="of the synthetic problems, such as 512x512")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--anew", action="store_true", help="measure all, whatever the output file holds")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.clock == "cpu" and torch.get_num_threads() > 1:
        parser.error("--clock cpu counts one thread: it needs OMP_NUM_THREADS=1")
    return args


def main() -> None:
    args = arguments()
    small = args.set == "small"
    stem = "layers" if small else "layers_full"
    output = args.output or ROOT / "benchmarks" / "results" / f"{stem}.json"
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes] if args.shapes else SHAPES[: 1 if small else None]
    header = {"seed": args.seed, "model": Path(args.model).name, "samples": args.samples, "seqlen": args.seqlen}
    header["clock"] = args.clock
    content = {"machine": machine(), **header, "problems": {}} if args.anew else resumed(output, header, "problems")
    problems = list(model_problems(args.model, args.calibration, args.samples, args.seqlen, BUDGETS))
    problems = problems[:4] if small else problems
    problems += synthetic_problems(shapes, BUDGETS[:5:4] if small else BUDGETS)  # type: ignore[arg-type]
    for name in args.methods:
        if name in CURVES or possible(problems[0], name):  # what is slow the first time
            run(problems[0], name, CURVES.get(name, [None])[0], args.seed, args.clock)
    measure(problems, args.methods, content, output)
    plot(content, args.plot or ROOT / "docs" / f"{stem}.png")
    for source in ("model", "synthetic"):
        for key, (error, seconds, count) in means(content, source).items():
            print(f"{source:10s} {key:32s} error {error:.3f}  seconds {seconds:.3f}  FLOPs {count:.3f}  (over 3basil)")


if __name__ == "__main__":
    main()
