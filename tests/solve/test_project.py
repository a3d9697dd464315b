"""The entries of a round in one pass. Oracle: the same by torch, operation by operation; equal bit for bit."""

import pytest
import torch

from hasslefree.core.patterns import Row, SemiStructured
from hasslefree.solve import project


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


# One span and several, within rows and across them, with both sizes of groups.
@pytest.mark.skipif(not project.HAS_NUMBA, reason="needs numba")
@pytest.mark.parametrize(
    ("n", "m", "out", "width", "ties"),
    [
        (0, 4, 2, 64, True), (1, 4, 5, 384, False), (2, 4, 5, 384, True), (4, 4, 2, 512, True),
        (1, 8, 2, 512, True), (3, 8, 2, 128, False), (4, 8, 5, 256, True), (6, 8, 2, 512, False),
    ],
)  # fmt: skip
def test_a_cpu_computes_it_in_one_pass(n, m, out, width, ties, monkeypatch):
    monkeypatch.setattr(SemiStructured, "mask", None)  # nothing but the kernel
    weight, state, sparse, target = arrays(out, width, ties)
    inputs = weight.clone(), state.clone(), sparse.clone()
    mask = project.project_step(SemiStructured(n, m), weight, state, sparse, target)
    monkeypatch.undo()
    expected = by_torch(SemiStructured(n, m), *inputs)
    for found, wanted in zip((mask, state, sparse, target), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.skipif(not project.HAS_NUMBA, reason="needs numba")
def test_several_threads_share_the_rows(monkeypatch):
    monkeypatch.setattr("hasslefree.solve.project_numba.ENTRIES", 40)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    weight, state, sparse, target = arrays(5, 128, ties=False)
    expected = by_torch(SemiStructured(2, 4), weight, state.clone(), sparse.clone())
    found = project.project_step(SemiStructured(2, 4), weight, state, sparse, target), state, sparse, target
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("pattern", [SemiStructured(2, 4), SemiStructured(2, 3), SemiStructured(1, 1), Row(7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_patterns_and_dtypes_are_left_to_torch(pattern, dtype, monkeypatch):
    monkeypatch.setattr(project, "HAS_NUMBA", False)
    weight, state, sparse, target = (each.to(dtype) for each in arrays(4, 24, ties=False))
    expected = by_torch(pattern, weight, state.clone(), sparse.clone())
    found = project.project_step(pattern, weight, state, sparse, target), state, sparse, target
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)
