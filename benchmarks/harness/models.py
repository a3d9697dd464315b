"""A whole model: compress it and measure its perplexity, a row at a time, each in a process of its own.

FILE of the command lines is a hub name, a .txt or a .jsonl file; FILE.jsonl[700:] takes some of its documents. TEXT is
the same, or a kind of text as harness/texts.py reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import hasslefree
from harness import texts as kinds
from harness.record import mean, write
from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, MODEL, run_demo
from hasslefree.evaluation.harness import evaluate_tasks, load_tasks
from hasslefree.evaluation.run import perplexity, text_perplexity
from hasslefree.evaluation.tasks import TASKS
from hasslefree.models.blocks import find_blocks
from hasslefree.models.load import load_model
from hasslefree.models.sites import find_sites
from hasslefree.models.tokenizer import load_tokenizer, surrounding_tokens
from hasslefree.packed.linear import compressed_layers
from hasslefree.progress import Phases
from hasslefree.texts.sources import evaluation_protocol

__all__ = ["CALIBRATION", "MODEL", "TASKS", "load_tokenizer"]

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The model, and what is the same for all of its rows.

    Args:
        mixture: other texts with shares, for the rows that ask for them.
        max_tokens: only the first tokens of each text. window: tokens of its windows; None for seqlen.
        dtype: in which the models are evaluated; "auto" for that in which one is stored.
    """

    model: str
    texts: tuple[str, ...]
    calibration: str
    samples: int
    seqlen: int
    max_tokens: int
    seed: int = 0
    window: int | None = None
    dtype: str = "auto"
    mixture: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Measurement:
        names = [field.name for field in dataclasses.fields(cls) if hasattr(args, field.name)]
        given = {name: getattr(args, name) for name in names}
        return cls(**given | {"texts": kinds.listed(args.texts), "mixture": tuple(getattr(args, "mixture", ()))})

    def recipe(self, **fields: Any) -> Recipe:
        given: dict[str, Any] = {"calibration": self.calibration, "samples": self.samples, "seqlen": self.seqlen}
        given |= {"seed": self.seed, "check": False}  # the rows have perplexities of their own
        return Recipe(**given | fields)

    def perplexities(self, model: Any) -> dict[str, float]:
        """Of a loaded model on every text, by the text's name."""
        tokenizer, window, found = load_tokenizer(self.model), self.window or self.seqlen, {}
        for text in self.texts:
            name = kinds.name(text)
            if name in kinds.PLACES:
                tokens = kinds.tokens(text, tokenizer, self.max_tokens)
                first, _ = surrounding_tokens(tokenizer)
                found[name] = perplexity(model, tokens, window, first=first).perplexity
            else:
                protocol = evaluation_protocol(text)
                one = text_perplexity(model, tokenizer, text, protocol, window, self.max_tokens, 4, Phases())
                found[name] = one["perplexity"]
        return found

    def dense(self) -> dict[str, float]:
        return self.perplexities(loaded(self.model))


def options(max_tokens: int) -> argparse.ArgumentParser:
    """The arguments that make a `Measurement`, as a parent of a command's parser."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=max_tokens)
    return parser


def mixture_option(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """Add the texts with shares that rows may be calibrated on instead."""
    parser.add_argument("--mixture", nargs="+", default=[], metavar="TEXT", **settings)


def check_mixture(rows: Iterable[Mapping[str, Any] | None], mixture: Sequence[str]) -> None:
    """Raise SystemExit if one of these settings asks for a mixture and there is none."""
    if not mixture and any((settings or {}).get("mixed") for settings in rows):
        raise SystemExit('the rows named "mixture" need its texts: --mixture TEXT:SHARE% …')


def loaded(folder: str, dtype: str = "float32") -> Any:
    """A model, dense or compressed, on the CPU, with S unpacked once. dtype: "auto" for that in which it is stored."""
    model = load_model(folder, dtype, "cpu")
    if compressed_layers(model):
        hasslefree.use_backend(model, "unpacked")
    return model


def compressed(measurement: Measurement, recipe: Recipe) -> Row:
    """Compress and measure: all that a row may hold. Times and memory are those of the compression alone."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        report = hasslefree.compress(measurement.model, f"{folder}/out", recipe)
        seconds, peak = time.process_time() - start, peak_mb()
        found = measurement.perplexities(loaded(f"{folder}/out"))
        stored, weights = report.stored_bytes, report.dense_parameters
        if recipe.method == "osscar":  # the narrow model is what takes less
            hasslefree.export(f"{folder}/out", f"{folder}/narrow", "narrow")
            weights = linear_weights(measurement.model)
            stored = 2 * linear_weights(f"{folder}/narrow")  # of a checkpoint in two bytes
    return {
        "perplexity": rounded(found),
        "bytes_a_weight": stored / weights,
        "mean_relative_error": report.mean_relative_error,
        "relative_errors": {layer.name: layer.relative_error for layer in report.layers},
        "seconds": round(report.seconds, 1),
        "solver_seconds": round(sum(layer.seconds for layer in report.layers), 1),
        "cpu_seconds": round(seconds, 1),
        "kept_share": report.kept_share,
        "peak_mb": peak,
    }


def rounded(perplexity: Mapping[str, float]) -> dict[str, float]:
    return {text: round(value, 3) for text, value in perplexity.items()}


def peak_mb() -> int:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def linear_weights(model: str) -> int:
    """The number of weights of every linear layer in the blocks of a dense model."""
    blocks = find_blocks(loaded(model)).modules
    return sum(math.prod(site.shape) for block in blocks for site in find_sites(block).values())


def gap(perplexity: Mapping[str, float], dense: Mapping[str, float]) -> float:
    """The mean over texts of log(perplexity / dense perplexity)."""
    return mean(math.log(value / dense[text]) for text, value in perplexity.items())


def increases(perplexity: Mapping[str, float], dense: Mapping[str, float], seen: Iterable[str]) -> Row:
    """Of log perplexity on each text; the mean and the worst over those of another kind than was calibrated on.

    Args:
        seen: the texts of that kind.
    """
    by_text = {text: round(math.log(value / dense[text]), 4) for text, value in perplexity.items()}
    unseen = [value for text, value in by_text.items() if text not in seen]
    return {"increase": by_text, "unseen": round(mean(unseen), 4), "worst": max(unseen)}


def fill(
    content: dict[str, Any], output: Path, jobs: Mapping[tuple[str, ...], tuple[Any, ...]], run: Callable[..., Row]
) -> None:
    """Measure the rows that content["results"] does not hold, and write the file after each.

    Args:
        jobs: the keys under which a row stands, one below the other → the arguments of `run`, which is called in a
            process of its own.
    """
    spawn = multiprocessing.get_context("spawn")
    for place, arguments in jobs.items():
        rows = content["results"]
        for key in place[:-1]:
            rows = rows.setdefault(key, {})
        if place[-1] in rows:
            continue
        with ProcessPoolExecutor(1, spawn) as own:
            rows[place[-1]] = own.submit(run, *arguments).result()
        write(output, content)
        print(", ".join(place), rows[place[-1]], flush=True)


def zero_shot(model: str, tasks: list[str], limit: int | None, task_data: Path, dtype: str = "float32") -> Row:
    """The accuracy of a model, dense or compressed, on every task."""
    phases = Phases()
    checked = load_tasks(tasks, task_data, limit, phases)
    scored = evaluate_tasks(
        loaded(model, dtype), load_tokenizer(model), checked, batch=16, limit=limit, cache=None, phases=phases
    )
    return dict(scored)


def demo_rows(rounds: int) -> list[Row]:
    """The rows of `hasslefree demo`. rounds: of hassle-free."""
    return [dataclasses.asdict(row) for row in run_demo(None, rounds)[0]]
