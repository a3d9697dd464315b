"""The names for a recipe (methods, pruners, low-rank solvers, patterns and efforts) and their
settings.
"""

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from hasslefree.core import budgets
from hasslefree.core.grids import Grid
from hasslefree.core.protocols import About
from hasslefree.errors import UnknownNameError
from hasslefree.recipe.fields import NAMES
from hasslefree.recipe.recipe import Recipe
from hasslefree.recipe.resolve import build_solver, with_defaults
from hasslefree.solve import low_rank, methods, pruners
from hasslefree.units import table

NOTES = (
    "S is the sparse part, L the low-rank part, and H the second moment of a layer's inputs. `docs:"
    " NAME` is the page docs/explanation/NAME.md. `hasslefree methods NAME` lists the settings of a"
    " method, pruner or low-rank solver."
)
ABOUT_EFFORTS = {
    "fast": About("fits the layers, and trains nothing", "docs: allocation-and-training"),
    "balanced": About("also fine-tunes them for some minutes", "docs: allocation-and-training"),
    "best": About("fine-tunes longer, on more text", "docs: allocation-and-training"),
}
# The names that each option takes.
TABLES: dict[str, dict[str, About]] = {
    "methods": methods.ABOUT,
    "pruners": pruners.ABOUT,
    "low-rank solvers": low_rank.ABOUT,
    "patterns": budgets.ABOUT,
    "efforts": ABOUT_EFFORTS,
}
OPTIONS = ("--method", "--method or --pruner", "--low-rank", "--pattern", "--effort")


def overview() -> tuple[dict[str, Any], Group]:
    """All tables as JSON, and as text with a line for each entry. Pruners, which are methods too,
    are listed once in the text.
    """
    parts: list[RenderableType] = []
    content: dict[str, Any] = {}
    for (heading, entries), option in zip(TABLES.items(), OPTIONS, strict=True):
        rows = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=True)
        rows.add_column(width=14)
        for width in (45, 17):  # of the line and the reference; 80 columns with the name
            rows.add_column(ratio=width, overflow="fold")
        for name, about in entries.items():
            if heading != "methods" or name not in pruners.ABOUT:
                rows.add_row(name, about.line, about.reference)
        parts += [Text(f"{heading} ({option})", style="bold"), Constrain(rows, 80), Text()]
        content[heading] = {name: asdict(about) for name, about in entries.items()}
    return content, Group(*parts, Text(NOTES))


def plug_in(name: str) -> tuple[Any, About]:
    """The method, pruner or low-rank solver of this name, with the defaults of the command line."""
    if name in pruners.PRUNERS:
        return pruners.PRUNERS[name], pruners.ABOUT[name]
    if name in methods.METHODS:
        return build_solver(with_defaults(Recipe(method=name))), methods.ABOUT[name]
    if name in low_rank.LOW_RANK_SOLVERS:
        return low_rank.LOW_RANK_SOLVERS[name], low_rank.ABOUT[name]
    raise UnknownNameError(
        "method, pruner or low-rank solver",
        name,
        [*methods.METHODS, *low_rank.LOW_RANK_SOLVERS],
        listed=methods.LISTED,
    )


def settings(part: Any, prefix: str = "") -> Iterator[tuple[str, Any, str | None]]:
    """Each setting of a plug-in, its default and its option. Settings of a part follow it, such as
    pruner.block.
    """
    names: dict[Any, str] = {
        value: name for name, value in (pruners.PRUNERS | low_rank.LOW_RANK_SOLVERS).items()
    }
    for field in fields(part):
        value = getattr(part, field.name)
        setting = prefix + field.name
        option = setting.rpartition("grid.")[2]
        if setting.endswith("grid.group"):
            option = "group_size"
        flag = f"--{option.replace('_', '-')}" if option in NAMES else None
        shown = value
        if isinstance(value, Grid):
            shown = str(value)
        elif is_dataclass(value):
            shown = names.get(value, type(value).__name__)
        yield setting, shown, flag
        if is_dataclass(value):
            yield from settings(value, f"{setting}.")


def describe_plug_in(name: str) -> tuple[dict[str, Any], Group]:
    """A plug-in and its settings as JSON, and as text."""
    part, about = plug_in(name)
    content = {"name": name, **asdict(about), "settings": {}}
    kind = type(part)
    title = f"{name}: {about.line} ({about.reference})"
    rows = table(("setting", "default", "option"), title=title)
    for setting, value, flag in settings(part):
        rows.add_row(setting, str(value), flag or "Python only")
        content["settings"][setting] = {"default": value, "option": flag}
    if not content["settings"]:
        return content, Group(Text(title), Text(f"{name} has no settings."))
    return content, Group(
        rows, Text(f"`python -m pydoc {kind.__module__}.{kind.__qualname__}` explains them.")
    )
