"""Budgets moved between the layers of a model."""

import dataclasses
from itertools import pairwise

import pytest
import torch

import hasslefree
from hasslefree import Gram, Recipe
from hasslefree.allocate.options import budget_options
from hasslefree.checkpoint.record import read_record
from hasslefree.core.patterns import SemiStructured, Unstructured
from hasslefree.errors import BudgetError, RecipeError
from hasslefree.models.blocks import find_blocks
from hasslefree.planning.plan import LayerPlan
from hasslefree.planning.selection import select
from hasslefree.planning.uniform import make_plan
from tests import oracles
from tests.oracles import MANY
from tests.tiny_models import build, segments, tensors_of

BY_ERROR = [
    Recipe(rank=8, rounds=3, allocate="error"),
    Recipe(pattern="unstructured", ratio=0.5, rank_share=0.4, rounds=3, allocate="error"),
    Recipe(rank=8, rounds=3, allocate="error", factor_bits=8),
]


def uniform(recipe):
    """Name → plan of the uniform budget."""
    blocks = find_blocks(build("llama"))
    resolved = recipe.resolve(with_text=False)
    plan = make_plan(select(blocks, resolved), resolved)
    return {f"{blocks.prefix(i)}.{name}": layer for i, plans in enumerate(plan.blocks) for name, layer in plans.items()}


@pytest.mark.parametrize("recipe", BY_ERROR, ids=["2:4", "unstructured", "2:4, int8 factors"])
def test_the_bytes_are_those_of_the_uniform_plan(recipe, tmp_path):
    """Oracle: the bytes of the tensors in both folders."""
    reports = {}
    for name in ("uniform", "error"):
        settings = dataclasses.replace(recipe, allocate=name)
        reports[name] = hasslefree.compress(build("llama"), tmp_path / name, settings, segments=segments())
    size = {name: sum(t.nbytes for t in tensors_of(tmp_path / name).values()) for name in reports}
    dearest = 4 * (32 + 48) if recipe.factor_bits is None else 32 + 48 + 4
    assert size["uniform"] - dearest < size["error"] <= size["uniform"]
    before = {layer.name: layer for layer in reports["uniform"].layers}
    moved = [layer.spec.rank - before[layer.name].spec.rank for layer in reports["error"].layers]
    assert min(moved) < 0 < max(moved)
    assert reports["uniform"].sensitivities is None
    for layer in reports["error"].layers:
        was = before[layer.name]
        assert was.spec.rank // 2 <= layer.spec.rank <= 2 * was.spec.rank
        assert was.spec.nonzeros // 2 <= layer.spec.nonzeros <= 2 * was.spec.nonzeros


@pytest.mark.parametrize("field", ["ratio", "sparsity"])
def test_owl_moves_the_ratio_between_blocks(field, tmp_path):
    """Oracle: OWL's formula for two blocks, one of which has the outliers."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[::7, ::5] *= 30
    budget = {"ratio": 0.5, "rank_share": 0.2} if field == "ratio" else {"sparsity": 0.5, "rank": 2}
    recipe = Recipe(pattern="unstructured", method="eora", allocate="owl", **budget)
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    for layer in report.layers:
        saved = 0.58 if ".0." in layer.name else 0.42
        expected = dataclasses.replace(recipe.resolve(with_text=False).budget, **{field: saved})
        pattern, rank = expected.resolve(*layer.spec.shape)
        assert layer.spec.rank == rank
        assert layer.spec.nonzeros == pytest.approx(pattern.kept(layer.spec.shape), abs=1)


def test_no_layer_grows_beyond_the_dense_one(tmp_path):
    """k_proj and v_proj, 8×32 at 2:4, take 544 bytes for S and 160 for a rank, of 1,024: there is room for three."""
    model = build("llama", num_key_value_heads=1)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 10  # others that matter have no such bound
    recipe = dataclasses.replace(BY_ERROR[0], rank=2)
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    assert max(layer.spec.rank for layer in report.layers if layer.spec.shape[0] == 8) == 3
    assert max(layer.spec.rank for layer in report.layers) == 4
    assert all(layer.bytes <= layer.dense_bytes for layer in report.layers)


@pytest.mark.parametrize("recipe", BY_ERROR[:2], ids=["2:4", "unstructured"])
def test_a_layer_with_nothing_to_lose_keeps_the_least(recipe, tmp_path):
    """Its weight is sparser than any pattern asks for."""
    model = build("llama")
    name = "model.layers.1.mlp.up_proj"
    with torch.no_grad():
        weight = model.get_submodule(name).weight
        weight *= SemiStructured(1, 8).mask(weight.square())
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    ranks = {layer.name: layer.spec.rank for layer in report.layers}
    plans = uniform(recipe)
    assert ranks[name] == plans[name].rank // 2
    assert sum(ranks[other] > plan.rank for other, plan in plans.items()) > 3
    assert list(report.sensitivities) == [layer.name for layer in report.layers]
    assert [layer for layer, value in report.sensitivities.items() if value == 0] == [name]
    assert read_record(tmp_path / "out").sensitivities == report.sensitivities


def test_a_model_that_is_pruned_already_stays_as_it_is(tmp_path):
    """Oracle: W. Every layer has as many zeros as are asked for."""
    model = build("llama")
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight *= Unstructured(module.weight.numel() // 2).mask(module.weight.square())
    recipe = Recipe(pattern="unstructured", sparsity=0.5, rank=2, rounds=3, allocate="error")
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    assert max(layer.relative_error for layer in report.layers) < 1e-9


@pytest.mark.parametrize("recipe", BY_ERROR[:2], ids=["2:4", "unstructured"])
def test_what_does_not_reach_the_output_of_the_block_counts_for_nothing(recipe, tmp_path):
    """Behind a down_proj of zeros, errors of gate_proj and up_proj are lost, however large they are."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    found = {layer.name: layer for layer in report.layers}
    for name in ("gate_proj", "up_proj"):
        layer, plan = found[f"model.layers.1.mlp.{name}"], uniform(recipe)[f"model.layers.1.mlp.{name}"]
        assert layer.relative_error > 0.01
        assert (layer.spec.rank, layer.spec.nonzeros <= plan.nonzeros) == (plan.rank // 2, True)


@pytest.mark.parametrize("pattern", [SemiStructured(2, 4), Unstructured(200)])
def test_what_a_step_would_undo(pattern):
    """Oracle: shares of the squared singular values of R H^½, the correlations of H shrunk, and of the scores that were
    removed, in float64."""
    weight, h = (part.double() for part in oracles.problem(24, 32))
    plan = LayerPlan.of((24, 32), pattern, 2, torch.float32)
    sparse = weight * pattern.mask(weight.square())
    gram = Gram(h.float(), 50)
    options = budget_options(weight.float(), sparse.float(), gram, plan)
    shrunk = gram.shrunk().matrix.double()
    values = torch.linalg.svdvals((weight - sparse) @ torch.linalg.cholesky(shrunk)).square()
    ranks = options.ladders["rank"]
    torch.testing.assert_close(ranks.gains, (values / values.sum())[1:4], rtol=1e-4, atol=1e-8)
    assert ranks.cost == 4 * (24 + 32)
    steps = {"rank": 3, "nonzeros": 5}
    if isinstance(pattern, Unstructured):
        scores = (weight.square() * h.diagonal()).flatten().sort(descending=True).values
        nonzeros = options.ladders["nonzeros"]
        torch.testing.assert_close(nonzeros.gains, (scores / scores[200:].sum())[100:400], rtol=1e-4, atol=1e-8)
        assert nonzeros.cost == 4
        assert options.plan(steps).nonzeros == 105
    assert options.plan(steps).rank == 4
    # The uniform plan without its L loses all; its own rank undoes the two largest values.
    assert options.loss(plan) == pytest.approx(float(1 - (values / values.sum())[:2].sum()), rel=1e-4)


def test_a_step_costs_what_it_adds_to_the_bytes():
    """Oracle: the bytes of the plans. The scales of u are in the first rank, which is therefore not given up."""
    weight, h = oracles.problem(24, 32)
    sparse = weight * SemiStructured(2, 4).mask(weight.square())
    for rank in (0, 1, 2, 5):
        plan = LayerPlan.of((24, 32), SemiStructured(2, 4), rank, torch.bfloat16, factor_bits=8)
        options = budget_options(weight.bfloat16(), sparse, Gram(h, MANY), plan)
        assert options.plan({"rank": 0}).rank == {0: 0, 1: 1, 2: 1, 5: 2}[rank]
        steps = [options.plan({"rank": step}).size for step in range(len(options.ladders["rank"].gains) + 1)]
        assert [later - one for one, later in pairwise(steps)] == [24 + 32 + 2] * (len(steps) - 1)
        assert options.plan({"rank": 0}).factor_bits == (8 if rank else None)


def test_factors_in_eight_bits_where_the_ratio_leaves_no_rank_are_refused():
    assert {layer.rank for layer in uniform(Recipe(ratio=0.5)).values()} == {0}
    with pytest.raises(BudgetError, match="with rank 0 there are none; give a rank"):
        uniform(Recipe(ratio=0.5, factor_bits=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allocate": "fair"}, "allocate must be 'uniform', 'owl' or 'error', got 'fair'"),
        ({"allocate": "owl"}, "allocate owl distributes a ratio or a sparsity.*give ratio"),
        ({"allocate": "error", "rank": 0}, "none to move \\(pattern 2:4\\): give a rank"),
    ],
)
def test_wrong_allocations(changes, message):
    with pytest.raises(RecipeError, match=message):
        Recipe(**{"rank": 4} | changes).resolve(with_text=False)
