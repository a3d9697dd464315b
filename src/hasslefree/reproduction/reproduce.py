"""The command `hasslefree reproduce`: show the cost, measure missing rows, and compare with the paper's figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hasslefree.errors import RecipeError, UnknownNameError
from hasslefree.evaluation.harness import default_cache
from hasslefree.evaluation.tasks import check_harness
from hasslefree.models.load import resolve_device
from hasslefree.phases import Listener
from hasslefree.report.figures import grouped_bars, save
from hasslefree.reproduction.figure1 import COMPARED, layer_errors, mean_error
from hasslefree.reproduction.jobs import Scale, cost, table_jobs
from hasslefree.reproduction.measure import read_results, run_jobs
from hasslefree.reproduction.paper import MODELS
from hasslefree.reproduction.tables import compare, cost_table, result_table
from hasslefree.run.machine import product_rate
from hasslefree.tables import table

TABLES = {f"table{number}": number for number in (1, 2, 3, 4)}
FIGURE_MODEL = MODELS["Llama-3.2-1B"]
FIGURE_RECIPE = "joint-2-4-rank-64.yaml"


@dataclass(frozen=True)
class Desk:
    """Where a reproduction works and speaks. output: the folder for results. say: prints a line as it is."""

    output: Path
    device: str | None
    console: Console
    say: Callable[[str], None]


def table_number(what: str) -> int:
    """The number of a table by its name."""
    if what not in TABLES:
        raise UnknownNameError("table or figure", what, [*TABLES, "figure1"])
    return TABLES[what]


def local_texts(given: list[str]) -> dict[str, str]:
    """NAME=FILE as a dictionary."""
    pairs = [text.partition("=") for text in given]
    if wrong := [name for name, equals, file in pairs if not (equals and file)]:
        raise RecipeError(f"--texts needs the form NAME=FILE, such as wikitext2=wiki.test.raw, got {wrong[0]!r}")
    return {name: file for name, _, file in pairs}


def chosen_tasks(given: list[str] | None) -> tuple[str, ...] | None:
    """The tasks of --tasks; none at all for the word none, and None for those of the table."""
    if not given:
        return None
    return () if given == ["none"] else tuple(given)


def reproduce_table(
    number: int,
    model: str | None,
    like: str | None,
    methods: tuple[str, ...] | None,
    scale: Scale,
    desk: Desk,
    *,
    settings: tuple[str, ...] | None = None,
    plan_only: bool = False,
    keep: bool = False,
    progress: Listener | None = None,
) -> None:
    """Measure a table; the arguments are those of `table_jobs` and `run_jobs`. It is printed, and written as JSON."""
    jobs = table_jobs(number, model, like, methods, scale, settings)
    target = resolve_device(desk.device)
    takes = [(job, cost(job, target)) for job in jobs]
    desk.console.print(cost_table(takes, read_results(desk.output), product_rate(target), keep))
    if plan_only:
        return
    if any(job.evaluation["tasks"] for job in jobs):
        check_harness()
    results = run_jobs(
        jobs, desk.output, device=desk.device, cache=default_cache(), keep=keep, progress=progress, say=desk.say
    )
    rows = [compare(job, results[job.key]) for job in jobs]
    for beside in dict.fromkeys(job.row.model for job in jobs):
        of_model = [row for row in rows if row["beside"] == beside]
        desk.console.print(
            result_table(of_model, f"Table {number}: {of_model[0]['model']}, the paper's {beside} beside")
        )
    write(desk, f"table{number}.json", {"table": number, "rows": rows})


def reproduce_figure(
    model: str | None,
    methods: tuple[str, ...] | None,
    scale: Scale,
    desk: Desk,
    block: int = 0,
    progress: Listener | None = None,
) -> None:
    """Figure 1 for a block of a model: bars as PNG and SVG, the errors as JSON and as a table."""
    chosen = methods or tuple(COMPARED)
    if unknown := set(chosen) - COMPARED.keys():
        raise UnknownNameError("method of figure 1", min(unknown), COMPARED)
    name, recipe = model or FIGURE_MODEL, scale.recipe(FIGURE_RECIPE)
    desk.output.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"rounds": scale.rounds, "device": desk.device, "progress": progress}
    errors = layer_errors(name, recipe, chosen, block=block, **options)
    figure = grouped_bars(errors, "relative error")
    for kind in ("png", "svg"):
        save(figure, desk.output / f"figure1.{kind}")
    made = table(["layer"], list(errors), f"block {block}: {recipe.pattern} + rank {recipe.rank}, relative error")
    for layer in errors[chosen[0]]:
        made.add_row(layer, *(f"{errors[method][layer]:.5f}" for method in chosen))
    made.add_section()
    made.add_row("mean", *(f"{mean_error(errors[method]):.5f}" for method in chosen))
    desk.console.print(made)
    content = {"model": name, "block": block, "pattern": recipe.pattern, "rank": recipe.rank, "errors": errors}
    write(desk, "figure1.json", content)


def write(desk: Desk, name: str, content: dict[str, Any]) -> None:
    """Write a result as JSON, and say so."""
    (desk.output / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    desk.say(f"Written to {desk.output / name}.")
