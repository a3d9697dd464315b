"""Zero-shot accuracy on the eight tasks of the paper by lm-evaluation-harness, on data of the hub
or of a folder.

Prompts, choices and metrics are those of the harness's own definitions; a folder replaces only the
data set. Its cache keeps every answer as soon as it is computed.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm
from transformers import PreTrainedModel

from hasslefree.checkpoint.record import versions
from hasslefree.errors import NonFiniteError, OutputError, TaskError, UnknownNameError, option
from hasslefree.files import read_small
from hasslefree.models.calls import replaced
from hasslefree.models.load import DOWNLOAD_AGAIN, loading
from hasslefree.progress import SCORING, TASK_DATA, Phases

# Bytes of the rows of a task, and characters of one, which the harness tokenises whole.
MOST_ROWS, MOST_LETTERS = 1 << 30, 1 << 20
REMEDY = 'pip install "hasslefree[eval]"'

# Task → the harness's definition, and the forms in which its rows are published, the harness's own
# first: the fields of a row → changes to the definition. HellaSwag also circulates as the harness's
# process_docs leaves it; BoolQ also outside of SuperGLUE.
Forms = dict[tuple[str, ...], dict[str, Any]]
TASKS: dict[str, tuple[str, Forms]] = {
    "piqa": ("piqa/piqa.yaml", {("goal", "sol1", "sol2", "label"): {}}),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        {
            ("activity_label", "ctx_a", "ctx_b", "endings", "label"): {},
            ("query", "choices", "gold"): {"process_docs": None, "doc_to_target": "gold"},
        },
    ),
    "arc_easy": ("arc/arc_easy.yaml", {("question", "choices", "answerKey"): {}}),
    "arc_challenge": ("arc/arc_challenge.yaml", {("question", "choices", "answerKey"): {}}),
    "winogrande": ("winogrande/default.yaml", {("sentence", "option1", "option2", "answer"): {}}),
    "rte": ("glue/rte/default.yaml", {("sentence1", "sentence2", "label"): {}}),
    "openbookqa": ("openbookqa/openbookqa.yaml", {("question_stem", "choices", "answerKey"): {}}),
    "boolq": (
        "super_glue/boolq/default.yaml",
        {
            ("passage", "question", "label"): {},
            ("passage", "question", "answer"): {"doc_to_target": "answer"},
        },
    ),
}


def check_tasks(names: Sequence[str], folder: Path | None) -> None:
    """Check the names of the tasks and the files of the folder, before a model is loaded."""
    for name in names:
        if name not in TASKS:
            raise UnknownNameError("task", name, TASKS)
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise TaskError(f"{option('tasks')} names {', '.join(twice)} twice; remove one")
    if folder is not None:
        for name in names:
            check_rows(name, folder)


def check_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise TaskError(
            f"the zero-shot tasks need lm-evaluation-harness, which is not installed: {REMEDY}"
        )


def check_rows(name: str, folder: Path) -> dict[str, Any]:
    """The changes to the harness's definition for the rows in FOLDER/<name>.jsonl, whose form the
    first row decides.
    """
    file, (_, forms) = folder / f"{name}.jsonl", TASKS[name]
    try:
        lines = read_small(file, MOST_ROWS).removeprefix("\ufeff").split("\n")
    except (OSError, ValueError) as error:
        raise TaskError(
            f"the data of task {name} cannot be read: {error}; the folder of {option('task_data')}"
            f" must contain {name}.jsonl"
        ) from None
    fields: tuple[str, ...] = ()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # halves of surrogate pairs
            if len(line) > MOST_LETTERS:
                raise ValueError(f"more than {MOST_LETTERS:,} characters")
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{file}, line {number}: not JSON that can be used: {error}") from None
        given = set(row) if isinstance(row, dict) else set()
        fields = fields or next(
            (form for form in forms if given.issuperset(form)), next(iter(forms))
        )
        if missing := [field for field in fields if field not in given]:
            raise TaskError(
                f"{file}, line {number}: no field {', '.join(missing)}; every row needs"
                f" {', '.join(fields)}"
            )
    if not fields:
        raise TaskError(f"{file} is empty; it needs one row per line")
    return forms[fields]


@contextmanager
def harness_tasks(
    names: Sequence[str], folder: Path | None, limit: int | None
) -> Iterator[dict[str, Any]]:
    """Name → task object of the harness, on the hub's data or on FOLDER/<task>.jsonl, within the
    context.
    """
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as temporary:
        definitions = Path(temporary) / "tasks"
        definitions.mkdir()
        for name in names:
            content = yaml.safe_dump(_definition(name, folder, Path(temporary) / "data"))
            (definitions / f"{name}.yaml").write_text(content, encoding="utf-8")
        manager = TaskManager(include_path=str(definitions), include_defaults=False)
        yield {name: _load(manager, name, folder, limit) for name in names}


def _definition(name: str, folder: Path | None, cache: Path) -> dict[str, Any]:
    """The harness's own definition by its path; with a folder, its data set is replaced. cache: of
    `datasets`.
    """
    import lm_eval

    path = Path(str(lm_eval.__file__)).parent / "tasks" / TASKS[name][0]
    if not path.is_file():
        installed = f"lm-evaluation-harness {importlib.metadata.version('lm_eval')}"
        raise TaskError(f"{installed} has no task {name} (looked for {path}): {REMEDY}")
    definition: dict[str, Any] = {"include": str(path), "task": name, "num_fewshot": 0}
    if folder is None:
        return definition
    files = {"validation": str((folder / f"{name}.jsonl").resolve())}
    splits = {"training_split": None, "validation_split": "validation", "test_split": None}
    data = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(cache)},
    }
    return definition | data | splits | check_rows(name, folder)


def _load(manager: Any, name: str, folder: Path | None, limit: int | None) -> Any:
    source = f"from {folder / f'{name}.jsonl'}" if folder else "from the hub"
    remedy = (
        "" if folder else f"; with no network, give the data as {option('task_data', 'FOLDER')}"
    )
    try:
        task = manager.load([name])["tasks"][name]
    except (
        Exception
    ) as error:  # the network, the hub, the reader of the file and a row's template raise anything
        cause = f"{type(error).__name__}: {error}"
        raise TaskError(f"task {name} could not be loaded {source} ({cause}){remedy}") from error
    for number, row in enumerate(islice(task.eval_docs, limit), 1):
        where = f"task {name} {source}, row {number}"
        try:
            choices = task.doc_to_choice(row)
            answer = task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row)
        except Exception as error:  # the templates and functions of the definitions raise anything
            cause = f"{type(error).__name__}: {error}"
            raise TaskError(
                f"{where}: the task cannot read this row ({cause}); correct or remove it"
            ) from error
        if answer not in range(len(choices)):  # the harness would count it as wrong
            raise TaskError(
                f"{where}: the answer {answer!r} is not one of the {len(choices)} choices (0 to"
                f" {len(choices) - 1}); use a split with labels, such as validation"
            )
    return task


# The log-softmax of a bfloat16 model is taken in float32, as for the perplexity: in bfloat16 sums
# of log-likelihoods are so coarse that choices tie.
SOFTMAX = "float32"


def default_cache() -> Path:
    """The folder of the cache: $XDG_CACHE_HOME/hasslefree, or ~/.cache/hasslefree."""
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
    """Zero-shot accuracies of a loaded model; the answer to each choice is its log-likelihood after
    the question.

    Args:
        folder: with <task>.jsonl files, instead of the hub. limit: use only the first rows of each
            task.
        batch: sequences at a time; None for the most that fit on a GPU, up to 64, and one on a CPU,
            where running out of memory would end the process. It changes scores by rounding alone.
        cache: a folder that keeps every answer, from which an interrupted run continues; None for
            no cache.

    Returns:
        {task: {"metric", "value", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "rows",
        "truncated", "version"}}; accuracies are shares. metric: acc_norm if the task defines it,
        else acc, as in the paper; value is that one. truncated: how many rows lost the beginning of
        a question that is longer than the model's window.
    """
    phases = phases or Phases()
    with quiet_harness(), ExitStack() as stack:
        with phases.phase(TASK_DATA):
            loaded = stack.enter_context(harness_tasks(tasks, folder, limit))
            from lm_eval import evaluate
            from lm_eval.models.huggingface import HFLM

            # Before the harness's model, which gives the tokenizer a padding token.
            file = None if cache is None else cache / cache_name(model, tokenizer)
            size: int | str = batch or ("auto" if model.device.type == "cuda" else 1)
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, softmax_dtype=SOFTMAX)
            answering = lm if file is None else stack.enter_context(cached(lm, file))
        rows = ((task, row) for task in loaded.values() for row in islice(task.eval_docs, limit))
        with phases.phase(
            SCORING, sum(len(task.doc_to_choice(row)) for task, row in rows), "answers"
        ) as phase:
            keep = lm.cache_hook.add_partial  # called with every new answer

            def keep_and_count(kind: str, request: Any, answer: Any) -> None:
                if math.isnan(answer[0]):  # every comparison with it is false: a wrong accuracy
                    raise NonFiniteError(
                        "the log-likelihood of an answer is NaN; look for NaN or Inf in the"
                        f" model's weights, or try {option('dtype', 'float32')}"
                    )
                keep(kind, request, answer)
                phase.advance()

            lm.cache_hook.add_partial = keep_and_count
            with loading(
                "the tasks cannot be answered", DOWNLOAD_AGAIN
            ):  # also of what the tokenizer raises
                results = evaluate(answering, {"tasks": loaded}, limit=limit)
        return {name: _task_results(results, lm, name) for name in tasks}


def _task_results(results: Any, lm: Any, name: str) -> dict[str, Any]:
    scores, samples = results["results"][name], results["samples"][name]
    accuracies: dict[str, Any] = {}
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in scores:
            error = scores[f"{metric}_stderr,none"]
            accuracies[metric] = float(scores[f"{metric},none"])
            # One row alone has no standard error: the harness then says "N/A".
            accuracies[f"{metric}_stderr"] = float(error) if isinstance(error, float) else None
    metric = "acc_norm" if "acc_norm" in accuracies else "acc"

    def truncated(question: str, choice: str) -> bool:
        """The harness cuts long questions from the left with a warning, which `quiet_harness`
        hides.
        """
        return len(lm.tok_encode(question + choice)) > lm.max_length + 1

    return {
        "metric": metric,
        "value": accuracies[metric],
        **accuracies,
        "rows": len(samples),
        "truncated": sum(
            any(truncated(*pair) for pair in sample["arguments"]) for sample in samples
        ),
        "version": results["versions"][name],
    }


@contextmanager
def cached(lm: Any, file: Path) -> Iterator[Any]:
    """The model with the harness's cache: answers in the file are read from it, and new ones are
    added at once.
    """
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
    """The name of the file with a model's answers: a hash of tensors, configuration, tokenizer,
    device and versions.
    """
    config = {
        name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"
    }
    libraries = versions() | {"lm_eval": importlib.metadata.version("lm_eval")}
    about = [type(model).__name__, config, libraries, model.device.type, SOFTMAX]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # As bytes, because NumPy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(map(Path, tokenizer.save_pretrained(folder))):
            if file.is_file():
                digest.update(file.read_bytes())
    return f"answers-{digest.hexdigest()[:32]}.sqlite"


@contextmanager
def quiet_harness() -> Iterator[None]:
    """Within it, bars of tqdm and notices of the harness are off; `Phases` reports the progress."""
    logger, create = logging.getLogger("lm_eval"), tqdm.__init__
    level = logger.level

    def create_hidden(bar: Any, *arguments: Any, **options: Any) -> None:
        create(bar, *arguments, **options | {"disable": True})

    with replaced(tqdm, "__init__", create_hidden):
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
