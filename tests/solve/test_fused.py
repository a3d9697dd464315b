"""The entries of a round in one pass. Oracle: the same by torch, operation by operation; equal bit for bit."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hasslefree.core.patterns import Row, SemiStructured
from hasslefree.solve import fused


def arrays(out, width, ties):
    """W, P, S and room for T. ties: few different numbers, so that many scores are equal."""
    generator = torch.Generator().manual_seed(out + width)
    weight, product, sparse = (torch.randn(out, width, generator=generator) for _ in range(3))
    if ties:
        product, sparse = product.round(), torch.zeros_like(sparse)
    return weight, product, sparse, torch.empty_like(weight)


def by_torch(pattern, weight, product, sparse):
    """What the module's docstring says, with no buffer used twice."""
    x = product + sparse
    mask = pattern.mask(x.square())
    kept = x * mask
    return mask, x, kept, weight + x - 2 * kept


# Less than a span of lanes, spans and a rest, and whole spans; every N of both sizes of groups.
@pytest.mark.skipif(not fused.HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize(("n", "m"), [(0, 4), (1, 4), (2, 4), (4, 4), (1, 8), (3, 8), (4, 8), (6, 8)])
@pytest.mark.parametrize(("out", "width"), [(3, 40), (5, 264), (2, 512)])
@pytest.mark.parametrize("ties", [False, True])
def test_a_cpu_computes_it_in_one_pass(n, m, out, width, ties, monkeypatch):
    monkeypatch.setattr(SemiStructured, "mask", None)  # nothing but the kernel
    weight, state, sparse, target = arrays(out, width, ties)
    inputs = weight.clone(), state.clone(), sparse.clone()
    mask = fused.settle(SemiStructured(n, m), weight, state, sparse, target)
    monkeypatch.undo()
    expected = by_torch(SemiStructured(n, m), *inputs)
    for found, wanted in zip((mask, state, sparse, target), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.skipif(not fused.HAS_NUMBA, reason="needs numba")
def test_several_threads_share_the_rows(monkeypatch):
    cpu = importlib.import_module("hasslefree.solve.fused.cpu")
    monkeypatch.setattr(cpu, "ENTRIES", 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    weight, state, sparse, target = arrays(5, 40, ties=False)
    expected = by_torch(SemiStructured(2, 4), weight, state.clone(), sparse.clone())
    found = fused.settle(SemiStructured(2, 4), weight, state, sparse, target), state, sparse, target
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("pattern", [SemiStructured(2, 4), SemiStructured(2, 3), SemiStructured(1, 1), Row(7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_patterns_and_dtypes_are_left_to_torch(pattern, dtype, monkeypatch):
    monkeypatch.setattr(fused, "HAS_NUMBA", False)
    weight, state, sparse, target = (each.to(dtype) for each in arrays(4, 24, ties=False))
    expected = by_torch(pattern, weight, state.clone(), sparse.clone())
    found = fused.settle(pattern, weight, state, sparse, target), state, sparse, target
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)


IN_INTERPRETER = """
import torch
from hasslefree.core.patterns import SemiStructured
from hasslefree.solve.fused import cuda
from tests.solve.test_fused import arrays, by_torch
for n, m, out, width in ((2, 4, 3, 40), (2, 4, 5, 2048), (1, 4, 2, 8), (4, 8, 9, 264), (3, 8, 1, 8)):
    for ties in (False, True):
        weight, state, sparse, target = arrays(out, width, ties)
        expected = by_torch(SemiStructured(n, m), weight, state.clone(), sparse.clone())
        found = cuda.settle(weight, state, sparse, target, n, m), state, sparse, target
        for one, wanted in zip(found, expected, strict=True):
            assert torch.equal(one, wanted), (n, m, out, width, ties)
print("done")
"""


@pytest.mark.skipif(not fused.HAS_TRITON, reason="needs triton")
def test_triton_computes_it_in_one_pass():
    """In a process of its own: the interpreter is chosen when the kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", IN_INTERPRETER], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.stdout == "done\n", done.stderr
