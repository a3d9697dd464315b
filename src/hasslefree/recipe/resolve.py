"""Resolve a recipe: fill in every default, and name every conflict between fields."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hasslefree.core.budgets import Budget
from hasslefree.core.factors import BITS as FACTOR_BITS
from hasslefree.core.factors import check_factor_bits
from hasslefree.core.grids import BITS, MOST_RATE, RATES, Grid, check_bits
from hasslefree.core.protocols import Method
from hasslefree.core.scales import SCALE_BITS
from hasslefree.errors import BudgetError, HasslefreeError, Problem, RecipeError, option
from hasslefree.recipe.engines import ENGINES, K_TYPES, WIDE_TYPES, fused_name, grid_for, refusal
from hasslefree.recipe.fields import NAMES, Allocate, Fields
from hasslefree.solve.methods import METHODS, build_method, with_grid
from hasslefree.solve.methods.prune import Prune
from hasslefree.solve.pruners import PRUNERS
from hasslefree.texts.sources import check_calibration
from hasslefree.units import Size

# The fields that each effort sets if the recipe leaves them open. MOVING is `balanced` for a sparse
# S whose layers can trade rank or non-zeros: that gains more than training for the same time.
EFFORTS: dict[str, dict[str, Any]] = {
    "fast": {"allocate": "uniform", "match_predictions": 0},
    "balanced": {"allocate": "uniform", "match_predictions": 49_152},
    "best": {"allocate": "error", "match_predictions": 204_800},
}
MOVING = {"allocate": "error", "match_predictions": 18_432}
# The rounds of `joint` by effort, and those of `joint-grid` in all efforts.
ROUNDS = {"fast": 20, "balanced": 50, "best": 100}
GRID_ROUNDS = 20
# The methods of this project, which are trained by default; the others are as published.
OURS = ("joint", "joint-grid")
QUANTISING = ", ".join(name for name, method in METHODS.items() if method.grid)
# The size to reach if the recipe sets none of SIZING.
DEFAULT_SIZE = "5.2bits"
SIZING = (
    "size",
    "pattern",
    "bits",
    "rank",
    "sparsity",
    "ratio",
    "rank_share",
    "method",
    "pruner",
    "low_rank",
)
# The grid of joint-grid if S keeps every entry, where the engine holds small scales.
SMALL_GROUP = 32
SMALL_SCALES = 5
# Scales with this number of bits are floats.
FLOAT_BITS = 16
# Bits per weight from which fixed codes lose less than entropy-coded ones of the highest rate: at
# the same loss, fixed codes take about a bit more.
FIXED_FROM = RATES[-1] + 1
# Fields that set the size of S and L in a layer.
OF_BUDGET = ("rank", "sparsity", "ratio", "rank_share", "factor_bits")
# Fields of the grid of S, fields that imply a grid unless S is pruned, and fields of a method.
OF_GRID = ("bits", "group_size", "symmetric", "offset", "scale_bits", "coding")
GRIDS = ("size", "engine", *OF_GRID)
METHOD_FIELDS = (
    "pruner",
    "low_rank",
    "rounds",
    "damping",
    "refit",
    *OF_GRID,
)


@dataclass(frozen=True, kw_only=True)
class Resolved(Fields):
    """A recipe with all defaults, and the parts that it names.

    Args:
        budget: the same for every layer, unless there is a size.
        solver: the method, with its hyper-parameters.
        coding_is_open: True if the recipe does not set `coding`.
    """

    pattern: str
    method: str
    allocate: Allocate
    match_predictions: int
    budget: Budget
    solver: Method
    coding_is_open: bool = False

    @property
    def size_limit(self) -> Size | None:
        """The size to reach; None if every layer gets the budget."""
        if self.size is None:
            return None
        return Size.parse(self.size)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids that a layer may get, by rising bits; empty if S is not quantised. Types of
        llama.cpp are for rows that BLOCK divides.
        """
        grid = self.solver.grid
        if grid is None:
            return ()
        if self.bits is not None:
            return (grid,)
        return self._grids_like(grid)

    @property
    def end_grids(self) -> tuple[Grid, ...]:
        """The grids that embedding and head may get, by rising bits; empty if they stay dense."""
        grid = self.solver.grid
        if self.embedding_bits is not None:
            return (end_grid(self, grid, self.embedding_bits),)
        if self.size is None or grid is None:
            return ()
        if self.engine is not None and not ENGINES[self.engine].embeddings:
            return ()
        if grid.rate is None:
            grid = end_grid(self, grid, grid.bits)
        return self._grids_like(grid)

    def _grids_like(self, grid: Grid) -> tuple[Grid, ...]:
        """The grids of this kind with any bits, by rising bits: types of llama.cpp, rates, or grids
        that the engine holds.
        """
        if takes_types(self):
            return WIDE_TYPES
        if grid.rate is not None:
            return tuple(map(Grid.entropy_coded, RATES))
        grids = [replace(grid, bits=bits) for bits in BITS]
        if self.engine is None:
            return tuple(grids)
        return tuple(filter(ENGINES[self.engine].holds, grids))

    def unit(self, name: str) -> str:
        """A name shared by layers that must get the same grid: the fused layer of the engine that
        contains this layer, or the layer itself.
        """
        if self.engine is None or not ENGINES[self.engine].fuses:
            return name
        return fused_name(name)

    @property
    def fixed_rank(self) -> int | None:
        """The rank of every layer within a size; None if it is to be chosen, which it never is with
        entropy coding.
        """
        if isinstance(self.solver, Prune):
            return 0
        if self.coding == "entropy":
            return self.rank or 0
        return self.rank

    @property
    def rank_on_grids(self) -> int | None:
        """The rank of every layer on a grid while bits are chosen; None if it is chosen too."""
        if self.size or not self.fixed_rank:
            return self.fixed_rank
        return None

    def to_dict(self) -> dict[str, Any]:
        """The fields of the recipe, for JSON."""
        fields = {name: getattr(self, name) for name in NAMES}
        for name, value in fields.items():
            if isinstance(value, tuple):
                fields[name] = list(value)
        return fields


def resolve(recipe: Fields, with_text: bool = True) -> Resolved:
    """See `Recipe.resolve`."""
    settings = with_defaults(recipe)
    budget = Budget(
        settings.pattern or "2:4",
        settings.rank,
        settings.sparsity,
        settings.ratio,
        settings.rank_share,
    )
    problems = list(budget.problems())
    solver = None
    try:
        solver = build_solver(settings)
        if takes_types(settings):
            solver = with_grid(solver, K_TYPES["Q4_K"])
        solver.check(settings.rank or 0)
    except HasslefreeError as error:
        problems.append(Problem(error.fields or ("method",), error.message))
    if solver is not None and not problems:  # a wrong pattern is not a missing budget
        problems += budget_problems(settings, solver)
    problems += combination_problems(settings, solver)
    if with_text:
        problems += refusals(lambda: check_calibration(settings.calibration), "calibration")
    if problems or solver is None:
        raise RecipeError.of(problems)
    fields: dict[str, Any] = {name: getattr(settings, name) for name in NAMES}
    return Resolved(**fields, budget=budget, solver=solver, coding_is_open=recipe.coding is None)


def with_defaults(recipe: Fields) -> Fields:
    """Fill in the defaults of open fields."""
    # In this order: each default depends on the fields before it.
    openings: dict[str, Callable[[Fields], Any]] = {
        "size": default_size,
        "method": default_method,
        "pattern": default_pattern,
        "effort": default_effort,
        "coding": default_coding,
    }
    for name, default in openings.items():
        if getattr(recipe, name) is None:
            recipe = replace(recipe, **{name: default(recipe)})
    effort = effort_defaults(recipe)
    method = method_defaults(recipe)
    engine = engine_defaults(recipe)
    size = size_defaults(recipe)
    given = {name: value for name, value in vars(recipe).items() if value is not None}
    return replace(recipe, **effort | method | engine | size | given)


def given_fields(recipe: Fields, names: Sequence[str]) -> list[str]:
    """The names of those fields that are not None."""
    return [name for name in names if getattr(recipe, name) is not None]


def default_size(recipe: Fields) -> str | None:
    """`DEFAULT_SIZE` if the recipe sets no field of `SIZING`."""
    if given_fields(recipe, SIZING):
        return None
    return DEFAULT_SIZE


def default_method(recipe: Fields) -> str:
    """A method with a grid if a field implies a grid."""
    prunes = recipe.pattern not in (None, "dense")
    asking = OF_GRID if prunes else GRIDS
    if given_fields(recipe, asking):
        return "joint-grid"
    return "joint"


def default_pattern(recipe: Fields) -> str:
    """Dense if S is quantised, otherwise 2:4."""
    if has_grid(recipe):
        return "dense"
    return "2:4"


def default_effort(recipe: Fields) -> str | None:
    """Best with a time for fine-tuning, balanced for our methods, and none for published ones."""
    if recipe.minutes:
        return "best"
    if recipe.method in OURS:
        return "balanced"
    return None


def default_coding(recipe: Fields) -> str | None:
    """Entropy coding for a size up to `FIXED_FROM`, if only bits are left to choose and the recipe
    names no engine.
    """
    if recipe.size is None or recipe.method != "joint-grid" or recipe.pattern != "dense":
        return None
    if given_fields(recipe, ("engine", *OF_BUDGET, *OF_GRID)):
        return None
    if recipe.embedding_bits is not None and recipe.embedding_bits > MOST_RATE:
        return None
    try:
        size = Size.parse(recipe.size)
    except BudgetError:  # reported by `size_problems`
        return None
    if size.in_bits and size.amount > FIXED_FROM:
        return None
    return "entropy"


def effort_defaults(recipe: Fields) -> dict[str, Any]:
    """Allocation and training of the effort."""
    if recipe.effort == "balanced" and not has_grid(recipe) and movable(recipe):
        return MOVING
    return EFFORTS[recipe.effort or "fast"]


def method_defaults(recipe: Fields) -> dict[str, Any]:
    """Rounds, rank, offset and scales of our methods; `METHODS` has those of published ones."""
    if recipe.method not in OURS:
        return {}
    if not has_grid(recipe):
        return {"rounds": ROUNDS[recipe.effort or "fast"]}
    defaults: dict[str, Any] = {"rounds": GRID_ROUNDS}
    is_dense = recipe.pattern == "dense"
    if is_dense and recipe.bits is not None and not given_fields(recipe, ("size", "ratio")):
        defaults["rank"] = 0
    if recipe.coding == "entropy" or not is_dense:
        return defaults
    if not recipe.symmetric:
        defaults["offset"] = True
    holds_small_scales = recipe.engine is None or ENGINES[recipe.engine].multiples
    if holds_small_scales and recipe.group_size != 0:  # a row has several scales
        defaults["scale_bits"] = SMALL_SCALES
    return defaults


def engine_defaults(recipe: Fields) -> dict[str, Any]:
    """The grid of the engine that has what is given of a grid; empty if it has none."""
    if recipe.engine is None or not has_grid(recipe) or recipe.coding == "entropy":
        return {}
    if takes_types(recipe):
        return {"rank": 0, "offset": None}  # the type decides on offsets
    grid = grid_for(recipe.engine, recipe.bits, recipe.group_size, recipe.symmetric, recipe.offset)
    if grid is None:
        return {}
    defaults: dict[str, Any] = {
        "group_size": grid.group or 0,
        "symmetric": grid.symmetric,
        "offset": grid.offset,
    }
    if not recipe.size:
        defaults["bits"] = grid.bits
    return defaults


def size_defaults(recipe: Fields) -> dict[str, Any]:
    """Layers share a size by their errors, and are uniform if nothing can move between them."""
    defaults: dict[str, Any] = {}
    if not movable(recipe):
        defaults["allocate"] = "uniform"
    elif recipe.size:
        defaults["allocate"] = "error"
    if recipe.size and recipe.method == "joint" and recipe.rank is None:
        # Beside values of 16 bits, twice the rank in the same bytes is worth far more than its
        # factors lose.
        defaults["factor_bits"] = FACTOR_BITS
    return defaults


def takes_types(recipe: Fields) -> bool:
    """Return True if each layer gets one of llama.cpp's own types: within a size, if the recipe
    sets no field of the grid.
    """
    if recipe.engine != "llama.cpp" or recipe.size is None or not has_grid(recipe):
        return False
    return not given_fields(recipe, OF_GRID)


def has_grid(recipe: Fields) -> bool:
    """Return True if the method or the pruner quantises S; False for an unknown name."""
    if recipe.pruner is None:
        part: Any = METHODS.get(recipe.method or "")
    else:
        part = PRUNERS.get(recipe.pruner)
    return part is not None and part.grid is not None


def only_prunes(recipe: Fields) -> bool:
    """Return True if the method has no L; False for an unknown name."""
    return isinstance(METHODS.get(recipe.method or ""), Prune)


def movable(recipe: Fields) -> bool:
    """Return True if bits, rank or non-zeros can move between layers.

    | recipe, with its method and pattern                   | what can move    |
    |-------------------------------------------------------|------------------|
    | S on a grid, bits left open (an engine chooses them   |                  |
    | unless there is a size)                               | bits             |
    | a size, with a rank                                   | nothing          |
    | a size, and a method without L, or entropy coding     | nothing          |
    | a size otherwise                                      | rank             |
    | pattern dense without a grid                          | nothing          |
    | a rank above 0, or a ratio                            | rank             |
    | pattern unstructured                                  | non-zeros        |
    | otherwise (such as 2:4 with rank 0)                   | nothing          |
    """
    quantised = has_grid(recipe)
    if quantised and recipe.bits is None and (recipe.size or not recipe.engine):
        return True
    if recipe.size:
        return recipe.rank is None and not only_prunes(recipe) and recipe.coding != "entropy"
    if recipe.pattern == "dense" and not quantised:
        return False
    if recipe.rank or recipe.ratio is not None:
        return True
    return recipe.pattern == "unstructured"


def build_solver(recipe: Fields) -> Method:
    """Build the method with the hyper-parameters and parts that the recipe names."""
    parts = {name: getattr(recipe, name) for name in METHOD_FIELDS}
    if recipe.scale_bits is not None:
        check_bits("scale_bits", recipe.scale_bits, (*SCALE_BITS, FLOAT_BITS))
    if recipe.scale_bits == FLOAT_BITS:
        parts["scale_bits"] = None
    elif recipe.scale_bits and recipe.group_size is None:
        parts["group_size"] = SMALL_GROUP
    return build_method(recipe.method or "joint", **parts)


def combination_problems(recipe: Fields, solver: Method | None) -> Iterator[Problem]:
    """Conflicts between fields. solver: None if the method cannot be built."""
    if recipe.factor_bits is not None:
        yield from factor_problems(recipe, recipe.factor_bits)
    if recipe.pattern == "dense" and not has_grid(recipe):
        yield Problem(
            ("pattern", "method"),
            f"pattern dense keeps every entry of S, and method {recipe.method} does not quantise"
            f" them, so nothing would be compressed: use a method that quantises S ({QUANTISING}),"
            " or another pattern",
        )
    if recipe.engine and solver is not None:
        yield from engine_problems(recipe, recipe.engine, solver.grid)
    if recipe.embedding_bits is not None:
        grid = solver.grid if solver else None
        yield from embedding_problems(recipe, recipe.embedding_bits, grid)
    if recipe.size is not None:
        yield from size_problems(recipe, recipe.size)
    if recipe.minutes and not recipe.match_predictions:
        given = "effort" if recipe.effort == "fast" else "match_predictions"
        yield Problem(
            ("minutes", given),
            f"minutes is a time for fine-tuning, and with this {given} there is none: leave out"
            f" minutes or {given}",
        )
    yield from allocation_problems(recipe)


def allocation_problems(recipe: Fields) -> Iterator[Problem]:
    """Conflicts between the field allocate and others."""
    if recipe.allocate == "owl" and recipe.ratio is None and recipe.sparsity is None:
        yield Problem(
            ("allocate", "ratio", "sparsity"),
            "allocate owl distributes a ratio or a sparsity over the blocks: give ratio or"
            " sparsity",
        )
    elif recipe.allocate == "owl" and recipe.size is not None:
        yield Problem(
            ("allocate", "size"),
            "allocate owl ignores the size: leave out the size, or use allocate error",
        )
    if recipe.allocate == "error" and not recipe.size and not movable(recipe):
        remedy = "leave out allocate"
        if recipe.pattern != "dense":
            remedy = f"give a rank, or {remedy}"
        yield Problem(
            ("allocate", "pattern", "rank"),
            "allocate error moves bits and rank between layers, and this recipe has none to move"
            f" (pattern {recipe.pattern}): {remedy}",
        )


def budget_problems(recipe: Fields, solver: Method) -> Iterator[Problem]:
    """The missing budget of a method with an L: a rank, a ratio or a size."""
    if isinstance(solver, Prune) or given_fields(recipe, ("rank", "ratio", "size")):
        return
    yield Problem(
        ("method", "rank", "ratio"),
        f"method {recipe.method} needs a budget: give a rank such as {option('rank', 64)} (0 for S"
        f" alone), {option('ratio')} or {option('size')}",
    )


def factor_problems(recipe: Fields, bits: int) -> Iterator[Problem]:
    """Conflicts of factor_bits with a method or a rank that has no factors."""
    if only_prunes(recipe):
        yield Problem(
            ("factor_bits",),
            f"factor_bits quantises the factors of L, and method {recipe.method} has no L: leave"
            " out factor_bits",
        )
    rank = 0 if recipe.rank_share == 0 else recipe.rank
    yield from refusals(lambda: check_factor_bits(bits, rank), "factor_bits")


def engine_problems(
    recipe: Fields,
    engine: str,
    grid: Grid | None,
) -> Iterator[Problem]:
    """The reason for which an engine cannot hold S."""
    if grid is None:
        yield Problem(
            ("engine", "method"),
            f"{engine} takes a quantised S, and method {recipe.method} does not quantise it: use"
            f" {QUANTISING}",
        )
    elif recipe.pattern != "dense":
        yield Problem(
            ("engine", "pattern"),
            f"{engine} stores every entry of S, so pattern {recipe.pattern} saves nothing there:"
            " use dense",
        )
    elif refused := refusal(engine, grid):
        yield Problem(("engine", *OF_GRID), refused)


def size_problems(recipe: Fields, size: str) -> Iterator[Problem]:
    """A malformed size, and fields that leave nothing for a size to choose."""
    yield from refusals(lambda: Size.parse(size), "size")
    if not movable(recipe):
        given = given_fields(recipe, ("bits", "rank"))
        remedy = f"leave out {' and '.join(given)}" if given else "use method joint-grid"
        yield Problem(
            ("size", "method", "bits", "rank"),
            f"with method {recipe.method}, there is nothing left that a size could choose:"
            f" {remedy}",
        )
    for name in given_fields(recipe, ("ratio", "rank_share")):
        yield Problem(("size", name), f"give size or {name}, not both")


def end_grid(recipe: Fields, grid: Grid | None, bits: int) -> Grid:
    """The grid of an embedding or a head, whose rows are stored one by one: with offsets, unless it
    is symmetric.

    Args:
        grid: of the layers; None if they have none.
    """
    if takes_types(recipe):
        return next(held for held in WIDE_TYPES if held.bits >= bits)
    if grid is not None and grid.rate is not None:
        return grid.with_bits(bits)
    symmetric = bool(recipe.symmetric)
    return replace(grid or Grid(), bits=bits, symmetric=symmetric, offset=not symmetric)


def embedding_problems(recipe: Fields, bits: int, grid: Grid | None) -> Iterator[Problem]:
    """The reasons for which embedding and head cannot have these bits. grid: of the layers."""
    if bits not in BITS:
        yield from refusals(lambda: check_bits("embedding_bits", bits, BITS), "embedding_bits")
    elif recipe.engine and not ENGINES[recipe.engine].embeddings:
        yield Problem(
            ("embedding_bits", "engine"),
            f"{recipe.engine} keeps embedding and head dense: leave out embedding_bits",
        )
    elif grid is not None and grid.rate is not None:
        yield from refusals(lambda: grid.with_bits(bits), "embedding_bits")
    elif recipe.engine and (refused := refusal(recipe.engine, end_grid(recipe, grid, bits))):
        yield Problem(("embedding_bits", "engine"), f"embedding and head: {refused}")


def refusals(check: Callable[[], object], field: str) -> Iterator[Problem]:
    """The error that a check of a field raises, as a problem; nothing if it raises none."""
    try:
        check()
    except HasslefreeError as error:
        yield Problem((field,), error.message)
