"""Principal component pursuit: its minimum by the optimality condition, and its cut by brute force."""

import pytest
import torch

import hasslefree
from hasslefree import PrincipalComponentPursuit, Row, SemiStructured, Unstructured
from hasslefree.core.low_rank import truncated_svd
from tests import oracles


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


@pytest.mark.parametrize(("method", "seed"), [("pcp", 0), ("pcp", 1), ("godec", 0)])
def test_what_is_sparse_plus_low_rank_is_found_as_it_is(method, seed):
    """arXiv 0912.3599, theorem 1.1 and table 1: rank 0.05·n and 5 % of the entries are recovered. Zhou & Tao 2011,
    section 4: GoDec converges from a good start.
    """
    low_rank, sparse = planted(80, 100, 4, 0.05, seed)
    pattern = Unstructured(int(sparse.count_nonzero()))
    result = hasslefree.decompose(low_rank + sparse, None, pattern, 4, method=method)
    assert torch.equal(result.sparse != 0, sparse != 0)
    torch.testing.assert_close(result.sparse, sparse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.low_rank.product(), low_rank, rtol=1e-4, atol=1e-4)
    assert result.relative_error < 1e-6


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
