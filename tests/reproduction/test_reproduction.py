"""Planning, measuring and printing the paper's tables, and its first figure, on the embedded model."""

import csv
import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import hasslefree
from hasslefree import Recipe
from hasslefree.cli import main
from hasslefree.demo.run import CALIBRATION, HELD_OUT, MODEL
from hasslefree.errors import CalibrationError, HasslefreeError, ModelError, RecipeError, TaskError, UnknownNameError
from hasslefree.models.load import load_model, load_tokenizer
from hasslefree.reproduction import measure as running
from hasslefree.reproduction.figure1 import COMPARED, layer_errors
from hasslefree.reproduction.jobs import Scale, cost, table_jobs
from hasslefree.reproduction.measure import run_jobs
from hasslefree.reproduction.paper import MODELS, RECIPES, TASKS, TEXTS, paper_rows
from hasslefree.reproduction.tables import compare, cost_table, result_table
from tests.tiny_models import gram_of

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "docs" / "results" / "paper_tables.csv"
SMALL = Scale(rank=4, samples=2, seqlen=32, rounds=1, calibration=str(CALIBRATION), dtype="float32",
              texts={"wikitext2": str(HELD_OUT)}, max_tokens=64, tasks=())  # fmt: skip


def test_the_package_has_the_recipes_and_tables_of_the_repository():
    assert {path.name: path.read_text() for path in RECIPES.iterdir()} == {
        path.name: path.read_text() for path in (ROOT / "recipes").iterdir()
    }
    assert (RECIPES.parent / "tables.csv").read_text() == TABLES.read_text()


@pytest.mark.parametrize("table", [1, 2, 3, 4])
def test_rows_are_those_of_the_paper_and_joint_in_every_setting(table):
    """Oracle: the CSV."""
    lines = [line for line in csv.DictReader(TABLES.open()) if line["table"] == str(table)]
    rows = paper_rows(table)
    printed = [row for row in rows if row.figures]
    assert [(row.model, row.config, row.method) for row in printed] == [
        (line["model"], line["config"], line["method"]) for line in lines
    ]
    assert printed[0].figures == {name: float(lines[0][name]) for name in (*TEXTS, *TASKS, "average") if lines[0][name]}
    assert {row.model for row in rows} <= MODELS.keys()
    paired = [(row.model, row.config) for row in rows if row.method == "hassle-free"]
    assert [(row.model, row.config) for row in rows if row.method == "joint"] == paired
    for row in rows:
        if row.method == "joint":
            assert Recipe.from_yaml(RECIPES / row.recipe).method == "joint"


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.iterdir()))
def test_a_scale_changes_what_it_says_and_nothing_else(name):
    """Oracle: the recipe. A rank that follows from a ratio stays, and a method without rounds has none."""
    # Layers alone, `joint` too.
    alone = {"allocate": "uniform", "match_blocks": False, "match_predictions": 0}
    plain, scaled = dataclasses.replace(Recipe.from_yaml(RECIPES / name), **alone), SMALL.recipe(name)
    changed = {"samples": 2, "seqlen": 32, "calibration": str(CALIBRATION), "dtype": "float32"}
    changed |= {"rank": 4} if "rank-64" in name else {}
    changed |= {} if name.startswith(("wanda", "sparsegpt", "dsnot")) else {"rounds": 1}
    assert scaled == dataclasses.replace(plain, **changed)
    assert Scale().recipe(name) == plain


def test_a_plan_has_the_dense_model_first_and_the_methods_asked_for():
    jobs = table_jobs(2, str(MODEL), "Llama-3.2-3B", ("oats", "joint"), SMALL)
    configs = ["2:8 + rank 64", "3:8 + rank 64", "4:8 + rank 64", "2:4 + rank 64"]
    assert [(job.row.config, job.row.method) for job in jobs] == [
        ("", "dense"), *((config, method) for config in configs for method in ("oats", "joint")),
    ]  # fmt: skip
    assert {job.row.model for job in jobs} == {"Llama-3.2-3B"}
    assert len({job.key for job in jobs}) == len(jobs)
    assert jobs[1].key != table_jobs(2, str(MODEL), None, None, dataclasses.replace(SMALL, samples=3))[1].key


def test_added_methods_are_measured_when_they_are_asked_for():
    """Oracle: the recipes as they would be written by hand. The paper's methods and `joint` have no levers."""
    asked = ("hassle-free", "joint", "3basil", "joint-balanced", "joint-best")
    _, *jobs = table_jobs(2, str(MODEL), None, asked, SMALL, ("2:4 + rank 64",))
    shared = dataclasses.asdict(Recipe(pattern="2:4", rank=4, samples=2, seqlen=32, calibration=str(CALIBRATION)))
    levers = ("allocate", "match_blocks", "match_predictions")
    resolved = {job.row.method: job.recipe.resolve().recipe for job in jobs}
    assert tuple(resolved) == asked
    for name, effort in {"joint": "fast", "joint-balanced": "balanced", "joint-best": "best"}.items():
        plain = Recipe(**shared | {"method": "joint", "effort": effort, "rounds": 1, "dtype": "float32"})
        wanted = plain.resolve().recipe
        assert {lever: getattr(resolved[name], lever) for lever in levers} == {
            lever: getattr(wanted, lever) for lever in levers
        }
        assert resolved[name].method == "joint"
    for name in ("hassle-free", "3basil"):
        assert resolved[name].method == name
        assert [getattr(resolved[name], lever) for lever in levers] == ["uniform", 0.0, False, 0]
    unasked = {job.row.method for job in table_jobs(2, str(MODEL), None, None, SMALL)}
    assert unasked == {"dense", "oats", "hassle-free", "joint"}


def test_tables_that_share_a_row_share_its_measurement():
    one, three = (
        {job.key: job.name for job in table_jobs(table, str(MODEL), "Llama-3-8B", None, SMALL)} for table in (1, 3)
    )
    assert three.items() <= one.items()


def test_a_model_of_the_paper_s_name_stands_beside_its_own():
    (name,) = {job.row.model for job in table_jobs(2, "there/Llama-3.2-1B/", None, None, SMALL)}
    assert name == "Llama-3.2-1B"
    assert {job.model for job in table_jobs(2, None, None, None, SMALL)} == set(MODELS.values())


def test_tasks_are_those_that_the_table_prints():
    def tasks(table):
        (row, *_) = [row for row in paper_rows(table) if row.method == "joint"]
        return Scale().evaluation(row)["tasks"]

    assert tasks(1) == ["piqa", "arc_easy", "arc_challenge"]
    assert tasks(2) == list(TASKS)


BAD = {
    "method": (lambda: table_jobs(2, str(MODEL), None, ("wanda",), SMALL), UnknownNameError, "table 2 'wanda'"),
    "setting": (lambda: table_jobs(2, str(MODEL), None, None, SMALL, ("2:4",)), UnknownNameError, "2:4 . rank 64"),
    "none": (lambda: table_jobs(1, str(MODEL), None, ("joint",), SMALL, ("2:4",)), RecipeError, "no row of joint"),
    "model": (lambda: table_jobs(4, str(MODEL), "Llama-3.2-1B", None, SMALL), UnknownNameError, "Llama-3.2-1B"),
    "text": (lambda: table_jobs(2, None, None, None, Scale(texts={"a": "no.txt"})), CalibrationError, "no.txt"),
    "task": (lambda: table_jobs(2, None, None, None, Scale(tasks=("piqua",))), UnknownNameError, "piqua"),
    "data": (lambda: table_jobs(2, None, None, None, Scale(task_data=Path("none"))), TaskError, "piqa"),
    "block": (lambda: layer_errors(str(MODEL), SMALL.recipe("oats-2-4-rank-64.yaml"), ("oats",), block=4), ModelError,
              "blocks 0 to 3"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_a_mistake_is_seen_before_any_run(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_row_that_cannot_be_is_named():
    with pytest.raises(HasslefreeError, match=r"2:8 \+ rank 99 oats: rank 99 is larger"):
        cost(table_jobs(2, str(MODEL), None, ("oats",), dataclasses.replace(SMALL, rank=99))[1], torch.device("cpu"))


def test_a_run_that_is_cut_short_goes_on_to_the_same_results(tmp_path, monkeypatch):
    """Oracle: a run that was not. The compression before the crash is not made anew."""
    jobs = table_jobs(2, str(MODEL), None, ("oats", "joint"), SMALL)[:3]
    compressions, seen = [], []
    plain_compress, plain_evaluate = running.compress, running.evaluate

    def compress(model, folder, recipe, **how):
        compressions.append(recipe.method)
        return plain_compress(model, folder, recipe, **how)

    def evaluate(model, **how):
        seen.append(model)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return plain_evaluate(model, **how)

    monkeypatch.setattr(running, "compress", compress)
    monkeypatch.setattr(running, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, tmp_path / "cut")
    assert compressions == ["oats", "joint"]
    found = run_jobs(jobs, tmp_path / "cut")
    assert compressions == ["oats", "joint"]
    assert len(seen) == 4
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["results.json"], "models were not asked for"
    assert run_jobs(jobs, tmp_path / "cut") == found
    assert len(seen) == 4, "what is done was done again"
    whole = run_jobs(jobs, tmp_path / "whole", keep=True)
    assert {key: row | {"seconds": 0} for key, row in whole.items()} == {
        key: row | {"seconds": 0} for key, row in found.items()
    }
    folders = [path for path in (tmp_path / "whole").iterdir() if path.is_dir()]
    assert {path.name for path in folders} == {job.key for job in jobs[1:]}
    assert load_model(str(folders[0])).num_parameters()


def test_the_dense_row_is_what_evaluate_says(tmp_path):
    """Oracle: `evaluate` by hand."""
    from hasslefree.evaluation.run import evaluate

    (job, *_) = table_jobs(2, str(MODEL), None, ("oats",), SMALL)
    (row,) = run_jobs([job], tmp_path).values()
    found = evaluate(str(MODEL), [str(HELD_OUT)], seqlen=32, max_tokens=64, dtype="float32")
    assert row["figures"] == {"wikitext2": found["perplexity"][str(HELD_OUT)]["perplexity"]}


def test_the_paper_s_figures_stand_beside_by_hand():
    jobs = table_jobs(2, str(MODEL), "Llama-3-8B", ("oats", "hassle-free"), SMALL)
    results = [{"figures": {"wikitext2": 15.0, "mine": 3.0}, "relative_error": 0.25, "seconds": 1.0} for _ in jobs]
    results[-1]["figures"] = {"wikitext2": 14.0, "mine": 3.0}
    rows = [compare(job, result) for job, result in zip(jobs, results, strict=True)]
    oats, free = rows[-2:]
    assert (oats["config"], oats["method"], free["method"]) == ("2:4 + rank 64", "oats", "hassle-free")
    assert oats["setting"] == "2:4 + rank 4", "what was measured"
    assert oats["difference"] == pytest.approx({"wikitext2": 15.0 - 14.42})
    assert free["difference"] == pytest.approx({"wikitext2": 14.0 - 12.66})
    cells = [list(column.cells) for column in result_table(rows, "t").columns]
    assert [column[-3:] for column in cells[2:]] == [
        ["wikitext2", "mine", "relative error"], ["14.00", "3.00", "0.2500"], ["12.66", "", ""], ["+1.34", "", ""]
    ]  # fmt: skip


def test_what_is_left_takes_so_long():
    jobs = table_jobs(2, str(MODEL), None, ("oats",), SMALL)
    takes = [(job, cost(job, torch.device("cpu"))) for job in jobs]
    left = [each for _, each in takes[2:] if each]
    rate = sum(each.flops for each in left) / 30
    table = cost_table(takes, [jobs[1].key], rate, keep=True)
    assert "1 of them measured already" in table.title
    cells = [list(column.cells)[-1] for column in table.columns]
    assert cells[-1] == "30 s"
    assert cells[-2] == f"{sum(each.disk for each in left) / 1e6:.1f} MB"


@pytest.mark.parametrize("block", [0, 2])
def test_figure_1_is_each_layer_on_the_dense_model_s_gram(block):
    """Oracle: Grams from whole forward passes, and `decompose`."""
    from hasslefree.run.inputs import draw

    recipe = SMALL.recipe("joint-2-4-rank-64.yaml")
    errors = layer_errors(str(MODEL), recipe, ("oats", "hassle-free, unscaled"), block=block, rounds=2)
    model = load_model(str(MODEL), "float32")
    segments = draw(model, load_tokenizer(str(MODEL)), recipe)
    assert list(errors) == ["oats", "hassle-free, unscaled"]
    for name, layer in model.named_modules():
        if name.startswith(f"model.layers.{block}.") and isinstance(layer, torch.nn.Linear):
            gram = gram_of(model, name, segments)
            for method, parts in COMPARED.items():
                if method in errors:
                    solver = hasslefree.solve.methods.build_method(rounds=2, **parts)
                    wanted = hasslefree.decompose(layer.weight, gram, pattern="2:4", rank=4, method=solver)
                    found = errors[method][name.rpartition(".")[2]]
                    assert math.isclose(found, wanted.relative_error, rel_tol=2e-2), (method, name)
    assert all(len(layers) == 7 for layers in errors.values())


def run(monkeypatch, capsys, *arguments):
    """The exit code, and what was printed."""
    monkeypatch.setattr(sys, "argv", ["hasslefree", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out + printed.err


QUICK = ["--model", MODEL, "--calibration", CALIBRATION, "--texts", f"wikitext2={HELD_OUT}", "--tasks", "none",
         "--rank", "4", "--samples", "2", "--seqlen", "32", "--rounds", "1", "--max-tokens", "64"]  # fmt: skip


def test_the_command(monkeypatch, capsys, tmp_path):
    out = tmp_path / "out"
    code, text = run(monkeypatch, capsys, "reproduce", "table1", *QUICK, "--output", out, "--plan")
    assert code == 0, text
    assert "13 rows, 0 of them measured already" in text
    assert not out.exists()
    code, text = run(monkeypatch, capsys, "reproduce", "table1", *QUICK, "--output", out, "--methods", "wanda")
    assert code == 0, text
    rows = json.loads((out / "table1.json").read_text())["rows"]
    assert [(row["config"], row["method"]) for row in rows] == [("", "dense"), ("4:8", "wanda"), ("2:4", "wanda")]
    assert f"{rows[2]['measured']['wikitext2']:.2f}" in text
    assert "24.36" in text, "the paper's"
    code, text = run(monkeypatch, capsys, "reproduce", "figure1", *QUICK, "--output", out, "--methods", "oats", "joint")
    assert code == 0, text
    assert set(json.loads((out / "figure1.json").read_text())["errors"]) == {"oats", "joint"}
    assert (out / "figure1.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "figure1.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table5"], "unknown table or figure 'table5'. Did you mean 'table4'"),
        (["table2", "--texts", "wikitext2"], "NAME=FILE"),
        (["figure1", "--methods", "wanda"], "method of figure 1 'wanda'"),
        (["table2", "--model", "none/there/x", "--tasks", "none", "--calibration", CALIBRATION], "does not exist"),
    ],
)
def test_a_user_s_mistake_is_one_message(monkeypatch, capsys, tmp_path, arguments, message):
    code, text = run(monkeypatch, capsys, "reproduce", *arguments, "--output", tmp_path / "out")
    assert code == 2
    assert message in text
    assert "Traceback" not in text


def test_a_plan_needs_no_harness_and_a_measurement_does(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "lm_eval" else find(name, *rest)
    )
    command = ["reproduce", "table2", "--model", MODEL, "--seqlen", "64", "--output", tmp_path / "out"]
    code, text = run(monkeypatch, capsys, *command, "--plan")
    assert (code, "0 of them measured already" in text) == (0, True), text
    code, text = run(monkeypatch, capsys, *command)
    assert (code, 'pip install "hasslefree[eval]"' in text) == (2, True), text
    assert not (tmp_path / "out").exists()
