"""The truncated SVD, against torch's."""

import pytest
import torch

from hasslefree.core.low_rank import LowRank, truncated_svd


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (24, 24)])
@pytest.mark.parametrize("rank", [0, 1, 5, 24])
def test_it_is_the_best_approximation(shape, rank):
    """Oracle: torch's SVD in float64, of singular values from 1 to 10⁻⁴."""
    rows, columns = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in shape)
    values = torch.zeros(shape, dtype=torch.float64)
    values.diagonal().copy_(torch.logspace(0, -4, 24))
    matrix = (rows @ values @ columns).float()
    found = truncated_svd(matrix, rank)
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ vh[:rank]
    assert found.u.dtype == found.v.dtype == torch.float32
    assert (found.product() - best).norm() <= 1e-6
    assert torch.allclose(found.u.norm(dim=0).double(), s[:rank], rtol=1e-5)
    assert torch.allclose(found.v @ found.v.T, torch.eye(rank), atol=1e-5)


def test_what_adds_nothing_is_no_larger_than_the_rest():
    u = torch.tensor([[2.0, 0.0, 3.0], [0.0, 0.0, 4.0]])
    v = torch.tensor([[8.0, 0.0], [3e6, 4e6], [0.0, 0.0]])
    found = LowRank(u, v).balanced()
    torch.testing.assert_close(found.u.norm(dim=0), torch.tensor([4.0, 0.0, 4.0]))
    torch.testing.assert_close(found.v.norm(dim=1), torch.tensor([4.0, 4.0, 0.0]))
    torch.testing.assert_close(found.product(), u @ v)


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_a_matrix_of_a_smaller_rank_leaves_the_rest_zero(shape):
    matrix = torch.randn(shape[0], 2) @ torch.randn(2, shape[1])
    found = truncated_svd(matrix, 5)
    assert (found.product() - matrix).norm() <= 1e-5 * matrix.norm()
    assert found.u[:, 2:].norm() <= 1e-5 * matrix.norm()
    assert not found.v.isnan().any()
