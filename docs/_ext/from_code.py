"""Reference pages from the code: the commands from the typer application, the fields of a recipe from its dataclass.

A page holds a line such as `<!-- from code: commands -->`, and the build reads Markdown in its place. In docstrings,
where one line may describe several arguments, each gets a line of its own.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from hasslefree.recipe.fields import Fields, help_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MARK = re.compile(r"^<!-- from code: (\w+) -->$", re.MULTILINE)
TYPER = [sys.executable, "-m", "typer", "hasslefree.cli", "utils", "docs", "--name", "hasslefree"]


def commands() -> str:
    """A section for each command, as typer itself documents an application."""
    made = html.unescape(subprocess.run(TYPER, check=True, capture_output=True, text=True).stdout)
    body = made.partition("\n**Usage**")[2].partition("\n## ")
    sections = re.sub(r"^\* `--help`: .*\n", "", f"## {body[2]}", flags=re.MULTILINE)
    named = re.sub(r"\{(\w+)\}", r"\1", sections)  # arguments as messages and pages write them: MODEL, not {MODEL}
    # A star in the help of an option, as in '*.0.*', is no emphasis.
    return re.sub(r"(?<=^\* `).*", lambda line: line[0].replace("*", r"\*"), named, flags=re.MULTILINE)


def recipe() -> str:
    """A table for each group of fields."""
    types = typing.get_type_hints(Fields)
    groups: dict[str, list[str]] = {}
    for field in dataclasses.fields(Fields):
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        row = f"| `{field.name}` | {type_words(types[field.name])} | {default} | {help_of(field.name)} |"
        groups.setdefault(field.metadata["group"], []).append(row)
    head = "| field | type | default | |\n| --- | --- | --- | --- |"
    return "\n\n".join("\n".join([f"## {group}\n", head, *rows]) for group, rows in groups.items())


def type_words(hint: Any) -> str:
    """The type of a field in words, such as "int or nothing"."""
    if typing.get_origin(hint) is tuple:
        return "list"
    if typing.get_origin(hint) is Literal:
        return " or ".join(typing.get_args(hint))
    if members := typing.get_args(hint):
        return " or ".join("nothing" if member is type(None) else type_words(member) for member in members)
    return hint.__name__


MADE: dict[str, Callable[[], str]] = {"commands": commands, "recipe": recipe}


def fill(app: Sphinx, _page: str, source: list[str]) -> None:
    """Put what the code says in the place of the marks of a page."""
    if MARK.search(source[0]):
        source[0] = MARK.sub(lambda mark: MADE[mark[1]](), source[0])
        app.env.note_reread()  # the code may change where the page does not


def split_arguments(_app: Sphinx, _what: str, _name: str, found: Any, _options: Any, lines: list[str]) -> None:
    """Begin a line at each argument that follows another one: `out: the folder. recipe: a `Recipe`.`"""
    try:
        names = "|".join(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # an attribute, a module
        return
    if names:
        one = rf"(?:{names})"
        after = re.compile(rf"^( +)(.*?[.;]) (?={one}(?:, {one})*: )")
        at = 0
        while at < len(lines):
            if match := after.match(lines[at]):
                lines[at : at + 1] = [match[1] + match[2], match[1] + lines[at][match.end() :]]
            at += 1


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("autodoc-process-docstring", split_arguments, priority=400)  # before napoleon, which is at 500
    return {"parallel_read_safe": True}
