"""The options that make a recipe, for every command that takes one."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from hasslefree.recipe.recipe import BUDGET, GROUPS, Recipe, declaration, field_types


def options() -> Iterator[Parameter]:
    """An option for each field, group by group, which is None where it is not given."""
    hints = field_types()
    for field in sorted(dataclasses.fields(Recipe), key=lambda field: GROUPS.index(declaration(field).group)):
        said = declaration(field)
        text = said.help
        if field.default is not None and "default" not in text:
            default = "off" if field.default is False else field.default
            text = f"{text.rstrip('.')} (default: {default})."
        option = typer.Option(*said.flags, help=text, rich_help_panel=said.group)
        annotation: Any = Annotated[flag_type(hints[field.name]) | None, option]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def flag_type(hint: Any) -> Any:
    """The type of one value on the command line: int for int | None, list[str] for tuple[str, …]."""
    if typing.get_origin(hint) is tuple:
        return list[str]
    if typing.get_origin(hint) is types.UnionType:
        return next(member for member in typing.get_args(hint) if member is not types.NoneType)
    return hint


def with_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a recipe, and `--recipe`; it gets the recipe that they make as `recipe`."""
    own = signature(command, eval_str=True).parameters
    names = [field.name for field in dataclasses.fields(Recipe)]

    @functools.wraps(command)
    def wrapped(recipe: Path | None, **values: Any) -> None:
        given = {name: values.pop(name) for name in names}
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v not in (None, [])}
        command(recipe=Recipe.from_yaml(recipe, **given) if recipe else Recipe(**given), **values)

    text = "YAML file with any of the following options; those on the command line win over it (default: none)."
    file, named = typer.Option(help=text, metavar="FILE", rich_help_panel=BUDGET), Parameter.KEYWORD_ONLY
    parameters = [Parameter("recipe", named, default=None, annotation=Annotated[Path | None, file]), *options()]
    parameters += [parameter.replace(kind=named) for name, parameter in own.items() if name != "recipe"]
    wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped
