"""Evaluate a model folder: texts and tasks in, a plain dictionary of results out."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hasslefree.evaluation.harness import evaluate_tasks
from hasslefree.evaluation.perplexity import perplexity
from hasslefree.evaluation.tasks import check_tasks
from hasslefree.folder.record import versions
from hasslefree.models.load import load_model, load_tokenizer, resolve_seqlen
from hasslefree.models.texts import check_text, evaluation_protocol, evaluation_text


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
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The perplexity of a model, dense or compressed, on texts, and its zero-shot accuracy on tasks.

    Args:
        texts: hub names or paths. tasks: names of `evaluation.tasks.TASKS`.
        seqlen: tokens a window; None for 2048, or what the model takes if that is less.
        max_tokens: only the first tokens of each text.
        batch: windows, or sequences of a task, at a time; None for 1 window, and as for `evaluate_tasks`.
        dtype, device, trust_remote_code: as for `load_model`.
        limit, task_data, cache: of the tasks, as for `evaluate_tasks`.
        keep: called with the results so far, whenever there is something new.

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
    tokenizer = load_tokenizer(model, trust_remote_code)
    loaded = load_model(model, dtype, device, trust_remote_code)
    results: dict[str, Any] = {
        "model": model,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "versions": versions() | ({"lm_eval": importlib.metadata.version("lm_eval")} if tasks else {}),
    }
    if texts:
        results["perplexity"] = {}
    for text in texts:
        results["perplexity"][text] = text_perplexity(loaded, tokenizer, text, seqlen, max_tokens, batch or 1)
        if keep is not None:
            keep(results)
    if tasks:
        rows = evaluate_tasks(loaded, tokenizer, tasks, batch=batch, limit=limit, folder=task_data, cache=cache)
        average = sum(row["value"] for row in rows.values()) / len(rows)
        results |= {"tasks": rows, "limit": limit, "average": average}
        if keep is not None:
            keep(results)
    return results


def text_perplexity(
    model: Any, tokenizer: Any, text: str, seqlen: int | None, max_tokens: int | None, batch: int
) -> dict[str, Any]:
    """The perplexity on one text by its own protocol; the arguments are those of `evaluate`."""
    protocol = evaluation_protocol(text)
    window = resolve_seqlen(model, seqlen)
    ids = tokenizer(evaluation_text(text), add_special_tokens=protocol.special_tokens, verbose=False)["input_ids"]
    found = perplexity(
        model,
        torch.tensor(ids[:max_tokens]),
        window,
        batch,
        windows=protocol.windows,
        remainder=protocol.remainder,
    )
    return dataclasses.asdict(found) | {"protocol": dataclasses.asdict(protocol)}
