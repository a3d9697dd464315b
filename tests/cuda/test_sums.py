"""What is computed otherwise on a GPU: sums over tokens, and bases. Oracle: float64 on the CPU."""

import pytest
import torch

from hasslefree.core.linalg import orthonormal
from hasslefree.distributed import ALONE
from hasslefree.models import calibrate as moments
from hasslefree.models.calibrate import MomentSums
from tests.cuda.fake_cuda import fake_cuda


def inputs(tokens, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, width, generator=generator) * torch.logspace(-2, 2, width)).bfloat16()


def test_products_of_bfloat16_are_summed_in_float32(gpu, monkeypatch):
    """More inputs than a panel, in batches of unequal length."""
    monkeypatch.setitem(moments.PANEL, "cuda", 16)
    rows = inputs(700, 40)
    sums = MomentSums(256)
    for part in rows.cuda().split(500):
        sums.take(part)
    gram = sums.gram(ALONE)
    exact = rows.double().T @ rows.double() / 700
    norms = exact.diagonal().sqrt()
    assert gram.matrix.dtype == torch.float32
    assert ((gram.matrix.cpu().double() - exact) / torch.outer(norms, norms)).abs().max() < 1e-6
    torch.testing.assert_close(gram.mean.cpu().double(), rows.double().mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("condition", [1e1, 1e4])
def test_a_basis_is_orthonormal_and_spans_the_columns(condition, gpu):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 12, generator=generator).double()).Q for n in (200, 12))
    matrix = (left * torch.logspace(0, -torch.tensor(condition).log10().item(), 12) @ right).float()
    basis = orthonormal(matrix.cuda()).cpu().double()
    torch.testing.assert_close(basis.T @ basis, torch.eye(12).double(), rtol=0, atol=2e-5)
    torch.testing.assert_close(basis @ basis.T @ matrix.double(), matrix.double(), rtol=0, atol=1e-5)


def test_columns_that_others_span_leave_the_basis_finite():
    with fake_cuda():
        column = torch.randn(50, 1, device="cuda")
        basis = orthonormal(torch.cat([column, 2 * column, torch.zeros_like(column)], 1)).cpu()
    assert torch.isfinite(basis).all()
    assert basis[:, 0].norm() == pytest.approx(1, abs=1e-2)
    assert torch.linalg.matrix_norm(basis, 2) < 1.01
