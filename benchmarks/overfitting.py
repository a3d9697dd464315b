"""What overfits the calibration text: Grams, budgets dealt by gradients, or training.

    python benchmarks/overfitting.py MODEL TEXT… --calibration TEXT --mixture TEXT:SHARE% … [--size 4.6bits]
        [--effort balanced] [--rows NAME …] [--seen TEXT …] [--output FILE]

Two texts, `--calibration` (of one kind) and `--mixture` (of several, with shares), as a recipe names them, and three
parts of a compression that read a text:

- Grams: the calibration segments, from whose inputs each layer is fitted;
- budgets: the segments whose gradients say how sensitive the predictions are to each layer, and so which layer gets how
  many bits and which rank;
- training: the segments on which the compressed model learns the dense model's predictions.

A row is one of the 2 × 2 × 2 ways to give them their texts. A recipe has one text for all three, so the segments of the
budgets and of the training are exchanged here. Everything else, the seed included, is the same. Each row has a process
of its own and holds the perplexity of every text, the increase of its logarithm, and its mean and its worst value over
the kinds that neither text holds, which --seen leaves out. Rows that the output file already holds are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import hasslefree
import real_model
from harness import models
from harness import texts as kinds
from harness.models import Measurement
from harness.record import RESULTS, machine, resumed
from hasslefree.allocate.allocation import Allocation
from hasslefree.pipeline.job import Job
from hasslefree.pipeline.text import read_texts

PARTS = ("Grams", "budgets", "training")
# The name of a row → whether each part reads the mixture.
ROWS = {
    ", ".join(part for part, mixed in zip(PARTS, choice, strict=True) if mixed) or "none": choice
    for choice in itertools.product((False, True), repeat=len(PARTS))
}


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts, with shares, that each part of a compression reads, as a recipe names them."""

    grams: list[str]
    budgets: list[str]
    training: list[str]

    def compress(self, measurement: Measurement, out: str, fields: dict[str, Any]) -> Any:
        """Compress with these texts. Returns the record."""
        model = models.loaded(measurement.model, "auto")
        tokenizer = models.load_tokenizer(measurement.model)

        def read(texts: list[str]) -> Any:
            return read_texts(model, tokenizer, measurement.recipe(calibration=texts), model.device)

        pipeline: Any = importlib.import_module("hasslefree.pipeline.compress")  # the package names its function so
        by_sensitivity, matching_text = pipeline.by_sensitivity, pipeline.matching_text

        def budgets(walk: Any, plan: Any, resolved: Any, room: int, own: Tensor, world: Any) -> Allocation:
            found: Allocation = by_sensitivity(
                walk, plan, resolved, room, read(self.budgets).draw().to(own.device), world
            )
            return found

        def training(job: Job) -> Tensor | None:
            found: Tensor | None = matching_text(dataclasses.replace(job, texts=read(self.training)))
            return found

        with mock.patch.multiple(pipeline, by_sensitivity=budgets, matching_text=training):
            return hasslefree.compress(
                measurement.model, out, measurement.recipe(**fields), segments=read(self.grams).draw()
            )


def row(
    measurement: Measurement, texts: Texts, dense: dict[str, float], seen: list[str], fields: dict[str, Any]
) -> dict[str, Any]:
    """Compress with these texts, and measure."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"source": real_model.source(), "processor": machine()["processor"]}
    with tempfile.TemporaryDirectory() as scratch:
        start = time.process_time()
        report = texts.compress(measurement, f"{scratch}/out", fields)
        found["cpu_seconds"] = round(time.process_time() - start, 1)
        found["bytes_a_weight"] = report.stored_bytes / report.dense_parameters
        loaded = models.loaded(f"{scratch}/out", measurement.dtype)
        found["perplexity"] = models.rounded(measurement.perplexities(loaded))
    return found | models.increases(found["perplexity"], dense, seen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[models.options(max_tokens=16 * 1024)],
    )
    parser.set_defaults(samples=64, seqlen=512)
    models.mixture_option(parser, required=True)
    parser.add_argument("--size", default="4.6bits")
    parser.add_argument("--effort", default="balanced")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window of text")
    parser.add_argument("--dtype", default="auto", help="in which the models are evaluated")
    parser.add_argument("--seen", nargs="*", default=["c4"], help="texts of a kind that is calibrated on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="NAME", help="; ".join(ROWS))
    parser.add_argument("--output", type=Path, help="the default is benchmarks/results/overfitting_MODEL.json")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    measurement, tokenizer = Measurement.of(args), models.load_tokenizer(args.model)
    names = ("samples", "seqlen", "window", "max_tokens", "seed", "dtype", "size", "effort", "seen")
    header = {name: getattr(args, name) for name in names} | {"model": Path(args.model).name}
    header["texts"] = {kinds.name(text): kinds.digest(text, tokenizer) for text in measurement.texts}
    header["mixture"] = [Path(text).name for text in args.mixture]
    output = args.output or RESULTS / f"overfitting_{Path(args.model).name}.json"
    content = resumed(output, header, "results")
    models.fill(content, output, {("dense",): (measurement, None, None, 0, False)}, real_model.row)
    dense = content["results"]["dense"]["perplexity"]
    fields = {"size": args.size, "effort": args.effort, "coding": "fixed"}
    jobs: dict[tuple[str, ...], tuple[Any, ...]] = {}
    for name in args.rows:
        texts = Texts(*(args.mixture if mixed else [args.calibration] for mixed in ROWS[name]))
        jobs[(name,)] = (measurement, texts, dense, args.seen, fields)
    models.fill(content, output, jobs, row)


if __name__ == "__main__":
    main()
