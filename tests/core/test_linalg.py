import itertools
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree.core import linalg
from hasslefree.core.linalg import (
    cholesky_qr,
    eigh,
    inverse_,
    inverse_factor,
    lower_cholesky,
    masked_cg,
    with_rows,
)
from hasslefree.errors import FactorizationError
from tests import oracles


@pytest.mark.parametrize("block", [3, 100])
def test_the_inverse_factor_is_the_upper_cholesky_factor_of_the_inverse(block, monkeypatch):
    """Oracle: torch's own upper Cholesky factor of the explicit inverse, in float64. In one piece, and by halves."""
    monkeypatch.setitem(linalg.BLOCK, "cpu", block)
    _, h = oracles.problem(1, 25, dtype=torch.float64)
    expected = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    torch.testing.assert_close(inverse_factor(h), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("width", "rank"), [(5, 2), (64, 3), (150, 7), (150, 0)])
def test_a_factor_with_rows_has_the_products_of_both(width, rank):
    """Oracle: the sum of the products; 150 is more than two blocks of rows."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(width, width, generator=generator, dtype=torch.float64).triu()
    rows = torch.randn(rank, width, generator=generator, dtype=torch.float64)
    found = with_rows(factor, rows)
    assert torch.equal(found, found.triu())
    torch.testing.assert_close(found.T @ found, factor.T @ factor + rows.T @ rows)


def test_a_singular_matrix_is_an_error_with_a_remedy():
    for factorise in (lower_cholesky, inverse_):
        with pytest.raises(FactorizationError, match="raise the damping"):
            factorise(torch.zeros(3, 3))


@pytest.mark.parametrize("block", [2, 64, 100])
def test_the_inverse_takes_float64_where_float32_cannot_factor(block, monkeypatch):
    """Oracle: Woodbury in float64, for I + B Bᵀ in whole numbers that float32 holds: the I is at its rounding.

    In blocks of two the first one fails, in blocks of 64 what it leaves of the second.
    """
    monkeypatch.setitem(linalg.BLOCK, "cpu", block)
    b = torch.randint(-2000, 2000, (100, 3), generator=torch.Generator().manual_seed(0)).double()
    matrix = b @ b.T + torch.eye(100)
    assert torch.equal(matrix.float().double(), matrix)
    assert torch.linalg.cholesky_ex(matrix.float()).info > 0, "float32 can do it: the matrix is too easy"
    found = inverse_(matrix.float().clone())
    assert found.dtype == torch.float32
    expected = torch.eye(100) - b @ torch.linalg.solve(torch.eye(3) + b.T @ b, b.T)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 99), st.floats(0, 1))
def test_masked_cg_tends_to_the_least_squares_on_the_support_and_never_rises(seed, density):
    """Oracle: the normal equations of every row."""
    target, h = oracles.problem(6, 12, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 12, generator=generator) < density
    start = torch.randn(6, 12, generator=generator, dtype=torch.float64) * mask
    before = start.clone()
    found = [masked_cg(h, target, start, mask, steps) for steps in (0, 1, 2, 4, 8, 60)]
    assert torch.equal(start, before)
    assert all(not sparse[~mask].any() for sparse in found)
    losses = [torch.tensor([oracles.loss(row[None], h) for row in target - sparse]) for sparse in found]
    scale = oracles.loss(target, h)
    assert all((later <= earlier + 1e-12 * scale).all() for earlier, later in pairwise(losses))
    torch.testing.assert_close(found[-1], oracles.on_support(target, h, mask), rtol=1e-6, atol=1e-7)


def test_the_preconditioner_makes_the_scale_of_an_input_immaterial():
    """With D H D and T D⁻¹ the same steps give S D⁻¹, for powers of two to the bit."""
    target, h = oracles.problem(5, 8)
    mask = torch.rand(5, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    d = torch.tensor([1.0, 4.0, 0.5, 2.0, 16.0, 1.0, 0.25, 8.0])
    plain = masked_cg(h, target, torch.zeros(5, 8), mask, 3)
    scaled = masked_cg(h * torch.outer(d, d), target / d, torch.zeros(5, 8), mask, 3)
    assert torch.equal(scaled * d, plain)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 33])
def test_an_inverse_by_blocks_is_the_inverse(size, monkeypatch):
    """Oracle: float64, in one piece."""
    monkeypatch.setitem(linalg.BLOCK, "cpu", 8)
    _, h = oracles.problem(4, size)
    h.diagonal().add_(0.05 * h.diagonal().mean())
    exact = torch.linalg.inv(h.double())
    torch.testing.assert_close(
        linalg.inverse_(h.clone()).double(), exact, rtol=1e-3, atol=1e-5 * exact.abs().max().item()
    )


@pytest.mark.parametrize("seed", range(3))
def test_rounded_directions_end_where_exact_ones_do(seed):
    """Oracle: the same with exact products; where it ends depends on the residual, which is not rounded."""
    target, h = oracles.problem(96, 128, seed=seed)
    mask = torch.rand(96, 128, generator=torch.Generator().manual_seed(seed)) < 0.5
    start = target * mask
    exact, rounded = (masked_cg(h, target, start, mask, 5, narrow=each) for each in (False, True))
    before, one, other = (oracles.loss(target - sparse, h) for sparse in (start, exact, rounded))
    assert one < 0.9 * before
    assert abs(other - one) < 2e-3 * (before - one)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 23), (torch.float64, 52)])
def test_an_input_that_rounding_alone_tells_from_others_is_an_error(dtype, least):
    """Oracle: 1 − c², the share of the second input that the first does not explain, with c = 1 − 2⁻ᵏ."""
    for k in range(10, 54 if dtype == torch.float64 else 25):
        c = 1 - 2.0**-k
        matrix = torch.tensor([[1.0, c], [c, 1.0]], dtype=dtype)
        if k <= least - 1:
            left = lower_cholesky(matrix)[1, 1].square().item()
            assert left == pytest.approx(2.0 ** (1 - k) - 2.0 ** (-2 * k), rel=0.1)
        elif k > least:
            with pytest.raises(FactorizationError, match="linearly dependent; raise the damping"):
                lower_cholesky(matrix)


def test_masked_cg_never_rises_on_a_singular_matrix():
    """Directions along which the inputs cancel have a curvature that is made of rounding."""
    for tokens, seed in itertools.product((1, 2), range(60)):
        target, h = oracles.problem(12, 8, tokens=tokens, seed=seed)
        mask = torch.rand(12, 8, generator=torch.Generator().manual_seed(seed)) < 0.5
        for start in (torch.zeros(12, 8), target * mask):
            found = masked_cg(h, target, start, mask, 5).double()
            before, after = ((r @ h.double() * r).sum(1) for r in (target.double() - start, target.double() - found))
            assert (after <= before + 1e-6 * oracles.loss(target, h)).all()


def test_an_eigendecomposition_that_does_not_converge_is_an_error_with_a_remedy():
    with pytest.raises(FactorizationError, match="raise the damping"):
        eigh(torch.full((3, 3), torch.nan))


def test_cholesky_qr_spans_the_columns_and_keeps_dependent_ones_short():
    """Oracle: the identity, and the columns; of columns that others span, what is left is no longer than one."""
    free = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1.0, 1e6, 1.0])
    spanned = free.clone()
    spanned[:, 1], spanned[:, 3] = 2 * free[:, 0], 0.0
    for matrix, step in ((free, 1), (spanned, 2)):
        basis = cholesky_qr(matrix).double()
        products = basis.T @ basis
        assert torch.linalg.matrix_norm(products, 2) < 1 + 1e-5
        identity = torch.eye(4 // step, dtype=torch.float64)
        torch.testing.assert_close(products[::step, ::step], identity, atol=1e-6, rtol=0)
        unit = matrix.double() / matrix.double().norm(dim=0).clamp_min(1e-30)
        torch.testing.assert_close(basis @ (basis.T @ unit), unit, atol=1e-5, rtol=0)
