"""SparseGPT, GPTQ, and pruning with rounding in one sweep: against explicit inverses in float64."""

import pytest
import torch

from hasslefree import Gram, Grid, Row, SemiStructured, SparseGPT, Unstructured
from tests import oracles

DENSE = SemiStructured(1, 1)


def run(pruner, weight, h, pattern=DENSE):
    return pruner.prune(weight, pruner.prepare(Gram(h, 1)), pattern).sparse


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("n", "m", "bits", "group", "block"),
    [
        *((1, 1, bits, group, block) for bits in (4, 8) for group in (8, 16, None) for block in (8, 128)),
        *((n, m, 4, group, 128) for n, m in ((2, 4), (3, 8), (1, 2)) for group in (8, 16)),
    ],
)
def test_one_sweep_is_that_of_explicit_inverses(n, m, bits, group, block, symmetric):
    weight, h = oracles.problem(5, 32, dtype=torch.float64)
    expected = oracles.obs_quantised(weight, h, bits, group or 32, symmetric, n, m)
    found = run(SparseGPT(block, Grid(bits, group, symmetric)), weight, h, SemiStructured(n, m))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_grid_of_whole_rows_is_fitted_to_what_pruning_alone_leaves():
    """Oracle: SparseGPT, whose test has one of its own; then the scale and the zero of each row."""
    weight, h = oracles.problem(5, 32, dtype=torch.float64)
    pruner = SparseGPT(grid=Grid(group=None))
    found = pruner.prune(weight, pruner.prepare(Gram(h, 1)), SemiStructured(2, 4))
    sparse, scaling = found.sparse, found.scaling
    alone = Grid(group=None).scaling(run(SparseGPT(), weight, h, SemiStructured(2, 4)))
    assert torch.equal(scaling.scale, alone.scale)
    assert torch.equal(scaling.zero, alone.zero)
    assert torch.equal(scaling.nearest(sparse), sparse)


@pytest.mark.parametrize("pattern", [Unstructured(70), Row(11)], ids=str)
def test_patterns_that_are_chosen_in_blocks(pattern):
    """Oracle: the support of the block without a grid, whose updates eight bits hardly change."""
    weight, h = oracles.problem(6, 64)
    sparse = run(SparseGPT(64, Grid(8, 16)), weight, h, pattern)
    alone = run(SparseGPT(64), weight, h, pattern)
    assert not sparse[alone == 0].any()
    assert oracles.loss(weight - sparse, h) < 1.05 * oracles.loss(weight - alone, h)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (2, 8), (3, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sweep_is_that_of_explicit_inverses(n, m, dtype):
    weight, h = oracles.problem(5, 32, dtype=dtype)
    expected = oracles.obs_semi_structured(weight, h, n, m)
    found = run(SparseGPT(16), weight, h, SemiStructured(n, m))
    assert torch.equal(found != 0, expected != 0)
    torch.testing.assert_close(
        found.double(), expected, **({} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4})
    )


@pytest.mark.parametrize("block", [8, 20, 64, 999])
def test_the_block_does_not_matter_where_the_choice_does_not_depend_on_it(block):
    """N:M is chosen group by group; the block only says when updates are applied."""
    weight, h = oracles.problem(5, 64, dtype=torch.float64)
    one, other = (run(SparseGPT(size), weight, h, SemiStructured(2, 8)) for size in (block, 8))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("pattern", [Unstructured(37), Row(7)])
def test_the_shares_of_the_blocks_add_up(pattern):
    """Widths and counts that the blocks do not divide: 7 of 20 in blocks of 8, 8 and 4."""
    weight, h = oracles.problem(5, 20)
    sparse = run(SparseGPT(8), weight, Gram(h, 1).damped(0.01).matrix, pattern)
    assert sparse.count_nonzero() == pattern.kept((5, 20))
