"""A recipe as the user gives it, from Python or from a YAML file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hasslefree.errors import Problem, RecipeError
from hasslefree.recipe.fields import Fields, problems_of

if TYPE_CHECKING:
    from hasslefree.recipe.resolved import Resolved


class Recipe(Fields):
    """The settings of a compression: the same recipe, model and machine give the same folder.

    The help text of each field describes it; `hasslefree compress --help` and the documentation's page on recipes list
    them all. None stands for a default that depends on other fields: `resolve` fills it in.

    Raises:
        RecipeError: with every field that is unknown, of another type or out of its limits.

    Example:
        >>> hasslefree.compress("meta-llama/Llama-3.2-1B", "out/", Recipe(pattern="2:4", rank=64))
    """

    if not TYPE_CHECKING:  # type checkers know the fields from the dataclass

        def __init__(self, **values: Any):
            # A scalar of numpy or torch becomes a number of Python.
            plain = {name: x.item() if getattr(x, "ndim", None) == 0 else x for name, x in values.items()}
            try:
                super().__init__(**plain)
            except ValidationError as error:
                raise RecipeError.of(problems_of(error)) from None

    def resolve(self, with_text: bool = True) -> Resolved:
        """The recipe with every default filled in and every part built.

        Args:
            with_text: check the calibration text too.

        Raises:
            RecipeError: with every problem that can be seen without the model.
        """
        from hasslefree.recipe.resolved import resolve

        return resolve(self, with_text)

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Recipe:
        """Read a recipe and the recipes that it names as its `base`; `changes` replace their fields.

        Raises:
            RecipeError: with every problem and the file of its fields.
        """
        from hasslefree.recipe.resolved import problems
        from hasslefree.recipe.yaml import read_fields

        values, places = read_fields(Path(path))
        values |= changes
        places |= dict.fromkeys(changes, f"given in addition to {path}")
        wrong: list[Problem] = []
        try:
            recipe = cls(**values)
        except RecipeError as error:
            wrong += error.problems
            recipe = cls(**{name: value for name, value in values.items() if name not in error.fields})
        # A field that is wrong by itself is not reported again as missing.
        single = {name for problem in wrong for name in problem.fields}
        wrong += [problem for problem in problems(recipe) if single.isdisjoint(problem.fields)]
        if not wrong:
            return recipe
        files = [", ".join(dict.fromkeys(str(places[n]) for n in problem.fields if n in places)) for problem in wrong]
        raise RecipeError.of(replace(p, where=file or str(path)) for p, file in zip(wrong, files, strict=True))
