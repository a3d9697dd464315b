import pytest
import torch

from hasslefree import Gram
from hasslefree.core.patterns import Row, SemiStructured, Unstructured
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from tests import oracles


def run(weight, h, pattern, block=128):
    pruner = SparseGPT(block=block)
    return pruner.prune(weight, pruner.prepare(Gram(h, 1)), pattern).sparse


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (2, 8), (3, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sweep_is_that_of_explicit_inverses(n, m, dtype):
    weight, h = oracles.problem(5, 32, dtype=dtype)
    expected = oracles.obs_semi_structured(weight, h, n, m)
    found = run(weight, h, SemiStructured(n, m), block=16)
    assert torch.equal(found != 0, expected != 0)
    torch.testing.assert_close(
        found.double(), expected, **({} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4})
    )


@pytest.mark.parametrize("block", [8, 20, 64, 999])
def test_the_block_does_not_matter_where_the_choice_does_not_depend_on_it(block):
    """N:M is chosen group by group; the block only says when updates are applied."""
    weight, h = oracles.problem(5, 64, dtype=torch.float64)
    torch.testing.assert_close(run(weight, h, SemiStructured(2, 8), block), run(weight, h, SemiStructured(2, 8), 8))


@pytest.mark.parametrize("pattern", [Unstructured(37), Row(7)])
def test_the_shares_of_the_blocks_add_up(pattern):
    """Widths and counts that the blocks do not divide: 7 of 20 in blocks of 8, 8 and 4."""
    weight, h = oracles.problem(5, 20)
    pruner = SparseGPT(block=8)
    sparse = pruner.prune(weight, pruner.prepare(Gram(h, 1).damped(0.01)), pattern).sparse
    assert sparse.count_nonzero() == pattern.kept((5, 20))
