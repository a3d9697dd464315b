"""The options that make a recipe, for every command that takes one."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from hasslefree.recipe.fields import BUDGET, GROUPS, NAMES, Fields, help_of
from hasslefree.recipe.recipe import Recipe


def options() -> Iterator[Parameter]:
    """An option for each field, group by group, which is None if it is not given."""
    types = typing.get_type_hints(Fields)
    for field in sorted(dataclasses.fields(Fields), key=lambda field: GROUPS.index(field.metadata["group"])):
        text, group = help_of(field.name), field.metadata["group"]
        if field.default not in (None, ()):
            default = "off" if field.default is False else field.default
            text = f"{text.rstrip('.')} (default: {default})."
        option = typer.Option(*field.metadata.get("flags", ()), help=text, rich_help_panel=group)
        annotation: Any = Annotated[flag_type(types[field.name]) | None, option]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def flag_type(hint: Any) -> Any:
    """The type of a value on the command line: int for int | None, list[str] for tuple[str, …], str for a Literal."""
    if typing.get_origin(hint) is tuple:
        return list[str]
    return next((kind for kind in (bool, int, float) if kind in (hint, *typing.get_args(hint))), str)


def with_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a recipe, and `--recipe`; the command gets the resulting recipe as `recipe`."""

    @functools.wraps(command)
    def wrapped(recipe: Path | None, **values: Any) -> None:
        given = {name: value for name in NAMES if (value := values.pop(name)) not in (None, [])}
        command(recipe=Recipe.from_yaml(recipe, **given) if recipe else Recipe(**given), **values)

    text = "YAML file with any of the following options; those on the command line win over it (default: none)."
    file = Annotated[Path | None, typer.Option(help=text, metavar="FILE", rich_help_panel=BUDGET)]
    parameters = [Parameter("recipe", Parameter.KEYWORD_ONLY, default=None, annotation=file), *options()]
    for name, parameter in signature(command, eval_str=True).parameters.items():
        if name != "recipe":
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
    wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped
