"""Every method of the benchmark of single layers runs, and counts what it took."""

import pytest
from harness.layers import CURVES, ROOMS, possible, run
from harness.problems import BUDGETS, synthetic_problems

import hasslefree

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def problem():
    return next(iter(synthetic_problems([(32, 64)], BUDGETS[:1])))


@pytest.mark.parametrize("name", CURVES)
def test_a_method_runs_for_as_many_rounds_as_asked(problem, name):
    fewest = CURVES[name][0]
    row = run(problem, name, fewest, seed=0, clock="cpu")
    assert row["rounds"] == fewest
    assert 0 < row["relative_error"] < 1


@pytest.mark.parametrize("name", ROOMS)
def test_a_system_of_another_budget_runs(problem, name):
    assert possible(problem, name)
    assert 0 < run(problem, name, None, seed=0, clock="wall")["relative_error"] < 1


def test_the_error_is_that_of_the_method_alone(problem):
    """Oracle: the library's own call, without the count of its rounds."""
    alone = hasslefree.decompose(problem.weight, problem.gram, problem.pattern, problem.rank, method="3basil", seed=0)
    assert run(problem, "3basil", 2000, seed=0, clock="cpu")["relative_error"] == alone.relative_error
