import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import (
    AlternatingMinimization,
    Gram,
    Prune,
    Recipe,
    Refit,
    Row,
    SemiStructured,
    Structured,
    Unstructured,
)
from hasslefree.errors import BudgetError, GridError, RecipeError
from hasslefree.solve.methods import build_method
from hasslefree.solve.pruners import PRUNERS
from tests import oracles
from tests.suited import suited

PATTERNS = [SemiStructured(2, 4), SemiStructured(3, 8), Unstructured(60), Row(5), Structured(6)]


def prune(pruner, weight, h, pattern):
    return pruner.prune(weight, pruner.prepare(Gram(h, 1, oracles.mean_of(h))), pattern).sparse


FREE = [name for name, pruner in PRUNERS.items() if not pruner.grid]


@pytest.mark.parametrize("name", FREE)
@settings(max_examples=15)
@given(st.sampled_from(PATTERNS), st.sampled_from([0.0, 0.01, 0.5]), st.integers(0, 999))
def test_it_is_the_least_squares_on_the_pruner_s_support(name, pattern, damping, seed):
    """Oracle: the normal equations of every row in float64, with the damped H."""
    weight, h = oracles.problem(9, 16, seed=seed, dtype=torch.float64)
    pattern = suited(PRUNERS[name], pattern)
    support = prune(PRUNERS[name], weight, h, pattern) != 0
    damped = h + damping * h.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    expected = oracles.on_support(weight, damped, support)
    found = prune(Refit(PRUNERS[name], damping, tolerance=1e-10), weight, h, pattern)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found != 0, support)


@pytest.mark.parametrize("name", FREE)
def test_in_float32_its_loss_is_the_least_there_is(name):
    """Oracle: the loss of the normal equations in float64."""
    pattern = suited(PRUNERS[name], SemiStructured(2, 4), 48)
    for seed in range(4):
        weight, h = oracles.problem(32, 48, seed=seed)
        damped = Gram(h, 1).damped(0.01).matrix
        found = prune(Refit(PRUNERS[name]), weight, damped, pattern)
        best = oracles.loss(weight - oracles.on_support(weight, damped, found != 0), damped)
        assert oracles.loss(weight - found, damped) == pytest.approx(best, rel=1e-4)
        assert best <= oracles.loss(weight - prune(PRUNERS[name], weight, damped, pattern), damped) * (1 + 1e-5)


def test_it_ends_when_all_rows_rest_and_not_before():
    """The smaller the tolerance, the smaller what is left to win; and one step is not enough for any."""
    weight, h = oracles.problem(16, 64, dtype=torch.float64)
    pattern = SemiStructured(2, 4)
    losses = {}
    for tolerance in (1e-1, 1e-3, 1e-9):
        sparse = prune(Refit(PRUNERS["wanda"], 0.01, tolerance=tolerance), weight, h, pattern)
        losses[tolerance] = oracles.loss(weight - sparse, Gram(h, 1).damped(0.01).matrix)
    assert losses[1e-1] > losses[1e-3] > losses[1e-9]
    few = prune(Refit(PRUNERS["wanda"], 0.01, steps=1), weight, h, pattern)
    assert oracles.loss(weight - few, h) > losses[1e-9] * 1.01


def test_it_follows_the_pruner_of_a_method_by_name():
    """The method's damping is in its Gram already; where it has none, the refit brings its own."""
    assert build_method("sparsegpt", refit=True) == Prune(Refit(PRUNERS["sparsegpt"]))
    assert build_method("wanda", refit=True) == Prune(Refit(PRUNERS["wanda"], damping=0.01), damping=0.0)
    assert build_method("wanda", refit=True, damping=0.1) == Prune(Refit(PRUNERS["wanda"]), damping=0.1)
    both = build_method("hassle-free", pruner="alps", refit=True)
    assert both == AlternatingMinimization(pruner=Refit(PRUNERS["alps"]))
    with pytest.raises(
        BudgetError, match="method .joint. does not use refit: leave out refit, or use method hassle-free or"
    ):
        build_method("joint", refit=True)


def test_a_recipe_s_refit_reaches_its_method():
    assert Recipe(method="wanda", refit=True).resolve(with_text=False).solver == build_method("wanda", refit=True)
    with pytest.raises(RecipeError, match="does not use refit: leave out refit"):
        Recipe(method="joint", rank=1, refit=True).resolve(with_text=False)


def test_what_lies_on_a_grid_stays_there():
    with pytest.raises(GridError, match="this pruner quantises; leave out refit"):
        build_method("gptq", refit=True)
