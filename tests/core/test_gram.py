import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasslefree import Gram
from hasslefree.core.gram import relative
from hasslefree.errors import NonFiniteError, ShapeError
from tests import oracles


def test_the_matrix_is_the_mean_outer_product():
    x = torch.randn(3, 5, 4)
    expected = sum(torch.outer(row, row) for row in x.reshape(-1, 4)) / 15
    gram = Gram.from_activations(x)
    torch.testing.assert_close(gram.matrix, expected)
    torch.testing.assert_close(gram.mean, sum(x.reshape(-1, 4)) / 15)
    assert gram.tokens == 15
    wide = gram.damped(0.5).to(x.double())
    assert wide.mean.dtype == torch.float64
    assert torch.equal(wide.mean.float(), gram.mean)


def test_half_precision_inputs_are_summed_in_float32():
    x = torch.full((10_000, 2), 0.1, dtype=torch.bfloat16)
    gram = Gram.from_activations(x)
    assert gram.matrix.dtype == torch.float32
    # A sum in bfloat16 stops growing after a few hundred terms; one in float32 is off by its rounding.
    torch.testing.assert_close(gram.matrix, torch.full((2, 2), float(x[0, 0]) ** 2), rtol=1e-3, atol=0)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 99))
def test_the_loss_is_the_trace(out, width, seed):
    residual, h = oracles.problem(out, width, seed=seed)
    assert Gram(h, 1).loss(residual) == pytest.approx(oracles.loss(residual, h), rel=1e-4)


def test_damping_adds_a_share_of_the_mean_diagonal():
    _, h = oracles.problem(1, 8)
    expected = h + 0.01 * h.diagonal().mean() * torch.eye(8)
    before = h.clone()
    torch.testing.assert_close(Gram(h, 1).damped(0.01).matrix, expected)
    assert torch.equal(h, before)


def test_correlations_shrink_by_a_share():
    """Oracle: the definition, entry by entry, and the trace with it."""
    residual, h = oracles.problem(5, 8, dtype=torch.float64)
    gram = Gram(h, 12)
    assert 0 < gram.shrinkage < 1
    expected = h.clone()
    for row in range(8):
        for column in range(8):
            expected[row, column] *= 1 if row == column else 1 - gram.shrinkage
    torch.testing.assert_close(gram.shrunk().matrix, expected)
    assert gram.expected_loss(residual) == pytest.approx(oracles.loss(residual, expected), rel=1e-12)
    assert torch.equal(Gram(h, 0).shrunk().matrix, h)


def test_the_relative_error_of_nothing_is_zero():
    assert relative(0.0, 0.0) == 0.0
    assert relative(1.0, 0.0) == float("inf")


def test_errors():
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        Gram.from_activations(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ShapeError, match="matrix must be a tensor, got ndarray"):
        Gram(torch.eye(2).numpy(), 2)
    with pytest.raises(ShapeError, match="square"):
        Gram(torch.zeros(2, 3), 1)


def test_squares_that_overflow_are_an_error_and_float64_holds_them():
    x = torch.full((4, 2), 1e20)
    with pytest.raises(NonFiniteError, match="squares of the activations overflow float32; .*float64"):
        Gram.from_activations(x)
    assert Gram.from_activations(x.double()).matrix[0, 1] == pytest.approx(1e40)


def test_remarks_count_dead_inputs_and_tokens():
    x = torch.randn(5, 8)
    assert Gram.from_activations(torch.cat([x, x])).remarks() == ()
    x[:, [2, 7]] = 0
    dead, few = Gram.from_activations(x).remarks()
    assert dead == "2 of 8 inputs are always zero: they get no weight"
    assert few == "more inputs (8) than tokens (5): H has rank at most 5"


@pytest.mark.parametrize("x", [None, [[1.0]], torch.zeros(0, 8), torch.zeros(3)], ids=["None", "list", "empty", "flat"])
def test_activations_that_are_none(x):
    with pytest.raises(ShapeError, match=r"x must be a tensor \(\.\.\., tokens, in\) with at least one token, got"):
        Gram.from_activations(x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_what_is_not_of_floats_is_an_error(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ShapeError, match=f"x must be of a floating dtype of at least 16 bits, got {name}"):
        Gram.from_activations(torch.ones(4, 8).to(dtype))
    with pytest.raises(ShapeError, match=f"matrix must be of a floating dtype of at least 16 bits, got {name}"):
        Gram(torch.ones(8, 8).to(dtype), 4)
    with pytest.raises(ShapeError, match=f"mean must be of a floating dtype of at least 16 bits, got {name}"):
        Gram(torch.ones(8, 8), 4, torch.ones(8).to(dtype))
