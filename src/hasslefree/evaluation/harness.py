"""Zero-shot accuracy by lm-evaluation-harness, with every answer saved to disk as soon as it is computed."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from hasslefree.errors import OutputError, option
from hasslefree.evaluation.fingerprint import fingerprint
from hasslefree.evaluation.tasks import harness_tasks
from hasslefree.folder.record import versions
from hasslefree.phases import ANSWERS, SCORING, TASK_DATA, Phases

# The log-softmax of a bfloat16 model is taken in float32, as for the perplexity: in bfloat16 sums of log-likelihoods
# are so coarse that choices tie.
SOFTMAX = "float32"


def default_cache() -> Path:
    """Where answers are kept: $XDG_CACHE_HOME/hasslefree, or ~/.cache/hasslefree."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hasslefree"


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    batch: int | None = None,
    limit: int | None = None,
    folder: Path | None = None,
    cache: Path | None = None,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """Zero-shot accuracies of a loaded model; the answer to each choice is its log-likelihood after the question.

    Args:
        tasks: names of `TASKS`. folder: with <task>.jsonl files, instead of the hub.
        batch: sequences at a time; None for the most that fit on a GPU, up to 64, and one on a CPU, where running out
            of memory would end the process. It changes scores by rounding alone.
        limit: use only this number of rows of each task, the first ones.
        cache: a folder that keeps every answer; None for no cache. An interrupted run continues from it.
        phases: of the run; the answers that the cache does not have are counted.

    Returns:
        {task: {"metric", "value", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "rows", "truncated",
        "version"}}; accuracies are shares. metric: acc_norm where the task has it, else acc, as in the paper; value is
        that one. truncated: how many rows lost the beginning of a question that is longer than the model's window.

    Raises:
        TaskError: data that are missing or malformed. OutputError: a cache that cannot be written.
    """
    phases = phases or Phases()
    with quiet_harness(), ExitStack() as opened:
        with phases.phase(TASK_DATA):
            loaded = opened.enter_context(harness_tasks(tasks, folder, limit))
            from lm_eval import evaluate

            # Before the harness's model, which gives the tokenizer a padding token.
            kept = None if cache is None else cache_file(cache, model, tokenizer)
            size: int | str = batch or ("auto" if model.device.type == "cuda" else 1)
            lm = counting_model(phases, pretrained=model, tokenizer=tokenizer, batch_size=size, softmax_dtype=SOFTMAX)
        with phases.phase(SCORING), answers_kept(lm, kept) as answering:
            found: Any = evaluate(answering, {"tasks": loaded}, limit=limit)
        return {name: _row(found, lm, name) for name in tasks}


def counting_model(phases: Phases, **options: Any) -> Any:
    """The harness's `HFLM` with these options, whose answers are counted."""
    from lm_eval.models.huggingface import HFLM

    class CountingLM(HFLM):  # type: ignore[misc, unused-ignore]
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            keep = self.cache_hook.add_partial  # called with every answer
            with phases.phase(ANSWERS, len(requests), "answers") as phase:

                def counted(kind: str, request: Any, answer: Any) -> None:
                    keep(kind, request, answer)
                    phase.advance()

                self.cache_hook.add_partial = counted
                try:
                    return super().loglikelihood(requests, disable_tqdm=True)
                finally:
                    self.cache_hook.add_partial = keep

    return CountingLM(**options)


@contextmanager
def answers_kept(lm: Any, file: Path | None) -> Iterator[Any]:
    """The model, with a cache: answers in the file are read from it, and every new answer is added at once."""
    if file is None:
        yield lm
        return
    from lm_eval.api.model import CachingLM

    try:
        # CachingLM opens the file in a thread, where an error would not be caught.
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        raise OutputError(f"the cache {file} cannot be used ({error}); delete it") from error
    caching = CachingLM(lm, str(file))
    try:
        yield caching
    finally:
        caching.dbdict.close()


def cache_file(folder: Path, model: PreTrainedModel, tokenizer: Any) -> Path:
    """The file that keeps the answers of this model, tokenizer, kind of device and set of versions.

    Raises:
        OutputError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the cache folder {folder} cannot be created ({error}); give another with {option('cache')}"
        ) from None
    if not os.access(folder, os.W_OK):
        raise OutputError(f"the cache folder {folder} is not writable; give another with {option('cache')}")
    options = {
        "versions": versions() | {"lm_eval": importlib.metadata.version("lm_eval")},
        "device": model.device.type,
        "softmax": SOFTMAX,
    }
    return folder / f"answers-{fingerprint(model, tokenizer, options)[:32]}.sqlite"


def _row(found: dict[str, Any], lm: Any, name: str) -> dict[str, Any]:
    """One task's results out of the harness's."""
    scores = found["results"][name]
    row: dict[str, Any] = {}
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in scores:
            error = scores[f"{metric}_stderr,none"]
            row[metric] = float(scores[f"{metric},none"])
            # One row alone has no standard error: the harness then says "N/A".
            row[f"{metric}_stderr"] = float(error) if isinstance(error, float) else None
    metric = "acc_norm" if "acc_norm" in row else "acc"
    samples = found["samples"][name]
    return {
        "metric": metric,
        "value": row[metric],
        **row,
        "rows": len(samples),
        "truncated": sum(any(_too_long(lm, *pair) for pair in sample["arguments"]) for sample in samples),
        "version": found["versions"][name],
    }


def _too_long(lm: Any, question: str, choice: str) -> bool:
    """Whether the harness cut a question from the left: it does so with a warning that `quiet_harness` hides."""
    return len(lm.tok_encode(question + choice)) > lm.max_length + 1


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Within it, notices and bars of the harness and of datasets are off; phases count what they do."""
    import datasets

    logger, bars, shown = logging.getLogger("lm_eval"), not datasets.are_progress_bars_disabled(), tqdm.__init__
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    tqdm.__init__ = partialmethod(shown, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = shown
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
