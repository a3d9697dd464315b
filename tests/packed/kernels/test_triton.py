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
from hasslefree.packed.kernels import triton
from tests.packed.kernels import reference
for n, m, groups in ((2, 4, 17), (2, 4, 300), (2, 4, 1), (2, 8, 9), (1, 12, 5), (2, 66, 2), (1, 1, 7)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens in (1, 3, 16):
            s = reference.sparse(13, groups, n, m, dtype, seed=groups)
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(tokens, s.shape[1], generator=generator).to(dtype)
            y = triton.decode(x, *reference.pack_groups(s, n, m), n, m)
            assert y.dtype == dtype
            reference.assert_close(y, x, s)
# Inputs that no value of 2:4 reads may hold anything.
s = torch.zeros(6, 160)
s.view(6, 40, 4)[:, :, 0], s.view(6, 40, 4)[:, :, 3] = 2.0, 3.0
x = torch.ones(1, 160)
x.view(40, 4)[:, 1] = float("nan")
x.view(40, 4)[:, 2] = float("inf")
y = triton.decode(x, *reference.pack_groups(s, 2, 4), 2, 4)
assert torch.equal(y, torch.full((1, 6), 200.0)), y
print("done")
"""


def test_products():
    """In a process of its own: the interpreter is chosen when the kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
