"""The claims of docs/explanation/maths.md: which choices of H and of halves make two methods one."""

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
    LowRank,
    Magnitude,
    Row,
    SemiStructured,
    SparseGPT,
    Unstructured,
    Wanda,
)
from hasslefree.solve.methods import METHODS
from tests import oracles

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
    start = LowRank.gaussian_start(weight, 3, 0)
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
