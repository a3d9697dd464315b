import pytest
import torch

from hasslefree.core.linalg import inverse_factor, lower_cholesky
from hasslefree.errors import FactorizationError
from tests import oracles


def test_the_inverse_factor_is_the_upper_cholesky_factor_of_the_inverse():
    """Oracle: torch's own upper Cholesky factor of the explicit inverse, in float64."""
    _, h = oracles.problem(1, 24, dtype=torch.float64)
    expected = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    torch.testing.assert_close(inverse_factor(h), expected, rtol=1e-9, atol=1e-9)


def test_a_singular_matrix_is_an_error_with_a_remedy():
    with pytest.raises(FactorizationError, match="raise the damping"):
        lower_cholesky(torch.zeros(3, 3))
