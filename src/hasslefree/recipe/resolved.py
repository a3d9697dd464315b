"""A resolved recipe: every default filled in, every part built. Everything below the command line works with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hasslefree.core.budgets import Budget
from hasslefree.core.factors import check_factor_bits
from hasslefree.core.protocols import Method
from hasslefree.data import check_text
from hasslefree.errors import HasslefreeError, Problem, RecipeError
from hasslefree.recipe.recipe import Recipe, declaration
from hasslefree.solve.methods import METHODS, build_method
from hasslefree.solve.methods.prune import Prune
from hasslefree.solve.pruners import PRUNERS

# The settings of each effort, for fields that the recipe leaves open. The rounds are those of `joint`.
EFFORTS: dict[str, dict[str, Any]] = {
    "fast": {"allocate": "uniform", "match_blocks": False, "match_predictions": 0},
    "balanced": {"allocate": "uniform", "match_blocks": False, "match_predictions": 49_152},
    "best": {"allocate": "error", "match_blocks": True, "match_epochs": 1, "match_predictions": 163_840},
}
# The settings that all efforts share.
EVERY = {"rounds": 20, "dense_target": 0.0, "match_epochs": 4}
LEVERS = ("allocate", "dense_target", "match_blocks", "match_epochs", "match_predictions")


@dataclass(frozen=True)
class Resolved:
    """A recipe in which nothing is left open.

    Args:
        recipe: the recipe with every default filled in; fields of a fixed default are read from here.
        budget: of every layer. method: with its hyper-parameters.
        allocate, dense_target, match_blocks, match_epochs, match_predictions: the levers, as the recipe or its effort
            decides.
    """

    recipe: Recipe
    budget: Budget
    method: Method
    allocate: str
    dense_target: float
    match_blocks: bool
    match_epochs: int
    match_predictions: int

    @property
    def two_streams(self) -> bool:
        """Whether hidden states also run through the dense blocks, beside those through the compressed ones."""
        return self.match_blocks or self.dense_target > 0

    def to_dict(self) -> dict[str, Any]:
        """The fields of the recipe, as JSON has them."""
        return dataclasses.asdict(self.recipe) | {"leave_dense": list(self.recipe.leave_dense)}


def resolve(recipe: Recipe, with_text: bool = True) -> Resolved:
    """The recipe with every default filled in and every part built.

    Args:
        with_text: check the calibration text too.

    Raises:
        RecipeError: with every problem that can be seen without the model.
    """
    if found := list(problems(recipe, with_text)):
        raise RecipeError("\n".join(problem.message for problem in found))
    whole = filled(recipe)
    levers = {name: getattr(whole, name) for name in LEVERS}
    return Resolved(whole, budget_of(whole), method_of(whole), **levers)


def filled(recipe: Recipe) -> Recipe:
    """The same recipe with every field filled in that depends on others: the pattern, and the settings of the effort.

    Without an effort, `joint` is balanced, and other methods run as published.
    """
    grid = has_grid(recipe)
    recipe = dataclasses.replace(recipe, pattern=recipe.pattern or ("dense" if grid else "2:4"))
    effort = recipe.effort or ("balanced" if recipe.method == "joint" else None)
    decided = EVERY | EFFORTS[effort or "fast"]
    if recipe.method != "joint":
        del decided["rounds"]
    if not movable(recipe):
        decided["allocate"] = "uniform"
    if grid or recipe.factor_bits:
        decided |= {"match_blocks": False, "match_predictions": 0}
    given = {name: getattr(recipe, name) for name in decided if getattr(recipe, name) is not None}
    return dataclasses.replace(recipe, effort=effort, **(decided | given))


def has_grid(recipe: Recipe) -> bool:
    """Whether the method or the pruner quantises S; False for an unknown name."""
    part = METHODS.get(recipe.method) if recipe.pruner is None else PRUNERS.get(recipe.pruner)
    return part is not None and part.grid is not None


def movable(recipe: Recipe) -> bool:
    """Whether rank or non-zeros can move between layers. The recipe has its pattern."""
    ranked = bool(recipe.rank) or recipe.ratio is not None
    return recipe.pattern != "dense" and (ranked or recipe.pattern == "unstructured")


def budget_of(recipe: Recipe) -> Budget:
    """The budget of every layer. The recipe has its pattern."""
    return Budget(recipe.pattern or "2:4", recipe.rank, recipe.sparsity, recipe.ratio, recipe.rank_share)


def method_of(recipe: Recipe) -> Method:
    grid = {name: getattr(recipe, name) for name in ("bits", "group_size", "symmetric")}
    return build_method(
        recipe.method, recipe.pruner, recipe.low_rank, recipe.rounds, recipe.damping, recipe.refit, **grid
    )


def problems(recipe: Recipe, with_text: bool = True) -> Iterator[Problem]:
    """Everything that is wrong with a recipe, as far as that can be seen without the model."""
    recipe = dataclasses.replace(recipe, pattern=recipe.pattern or ("dense" if has_grid(recipe) else "2:4"))
    yield from budget_of(recipe).problems()
    yield from method_problems(recipe)
    yield from grid_problems(recipe)
    if recipe.factor_bits is not None:
        yield from factor_problems(recipe)
    for field in dataclasses.fields(recipe):
        check, value = declaration(field).check, getattr(recipe, field.name)
        if check is not None and value is not None and (wrong := check(value)):
            yield Problem((field.name,), f"{field.name} {wrong}")
    if recipe.rotate and recipe.pattern == "dense":
        message = (
            "rotate makes a pattern remove less, and pattern dense removes nothing: leave out rotate, or give another "
            "pattern"
        )
        yield Problem(("rotate", "pattern"), message)
    if recipe.allocate == "error" and not movable(recipe):
        message = f"allocate error moves rank between layers, and here there is none to move (pattern {recipe.pattern})"
        message += ": leave out allocate" if recipe.pattern == "dense" else ": give a rank, or leave out allocate"
        yield Problem(("allocate", "pattern", "rank"), message)
    elif recipe.allocate == "owl" and recipe.ratio is None and recipe.sparsity is None:
        message = "allocate owl distributes a ratio or a sparsity over the blocks: give ratio or sparsity"
        yield Problem(("allocate", "ratio", "sparsity"), message)
    if with_text:
        try:
            check_text(recipe.calibration)
        except HasslefreeError as error:
            yield Problem(("calibration",), error.message)


def method_problems(recipe: Recipe) -> Iterator[Problem]:
    try:
        method = method_of(recipe)
        method.check(recipe.rank or 0)
    except HasslefreeError as error:
        yield Problem(error.fields or ("method",), error.message)
        return
    if not isinstance(method, Prune) and recipe.rank is None and recipe.ratio is None:
        message = f"method {recipe.method} needs a rank or a ratio (rank 0 for S alone)"
        yield Problem(("method", "rank", "ratio"), message)


def grid_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.pattern == "dense" and not has_grid(recipe):
        quantised = ", ".join(name for name, method in METHODS.items() if method.grid)
        yield Problem(
            ("pattern", "method"),
            f"pattern dense keeps every entry of S, and method {recipe.method} does not quantise them, so nothing "
            f"would be compressed: use a method that quantises S ({quantised}), or another pattern",
        )
    for name in ("match_blocks", "match_predictions"):
        if has_grid(recipe) and getattr(recipe, name):
            yield Problem((name,), f"{name} trains the values of S, which must stay quantised: leave out {name}")


def factor_problems(recipe: Recipe) -> Iterator[Problem]:
    try:
        check_factor_bits(recipe.factor_bits, 0 if recipe.rank_share == 0 else recipe.rank)
    except HasslefreeError as error:
        yield Problem(("factor_bits",), error.message)
    if isinstance(METHODS.get(recipe.method), Prune):
        message = f"factor_bits quantises the factors of L, and method {recipe.method} has no L: leave out factor_bits"
        yield Problem(("factor_bits",), message)
    for name in ("match_blocks", "match_predictions"):
        if getattr(recipe, name):
            message = f"{name} trains the factors of L, which factor_bits quantises: leave out {name} or factor_bits"
            yield Problem((name, "factor_bits"), message)
