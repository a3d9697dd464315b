import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hasslefree import AlternatingMinimization, Grid, Prune, Recipe
from hasslefree.errors import RecipeError
from hasslefree.recipe.engines import ENGINES
from hasslefree.recipe.fields import NAMES
from hasslefree.recipe.resolve import with_defaults
from hasslefree.solve.low_rank import LOW_RANK_SOLVERS
from hasslefree.solve.methods import METHODS
from hasslefree.solve.pruners import PRUNERS


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("some words")
    return str(path)


def test_yaml_gives_the_fields(tmp_path, text):
    fields = {"pattern": "3:8", "ratio": 0.5, "calibration": text, "leave_dense": ["*.gate"], "rounds": 7, "damping": 1}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(fields))
    assert Recipe.from_yaml(tmp_path / "r.yaml") == Recipe(**fields | {"leave_dense": ("*.gate",), "damping": 1.0})


def refused(**fields):
    with pytest.raises(RecipeError) as caught:
        Recipe(**fields).resolve()
    return caught.value


def test_every_problem_of_a_field_is_reported_at_once():
    error = refused(
        rank=2.0, samples=0, seqlen=1, damping=float("inf"), sequential="x", dtype="int8", effort="much", seed=10**20,
        refit=1, pattern=3, leave_dense=3, rnk=3,
    )  # fmt: skip
    assert [problem.fields for problem in error.problems] == [
        (name,)
        for name in ("pattern", "rank", "effort", "damping", "refit", "samples", "seqlen", "sequential", "leave_dense",
                     "dtype", "seed", "rnk")
    ]  # fmt: skip
    for part in (
        "pattern must be a valid string, got 3",
        "rank must be a valid integer, got 2.0",
        "effort must be 'fast', 'balanced' or 'best', got 'much'",
        "damping must be a finite number, got inf",
        "samples must be at least 1, got 0",
        "unknown field 'rnk'. Did you mean 'rank'?",
    ):
        assert part in str(error)
    assert "damping must be at least 0" in str(refused(damping=-1.0))


def test_a_default_size_is_no_problem_of_the_recipe():
    assert str(refused(allocate="owl")).count("allocate owl") == 1


def test_every_problem_of_several_fields_is_reported_at_once():
    message = str(refused(pattern="5:4", rank=4, ratio=0.5, method="hasslefree", calibration="wikitext"))
    for part in ("5:4 is impossible", "give rank or ratio", "unknown method 'hasslefree'", "Did you mean 'wikitext2'"):
        assert part in message


def test_numbers_of_numpy_and_lists_are_taken():
    recipe = Recipe(rank=np.int64(3), ratio=np.float32(0.5), refit=np.True_, leave_dense=["a"])
    assert recipe == Recipe(rank=3, ratio=0.5, refit=True, leave_dense=("a",))
    assert (type(recipe.rank), type(recipe.ratio), type(recipe.refit)) == (int, float, bool)


def test_numbers_in_yaml_are_those_of_the_command_line(tmp_path):
    """YAML 1.1 reads 010 as eight, and 1e-2 as a word."""
    (tmp_path / "r.yaml").write_text("samples: 010\ndamping: 1e-2\nsize: 2000000\nleave_dense: '*.0.*'\n")
    found = Recipe.from_yaml(tmp_path / "r.yaml")
    assert found == Recipe(samples=10, damping=0.01, size="2000000", leave_dense=("*.0.*",))


def test_a_pattern_needs_no_quotes_in_yaml(tmp_path):
    """YAML 1.1 reads 2:4 as a number in base 60."""
    (tmp_path / "r.yaml").write_text("pattern: 2:4\nrank: 16\n")
    assert Recipe.from_yaml(tmp_path / "r.yaml") == Recipe(pattern="2:4", rank=16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- 1", "must contain fields"),
        ("a: [", "is not YAML"),
        ("refit: !!bool maybe", "is not YAML"),
        ("size: !!timestamp abc", "is not YAML"),
        ("damping: !!float ''", "is not YAML"),
        ("self: 1", "unknown field 'self'"),
        ("minutes: 1:30.5", "minutes must be a"),
    ],
)
def test_files_that_are_no_recipes(tmp_path, content, message):
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(RecipeError, match=message):
        Recipe.from_yaml(tmp_path / "r.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.from_yaml(tmp_path / "none.yaml")


def test_a_method_with_a_low_rank_part_needs_a_rank(text):
    with pytest.raises(RecipeError, match="joint needs a budget: give a rank such as rank=64"):
        Recipe(calibration=text, pattern="2:4").resolve()
    Recipe(calibration=text, rank=0).resolve()
    Recipe(calibration=text, method="wanda").resolve()


SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=[file.stem for file in SHIPPED])
def test_the_recipes_that_ship_are_what_their_names_say(file):
    """Texts are hub names: not looked up. Names such as joint-2-4-rank-64 and oats-unstructured-60."""
    recipe = Recipe.from_yaml(file)
    recipe.resolve()
    assert (recipe.calibration, recipe.samples, recipe.seqlen) == ("c4", 128, 2048)
    name = re.fullmatch(rf"{recipe.method}-(?:(\d)-(\d)|unstructured)(?:-rank)?(?:-ratio)?(?:-(\d+))?", file.stem)
    assert recipe.pattern == (f"{name[1]}:{name[2]}" if name[1] else "unstructured")
    budget = recipe.rank if "-rank-" in file.stem else None if recipe.ratio is None else round(100 * recipe.ratio)
    assert str(budget) == str(name[3])


def test_a_recipe_stands_on_another(tmp_path, text):
    """The nearest file wins, `null` takes a field back, a base is looked for beside the file that names it."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text(f'pattern: "2:8"\nrank: 3\nsamples: 7\ncalibration: {text}\n')
    (tmp_path / "sub" / "b.yaml").write_text("base: ../a.yaml\nrank: null\nratio: 0.5\n")
    (tmp_path / "c.yaml").write_text("samples: 9\nbase: sub/b.yaml\n")
    expected = Recipe(pattern="2:8", ratio=0.5, samples=9, calibration=text)
    assert Recipe.from_yaml(tmp_path / "c.yaml") == expected
    assert Recipe.from_yaml(tmp_path / "c.yaml", seed=4) == dataclasses.replace(expected, seed=4)
    (tmp_path / "d.yaml").write_text("base: c.yaml\n")
    assert Recipe.from_yaml(tmp_path / "d.yaml") == expected


def test_null_takes_back_any_field(tmp_path, text):
    (tmp_path / "a.yaml").write_text(
        f"leave_dense: '*.0.*'\nsamples: 64\nrefit: true\nseed: 3\ncheck: false\ncalibration: {text}\n"
    )
    (tmp_path / "b.yaml").write_text(
        "base: a.yaml\nleave_dense: null\nsamples: null\nrefit: null\nseed: null\ncheck: null\n"
    )
    assert Recipe.from_yaml(tmp_path / "b.yaml") == Recipe(calibration=text)
    (tmp_path / "c.yaml").write_text("base: a.yaml\nsample: null\n")
    with pytest.raises(RecipeError, match="Did you mean 'samples'"):
        Recipe.from_yaml(tmp_path / "c.yaml")


names = st.sampled_from(["rank", "samples", "seed", "seqlen"])


@given(st.lists(st.dictionaries(names, st.integers(2, 99)), min_size=1, max_size=5))
def test_a_chain_of_bases_is_a_chain_of_updates(tmp_path_factory, layers):
    """Oracle: dict.update."""
    folder, expected = tmp_path_factory.mktemp("chain"), {"pattern": "2:4", "rank": 1}
    (folder / "0.yaml").write_text(yaml.safe_dump(expected))
    for number, layer in enumerate(layers, 1):
        (folder / f"{number}.yaml").write_text(yaml.safe_dump({"base": f"{number - 1}.yaml", **layer}))
        expected |= layer
    assert Recipe.from_yaml(folder / f"{len(layers)}.yaml") == Recipe(**expected)


def problems(path, **changes):
    with pytest.raises(RecipeError) as caught:
        Recipe.from_yaml(path, **changes)
    return str(caught.value).replace(f"{path.parent}/", "").split("\n")


def test_every_problem_has_its_file(tmp_path):
    (tmp_path / "a.yaml").write_text("# a comment\npattern: '5:4'\n\nrnk: 3\nsamples: many\ndtype: int8\n")
    (tmp_path / "b.yaml").write_text(
        "base: a.yaml\nrank: -1\nratio: 0.5\nmethod: hasslefree\nseqlen: 1\ncalibration: wikitext\nleave_dense: 3\n"
    )
    expected = [
        "b.yaml: rank must be at least 0, got -1",
        "a.yaml: samples must be a valid integer, got 'many'",
        "b.yaml: seqlen must be at least 2, got 1",
        "b.yaml: leave_dense must be a valid tuple, got 3",
        "a.yaml: dtype must be 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'",
        "given in addition to b.yaml: seed must be at least 0, got -1",
        "a.yaml: unknown field 'rnk'. Did you mean 'rank'?",
        "a.yaml: pattern 5:4 is impossible",
        "b.yaml: unknown method 'hasslefree'",
        "b.yaml: unknown text",
    ]
    lines = problems(tmp_path / "b.yaml", seed=-1)
    assert len(lines) == len(expected)
    for start in expected:
        assert any(line.startswith(start) for line in lines), (start, lines)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": "base: b.yaml\nrank: 1\n"}, "a.yaml: the base b.yaml does not exist; the path is relative to a"),
        ({"a": "rank: 1\nbase: a.yaml\n"}, "a.yaml: these recipes are each other's base: a.yaml → a.yaml"),
        (
            {"a": "rank: 1\nbase: b.yaml\n", "b": "base: ./c.yaml", "c": "base: b.yaml"},
            "c.yaml: these recipes are each other's base: a.yaml → b.yaml → c.yaml → b.yaml",
        ),
        ({"a": "rank: 1\nbase: [b.yaml]\n"}, "a.yaml: base must be the path of a recipe, got ['b.yaml']"),
        ({"a": "rank: 1\nbase: b.yaml\n", "b": "- 1"}, "the recipe b.yaml must contain fields, such as"),
        ({"a": "rank: 1\nbase: b.yaml\n", "b": "rank: 1\nx: ["}, "b.yaml:2: the recipe is not YAML: "),
        ({"a": "rank: 1\nseqlen: 3\nrank: 2\n"}, "a.yaml:3: the recipe is not YAML: rank is given twice"),
        ({"a": "rank: 1\nseed: !!python/name:x y\n"}, "a.yaml:2: the recipe is not YAML: could not determine a constr"),
        ({"a": "rank: 1\nseed: 2026-13-45\n"}, "a.yaml: the recipe is not YAML: month must be"),
        ({"a": "method: oats\n"}, "a.yaml: method oats needs a budget"),
        ({"a": "pattern: row\nrank: four\n"}, "a.yaml: rank must be a valid integer, got 'four'"),
        ({"a": "pattern: 2:4\n"}, "a.yaml: method joint needs a budget: give a rank such as rank=64"),
        ({"a": "base: b.yaml\nrank: 1\n", "b": "method: oats\npruner: sparsgpt\n"}, "b.yaml: unknown pruner"),
    ],
)  # fmt: skip
def test_files_and_bases_that_are_wrong(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    (line,) = problems(tmp_path / "a.yaml")
    assert line.startswith(expected)


def test_a_circle_is_seen_by_any_name(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text("rank: 1\nbase: sub/../a.yaml\n")
    assert problems(tmp_path / "a.yaml") == ["a.yaml: these recipes are each other's base: a.yaml → sub/../a.yaml"]


def test_a_pruner_alone_has_no_use_for_a_rank():
    with pytest.raises(RecipeError, match="Wanda only prunes and has no low-rank part, so rank must be 0, got 4"):
        Recipe(method="wanda", rank=4).resolve(with_text=False)


def test_every_part_of_the_method_comes_from_the_recipe():
    recipe = Recipe(rank=2, method="oats", pruner="sparsegpt", low_rank="exact", rounds=7, damping=0.5)
    assert recipe.resolve(with_text=False).solver == AlternatingMinimization(
        PRUNERS["sparsegpt"], LOW_RANK_SOLVERS["exact"], rounds=7, damping=0.5, low_rank_first=True, keep_best=False
    )


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"pattern: \xff\xfe")
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.from_yaml(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rank": 4}, {"effort": "balanced", "allocate": "error", "match_predictions": 18_432, "rounds": 50}),
        ({"rank": 4, "effort": "best"}, {"allocate": "error", "match_predictions": 204_800, "rounds": 100}),
        ({"rank": 4, "effort": "fast"}, {"match_predictions": 0, "allocate": "uniform", "rounds": 20}),
        ({"rank": 4, "minutes": 30}, {"effort": "best", "match_predictions": 204_800}),
        # What is given wins over the effort.
        ({"rank": 4, "effort": "best", "match_predictions": 0, "rounds": 7},
         {"match_predictions": 0, "rounds": 7, "allocate": "error"}),
        # The methods of others are what was published, unless more is asked for; their rounds are their own.
        ({"rank": 4, "method": "oats"},
         {"effort": None, "rounds": None, "match_predictions": 0, "allocate": "uniform"}),
        ({"rank": 4, "method": "oats", "effort": "best"}, {"rounds": None, "allocate": "error"}),
        # A grid and factors in eight bits are trained too.
        ({"rank": 4, "method": "caldera", "effort": "best"}, {"match_predictions": 204_800}),
        ({"rank": 4, "factor_bits": 8, "effort": "best"}, {"match_predictions": 204_800}),
        ({"rank": 4, "method": "joint-grid"},
         {"effort": "balanced", "offset": True, "allocate": "uniform", "match_predictions": 49_152, "rounds": 20}),
        ({"rank": 4, "method": "joint-grid", "symmetric": True}, {"offset": None}),
        # A grid stands for a method that quantises, and so do a size and an engine, unless the pattern prunes.
        ({"bits": 4}, {"method": "joint-grid", "size": None, "pattern": "dense", "rank": 0}),
        ({"bits": 4, "size": "5bits"}, {"rank": None}),
        ({"bits": 4, "rank": 8}, {"method": "joint-grid", "size": None}),
        ({"bits": 6, "pattern": "2:4", "rank": 8}, {"method": "joint-grid", "size": None}),
        ({"size": "10bits", "pattern": "2:4"}, {"method": "joint", "factor_bits": 8}),
        ({"engine": "mlx"}, {"method": "joint-grid", "size": "5.2bits", "coding": None}),
        # Within a size, codes are entropy-coded, unless anything is said of the grid, of L or of a program.
        ({}, {"size": "5.2bits", "coding": "entropy", "scale_bits": None, "allocate": "error"}),
        ({"size": "6.5bits", "embedding_bits": 6}, {"coding": "entropy"}),
        ({"size": "7.5bits"}, {"coding": "entropy"}),
        ({"size": "7.6bits"}, {"coding": None, "scale_bits": 5}),
        ({"size": "100MB", "allocate": "uniform"}, {"coding": "entropy"}),
        ({"size": "5bits", "embedding_bits": 8}, {"coding": None}),
        ({"size": "5bits", "rank": 0}, {"coding": None}),
        ({"size": "5bits", "group_size": 32}, {"coding": None}),
        ({"size": "5bits", "symmetric": True}, {"coding": None}),
        ({"size": "5bits", "factor_bits": 8}, {"coding": None}),
        ({"size": "5bits", "method": "caldera"}, {"coding": None}),
        ({"size": "5bits", "coding": "fixed"}, {"scale_bits": 5}),
        ({"bits": 4, "rank": 0}, {"coding": None}),
        # Without a size, an engine fixes the bits: with rank 0 there is nothing to move.
        ({"method": "gptq", "engine": "mlx", "effort": "best"}, {"bits": 4, "allocate": "uniform"}),
        ({"pattern": "2:4", "size": "5bits"}, {"method": "joint"}),
        ({"rank": 4, "method": "joint-grid", "pattern": "2:4"}, {"offset": None}),
        # Without ranks, layers of N:M have nothing to give each other.
        ({"rank": 0}, {"allocate": "uniform", "match_predictions": 49_152, "rounds": 50}),
        ({"rank": 0, "effort": "best"}, {"allocate": "uniform", "match_predictions": 204_800}),
        ({"pattern": "unstructured", "sparsity": 0.5, "rank": 0, "effort": "best"}, {"allocate": "error"}),
    ],
)  # fmt: skip
def test_what_an_effort_stands_for(given, expected):
    found = with_defaults(Recipe(**given))
    assert {name: getattr(found, name) for name in expected} == expected
    assert with_defaults(found) == found
    resolved = Recipe(**given).resolve(with_text=False)
    assert {name: getattr(resolved, name) for name in NAMES} == vars(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 2, "factor_bits": 4}, "factor_bits must be 8, got 4; leave it out"),
        ({"rank": 0, "factor_bits": 8}, "with rank 0 there are none; give a rank"),
        ({"pattern": "unstructured", "ratio": 0.5, "rank_share": 0.0, "factor_bits": 8}, "with rank 0 there are none"),
        ({"method": "wanda", "factor_bits": 8}, "factors of L, and method wanda has no L: leave out factor_bits"),
        ({"method": "gptq", "factor_bits": 8}, "method gptq has no L"),
    ],
)
def test_what_does_not_go_with_factors_in_eight_bits(fields, message):
    with pytest.raises(RecipeError, match=message):
        Recipe(**fields).resolve(with_text=False)


def test_every_method_with_a_low_rank_part_takes_factors_in_eight_bits():
    for name, method in METHODS.items():
        if not isinstance(method, Prune):
            pattern = {"pattern": "structured", "sparsity": 0.5} if name == "losparse" else {}
            resolved = Recipe(method=name, rank=2, factor_bits=8, **pattern).resolve(with_text=False)
            assert resolved.factor_bits == 8


@pytest.mark.parametrize("field", ["effort", "match_predictions"])
def test_a_time_for_fine_tuning_is_rejected_where_there_is_none(field):
    given = {"effort": "fast"} if field == "effort" else {"match_predictions": 0}
    with pytest.raises(RecipeError, match=f"with this {field} there is none: leave out minutes or {field}"):
        Recipe(rank=2, minutes=30, **given).resolve(with_text=False)


QUANTISED = ["rtn", "gptq", "loftq", "lq-lora", "caldera", "joint-grid"]


def test_the_grid_comes_from_the_recipe_and_makes_dense_the_default():
    recipe = Recipe(method="caldera", rank=2, bits=8, group_size=32, symmetric=True)
    assert recipe.resolve(with_text=False).solver.pruner.grid == Grid(8, 32, True)
    assert Recipe(method="gptq", group_size=0).resolve(with_text=False).solver.pruner.grid == Grid(group=None)
    assert {name: with_defaults(Recipe(method=name)).pattern for name in QUANTISED} == dict.fromkeys(QUANTISED, "dense")
    assert with_defaults(Recipe(method="hassle-free", pruner="gptq")).pattern == "dense"
    assert {with_defaults(Recipe(method=name)).pattern for name in ("joint", "oats", "nonsense")} == {"2:4"}
    assert with_defaults(Recipe(method="gptq", pattern="2:4")).pattern == "2:4"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"method": "joint", "bits": 4, "rank": 2},
            "method 'joint' does not quantise S: leave out bits.*method loftq, lq-lora, caldera, joint-grid, rtn, gptq",
        ),
        ({"method": "wanda", "symmetric": False}, "method 'wanda' does not quantise S"),
        ({"method": "hassle-free", "group_size": 64, "rank": 2}, "does not quantise S.*with pruner='gptq'"),
        ({"method": "gptq", "bits": 7}, "bits must be one of 2, 3, 4, 5, 6, 8, got 7; use bits=6 or bits=8"),
        ({"method": "gptq", "group_size": -1}, "group_size must be at least 0, got -1"),
        (
            {"pattern": "dense", "rank": 2},
            "pattern dense keeps every entry.*method joint.*joint-grid, rtn, gptq",
        ),
        (
            {"method": "gptq", "rank": 2},
            "rank must be 0, got 2; use rank 0, or a method with a low-rank part, such as caldera",
        ),
        ({"method": "gptq", "pattern": "dense", "sparsity": 0.5}, "pattern dense already fixes the sparsity"),
        ({"method": "caldera"}, "method caldera needs a budget"),
    ],
)
def test_what_does_not_go_with_a_grid(fields, message):
    with pytest.raises(RecipeError, match=message):
        Recipe(**fields).resolve(with_text=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_chooses_a_grid_that_it_holds(engine):
    """The fields that are given stay; without them, all methods with a grid get one that the engine holds."""
    for method in QUANTISED:
        recipe = Recipe(method=method, engine=engine, rank=0 if method in ("rtn", "gptq") else 2)
        assert ENGINES[engine].holds(recipe.resolve(with_text=False).solver.grid)
        narrower = dataclasses.replace(recipe, group_size=32, symmetric=True).resolve(with_text=False).solver.grid
        assert (narrower.group, narrower.symmetric, narrower.bits) == (32, True, 4)
    grid = Recipe(method="joint-grid", rank=2, engine=engine).resolve(with_text=False).solver.grid
    assert (grid.group, grid.offset) == (32 if engine in ("llama.cpp", "transformers") else 64, engine != "vllm")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"method": "joint", "rank": 2},
            "mlx takes a quantised S, and method joint does not quantise it: use .*joint-grid",
        ),
        (
            {"method": "eora", "engine": "llama.cpp", "size": "5bits"},
            "llama.cpp takes a quantised S, and method eora does not quantise it: use .*joint-grid",
        ),
        (
            {"method": "joint-grid", "rank": 2, "pattern": "2:4"},
            "mlx stores every entry of S, so pattern 2:4",
        ),
        ({"method": "gptq", "group_size": 48}, "mlx cannot hold .* groups of 48.*use group_size=64"),
        (
            {"method": "gptq", "engine": "vllm", "offset": True},
            "vllm cannot hold .*mlx can.*for vllm, leave out offset=",
        ),
        ({"method": "gptq", "engine": "ollama"}, "engine must be"),
    ],
)
def test_what_an_engine_cannot_hold(fields, message):
    with pytest.raises(RecipeError, match=message):
        Recipe(**{"engine": "mlx"} | fields).resolve(with_text=False)
