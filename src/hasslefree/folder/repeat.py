"""The command that repeats a compression."""

from __future__ import annotations

import dataclasses
import shlex

from hasslefree.folder.record import Record
from hasslefree.recipe.recipe import Recipe

# Fields that recipes of earlier versions had.
FORMER_FIELDS = {"dense_target", "match_blocks", "match_epochs", "rotate"}


def compress_command(model: str, out: str, recipe: Recipe) -> list[str]:
    """The words of the command that compresses a model by a recipe, without the defaults of this version."""
    words = ["hasslefree", "compress", model, out, "--pattern", str(recipe.pattern), "--method", recipe.method]
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in ("pattern", "method") or value == field.default:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def command_of(report: Record, out: str = "OUT", trust_remote_code: bool = False) -> str | None:
    """The command line that makes the same folder again; None where the calibration tokens were given from Python.

    It lists what differs from the defaults of this version, and seqlen, whose default depends on the model.

    Raises:
        RecipeError: a recipe that this version does not know.
    """
    if report.own_segments:
        return None
    given = {name: value for name, value in report.recipe.items() if value is not None and name not in FORMER_FIELDS}
    recipe = Recipe(**given | {"seqlen": report.seqlen})
    words = compress_command(report.model, out, recipe)
    if report.device != "cuda":
        words += ["--device", report.device]
    return shlex.join(words + ["--trust-remote-code"] * trust_remote_code)
