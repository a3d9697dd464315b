"""The Triton kernel in Triton's interpreter, on the CPU. Oracle: float64 on the dense matrix."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# Out of step with the blocks, a position across two bytes, no position bits, several blocks of values, 1 to 16 tokens.
PRODUCTS = """
import torch
from hasslefree.kernels import triton
from tests.kernels import reference
for n, m, groups in ((2, 4, 17), (2, 4, 300), (2, 8, 9), (1, 12, 5), (2, 66, 2), (1, 1, 7)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens in (1, 3, 16):
            s = reference.sparse(13, groups, n, m, dtype, seed=groups)
            generator = torch.Generator().manual_seed(1)
            x, u, v = (torch.randn(*shape, generator=generator).to(dtype)
                       for shape in ((tokens, s.shape[1]), (13, 5), (5, s.shape[1])))
            packed = reference.pack_groups(s, n, m)
            reference.assert_close(triton.decode(x, *packed, n, m), x, s)
            y, right = triton.decode(x, *packed, n, m, u, v), x.double() @ (s.double() + u.double() @ v.double()).T
            assert y.dtype == dtype and (y - right).norm() <= 0.01 * right.norm(), (n, m, dtype, tokens)
print("done")
"""


def test_products_with_and_without_factors():
    """In a process of its own: the interpreter is chosen when the kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
