"""What every low-rank solver keeps to; and the closed forms reach the Eckart–Young bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Adam, Gram, LowRank, RandomizedSVD, Subspace
from hasslefree.solve.low_rank import LOW_RANK_SOLVERS
from tests import oracles

solvers = pytest.mark.parametrize("name", LOW_RANK_SOLVERS)
# Adam takes steps of a fixed size: neither the scale of W nor an exact answer can be asked of it.
closed = pytest.mark.parametrize("name", [name for name in LOW_RANK_SOLVERS if "adam" not in name])


def fit(solver, target, h, rank, start=None, round=0):
    start = start or LowRank.gaussian_start(target, rank, 0)
    return solver.fit(target, solver.prepare(Gram(h, 1)), start, round)


@solvers
@settings(max_examples=20)
@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_shapes_rank_and_inputs(name, out, width, data):
    solver = LOW_RANK_SOLVERS[name]
    rank = data.draw(st.integers(1, min(out, width)))
    target, h = oracles.problem(out, width, seed=out * width)
    before, h_before = target.clone(), h.clone()
    found = fit(solver, target, h, rank)
    assert (found.u.shape, found.v.shape) == ((out, rank), (rank, width))
    assert torch.isfinite(found.product()).all()
    assert torch.equal(target, before)
    assert torch.equal(h, h_before)
    assert torch.equal(found.product(), fit(solver, target, h, rank).product()), "not deterministic"


@closed
def test_equivariance_under_row_permutation_and_scale(name):
    solver = LOW_RANK_SOLVERS[name]
    target, h = oracles.problem(12, 20, dtype=torch.float64)
    order = torch.randperm(12)
    start = LowRank.gaussian_start(target, 12, 0)
    prepared = solver.prepare(Gram(h, 1))
    plain = solver.fit(target, prepared, start, 0).product()
    moved = solver.fit(4 * target[order], prepared, LowRank(start.u[order], start.v), 0).product()
    torch.testing.assert_close(moved, 4 * plain[order])


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


def test_adam_starts_as_an_adapter_of_peft():
    """Oracle: PEFT's adapter with the authors' alpha, whose scaling is shared out among its two factors."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=16, target_modules=["0"])
    layer = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(12, 7)), config).base_model.model[0]
    torch.manual_seed(5)
    layer.reset_lora_parameters("default", init_lora_weights=True)
    root = layer.scaling["default"] ** 0.5
    found = Adam().start(torch.zeros(7, 12), 3, seed=5)
    torch.testing.assert_close(found.v, root * layer.lora_A["default"].weight.detach(), rtol=1e-6, atol=0)
    assert torch.equal(found.u, torch.zeros(7, 3))
    assert found.v.any()


def test_adam_starts_at_a_gaussian_u_if_told_so():
    weight = torch.zeros(400, 2)
    found = Adam(adapter_start=False).start(weight, 100, seed=0)
    assert not found.v.any()
    assert torch.equal(found.u, LowRank.gaussian_start(weight, 100, 0).u)
    assert abs(found.u.std() - 1) < 0.02
