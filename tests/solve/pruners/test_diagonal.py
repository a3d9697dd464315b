"""Magnitude and Wanda are optimal for H = I and for a diagonal H: compared with a search over all supports."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Gram
from hasslefree.core.patterns import Row
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
