"""A recipe as the user gives it: one declaration per field, from which its YAML, its flag and its help follow.

This module imports nothing heavy, so that `hasslefree --help` starts at once. How the fields combine is decided in
`recipe.resolved`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasslefree.validation import DTYPES

if TYPE_CHECKING:
    from hasslefree.recipe.resolved import Resolved

EFFORTS = ("fast", "balanced", "best")
ALLOCATIONS = ("uniform", "owl", "error")
SEQUENTIAL = ("layer", "block")

# Describes what is wrong with the value of a field; None if it is valid.
Check = Callable[[Any], str | None]


@dataclass(frozen=True)
class Declaration:
    """The declaration of a field, in addition to its name, type and default.

    Args:
        help: for `--help` and the documentation. group: the heading under which they list the field.
        check: of a given value; what depends on other fields is checked in `recipe.resolved`.
        flags: the flags, where they are not --name and --no-name.
    """

    help: str
    group: str
    check: Check | None = None
    flags: tuple[str, ...] = ()


def declared(default: Any, group: str, help: str, check: Check | None = None, flags: tuple[str, ...] = ()) -> Any:
    """A field of a recipe; see `Declaration`."""
    return dataclasses.field(default=default, metadata={"declaration": Declaration(help, group, check, flags)})


def at_least(least: int) -> Check:
    return lambda value: None if value >= least else f"must be at least {least}, got {value}"


def one_of(known: tuple[str, ...]) -> Check:
    return lambda value: None if value in known else f"must be one of {', '.join(known)}, got {value!r}"


def share(value: float) -> str | None:
    return None if 0 <= value <= 1 else f"must be between 0 and 1, got {value}"


def finite_damping(value: float) -> str | None:
    return None if 0 <= value < float("inf") else f"must be a finite number, 0 or more, got {value}"


def whole_group(value: int) -> str | None:
    return None if value >= 0 else f"must be a number of inputs, or 0 for one scale per row, got {value}"


def valid_seed(value: int) -> str | None:
    return None if 0 <= value < 2**63 else f"must be between 0 and 2^63 - 1, got {value}"


BUDGET, METHOD, GRID = "Budget of each layer", "Method", "Grid of S, and factors in eight bits"
LEVERS, TEXT, MODEL = "Beyond the layer", "Calibration", "Model"


@dataclass(frozen=True)
class Recipe:
    """The settings of a compression: the same recipe, model and machine give the same folder.

    The help text of each field describes it; `hasslefree compress --help` and docs/guide/compress.md list them all.
    None stands for a default that depends on other fields: `resolve` fills it in.

    Example:
        >>> hasslefree.compress("meta-llama/Llama-3.2-1B", "out/", Recipe(pattern="2:4", rank=64))
    """

    pattern: str | None = declared(
        None, BUDGET, "N:M, unstructured, row, structured or dense (default: 2:4; on a grid, dense)."
    )
    rank: int | None = declared(None, BUDGET, "Rank of the low-rank part.")
    sparsity: float | None = declared(None, BUDGET, "Share of zeros in S, for patterns other than N:M.")
    ratio: float | None = declared(None, BUDGET, "Share of the parameters to save; fixes the rank.")
    rank_share: float | None = declared(None, BUDGET, "Share of what is kept that goes to L.")
    method: str = declared(
        "joint", METHOD, "joint, 3basil, hassle-free, oats, eora, or a pruner; on a grid, joint-grid, caldera, …"
    )
    effort: str | None = declared(
        None, LEVERS, "fast, balanced (default for joint) or best: time against quality.", one_of(EFFORTS)
    )
    allocate: str | None = declared(
        None,
        LEVERS,
        "uniform: the same budget for every layer; error: more rank to layers whose pruning hurts predictions most; "
        "owl: more to blocks with more outliers (default: the effort's).",
        one_of(ALLOCATIONS),
    )
    pruner: str | None = declared(None, METHOD, "Another pruner for hassle-free: sparsegpt, alps, …")
    low_rank: str | None = declared(None, METHOD, "Another solver for hassle-free: adam, exact, …")
    rounds: int | None = declared(None, METHOD, "Rounds (default: the method's own).")
    damping: float | None = declared(None, METHOD, "λ over mean(diag H) (default: the method's).", finite_damping)
    refit: bool = declared(False, METHOD, "Least squares on the support after the pruner.")
    bits: int | None = declared(
        None, GRID, "Bits of the grid of S, 4 or 8, for joint-grid, caldera, gptq, … (default: 4)."
    )
    group_size: int | None = declared(
        None, GRID, "Inputs that share a scale of the grid; 0: a whole row (default: 64).", whole_group
    )
    symmetric: bool | None = declared(
        None,
        GRID,
        "A grid around zero, or from the smallest to the largest entry (default: asymmetric).",
        flags=("--symmetric/--asymmetric",),
    )
    factor_bits: int | None = declared(None, GRID, "8 for the factors of L as int8 (default: the model's dtype).")
    calibration: str = declared("c4", TEXT, "c4, wikitext2, ptb, or a .txt or .jsonl file.")
    samples: int = declared(128, TEXT, "Calibration segments.", at_least(1))
    seqlen: int | None = declared(
        None, TEXT, "Tokens in a segment (default: 2048, or the model's limit if that is less).", at_least(2)
    )
    sequential: str = declared(
        "layer",
        TEXT,
        "layer: collect inputs again after each group of layers (slower, better); block: once per block.",
        one_of(SEQUENTIAL),
    )
    dense_target: float | None = declared(
        None, LEVERS, "How far layers aim at the dense outputs, 0 to 1 (default: the effort's).", share
    )
    match_blocks: bool | None = declared(
        None, LEVERS, "Train what each block keeps against the dense block (default: the effort's)."
    )
    match_epochs: int | None = declared(
        None, LEVERS, "Passes over the text that block matching makes at most (default: the effort's).", at_least(1)
    )
    match_predictions: int | None = declared(
        None,
        LEVERS,
        "Tokens of new calibration text on which all blocks are trained together, so that the model predicts what the "
        "dense one does; 0 for none (default: the effort's).",
        at_least(0),
    )
    rotate: bool = declared(
        False,
        LEVERS,
        "First rotate the residual stream and the values of attention heads, where other weights can take that in, so "
        "that pruning removes less.",
    )
    leave_dense: tuple[str, ...] = declared((), MODEL, "Globs of layers or parameters that stay as they are.")
    dtype: str = declared("auto", MODEL, "auto, float32, bfloat16 or float16.", one_of(DTYPES))
    seed: int = declared(0, TEXT, "Seed of everything that is random.", valid_seed)

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
            RecipeError: with every problem of every field, its file and its line.
        """
        from hasslefree.recipe.yaml import read_recipe

        return read_recipe(Path(path), changes)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Recipe:
        """A recipe from plain values, checked for names and types. Raises RecipeError with every problem."""
        from hasslefree.recipe.yaml import from_values

        return from_values(content)


def declaration(field: dataclasses.Field[Any]) -> Declaration:
    found: Declaration = field.metadata["declaration"]
    return found


def field_types() -> dict[str, Any]:
    """The annotation of each field, such as int | None."""
    return typing.get_type_hints(Recipe)
