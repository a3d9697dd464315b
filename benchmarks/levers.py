"""What is won beyond the single layer: dense targets, block matching, allocation, and what was tried beside them.

    python benchmarks/levers.py MODEL TEXT… --calibration FILE [--settings 2:4/4 …] [--only NAME …] [--seeds 0 1 2]

TEXT and FILE are hub names, .txt or .jsonl files; FILE.jsonl[700:] takes some of its documents. Rows that the output
file already holds are kept. What hasslefree offers runs through `hasslefree.compress`; what it does not offer, through
`compress_two_streams`, which is the whole loop. Each row has a process of its own. The gap is the mean over the texts
of log(perplexity / dense perplexity).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from common import resumed, write
from torch import Tensor, nn
from torch.nn import functional as F

import hasslefree
from hasslefree.compress import draw
from hasslefree.core.budgets import Budget
from hasslefree.core.gram import Gram
from hasslefree.core.protocols import Method
from hasslefree.core.targets import corrected, drift_correction, target_damping
from hasslefree.decompose import solve_layer
from hasslefree.matching import Loss, Matching, MatchReport, match_block, squared_distance
from hasslefree.methods import build_method
from hasslefree.models.blocks import dense_weight, find_blocks, replace_module, select_linears
from hasslefree.models.calibration import first_hidden_states, groups_by_input
from hasslefree.models.calls import BlockCall, block_calls, hooks
from hasslefree.models.linear import SparseLowRankLinear, compressed_layers, unpacked_once
from hasslefree.models.load import encode, load_model, load_tokenizer
from hasslefree.models.streaming import Weights
from hasslefree.recipe import Recipe
from hasslefree.texts import evaluation_text

# The published transformer matching (3BASiL-TM, arXiv 2603.01376): 20 epochs of which the first is idle, 2e-5 for
# every tensor, a cosine down to a fifth, no segments held out; the teacher is the dense block on compressed inputs.
PUBLISHED = Matching(
    epochs=19, learning_rate=2e-5, relative=False, warm_up=0.0, decay=0.2, held_out=0.0, patience=19, retreats=0
)


@dataclass(frozen=True)
class Levers:
    """What is done beside the decomposition of single layers.

    Args:
        share: a of the dense targets; None for no targets. matching: of each block; None for none.
        teacher: the dense block on the dense stream, or on the compressed one.
        window: matched blocks, so many at a time, each window ending at the block that was just decomposed.
        loss: of the blocks: squared, the same over each token's own norm (`per token`), or in the metric of the Fisher
            information at the block's output (`fisher`).
        logits: a last step on the whole model, by KL to the dense one's logits.
        whole: what the last step trains: the factors and vectors, or the values of S too.
    """

    share: float | None = None
    matching: Matching | None = None
    teacher: Literal["dense", "compressed"] = "dense"
    window: int = 1
    loss: Literal["squared", "per token", "fisher"] = "squared"
    logits: Matching | None = None
    whole: bool = False


@dataclass(frozen=True)
class Chain:
    """Consecutive blocks as one: `match_block` runs them one after the other."""

    calls: Sequence[BlockCall]

    def run(self, blocks: nn.Module, hidden: Tensor) -> Tensor:
        for block, call in zip(blocks, self.calls, strict=True):  # type: ignore[call-overload]
            hidden = call.run(block, hidden)
        return hidden


def compress_two_streams(
    model: Any, segments: Tensor, budget: Budget, method: Method, levers: Levers, seed: int
) -> list[MatchReport]:
    """Decompose every layer of a model in place, block by block, and pull the levers."""
    blocks = find_blocks(model)
    linears, calls = (
        select_linears(blocks, ()),
        block_calls(model, blocks, segments[:1], Weights(model, model.device)).calls,
    )
    dense = list(first_hidden_states(model, blocks, segments))
    losses = block_losses(model, blocks.modules, segments, levers.loss)
    first, entering, reports = dense, [dense], []  # entering[i]: the compressed stream before block i
    for index, (block, call) in enumerate(zip(blocks.modules, calls, strict=True)):
        original = copy.deepcopy(block)
        inputs, wanted = entering[-1], run_block(original, call, dense)
        for group in groups_by_input(block, call, inputs[0], linears[index]):
            gram, drift = gather(original, block, call, dense, inputs, group[0], levers.share is not None)
            prepared = method.prepare(gram)
            correction = (
                None if levers.share is None else drift_correction(gram, drift, levers.share, target_damping(gram))
            )
            for name in group:
                weight = dense_weight(linears[index][name])
                target = None if correction is None else corrected(weight, correction)
                pattern, rank = budget.resolve(*weight.shape)
                result = solve_layer(weight, gram, method, prepared, pattern, rank, seed, target)
                bias = linears[index][name].bias
                replace_module(block, name, SparseLowRankLinear.from_decomposition(result, bias, str(pattern)))
        if levers.matching is not None:
            targets = wanted if levers.teacher == "dense" else run_block(original, call, inputs)
            start = max(index + 1 - levers.window, 0)
            window = nn.ModuleList(blocks.modules[start : index + 1])
            chain = Chain(calls[start : index + 1])
            reports.append(match_block(window, chain, entering[start], targets, levers.matching, seed, losses[index]))
            for i in range(start, index):
                entering[i + 1] = run_block(blocks.modules[i], calls[i], entering[i])
        dense = wanted
        entering.append(run_block(block, call, entering[-1]))
    if levers.logits is not None:
        reports.append(match_logits(model, Chain(calls), blocks.modules, first, dense, levers, seed))
    return reports


def run_block(block: nn.Module, call: BlockCall, hidden: Sequence[Tensor]) -> list[Tensor]:
    """The block's outputs for its inputs."""
    with unpacked_once(block), torch.no_grad():
        return [call.run(block, states) for states in hidden]


def gather(
    original: nn.Module,
    block: nn.Module,
    call: BlockCall,
    dense: list[Tensor],
    inputs: list[Tensor],
    name: str,
    with_drift: bool,
) -> tuple[Gram, Tensor]:
    """H = X̂ᵀX̂ / tokens of a layer in the compressed block, and D = X̂ᵀ(X − X̂) / tokens; zeros without drift."""
    caught: dict[str, Tensor] = {}

    def catch(which: str) -> Callable[..., None]:
        return lambda module, args: caught.__setitem__(which, args[0].flatten(0, -2))

    handles = [block.get_submodule(name).register_forward_pre_hook(catch("compressed"))]
    handles.append(original.get_submodule(name).register_forward_pre_hook(catch("dense")))
    second, cross, tokens = torch.zeros(()), torch.zeros(()), 0
    with hooks(handles), unpacked_once(block), torch.no_grad():
        for states, wanted in zip(inputs, dense, strict=True):
            call.run(block, states)
            x = caught["compressed"]
            second, tokens = second + x.T @ x, tokens + len(x)
            if with_drift:
                call.run(original, wanted)
                cross = cross + x.T @ (caught["dense"] - x)
    drift = cross / tokens if with_drift else torch.zeros_like(second)
    return Gram(second / tokens, tokens), drift


def block_losses(model: Any, modules: Sequence[nn.Module], segments: Tensor, name: str) -> list[Loss]:
    """The loss of every block by name."""
    if name == "squared":
        return [squared_distance] * len(modules)
    if name == "per token":
        return [per_token] * len(modules)
    return [in_metric(g) for g in fisher_metrics(model, modules, segments)]


def per_token(output: Tensor, target: Tensor) -> Tensor:
    """Σ over tokens of ‖output − target‖² over the mean square of the target's entries."""
    return ((output - target).square().sum(-1) / target.square().mean(-1)).sum()


def in_metric(metric: Tensor) -> Loss:
    """Σ over tokens of (output − target) G (output − target)ᵀ with G: (width, width)."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        rest = output - target
        return ((rest @ metric) * rest).sum()

    return loss


def fisher_metrics(model: Any, modules: Sequence[nn.Module], segments: Tensor, floor: float = 0.1) -> list[Tensor]:
    """For every block E[g gᵀ], g the gradient of −log p(sampled next token) at its output, in the dense model.

    Scaled to a mean diagonal of one, and mixed with the identity by the share `floor`.
    """
    held: dict[int, Tensor] = {}
    sums: list[Tensor | float] = [0.0] * len(modules)

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            held[index] = output[0] if isinstance(output, tuple) else output
            held[index].retain_grad()

        return hook

    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with hooks(module.register_forward_hook(keep(i)) for i, module in enumerate(modules)):
        for segment in segments:
            logits = model(input_ids=segment[None], use_cache=False).logits[0]
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            F.cross_entropy(logits, drawn, reduction="sum").backward()
            for index, output in held.items():
                g = output.grad.flatten(0, -2)  # type: ignore[union-attr]
                sums[index] = sums[index] + g.T @ g
    model.requires_grad_(True).zero_grad()
    metrics = []
    for total in sums:
        assert isinstance(total, Tensor)
        scaled = total / total.diagonal().mean()
        metrics.append((1 - floor) * scaled + floor * torch.eye(len(scaled)))
    return metrics


def logit_divergence(head: Callable[[Tensor], Tensor]) -> Loss:
    """Σ over tokens of KL(softmax head(target) ‖ softmax head(output)), in nats."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = F.log_softmax(head(target).float(), -1)
        found = F.log_softmax(head(output).float(), -1)
        return F.kl_div(found, wanted, reduction="sum", log_target=True)

    return loss


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """From the last block's output to the logits, for Llama-like models."""
    norm, linear = model.model.norm, model.lm_head
    return lambda hidden: linear(norm(hidden))


def match_logits(
    model: Any,
    chain: Chain,
    modules: Sequence[nn.Module],
    first: list[Tensor],
    wanted: list[Tensor],
    levers: Levers,
    seed: int,
) -> MatchReport:
    """Train the factors and vectors of the whole model against the dense model's logits."""
    assert levers.logits is not None
    every = nn.ModuleList(modules)
    fixed = set() if levers.whole else {id(layer.values) for layer in compressed_layers(every).values()}
    chosen = [p for p in every.parameters() if id(p) not in fixed]
    return match_block(every, chain, first, wanted, levers.logits, seed, logit_divergence(head_of(model)), chosen)


ROOT = Path(__file__).parents[1]
BOTH = Levers(share=1.0, matching=Matching())
LAYERS = {"allocate": "uniform", "dense_target": 0.0, "match_blocks": False}
# Fields of a recipe, or a method and what the loop above does with it.
VARIANTS: dict[str, dict[str, Any] | tuple[str, Levers]] = {
    "joint": LAYERS,
    "dense targets": LAYERS | {"dense_target": 1.0},
    "matching": LAYERS | {"match_blocks": True},
    "allocation": LAYERS | {"allocate": "error"},
    "targets, matching": LAYERS | {"dense_target": 1.0, "match_blocks": True},
    "effort fast": {"effort": "fast"},
    "effort balanced": {"effort": "balanced"},
    "effort best": {"effort": "best"},
    "3basil": LAYERS | {"method": "3basil"},
    "3basil, published matching": ("3basil", Levers(matching=PUBLISHED, teacher="compressed")),
    "hassle-free": LAYERS | {"method": "hassle-free"},
    "targets by half": LAYERS | {"dense_target": 0.5},
    "targets, matching, then the logits": ("joint", replace(BOTH, logits=Matching(learning_rate=0.003))),
    "targets, matching, then the logits, S too": (
        "joint", replace(BOTH, logits=Matching(learning_rate=0.003), whole=True)
    ),
    "targets, matching in windows of two": ("joint", replace(BOTH, window=2)),
    "targets, matching to the compressed stream": ("joint", replace(BOTH, teacher="compressed")),
    "targets, matching of each token over its norm": ("joint", replace(BOTH, loss="per token")),
    "targets, matching in the Fisher metric": ("joint", replace(BOTH, loss="fisher")),
    "targets, matching, twenty epochs": ("joint", replace(BOTH, matching=Matching(epochs=20, patience=5))),
    "targets, published matching": ("joint", Levers(1.0, PUBLISHED, "compressed")),
}  # fmt: skip
# The efforts, and whom they are measured against.
PLOTTED = [
    "effort fast",
    "effort balanced",
    "effort best",
    "joint",
    "3basil",
    "3basil, published matching",
    "hassle-free",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "2:4 + rank 4": {"pattern": "2:4", "rank": 4},
    "2:8 + rank 16": {"pattern": "2:8", "rank": 16},
    "70 %, rank share 0.3": {"pattern": "unstructured", "ratio": 0.7, "rank_share": 0.3},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=32768)
    parser.add_argument("--plot", type=Path, help="draw perplexity against time")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "levers.json")
    return parser.parse_args()


def measured(args: argparse.Namespace, model: Any) -> dict[str, float]:
    """The perplexity of a model on every text, by the name of its file."""
    tokenizer = load_tokenizer(args.model)
    found = {}
    for text in args.texts:
        tokens = torch.tensor(encode(tokenizer, evaluation_text(text))[: args.max_tokens])
        found[Path(text).name] = hasslefree.perplexity(model, tokens, args.seqlen, batch=8).perplexity
    return found


def run(args: argparse.Namespace, setting: str, variant: str, seed: int) -> dict[str, Any]:
    """One row: compress, and measure."""
    recipe = Recipe(
        calibration=args.calibration, samples=args.samples, seqlen=args.seqlen, seed=seed, dtype="float32",
        **SETTINGS[setting],
    )  # fmt: skip
    chosen, start = VARIANTS[variant], time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(chosen, dict):
            hasslefree.compress(args.model, f"{folder}/out", dataclasses.replace(recipe, **chosen))
            model = load_model(f"{folder}/out", "float32", "cpu")
        else:
            method, levers = chosen
            model = load_model(args.model, "float32", "cpu")
            segments = draw(model, load_tokenizer(args.model), recipe)
            compress_two_streams(model, segments, recipe.budget(), build_method(method), levers, seed)
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        found = measured(args, model)
    return {
        "perplexity": {text: round(value, 3) for text, value in found.items()},
        "cpu_seconds": round(seconds, 1),
        "peak_mb": peak,
    }


def plot(content: dict[str, Any], path: Path) -> None:
    """The gap against time; a panel for each setting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [setting for setting in SETTINGS if setting in content["results"]]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), layout="constrained", squeeze=False)
    for axis, setting in zip(axes[0], panels, strict=True):
        points = {
            name: tuple(sum(row[f] for row in rows.values()) / len(rows) for f in ("cpu_seconds", "gap"))
            for name, rows in content["results"][setting].items()
            if name in PLOTTED
        }
        efforts = [points[name] for name in PLOTTED[:3] if name in points]
        axis.plot(*zip(*efforts, strict=True), "-", color="C0", zorder=1)
        for name, (seconds, gap) in points.items():
            place, label = (seconds, gap), name.removeprefix("effort ").replace(", published ", ",\npublished\n")
            axis.scatter(*place, color="C0" if name in PLOTTED[:3] else "C3", zorder=2)
            axis.annotate(label, place, textcoords="offset points", xytext=(4, 4), fontsize=7)
        axis.set(xscale="log", yscale="log", xlabel="CPU seconds", title=setting)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_xticks([20, 50, 100, 200, 500])
        axis.margins(0.3, 0.15)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("log(perplexity / dense perplexity)")
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    args = arguments()
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "max_tokens")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    if "dense" not in content:
        content["dense"] = measured(args, load_model(args.model, "float32", "cpu"))
    spawn = multiprocessing.get_context("spawn")
    for seed, setting, variant in itertools.product(args.seeds, args.settings, args.only):
        row = content["results"].setdefault(setting, {}).setdefault(variant, {})
        if str(seed) in row:
            continue
        with ProcessPoolExecutor(1, spawn) as own:
            found = own.submit(run, args, setting, variant, seed).result()
        ratios = [math.log(value / content["dense"][text]) for text, value in found["perplexity"].items()]
        row[str(seed)] = {"gap": sum(ratios) / len(ratios), **found}
        write(args.output, content)
        print(
            f"{setting}, {variant}, seed {seed}: gap {row[str(seed)]['gap']:.4f}, {found['cpu_seconds']} s", flush=True
        )
    if args.plot:
        plot(content, args.plot)


if __name__ == "__main__":
    main()
