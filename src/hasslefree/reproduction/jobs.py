"""What has to be run for a table of the paper, and what that will take."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hasslefree.data import check_text
from hasslefree.errors import HasslefreeError, RecipeError, UnknownNameError, option
from hasslefree.evaluation.tasks import check_tasks
from hasslefree.recipe.recipe import Recipe
from hasslefree.reproduction.paper import LAYERS_ALONE, MODELS, RECIPES, TEXTS, PaperRow, paper_rows
from hasslefree.run.estimate import Footprint, estimate_model
from hasslefree.solve.methods import METHODS, settings_of


@dataclass(frozen=True)
class Scale:
    """What is changed of the paper's settings, for small models and short runs; None leaves a field as it is.

    Args:
        rank: in the place of the paper's 64. samples, seqlen, rounds, calibration, dtype: of every recipe.
        texts: name → file, in the place of the paper's three; a name of the paper's has its figures beside.
        max_tokens: of each text. tasks: None for those of the table.
        limit: rows of each task. task_data: folder with the tasks' rows.
    """

    rank: int | None = None
    samples: int | None = None
    seqlen: int | None = None
    rounds: int | None = None
    calibration: str | None = None
    dtype: str | None = None
    texts: dict[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    tasks: tuple[str, ...] | None = None
    limit: int | None = None
    task_data: Path | None = None

    def recipe(self, name: str, changes: dict[str, Any] = LAYERS_ALONE) -> Recipe:
        """A recipe of the paper's in this scale. changes: other fields of it, as a row has them."""
        plain = Recipe.from_yaml(RECIPES / name, **changes)
        scaled: dict[str, Any] = {
            field: value
            for field in ("samples", "seqlen", "calibration", "dtype")
            if (value := getattr(self, field)) is not None
        }
        if self.rank is not None and plain.rank is not None:
            scaled["rank"] = self.rank
        if self.rounds is not None and "rounds" in settings_of(METHODS[plain.method]):
            scaled["rounds"] = self.rounds
        return Recipe.from_yaml(RECIPES / name, **changes | scaled)

    def evaluation(self, row: PaperRow) -> dict[str, Any]:
        """The arguments of `evaluate` for a row. An added row has the tasks of its table."""
        printed = next(other for other in paper_rows(row.table) if other.figures)
        names = [name for name in printed.figures if name not in (*TEXTS, "average")]
        return {
            "texts": self.texts or {text: text for text in TEXTS},
            "tasks": list(names if self.tasks is None else self.tasks),
            "seqlen": self.seqlen,
            "max_tokens": self.max_tokens,
            "dtype": self.dtype or "auto",
            "limit": self.limit,
            "task_data": self.task_data,
        }


@dataclass(frozen=True)
class Job:
    """One row to be measured. model: name or folder. recipe: None for the dense model."""

    row: PaperRow
    model: str
    recipe: Recipe | None
    evaluation: dict[str, Any]

    @property
    def key(self) -> str:
        """A name for all that the figures depend on, but for versions and machine."""
        recipe = None if self.recipe is None else dataclasses.asdict(self.recipe)
        content = [self.model, recipe, self.evaluation]
        return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]

    @property
    def setting(self) -> str:
        """The paper's, with the rank that is in force."""
        fixed = None if self.recipe is None else self.recipe.rank
        return self.row.config.replace("rank 64", f"rank {fixed}")

    @property
    def name(self) -> str:
        return f"{self.setting} {self.row.method}" if self.recipe else "dense"


def table_jobs(
    table: int,
    model: str | None,
    like: str | None,
    methods: tuple[str, ...] | None,
    scale: Scale,
    settings: tuple[str, ...] | None = None,
) -> list[Job]:
    """The rows of a table that can be measured; the dense models come first.

    Args:
        model: instead of the paper's; None for all models of the table.
        like: the paper's model to compare with; None for the one with its name, else the table's first.
        methods: some of the table's and of `ADDED`; None for the table's and `joint`. Dense models are always measured.
        settings: some of the table's, as the paper prints them (`2:4 + rank 64`); None for all.

    Raises:
        HasslefreeError: a method or a setting that is in no row, a text or the data of a task that are missing, a wrong
            recipe.
    """
    rows = paper_rows(table)
    if unknown := set(methods or ()) - {row.method for row in rows}:
        raise UnknownNameError(f"method of table {table}", min(unknown), {row.method for row in rows})
    if unknown := set(settings or ()) - {row.config for row in rows}:
        raise UnknownNameError(f"setting of table {table}", min(unknown), {row.config for row in rows if row.config})
    if model is not None:
        beside = like or next((name for name in MODELS if model.rstrip("/").endswith(name)), rows[0].model)
        rows = [row for row in rows if row.model == beside]
        if not rows:
            raise UnknownNameError(f"model of table {table}", beside, {row.model for row in paper_rows(table)})

    def wanted(row: PaperRow) -> bool:
        method = row.method in methods if methods else bool(row.figures) or row.method == "joint"
        return row.recipe is None or (method and (settings is None or row.config in settings))

    if methods and settings and not any(row.recipe and wanted(row) for row in rows):
        raise RecipeError(
            f"table {table} has no row of {', '.join(methods)} in {', '.join(settings)}; "
            f"leave out {option('methods')} or {option('settings')}"
        )
    jobs = [
        Job(
            row,
            model or MODELS[row.model],
            scale.recipe(row.recipe, row.changes) if row.recipe else None,
            scale.evaluation(row),
        )
        for row in sorted(filter(wanted, rows), key=lambda row: row.method != "dense")
    ]
    for text in jobs[0].evaluation["texts"].values():
        check_text(text)
    if tasks := jobs[0].evaluation["tasks"]:
        check_tasks(tasks, scale.task_data)
    return jobs


def cost(job: Job, device: torch.device) -> Footprint | None:
    """What the compression of a row takes; None for a dense model.

    Raises:
        HasslefreeError: with the row: a model that is not there, or cannot meet the budget.
    """
    if job.recipe is None:
        return None
    try:
        return estimate_model(job.model, job.recipe, device, "device")
    except RecipeError:
        raise
    except HasslefreeError as error:
        raise error.under(job.name) from None
