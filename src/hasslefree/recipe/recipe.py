"""A recipe as the user gives it, from Python or from YAML files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hasslefree.errors import Problem, RecipeError, UnknownNameError
from hasslefree.recipe.fields import NAMES, Fields
from hasslefree.validation import describe, plain

if TYPE_CHECKING:
    from hasslefree.recipe.resolve import Resolved


class Recipe(Fields):
    """The settings of a compression: the same recipe, model and machine give the same folder.

    The help text of each field describes it; `hasslefree compress --help` and the documentation's
    page on recipes list them all. None stands for a default that depends on other fields: `resolve`
    fills it in.

    Raises:
        RecipeError: with every field that is unknown, of another type or out of its limits.

    Example:
        >>> hasslefree.compress("meta-llama/Llama-3.2-1B", "out/", Recipe(pattern="2:4", rank=64))
    """

    if not TYPE_CHECKING:  # type checkers know the fields from the dataclass

        def __init__(self, /, **values: Any):
            try:
                super().__init__(**{name: plain(value) for name, value in values.items()})
            except ValidationError as error:
                raise RecipeError.of(map(_problem, error.errors(include_url=False))) from None

    def resolve(self, with_text: bool = True) -> Resolved:
        """Fill in every default and build the parts that the recipe names.

        Args:
            with_text: check that the calibration text exists.

        Raises:
            RecipeError: with every problem that can be seen without the model.
        """
        from hasslefree.recipe.resolve import resolve  # imports torch

        return resolve(self, with_text)

    @classmethod
    def from_yaml(cls, path: str | Path, with_text: bool = True, **changes: Any) -> Recipe:
        """Read a recipe and the recipes that it names as its `base`.

        Args:
            path: the file; - for standard input.
            with_text: check that the calibration text exists.
            changes: fields that replace those of the files.

        Raises:
            RecipeError: with every problem, and the files that set its fields.
        """
        from hasslefree.recipe.yaml import read_fields

        values, places = read_fields(Path(path))
        values |= changes
        # null stands for the default of a field.
        values = {
            name: value for name, value in values.items() if value is not None or name not in NAMES
        }
        places |= dict.fromkeys(changes, f"given in addition to {path}")
        problems: list[Problem] = []
        wrong: set[str] = set()
        try:
            recipe = cls(**values)
        except RecipeError as error:
            problems += error.problems
            wrong.update(error.fields)
            recipe = cls(**{name: value for name, value in values.items() if name not in wrong})
        try:
            recipe.resolve(with_text)
        except RecipeError as error:
            # An invalid field is not reported again as missing.
            problems += [found for found in error.problems if wrong.isdisjoint(found.fields)]
        if problems:
            raise RecipeError.of(_located(problem, places, str(path)) for problem in problems)
        return recipe


def _problem(details: ErrorDetails) -> Problem:
    """The problem of a single field, from what pydantic reports."""
    name, cause = describe(details)
    if details["type"] == "unexpected_keyword_argument":
        cause = UnknownNameError("field", name, NAMES).message
    return Problem((name,), cause)


def _located(
    problem: Problem,
    places: Mapping[str, Any],
    path: str,
) -> Problem:
    """The problem with the files that set its fields; with `path` if no file sets one."""
    files = dict.fromkeys(str(places[name]) for name in problem.fields if name in places)
    return dataclasses.replace(problem, where=", ".join(files) or path)
