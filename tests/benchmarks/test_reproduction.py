"""The reproduction of the paper's tables and first figure, on the embedded model."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import reproduction
import torch
from harness import figure1
from harness.figure1 import COMPARED, layer_errors
from harness.paper import MODELS, RECIPES, TASKS, Scale, paper_rows, table_jobs
from reproduction import beside_earlier, compare, cost, cost_table, main, result_table, run_jobs

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, HELD_OUT, MODEL
from hasslefree.errors import CalibrationError, HasslefreeError, ModelError, RecipeError, TaskError, UnknownNameError
from hasslefree.models.load import load_model
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.pipeline.text import read_texts
from tests.tiny_models import gram_of

pytestmark = pytest.mark.nightly

SMALL = Scale(rank=4, samples=2, seqlen=32, rounds=1, calibration=str(CALIBRATION), dtype="float32",
              texts={"wikitext2": str(HELD_OUT)}, max_tokens=64, tasks=())  # fmt: skip


@pytest.mark.parametrize("name", ["joint-2-4-rank-64", "oats-2-8-ratio-50", "dsnot-2-4"])
def test_a_scale_changes_what_it_says_and_nothing_else(name):
    """Oracle: the recipe. A rank that follows from a ratio stays, and a method without rounds has none."""
    plain = Recipe.from_yaml(RECIPES / f"{name}.yaml", effort="fast")
    changed = {"samples": 2, "seqlen": 32, "calibration": str(CALIBRATION), "dtype": "float32"}
    changed |= {"rank": 4} if "rank-64" in name else {}
    changed |= {} if name.startswith("dsnot") else {"rounds": 1}
    assert SMALL.recipe(f"{name}.yaml") == dataclasses.replace(plain, **changed)
    assert Scale().recipe(f"{name}.yaml") == plain


def test_a_plan_has_the_dense_model_first_and_the_methods_asked_for():
    jobs = table_jobs(2, SMALL, str(MODEL), "Llama-3.2-3B", ("oats", "joint"))
    configs = ["2:8 + rank 64", "3:8 + rank 64", "4:8 + rank 64", "2:4 + rank 64"]
    assert [(job.row.config, job.row.method) for job in jobs] == [
        ("", "dense"), *((config, method) for config in configs for method in ("oats", "joint")),
    ]  # fmt: skip
    assert {job.row.model for job in jobs} == {"Llama-3.2-3B"}
    assert len({job.key for job in jobs}) == len(jobs)
    assert jobs[1].key != table_jobs(2, dataclasses.replace(SMALL, samples=3), str(MODEL))[1].key
    assert {job.row.method for job in table_jobs(2, SMALL, str(MODEL))} == {"dense", "oats", "hassle-free", "joint"}


def test_added_methods_are_measured_when_they_are_asked_for():
    """Oracle: the recipes as written by hand. The paper's methods and `joint` neither allocate nor train."""
    asked = ("hassle-free", "joint", "3basil", "hassle-free-alps", "pcp", "joint-balanced", "joint-best")
    _, *jobs = table_jobs(2, SMALL, str(MODEL), None, asked, ("2:4 + rank 64",))
    shared = {"pattern": "2:4", "rank": 4, "samples": 2, "seqlen": 32, "calibration": str(CALIBRATION)}
    wanted = {
        "hassle-free": {"method": "hassle-free", "effort": "fast"},
        "joint": {"effort": "fast"},
        "3basil": {"method": "3basil", "effort": "fast"},
        "hassle-free-alps": {"method": "hassle-free", "pruner": "alps", "effort": "fast"},
        "pcp": {"method": "pcp", "effort": "fast"},
        "joint-balanced": {"effort": "balanced"},
        "joint-best": {"effort": "best"},
    }
    resolved = {job.row.method: job.recipe.resolve() for job in jobs}
    assert tuple(resolved) == asked
    for name, changes in wanted.items():
        recipe = Recipe(**shared | changes).resolve()
        for field in ("method", "allocate", "match_predictions"):
            assert getattr(resolved[name], field) == getattr(recipe, field), (name, field)
    assert resolved["hassle-free-alps"].solver.pruner == hasslefree.ALPS()


def test_owl_is_for_settings_with_a_ratio():
    _, job = table_jobs(1, SMALL, str(MODEL), None, ("oats-owl",), ("2:8, ratio 0.5",))
    resolved = job.recipe.resolve()
    assert (resolved.method, resolved.allocate) == (Recipe(method="oats", rank=4).resolve().method, "owl")
    with pytest.raises(RecipeError, match="give ratio or"):
        table_jobs(2, SMALL, str(MODEL), None, ("oats-owl",), ("2:4 + rank 64",))[1].recipe.resolve()


def test_tables_that_share_a_row_share_its_measurement():
    one, three = ({job.key: job.name for job in table_jobs(n, SMALL, str(MODEL), "Llama-3-8B")} for n in (1, 3))
    assert three.items() <= one.items()


def test_a_model_with_a_name_of_the_paper_is_compared_with_that_one():
    (name,) = {job.row.model for job in table_jobs(2, SMALL, "there/Llama-3.2-1B/")}
    assert name == "Llama-3.2-1B"
    assert {job.model for job in table_jobs(2, SMALL)} == set(MODELS.values())


def test_tasks_are_those_that_the_table_prints():
    def tasks(table):
        return Scale().evaluation(next(row for row in paper_rows(table) if row.method == "joint"))["tasks"]

    assert tasks(1) == ["piqa", "arc_easy", "arc_challenge"]
    assert tasks(2) == list(TASKS)


BAD = {
    "method": (lambda: table_jobs(2, SMALL, str(MODEL), None, ("wanda",)), UnknownNameError, "table 2 'wanda'"),
    "setting": (lambda: table_jobs(2, SMALL, str(MODEL), None, None, ("2:4",)), UnknownNameError, "2:4 . rank 64"),
    "none": (lambda: table_jobs(1, SMALL, str(MODEL), None, ("joint",), ("2:4",)), RecipeError, "no row of joint"),
    "model": (lambda: table_jobs(4, SMALL, str(MODEL), "Llama-3.2-1B"), UnknownNameError, "Llama-3.2-1B"),
    "text": (lambda: table_jobs(2, Scale(texts={"a": "no.txt"})), CalibrationError, "no.txt"),
    "task": (lambda: table_jobs(2, Scale(tasks=("piqua",))), UnknownNameError, "piqua"),
    "data": (lambda: table_jobs(2, Scale(task_data=Path("none"))), TaskError, "piqa"),
    "block": (lambda: layer_errors(str(MODEL), SMALL.recipe("oats-2-4-rank-64.yaml"), ("oats",), block=4), ModelError,
              "blocks 0 to 3"),
    "rank": (lambda: cost(table_jobs(2, dataclasses.replace(SMALL, rank=99), str(MODEL), None, ("oats",))[1],
                          torch.device("cpu")), HasslefreeError, r"rank 99 is larger .*2:8 \+ rank 99 oats"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_a_mistake_is_seen_before_any_run(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_an_interrupted_run_continues_to_the_same_results(tmp_path, monkeypatch):
    """Oracle: a run without an interruption, and `evaluate`. The compression before it is not made anew."""
    jobs = table_jobs(2, SMALL, str(MODEL), None, ("oats", "joint"))[:3]
    compressions, evaluations = [], []
    compress, evaluate = reproduction.compress, reproduction.evaluate

    def counting_compress(model, folder, recipe, **how):
        compressions.append(recipe.method)
        return compress(model, folder, recipe, **how)

    def interrupted_evaluate(model, **how):
        evaluations.append(model)
        if len(evaluations) == 3:
            raise KeyboardInterrupt
        return evaluate(model, **how)

    monkeypatch.setattr(reproduction, "compress", counting_compress)
    monkeypatch.setattr(reproduction, "evaluate", interrupted_evaluate)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, tmp_path / "cut")
    rows = run_jobs(jobs, tmp_path / "cut")
    assert compressions == ["oats", "joint"]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["results.json"], "models were not asked for"
    assert run_jobs(jobs, tmp_path / "cut") == rows
    assert len(evaluations) == 4, "what is done was done again"
    whole = run_jobs(jobs, tmp_path / "whole", keep=True)
    assert {key: row | {"seconds": 0} for key, row in whole.items()} == {
        key: row | {"seconds": 0} for key, row in rows.items()
    }
    assert {path.name for path in (tmp_path / "whole").iterdir() if path.is_dir()} == {job.key for job in jobs[1:]}
    dense = evaluate(str(MODEL), [str(HELD_OUT)], seqlen=32, max_tokens=64, dtype="float32")
    assert rows[jobs[0].key]["figures"] == {"wikitext2": dense["perplexity"][str(HELD_OUT)]["perplexity"]}


def test_the_comparison_with_the_paper_by_hand():
    jobs = table_jobs(2, SMALL, str(MODEL), "Llama-3-8B", ("oats", "hassle-free"))
    results = [{"figures": {"wikitext2": 15.0, "mine": 3.0}, "relative_error": 0.25, "seconds": 1.0} for _ in jobs]
    results[-1]["figures"] = {"wikitext2": 14.0, "mine": 3.0}
    rows = [compare(job, result) for job, result in zip(jobs, results, strict=True)]
    oats, free = rows[-2:]
    assert (oats["config"], oats["method"], free["method"]) == ("2:4 + rank 64", "oats", "hassle-free")
    assert oats["setting"] == "2:4 + rank 4", "what was measured"
    assert (oats["rounds"], "rounds" in rows[0]) == (1, False)
    assert oats["difference"] == pytest.approx({"wikitext2": 15.0 - 14.42})
    assert free["difference"] == pytest.approx({"wikitext2": 14.0 - 12.66})
    cells = [list(map(str, column.cells)) for column in result_table(rows, "t").columns]
    assert [column[-3:] for column in cells[2:]] == [
        ["wikitext2", "mine", "relative error"], ["14.00", "3.00", "0.2500"], ["12.66", "", ""], ["+1.34", "", ""]
    ]  # fmt: skip


def test_the_cost_of_the_missing_rows():
    jobs = table_jobs(2, SMALL, str(MODEL), None, ("oats",))
    costs = [(job, cost(job, torch.device("cpu"))) for job in jobs]
    missing = [takes for _, takes in costs[2:]]
    table = cost_table(costs, [jobs[1].key], sum(takes["flops"] for takes in missing) / 30, keep=True)
    assert "1 of them measured already" in table.title
    cells = [str(list(column.cells)[-1]) for column in table.columns]
    assert cells[-1] == "30 s"
    assert cells[-2] == f"{sum(takes['disk'] for takes in missing) / 1e6:.1f} MB"


def test_figure_1_is_each_layer_on_the_gram_of_the_dense_model():
    """Oracle: Grams from whole forward passes, and `decompose`."""
    recipe = SMALL.recipe("joint-2-4-rank-64.yaml")
    errors = layer_errors(str(MODEL), recipe, ("oats", "hassle-free, unscaled"), block=2, rounds=2)
    model = load_model(str(MODEL), "float32")
    segments = read_texts(model, load_tokenizer(str(MODEL)), recipe, model.device).draw()
    assert {method: len(layers) for method, layers in errors.items()} == {"oats": 7, "hassle-free, unscaled": 7}
    for name, layer in model.named_modules():
        if name.startswith("model.layers.2.") and isinstance(layer, torch.nn.Linear):
            gram = gram_of(model, name, segments)
            for method, layers in errors.items():
                solver = dataclasses.replace(COMPARED[method], rounds=2)
                wanted = hasslefree.decompose(layer.weight, gram, pattern="2:4", rank=4, method=solver)
                assert math.isclose(layers[name.rpartition(".")[2]], wanted.relative_error, rel_tol=2e-2), (
                    method,
                    name,
                )


def test_an_interrupted_figure_continues_after_its_last_layer(tmp_path, monkeypatch):
    words = ["figure1", "--methods", "oats", "joint", *map(str, QUICK), "--output", str(tmp_path)]
    decompose, layers = figure1.decompose, []

    def counting(*arguments, **options):
        layers.append(arguments[0].shape)
        if len(layers) == 9:
            raise KeyboardInterrupt
        return decompose(*arguments, **options)

    monkeypatch.setattr(figure1, "decompose", counting)
    with pytest.raises(KeyboardInterrupt):
        main(words)
    main(words)
    assert len(layers) == 9 + 6, "eight were done, and the ninth is begun again"
    measured = json.loads((tmp_path / "figure1.json").read_text())["errors"]
    main(words)
    assert len(layers) == 9 + 6
    assert json.loads((tmp_path / "figure1.json").read_text())["errors"] == measured


QUICK = ["--model", MODEL, "--calibration", CALIBRATION, "--texts", f"wikitext2={HELD_OUT}", "--tasks", "--rank", 4,
         "--samples", 2, "--seqlen", 32, "--rounds", 1, "--max-tokens", 64]  # fmt: skip


def run(*arguments):
    main(list(map(str, arguments)))


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    monkeypatch.setattr(reproduction, "ROOT", tmp_path)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    out = tmp_path / "out"
    run("table1", *QUICK, "--output", out, "--plan")
    assert "13 rows, 0 of them measured already" in capsys.readouterr().out
    assert not out.exists()
    run("table1", *QUICK, "--output", out, "--methods", "wanda")
    text = capsys.readouterr().out
    rows = json.loads((out / "table1.json").read_text())["rows"]
    assert [(row["config"], row["method"]) for row in rows] == [("", "dense"), ("4:8", "wanda"), ("2:4", "wanda")]
    assert f"{rows[2]['measured']['wikitext2']:.2f}" in text
    assert "24.36" in text, "the paper's"
    run("figure1", *QUICK, "--output", out, "--methods", "oats", "joint", "--record", "name")
    content = json.loads((tmp_path / "reproduction_name.json").read_text())
    assert set(content["figure1"]["errors"]) == {"oats", "joint"}
    assert (content["rank"], list(content["tables"]), str(tmp_path) in str(content)) == (4, ["table1"], False)
    assert (tmp_path / "docs/results/figure1_name.png").read_bytes().startswith(b"\x89PNG")


def measured(rank, tables, errors):
    """What one run records. tables: the rows of table 1, as (method, rounds, perplexity)."""
    rows = [
        {"beside": "Llama-3-8B", "config": "2:4", "method": method, "rounds": rounds, "measured": {"c4": perplexity}}
        for method, rounds, perplexity in tables
    ]
    scale = dict.fromkeys(reproduction.RECORDED) | {"rank": rank}
    figure = {"block": 0, "pattern": "2:4", "rank": rank, "errors": errors}
    return {"machine": "here", "model": "name", **scale, "tables": {"table1": rows}, "figure1": figure}


def test_a_record_keeps_what_was_measured_before():
    """Oracle: the union by hand. A row with another number of rounds is another row; one measured anew replaces its
    own, and so does a method of the figure.
    """
    before = measured(4, [("oats", None, 9.0), ("hassle-free", 20, 8.0)], {"oats": {"q": 0.3}, "joint": {"q": 0.1}})
    now = measured(4, [("hassle-free", 80, 7.0), ("oats", None, 8.5)], {"joint": {"q": 0.2}, "pcp": {"q": 0.5}})
    wanted = measured(
        4,
        [("oats", None, 8.5), ("hassle-free", 20, 8.0), ("hassle-free", 80, 7.0)],
        {"oats": {"q": 0.3}, "joint": {"q": 0.2}, "pcp": {"q": 0.5}},
    )
    assert beside_earlier(now, before) == wanted


def test_a_record_of_another_scale_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    monkeypatch.setattr(reproduction, "ROOT", tmp_path)
    (tmp_path / "reproduction_name.json").write_text(json.dumps(measured(8, [], {})))
    with pytest.raises(SystemExit, match="the record name has rank 8, not 4; use another name with --record"):
        run("figure1", *QUICK, "--output", tmp_path / "out", "--record", "name")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table5"], "invalid choice: 'table5'"),
        (["table2", "--texts", "wikitext2"], "NAME=FILE"),
        (["figure1", "--methods", "wanda"], "method of figure 1 'wanda'"),
        (["table2", "--model", "none/there/x", "--tasks", "--calibration", CALIBRATION], "does not exist"),
    ],
)
def test_a_mistake_is_one_message(capsys, tmp_path, arguments, message):
    with pytest.raises(SystemExit) as caught:
        run(*arguments, "--output", tmp_path / "out")
    assert message in f"{caught.value}{capsys.readouterr().err}"
