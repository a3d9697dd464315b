"""A recipe as the user gives it: each field is declared once, with its type, limits, default, help
and heading.

The command line, YAML files, the documentation and the record of a compression follow from the
declarations. This module imports nothing heavy, so that `hasslefree --help` starts at once. How
fields combine is in `recipe.resolved`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic
from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from hasslefree.errors import Problem, RecipeError, UnknownNameError
from hasslefree.validation import Dtype, describe, plain

if TYPE_CHECKING:
    from hasslefree.recipe.resolved import Resolved

# The headings of the help, in its order.
BUDGET, METHOD, GRID = "What to compress to", "Method", "Quantisation"
TEXT, LEVERS = "Calibration", "Training and allocation"
GROUPS = (BUDGET, METHOD, GRID, TEXT, LEVERS)

Allocate = Literal["uniform", "error"]
CONFIG = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)


def declared(default: Any, group: str, **options: Any) -> Any:
    """A field. options: limits of pydantic, such as ge=0; `flags` if the flags are not --name and
    --no-name.
    """
    return dataclasses.field(default=default, metadata={"group": group, **options})


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=CONFIG)
class Fields:
    """The fields of a `Recipe`. The text below a field is its help on the command line and in the
    documentation.
    """

    size: str | None = declared(None, BUDGET)
    """Size to reach: bytes of all weights (such as 1.5GB), or bits for each weight of the
    compressed layers (4.8bits); bits and ranks are then chosen layer by layer, except those that
    are given (default: 5.2bits, if nothing else says what to compress to, and no method is
    named)."""
    pattern: str | None = declared(None, BUDGET)
    """Which entries of S may be non-zero: N:M (such as 2:4), unstructured, row, structured (whole
    input channels) or dense (default: 2:4; dense for methods with a grid)."""
    rank: int | None = declared(None, BUDGET, ge=0, le=10**9)
    """Rank of L; 0 for a sparse matrix alone (no default: give a rank, a ratio or a size)."""
    sparsity: float | None = declared(None, BUDGET, ge=0, le=1)
    """Share of zeros in S, for the patterns unstructured, row and structured (no default)."""
    ratio: float | None = declared(None, BUDGET, ge=0, le=1)
    """Share of the parameters to remove from each layer; it determines the rank (no default)."""
    rank_share: float | None = declared(None, BUDGET, ge=0, le=1)
    """Share of the kept parameters that L gets; needed with a ratio and a pattern other than N:M
    (no default).
    """
    method: str | None = declared(None, METHOD)
    """How each layer is decomposed; `hasslefree methods` lists the methods (default: joint-grid for
    a size, an engine or a grid without a pattern that prunes, otherwise joint)."""
    effort: Literal["fast", "balanced", "best"] | None = declared(None, LEVERS)
    """What is done besides decomposing single layers: fast (nothing), balanced (train the kept
    values of all layers) or best (train longer, and move rank and bits between layers) (default:
    balanced for joint and joint-grid, fast for other methods)."""
    allocate: Allocate | None = declared(None, LEVERS)
    """Share of each layer in the bits, the rank and the non-zeros: uniform (the same for every
    layer) or error (more for layers whose errors hurt predictions most) (default: error for a size,
    else the effort's)."""
    pruner: str | None = declared(None, METHOD)
    """Pruner of an alternating method such as hassle-free; `hasslefree methods` lists the pruners
    (default: the method's)."""
    low_rank: str | None = declared(None, METHOD)
    """Low-rank solver of an alternating method such as hassle-free; `hasslefree methods` lists the
    solvers (default: the method's)."""
    rounds: int | None = declared(None, METHOD, ge=1, le=10**6)
    """Iterations of the method: more take longer and fit better (default: the effort's for joint,
    and the method's own otherwise)."""
    damping: float | None = declared(None, METHOD, ge=0, allow_inf_nan=False)
    """Ridge on the diagonal of H, the second moment of a layer's inputs, as a multiple of its mean
    (default: the method's)."""
    refit: bool = declared(False, METHOD)
    """After pruning, fit the kept entries again by least squares."""
    engine: Literal["transformers", "llama.cpp", "mlx", "vllm"] | None = declared(None, GRID)
    """Program that is to run the result: the grid becomes one that it holds exactly, and bits,
    group_size, symmetric and offset get its defaults; transformers stands for torch's int4
    operators (no default)."""
    bits: int | None = declared(None, GRID)
    """Bits of an entry of S: 2, 3, 4, 5, 6 or 8, for methods with a grid; bits that are given are
    those of every layer (default: 4, and by layer for a size)."""
    group_size: int | None = declared(None, GRID, ge=0)
    """Consecutive inputs that share a scale; 0 for a whole row (default: 64; 32 for llama.cpp)."""
    symmetric: bool | None = declared(None, GRID, flags=("--symmetric/--asymmetric",))
    """A grid that is symmetric around zero, or one from the smallest to the largest entry (default:
    asymmetric).
    """
    offset: bool | None = declared(None, GRID)
    """The smallest value of a group as a number of the model's dtype, instead of a whole zero point
    of few bits; for pattern dense (default: on for joint-grid with pattern dense, unless symmetric;
    otherwise off)."""
    factor_bits: int | None = declared(None, GRID)
    """8 to store both factors of L as int8 (default: the model's dtype)."""
    calibration: str = declared("c4", TEXT)
    """Text on which the layers are fitted: c4, wikitext2, ptb, a .txt or .jsonl file, or self for
    text that the model writes itself, which needs no network and no file."""
    samples: int = declared(128, TEXT, ge=1, le=10**9)
    """Number of calibration segments."""
    seqlen: int | None = declared(None, TEXT, ge=2, le=10**9)
    """Tokens in a segment (default: 2048, or the model's limit if that is less)."""
    sequential: Literal["layer", "block"] = declared("layer", TEXT)
    """When the inputs of layers are collected again: layer (after each group of layers; slower,
    better) or block (once per block)."""
    match_predictions: int | None = declared(None, LEVERS, ge=0, le=10**12)
    """Tokens of new calibration text on which what the layers store (values of S or scales of its
    grid, and L) is trained until the model predicts what the dense one does; 0 for none (default:
    the effort's)."""
    minutes: float | None = declared(None, LEVERS, gt=0, le=10**6)
    """Time for the whole run: fine-tuning reads its text again until the time is over, so the
    result depends on the speed of the machine (no default: fine-tuning reads its text once; with
    minutes, the effort is best)."""
    check: bool = declared(True, TEXT)
    """Measure the perplexity before and after, on text that was held out."""
    leave_dense: tuple[str, ...] = declared((), BUDGET, strict=False)
    """Globs over names of layers or parameters that stay as they are, such as '*.0.*' (default:
    none).
    """
    dtype: Dtype = declared("auto", BUDGET)
    """Dtype of the compressed model: auto (the checkpoint's), float32, bfloat16 or float16."""
    seed: int = declared(0, TEXT, ge=0, lt=2**63)
    """Seed of all random numbers."""


NAMES = tuple(field.name for field in dataclasses.fields(Fields))


def help_of(name: str) -> str:
    """The help of a field, in one line."""
    return " ".join(Fields.__pydantic_fields__[name].description.split())  # type: ignore[attr-defined]


def _problem(details: ErrorDetails) -> Problem:
    """What pydantic reports about a single field."""
    name, cause = describe(details)
    unknown = details["type"] == "unexpected_keyword_argument"
    return Problem((name,), UnknownNameError("field", name, NAMES).message if unknown else cause)


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

        def __init__(self, **values: Any):
            try:
                super().__init__(**{name: plain(value) for name, value in values.items()})
            except ValidationError as error:
                raise RecipeError.of(map(_problem, error.errors(include_url=False))) from None

    def resolve(self, with_text: bool = True) -> Resolved:
        """The recipe with every default filled in and every part built. with_text: check the
        calibration text too.

        Raises:
            RecipeError: with every problem that can be seen without the model.
        """
        from hasslefree.recipe.resolved import resolve

        return resolve(self, with_text)

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> Recipe:
        """Read a recipe and the recipes that it names as its `base`; `changes` replace their
        fields.

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
            recipe = cls(
                **{name: value for name, value in values.items() if name not in error.fields}
            )
        # A field that is wrong by itself is not reported again as missing.
        single = {name for problem in wrong for name in problem.fields}
        wrong += [problem for problem in problems(recipe) if single.isdisjoint(problem.fields)]
        if not wrong:
            return recipe
        files = [
            ", ".join(dict.fromkeys(str(places[n]) for n in problem.fields if n in places))
            for problem in wrong
        ]
        raise RecipeError.of(
            dataclasses.replace(p, where=file or str(path))
            for p, file in zip(wrong, files, strict=True)
        )
