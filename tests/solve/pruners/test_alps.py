import pytest
import torch

import hasslefree
from hasslefree import ALPS, Gram, Prune, SemiStructured, Unstructured
from hasslefree.errors import FactorizationError
from hasslefree.solve.admm import SupportPenalty
from tests import oracles


@pytest.mark.parametrize("pattern", [SemiStructured(2, 4), SemiStructured(3, 8), Unstructured(70)], ids=str)
@pytest.mark.parametrize("start", [0.1, 20.0])
def test_it_is_the_paper_s_admm_and_a_least_squares_on_the_support(pattern, start):
    """Oracle: the ADMM with explicit solves in float64, and the normal equations; CG runs until it has them."""
    weight, h = oracles.problem(9, 16, dtype=torch.float64)
    gram = Gram(h, 1).damped(0.01)
    penalty = SupportPenalty(start, every=3, most=300, growth=(1.3, 1.2, 1.1), settled=30)
    pruner = ALPS(penalty, cg_steps=60)
    scale = gram.diagonal.sqrt()

    def keep(x):
        return pattern.mask(x.square())

    dense, _ = oracles.support_admm(weight, gram.matrix, keep, 0, start, 3, 300, (1.3, 1.2, 1.1), 30)
    expected = oracles.on_support(weight, gram.matrix, keep(dense * scale))
    found = pruner.prune(weight, pruner.prepare(gram), pattern).sparse
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_defaults_are_the_authors():
    assert ALPS() == ALPS(SupportPenalty(0.1, every=3, most=300, growth=(1.3, 1.2, 1.1), settled=30), cg_steps=10)


def test_a_matrix_that_is_no_second_moment_is_an_error():
    h = torch.eye(8)
    h[0, 1] = h[1, 0] = 1.1
    with pytest.raises(FactorizationError, match="is not positive semidefinite"):
        ALPS().prepare(Gram(h, 1))


def test_an_eigenvalue_that_rounding_put_below_zero_does_no_harm():
    """Inputs whose correlation is 1 + 1e-4: H + ρI would be singular at ρ = 1e-4."""
    h = torch.full((16, 16), 1 + 1e-4, dtype=torch.float64).fill_diagonal_(1)
    weight = oracles.problem(4, 16, dtype=torch.float64)[0]
    method = Prune(ALPS(SupportPenalty(1e-4, every=3, most=30, growth=(1.3, 1.2, 1.1), settled=30)), damping=0.0)
    sparse = hasslefree.decompose(weight, Gram(h, 99), "2:4", method=method).sparse
    assert torch.isfinite(sparse).all()
    assert sparse.abs().max() < 1e3 * weight.abs().max()
