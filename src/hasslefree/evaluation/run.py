"""Evaluate a model, dense or compressed: perplexity on texts and accuracy on tasks.

Perplexity is that of a fixed-length model (https://huggingface.co/docs/transformers/perplexity):
the text is cut into windows that do not overlap; the first token of a window has no context and is
not scored.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.bar import with_bar
from hasslefree.checkpoint.record import KLRecord, kl_record, versions
from hasslefree.core.predictions import ENTRIES, Comparison
from hasslefree.core.products import fast_products
from hasslefree.errors import CalibrationError, ModelError, NonFiniteError, option
from hasslefree.evaluation.harness import evaluate_tasks, load_tasks
from hasslefree.models.load import check_ids, load_model, resolve_seqlen
from hasslefree.models.names import recorded_name
from hasslefree.models.probe import sees_later_tokens
from hasslefree.models.tokenizer import (
    encode,
    is_begun,
    load_tokenizer,
    surrounding_tokens,
    written,
)
from hasslefree.progress import LOADING, Listener, Phases
from hasslefree.texts.hub import Protocol
from hasslefree.texts.sources import check_text, evaluation_documents, evaluation_protocol
from hasslefree.validation import Positive, typed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Perplexity:
    """The exponential of the mean negative log-likelihood (nats) of the scored tokens.

    Args:
        tokens: the length of the text.
        scored: the number of tokens that were predicted.
        window: the tokens in a window.
        dense: the perplexity of the dense model on the same tokens; None if it was not measured.
        kl: the KL divergence from the dense model on these tokens; None likewise.
    """

    perplexity: float
    tokens: int
    scored: int
    window: int
    dense: float | None = None
    kl: KLRecord | None = None


@typed
@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokens: Tensor,
    window: Positive,
    batch: Positive = 1,
    *,
    windows: Positive | None = None,
    remainder: bool = True,
    first: Sequence[int] = (),
    dense: nn.Module | None = None,
    phases: Phases | None = None,
    name: str = "perplexity",
) -> Perplexity:
    """Compute the perplexity of a causal language model on a text.

    Args:
        tokens: the token ids (n,) of the text, cut into windows of `window` tokens.
        batch: windows at a time.
        windows: score only the first `windows` windows; None for all.
        remainder: also score a shorter last window.
        first: token ids that replace the first tokens of every window.
        dense: a model with the same vocabulary, on the same device, to compare with.
        phases: the run in which the windows are counted as a phase.
        name: of that phase.

    Raises:
        CalibrationError: too few tokens to score one, in the text or in a window.
        NonFiniteError: a model gives NaN.
        ModelError: the vocabularies of the models differ in size.
    """
    tokens = scored_text(tokens, window, windows, remainder)
    # The first token of a window has no context, and `first` is no text.
    unscored = max(len(first), 1)
    for what, size in {"text": len(tokens), "window": window}.items():
        if size <= unscored:
            raise CalibrationError(
                f"perplexity needs a {what} of at least {unscored + 1} tokens, got {size}; give a"
                " longer one"
            )
    tokens = tokens.clone()
    for offset, token in enumerate(first):
        tokens[offset::window] = token
    device = next(model.parameters()).device
    batches = batches_of_windows(tokens, window, batch)
    comparison = Comparison()
    loss = 0.0
    dense_loss = 0.0
    scored = 0
    with (phases or Phases()).phase(name, sum(map(len, batches)), "windows") as phase:
        for rows in batches:
            rows = rows.to(device)
            targets = rows[:, unscored:].flatten()
            predicted = predictions(model, rows, unscored)
            loss += total_loss(predicted, targets)
            if dense is not None:
                expected = predictions(dense, rows, unscored)
                dense_loss += total_loss(expected, targets)
                comparison.add(dense=expected, compressed=predicted)
            scored += targets.numel()
            phase.advance(len(rows))
    value = exponential(loss / scored, "model")
    if dense is None:
        return Perplexity(value, len(tokens), scored, window)
    before = exponential(dense_loss / scored, "dense model")
    return Perplexity(value, len(tokens), scored, window, before, kl_record(comparison))


def scored_text(tokens: Tensor, window: int, windows: int | None, remainder: bool) -> Tensor:
    """The part of a text (n,) that is scored. Arguments and errors as for `perplexity`."""
    if windows is not None:
        tokens = tokens[: windows * window]
    if remainder:
        return tokens
    if len(tokens) < window:
        raise CalibrationError(
            f"{len(tokens)} tokens do not fill one window of {window}, and only full windows"
            f" are scored; use a shorter window ({option('seqlen')} of `evaluate`) or more tokens"
        )
    return tokens[: len(tokens) // window * window]


def predictions(model: nn.Module, rows: Tensor, unscored: int) -> Tensor:
    """Return the logits (tokens, vocabulary) for the scored tokens of some windows.

    Args:
        rows: token ids (windows, window).
        unscored: number of tokens at the beginning of each window that are not scored.
    """
    with fast_products(model):
        logits: Tensor = model(input_ids=rows, use_cache=False).logits
    return logits[:, unscored - 1 : -1].flatten(0, 1)


def total_loss(logits: Tensor, targets: Tensor) -> float:
    """The sum of the negative log-likelihoods of targets (tokens,), in nats."""
    rows = max(ENTRIES // logits.shape[-1], 1)
    losses: list[Tensor] = []
    for chunk, answers in zip(logits.split(rows), targets.split(rows), strict=True):
        losses.append(F.cross_entropy(chunk.float(), answers, reduction="sum"))
    return math.fsum(torch.stack(losses).tolist())


def exponential(loss: float, which: str) -> float:
    """The perplexity for a mean loss; a NonFiniteError if it is not finite. which: the model."""
    value = torch.tensor(loss, dtype=torch.float64).exp().item()
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the {which} gives NaN or Inf on this text; look for NaN or Inf in its weights, or"
            f" try {option('dtype', 'float32')}"
        )
    return value


def batches_of_windows(
    tokens: Tensor,
    window: int,
    batch: int,
) -> list[Tensor]:
    """Cut token ids (n,) into batches (at most `batch`, window), and a shorter last window (1, m).

    A single token at the end, which has no context, is left out.
    """
    full = len(tokens) // window * window
    batches: list[Tensor] = []
    if full:
        batches.extend(tokens[:full].view(-1, window).split(batch))
    if len(tokens) - full > 1:
        batches.append(tokens[full:][None])
    return batches


@dataclass(frozen=True)
class Subject:
    """A model to evaluate. results: as `evaluate` returns them, without those of a dense model."""

    model: Any
    tokenizer: Any
    results: dict[str, Any]

    @classmethod
    def load(
        cls,
        name: str,
        libraries: dict[str, str],
        dtype: str,
        device: str | None,
        trust_remote_code: bool,
    ) -> Self:
        """Load a causal language model. libraries: their versions; others as for `load_model`."""
        tokenizer = load_tokenizer(name, trust_remote_code)
        model = load_model(name, dtype, device, trust_remote_code)
        check_causal(model)
        results = {
            "model": recorded_name(name),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "versions": libraries,
        }
        return cls(model, tokenizer, results)

    def add_scores(self, task: str, scores: dict[str, Any], limit: int | None) -> None:
        """Add the scores of a task to the results.

        Args:
            scores: from `evaluate_tasks`.
            limit: number of rows used of each task; None for all.
        """
        name = self.results["model"]
        percent = 100 * scores["value"]
        logger.info("%s of %s on %s: %.2f %%", scores["metric"], name, task, percent)
        tasks = self.results.setdefault("tasks", {})
        tasks[task] = scores
        values = [each["value"] for each in tasks.values()]
        self.results.update(limit=limit, average=sum(values) / len(values))


@typed
@with_bar
def evaluate(
    model: str | Path,
    texts: Sequence[str] = (),
    tasks: Sequence[str] = (),
    *,
    dense: str | Path | None = None,
    seqlen: Positive | None = None,
    max_tokens: Positive | None = None,
    batch: Positive | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    first_token: bool = True,
    limit: Positive | None = None,
    task_data: Path | None = None,
    cache: Path | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
    progress: Listener | None = None,
) -> dict[str, Any]:
    """Measure the perplexity of a model, dense or compressed, on texts, and its accuracy on tasks.

    Args:
        texts: names of `texts.sources.MEASURED`, or paths.
        tasks: names of `evaluation.tasks.TASKS`.
        dense: the model from which `model` was made, to measure on the same windows, with the KL
            divergence between the two; both are in memory. None for no such model.
        seqlen: tokens per window; None for 2048, or the model's limit if that is less.
        max_tokens: number of tokens to use of each text; None for all.
        batch: windows, or sequences of a task, at a time; None for 1 window, and as for
            `evaluate_tasks`.
        dtype, device, trust_remote_code: as for `load_model`.
        first_token: begin every window with the tokens that the tokenizer puts before a text.
        limit, cache: as for `evaluate_tasks`.
        task_data: a folder with <task>.jsonl files, instead of the hub.
        keep: called with the results so far, after each text and each task.
        progress: as for `hasslefree.compress`.

    Returns:
        {"model", "dtype", "device", "versions", "perplexity": {text: {"perplexity", "tokens",
        "scored", "window", "first_tokens": with which every window begins, "protocol", "kl": a
        `KLRecord`}}, "tasks": {task: as for `evaluate_tasks`}, "limit", "average": the mean of the
        tasks' values, "dense": the same of the dense model}. tasks, limit and average are there
        only with tasks; kl and dense only with a dense model.

    Raises:
        ModelError: a model cannot be measured, or the vocabularies of the two differ.
    """
    texts = list(dict.fromkeys(texts))
    for text in texts:
        check_text(text)
    phases = Phases(progress)
    libraries = versions()
    loaded: dict[str, Any] = {}
    if tasks:
        loaded = load_tasks(tasks, task_data, limit, phases)
        libraries = versions("lm_eval")
    names = [str(model)]
    if dense is not None:
        names.append(str(dense))
        check_same_vocabulary(str(model), str(dense), trust_remote_code)
    with phases.phase(LOADING):
        subjects = [
            Subject.load(name, libraries, dtype, device, trust_remote_code) for name in names
        ]
    results = subjects[0].results
    beside = None
    if dense is not None:
        results["dense"] = subjects[1].results
        beside = subjects[1].model
    for text in texts:
        protocol = evaluation_protocol(text)
        if not first_token:
            protocol = dataclasses.replace(protocol, first_token=False)
        row = text_perplexity(
            subjects[0].model,
            subjects[0].tokenizer,
            text,
            protocol,
            seqlen,
            max_tokens,
            batch or 1,
            phases,
            beside,
        )
        add_row(subjects, text, row)
        keep(results)

    if not loaded:
        return results
    for subject in subjects:
        scored = evaluate_tasks(
            subject.model,
            subject.tokenizer,
            loaded,
            batch=batch,
            limit=limit,
            cache=cache,
            phases=phases,
        )
        with closing(scored):  # restores torch and datasets at once if `keep` fails
            for task, scores in scored:
                subject.add_scores(task, scores, limit)
                keep(results)
    return results


def add_row(subjects: Sequence[Subject], text: str, row: dict[str, Any]) -> None:
    """Add a row of `text_perplexity` to the results of a model and of its dense model."""
    rows = [row]
    before = row.pop("dense", None)
    if before is not None:
        of_dense = row | {"perplexity": before}
        del of_dense["kl"]
        rows.append(of_dense)
    for subject, measured in zip(subjects, rows, strict=True):
        results = subject.results
        results.setdefault("perplexity", {})[text] = measured
        value = measured["perplexity"]
        logger.info("perplexity of %s on %s: %.3f", results["model"], text, value)


def check_same_vocabulary(
    model: str,
    dense: str,
    trust_remote_code: bool,
) -> None:
    """Raise a ModelError if the tokens of two models differ, before their weights are loaded."""
    tokenizer = load_tokenizer(model, trust_remote_code)
    if tokenizer.get_vocab() != load_tokenizer(dense, trust_remote_code).get_vocab():
        raise ModelError(
            f"the vocabularies of {model} and {dense} differ, and the KL divergence compares the"
            " probabilities of the same tokens; give the model that was compressed with"
            f" {option('dense')}, or use `hasslefree evaluate --no-kl`"
        )


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Raise a ModelError if the logits at a token depend on the token after it."""
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]], device=model.device)
    before = model(input_ids=ids[:1], use_cache=False).logits[0, :-1]
    after = model(input_ids=ids[1:], use_cache=False).logits[0, :-1]
    if sees_later_tokens(before, after, before.dtype):
        raise ModelError(
            f"{type(model).__name__} is not a decoder: its output for a token depends on the tokens"
            " after it; perplexity and tasks are defined for causal language models"
        )


def text_perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    protocol: Protocol,
    seqlen: int | None,
    max_tokens: int | None,
    batch: int,
    phases: Phases,
    dense: Any = None,
) -> dict[str, Any]:
    """Measure the perplexity on a text by a protocol; other arguments as for `evaluate`.

    dense: the loaded dense model; None leaves its fields out of the result.
    """
    name = Path(text).name
    first: list[int] = []
    if protocol.first_token:
        first, _ = surrounding_tokens(tokenizer)
    with phases.phase(f"reading {name}"):
        documents = evaluation_documents(text)
        joined = protocol.joiner.join(written(tokenizer, document) for document in documents)
        special_tokens = protocol.special_tokens and not is_begun(tokenizer, documents[0], joined)
        tokens = encode(tokenizer, joined, max_tokens, special_tokens)
    check_ids(model, tokens, tokenizer)
    result = perplexity(
        model,
        tokens,
        resolve_seqlen(model, seqlen),
        batch,
        windows=protocol.windows,
        remainder=protocol.remainder,
        first=first,
        dense=dense,
        phases=phases,
        name=f"perplexity on {name}",
    )
    taken = {"first_tokens": first, "protocol": dataclasses.asdict(protocol)}
    row = dataclasses.asdict(result) | taken
    if dense is None:
        del row["dense"], row["kl"]
    return row
