"""S of `joint` on a grid: against the turns written out in float64 with systems solved row by row."""

import pytest
import torch

import hasslefree
from hasslefree import Gram, Grid, Joint, JointOnGrid, SemiStructured
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import KnownSupport
from hasslefree.solve.grid_descent import descend
from hasslefree.solve.methods import build_method
from hasslefree.solve.methods.joint_on_grid import Prepared, fit_exactly
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from tests import oracles
from tests.oracles import MANY


def spared(residual, h, rank, left):
    """H⊥ by its definition: C (I − (1 − left) V Vᵀ)² Cᵀ, V the leading right singular vectors of a residual times C."""
    factor = torch.linalg.cholesky(h)
    directions = torch.linalg.svd(residual @ factor).Vh[:rank]
    half = factor @ (torch.eye(len(h), dtype=h.dtype) - (1 - left) * directions.T @ directions)
    return half @ half.T


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("left", [1.0, 0.1])
def test_the_turns_are_those_of_exact_steps(turns, left):
    """Oracle: on the support of joint, the normal equations of each row, the sweep, whose test has explicit inverses,
    and the low-rank part by the eigenvectors of T H Tᵀ. The norm of S is explicit."""
    weight, h = oracles.problem(12, 16, dtype=torch.float64)
    damped = Gram(h, MANY).damped(0.01)
    grid = Grid(group=8)
    start = hasslefree.decompose(weight, Gram(h, MANY), "2:4", 3, method=Joint(rounds=20))
    support, low_rank, losses = start.sparse != 0, start.low_rank.product(), []
    sweep = SparseGPT(grid=grid)
    for _ in range(turns):
        norm = spared(low_rank, damped.matrix, 3, left)
        free = oracles.on_support(weight - low_rank, norm, support)
        sparse = sweep.prune(free, sweep.prepare(Gram(norm, MANY)), KnownSupport(support)).sparse
        low_rank = oracles.best_low_rank(weight - sparse, damped.matrix, 3)
        losses.append(oracles.loss(weight - sparse - low_rank, damped.matrix) / oracles.loss(weight, damped.matrix))
    method = JointOnGrid(grid, rounds=20, turns=turns, passes=0, ranges=1, left=left)
    found = hasslefree.decompose(weight, Gram(h, MANY), "2:4", 3, method=method)
    assert list(found.history) == pytest.approx(losses, rel=1e-4)
    assert torch.equal(found.quantised.values(), found.sparse)
    assert not found.sparse[~support].any()


@pytest.mark.parametrize("pattern", ["2:4", "2:8"])
def test_it_is_below_caldera_and_near_joint(pattern):
    for seed in range(4):
        weight, h = oracles.problem(48, 64, seed=seed)
        errors = {
            name: hasslefree.decompose(
                weight, Gram(h, MANY), pattern, 6, method=build_method(name, **grid)
            ).relative_error
            for name, grid in (("joint", {}), ("joint-grid", {}), ("caldera", {}))
        }
        assert errors["joint"] < errors["joint-grid"] < errors["caldera"]


def test_without_pruning_it_starts_as_caldera_does():
    """Oracle: the alternation of caldera, which ends with the fit of L, round by round."""
    weight, h = oracles.problem(24, 32, dtype=torch.float64)
    method = JointOnGrid(Grid(group=8), passes=0, ranges=1, left=1)
    found = hasslefree.decompose(weight, Gram(h, MANY), "dense", 4, method=method)
    for turns in (1, 3):
        other = build_method("caldera", group_size=8, rounds=turns)
        last = hasslefree.decompose(weight, Gram(h, MANY), "dense", 4, method=other).history
        assert found.history[turns - 1] == pytest.approx(last[-1], rel=1e-9)


def test_the_turns_spare_what_the_residual_before_lets_l_repair():
    """Oracle: the turns with V from the SVD of the residual of the turn before, of W at first."""
    weight, h = oracles.problem(24, 32, dtype=torch.float64)
    damped = Gram(h, MANY).damped(0.01).matrix
    everything = torch.ones_like(weight, dtype=torch.bool)
    sweep, residual, losses = SparseGPT(grid=Grid(group=8), ranges=3), weight, []
    for _ in range(3):
        norm = spared(residual, damped, 4, 0.2)
        target = weight - oracles.best_low_rank(residual, damped, 4)
        swept = sweep.prune(target, sweep.prepare(Gram(norm, MANY)), KnownSupport(everything))
        residual = weight - descend(target, swept, norm, everything, 2).sparse
        rest = residual - oracles.best_low_rank(residual, damped, 4)
        losses.append(oracles.loss(rest, damped) / oracles.loss(weight, damped))
    method = JointOnGrid(Grid(group=8), turns=3, passes=2, ranges=3, left=0.2)
    found = hasslefree.decompose(weight, Gram(h, MANY), "dense", 4, method=method)
    assert list(found.history) == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("left", [0.5, 0.1, 0.01])
def test_the_norm_counts_what_l_cannot_repair(left):
    """Oracle: the loss of the residual with and without its best low-rank part, by eigenvectors: of the difference,
    the share left² counts."""
    residual, h = oracles.problem(24, 32, dtype=torch.float64)
    prepared = JointOnGrid(damping=0.01).prepare(Gram(h, MANY))
    low_rank = fit_exactly(residual, prepared, LowRank(residual[:, :5], residual[:5]))
    norm = prepared.norm(low_rank, left)
    damped = prepared.gram.matrix
    everything = oracles.loss(residual, damped)
    rest = oracles.loss(residual - oracles.best_low_rank(residual, damped, 5), damped)
    assert oracles.loss(residual, norm.matrix) == pytest.approx(rest + left**2 * (everything - rest), rel=1e-9)
    torch.testing.assert_close(norm.for_sweep.T @ norm.for_sweep @ norm.matrix, torch.eye(32, dtype=torch.float64))


def test_the_norm_holds_in_float32_with_fewer_tokens_than_inputs_and_an_outlier():
    """Oracle: H⊥ by its definition in float64, in its own norm."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 200, generator=generator)
    x[:, 7] *= 100
    prepared = JointOnGrid().prepare(Gram.from_activations(x))
    residual = torch.randn(80, 200, generator=generator)
    norm = prepared.norm(fit_exactly(residual, prepared, LowRank(residual[:, :16], residual[:16])), 0.1)
    expected = spared(residual.double(), prepared.gram.matrix.double(), 16, 0.1)
    white = torch.linalg.inv(torch.linalg.cholesky(expected))
    for found in (norm.matrix.double(), torch.linalg.inv(norm.for_sweep.double().T @ norm.for_sweep.double())):
        torch.testing.assert_close(white @ found @ white.T, torch.eye(200).double(), rtol=0, atol=0.01)


@pytest.mark.parametrize("grid", [Grid(4, 16), Grid.entropy_coded(3.0)])
@pytest.mark.parametrize(("tokens", "most"), [(32, 0.6), (64, 0.75), (200, 1.0)])
def test_of_few_tokens_it_trusts_weak_correlations_less(grid, tokens, most, monkeypatch):
    """Oracle: the second moment from which the inputs are drawn, one by one, which no method sees."""
    monkeypatch.setattr("hasslefree.core.shrinkage.TOKENS_A_DRAW", 1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        mixed = torch.randn(200, 64, dtype=torch.float64, generator=generator)
        h = mixed.T @ mixed / 200
        weight = torch.randn(32, 64, dtype=torch.float64, generator=generator)
        draws = torch.randn(tokens, 64, dtype=torch.float64, generator=generator)
        gram = Gram.from_activations(draws @ torch.linalg.cholesky(h).T)
        losses = []
        for given in (gram, Gram(gram.matrix, MANY)):
            found = hasslefree.decompose(weight, given, "dense", 0, method=JointOnGrid(grid))
            losses.append(oracles.loss(weight - found.sparse, h))
        assert losses[0] < most * losses[1], seed


@pytest.mark.parametrize(("pattern", "bits"), [("dense", 3), ("dense", 4), ("2:4", 4)])
def test_sparing_what_l_repairs_lowers_the_error(pattern, bits):
    """Oracle: left=1, the turns in the norm of H, which are those of exact steps above."""
    for seed in range(4):
        weight, h = oracles.problem(48, 64, seed=seed)
        errors = {
            left: hasslefree.decompose(
                weight, Gram(h, MANY), pattern, 6, method=JointOnGrid(Grid(bits, 16), rounds=20, left=left)
            ).relative_error
            for left in (1.0, 0.1)
        }
        assert errors[0.1] < errors[1.0]


def test_a_rank_of_nothing_and_a_support_of_its_own():
    weight, h = oracles.problem(12, 64)
    found = hasslefree.decompose(weight, Gram(h, MANY), "2:4", 0, method=JointOnGrid(rounds=20))
    joint = hasslefree.decompose(weight, Gram(h, MANY), "2:4", 0, method=Joint(rounds=20))
    assert not found.sparse[joint.sparse == 0].any()
    gptq = hasslefree.decompose(weight, Gram(h, MANY), "2:4", 0, method="gptq")
    assert joint.relative_error < found.relative_error < gptq.relative_error


def test_a_known_support_is_cut_as_any_pattern():
    known = SemiStructured(2, 4).mask(oracles.problem(3, 16)[0].square())
    support = KnownSupport(known)
    assert support.kept((3, 16)) == 24
    assert torch.equal(support.restricted(slice(4, 8), 16).mask(torch.zeros(3, 4)), known[:, 4:8])


@pytest.mark.parametrize(
    ("pattern", "rank", "needed"),
    [("dense", 0, {"for_sweep"}), ("dense", 4, {"for_sweep", "for_fit"}), ("2:4", 0, {"for_sweep", "for_joint"})],
)
def test_what_is_not_used_is_not_computed(pattern, rank, needed, monkeypatch):
    """The support of `Joint` and the exact fit take as long to prepare as the sweep."""
    computed = set()
    for name in ("for_joint", "for_fit", "for_sweep"):
        compute = getattr(Prepared, name).func

        def watched(prepared, name=name, compute=compute):
            computed.add(name)
            return compute(prepared)

        monkeypatch.setattr(Prepared, name, property(watched))
    weight, h = oracles.problem(16, 32)
    hasslefree.decompose(weight, Gram(h, MANY), pattern, rank, method=JointOnGrid(Grid(4, 32)))
    assert computed == needed
