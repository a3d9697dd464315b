"""The eight zero-shot tasks of the paper, as lm-evaluation-harness defines them.

Prompts, choices and metrics are those of the harness; a folder replaces only the data set.
"""

import glob
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hasslefree.errors import TaskError, UnknownNameError, option
from hasslefree.files import read_small

MAX_FILE_BYTES = 1 << 30
REMEDY = 'pip install "hasslefree[eval]"'


@dataclass(frozen=True)
class Task:
    """A task of the harness.

    Args:
        folder: the folder of its definition, among the harness's tasks.
        forms: the published forms of its rows, beginning with that of the hub: the fields of every
            row, and the changes that this form needs in the harness's definition of the task.
    """

    folder: str
    forms: dict[tuple[str, ...], dict[str, Any]]


ARC = Task("arc", {("question", "choices", "answerKey"): {}})
# HellaSwag also circulates as the harness's process_docs leaves it, BoolQ also outside SuperGLUE.
TASKS = {
    "piqa": Task("piqa", {("goal", "sol1", "sol2", "label"): {}}),
    "hellaswag": Task(
        "hellaswag",
        {
            ("activity_label", "ctx_a", "ctx_b", "endings", "label"): {},
            ("query", "choices", "gold"): {"process_docs": None, "doc_to_target": "gold"},
        },
    ),
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "winogrande": Task("winogrande", {("sentence", "option1", "option2", "answer"): {}}),
    "rte": Task("glue/rte", {("sentence1", "sentence2", "label"): {}}),
    "openbookqa": Task("openbookqa", {("question_stem", "choices", "answerKey"): {}}),
    "boolq": Task(
        "super_glue/boolq",
        {
            ("passage", "question", "label"): {},
            ("passage", "question", "answer"): {"doc_to_target": "answer"},
        },
    ),
}


def check_harness() -> None:
    """Raise a TaskError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise TaskError(
            f"the zero-shot tasks need lm-evaluation-harness, which is not installed: {REMEDY}"
        )


def check_tasks(names: Sequence[str], folder: Path | None) -> None:
    """Check the names of tasks and the first rows in a data folder, before a model is loaded."""
    seen: set[str] = set()
    for name in names:
        if name not in TASKS:
            raise UnknownNameError("task", name, TASKS)
        if name in seen:
            raise TaskError(f"{option('tasks')} names {name} twice; remove one")
        seen.add(name)
        if folder is not None:
            changes_of_rows(name, folder)


def changes_of_rows(name: str, folder: Path) -> dict[str, Any]:
    """The changes to the harness's definition for the rows in FOLDER/<name>.jsonl, by the fields of
    the first row.

    Raises:
        TaskError: the file is missing or empty, or the row has none of the task's forms.
    """
    file = folder / f"{name}.jsonl"
    try:
        lines = read_small(file, MAX_FILE_BYTES).removeprefix("\ufeff").split("\n")
        first = json.loads(next(line for line in lines if line.strip()))
    except StopIteration:
        raise TaskError(f"{file} is empty; it needs one row per line") from None
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(
            f"the data of task {name} cannot be read: {error}; the folder of {option('task_data')}"
            f" must contain {name}.jsonl, a JSON object per line"
        ) from None
    forms = TASKS[name].forms
    for fields, changes in forms.items():
        if isinstance(first, dict) and first.keys() >= set(fields):
            return changes
    needed = " or ".join(map(", ".join, forms))
    raise TaskError(f"{file}: the first row lacks fields; every row needs {needed}")


def load_task(
    name: str,
    folder: Path | None,
    limit: int | None,
) -> Any:
    """Load a task of the harness on the hub's data, or on FOLDER/<name>.jsonl.

    Args:
        limit: check only the first `limit` rows; None for all.

    Raises:
        TaskError: the data cannot be loaded, or a row has no right answer.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    source = "from the hub" if folder is None else f"from {folder / f'{name}.jsonl'}"
    definitions = Path(str(lm_eval.__file__)).parent / "tasks" / TASKS[name].folder
    manager = TaskManager(include_path=str(definitions), include_defaults=False)
    with tempfile.TemporaryDirectory() as cache:
        member = {"task": name, "num_fewshot": 0}
        if folder is not None:
            member |= _local_data(name, folder, cache)
        try:
            # A group, because its members may change the definitions of the tasks.
            loaded = manager.load({"group": "hasslefree", "task": [member]})
        except Exception as error:  # network, hub and file reader raise any exception
            cause = f"{type(error).__name__}: {error}"
            remedy = "" if folder else f"; with no network, give {option('task_data', 'FOLDER')}"
            raise TaskError(
                f"task {name} could not be loaded {source} ({cause}){remedy}"
            ) from error
    task = loaded["tasks"][name]
    for number, row in enumerate(islice(task.eval_docs, limit), 1):
        _check_row(task, row, f"task {name} {source}, row {number}")
    return task


def _local_data(
    name: str,
    folder: Path,
    cache: str,
) -> dict[str, Any]:
    """The changes to a task's definition that load FOLDER/<name>.jsonl."""
    data_files = {"validation": glob.escape(str((folder / f"{name}.jsonl").resolve()))}
    changes: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": data_files, "cache_dir": cache, "keep_in_memory": True},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
    }
    return changes | changes_of_rows(name, folder)


def _check_row(
    task: Any,
    row: dict[str, Any],
    where: str,
) -> None:
    """Raise a TaskError for a row without a valid answer, which the harness would count as wrong.

    The JSON reader gives None for a field that a row lacks.
    """
    missing = [name for name, value in row.items() if value is None]
    if missing:
        raise TaskError(f"{where}: no field {', '.join(missing)}; every row needs the same fields")
    try:
        choices = task.doc_to_choice(row)
        # Winogrande has one question for each choice, and the answer in place of the text.
        answer = task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row)
    except Exception as error:  # templates and functions raise any exception
        cause = f"{type(error).__name__}: {error}"
        raise TaskError(
            f"{where}: the task cannot read this row ({cause}); correct or remove it"
        ) from error
    if answer not in range(len(choices)):
        raise TaskError(
            f"{where}: the answer {answer!r} is not one of the {len(choices)} choices (0 to"
            f" {len(choices) - 1}); use a split with labels, such as validation"
        )
