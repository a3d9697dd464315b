"""What can be named in a recipe: methods, pruners, low-rank solvers, patterns and efforts, and the settings of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hasslefree.core import budgets
from hasslefree.core.about import About
from hasslefree.core.grids import Grid
from hasslefree.errors import UnknownNameError
from hasslefree.recipe.recipe import ABOUT_EFFORTS, Recipe, field_types
from hasslefree.recipe.resolved import filled, method_of
from hasslefree.solve import low_rank, methods, pruners
from hasslefree.tables import table

# Widths of a name, a line and a reference: 80 columns in all.
COLUMNS = (14, 45, 17)
NOTES = (
    "S is the sparse part, L the low-rank part, and H the second moment of a layer's inputs. `docs: NAME` is the page "
    "docs/explanation/NAME.md. `hasslefree methods NAME` lists the settings of a method, pruner or low-rank solver."
)
# The fields of a recipe that set those of a grid.
GRID_FIELDS = {"grid.bits": "bits", "grid.group": "group_size", "grid.symmetric": "symmetric"}


def tables() -> dict[str, dict[str, About]]:
    """What `--method`, `--pruner`, `--low-rank`, `--pattern` and `--effort` take, by heading."""
    return {
        "methods": methods.ABOUT,
        "pruners": pruners.ABOUT,
        "low-rank solvers": low_rank.ABOUT,
        "patterns": budgets.ABOUT,
        "efforts": ABOUT_EFFORTS,
    }


def to_dict() -> dict[str, Any]:
    """All tables as JSON has them."""
    return {
        heading: {name: dataclasses.asdict(about) for name, about in entries.items()}
        for heading, entries in tables().items()
    }


def listing() -> Group:
    """All tables as text: a line for each entry. A pruner, which is a method too, is listed once."""
    found = {heading: dict(entries) for heading, entries in tables().items()}
    found["methods"] = {name: about for name, about in found["methods"].items() if name not in pruners.ABOUT}
    taken_by = ("--method", "--method or --pruner", "--low-rank", "--pattern", "--effort")
    parts: list[RenderableType] = []
    for (heading, entries), option in zip(found.items(), taken_by, strict=True):
        grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        for width in COLUMNS:
            grid.add_column(min_width=width, overflow="fold")
        for name, about in entries.items():
            grid.add_row(name, about.line, about.reference)
        parts += [Text(f"{heading} ({option})", style="bold"), grid, Text()]
    return Group(*parts, Text(NOTES))


def plug_in(name: str) -> tuple[Any, About]:
    """The method, pruner or low-rank solver of this name, as the command line uses it without other options.

    Raises:
        UnknownNameError: there is none.
    """
    if name in pruners.PRUNERS:
        return pruners.PRUNERS[name], pruners.ABOUT[name]
    if name in methods.METHODS:
        return method_of(filled(Recipe(method=name))), methods.ABOUT[name]
    if name in low_rank.LOW_RANK_SOLVERS:
        return low_rank.LOW_RANK_SOLVERS[name], low_rank.ABOUT[name]
    known = [*methods.METHODS, *low_rank.LOW_RANK_SOLVERS]
    raise UnknownNameError("method, pruner or low-rank solver", name, known)


def settings(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting of a plug-in and its default; those of its parts follow them, as pruner.block."""
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield name, name_of(value)
            yield from settings(value, f"{name}.")
        else:
            yield name, value


def name_of(part: Any) -> str:
    """The name of a part in its table, or that of its class; a grid in words."""
    if isinstance(part, Grid):
        return str(part)
    known = {**pruners.PRUNERS, **low_rank.LOW_RANK_SOLVERS}
    return next((name for name, entry in known.items() if entry == part), type(part).__name__)


def flag_of(setting: str) -> str | None:
    """The option of the command line for a setting; None for one that only Python can change."""
    field = next((name for end, name in GRID_FIELDS.items() if setting.endswith(end)), setting)
    return f"--{field.replace('_', '-')}" if field in field_types() else None


def settings_dict(name: str) -> dict[str, Any]:
    """A plug-in and its settings as JSON has them."""
    part, about = plug_in(name)
    found = {setting: {"default": value, "option": flag_of(setting)} for setting, value in settings(part)}
    return {"name": name, **dataclasses.asdict(about), "settings": found}


def settings_listing(name: str) -> Group:
    """A plug-in, its settings, and where they are explained."""
    part, about = plug_in(name)
    title, kind = f"{name}: {about.line} ({about.reference})", type(part)
    if not dataclasses.fields(part):
        return Group(Text(title), Text("It has no settings."))
    found = table(("setting", "default", "option"), title=title)
    for setting, value in settings(part):
        found.add_row(setting, str(value), flag_of(setting) or "Python only")
    return Group(found, Text(f"`python -m pydoc {kind.__module__}.{kind.__qualname__}` explains them."))
