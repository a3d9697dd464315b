"""Magnitude, Wanda and rounding are optimal for H = I or a diagonal H: compared with a search over all supports."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Gram, Grid, RoundToNearest, Row
from hasslefree.solve.pruners import PRUNERS
from tests import oracles


@pytest.mark.parametrize("name", ["magnitude", "wanda"])
@settings(max_examples=30)
@given(st.integers(0, 9999), st.integers(0, 8))
def test_the_best_of_all_supports_of_a_row(name, seed, kept):
    row, h = oracles.problem(1, 8, seed=seed)
    weights = torch.ones(8) if name == "magnitude" else h.diagonal()
    pruner = PRUNERS[name]
    sparse = pruner.prune(row, pruner.prepare(Gram(h, 1)), Row(kept)).sparse
    found = float(((row - sparse).double().square() * weights.double()).sum())
    assert found == pytest.approx(oracles.best_support(row[0], weights, kept), rel=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@settings(max_examples=20)
@given(st.integers(0, 9999), st.integers(0, 8))
def test_it_is_the_best_on_the_support_and_the_grid(weighted, seed, kept):
    """Oracle: all supports of a row, and for each entry all values of the grid that was fitted; H diagonal, or I."""
    row, h = oracles.problem(1, 8, seed=seed)
    weights = h.diagonal().double() if weighted else torch.ones(8, dtype=torch.float64)
    pruner = RoundToNearest(Grid(group=8), weighted)
    found = pruner.prune(row, pruner.prepare(Gram(h, 1)), Row(kept))
    sparse, scaling = found.sparse, found.scaling
    values = (torch.arange(16) - scaling.zero[0, 0].double()) * scaling.scale[0, 0].double()
    on_grid = (row.double()[0] - values[:, None]).square().amin(0) * weights
    off = row.double()[0].square() * weights
    best = min(
        sum(float(on_grid[i] if i in support else off[i]) for i in range(8))
        for support in itertools.combinations(range(8), kept)
    )
    found = float(((row - sparse).double().square() * weights).sum())
    assert found == pytest.approx(best, rel=1e-5, abs=1e-9)
