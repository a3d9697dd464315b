import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree.errors import BudgetError
from hasslefree.levers.owl import outlier_share, owl_ratios
from tests import oracles


@settings(max_examples=30)
@given(st.integers(0, 999), st.sampled_from([1.0, 3.0, 5.0]), st.integers(1, 3))
def test_the_share_is_a_count_entry_by_entry(seed, multiple, count):
    """Oracle: arXiv 2310.05175, equation 1, with the norms of the inputs themselves."""
    layers, entries = [], []
    for k in range(count):
        weight, _ = oracles.problem(3 + k, 8, seed=seed + k)
        x = torch.randn(20, 8, generator=torch.Generator().manual_seed(seed + k)) * torch.arange(1, 9) ** 2
        layers.append((weight, (x.T @ x / 20).diagonal()))
        norms = [math.sqrt(sum(float(v) ** 2 for v in column)) for column in x.T]
        entries += [abs(float(weight[i, j])) * norms[j] for i in range(len(weight)) for j in range(8)]
    mean = sum(entries) / len(entries)
    assert outlier_share(layers, multiple) == sum(e > multiple * mean for e in entries) / len(entries)


shares = st.lists(st.floats(0, 0.2), min_size=1, max_size=12)


@given(shares, st.floats(0.2, 0.8), st.floats(0, 0.1), st.booleans(), st.integers(0, 99))
def test_the_average_is_kept_and_more_outliers_save_less(shares, ratio, spread, weighted, seed):
    """Oracle: the rule as the paper states it: a linear map onto [0, 2λ] of what is kept, shifted to the mean."""
    sizes = torch.randint(1, 9, (len(shares),), generator=torch.Generator().manual_seed(seed)).tolist()
    found = owl_ratios(shares, ratio, spread, sizes if weighted else None)
    weights = sizes if weighted else [1] * len(shares)
    assert sum(r * w for r, w in zip(found, weights, strict=True)) / sum(weights) == pytest.approx(ratio, abs=1e-9)
    for one, other in zip(shares, found, strict=True):
        assert all(mine >= other - 1e-12 for share, mine in zip(shares, found, strict=True) if share < one)
    if max(shares) > min(shares):
        kept = [2 * spread * (share - min(shares)) / (max(shares) - min(shares)) for share in shares]
        middle = sum(k * w for k, w in zip(kept, weights, strict=True)) / sum(weights)
        assert found == pytest.approx([1 - (k - middle + 1 - ratio) for k in kept], abs=1e-9)
    else:
        assert found == (ratio,) * len(shares)


@pytest.mark.parametrize(("ratio", "shares"), [(0.95, [0.0, 0.1, 0.1]), (0.02, [0.0, 0.0, 0.1]), (1.0, [0.1, 0.2])])
def test_what_cannot_be_saved_is_an_error_with_the_largest_spread(ratio, shares):
    """Oracle: that λ just works, and a little more does not."""
    with pytest.raises(BudgetError, match="or a λ of at most") as error:
        owl_ratios(shares, ratio, 0.2)
    largest = float(re.search(r"a λ of at most ([0-9.]+)", str(error.value))[1])
    assert all(-1e-9 <= r <= 1 for r in owl_ratios(shares, ratio, max(largest - 1e-3, 0)))
    with pytest.raises(BudgetError):
        owl_ratios(shares, ratio, largest + 2e-3)


def test_wrong_arguments():
    weight, h = oracles.problem(3, 4)
    with pytest.raises(BudgetError, match="at least one layer"):
        outlier_share([], 5.0)
    with pytest.raises(BudgetError, match="multiple must be above 0, got 0"):
        outlier_share([(weight, h.diagonal())], 0.0)
    with pytest.raises(BudgetError, match="sizes must have one entry for each of the 2 blocks, got 1"):
        owl_ratios([0.1, 0.2], 0.5, 0.1, [3])
    with pytest.raises(BudgetError, match="spread, .* must not be negative, got -0.1"):
        owl_ratios([0.1, 0.2], 0.5, -0.1)
    with pytest.raises(BudgetError, match="at least one block, got none"):
        owl_ratios([], 0.5)
