"""The eight zero-shot tasks of the paper, as lm-evaluation-harness defines them, on data of the hub or of a folder.

Prompts, choices and metrics are those of the harness's own definitions; only the data set is replaced where a folder is
given.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from hasslefree.errors import TaskError, UnknownNameError, option

REMEDY = 'pip install "hasslefree[eval]"'


@dataclass(frozen=True)
class RowForm:
    """One shape in which the rows of a task are published.

    Args:
        fields: that a row must have. changes: to the harness's definition for rows of this form.
    """

    fields: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskSource:
    """Where the harness defines a task, beside its package; and the forms of rows, the harness's own first."""

    definition: str
    forms: tuple[RowForm, ...]


_ARC = (RowForm(("question", "choices", "answerKey")),)

# HellaSwag also circulates as the harness's process_docs leaves it; BoolQ also outside of SuperGLUE.
TASKS = {
    "piqa": TaskSource("piqa/piqa.yaml", (RowForm(("goal", "sol1", "sol2", "label")),)),
    "hellaswag": TaskSource(
        "hellaswag/hellaswag.yaml",
        (
            RowForm(("activity_label", "ctx_a", "ctx_b", "endings", "label")),
            RowForm(("query", "choices", "gold"), {"process_docs": None, "doc_to_target": "gold"}),
        ),
    ),
    "arc_easy": TaskSource("arc/arc_easy.yaml", _ARC),
    "arc_challenge": TaskSource("arc/arc_challenge.yaml", _ARC),
    "winogrande": TaskSource("winogrande/default.yaml", (RowForm(("sentence", "option1", "option2", "answer")),)),
    "rte": TaskSource("glue/rte/default.yaml", (RowForm(("sentence1", "sentence2", "label")),)),
    "openbookqa": TaskSource("openbookqa/openbookqa.yaml", (RowForm(("question_stem", "choices", "answerKey")),)),
    "boolq": TaskSource(
        "super_glue/boolq/default.yaml",
        (
            RowForm(("passage", "question", "label")),
            RowForm(("passage", "question", "answer"), {"doc_to_target": "answer"}),
        ),
    ),
}


def check_tasks(names: Sequence[str], folder: Path | None) -> None:
    """Check everything that can be checked before a model is loaded.

    Raises:
        UnknownNameError: no such task. TaskError: a task is given twice, or a file of the folder is missing or has
            rows of another form.
    """
    for name in names:
        if name not in TASKS:
            raise UnknownNameError("task", name, TASKS)
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise TaskError(f"{option('tasks')} names {', '.join(twice)} more than once; once is enough")
    if folder is not None:
        for name in names:
            row_form(name, folder)


def check_harness() -> None:
    """Raise a TaskError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise TaskError(f"the zero-shot tasks need lm-evaluation-harness, which is not installed: {REMEDY}")


def data_file(name: str, folder: Path) -> Path:
    """The file that holds the rows of a task."""
    return folder / f"{name}.jsonl"


def row_form(name: str, folder: Path) -> RowForm:
    """The form that all rows of a task's file have; raises a TaskError with the file and the line of one that has not.

    A line must be a JSON object with the fields of the form; the first line decides between forms.
    """
    file, forms = data_file(name, folder), TASKS[name].forms
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"the data of task {name} cannot be read: {error}; the folder of {option('task_data')} must contain "
            f"{name}.jsonl"
        ) from None
    found: RowForm | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{file}, line {number}: not JSON: {error}") from None
        having = set(row) if isinstance(row, dict) else set()
        found = found or next((form for form in forms if having.issuperset(form.fields)), forms[0])
        if missing := [name for name in found.fields if name not in having]:
            raise TaskError(
                f"{file}, line {number}: no field {', '.join(missing)}; every row needs {', '.join(found.fields)}"
            )
    if found is None:
        raise TaskError(f"{file} is empty")
    return found


@contextmanager
def harness_tasks(names: Sequence[str], folder: Path | None, limit: int | None) -> Iterator[dict[str, Any]]:
    """Name → task object of the harness, on the hub's data or on FOLDER/<task>.jsonl, while the context lasts.

    Raises:
        TaskError: data that cannot be loaded, or among the first `limit` rows one with no right answer.
    """
    with tempfile.TemporaryDirectory() as temporary:
        definitions = Path(temporary) / "tasks"
        definitions.mkdir()
        for name in names:
            written = definition(name, folder, Path(temporary) / "data")
            (definitions / f"{name}.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
        yield {name: _load(name, definitions, folder, limit) for name in names}


def definition(name: str, folder: Path | None, cache: Path) -> dict[str, Any]:
    """The harness's own definition by its path, and over it, with a folder, the data set. cache: of `datasets`."""
    import lm_eval

    path = Path(str(lm_eval.__file__)).parent / "tasks" / TASKS[name].definition
    if not path.is_file():
        raise TaskError(f"the installed lm-evaluation-harness has no task {name} at {path}: {REMEDY}")
    written: dict[str, Any] = {"include": str(path), "task": name, "num_fewshot": 0}
    if folder is None:
        return written
    files = {"validation": str(data_file(name, folder).resolve())}
    data = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(cache)},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
    }
    return written | data | row_form(name, folder).changes


def _load(name: str, definitions: Path, folder: Path | None, limit: int | None) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(definitions), include_defaults=False)
    where = f"from {data_file(name, folder)}" if folder else "from the hub"
    remedy = "" if folder else f"; with no network, give the data as {option('task_data', 'FOLDER')}"
    try:
        task = manager.load([name])["tasks"][name]
    except Exception as error:  # whatever the network, the hub, the reader of the file and a row's template may raise
        cause = f"{type(error).__name__}: {error}"
        raise TaskError(f"task {name} could not be loaded {where} ({cause}){remedy}") from error
    for number, row in enumerate(islice(task.eval_docs, limit), 1):
        _check_row(task, row, f"task {name} {where}, row {number}")
    return task


def _check_row(task: Any, row: dict[str, Any], where: str) -> None:
    """Raise a TaskError where a row has no right answer among its choices: the harness would count it as wrong."""
    try:
        choices = task.doc_to_choice(row)
        answer = task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row)
    except Exception as error:  # the templates and functions of the definitions raise anything
        raise TaskError(
            f"{where}: the task cannot read this row ({type(error).__name__}: {error}); correct or remove it"
        ) from error
    if answer not in range(len(choices)):
        raise TaskError(
            f"{where}: the answer {answer!r} is not one of the {len(choices)} choices (0 to {len(choices) - 1}); use a "
            "split with labels, such as validation"
        )
