"""The options that make a recipe, for every command that takes one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

# Field of a recipe → its type and what --help says.
RECIPE_OPTIONS: dict[str, tuple[Any, str]] = {
    "pattern": (str, "N:M, unstructured, row, structured or dense (default: 2:4; on a grid, dense)."),
    "rank": (int, "Rank of the low-rank part."),
    "sparsity": (float, "Share of zeros in S, for patterns other than N:M."),
    "ratio": (float, "Share of the parameters to save; fixes the rank."),
    "rank_share": (float, "Share of what is kept that goes to L."),
    "effort": (str, "fast, balanced (default for joint) or best: time against quality."),
    "method": (str, "joint (default), 3basil, hassle-free, oats, eora, or a pruner; on a grid, joint-grid, caldera, …"),
    "pruner": (str, "Another pruner for hassle-free: sparsegpt, alps, …"),
    "low_rank": (str, "Another solver for hassle-free: adam, exact, …"),
    "rounds": (int, "Rounds (default: the method's own)."),
    "damping": (float, "λ over mean(diag H) (default: the method's)."),
    "refit": (bool, "Least squares on the support after the pruner (default: no)."),
    "bits": (int, "Bits of the grid of S, 4 or 8, for joint-grid, caldera, gptq, … (default: 4)."),
    "group_size": (int, "Inputs that share a scale of the grid; 0: a whole row (default: 64)."),
    "symmetric": (bool, "A grid around zero, or from the least to the largest entry (default: asymmetric)."),
    "factor_bits": (int, "8 for the factors of L as int8 (default: the model's dtype)."),
    "calibration": (str, "c4 (default), wikitext2, ptb, or a file."),
    "samples": (int, "Calibration segments (default: 128)."),
    "seqlen": (int, "Tokens a segment (default: at most 2048)."),
    "sequential": (str, "layer (a pass a group) or block (a pass a block)."),
    "allocate": (str, "uniform, owl, or error: budgets go where they win most (default: the effort's)."),
    "dense_target": (float, "How far layers aim at the dense outputs, 0 to 1 (default: the effort's)."),
    "match_blocks": (bool, "Train what each block keeps against the dense block (default: the effort's)."),
    "leave_dense": (list[str], "Globs of layers that stay as they are."),
    "dtype": (str, "auto, float32, bfloat16 or float16."),
    "seed": (int, "Seed of all that is random (default: 0)."),
}
# Flags of another form than --name and --no-name.
FLAGS = {"symmetric": ("--symmetric/--asymmetric",)}


def with_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a recipe, and `--recipe`; it gets the recipe that they make as `recipe`."""
    own = signature(command, eval_str=True).parameters
    added = {"recipe": (Path, "A YAML recipe; options given here win over it.")} | RECIPE_OPTIONS

    @functools.wraps(command)
    def wrapped(recipe: Path | None, **values: Any) -> None:
        from hasslefree.recipe import Recipe

        given = {name: values.pop(name) for name in RECIPE_OPTIONS}
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v not in (None, [])}
        command(recipe=Recipe.from_yaml(recipe, **given) if recipe else Recipe(**given), **values)

    named = Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=named) for name, parameter in own.items() if name != "recipe"]
    parameters += [
        Parameter(
            name, named, default=None, annotation=Annotated[kind | None, typer.Option(*FLAGS.get(name, ()), help=text)]
        )
        for name, (kind, text) in added.items()
    ]
    wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped
