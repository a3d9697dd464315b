import pytest
import torch

import hasslefree
from hasslefree import Gram, SemiStructured, ThreeBlock, Unstructured
from hasslefree.solve.admm import SupportPenalty
from hasslefree.solve.methods import METHODS
from tests import oracles


@pytest.mark.parametrize("pattern", [SemiStructured(2, 4), SemiStructured(3, 8), Unstructured(70)], ids=str)
@pytest.mark.parametrize("start", [0.1, 20.0])
def test_it_is_the_paper_s_admm_written_out(pattern, start):
    """Oracle: the three blocks with explicit solves and an exact low-rank step, in float64.

    With 12 outputs the randomised SVD spans them all, and is exact. A large ρ at first takes the other branch of the
    rule: the support rests before ρ ever grew.
    """
    weight, h = oracles.problem(12, 16, dtype=torch.float64)
    damped = Gram(h, 1).damped(0.01).matrix
    penalty = SupportPenalty(start, every=10, most=400, growth=(1.1, 1.05, 1.02), settled=100)
    scale = damped.diagonal().sqrt()

    def keep(x):
        return pattern.mask(x.square())

    dense, low_rank = oracles.support_admm(weight, damped, keep, 7, start, 10, 400, (1.1, 1.05, 1.02), 100)
    found = hasslefree.decompose(weight, Gram(h, 1), pattern, 7, method=ThreeBlock(penalty))
    torch.testing.assert_close(found.sparse, dense * keep(dense * scale), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.low_rank.product(), low_rank, rtol=1e-6, atol=1e-7)


def test_the_defaults_are_the_authors():
    method = METHODS["3basil"]
    assert method.penalty == SupportPenalty(0.1, every=10, most=2000, growth=(1.1, 1.05, 1.02), settled=100)
    assert (method.svd.oversampling, method.svd.iterations, method.damping) == (5, 2, 0.01)
