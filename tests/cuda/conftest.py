"""A GPU: a fake one, and a real one where there is one. What runs on either must come out as on the CPU."""

from contextlib import nullcontext

import pytest
import torch

from tests.cuda.fake_cuda import fake_cuda
from tests.cuda.int4 import OPERATORS

REAL = pytest.param("real", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.fixture(params=["fake", REAL])
def gpu(request):
    """The fake GPU; None where it is a real one."""
    with fake_cuda() if request.param == "fake" else nullcontext() as found:
        if found:
            found.instead |= OPERATORS
        yield found
