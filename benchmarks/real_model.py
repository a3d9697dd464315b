"""A real language model: perplexity, time and memory of every effort and of the published methods.

    python benchmarks/real_model.py rows MODEL TEXT… --calibration FILE [--rows NAME …] [--seeds 0 1 2]
        [--tasks FOLDER [--limit 200]] [--shared]
    python benchmarks/real_model.py ablations MODEL TEXT… --calibration FILE [--rows NAME …] [--seeds 0 1 2]
    python benchmarks/real_model.py two-four MODEL TEXT… --calibration FILE [--rows NAME …] [--seeds 0 1 2]
    python benchmarks/real_model.py frontier MODEL TEXT… --calibration FILE [--rows NAME …]
    python benchmarks/real_model.py sensitivity MODEL TEXT… --calibration FILE [--rows uniform estimate exact]
    python benchmarks/real_model.py energies MODEL --calibration FILE

TEXT and FILE are hub names, .txt or .jsonl files; FILE.jsonl[700:] takes some of its documents. Perplexity is taken in
windows of 1,024 tokens, 16 a text, in the dtype in which the model is stored. The gap is the mean over the texts of
log(perplexity / dense perplexity). Every row has a process of its own and is written as soon as it is measured; rows
that the output file already holds are kept. A row notes the version of the source and the processor that it was
measured with: a rival is not measured anew for a change of `joint`.

With --tasks, the zero-shot accuracy of every row on the eight tasks is measured too; FOLDER holds them as
`hasslefree evaluate --task-data` reads them.

With --threads, rows run on another number of threads than the file names.

With --shared, the machine does other work at the same time: no seconds are written, except those of the processor.

ablations: rows as above, of `--effort best` without one of its parts, in a file of their own. What a part costs is
given to prediction matching as more tokens, so that the CPU seconds of all rows are about the same. The file also keeps
rows of options that were deleted; they name the commit that measured them, and cannot be measured again.

two-four: rows as above at 2:4 + rank 16, of the efforts, of what lies between them and of rivals, in a file of their
own, and rows in the same bytes with another rank. Some rows do what no option does: one fits layers without the weights
of their outputs, others trust all correlations between inputs.

frontier: rows as above, of patterns and ranks with `--effort fast`, in a file of their own. Quantised rows are those of
benchmarks/four_bits.py, on a model whose weights lie on no grid.

sensitivity: `--effort fast` with uniform ranks, with those of the estimate of one backward pass, and with those of what
it estimates: the mean KL(dense ‖ pruned) of the predictions of the whole model in which one layer alone is pruned, in
float32 on the first --probes calibration segments, one forward pass for each layer.

energies: the norms of the hidden states before each block, of the first token of a segment and of the others.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import hasslefree
from harness import models
from harness.models import Measurement
from harness.paper import LAYERS_ALONE
from harness.record import RESULTS, ROOT, machine, resumed, write
from hasslefree.allocate.sensitivity import ProbedLayer
from hasslefree.checkpoint.record import read_record
from hasslefree.checkpoint.resume import unfinished_folder
from hasslefree.core import shrinkage
from hasslefree.models.blocks import find_blocks
from hasslefree.models.load import load_shapes
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from hasslefree.pipeline.text import read_texts
from hasslefree.progress import ALLOCATION, PROBES
from hasslefree.solve.methods import METHODS
from hasslefree.solve.methods.joint_on_grid import JointOnGrid

# By name, the fields of each recipe. The setting that decides: 2:4 + rank 16.
SETTING = {"pattern": "2:4", "rank": 16}
EFFORTS: dict[str, dict[str, Any]] = {effort: SETTING | {"effort": effort} for effort in ("fast", "balanced", "best")}
RIVALS: dict[str, dict[str, Any]] = {
    "3basil": SETTING | LAYERS_ALONE | {"method": "3basil"},
    "hassle-free": SETTING | LAYERS_ALONE | {"method": "hassle-free"},
    "hassle-free, exact step": SETTING | LAYERS_ALONE | {"method": "hassle-free", "low_rank": "exact"},
    "oats": SETTING | LAYERS_ALONE | {"method": "oats"},
    "sparsegpt": {"pattern": "2:4", "rank": 0, "method": "sparsegpt"},
}
# `best` without allocation, whose seconds go to more tokens of prediction matching.
ABLATIONS: dict[str, dict[str, Any]] = {
    "best, no allocation": EFFORTS["best"] | {"allocate": "uniform", "match_predictions": 225_280}
}
# The efforts, what lies between them, and rivals, by their seconds.
ALLOCATED = EFFORTS["fast"] | {"allocate": "error"}
# In as many bytes: twice the rank, with factors in eight bits.
CODED = {"pattern": "2:4", "rank": 30, "factor_bits": 8}
# `best` on a mixture of texts, by the tokens of prediction matching; and on the calibration's text alone.
TOKENS: dict[str, dict[str, Any]] = {
    **{
        f"{thousands} thousand tokens": CODED | {"effort": "best", "match_predictions": 1024 * thousands, "mixed": True}
        for thousands in (25, 50, 100, 200)
    },
    "25 thousand tokens of one text": CODED | {"effort": "best", "match_predictions": 25_600},
}
TWO_FOUR: dict[str, dict[str, Any]] = {
    "fast": EFFORTS["fast"],
    **{f"{effort}, 8-bit factors": CODED | {"effort": effort} for effort in EFFORTS},
    **{
        f"{effort}, 8-bit factors, correlations trusted": CODED | {"effort": effort, "shrunk": False}
        for effort in ("fast", "balanced")
    },
    "fast, allocation, outputs not weighted": ALLOCATED | {"weighted": False},
    "fast, allocation": ALLOCATED,
    "balanced": EFFORTS["balanced"],
    "best": EFFORTS["best"],
    "an hour": SETTING | {"minutes": 60},
    **TOKENS,
    "an hour, 8-bit factors, mixture": CODED | {"minutes": 60, "mixed": True},
    **RIVALS,
}
# The last one's divergences are measured, not estimated.
SENSITIVITY: dict[str, dict[str, Any]] = {"uniform": EFFORTS["fast"], "estimate": ALLOCATED, "exact": ALLOCATED}
# What a user chooses from. Rows whose S is on a grid are in benchmarks/four_bits.py.
FRONTIER: dict[str, dict[str, Any]] = {
    f"{pattern} + rank {rank}": {"pattern": pattern, "rank": rank, "effort": "fast"}
    for pattern in ("2:4", "4:8", "5:8", "6:8")
    for rank in (0, 16, 48, 96)
}
ROWS: dict[str, dict[str, Any] | None] = {"dense": None, **TWO_FOUR, **ABLATIONS, **FRONTIER}


def source(tree: Path = ROOT) -> str:
    """The commit of a checkout, with a mark where files differ from it."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def row(
    measurement: Measurement,
    fields: dict[str, Any] | None,
    tasks: Path | None,
    limit: int,
    timed: bool,
    threads: int | None = None,
    exported: Callable[[str], dict[str, Any]] | None = None,
    kept: Path | None = None,
) -> dict[str, Any]:
    """Compress, and measure.

    Args:
        fields: of the recipe, what `switch_off` takes, and whether it reads the "mixed" text; None for the dense
            model.
        exported: what to add to the row of a compressed folder.
        threads: None for those of this process.
        kept: the compressed folder. An earlier run that was cut off there is resumed, and the row has no times. None
            for a temporary one.
    """
    torch.set_num_threads(threads or torch.get_num_threads())
    if fields is not None:
        fields = switch_off(fields)
    found: dict[str, Any] = {
        "source": source(),
        "processor": machine()["processor"],
        "threads": torch.get_num_threads(),
    }
    if fields is not None and fields.pop("mixed", False):
        fields["calibration"] = list(measurement.mixture)
        found["calibration"] = [Path(text).name for text in measurement.mixture]
    with tempfile.TemporaryDirectory() as scratch:
        folder = measurement.model if fields is None else str(kept or f"{scratch}/out")
        if fields is not None:
            report, times = compressed(measurement.model, Path(folder), measurement.recipe(**fields), timed)
            found |= times
            found["mean_relative_error"] = report.mean_relative_error
            found["training"] = report.predictions
        model = models.loaded(folder, measurement.dtype)
        if fields is not None:
            found |= size_and_bits(report, find_blocks(load_shapes(measurement.model, "auto", False)).name)
        found["perplexity"] = models.rounded(measurement.perplexities(model))
        found["file_bytes"] = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        if exported is not None:
            found |= exported(folder)
        if tasks is not None:
            found["tasks"] = models.zero_shot(folder, list(models.TASKS), limit, tasks, "auto")
    return found


def switch_off(fields: dict[str, Any]) -> dict[str, Any]:
    """Switch off what no option does, in this process, and return the fields of the recipe.

    Args:
        fields: may hold "weighted", whether the outputs of a layer have weights, "projected", whether S is fitted in
            the norm that knows what L repairs, and "shrunk", whether correlations between inputs are.
    """
    fields = dict(fields)
    if not fields.pop("shrunk", True):
        shrinkage.TOKENS_A_DRAW = 0
    if not fields.pop("weighted", True):
        ProbedLayer.output_weights = lambda layer: None  # type: ignore[method-assign]
    if not fields.pop("projected", True):
        METHODS["joint-grid"] = JointOnGrid(left=1)
    return fields


def compressed(
    model: str, folder: Path, recipe: hasslefree.Recipe, timed: bool
) -> tuple[hasslefree.Record, dict[str, Any]]:
    """Compress a model, or what an earlier run left of it; its record, and its times and memory if it was one run."""
    if folder.exists():
        return read_record(folder), {}
    is_whole = not unfinished_folder(folder).exists()
    start = time.process_time()
    report = hasslefree.compress(model, folder, recipe, resume=True)
    if not is_whole:
        return report, {}
    times: dict[str, Any] = {"seconds": round(report.seconds, 1)} if timed else {}
    times["cpu_seconds"] = round(time.process_time() - start, 1)
    times["phases"] = {phase.name: round(phase.seconds, 1) for phase in report.phases}
    times["peak_mb"] = models.peak_mb()
    return report, times


def size_and_bits(report: hasslefree.Record, blocks: str) -> dict[str, Any]:
    """The bytes for each weight of the layers in the blocks, and the bits of embedding and head if they have a grid.

    Args:
        blocks: the name of the list of blocks in the model.
    """
    layers = [layer for layer in report.layers if layer.name.startswith(f"{blocks}.")]
    weights = sum(layer.spec.dense_parameters for layer in layers)
    ends = {layer.name: layer.spec.grid.stored_bits for layer in report.layers if layer not in layers}
    return {"bytes_a_weight": sum(layer.bytes for layer in layers) / weights, "end_bits": ends}


def run_rows(args: argparse.Namespace) -> None:
    models.check_mixture((ROWS[name] for name in args.rows), args.mixture)
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "window", "max_tokens")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    measurement = Measurement.of(args)
    settings = args.tasks, args.limit, not args.shared, args.threads
    jobs = {
        (name, str(seed)): (replace(measurement, seed=seed), ROWS[name], *settings)
        for seed, name in itertools.product(args.seeds, args.rows)
        if ROWS[name] is not None or seed == args.seeds[0]  # the dense model has no seed
    }
    models.fill(content, args.output, jobs, row)


def exact_divergence(model: Any, segments: Tensor) -> Callable[[ProbedLayer, Tensor], float]:
    """What `ProbedLayer.divergence` estimates. model: dense. segments: (segments, tokens)."""

    @torch.no_grad()
    def predictions() -> Tensor:
        return torch.cat([F.log_softmax(model(segment[None]).logits[0], -1) for segment in segments])

    dense = predictions()

    def divergence(layer: ProbedLayer, changed: Tensor) -> float:
        weight = model.get_submodule(layer.name).weight
        kept, weight.data = weight.data, changed.to(weight.dtype)
        pruned = predictions()
        weight.data = kept
        return F.kl_div(pruned, dense, log_target=True, reduction="sum").item() / len(dense)

    return divergence


def sensitivity_row(measurement: Measurement, name: str, probes: int) -> dict[str, Any]:
    """One row of `sensitivity`, with the seconds of the allocation and of all."""
    recipe = measurement.recipe(**SENSITIVITY[name])
    if name == "exact":
        model = models.loaded(measurement.model)
        tokenizer = models.load_tokenizer(measurement.model)
        segments = read_texts(model, tokenizer, recipe, model.device).draw()[:probes]
        ProbedLayer.divergence = exact_divergence(model, segments)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        report = hasslefree.compress(measurement.model, f"{scratch}/out", recipe)
        perplexity = models.rounded(measurement.perplexities(models.loaded(f"{scratch}/out", "auto")))
    allocation = sum(phase.seconds for phase in report.phases if phase.name in (PROBES, ALLOCATION))
    return {
        "processor": machine()["processor"],
        "perplexity": perplexity,
        "seconds": round(report.seconds, 1),
        "allocation_seconds": round(allocation, 1),
        "sensitivities": report.sensitivities,
    }


def run_sensitivity(args: argparse.Namespace) -> None:
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "window", "max_tokens", "probes")}
    content = resumed(args.output, header | {"model": Path(args.model).name}, "results")
    jobs = {(name,): (Measurement.of(args), name, args.probes) for name in args.rows}
    models.fill(content, args.output, jobs, sensitivity_row)


def run_energies(args: argparse.Namespace) -> None:
    model = models.loaded(args.model)
    recipe = hasslefree.Recipe(calibration=args.calibration, samples=args.samples, seqlen=args.seqlen, seed=args.seed)
    segments = read_texts(model, models.load_tokenizer(args.model), recipe, model.device).draw()
    walk = Walk.open(model, find_blocks(model), Weights(model, model.device), segments[:1])
    hidden, rows = walk.entering(segments), []
    for _ in walk.visits(hidden):
        rows.append(norms(hidden.states))  # of what enters a block
    rows.append(norms(hidden.states))
    header = {name: getattr(args, name) for name in ("samples", "seqlen", "seed")}
    content = {"machine": machine(), **header, "model": Path(args.model).name, "rows": rows}
    write(args.output, content)


def norms(states: torch.Tensor) -> dict[str, float]:
    """Medians of the norms of hidden states (segments, tokens, width), and the first tokens' share of the energy."""
    found = states.norm(dim=-1)
    share = found[:, 0].square().sum() / found.square().sum()
    medians = {"first": found[:, 0].median(), "others": found[:, 1:].median()}
    return {name: round(value.item(), 4) for name, value in (medians | {"first_share": share}).items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command, names, output in (
        ("rows", ["dense", *EFFORTS, *RIVALS], "real_model.json"),
        ("ablations", ["dense", "best", *ABLATIONS], "ablations.json"),
        ("two-four", ["dense", *TWO_FOUR], "two_four.json"),
        ("frontier", ["dense", *FRONTIER], "frontier.json"),
    ):
        rows = commands.add_parser(command, parents=[models.options(max_tokens=16 * 1024)])
        rows.set_defaults(run=run_rows, samples=64, seqlen=512)
        models.mixture_option(rows, help="for the rows of its name")
        rows.add_argument("--window", type=int, default=1024, help="tokens of a window of text")
        rows.add_argument("--rows", nargs="+", default=names, choices=names)
        rows.add_argument("--seeds", nargs="+", type=int, default=[0])
        rows.add_argument("--tasks", type=Path)
        rows.add_argument("--limit", type=int, default=200, help="questions of each task")
        rows.add_argument("--shared", action="store_true")
        rows.add_argument("--threads", type=int, help="of every row; the default is that of the file")
        rows.add_argument("--output", type=Path, default=RESULTS / output)

    sensitivity = commands.add_parser("sensitivity", parents=[models.options(max_tokens=16 * 1024)])
    sensitivity.set_defaults(run=run_sensitivity, samples=64, seqlen=512)
    sensitivity.add_argument("--window", type=int, default=1024, help="tokens of a window of text")
    sensitivity.add_argument("--probes", type=int, default=1, help="segments, for the exact divergence")
    sensitivity.add_argument("--rows", nargs="+", default=list(SENSITIVITY), choices=SENSITIVITY)
    sensitivity.add_argument("--output", type=Path, default=RESULTS / "sensitivity.json")

    energies = commands.add_parser("energies")
    energies.set_defaults(run=run_energies)
    energies.add_argument("model")
    energies.add_argument("--calibration", required=True)
    energies.add_argument("--samples", type=int, default=16)
    energies.add_argument("--seqlen", type=int, default=512)
    energies.add_argument("--seed", type=int, default=0)
    energies.add_argument("--output", type=Path, default=RESULTS / "energies.json")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.run(args)


if __name__ == "__main__":
    main()
