"""The tables of the HASSLE-free paper (arXiv 2502.00899) as data, and what to compress and evaluate for each row."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.record import ROOT
from hasslefree.errors import RecipeError, UnknownNameError
from hasslefree.evaluation.tasks import check_tasks
from hasslefree.recipe.recipe import Recipe
from hasslefree.solve.methods import METHODS, settings_of
from hasslefree.texts.sources import check_text

RECIPES = ROOT / "recipes"
PRINTED = ROOT / "docs" / "results" / "paper_tables.csv"

TEXTS = ("c4", "wikitext2", "ptb")
TASKS = ("piqa", "hellaswag", "arc_easy", "arc_challenge", "winogrande", "rte", "openbookqa", "boolq")

# The paper's names of the models, and the names on the hub.
MODELS = {
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
}

# The paper decomposes single layers; nothing is done between layers.
LAYERS_ALONE: dict[str, Any] = {"effort": "fast"}

# Methods that are not in the paper's tables → changes to the recipe of `joint`. They can be added to every setting with
# a low-rank part, OWL to those with a ratio. The paper names ALPS as another pruner, and 3BASiL was published after it.
ADDED: dict[str, dict[str, Any]] = {
    "joint": LAYERS_ALONE,
    "3basil": LAYERS_ALONE | {"method": "3basil"},
    "hassle-free-alps": LAYERS_ALONE | {"method": "hassle-free", "pruner": "alps"},
    "pcp": LAYERS_ALONE | {"method": "pcp"},
    "oats-owl": LAYERS_ALONE | {"method": "oats", "allocate": "owl"},
    "joint-balanced": {"effort": "balanced"},
    "joint-best": {"effort": "best"},
}


@dataclass(frozen=True)
class PaperRow:
    """One row of a table of the paper, or one that we add.

    Args:
        config: such as 2:4 + rank 64; empty for a dense model. recipe: a file of `RECIPES`; None for a dense model.
        figures: perplexity by text, accuracy in per cent by task, and `average`; empty for an added row.
        changes: fields that replace those of the recipe.
    """

    table: int
    model: str
    config: str
    method: str
    recipe: str | None
    figures: dict[str, float]
    changes: dict[str, Any] = field(default_factory=lambda: LAYERS_ALONE)


def paper_rows(table: int) -> list[PaperRow]:
    """The rows of a table in its order; each setting with a low-rank part is followed by the rows that we add."""
    rows = []
    with PRINTED.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["table"] != str(table):
                continue
            model, config, method, recipe = (line[name] for name in ("model", "config", "method", "recipe"))
            figures = {name: float(line[name]) for name in (*TEXTS, *TASKS, "average") if line[name]}
            rows.append(PaperRow(table, model, config, method, recipe or None, figures))
            if method == "hassle-free":
                ours = recipe.replace("hassle-free-", "joint-")
                rows += [PaperRow(table, model, config, name, ours, {}, changes) for name, changes in ADDED.items()]
    return rows


@dataclass(frozen=True)
class Scale:
    """Changes to the paper's settings for small models and short runs; None leaves the setting as it is.

    Args:
        rank: replaces the paper's 64. samples, seqlen, rounds, calibration, dtype: of every recipe.
        texts: name → file, instead of the paper's three texts.
        max_tokens: of each text. tasks: instead of those of the table.
        limit: rows of each task. task_data: folder with the rows of the tasks.
    """

    rank: int | None = None
    samples: int | None = None
    seqlen: int | None = None
    rounds: int | None = None
    calibration: str | None = None
    dtype: str | None = None
    texts: dict[str, str] | None = None
    max_tokens: int | None = None
    tasks: tuple[str, ...] | None = None
    limit: int | None = None
    task_data: Path | None = None

    def recipe(self, name: str, changes: dict[str, Any] = LAYERS_ALONE) -> Recipe:
        """A recipe of the paper at this scale. changes: further fields to replace."""
        paper = Recipe.from_yaml(RECIPES / name, **changes)
        names = ["samples", "seqlen", "calibration", "dtype"]
        names += ["rank"] if paper.rank is not None else []
        names += ["rounds"] if "rounds" in settings_of(METHODS[paper.method]) else []
        scaled = {name: value for name in names if (value := getattr(self, name)) is not None}
        return Recipe.from_yaml(RECIPES / name, **changes | scaled)

    def evaluation(self, row: PaperRow) -> dict[str, Any]:
        """The arguments of `evaluate` for a row. An added row has the tasks of its table."""
        printed = next(other for other in paper_rows(row.table) if other.figures).figures
        return {
            "texts": self.texts or {text: text for text in TEXTS},
            "tasks": [name for name in printed if name in TASKS] if self.tasks is None else list(self.tasks),
            "seqlen": self.seqlen,
            "max_tokens": self.max_tokens,
            "dtype": self.dtype or "auto",
            "limit": self.limit,
            "task_data": self.task_data,
            "first_token": False,  # as in SparseGPT's code
        }


@dataclass(frozen=True)
class Job:
    """One row to measure. model: name or folder. recipe: None for the dense model."""

    row: PaperRow
    model: str
    recipe: Recipe | None
    evaluation: dict[str, Any]

    @property
    def key(self) -> str:
        """A hash of everything that the figures depend on, except for versions and the machine."""
        recipe = None if self.recipe is None else dataclasses.asdict(self.recipe)
        content = [self.model, recipe, self.evaluation]
        return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]

    @property
    def setting(self) -> str:
        """The setting of the row, with the rank of the recipe."""
        rank = None if self.recipe is None else self.recipe.rank
        return self.row.config.replace("rank 64", f"rank {rank}")

    @property
    def name(self) -> str:
        return f"{self.setting} {self.row.method}" if self.recipe else "dense"


def table_jobs(
    table: int,
    scale: Scale,
    model: str | None = None,
    like: str | None = None,
    methods: Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
) -> list[Job]:
    """The rows of a table to measure, dense models first.

    Args:
        model: instead of the paper's; None for all models of the table.
        like: the paper's model to compare with; None for the one with the same name, or else the table's first.
        methods: some of the table's and of `ADDED`; None for the table's and `joint`. Dense models are always measured.
        settings: some of the table's, as the paper prints them (`2:4 + rank 64`); None for all.

    Raises:
        HasslefreeError: an unknown method, setting or model, a missing text or missing rows of a task, a wrong recipe.
    """
    rows = paper_rows(table)
    if unknown := set(methods or ()) - {row.method for row in rows}:
        raise UnknownNameError(f"method of table {table}", min(unknown), {row.method for row in rows})
    if unknown := set(settings or ()) - {row.config for row in rows}:
        raise UnknownNameError(f"setting of table {table}", min(unknown), {row.config for row in rows if row.config})
    if model is not None:
        counterpart = like or next((name for name in MODELS if model.rstrip("/").endswith(name)), rows[0].model)
        if counterpart not in (known := {row.model for row in rows}):
            raise UnknownNameError(f"model of table {table}", counterpart, known)
        rows = [row for row in rows if row.model == counterpart]
    selected = [
        row
        for row in rows
        if (row.method in methods if methods else row.figures or row.method == "joint")
        and (not settings or row.config in settings)
        and row.recipe
    ]
    if not selected:
        raise RecipeError(
            f"table {table} has no row of {', '.join(methods or ())} in {', '.join(settings or ())}; "
            "leave out --methods or --settings"
        )
    jobs = [
        Job(
            row,
            model or MODELS[row.model],
            scale.recipe(row.recipe, row.changes) if row.recipe else None,
            scale.evaluation(row),
        )
        for row in [*(row for row in rows if not row.recipe), *selected]
    ]
    for text in jobs[0].evaluation["texts"].values():
        check_text(text)
    if tasks := jobs[0].evaluation["tasks"]:
        check_tasks(tasks, scale.task_data)
    return jobs
