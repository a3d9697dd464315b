"""GoDec, and methods without a Gram."""

import pytest
import torch

import hasslefree
from hasslefree import Gram, Unstructured
from hasslefree.errors import ShapeError
from hasslefree.solve.decompose import DATA_FREE
from hasslefree.solve.methods import METHODS
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


def test_godec_finds_what_is_sparse_plus_low_rank_where_the_start_is_good():
    """Zhou & Tao 2011, section 4: local convergence."""
    low_rank, sparse = planted(80, 100, 4, 0.05, 0)
    pattern = Unstructured(int(sparse.count_nonzero()))
    result = hasslefree.decompose(low_rank + sparse, None, pattern, 4, method="godec")
    torch.testing.assert_close(result.low_rank.product(), low_rank, rtol=1e-4, atol=1e-4)


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
