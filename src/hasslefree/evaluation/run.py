"""Evaluate a model, dense or compressed: perplexity on texts and accuracy on tasks.

Perplexity is that of a fixed-length model (https://huggingface.co/docs/transformers/perplexity):
the text is cut into windows that do not overlap; the first token of a window has no context and is
not scored.
"""

import dataclasses
import importlib.metadata
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.bar import with_bar
from hasslefree.checkpoint.record import versions
from hasslefree.errors import CalibrationError, ModelError, NonFiniteError, option
from hasslefree.evaluation.harness import Scores, evaluate_tasks
from hasslefree.evaluation.tasks import check_harness, check_tasks
from hasslefree.models.load import check_ids, load_model, resolve_seqlen
from hasslefree.models.probe import sees_later_tokens
from hasslefree.models.tokenizer import (
    encode,
    is_rendered,
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
    """

    perplexity: float
    tokens: int
    scored: int
    window: int


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
    phases: Phases | None = None,
    name: str = "perplexity",
) -> Perplexity:
    """Compute the perplexity of a causal language model on a text.

    Args:
        tokens: the token ids (n,) of the text, cut into windows of `window` tokens.
        batch: windows at a time.
        windows: score only this number of windows, the first ones.
        remainder: also score a shorter last window.
        first: token ids with which every window begins, in place of its own.
        phases: the run to which the phase belongs in which the windows are counted.
        name: of that phase.

    Raises:
        CalibrationError: too few tokens to score one, in the text or in a window.
        NonFiniteError: the model gives NaN.
    """
    if windows is not None:
        tokens = tokens[: windows * window]
    if not remainder:
        if len(tokens) < window:
            raise CalibrationError(
                f"{len(tokens)} tokens do not fill one window of {window}, and only full windows"
                f" are scored; use a smaller {option('seqlen')} or more tokens"
            )
        tokens = tokens[: len(tokens) // window * window]
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
    total = 0.0
    scored = 0
    count = sum(len(rows) for rows in batches)
    with (phases or Phases()).phase(name, count, "windows") as phase:
        for rows in batches:
            rows = rows.to(device)
            logits = model(input_ids=rows, use_cache=False).logits[:, unscored - 1 : -1].float()
            targets = rows[:, unscored:].flatten()
            total += F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
            scored += targets.numel()
            phase.advance(len(rows))
    value = torch.tensor(total / scored, dtype=torch.float64).exp().item()
    if not math.isfinite(value):
        raise NonFiniteError(
            "the model gives NaN or Inf on this text; look for NaN or Inf in its weights, or try"
            f" {option('dtype', 'float32')}"
        )
    return Perplexity(value, len(tokens), scored, window)


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


@typed
@with_bar
def evaluate(
    model: str | Path,
    texts: Sequence[str] = (),
    tasks: Sequence[str] = (),
    *,
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
        seqlen: tokens per window; None for 2048, or the model's limit if that is less.
        max_tokens: only the first tokens of each text.
        batch: windows, or sequences of a task, at a time; None for 1 window, and as for
            `evaluate_tasks`.
        dtype, device, trust_remote_code: as for `load_model`.
        first_token: begin every window of a text with what the tokenizer puts before a text.
        limit, task_data, cache: of the tasks; `limit`, `folder` and `cache` of `evaluate_tasks`.
        keep: called with the results so far, after each text and each task.
        progress: as for `hasslefree.compress`.

    Returns:
        {"model", "dtype", "device", "versions", "perplexity": {text: {"perplexity", "tokens",
        "scored", "window", "first_tokens": with which every window begins, "protocol"}}, "tasks":
        {task: as for `evaluate_tasks`}, "limit", "average": the mean of the tasks' values}, the
        last three only with tasks.
    """
    for text in texts:
        check_text(text)
    if tasks:
        check_tasks(tasks, task_data)
        check_harness()
    phases = Phases(progress)
    with phases.phase(LOADING):
        tokenizer = load_tokenizer(str(model), trust_remote_code)
        loaded = load_model(str(model), dtype, device, trust_remote_code)
        check_causal(loaded)
    libraries = versions()
    if tasks:
        libraries["lm_eval"] = importlib.metadata.version("lm_eval")
    results: dict[str, Any] = {
        "model": str(model),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "versions": libraries,
    }
    for text in texts:
        protocol = evaluation_protocol(text)
        if not first_token:
            protocol = dataclasses.replace(protocol, first_token=False)
        measured = text_perplexity(
            loaded, tokenizer, text, protocol, seqlen, max_tokens, batch or 1, phases
        )
        results.setdefault("perplexity", {})[text] = measured
        logger.info("perplexity of %s on %s: %.3f", model, text, measured["perplexity"])
        keep(results)

    def keep_scores(scores: Scores) -> None:
        task, score = list(scores.items())[-1]
        logger.info("%s of %s on %s: %.2f %%", score["metric"], model, task, 100 * score["value"])
        values = [score["value"] for score in scores.values()]
        results["tasks"] = scores
        results["limit"] = limit
        results["average"] = sum(values) / len(values)
        keep(results)

    if tasks:
        evaluate_tasks(
            loaded,
            tokenizer,
            tasks,
            batch=batch,
            limit=limit,
            folder=task_data,
            cache=cache,
            phases=phases,
            keep=keep_scores,
        )
    return results


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
) -> dict[str, Any]:
    """Measure the perplexity on a text by a protocol; other arguments as for `evaluate`."""
    name = Path(text).name
    first: list[int] = []
    if protocol.first_token:
        first, _ = surrounding_tokens(tokenizer)
    with phases.phase(f"reading {name}"):
        documents = evaluation_documents(text)
        joined = protocol.joiner.join(written(tokenizer, document) for document in documents)
        special_tokens = protocol.special_tokens and not is_rendered(tokenizer, documents[0])
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
        phases=phases,
        name=f"perplexity on {name}",
    )
    taken = {"first_tokens": first, "protocol": dataclasses.asdict(protocol)}
    return dataclasses.asdict(result) | taken
