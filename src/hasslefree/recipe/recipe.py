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

from hasslefree.core.about import About
from hasslefree.validation import DTYPES

if TYPE_CHECKING:
    from hasslefree.recipe.resolved import Resolved

ABOUT_EFFORTS = {
    "fast": About("decomposes single layers, and nothing more", "docs: levers"),
    "balanced": About("also trains the kept values of the model", "docs: levers"),
    "best": About("also trains each block, and moves rank", "docs: levers"),
}
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


# The headings of the help, in its order.
BUDGET, METHOD, GRID = "What to compress to", "Method", "Quantisation"
TEXT, LEVERS = "Calibration", "Beyond the layer"
GROUPS = (BUDGET, METHOD, GRID, TEXT, LEVERS)


@dataclass(frozen=True)
class Recipe:
    """The settings of a compression: the same recipe, model and machine give the same folder.

    The help text of each field describes it; `hasslefree compress --help` and the documentation's page on recipes list
    them all. None stands for a default that depends on other fields: `resolve` fills it in.

    Example:
        >>> hasslefree.compress("meta-llama/Llama-3.2-1B", "out/", Recipe(pattern="2:4", rank=64))
    """

    pattern: str | None = declared(
        None,
        BUDGET,
        "Which entries of S may be non-zero: N:M (such as 2:4), unstructured, row, structured (whole input channels) "
        "or dense (default: 2:4; dense for methods with a grid).",
    )
    rank: int | None = declared(
        None, BUDGET, "Rank of L; 0 for a sparse matrix alone (no default: give a rank or a ratio)."
    )
    sparsity: float | None = declared(
        None, BUDGET, "Share of zeros in S, for the patterns unstructured, row and structured (no default)."
    )
    ratio: float | None = declared(
        None, BUDGET, "Share of the parameters to remove from each layer; it determines the rank (no default)."
    )
    rank_share: float | None = declared(
        None,
        BUDGET,
        "Share of the kept parameters that L gets; needed with a ratio and a pattern other than N:M (no default).",
    )
    method: str = declared(
        "joint", METHOD, "How each layer is decomposed; `hasslefree methods` lists the methods (default: joint)."
    )
    effort: str | None = declared(
        None,
        LEVERS,
        "What is done besides decomposing single layers: fast (nothing), balanced (train the kept values of the whole "
        "model) or best (also train each block, and move rank between layers) (default: balanced for joint, fast for "
        "other methods).",
        one_of(tuple(ABOUT_EFFORTS)),
    )
    allocate: str | None = declared(
        None,
        LEVERS,
        "Share of each layer in the rank and the non-zeros: uniform (the same for every layer), error (more for layers "
        "whose pruning hurts predictions most) or owl (more for blocks with more outliers) (default: the effort's).",
        one_of(ALLOCATIONS),
    )
    pruner: str | None = declared(
        None,
        METHOD,
        "Pruner of an alternating method such as hassle-free; `hasslefree methods` lists the pruners (default: the "
        "method's).",
    )
    low_rank: str | None = declared(
        None,
        METHOD,
        "Low-rank solver of an alternating method such as hassle-free; `hasslefree methods` lists the solvers "
        "(default: the method's).",
    )
    rounds: int | None = declared(
        None,
        METHOD,
        "Iterations of the method: more take longer and fit better (default: the effort's for joint, and the method's "
        "own otherwise).",
    )
    damping: float | None = declared(
        None,
        METHOD,
        "Ridge on the diagonal of H, the second moment of a layer's inputs, as a multiple of its mean (default: the "
        "method's).",
        finite_damping,
    )
    refit: bool = declared(False, METHOD, "After pruning, fit the kept entries again by least squares.")
    bits: int | None = declared(None, GRID, "Bits of an entry of S, 4 or 8, for methods with a grid (default: 4).")
    group_size: int | None = declared(
        None, GRID, "Consecutive inputs that share a scale; 0 for a whole row (default: 64).", whole_group
    )
    symmetric: bool | None = declared(
        None,
        GRID,
        "A grid that is symmetric around zero, or one from the smallest to the largest entry (default: asymmetric).",
        flags=("--symmetric/--asymmetric",),
    )
    factor_bits: int | None = declared(None, GRID, "8 to store both factors of L as int8 (default: the model's dtype).")
    calibration: str = declared(
        "c4", TEXT, "Text on which the layers are fitted: c4, wikitext2, ptb, or a .txt or .jsonl file (default: c4)."
    )
    samples: int = declared(128, TEXT, "Number of calibration segments.", at_least(1))
    seqlen: int | None = declared(
        None, TEXT, "Tokens in a segment (default: 2048, or the model's limit if that is less).", at_least(2)
    )
    sequential: str = declared(
        "layer",
        TEXT,
        "When the inputs of layers are collected again: layer (after each group of layers; slower, better) or block "
        "(once per block) (default: layer).",
        one_of(SEQUENTIAL),
    )
    dense_target: float | None = declared(
        None,
        LEVERS,
        "What layers are fitted to: 0 for the output of the layer on its own inputs, 1 for its output in the dense "
        "model, or a value between (default: the effort's).",
        share,
    )
    match_blocks: bool | None = declared(
        None, LEVERS, "Train the kept values of each block to reproduce the dense block (default: the effort's)."
    )
    match_epochs: int | None = declared(
        None, LEVERS, "Most passes over the text in block matching (default: the effort's).", at_least(1)
    )
    match_predictions: int | None = declared(
        None,
        LEVERS,
        "Tokens of new calibration text on which the kept values of the whole model are trained to predict what the "
        "dense model predicts; 0 for none (default: the effort's).",
        at_least(0),
    )
    rotate: bool = declared(
        False,
        LEVERS,
        "First rotate the residual stream and the values of attention heads, where neighbouring weights can absorb the "
        "rotation, so that pruning removes less.",
    )
    leave_dense: tuple[str, ...] = declared(
        (), BUDGET, "Globs over names of layers or parameters that stay as they are, such as '*.0.*' (default: none)."
    )
    dtype: str = declared(
        "auto",
        BUDGET,
        "Dtype of the compressed model: auto (the checkpoint's), float32, bfloat16 or float16 (default: auto).",
        one_of(DTYPES),
    )
    seed: int = declared(0, TEXT, "Seed of all random numbers.", valid_seed)

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
