"""The claims of docs/explanation/maths.md: which choices of H and of halves make two methods one."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasslefree
from hasslefree import (
    SVD,
    AlternatingMinimization,
    DiagonalSVD,
    Exact,
    Gram,
    Joint,
    LowRank,
    Magnitude,
    Row,
    SemiStructured,
    SparseGPT,
    Unstructured,
    Wanda,
)
from hasslefree.core.low_rank import truncated_svd
from hasslefree.solve.methods import METHODS
from hasslefree.solve.scaled import ScaledProblem
from tests import oracles

PATTERNS = [SemiStructured(2, 4), Row(7), Unstructured(90)]
# SparseGPT decides a block of columns with its share of the count: without groups, only one block is the whole.
patterns = st.sampled_from([SemiStructured(2, 4), SemiStructured(3, 8), Row(7), Unstructured(90)])


def alternate(pruner, solver, weight, gram, pattern, rounds, low_rank_first=True):
    method = AlternatingMinimization(pruner, solver, rounds, 0.0, low_rank_first, keep_best=False)
    return hasslefree.decompose(weight, gram, pattern, 3, method=method)


@settings(max_examples=20)
@given(patterns, st.integers(0, 999))
def test_for_a_diagonal_h_the_diagonal_halves_are_the_full_ones(pattern, seed):
    """Theorem 3.1. Oracle: SparseGPT and the whitened SVD, which know the whole of H."""
    weight, h = oracles.problem(12, 16, seed=seed, dtype=torch.float64)
    gram = Gram(torch.diag(h.diagonal()), 99)
    sparse, full = (p.prune(weight, p.prepare(gram), pattern).sparse for p in (Wanda(), SparseGPT()))
    torch.testing.assert_close(sparse, full)
    start = LowRank.gaussian_start(weight, 3, torch.Generator().manual_seed(0))
    low_rank, exact = (s.fit(weight, s.prepare(gram), start, 0).product() for s in (DiagonalSVD(), Exact()))
    torch.testing.assert_close(low_rank, exact)
    bound = oracles.eckart_young_bound(weight, gram.matrix, 3)
    assert oracles.loss(weight - low_rank, gram.matrix) == pytest.approx(bound, rel=1e-9)


@settings(max_examples=6)
@given(patterns, st.integers(0, 999))
def test_oats_is_the_alternation_of_full_halves_on_the_diagonal_of_h(pattern, seed):
    """The corollary: OATS on H is hassle-free, exactly solved and low-rank first, on diag H."""
    weight, h = oracles.problem(12, 16, seed=seed, dtype=torch.float64)
    oats = hasslefree.decompose(weight, Gram(h, 99), pattern, 3, method="oats")
    diagonal = Gram(torch.diag(h.diagonal()), 99)
    full = alternate(SparseGPT(), Exact(), weight, diagonal, pattern, METHODS["oats"].rounds)
    torch.testing.assert_close(oats.product(), full.product(), rtol=1e-7, atol=1e-8)
    halves = alternate(Wanda(), DiagonalSVD(), weight, Gram(h, 99), pattern, METHODS["oats"].rounds)
    assert torch.equal(oats.product(), halves.product())


@settings(max_examples=6)
@given(patterns, st.integers(0, 999))
def test_godec_is_oats_and_hassle_free_without_data(pattern, seed):
    weight, _ = oracles.problem(12, 16, seed=seed, dtype=torch.float64)
    godec = hasslefree.decompose(weight, None, pattern, 3, method="godec")
    oats = hasslefree.decompose(weight, None, pattern, 3, method="oats")
    torch.testing.assert_close(godec.product(), oats.product(), rtol=1e-7, atol=1e-8)
    assert torch.equal(godec.product(), alternate(Magnitude(), SVD(), weight, Gram.identity(16), pattern, 80).product())


@cache
def godec_fixed_point(seed, pattern, rank=3):
    """W, S and L where GoDec rests, by definition: S = P(W − L), L = C_r(W − S)."""
    weight, _ = oracles.problem(12, 16, seed=seed, dtype=torch.float64)
    sparse = torch.zeros_like(weight)
    for _ in range(5_000):
        u, s, vh = torch.linalg.svd(weight - sparse, full_matrices=False)
        low_rank = (u[:, :rank] * s[:rank]) @ vh[:rank]
        before, sparse = sparse, (weight - low_rank) * pattern.mask((weight - low_rank).square())
        if torch.dist(sparse, before) < 1e-13:
            break
    gap = float(s[rank] / s[rank - 1])
    return weight, sparse, low_rank, gap


def one_run(weight, sparse, low_rank, pattern, rho, rounds):
    """joint's rounds with H = I from S, L and the dual that belongs to them at ρ: Y = (W − S − L) / ρ."""
    joint = Joint(rounds=rounds, growth=1.5, precision="float32")
    power = round(torch.log(torch.tensor(rho, dtype=torch.float64)).item() / torch.log(torch.tensor(1.5)).item())
    problem = ScaledProblem(torch.ones(16, dtype=torch.float64), Gram.identity(16))
    state = sparse + (weight - sparse - low_rank) / 1.5**power
    start = truncated_svd(low_rank, 3)
    found = joint._search(weight, problem, pattern, start, power, state)
    return found.sparse, found.low_rank.product(), 1.5**power


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_joint_with_the_identity_rests_where_godec_rests_once_rho_is_large(pattern):
    """Oracle: GoDec by definition. With H = I and ρ ≥ max(1, q/(1 − q)), q = σ_(r+1)/σ_r of W − S, each of its fixed
    points is one of joint's: S and L stay as they are through all rounds, in which ρ grows further."""
    tried = 0
    for seed in range(4):
        weight, sparse, low_rank, gap = godec_fixed_point(seed, pattern)
        if gap > 0.97:  # no gap: C_r is not to be told
            continue
        tried += 1
        found, fitted, rho = one_run(weight, sparse, low_rank, pattern, 1.6 * max(1.0, gap / (1 - gap)), rounds=40)
        assert rho >= max(1.0, gap / (1 - gap))
        torch.testing.assert_close(found, sparse, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fitted, low_rank, rtol=1e-5, atol=1e-6)
    assert tried >= 2
