"""The paper's tables (arXiv 2502.00899) as data, and the recipe of each row."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasslefree.recipe.resolved import EFFORTS

HERE = Path(__file__).parent
RECIPES = HERE / "recipes"

TEXTS = ("c4", "wikitext2", "ptb")
TASKS = ("piqa", "hellaswag", "arc_easy", "arc_challenge", "winogrande", "rte", "openbookqa", "boolq")

# The models as the paper calls them, and where they are.
MODELS = {
    "Llama-3-8B": "meta-llama/Meta-Llama-3-8B",
    "Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B",
}

# Methods have no levers in the paper: single layers are decomposed, and nothing else is done.
LAYERS_ALONE: dict[str, Any] = dataclasses.asdict(EFFORTS["fast"])

# The rows that we add to every setting with a low-rank part, by method: changes to the recipe of `joint`.
# 3BASiL was published after the paper. The last two add the levers of an effort to `joint`.
ADDED: dict[str, dict[str, Any]] = {
    "joint": LAYERS_ALONE,
    "3basil": LAYERS_ALONE | {"method": "3basil"},
    "joint-balanced": {"effort": "balanced"},
    "joint-best": {"effort": "best"},
}


@dataclass(frozen=True)
class PaperRow:
    """One row of a table, or one that we add to it.

    Args:
        config: such as 2:4 + rank 64; empty for a dense model. recipe: the name of a file; None for a dense model.
        figures: perplexities by text, accuracies in per cent by task and `average`; empty for an added row.
        changes: fields in the place of those of the recipe.
    """

    table: int
    model: str
    config: str
    method: str
    recipe: str | None
    figures: dict[str, float]
    changes: dict[str, Any] = field(default_factory=lambda: LAYERS_ALONE)


def paper_rows(table: int) -> list[PaperRow]:
    """The rows of a table, in its order, and after those of each setting with a low-rank part the added ones."""
    with (HERE / "tables.csv").open(encoding="utf-8", newline="") as file:
        printed = [_row(line) for line in csv.DictReader(file) if line["table"] == str(table)]
    rows = []
    for row in printed:
        rows.append(row)
        if row.method == "hassle-free" and row.recipe:
            ours = row.recipe.replace("hassle-free-", "joint-")
            rows += [PaperRow(table, row.model, row.config, name, ours, {}, changes) for name, changes in ADDED.items()]
    return rows


def _row(line: dict[str, str]) -> PaperRow:
    figures = {name: float(line[name]) for name in (*TEXTS, *TASKS, "average") if line[name]}
    recipe = line["recipe"] or None
    return PaperRow(int(line["table"]), line["model"], line["config"], line["method"], recipe, figures)
