"""The backend `triton` on a GPU, where there is one. Oracle: float64 on the dense matrix."""

import pytest
import torch

from hasslefree.packed.kernels.backends import product
from hasslefree.packed.layouts import PackedGroups
from tests.packed.kernels import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_triton(tokens, dtype):
    for n, m in ((2, 4), (2, 8), (1, 4)):
        s = reference.sparse(100, 64, n, m, dtype, seed=tokens)
        x = torch.randn(tokens, s.shape[1]).to(dtype)
        y = product("triton", x.cuda(), *(each.cuda() for each in reference.pack_groups(s, n, m)), PackedGroups(n, m))
        reference.assert_close(y.cpu(), x, s)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_triton_where_an_input_that_is_not_read_is_not_a_number(tokens, dtype):
    """Oracle: the same product where that input is 0."""
    s = reference.sparse(100, 64, 2, 4, dtype, seed=tokens)
    x = torch.randn(tokens, 256).to(dtype)
    s.view(100, 64, 4)[:, 5] = torch.tensor([0.0, 1.0, 2.0, 0.0])
    packed = [each.cuda() for each in reference.pack_groups(s, 2, 4)]
    x[:, 20] = 0
    expected = product("triton", x.cuda(), *packed, PackedGroups(2, 4))
    x[-1, 20] = float("nan")
    y = product("triton", x.cuda(), *packed, PackedGroups(2, 4))
    torch.testing.assert_close(y, expected, rtol=2.0**-7, atol=1e-3)
