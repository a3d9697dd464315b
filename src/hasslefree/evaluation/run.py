"""Evaluate a model, dense or compressed: perplexity on texts and accuracy on tasks."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hasslefree.data import check_text, evaluation_protocol, evaluation_text
from hasslefree.errors import ModelError
from hasslefree.evaluation.harness import evaluate_tasks
from hasslefree.evaluation.perplexity import perplexity
from hasslefree.evaluation.tasks import check_harness, check_tasks
from hasslefree.folder.record import versions
from hasslefree.models.load import load_model, load_tokenizer, resolve_seqlen
from hasslefree.models.probe import sees_later_tokens
from hasslefree.phases import LOADING, Listener, Phases


def evaluate(
    model: str,
    texts: Sequence[str] = (),
    tasks: Sequence[str] = (),
    *,
    seqlen: int | None = None,
    max_tokens: int | None = None,
    batch: int | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    limit: int | None = None,
    task_data: Path | None = None,
    cache: Path | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
    progress: Listener | None = None,
) -> dict[str, Any]:
    """The perplexity of a model, dense or compressed, on texts, and its zero-shot accuracy on tasks.

    Args:
        texts: hub names or paths. tasks: names of `evaluation.tasks.TASKS`.
        seqlen: tokens per window; None for 2048, or the model's limit if that is less.
        max_tokens: only the first tokens of each text.
        batch: windows, or sequences of a task, at a time; None for 1 window, and as for `evaluate_tasks`.
        dtype, device, trust_remote_code: as for `load_model`.
        limit, task_data, cache: of the tasks; `limit`, `folder` and `cache` of `evaluate_tasks`.
        keep: called with the results so far, after each text and after the tasks.
        progress: as for `hasslefree.compress`.

    Returns:
        {"model", "dtype", "device", "versions",
        "perplexity": {text: {"perplexity", "tokens", "scored", "window", "protocol"}},
        "tasks": {task: as for `evaluate_tasks`}, "limit", "average": the mean of the tasks' values}, the last three
        only with tasks.

    Raises:
        HasslefreeError: as far as possible before the model is loaded.
    """
    for text in texts:
        check_text(text)
    if tasks:
        check_tasks(tasks, task_data)
        check_harness()
    phases = Phases(progress)
    with phases.phase(LOADING):
        tokenizer = load_tokenizer(model, trust_remote_code)
        loaded = load_model(model, dtype, device, trust_remote_code)
        check_causal(loaded)
    results: dict[str, Any] = {
        "model": model,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "versions": versions() | ({"lm_eval": importlib.metadata.version("lm_eval")} if tasks else {}),
    }
    if texts:
        results["perplexity"] = {}
    for text in texts:
        measured = text_perplexity(loaded, tokenizer, text, seqlen, max_tokens, batch or 1, phases)
        results["perplexity"][text] = measured
        keep(results)
    if tasks:
        scores = evaluate_tasks(
            loaded, tokenizer, tasks, batch=batch, limit=limit, folder=task_data, cache=cache, phases=phases
        )
        average = sum(score["value"] for score in scores.values()) / len(scores)
        results |= {"tasks": scores, "limit": limit, "average": average}
        keep(results)
    return results


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Raise a ModelError if the logits at a token change with the token after it, which they are to predict."""
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]], device=model.device)
    before, after = (model(input_ids=row[None], use_cache=False).logits[0, :-1] for row in ids)
    if sees_later_tokens(before, after, before.dtype):
        raise ModelError(
            f"{type(model).__name__} is not a decoder: its output for a token depends on the tokens after it; "
            "perplexity and tasks are defined for causal language models"
        )


def text_perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    seqlen: int | None,
    max_tokens: int | None,
    batch: int,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """The perplexity on one text by its own protocol; the arguments are those of `evaluate`."""
    phases, name = phases or Phases(), Path(text).name
    protocol = evaluation_protocol(text)
    with phases.phase(f"reading {name}"):
        ids = tokenizer(evaluation_text(text), add_special_tokens=protocol.special_tokens, verbose=False)["input_ids"]
    result = perplexity(
        model,
        torch.tensor(ids[:max_tokens]),
        resolve_seqlen(model, seqlen),
        batch,
        windows=protocol.windows,
        remainder=protocol.remainder,
        phases=phases,
        name=f"perplexity on {name}",
    )
    return dataclasses.asdict(result) | {"protocol": dataclasses.asdict(protocol)}
