"""What a recipe means: how its fields combine, with every default filled in."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hasslefree.core.budgets import Budget
from hasslefree.core.factors import check_factor_bits
from hasslefree.core.grids import BITS, Grid
from hasslefree.core.protocols import Method
from hasslefree.errors import HasslefreeError, Problem, RecipeError, option
from hasslefree.recipe.engines import ENGINES, grid_for, refusal
from hasslefree.recipe.recipe import Allocate, Fields
from hasslefree.solve.methods import METHODS, build_method
from hasslefree.solve.methods.prune import Prune
from hasslefree.solve.pruners import PRUNERS
from hasslefree.texts import check_text
from hasslefree.units import Size


@dataclass(frozen=True)
class Levers:
    """What is done beyond single layers; see the fields of the same names in `Fields`."""

    allocate: Allocate = "uniform"
    match_predictions: int = 0


# The levers of each effort, and the rounds of `joint`, if the recipe leaves them open. MOVING is
# `balanced` for a sparse S whose layers can trade rank or non-zeros: that is worth more than the
# tokens of training that take as long.
EFFORTS = {
    "fast": Levers(),
    "balanced": Levers(match_predictions=49_152),
    "best": Levers(allocate="error", match_predictions=204_800),
}
MOVING = Levers(allocate="error", match_predictions=18_432)
ROUNDS = {"fast": 20, "balanced": 50, "best": 100}
# Those of `joint-grid`, in all efforts.
GRID_ROUNDS = 20
# The methods of this project, which are trained by default; the others are as published.
OURS = ("joint", "joint-grid")
QUANTISING = ", ".join(name for name, method in METHODS.items() if method.grid)
# The size of a result if the recipe does not say, the fields that say what to compress to, or how,
# and those of a grid.
DEFAULT_SIZE = "5.2bits"
SIZING = (
    "size",
    "pattern",
    "rank",
    "sparsity",
    "ratio",
    "rank_share",
    "method",
    "pruner",
    "low_rank",
)
GRIDS = ("size", "engine", "bits", "group_size", "symmetric", "offset")


@dataclass(frozen=True, kw_only=True)
class Resolved(Levers):
    """A recipe in which nothing is left open, and the parts that it names.

    Args:
        recipe: with every default filled in. budget: of every layer. method: with its
            hyper-parameters.
    """

    recipe: Fields
    budget: Budget
    method: Method

    @property
    def size(self) -> Size | None:
        """What the recipe's size says; None where a budget says what every layer gets."""
        return None if self.recipe.size is None else Size.parse(self.recipe.size)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids that a layer may get, from the fewest bits on: one if the recipe has bits, none
        without a grid.
        """
        grid, engine = self.method.grid, self.recipe.engine
        widths = BITS if self.recipe.bits is None else (self.recipe.bits,)
        grids = [dataclasses.replace(grid, bits=bits) for bits in widths] if grid else []
        return tuple(grid for grid in grids if engine is None or ENGINES[engine].holds(grid))

    @property
    def fixed_rank(self) -> int | None:
        """The rank of every layer within a size: the recipe's, or 0 without an L. None where it is
        to be chosen.
        """
        return 0 if isinstance(self.method, Prune) else self.recipe.rank

    def to_dict(self) -> dict[str, Any]:
        """The fields of the recipe, as JSON has them."""
        return dataclasses.asdict(self.recipe) | {"leave_dense": list(self.recipe.leave_dense)}


def resolve(recipe: Fields, with_text: bool = True) -> Resolved:
    """See `Recipe.resolve`."""
    if wrong := list(problems(recipe, with_text)):
        raise RecipeError.of(wrong)
    recipe = filled(recipe)
    levers = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(Levers)}
    return Resolved(recipe=recipe, budget=budget_of(recipe), method=method_of(recipe), **levers)


def filled(recipe: Fields) -> Fields:
    """The recipe with its size or pattern and its effort's settings; without an effort, `joint` is
    balanced.
    """
    if all(getattr(recipe, name) is None for name in SIZING):
        recipe = dataclasses.replace(recipe, size=DEFAULT_SIZE)
    if recipe.method is None:
        on_grid = recipe.pattern in (None, "dense") and any(
            getattr(recipe, name) is not None for name in GRIDS
        )
        recipe = dataclasses.replace(recipe, method="joint-grid" if on_grid else "joint")
    quantised = has_grid(recipe)
    recipe = dataclasses.replace(
        recipe, pattern=recipe.pattern or ("dense" if quantised else "2:4")
    )
    effort = recipe.effort or (
        "best" if recipe.minutes else "balanced" if recipe.method in OURS else None
    )
    moving = effort == "balanced" and not quantised and movable(recipe)
    defaults = dataclasses.asdict(MOVING if moving else EFFORTS[effort or "fast"])
    if recipe.method in OURS:
        defaults["rounds"] = GRID_ROUNDS if quantised else ROUNDS[effort or "fast"]
    if recipe.method == "joint-grid" and recipe.pattern == "dense" and not recipe.symmetric:
        defaults["offset"] = True
    given = recipe.bits, recipe.group_size, recipe.symmetric, recipe.offset
    if recipe.engine and quantised and (grid := grid_for(recipe.engine, *given)):
        defaults |= {
            "group_size": grid.group or 0,
            "symmetric": grid.symmetric,
            "offset": grid.offset,
        }
        defaults |= {} if recipe.size else {"bits": grid.bits}
    if recipe.size:
        defaults["allocate"] = "error"
    if not movable(recipe):
        defaults["allocate"] = "uniform"
    missing = {name: value for name, value in defaults.items() if getattr(recipe, name) is None}
    return dataclasses.replace(recipe, effort=effort, **missing)


def has_grid(recipe: Fields) -> bool:
    """Whether the method or the pruner quantises S; False for an unknown name."""
    part = METHODS.get(recipe.method or "") if recipe.pruner is None else PRUNERS.get(recipe.pruner)
    return part is not None and part.grid is not None


def movable(recipe: Fields) -> bool:
    """Whether bits, rank or non-zeros can move between layers. The recipe has its method and
    pattern.
    """
    if has_grid(recipe) and recipe.bits is None:
        return True
    if recipe.size:
        return recipe.rank is None and not isinstance(METHODS.get(recipe.method or ""), Prune)
    ranked = bool(recipe.rank) or recipe.ratio is not None
    return (recipe.pattern != "dense" or has_grid(recipe)) and (
        ranked or recipe.pattern == "unstructured"
    )


def budget_of(recipe: Fields) -> Budget:
    """The budget of every layer. The recipe has its pattern."""
    return Budget(
        recipe.pattern or "2:4", recipe.rank, recipe.sparsity, recipe.ratio, recipe.rank_share
    )


def method_of(recipe: Fields) -> Method:
    """The method with the hyper-parameters and parts that the recipe names."""
    names = (
        "pruner",
        "low_rank",
        "rounds",
        "damping",
        "refit",
        "bits",
        "group_size",
        "symmetric",
        "offset",
    )
    return build_method(recipe.method or "joint", **{name: getattr(recipe, name) for name in names})


def problems(recipe: Fields, with_text: bool = True) -> Iterator[Problem]:
    """Everything that is wrong with the combination of the fields, as far as that can be seen
    without the model.
    """
    recipe = filled(recipe)
    pattern, quantised = recipe.pattern, has_grid(recipe)
    yield from budget_of(recipe).problems()
    yield from method_problems(recipe)
    if pattern == "dense" and not quantised:
        yield Problem(
            ("pattern", "method"),
            f"pattern dense keeps every entry of S, and method {recipe.method} does not quantise"
            f" them, so nothing would be compressed: use a method that quantises S ({QUANTISING}),"
            " or another pattern",
        )
    if recipe.engine:
        yield from engine_problems(recipe)
    yield from size_problems(recipe)
    if recipe.minutes and not recipe.match_predictions:
        given = "effort" if recipe.effort == "fast" else "match_predictions"
        message = (
            f"minutes is a time for fine-tuning, and with this {given} there is none: leave out"
            f" minutes or {given}"
        )
        yield Problem(("minutes", given), message)
    if recipe.allocate == "error" and not recipe.size and not movable(recipe):
        remedy = (
            "leave out allocate" if pattern == "dense" else "give a rank, or leave out allocate"
        )
        message = (
            "allocate error moves bits and rank between layers, and here is none to move (pattern"
            f" {pattern})"
        )
        yield Problem(("allocate", "pattern", "rank"), f"{message}: {remedy}")
    if with_text:
        yield from refusals(lambda: check_text(recipe.calibration), "calibration")


def refusals(check: Callable[[], object], field: str) -> Iterator[Problem]:
    """What a check of a field raises, as a problem."""
    try:
        check()
    except HasslefreeError as error:
        yield Problem((field,), error.message)


def size_problems(recipe: Fields) -> Iterator[Problem]:
    if (size := recipe.size) is None:
        return
    yield from refusals(lambda: Size.parse(size), "size")
    if not movable(recipe):
        given = " and ".join(name for name in ("bits", "rank") if getattr(recipe, name) is not None)
        remedy = f"leave out {given}" if given else "use method joint-grid"
        message = (
            f"with method {recipe.method}, there is nothing left that a size could choose: {remedy}"
        )
        yield Problem(("size", "method", "bits", "rank"), message)
    for name in ("ratio", "rank_share"):
        if getattr(recipe, name) is not None:
            yield Problem(("size", name), f"give size or {name}, not both")


def engine_problems(recipe: Fields) -> Iterator[Problem]:
    """Why the engine of a recipe, which has its pattern and its grid, cannot hold S."""
    engine = str(recipe.engine)
    try:
        grid = method_of(recipe).grid
    except HasslefreeError:
        return  # `method_problems` says what is wrong
    if grid is None:
        message = (
            f"{engine} takes a quantised S, and method {recipe.method} does not quantise it: use"
            f" {QUANTISING}"
        )
        yield Problem(("engine", "method"), message)
    elif recipe.pattern != "dense":
        message = (
            f"{engine} stores every entry of S, so that pattern {recipe.pattern} saves nothing"
            " there: use dense"
        )
        yield Problem(("engine", "pattern"), message)
    elif refused := refusal(engine, grid):
        yield Problem(("engine", "bits", "group_size", "symmetric", "offset"), refused)


def method_problems(recipe: Fields) -> Iterator[Problem]:
    try:
        method = method_of(recipe)
        method.check(recipe.rank or 0)
    except HasslefreeError as error:
        yield Problem(error.fields or ("method",), error.message)
    else:
        if (
            not isinstance(method, Prune)
            and recipe.rank is None
            and recipe.ratio is None
            and recipe.size is None
        ):
            budgets = f"{option('rank', 64)} (0 for S alone), {option('ratio')} or {option('size')}"
            message = f"method {recipe.method} needs a budget: give a rank such as {budgets}"
            yield Problem(("method", "rank", "ratio"), message)
    if (bits := recipe.factor_bits) is None:
        return
    if isinstance(METHODS.get(recipe.method or ""), Prune):
        message = (
            f"factor_bits quantises the factors of L, and method {recipe.method} has no L: leave"
            " out factor_bits"
        )
        yield Problem(("factor_bits",), message)
    rank = 0 if recipe.rank_share == 0 else recipe.rank
    yield from refusals(lambda: check_factor_bits(bits, rank), "factor_bits")
