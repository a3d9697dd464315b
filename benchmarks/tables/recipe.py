"""The fields of a recipe as a table, from their declarations in the package."""

from __future__ import annotations

import dataclasses

from hasslefree.recipe.recipe import Recipe, declaration, field_types
from hasslefree.recipe.yaml import type_words


def fields() -> str:
    """A line for each field, in the order of their groups."""
    hints = field_types()
    lines = ["| field | type | default | |", "| --- | --- | --- | --- |"]
    groups: dict[str, list[str]] = {}
    for field in dataclasses.fields(Recipe):
        said = declaration(field)
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        row = f"| `{field.name}` | {type_words(hints[field.name])} | {default} | {said.help} |"
        groups.setdefault(said.group, []).append(row)
    for group, rows in groups.items():
        lines += [f"| **{group}** | | | |", *rows]
    return "\n".join(lines)


TABLES = {"recipe": fields}
