"""What is won beyond the single layer: block matching, allocation, and what was tried beside them.

    python benchmarks/levers.py variants MODEL TEXT… --calibration FILE [--settings …] [--only NAME …] [--seeds 0 1 2]
    python benchmarks/levers.py efforts MODEL TEXT… --calibration FILE [--settings …] [--only NAME …] [--seeds 0 1 2]
    python benchmarks/levers.py rates [MODEL --calibration FILE]

TEXT and FILE are hub names, .txt or .jsonl files; FILE.jsonl[700:] takes some of its documents.

variants: rows that the output file already holds are kept. What hasslefree offers runs through `hasslefree.compress`;
what it does not offer, through `harness.streams`. Each row has a process of its own. The gap is the mean over the texts
of log(perplexity / dense perplexity).

efforts: rows as above, of every effort and of published methods, in a file of their own.

rates: what block matching wins by learning rate, on models of different kinds and depths; and the rule it goes by. The
model of the demo (4 blocks), a GPT-2 of 2 blocks that is trained here for a few minutes on the demo's calibration text,
and MODEL if it is given. Each is compressed by the layers alone, 2:4 + rank 4, and each of its blocks is matched from
there with every rate against the dense stream. A cell is the geometric mean over the blocks of the error after over the
error before, on segments that were not trained on; no block ends worse than it was. `absolute` rates are the same for
every tensor.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import models, plots, streams
from harness.layers import build_method
from harness.models import CALIBRATION, MODEL, Measurement
from harness.paper import LAYERS_ALONE
from harness.record import RESULTS, geometric_mean, machine, resumed, write
from harness.streams import Levers, Matching
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase

from hasslefree import Recipe

# The published transformer matching (3BASiL-TM, arXiv 2603.01376): 20 epochs of which the first is idle, 2e-5 for
# every tensor, a cosine down to a fifth, no segments held out; the teacher is the dense block on compressed inputs.
PUBLISHED = Matching(
    epochs=19, learning_rate=2e-5, relative=False, warm_up=0.0, decay=0.2, held_out=0.0, patience=19, retreats=0
)
MATCHED = Levers(matching=Matching())
# Fields of a recipe, or a method and what `harness.streams` does with it.
VARIANTS: dict[str, dict[str, Any] | tuple[str, Levers]] = {
    "joint": LAYERS_ALONE,
    "matching": LAYERS_ALONE | {"match_blocks": True},
    "allocation": LAYERS_ALONE | {"allocate": "error"},
    "3basil": LAYERS_ALONE | {"method": "3basil"},
    "3basil, published matching": ("3basil", Levers(matching=PUBLISHED, teacher="compressed")),
    "hassle-free": LAYERS_ALONE | {"method": "hassle-free"},
    "matching, then the logits": ("joint", replace(MATCHED, logits=Matching(learning_rate=0.003))),
    "matching, then the logits, S too": (
        "joint", replace(MATCHED, logits=Matching(learning_rate=0.003), whole=True)
    ),
    "matching in windows of two": ("joint", replace(MATCHED, window=2)),
    "matching to the compressed stream": ("joint", replace(MATCHED, teacher="compressed")),
    "matching of each token over its norm": ("joint", replace(MATCHED, loss="per token")),
    "matching in the Fisher metric": ("joint", replace(MATCHED, loss="fisher")),
    "matching, twenty epochs": ("joint", replace(MATCHED, matching=Matching(epochs=20, patience=5))),
    "published matching": ("joint", Levers(PUBLISHED, "compressed")),
}  # fmt: skip
# The efforts, and whom they are measured against.
EFFORTS: dict[str, dict[str, Any]] = {effort: {"effort": effort} for effort in ("fast", "balanced", "best")}
RIVALS = ["3basil", "hassle-free"]
SETTINGS: dict[str, dict[str, Any]] = {
    "2:4 + rank 4": {"pattern": "2:4", "rank": 4},
    "2:8 + rank 16": {"pattern": "2:8", "rank": 16},
    "70 %, rank share 0.3": {"pattern": "unstructured", "ratio": 0.7, "rank_share": 0.3},
}
ONCE = Matching(retreats=0, patience=6)
RATES = {
    **{f"{rate:g}": replace(ONCE, learning_rate=rate) for rate in (0.001, 0.003, 0.01, 0.03, 0.1)},
    **{f"{rate:g}, absolute": replace(ONCE, learning_rate=rate, relative=False) for rate in (2e-5, 2e-4, 2e-3)},
    "the rule": Matching(),
    "the rule, 20 epochs": Matching(epochs=20, patience=20),
}


def two_streams(measurement: Measurement, recipe: Recipe, method: str, levers: Levers) -> dict[str, Any]:
    """One row of what hasslefree does not offer."""
    start = time.process_time()
    model = models.loaded(measurement.model)
    segments = streams.draw(model, models.load_tokenizer(measurement.model), recipe)
    budget = recipe.resolve(with_text=False).budget
    streams.compress_two_streams(model, segments, budget, build_method(method), levers, recipe.seed)
    seconds, peak = time.process_time() - start, models.peak_mb()
    found = models.rounded(measurement.perplexities(model))
    return {"perplexity": found, "cpu_seconds": round(seconds, 1), "peak_mb": peak}


def row(measurement: Measurement, dense: dict[str, float], setting: str, variant: str) -> dict[str, Any]:
    """Compress, and measure."""
    recipe, chosen = measurement.recipe(dtype="float32", **SETTINGS[setting]), (VARIANTS | EFFORTS)[variant]
    if isinstance(chosen, dict):
        found = models.compressed(measurement, replace(recipe, **chosen))
    else:
        found = two_streams(measurement, recipe, *chosen)
    fields = {field: found[field] for field in ("perplexity", "cpu_seconds", "peak_mb")}
    return {"gap": models.gap(found["perplexity"], dense), **fields}


def run_variants(args: argparse.Namespace) -> None:
    measurement = Measurement.of(args)
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "max_tokens")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    if "dense" not in content:
        content["dense"] = measurement.dense()
    jobs = {
        (setting, variant, str(seed)): (replace(measurement, seed=seed), content["dense"], setting, variant)
        for seed, setting, variant in itertools.product(args.seeds, args.settings, args.only)
    }
    models.fill(content, args.output, jobs, row)
    if args.plot:
        plots.by_time(content, SETTINGS, list(EFFORTS), args.plot)


def gpt2(tokenizer: PreTrainedTokenizerBase, text: str, steps: int) -> PreTrainedModel:
    """A GPT-2 of 2 blocks and width 128, trained on the text."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=256, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1
        )
    )  # fmt: skip
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - 128, (16,)).tolist()
        batch = torch.stack([tokens[start : start + 128] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"gpt2: {loss.item():.2f} nats a token after {steps} steps", flush=True)
    return model.eval()


def by_rate(model: Any, tokenizer: Any, recipe: Recipe) -> dict[str, Any]:
    """For every rate the error after over the error before of each block."""
    blocks, found = streams.match_each_block(model, tokenizer, recipe, RATES)
    ratios: dict[str, dict[str, Any]] = {}
    for name, reports in found.items():
        each = [report.after / report.before for report in reports]
        ratios[name] = {"blocks": each, "mean": geometric_mean(each), "rates": [r.learning_rate for r in reports]}
        print(f"  {name}: {ratios[name]['mean']:.3f}", flush=True)
    return {"blocks": blocks, "rank": recipe.rank, "ratios": ratios}


def run_rates(args: argparse.Namespace) -> None:
    recipe = Recipe(samples=args.samples, seqlen=args.seqlen, dtype="float32", rank=4, effort="fast")
    demo = replace(recipe, calibration=str(CALIBRATION))
    tokenizer = models.load_tokenizer(str(MODEL))
    found = {"demo": by_rate(models.loaded(str(MODEL)), tokenizer, demo)}
    text = streams.calibration_text(str(CALIBRATION))
    found["gpt2"] = by_rate(gpt2(tokenizer, text, args.steps), tokenizer, demo)
    if args.model:
        own = replace(recipe, calibration=args.calibration)
        found[Path(args.model).name] = by_rate(models.loaded(args.model), models.load_tokenizer(args.model), own)
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "steps")}
    write(args.output, {"machine": machine(), "seed": 0, **header, "models": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command, names in (("variants", list(VARIANTS)), ("efforts", [*EFFORTS, *RIVALS])):
        rows = commands.add_parser(command, parents=[models.options(max_tokens=32768)])
        rows.set_defaults(run=run_variants, plot=None)
        rows.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
        rows.add_argument("--only", nargs="+", default=names, choices=names)
        rows.add_argument("--seeds", type=int, nargs="+", default=[0])
        output = "levers.json" if command == "variants" else "efforts.json"
        rows.add_argument("--output", type=Path, default=RESULTS / output)
        if command == "efforts":
            rows.add_argument("--plot", type=Path, help="draw perplexity against time")
    rates = commands.add_parser("rates")
    rates.set_defaults(run=run_rates)
    rates.add_argument("model", nargs="?")
    rates.add_argument("--calibration")
    rates.add_argument("--samples", type=int, default=64)
    rates.add_argument("--seqlen", type=int, default=128)
    rates.add_argument("--steps", type=int, default=600, help="of training the GPT-2")
    rates.add_argument("--output", type=Path, default=RESULTS / "learning_rates.json")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
