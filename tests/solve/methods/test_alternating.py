from dataclasses import dataclass
from typing import Any

import pytest
import torch

import hasslefree
from hasslefree import Adam, AlternatingMinimization, Gram, Grid
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import SemiStructured
from hasslefree.core.protocols import LowRankSolver
from hasslefree.errors import BudgetError, NonFiniteError, UnknownNameError
from hasslefree.solve.low_rank.svd import SVD, Exact
from hasslefree.solve.methods import METHODS, build_method
from hasslefree.solve.methods.weighted import Weighted
from hasslefree.solve.pruners.diagonal import Magnitude
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from tests import oracles


def solve(method, weight, h, rank=4, seed=0):
    return hasslefree.decompose(weight, Gram(h, 1), "2:4", rank, method=method, seed=seed)


def test_the_defaults_are_the_paper_s():
    method = METHODS["hassle-free"]
    assert (method.rounds, method.damping, method.keep_best) == (80, 0.01, True)
    assert (method.low_rank.steps, method.low_rank.learning_rate, method.low_rank.delay) == (50, 1e-2, 10)
    assert method.low_rank.scaled
    assert isinstance(method.pruner, SparseGPT)


def test_the_first_round_prunes_the_weight_itself():
    """L starts at 0 (arXiv 2502.00899, Algorithm 2): S of the first round is the pruner's answer for W."""
    weight, h = oracles.problem(12, 16)
    pruned = solve("sparsegpt", weight, h, rank=0)
    first = solve(build_method("hassle-free", rounds=1), weight, h)
    assert torch.equal(first.sparse, pruned.sparse)


def test_eora_is_one_exact_fit_of_what_pruning_left():
    """Oracle: the Eckart–Young bound of the residual in the damped norm."""
    weight, h = oracles.problem(12, 16, dtype=torch.float64)
    damped = Gram(h, 1).damped(0.01).matrix
    result = solve("eora", weight, h)
    pruned = solve("sparsegpt", weight, h, rank=0)
    bound = oracles.eckart_young_bound(weight - pruned.sparse, damped, 4)
    assert oracles.loss(weight - result.product(), damped) == pytest.approx(bound, rel=1e-6)


def test_oats_is_the_alternation_written_out():
    """Oracle: OATS in float64 from its definition: low-rank first, on W·D, then Wanda on the rest."""
    weight, h = oracles.problem(12, 16, dtype=torch.float64)
    d = h.diagonal().sqrt()
    sparse = torch.zeros_like(weight)
    for _ in range(80):
        u, s, vh = torch.linalg.svd((weight - sparse) * d)
        low_rank = (u[:, :4] * s[:4]) @ vh[:4] / d
        rest = (weight - low_rank).abs() * d
        kept = rest.reshape(12, 4, 4).argsort(-1, descending=True).argsort(-1) < 2
        sparse = (weight - low_rank) * kept.reshape(12, 16)
    torch.testing.assert_close(solve("oats", weight, h).product(), sparse + low_rank)


def test_more_rounds_are_better_and_the_paper_s_order_holds():
    """arXiv 2502.00899, figure 1: hassle-free ends below OATS; the exact step ends below Adam."""
    weight, h = oracles.problem(32, 48)
    errors = {
        name: solve(method, weight, h, rank=6).relative_error
        for name, method in {
            "oats": "oats",
            "adam": build_method("hassle-free"),
            "exact": build_method("hassle-free", low_rank="exact"),
            "exact, 5 rounds": build_method("hassle-free", low_rank="exact", rounds=5),
        }.items()
    }
    assert errors["exact"] < errors["adam"] < errors["oats"]
    assert errors["exact"] < errors["exact, 5 rounds"]


def test_only_the_start_is_random():
    weight, h = oracles.problem(12, 16)
    one, other = (solve(build_method("hassle-free", rounds=3), weight, h, seed=s) for s in (0, 1))
    assert not torch.equal(one.product(), other.product())
    assert torch.equal(solve("eora", weight, h, seed=0).product(), solve("eora", weight, h, seed=1).product())


def test_build_method_names_what_is_wrong():
    with pytest.raises(UnknownNameError, match="unknown method 'hasle-free'. Did you mean 'hassle-free'"):
        build_method("hasle-free")
    with pytest.raises(UnknownNameError, match="unknown pruner 'wandaa'. Did you mean 'wanda'"):
        build_method("hassle-free", pruner="wandaa")
    with pytest.raises(UnknownNameError, match="unknown low-rank solver 'x'. `hasslefree methods` lists"):
        build_method("hassle-free", low_rank="x")
    with pytest.raises(BudgetError, match="'wanda' does not use rounds and low_rank: .* use method hassle-free or"):
        build_method("wanda", low_rank="exact", rounds=3)


def test_the_best_round_may_be_an_early_one():
    """Oracle: the same alternation cut short at every length. Both halves are blind to H: it goes up again."""
    weight, h = oracles.problem(16, 24, seed=2, dtype=torch.float64)
    damped = Gram(h, 1).damped(0.01).matrix

    def after(rounds, keep_best):
        method = AlternatingMinimization(Magnitude(), SVD(), rounds=rounds, keep_best=keep_best)
        return hasslefree.decompose(weight, Gram(h, 1), "2:4", 4, method=method)

    losses = [oracles.loss(weight - after(t, False).product(), damped) for t in range(1, 13)]
    best = after(12, True)
    assert min(losses) < losses[-1] * 0.999, "the last round is the best: the problem cannot tell"
    assert oracles.loss(weight - best.product(), damped) == pytest.approx(min(losses), rel=1e-9)
    scale = oracles.loss(weight, damped)
    assert best.history == pytest.approx([found / scale for found in losses], rel=1e-9)


def test_what_is_defined_without_damping_has_none():
    """Wanda adds nothing to H."""
    row = torch.tensor([[10.0, 1.0, 1.0, 1.0]])
    h = torch.diag(torch.tensor([1e-4, 0.02, 1.0, 1.0]))
    # 10²·1e-4 = 0.01 < 0.02 as it is; damped by 0.01·mean(diag) ≈ 0.005 the first entry would be kept.
    sparse = hasslefree.decompose(row, Gram(h, 1), SemiStructured(3, 4), 0, method="wanda").sparse
    assert sparse.tolist() == [[0.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_hassle_free_is_never_worse_than_its_pruner(scale):
    """Adam's steps have a fixed size: from a gaussian u, where the inputs are tiny, its first fits are far worse than
    L = 0."""
    method = AlternatingMinimization(low_rank=Adam(adapter_start=False), rounds=5)
    weight, h = oracles.problem(32, 32)
    weight, h = weight / 50, h * scale**2 / h.diagonal().mean()
    damped = Gram(h, 1).damped(0.01).matrix
    alone, both = solve("sparsegpt", weight, h, rank=0), solve(method, weight, h)
    assert oracles.loss(weight - both.product(), damped) <= oracles.loss(weight - alone.product(), damped) * (1 + 1e-6)
    assert (max(both.history) > alone.history[0]) == (scale == 1e-3), "the scale does not show what it should"


@dataclass(frozen=True)
class Failing(LowRankSolver):
    """Finds the best L, but for one round, in which it finds something else."""

    value: Any
    round: int
    starts: LowRankSolver = Exact()

    def start(self, weight, rank, seed):
        return self.starts.start(weight, rank, seed)

    def prepare(self, gram):
        return Exact().prepare(gram)

    def fit(self, target, prepared, start, round):
        found = Exact().fit(target, prepared, start, round)
        return LowRank(found.u, found.v * self.value) if round == self.round else found


@dataclass(frozen=True)
class Staying(LowRankSolver):
    """Returns the L that it started with."""

    def start(self, weight, rank, seed):
        return LowRank(torch.full((len(weight), rank), 0.5), torch.full((rank, weight.shape[1]), float(seed)))

    def fit(self, target, prepared, start, round):
        return start


@pytest.mark.parametrize("weighted", [False, True])
def test_the_first_round_starts_where_the_solver_says(weighted):
    """Oracle: the pruner on W − L, with the L of the start, for which the weights of outputs are undone by hand."""
    weight, h = oracles.problem(12, 16)
    weights = torch.linspace(1, 2, 12) if weighted else torch.ones(12)
    root = weights.sqrt().unsqueeze(1)
    method = AlternatingMinimization(low_rank=Staying(), rounds=1, keep_best=False)
    found = hasslefree.decompose(
        weight, Gram(h, 99), "2:4", 3, method=Weighted(method, weights) if weighted else method, seed=2
    )
    start = torch.full((12, 16), 3 * 0.5 * 2.0)
    torch.testing.assert_close(found.low_rank.product(), start / root)
    pruned = solve("sparsegpt", weight * root - start, h, rank=0).sparse
    torch.testing.assert_close(found.sparse, pruned / root, rtol=1e-4, atol=1e-5)


def test_a_round_that_is_not_finite_ends_the_alternation():
    """Oracle: the same alternation, ended before that round."""
    weight, h = oracles.problem(12, 16)
    broken = AlternatingMinimization(low_rank=Failing(torch.nan, 3), rounds=6)
    found, expected = solve(broken, weight, h), solve(AlternatingMinimization(low_rank=Exact(), rounds=3), weight, h)
    assert torch.equal(found.product(), expected.product())
    assert found.history == expected.history
    assert (
        "NaN or Inf appeared in round 4, so the best earlier round is returned; raise the damping" in found.remarks[-1]
    )
    last = AlternatingMinimization(low_rank=Failing(torch.nan, 3), rounds=6, keep_best=False)
    with pytest.raises(NonFiniteError, match="NaN or Inf appeared in round 4; raise the damping"):
        solve(last, weight, h)


@pytest.mark.parametrize("starts", [Exact(), Adam()], ids=["v is zero", "u is zero"])
def test_where_the_pruner_alone_is_best_a_remark_says_that_the_rank_is_not_used(starts):
    weight, h = oracles.problem(12, 16)
    found = solve(AlternatingMinimization(low_rank=Failing(1e3, 0, starts), rounds=1), weight, h)
    assert torch.equal(found.sparse, solve("sparsegpt", weight, h, rank=0).sparse)
    assert not found.low_rank.product().any()
    assert found.remarks[-1] == "no round was better than the pruner alone: L is zero"


@pytest.mark.parametrize("method", ["loftq", "lq-lora"])
def test_quantised_alternations_are_those_of_their_papers(method):
    """Oracle: LoftQ (arXiv 2310.08659, algorithm 1) in float64, and the same on W·D, D² = diag H, for LQ-LoRA; the grid
    has an oracle of its own. For LQ-LoRA all rounds are compared, of which the best is kept."""
    weight, h = oracles.problem(12, 16, dtype=torch.float64)
    d = h.diagonal().sqrt() if method == "lq-lora" else torch.ones(16, dtype=torch.float64)
    low_rank, grid, errors = torch.zeros_like(weight), Grid(group=8), []
    for _ in range(METHODS[method].rounds):
        quantised = grid.scaling(weight - low_rank).nearest(weight - low_rank)
        u, s, vh = torch.linalg.svd((weight - quantised) * d)
        low_rank = (u[:, :4] * s[:4]) @ vh[:4] / d
        errors.append(oracles.loss(weight - quantised - low_rank, h) / oracles.loss(weight, h))
    found = decomposed_densely(build_method(method, group_size=8), weight, h)
    if method == "loftq":
        torch.testing.assert_close(found.product(), quantised + low_rank)
        assert METHODS["loftq"].rounds == 5
    assert list(found.history) == pytest.approx(errors, rel=0.02 if method == "lq-lora" else 1e-9)


def decomposed_densely(method, weight, h, rank=4):
    return hasslefree.decompose(weight, Gram(h, 1), "1:1", rank, method=method)


def test_the_last_fit_is_taken_where_it_is_better():
    """Oracle: the Eckart–Young bound of what S leaves, in the damped norm; and an alternation that it cannot help."""
    weight, h = oracles.problem(24, 32, dtype=torch.float64)
    damped = Gram(h, 1).damped(0.01).matrix
    found = decomposed_densely(build_method("caldera", group_size=8, rounds=4), weight, h)
    bound = oracles.eckart_young_bound(weight - found.sparse, damped, 4) / oracles.loss(weight, damped)
    assert found.history[-1] == pytest.approx(bound, rel=1e-9)
    assert len(found.history) == 5
    assert bound < min(found.history[:-1])
    worse = AlternatingMinimization(Magnitude(), Failing(7.0, 4), rounds=4, last_fit=True)
    without = AlternatingMinimization(Magnitude(), Failing(7.0, 4), rounds=4)
    assert torch.equal(solve(worse, weight, h).product(), solve(without, weight, h).product())
