"""The paper's figures as data: complete, consistent with themselves, each with the recipe to reproduce it."""

import csv
from collections import Counter
from pathlib import Path

from hasslefree import Recipe

ROOT = Path(__file__).parents[2]
TASKS = ("piqa", "hellaswag", "arc_easy", "arc_challenge", "winogrande", "rte", "openbookqa", "boolq")
TEXTS = ("c4", "wikitext2", "ptb")
ROWS = list(csv.DictReader((ROOT / "docs/results/paper_tables.csv").read_text().splitlines()))


def test_the_tables_are_complete():
    """Oracle: counted in the paper: methods × settings × models, and a dense row for each model."""
    assert Counter(row["table"] for row in ROWS) == {"1": 11, "2": 3 * (2 * 4 + 1), "3": 3 * (2 * 2 + 1), "4": 2 * 7}
    for row in ROWS:
        given = {name for name in (*TEXTS, *TASKS, "average") if row[name]}
        short = {*TEXTS, "piqa", "arc_easy", "arc_challenge"}
        assert given == (short if row["table"] == "1" else {*TEXTS, *TASKS, "average"})


def test_the_printed_averages_are_those_of_the_printed_tasks():
    """Oracle: the mean. Rounded to hundredths, a task is off by 0.005 at most, and so are their mean and its print."""
    for row in ROWS:
        if row["average"]:
            mean = sum(float(row[task]) for task in TASKS) / len(TASKS)
            assert abs(mean - float(row["average"])) <= 0.0100001, row


def test_rows_that_stand_in_two_tables_agree():
    """Table 3 repeats rows of table 1, and every table its dense models, except one (docs/results/reproduction.md)."""
    seen: dict[tuple[str, ...], set[str]] = {}
    for row in ROWS:
        for name in (*TEXTS, *TASKS):
            if row[name]:
                seen.setdefault((row["model"], row["config"], row["method"], name), set()).add(row[name])
    assert {key[:3] for key, values in seen.items() if len(values) > 1} == {("Llama-3-8B", "", "dense")}
    dense = {(row["table"], row["model"]): [row[n] for n in TEXTS] for row in ROWS if row["method"] == "dense"}
    assert dense["4", "Llama-3-8B"] == dense["2", "Llama-3.2-3B"]


def test_every_row_has_its_recipe():
    """Oracle: the setting that the row states."""
    for row in ROWS:
        if row["method"] == "dense":
            assert not row["recipe"]
            continue
        recipe = Recipe.from_yaml(ROOT / "recipes" / row["recipe"])
        words = [recipe.pattern]
        words += [f"ratio {recipe.ratio}"] if recipe.ratio is not None else []
        words += [f"rank share {recipe.rank_share}"] if recipe.rank_share is not None else []
        config = ", ".join(words) + (f" + rank {recipe.rank}" if recipe.rank is not None else "")
        assert (config, recipe.method) == (row["config"], row["method"])
