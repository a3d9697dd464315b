"""The eight zero-shot tasks of the paper, as lm-evaluation-harness defines them, on data of the hub or of a folder.

Prompts, choices and metrics are those of the harness's own definitions; a folder replaces only the data set.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from hasslefree.errors import TaskError, UnknownNameError, option

REMEDY = 'pip install "hasslefree[eval]"'


# Task → the harness's definition, and the forms in which its rows are published, the harness's own first: the fields
# of a row → changes to the definition. HellaSwag also circulates as the harness's process_docs leaves it; BoolQ also
# outside of SuperGLUE.
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
        {("passage", "question", "label"): {}, ("passage", "question", "answer"): {"doc_to_target": "answer"}},
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
            check_rows(name, folder)


def check_harness() -> None:
    """Raise a TaskError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise TaskError(f"the zero-shot tasks need lm-evaluation-harness, which is not installed: {REMEDY}")


def check_rows(name: str, folder: Path) -> dict[str, Any]:
    """The changes to the harness's definition for the rows in FOLDER/<name>.jsonl, whose form the first row decides.

    Raises:
        TaskError: a line is not a JSON object with the fields of the form; the message has the file and the line.
    """
    file, (_, forms) = folder / f"{name}.jsonl", TASKS[name]
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"the data of task {name} cannot be read: {error}; the folder of {option('task_data')} must contain "
            f"{name}.jsonl"
        ) from None
    fields: tuple[str, ...] = ()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{file}, line {number}: not JSON: {error}") from None
        given = set(row) if isinstance(row, dict) else set()
        fields = fields or next((form for form in forms if given.issuperset(form)), next(iter(forms)))
        if missing := [field for field in fields if field not in given]:
            raise TaskError(
                f"{file}, line {number}: no field {', '.join(missing)}; every row needs {', '.join(fields)}"
            )
    if not fields:
        raise TaskError(f"{file} is empty")
    return forms[fields]


@contextmanager
def harness_tasks(names: Sequence[str], folder: Path | None, limit: int | None) -> Iterator[dict[str, Any]]:
    """Name → task object of the harness, on the hub's data or on FOLDER/<task>.jsonl, within the context.

    Raises:
        TaskError: data that cannot be loaded, or a row without a right answer among the first `limit` rows.
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
    """The harness's own definition by its path; with a folder, its data set is replaced. cache: of `datasets`."""
    import lm_eval

    path = Path(str(lm_eval.__file__)).parent / "tasks" / TASKS[name][0]
    if not path.is_file():
        raise TaskError(f"the installed lm-evaluation-harness has no task {name} at {path}: {REMEDY}")
    definition: dict[str, Any] = {"include": str(path), "task": name, "num_fewshot": 0}
    if folder is None:
        return definition
    files = {"validation": str((folder / f"{name}.jsonl").resolve())}
    data = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(cache)},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
    }
    return definition | data | check_rows(name, folder)


def _load(manager: Any, name: str, folder: Path | None, limit: int | None) -> Any:
    source = f"from {folder / f'{name}.jsonl'}" if folder else "from the hub"
    remedy = "" if folder else f"; with no network, give the data as {option('task_data', 'FOLDER')}"
    try:
        task = manager.load([name])["tasks"][name]
    except Exception as error:  # the network, the hub, the reader of the file and a row's template raise anything
        cause = f"{type(error).__name__}: {error}"
        raise TaskError(f"task {name} could not be loaded {source} ({cause}){remedy}") from error
    for number, row in enumerate(islice(task.eval_docs, limit), 1):
        _check_row(task, row, f"task {name} {source}, row {number}")
    return task


def _check_row(task: Any, row: dict[str, Any], where: str) -> None:
    """Raise a TaskError if a row has no right answer among its choices: the harness would count it as wrong."""
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
