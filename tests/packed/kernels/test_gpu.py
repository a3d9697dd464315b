"""The ways of a GPU, where there is one. Oracle: float64 on the dense matrix."""

import pytest
import torch
from torch.nn import functional as F

from hasslefree.packed.kernels import cuda, ops
from tests.packed.kernels import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_triton(tokens, dtype):
    for n, m in ((2, 4), (2, 8), (1, 4)):
        s = reference.sparse(100, 64, n, m, dtype, seed=tokens)
        x = torch.randn(tokens, s.shape[1]).to(dtype)
        values, positions = reference.pack_groups(s, n, m)
        y = ops.decode_cuda(x.cuda(), values.cuda(), positions.cuda(), n, m)
        reference.assert_close(y.cpu(), x, s)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="capability 8.0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_semi_structured(tokens, dtype):
    s = reference.sparse(128, 64, 2, 4, dtype, seed=tokens)
    x = torch.randn(tokens, s.shape[1]).to(dtype)
    y = F.linear(x.cuda(), cuda.semi_structured(s.cuda()))
    reference.assert_close(y.cpu(), x, s)
