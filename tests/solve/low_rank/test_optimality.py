"""The closed forms reach the Eckart–Young bound, and nothing goes below it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.solve.low_rank import LOW_RANK_SOLVERS
from hasslefree.solve.low_rank.adam import Adam
from hasslefree.solve.low_rank.subspace import Subspace
from hasslefree.solve.low_rank.svd import RandomizedSVD
from tests import oracles


def fit(solver, target, h, rank, start=None, round=0):
    start = start or LowRank.gaussian_start(target, rank, torch.Generator().manual_seed(0))
    return solver.fit(target, solver.prepare(Gram(h, 1)), start, round)


@settings(max_examples=25)
@given(st.integers(2, 10), st.integers(2, 12), st.integers(0, 99), st.data())
def test_each_closed_form_reaches_the_bound_of_its_norm(out, width, seed, data):
    rank = data.draw(st.integers(1, min(out, width)))
    target, h = oracles.problem(out, width, seed=seed, dtype=torch.float64)
    norms = {"svd": torch.eye(width, dtype=torch.float64), "diagonal-svd": torch.diag(h.diagonal()), "exact": h}
    for name, norm in norms.items():
        residual = target - fit(LOW_RANK_SOLVERS[name], target, h, rank).product()
        bound = oracles.eckart_young_bound(target, norm, rank)
        scale = oracles.loss(target, norm)
        assert oracles.loss(residual, norm) == pytest.approx(bound, rel=1e-6, abs=1e-9 * scale), name


def test_subspace_iteration_tends_to_the_exact_solution_and_never_rises():
    target, h = oracles.problem(24, 32, dtype=torch.float64)
    bound = oracles.eckart_young_bound(target, h, 6)
    losses = [oracles.loss(target - fit(Subspace(first_steps=s), target, h, 6).product(), h) for s in (1, 2, 4, 8, 400)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == pytest.approx(bound, rel=1e-6)
    assert losses[0] > bound * 1.001, "the problem is too easy to tell steps apart"


def test_subspace_continues_from_the_round_before():
    """Rounds of one step each from a warm start are the steps of one long round."""
    target, h = oracles.problem(24, 32, dtype=torch.float64)
    warm = fit(Subspace(first_steps=3), target, h, 6)
    twice = fit(Subspace(steps=2), target, h, 6, start=warm, round=1).product()
    torch.testing.assert_close(twice, fit(Subspace(first_steps=5), target, h, 6).product())


def test_power_iterations_bring_the_randomised_svd_to_the_truncated_one():
    target, h = oracles.problem(40, 60, dtype=torch.float64)
    bound = oracles.eckart_young_bound(target, torch.eye(60), 5)
    identity = torch.eye(60)
    rough, fine = (
        oracles.loss(target - fit(RandomizedSVD(iterations=i, oversampling=2), target, h, 5).product(), identity)
        for i in (0, 30)
    )
    assert fine == pytest.approx(bound, rel=1e-6)
    assert rough > fine


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("round", [0, 7])
def test_adam_follows_autograd_on_the_written_out_objective(scaled, round):
    target, h = oracles.problem(7, 12, dtype=torch.float64)
    start = LowRank(torch.randn(7, 3, dtype=torch.float64), torch.randn(3, 12, dtype=torch.float64))
    scale = h.diagonal().sqrt() if scaled else torch.ones(12, dtype=torch.float64)
    expected = oracles.adam_by_autograd(target, h, start.u, start.v, 50, 1e-2 / (round + 11), scale)
    found = fit(Adam(scaled=scaled), target, h, 3, start=start, round=round).product()
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
