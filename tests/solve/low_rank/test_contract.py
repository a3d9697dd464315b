"""What every low-rank solver in the table keeps to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.solve.low_rank import LOW_RANK_SOLVERS
from tests import oracles

solvers = pytest.mark.parametrize("solver", LOW_RANK_SOLVERS.values(), ids=LOW_RANK_SOLVERS)
# Adam takes steps of a fixed size: neither the scale of W nor an exact answer can be asked of it.
closed = pytest.mark.parametrize(
    "solver",
    [s for name, s in LOW_RANK_SOLVERS.items() if "adam" not in name],
    ids=[name for name in LOW_RANK_SOLVERS if "adam" not in name],
)


def run(solver, target, h, rank, round=0):
    start = LowRank.gaussian_start(target, rank, torch.Generator().manual_seed(0))
    return solver.fit(target, solver.prepare(Gram(h, 1).damped(0.01)), start, round)


@solvers
@settings(max_examples=20)
@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_shapes_rank_and_inputs(solver, out, width, data):
    rank = data.draw(st.integers(1, min(out, width)))
    target, h = oracles.problem(out, width, seed=out * width)
    before, h_before = target.clone(), h.clone()
    found = run(solver, target, h, rank)
    assert (found.u.shape, found.v.shape) == ((out, rank), (rank, width))
    assert torch.isfinite(found.product()).all()
    assert torch.equal(target, before)
    assert torch.equal(h, h_before)
    assert torch.equal(found.product(), run(solver, target, h, rank).product()), "not deterministic"


@solvers
def test_the_target_is_closer_than_before(solver):
    target, h = oracles.problem(16, 24)
    target = target / 10
    found = run(solver, target, h, 8)
    assert oracles.loss(target - found.product(), h) < oracles.loss(target, h)


@closed
def test_a_target_of_the_rank_is_found(solver):
    u, v = torch.randn(12, 3, dtype=torch.float64), torch.randn(3, 20, dtype=torch.float64)
    _, h = oracles.problem(1, 20, dtype=torch.float64)
    torch.testing.assert_close(run(solver, u @ v, h, 3).product(), u @ v)


@closed
def test_equivariance_under_row_permutation_and_scale(solver):
    target, h = oracles.problem(12, 20, dtype=torch.float64)
    order = torch.randperm(12)
    start = LowRank.gaussian_start(target, 12, torch.Generator().manual_seed(0))
    prepared = solver.prepare(Gram(h, 1))
    plain = solver.fit(target, prepared, start, 0).product()
    moved = solver.fit(4 * target[order], prepared, LowRank(start.u[order], start.v), 0).product()
    torch.testing.assert_close(moved, 4 * plain[order])
