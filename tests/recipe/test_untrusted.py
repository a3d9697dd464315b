"""Recipes come from strangers: they are data, and nothing in them is run."""

import io
import os
import sys

import pytest

from hasslefree import Recipe
from hasslefree.errors import RecipeError


def test_a_recipe_makes_no_objects(tmp_path):
    mark = tmp_path / "mark"
    file = tmp_path / "recipe.yaml"
    file.write_text(f'pattern: !!python/object/apply:builtins.open ["{mark}", "w"]\n')
    with pytest.raises(RecipeError):
        Recipe.from_yaml(file)
    assert not mark.exists()


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nleave_dense: [*b, *b]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a regular file"),
        (BOMB, r"recipe.yaml:2: .*aliases \(\*name\) are not supported"),
        ("leave_dense: " + "[" * 100_000, "nested too deeply"),
        ("rank: 2\n" + "#" * 300_000, "larger than 262,144 bytes"),
        ("".join(f"f{i}: 1\n" for i in range(101)), "recipe.yaml:101: .*too many fields"),
    ],
    ids=["pipe", "aliases", "depth", "size", "fields"],
)
def test_a_recipe_takes_neither_time_nor_memory(content, message, tmp_path):
    file = tmp_path / "recipe.yaml"
    os.mkfifo(file) if content is None else file.write_text(content)
    with pytest.raises(RecipeError, match=message):
        Recipe.from_yaml(file)


def test_recipes_on_top_of_one_another_are_counted(tmp_path):
    for i in range(1500):
        (tmp_path / f"{i}.yaml").write_text(f"base: {i - 1}.yaml" if i else "rank: 2")
    assert Recipe.from_yaml(tmp_path / "15.yaml").rank == 2
    with pytest.raises(RecipeError, match=r"1499\.yaml: more than 16 recipes extend one another"):
        Recipe.from_yaml(tmp_path / "1499.yaml")


def test_a_recipe_from_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"rank: 7")))
    assert Recipe.from_yaml("-").rank == 7
