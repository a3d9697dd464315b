"""The definitions of the zero-shot tasks, and what is said about data that they cannot use."""

import json

import pytest

from hasslefree.errors import TaskError, UnknownNameError
from hasslefree.evaluation.run import evaluate
from hasslefree.evaluation.tasks import TASKS, check_harness, check_tasks, load_task
from tests.evaluation.task_rows import ROWS, write_rows

pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: pip install "hasslefree[eval]"')


def test_without_a_folder_the_data_are_those_that_the_harness_names(monkeypatch):
    """Oracle: the data sets of the paper's references, by their names on the hub."""
    asked = []

    def load_dataset(path, name=None, **_):
        asked.append((path.rpartition("/")[2], name))
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for task in TASKS:
        message = rf"task {task} could not be loaded from the hub \(ConnectionError.*task_data="
        with pytest.raises(TaskError, match=message):
            load_task(task, None, None)
    assert asked == [
        ("piqa", None), ("hellaswag", None), ("ai2_arc", "ARC-Easy"), ("ai2_arc", "ARC-Challenge"),
        ("winogrande", "winogrande_xl"), ("glue", "rte"), ("openbookqa", "main"), ("super_glue", "boolq"),
    ]  # fmt: skip


BAD_FILES = {
    "missing": (None, "data of task piqa cannot be read"),
    "empty": ("\n", "is empty"),
    "not JSON": ('{"goal": \n', "cannot be read: Expecting value"),
    "no object": ("3\n", "every row needs goal, sol1, sol2, label"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_are_no_rows_are_refused_before_the_model_is_loaded(tmp_path, content, message):
    if content is not None:
        (tmp_path / "piqa.jsonl").write_text(content)
    with pytest.raises(TaskError, match=message):
        check_tasks(["piqa"], tmp_path)


LACKING = {name: value for name, value in ROWS["piqa"][1].items() if name != "sol2"}
BAD_ROWS = {
    "label": ("piqa", ROWS["piqa"][1] | {"label": -1}, "row 2: the answer -1 is not one of the 2 choices"),
    "field": ("piqa", LACKING, "row 2: no field sol2"),
    "form": ("boolq", {"passage": "", "question": "", "answer": True}, "row 1: no field answer|could not be loaded"),
    "answer": ("winogrande", ROWS["winogrande"][1] | {"answer": ""}, "row 2: the task cannot read this row .KeyError"),
    "key": ("arc_easy", ROWS["arc_easy"][1] | {"answerKey": "E"}, "row 2: the task cannot read this row"),
}


@pytest.mark.parametrize(("task", "row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_without_a_right_answer_is_an_error(tmp_path, task, row, message):
    folder = write_rows(tmp_path, {task: [ROWS[task][0], row]})
    with pytest.raises(TaskError, match=message):
        load_task(task, folder, None)


def test_every_row_is_checked_before_a_model_is_loaded(tmp_path):
    folder = write_rows(tmp_path, {"piqa": [ROWS["piqa"][0], LACKING]})
    with pytest.raises(TaskError, match="piqa.jsonl, row 2: no field sol2"):
        evaluate(str(tmp_path / "no model"), tasks=["piqa"], task_data=folder)


def test_the_rows_are_those_of_the_folder_that_is_named(tmp_path):
    for name, row in (("x1", LACKING), ("x[1]", ROWS["piqa"][0])):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, {"piqa": [row]})
    task = load_task("piqa", tmp_path / "x[1]", None)
    assert [row["goal"] for row in task.eval_docs] == [ROWS["piqa"][0]["goal"]]


def test_only_the_rows_within_the_limit_are_checked(tmp_path):
    folder = write_rows(tmp_path, {"piqa": [ROWS["piqa"][0], ROWS["piqa"][1] | {"label": -1}]})
    load_task("piqa", folder, limit=1)
    with pytest.raises(TaskError, match="label"):
        load_task("piqa", folder, limit=2)


def test_names_and_a_harness_that_is_missing(monkeypatch):
    with pytest.raises(UnknownNameError, match="Did you mean 'winogrande'"):
        check_tasks(["winograde"], None)
    with pytest.raises(TaskError, match="names rte twice; remove one"):
        check_tasks(["rte", "piqa", "rte"], None)
    check_tasks(list(TASKS), None)
    check_harness()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r'not installed: pip install "hasslefree\[eval\]"'):
        check_harness()


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_line_ends_at_a_line_feed_alone(ends, tmp_path):
    """JSON allows other separators of lines within a string."""
    rows = [row | {"goal": "one\u2028two\u0085three"} for row in ROWS["piqa"]]
    text = ends.join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "piqa.jsonl").write_text(text, encoding="utf-8", newline="")
    check_tasks(["piqa"], tmp_path)
