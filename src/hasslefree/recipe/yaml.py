"""Recipes as YAML, one file on top of another (`base: other.yaml`); every value knows its file and line."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hasslefree.errors import RecipeError
from hasslefree.recipe.recipe import Recipe, field_types
from hasslefree.recipe.resolved import problems
from hasslefree.validation import InvalidError, validated

BASE = "base"


@dataclass(frozen=True)
class Given:
    """A value and where it was given, such as recipes/joint.yaml:3."""

    value: Any
    where: str


@dataclass(frozen=True)
class Fields:
    """The fields of a file and its bases, the nearest file first; and every problem in them, with its file and line."""

    given: dict[str, Given]
    problems: list[str]


def read_fields(path: Path, above: tuple[Path, ...] = ()) -> Fields:
    """The fields of a YAML file over those of its base, which it names by a path relative to itself.

    Args:
        above: the files that led here, for cycles.
    """
    try:
        pairs, problems = _pairs(path)
    except (OSError, UnicodeDecodeError) as error:
        return Fields({}, [f"the recipe {path} cannot be read: {error}"])
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        return Fields({}, [f"{path}{line}: the recipe is not YAML: {error.problem}"])
    except yaml.YAMLError as error:
        return Fields({}, [f"the recipe {path} is not YAML: {error}"])
    own: dict[str, Given] = {}
    for name, given in pairs:
        if name in own:
            problems.append(f"{given.where}: {name} is given twice, first at {own[name].where}")
        else:
            own[name] = given
    if BASE not in own:
        return Fields(own, problems)
    base = _base(own.pop(BASE), path, (*above, path))
    return Fields(base.given | own, base.problems + problems)


def _base(given: Given, path: Path, above: tuple[Path, ...]) -> Fields:
    """The fields of the base that `path` names. above: the files that led here, `path` the last."""
    if not isinstance(given.value, str):
        return Fields({}, [f"{given.where}: base must be the path of a recipe, got {given.value!r}"])
    target = path.parent / given.value
    if target.resolve() in [file.resolve() for file in above]:
        circle = " → ".join(map(str, (*above, target)))
        return Fields({}, [f"{given.where}: these recipes are each other's base: {circle}"])
    if not target.is_file():
        return Fields({}, [f"{given.where}: the base {target} does not exist; the path is relative to {path.name}"])
    return read_fields(target, above)


def _pairs(path: Path) -> tuple[list[tuple[str, Given]], list[str]]:
    """The names and values of one file in their order, a repeated name repeatedly; and the problems of single values.

    Raises:
        OSError, UnicodeDecodeError, yaml.YAMLError: no file, no text, no YAML.
    """
    loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            return [], [f"the recipe {path} must contain fields, such as 'pattern: \"2:4\"'"]
        pairs, problems = [], []
        for key, node in root.value:
            where = f"{path}:{key.start_mark.line + 1}"
            try:
                pairs.append((str(key.value), Given(loader.construct_object(node, deep=True), where)))
            except (yaml.YAMLError, ValueError, TypeError) as error:
                problems.append(
                    f"{where}: the value of {key.value} is not a plain YAML value: {getattr(error, 'problem', error)}"
                )
        return pairs, problems
    finally:
        loader.dispose()


def read_recipe(path: Path, changes: Mapping[str, Any]) -> Recipe:
    """The recipe of a file over its bases, and `changes` over their fields.

    Raises:
        RecipeError: with every problem of every field, its file and its line.
    """
    fields = read_fields(path)
    given = fields.given | {name: Given(value, f"given in addition to {path}") for name, value in changes.items()}
    values, wrong = typed({name: each.value for name, each in given.items()})
    found = fields.problems + [f"{given[name].where}: {message}" for name, message in wrong.items()]
    if fields.given or not fields.problems:
        for problem in problems(Recipe(**values)):
            # A field with a wrong type is not reported again as missing.
            if not wrong.keys() & set(problem.fields):
                places = ", ".join(given[name].where for name in problem.fields if name in given)
                found.append(f"{places or path}: {problem.message}")
    if found:
        raise RecipeError("\n".join(found))
    return Recipe(**values)


def from_values(content: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values. Raises a RecipeError with every unknown name and wrong type."""
    values, wrong = typed(content)
    if wrong:
        raise RecipeError("\n".join(wrong.values()))
    return Recipe(**values)


def typed(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of known fields with the right type; and for each other field what is wrong with it."""
    hints = field_types()
    values: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for key, value in content.items():
        if key not in hints:
            close = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            wrong[key] = f"unknown field {key!r}; {hint}known: {', '.join(hints)}"
            continue
        if key == "leave_dense" and isinstance(value, list):
            value = tuple(str(glob) for glob in value)
        try:
            validated(hints[key], value)
            values[key] = value
        except (InvalidError, TypeError):  # of no JSON type, such as a date
            wrong[key] = f"{key} must be {type_words(hints[key])}, got {value!r}{yaml_hint(key, value)}"
    return values, wrong


def type_words(hint: Any) -> str:
    """The types of a field in words, such as "int or nothing"."""
    if typing.get_origin(hint) is tuple:
        return "list"
    members = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
    names = ["nothing" if member is types.NoneType else member.__name__ for member in members]
    return " or ".join(names)


def yaml_hint(key: str, value: Any) -> str:
    """YAML 1.1 reads 2:4 as a number in base 60."""
    return '; put it in quotes, such as "2:4"' if key == "pattern" and isinstance(value, int) else ""
