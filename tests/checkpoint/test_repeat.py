"""The command that repeats a compression makes the recipe that made it."""

import dataclasses
import shlex

import pytest
import typer.main
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Recipe
from hasslefree.checkpoint.record import Record, command_of
from hasslefree.cli.common import app
from hasslefree.errors import RecipeError


def report_of(recipe, **changes):
    fields = {"model": "a/b", "recipe": dataclasses.asdict(recipe) | {"leave_dense": list(recipe.leave_dense)},
              "method": "", "versions": {}, "device": "cpu", "dtype": "float32", "seqlen": recipe.seqlen or 2048,
              "tokens": 1, "seconds": 0.0, "layers": ()}  # fmt: skip
    return Record(**fields | changes)


def parsed(command, monkeypatch):
    """Oracle: what the command line hands to `compress`."""
    seen = {}

    def compress(model, out, recipe, **options):
        seen.update(model=model, recipe=recipe, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("hasslefree.pipeline.compress.compress", compress)
    words = shlex.split(command)
    assert words.pop(0) == "hasslefree"
    root = typer.main.get_command(app)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        root(args=words)
    return seen


NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1).filter(lambda t: t[0] != "-")


@settings(max_examples=40)
@given(
    recipe=st.builds(
        Recipe,
        pattern=st.sampled_from(["2:4", "unstructured"]),
        rank=st.none() | st.integers(0, 64),
        ratio=st.none() | st.floats(0, 1),
        method=st.sampled_from(["joint", "hassle-free"]),
        low_rank=st.none() | st.just("exact"),
        rounds=st.none() | st.integers(1, 9),
        symmetric=st.none() | st.booleans(),
        offset=st.none() | st.booleans(),
        refit=st.booleans(),
        calibration=NAMES,
        leave_dense=st.lists(NAMES, max_size=3).map(tuple),
        seed=st.integers(0, 2**63 - 1),
    ),
    model=NAMES,
)
def test_the_command_makes_the_recipe_again(recipe, model):
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = parsed(command_of(report_of(recipe, model=model)), monkeypatch)
    assert seen["recipe"] == dataclasses.replace(recipe, seqlen=2048)
    assert (seen["model"], seen["device"], seen["trust_remote_code"]) == (model, "cpu", False)


def test_tokens_from_python_have_no_command():
    assert command_of(report_of(Recipe(), own_segments=True)) is None


def test_code_of_the_model_s_own_is_named():
    assert command_of(report_of(Recipe()), trust_remote_code=True).endswith("--trust-remote-code")


def test_a_recipe_of_another_version_is_refused():
    report = report_of(Recipe())
    with pytest.raises(RecipeError, match="unknown field 'colour'"):
        command_of(dataclasses.replace(report, recipe=report.recipe | {"colour": "red"}))
