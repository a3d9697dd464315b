"""S of `joint` on a grid: against the turns written out in float64 with systems solved row by row."""

import pytest
import torch

import hasslefree
from hasslefree import Gram, Grid, Joint, JointOnGrid, SemiStructured
from hasslefree.core.patterns import KnownSupport
from hasslefree.solve.methods import build_method
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from tests import oracles


@pytest.mark.parametrize("turns", [1, 3])
def test_the_turns_are_those_of_exact_steps(turns):
    """Oracle: on the support of joint, the normal equations of each row, the sweep, whose test has explicit inverses,
    and the low-rank part by the eigenvectors of T H Tᵀ."""
    weight, h = oracles.problem(12, 16, dtype=torch.float64)
    damped = Gram(h, 1).damped(0.01)
    grid = Grid(group=8)
    start = hasslefree.decompose(weight, Gram(h, 1), "2:4", 3, method=Joint(rounds=20))
    support, low_rank, losses = start.sparse != 0, start.low_rank.product(), []
    sweep = SparseGPT(grid=grid)
    for _ in range(turns):
        free = oracles.on_support(weight - low_rank, damped.matrix, support)
        sparse = sweep.prune(free, sweep.prepare(damped), KnownSupport(support)).sparse
        low_rank = oracles.best_low_rank(weight - sparse, damped.matrix, 3)
        losses.append(oracles.loss(weight - sparse - low_rank, damped.matrix) / oracles.loss(weight, damped.matrix))
    method = JointOnGrid(grid, rounds=20, turns=turns, passes=0, ranges=1)
    found = hasslefree.decompose(weight, Gram(h, 1), "2:4", 3, method=method)
    assert list(found.history) == pytest.approx(losses, rel=1e-4)
    assert torch.equal(found.quantised.values(), found.sparse)
    assert not found.sparse[~support].any()


@pytest.mark.parametrize("pattern", ["2:4", "2:8"])
def test_it_is_below_caldera_and_near_joint(pattern):
    for seed in range(4):
        weight, h = oracles.problem(48, 64, seed=seed)
        errors = {
            name: hasslefree.decompose(weight, Gram(h, 1), pattern, 6, method=build_method(name, **grid)).relative_error
            for name, grid in (("joint", {}), ("joint-grid", {}), ("caldera", {}))
        }
        assert errors["joint"] < errors["joint-grid"] < errors["caldera"]


def test_without_pruning_it_starts_as_caldera_does():
    """Oracle: the alternation of caldera, which ends with the fit of L, round by round."""
    weight, h = oracles.problem(24, 32, dtype=torch.float64)
    method = JointOnGrid(Grid(group=8), passes=0, ranges=1)
    found = hasslefree.decompose(weight, Gram(h, 1), "dense", 4, method=method)
    for turns in (1, 3):
        other = build_method("caldera", group_size=8, rounds=turns)
        last = hasslefree.decompose(weight, Gram(h, 1), "dense", 4, method=other).history
        assert found.history[turns - 1] == pytest.approx(last[-1], rel=1e-9)


def test_a_rank_of_nothing_and_a_support_of_its_own():
    weight, h = oracles.problem(12, 64)
    found = hasslefree.decompose(weight, Gram(h, 1), "2:4", 0, method=JointOnGrid(rounds=20))
    joint = hasslefree.decompose(weight, Gram(h, 1), "2:4", 0, method=Joint(rounds=20))
    assert not found.sparse[joint.sparse == 0].any()
    gptq = hasslefree.decompose(weight, Gram(h, 1), "2:4", 0, method="gptq")
    assert joint.relative_error < found.relative_error < gptq.relative_error


def test_a_known_support_is_cut_as_any_pattern():
    known = SemiStructured(2, 4).mask(oracles.problem(3, 16)[0].square())
    support = KnownSupport(known)
    assert support.kept((3, 16)) == 24
    assert torch.equal(support.restricted(slice(4, 8), 16).mask(torch.zeros(3, 4)), known[:, 4:8])
