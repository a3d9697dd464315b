"""Zero-shot accuracy by lm-evaluation-harness, with its cache of answers.

We call `lm_eval.evaluate` rather than `simple_evaluate`, which draws new seeds for every library of
the process, starts programs to describe the machine, and has no way to follow the progress.
"""

import hashlib
import json
import logging
import math
import os
import sqlite3
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hasslefree.checkpoint.record import versions
from hasslefree.core.products import fast_products
from hasslefree.errors import NonFiniteError, OutputError, option
from hasslefree.evaluation.tasks import check_harness, check_tasks, load_task
from hasslefree.models.calls import replaced
from hasslefree.models.load import DOWNLOAD_AGAIN, check_ids, loading
from hasslefree.models.tokenizer import surrounding_tokens
from hasslefree.progress import SCORING, TASK_DATA, Phase, Phases

# The log-softmax of a bfloat16 model is taken in float32, as for the perplexity: in bfloat16, sums
# of log-likelihoods are so coarse that choices tie.
SOFTMAX_DTYPE = "float32"


def default_cache() -> Path:
    """The folder of the cache: $XDG_CACHE_HOME/hasslefree, or ~/.cache/hasslefree."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hasslefree"


def load_tasks(
    names: Sequence[str], folder: Path | None, limit: int | None, phases: Phases
) -> dict[str, Any]:
    """Check and load tasks by name: see `check_tasks` and `load_task`. phases: of the run."""
    check_tasks(names, folder)
    check_harness()
    with quiet_harness(), phases.phase(TASK_DATA):
        return {name: load_task(name, folder, limit) for name in names}


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: dict[str, Any],
    *,
    batch: int | None,
    limit: int | None,
    cache: Path | None,
    phases: Phases,
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Measure the zero-shot accuracy of a loaded model on tasks; yield each name and its scores.

    The model's answer is the choice with the largest log-likelihood after the question.

    Args:
        tasks: from `load_tasks`, with the same limit.
        batch: sequences at a time; None for the most that fit on a GPU, up to 64, and one on a CPU,
            where running out of memory would end the process. It changes scores only by rounding.
        limit: use only the first rows of each task.
        cache: a folder that keeps every answer, from which an interrupted run continues; None for
            no cache.

    Yields:
        The name of a task, and {"metric", "value", "acc", "acc_stderr", "acc_norm",
        "acc_norm_stderr", "rows", "truncated", "version"}; accuracies are shares. metric: acc_norm
        if the task defines it, else acc, as in the paper; value: that metric. truncated: the number
        of rows whose question lost its beginning, because it is longer than the model's window.
    """
    with quiet_harness(), fast_products(model), ExitStack() as stack:
        with phases.phase(TASK_DATA):
            import lm_eval
            from lm_eval.models.huggingface import HFLM

            # The harness's model gives the tokenizer a padding token, so the file comes first.
            file = None
            if cache is not None:
                file = cache / cache_name(model, tokenizer)
            size: int | str = batch or 1
            if batch is None and model.device.type == "cuda":
                size = "auto"
            lm = HFLM(model, tokenizer=tokenizer, batch_size=size, softmax_dtype=SOFTMAX_DTYPE)
            leave_open(lm)
            answering = lm
            if file is not None:
                answering = stack.enter_context(cached(lm, file))
        answers = {name: count_answers(task, limit) for name, task in tasks.items()}
        answered = 0
        with phases.phase(SCORING, sum(answers.values()), "answers") as phase:
            count_new_answers(lm, phase)
            for name, task in tasks.items():
                with loading("the tasks cannot be answered", DOWNLOAD_AGAIN):
                    results = lm_eval.evaluate(answering, {"tasks": {name: task}}, limit=limit)
                answered += answers[name]
                phase.reach(answered)  # including answers from the cache
                yield name, task_scores(results, lm, name)


def leave_open(lm: Any) -> None:
    """Encode without the tokens that the tokenizer puts after a text: a question does not end one,
    and the harness counts the tokens of the question to find those of a choice.

    Ids outside the model's vocabulary are an error.
    """
    _, last = surrounding_tokens(lm.tokenizer)
    encode = lm.tok_encode

    def encode_open(*arguments: Any, **options: Any) -> list[int]:
        ids: list[int] = encode(*arguments, **options)
        check_ids(lm.model, torch.tensor(ids), lm.tokenizer)
        if last and ids[-len(last) :] == last:
            return ids[: -len(last)]
        return ids

    lm.tok_encode = encode_open


def count_answers(task: Any, limit: int | None) -> int:
    """Count the choices of all rows of a task."""
    return sum(len(task.doc_to_choice(row)) for row in islice(task.eval_docs, limit))


def count_new_answers(lm: Any, phase: Phase) -> None:
    """Advance the phase with every answer that the model computes.

    Raises:
        NonFiniteError: an answer has NaN for its log-likelihood.
    """
    store = lm.cache_hook.add_partial

    def store_and_count(kind: str, request: Any, answer: Any) -> None:
        if math.isnan(answer[0]):  # comparisons with NaN are false: the accuracy would be wrong
            raise NonFiniteError(
                "the log-likelihood of an answer is NaN; look for NaN or Inf in the model's"
                f" weights, or try {option('dtype', 'float32')}"
            )
        store(kind, request, answer)
        phase.advance()

    lm.cache_hook.add_partial = store_and_count


def task_scores(results: Any, lm: Any, name: str) -> dict[str, Any]:
    """The scores of one task from the results of the harness."""
    found = results["results"][name]
    accuracies: dict[str, Any] = {}
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in found:
            error = found[f"{metric}_stderr,none"]
            accuracies[metric] = float(found[f"{metric},none"])
            # A single row has no standard error: the harness says "N/A".
            accuracies[f"{metric}_stderr"] = float(error) if isinstance(error, float) else None
    metric = "acc_norm" if "acc_norm" in accuracies else "acc"
    samples = results["samples"][name]
    return {
        "metric": metric,
        "value": accuracies[metric],
        **accuracies,
        "rows": len(samples),
        "truncated": sum(is_truncated(lm, sample["arguments"]) for sample in samples),
        "version": results["versions"][name],
    }


def is_truncated(lm: Any, requests: Sequence[tuple[str, str]]) -> bool:
    """Return whether the harness truncated a question or its choices to the model's window."""
    lengths = (len(lm.tok_encode(question + choice)) for question, choice in requests)
    return any(length > lm.max_length + 1 for length in lengths)


@contextmanager
def cached(lm: Any, file: Path) -> Iterator[Any]:
    """The model with the harness's cache, which reads answers from the file and adds new ones."""
    from lm_eval.api.model import CachingLM

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # CachingLM opens the file in a thread, which would print a traceback.
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA user_version = 0")
    except (OSError, sqlite3.Error) as error:
        raise OutputError(
            f"the cache {file} cannot be used ({error}); delete it, or give another folder with"
            f" {option('cache')}"
        ) from error
    caching = CachingLM(lm, str(file))
    with closing(caching.dbdict):
        yield caching


def cache_name(model: PreTrainedModel, tokenizer: Any) -> str:
    """Name the file of a model's answers by a hash of everything that they depend on.

    The harness itself keeps answers by question alone, so a changed model would get the answers
    of the model before the change.
    """
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    libraries = versions("lm_eval")
    settings = [type(model).__name__, config, libraries, model.device.type, SOFTMAX_DTYPE]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # As bytes, because NumPy has no bfloat16.
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(tokenizer.save_pretrained(folder)):
            if Path(file).is_file():
                digest.update(Path(file).read_bytes())
    return f"answers-{digest.hexdigest()[:32]}.sqlite"


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Hide the bars and notices of the harness and of datasets: `Phases` reports the progress."""
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.models.huggingface

    logger = logging.getLogger("lm_eval")
    with ExitStack() as stack:
        for module in (lm_eval.api.model, lm_eval.api.task, lm_eval.models.huggingface):
            stack.enter_context(replaced(module, "tqdm", partial(tqdm, disable=True)))
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        if datasets.is_progress_bar_enabled():
            stack.callback(datasets.enable_progress_bars)
        datasets.disable_progress_bars()
        yield
