import pytest
import torch

import hasslefree
from hasslefree import Gram, PrincipalComponentPursuit, Row, SemiStructured, Unstructured
from hasslefree.core.low_rank import truncated_svd
from hasslefree.errors import BudgetError, ShapeError
from hasslefree.solve.decompose import DATA_FREE
from hasslefree.solve.methods import METHODS
from hasslefree.solve.methods.pursuit import shrunk_svd
from tests import oracles
from tests.suited import suited


def planted(out, width, rank, share, seed, size=1.0):
    """L₀ of a rank and S₀ with so many non-zeros of random signs, as in section 4.1 of arXiv 0912.3599."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    low_rank = normal(out, rank) @ normal(rank, width) / max(out, width) ** 0.5
    support = torch.rand(out, width, generator=random) < share
    return low_rank, support * normal(out, width).sign() * size


def subgradient_residual(weight, low_rank, balance):
    """How far 0 is from ∂(‖L‖_* + λ‖W − L‖₁), in words: is there a Λ in both λ·∂‖S‖₁ and ∂‖L‖_*?

    Λ = UVᵀ + N with UᵀN = 0, NV = 0, ‖N‖ ≤ 1, and Λ = λ·sign(S) on the support, |Λ| ≤ λ off it. Here: the distance
    between the nearest pair that alternating projections find.
    """
    u, s, vh = torch.linalg.svd(low_rank, full_matrices=False)
    rank = int((s > 1e-6 * s[0]).sum())
    u, vh = u[:, :rank], vh[:rank]
    sparse = weight - low_rank
    signs, on = balance * sparse.sign(), sparse.abs() > 1e-5 * weight.abs().max()
    found = torch.where(on, signs, 0.0)
    for _ in range(3000):
        free = found - u @ (u.T @ found)
        free = free - (free @ vh.T) @ vh
        a, b, c = torch.linalg.svd(free, full_matrices=False)
        nuclear = u @ vh + (a * b.clamp(max=1.0)) @ c
        found = torch.where(on, signs, nuclear.clamp(-balance, balance))
    return float((found - nuclear).norm() / found.norm())


@pytest.mark.parametrize("balance", [0.2, 0.25])
def test_the_pursuit_is_at_the_minimum_of_the_convex_problem(balance):
    """Oracle: the optimality condition, a common subgradient of both norms."""
    weight, _ = oracles.problem(16, 24, seed=1, dtype=torch.float64)
    found = PrincipalComponentPursuit(rounds=2000, growth=1.05, tolerance=1e-10).pursue(weight, balance)
    assert 0 < found.rank < 16
    assert subgradient_residual(weight, found.product(), balance) < 1e-3
    assert subgradient_residual(weight, truncated_svd(weight, found.rank).product(), balance) > 0.05, "cannot tell"


def test_the_shrunk_svd_is_the_proximal_map_of_the_nuclear_norm():
    """Oracle: X − L = τ·(a subgradient at L): UVᵀ on the space of L, and of norm at most τ off it."""
    matrix, _ = oracles.problem(9, 14, dtype=torch.float64)
    threshold = torch.linalg.svdvals(matrix)[4] * 0.99
    found = shrunk_svd(matrix, threshold)
    assert found.rank == 5
    u, _, vh = torch.linalg.svd(found.product())
    rest = matrix - found.product() - threshold * u[:, :5] @ vh[:5]
    assert (u[:, :5].T @ rest).norm() + (rest @ vh[:5].T).norm() < 1e-10
    assert torch.linalg.matrix_norm(rest, 2) <= threshold


@pytest.mark.parametrize("seed", range(4))
def test_what_is_sparse_plus_low_rank_is_found_as_it_is(seed):
    """arXiv 0912.3599, theorem 1.1 and table 1: rank 0.05·n and 5 % of the entries are recovered."""
    low_rank, sparse = planted(80, 100, 4, 0.05, seed)
    pattern = Unstructured(int(sparse.count_nonzero()))
    result = hasslefree.decompose(low_rank + sparse, None, pattern, 4, method="pcp")
    assert torch.equal(result.sparse != 0, sparse != 0)
    torch.testing.assert_close(result.sparse, sparse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.low_rank.product(), low_rank, rtol=1e-4, atol=1e-4)
    assert result.relative_error < 1e-10


def test_godec_finds_it_too_where_the_start_is_good():
    """Zhou & Tao 2011, section 4: local convergence."""
    low_rank, sparse = planted(80, 100, 4, 0.05, 0)
    pattern = Unstructured(int(sparse.count_nonzero()))
    result = hasslefree.decompose(low_rank + sparse, None, pattern, 4, method="godec")
    torch.testing.assert_close(result.low_rank.product(), low_rank, rtol=1e-4, atol=1e-4)


def test_the_search_ends_at_the_largest_balance_of_the_rank(monkeypatch):
    """Oracle: a pursuit whose rank is known for every λ."""
    weight, _ = oracles.problem(20, 24, dtype=torch.float64)
    tried = []

    def pursue(self, weight, balance):
        tried.append(balance)
        return truncated_svd(weight, round(10 * balance))

    monkeypatch.setattr(PrincipalComponentPursuit, "pursue", pursue)
    for rank in (1, 4, 9):
        tried.clear()
        hasslefree.decompose(weight, None, "2:4", rank, method=PrincipalComponentPursuit(searches=12))
        assert tried[0] == pytest.approx(24**-0.5)
        largest = (rank + 0.5) / 10
        assert tried[-1] == pytest.approx(largest, rel=0.01)


@pytest.mark.parametrize("pattern", [SemiStructured(2, 4), Row(9), Unstructured(200)], ids=str)
def test_the_cut_loses_nothing_to_plain_truncation(pattern):
    """Oracle: the largest entries, then the best low rank of the rest: the history has one error for every λ."""
    weight, _ = oracles.problem(20, 32, dtype=torch.float64)
    result = hasslefree.decompose(weight, None, pattern, 4, method="pcp")
    once = weight * pattern.mask(weight.square())
    plain = (weight - once - truncated_svd(weight - once, 4).product()).square().sum() / weight.square().sum()
    assert len(result.history) == 8
    assert result.relative_error == pytest.approx(min(result.history), rel=1e-6)
    assert result.relative_error < plain


def test_without_a_gram_the_norm_is_the_weight_s_own_and_a_remark_says_so():
    weight, h = oracles.problem(12, 16)
    for method in (name for name, built in METHODS.items() if not built.grid):
        rank = 0 if hasattr(METHODS[method], "pruner") and not hasattr(METHODS[method], "rounds") else 3
        free = hasslefree.decompose(weight, pattern=suited(method, "2:4"), rank=rank, method=method)
        assert free.remarks[0] == DATA_FREE
        expected = (weight - free.product()).square().sum() / weight.square().sum()
        assert free.relative_error == pytest.approx(float(expected), rel=1e-4)
    given = hasslefree.decompose(weight, Gram(torch.eye(16), 16), "2:4", 3)
    assert torch.equal(given.product(), hasslefree.decompose(weight, None, "2:4", 3).product())
    assert given.remarks == ()
    for method in ("godec", "pcp"):  # blind to H
        one, other = (hasslefree.decompose(weight, gram, "2:4", 3, method=method) for gram in (None, Gram(h, 64)))
        assert torch.equal(one.product(), other.product())
    for shape in ((), (3,), (2, 3, 4)):
        with pytest.raises(ShapeError, match="do not match"):
            hasslefree.decompose(torch.zeros(shape))


def test_hyper_parameters_that_cannot_be():
    for name, value, limit in (("searches", 0, "at least 1"), ("rounds", 0, "at least 1"), ("growth", 1.0, "above 1")):
        with pytest.raises(BudgetError, match=f"^{name} must be {limit}, got {value}"):
            PrincipalComponentPursuit(**{name: value})
