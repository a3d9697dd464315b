from pathlib import Path

import pytest

from hasslefree import AlternatingMinimization, Recipe
from hasslefree.errors import RecipeError
from hasslefree.low_rank_solvers import LOW_RANK_SOLVERS
from hasslefree.pruners import PRUNERS


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some words")
    return str(path)


def test_yaml_there_and_back(tmp_path, text):
    recipe = Recipe(pattern="3:8", ratio=0.5, calibration=text, leave_dense=("*.gate",), rounds=7, damping=0.02)
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    assert Recipe.from_yaml(tmp_path / "r.yaml") == recipe


def test_every_problem_is_reported_at_once(text):
    with pytest.raises(RecipeError) as caught:
        Recipe(
            pattern="5:4", rank=-1, method="hasslefree", samples=0, seqlen=1, damping=-1.0, sequential="x",
            dtype="int8", calibration="wikitext",
        ).check()  # fmt: skip
    message = str(caught.value)
    for part in ("5:4 is impossible", "rank must not", "unknown method 'hasslefree'", "samples must", "seqlen must",
                 "damping must", "sequential is", "dtype is one of", "Did you mean 'wikitext2'"):  # fmt: skip
        assert part in message


def test_names_and_types_of_yaml_are_checked_together(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("pattern: 2:4\nrnk: 3\nsamples: many\n")
    with pytest.raises(RecipeError) as caught:
        Recipe.from_yaml(path)
    message = str(caught.value)
    assert 'put it in quotes, such as "2:4"' in message
    assert "unknown field 'rnk'" in message
    assert "samples must be int, got 'many'" in message


@pytest.mark.parametrize(("content", "message"), [("- 1", "must hold fields"), ("a: [", "is not YAML")])
def test_files_that_are_no_recipes(tmp_path, content, message):
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(RecipeError, match=message):
        Recipe.from_yaml(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.from_yaml(tmp_path / "none.yaml")


def test_a_method_with_a_low_rank_part_needs_a_rank(text):
    with pytest.raises(RecipeError, match="joint needs a rank or a ratio"):
        Recipe(calibration=text).check()
    Recipe(calibration=text, rank=0).check()
    Recipe(calibration=text, method="wanda").check()


def test_the_recipes_that_ship_are_sound(monkeypatch):
    """Their texts are hub names, which are not looked up here."""
    files = list((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
    assert files
    for file in files:
        Recipe.from_yaml(file).check()


def test_a_pruner_alone_has_no_use_for_a_rank():
    with pytest.raises(RecipeError, match="Wanda alone has no low-rank part, got rank 4"):
        Recipe(method="wanda", rank=4).check(with_text=False)


def test_every_part_of_the_method_comes_from_the_recipe():
    recipe = Recipe(rank=2, method="oats", pruner="sparsegpt", low_rank="exact", rounds=7, damping=0.5)
    assert recipe.build_method() == AlternatingMinimization(
        PRUNERS["sparsegpt"], LOW_RANK_SOLVERS["exact"], rounds=7, damping=0.5, low_rank_first=True, keep_best=False
    )


def test_a_truth_value_is_no_number():
    with pytest.raises(RecipeError, match="rank must be int or nothing, got True"):
        Recipe.from_dict({"rank": True})


def test_figures_that_are_none(text):
    for field, value, message in [
        ("damping", float("nan"), "damping must be a number"),
        ("damping", float("inf"), "damping must be a number"),
        ("seed", -1, "seed must be between"),
        ("seed", 10**20, "seed must be between"),
    ]:
        with pytest.raises(RecipeError, match=message):
            Recipe(**{"rank": 1, "calibration": text, field: value}).check()


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"pattern: \xff\xfe")
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.from_yaml(tmp_path / "r.yaml")
