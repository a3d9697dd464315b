"""What every pruner in the table keeps to."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Gram, Refit
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Row, SemiStructured, Structured, Unstructured
from hasslefree.solve.pruners import PRUNERS
from tests import oracles
from tests.suited import suited

patterns = st.sampled_from(
    [SemiStructured(2, 4), SemiStructured(1, 8), SemiStructured(3, 8), Unstructured(50), Row(5), Structured(6)]
)
# Groups that go into 16 inputs.
SMALL = {
    name: dataclasses.replace(pruner, grid=Grid(group=8)) if pruner.grid else pruner for name, pruner in PRUNERS.items()
}
SMALL["wanda, refit"] = Refit(PRUNERS["wanda"])
FREE = {name: pruner for name, pruner in SMALL.items() if not pruner.grid}
QUANTISERS = [name for name in SMALL if name not in FREE]
pruners = pytest.mark.parametrize("pruner", SMALL.values(), ids=SMALL)


def gram_of(h):
    """A Gram with all that any method asks for."""
    return Gram(h, 1, oracles.mean_of(h))


def run(pruner, weight, h, pattern):
    pattern = suited(pruner, pattern)
    return pruner.prune(weight, pruner.prepare(gram_of(h).damped(0.01)), pattern).sparse


def fits(sparse, pattern):
    """Whether some mask of the pattern covers S."""
    return not sparse[~pattern.mask((sparse != 0).float())].any()


@pruners
@settings(max_examples=25)
@given(patterns, st.integers(0, 999))
def test_counts_are_exact_and_inputs_are_left_alone(pruner, pattern, seed):
    weight, h = oracles.problem(9, 16, seed=seed)
    before, h_before, pattern = weight.clone(), h.clone(), suited(pruner, pattern)
    prepared = pruner.prepare(gram_of(h).damped(0.01))
    first = pruner.prune(weight, prepared, pattern).sparse
    # On a grid, what is kept may be rounded to zero.
    assert first.count_nonzero() == pattern.kept((9, 16)) or (pruner.grid and fits(first, pattern))
    assert torch.equal(weight, before)
    assert torch.equal(h, h_before)
    assert torch.equal(first, pruner.prune(weight, prepared, pattern).sparse), "random, or `prepared` was changed"


@pytest.mark.parametrize("kept", [0, 1])
@pruners
def test_all_or_nothing(pruner, kept):
    """Oracle: the weight itself, where nothing is rounded, and zeros."""
    weight, h = oracles.problem(6, 16)
    for pattern in (SemiStructured(4 * kept, 4), Unstructured(96 * kept), Row(16 * kept), Structured(16 * kept)):
        if suited(pruner, pattern) == pattern and not (kept and pruner.grid):
            assert torch.equal(run(pruner, weight, h, pattern), weight * kept)


@pruners
@settings(max_examples=15)
@given(patterns, st.integers(0, 99))
def test_rows_may_be_permuted(pruner, pattern, seed):
    weight, h = oracles.problem(9, 16, seed=seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(run(pruner, weight[order], h, pattern), run(pruner, weight, h, pattern)[order])


@pruners
@settings(max_examples=15)
@given(patterns, st.sampled_from([0.25, 2.0, 1024.0]), st.sampled_from([0.25, 16.0]))
def test_the_scale_of_weight_and_gram_does_not_matter(pruner, pattern, scale, gram_scale):
    """Powers of two, and of four for the Gram, whose root is taken, so that the arithmetic is the same to the bit."""
    weight, h = oracles.problem(9, 16)
    expected = run(pruner, weight, h, pattern) * scale
    torch.testing.assert_close(run(pruner, weight * scale, h * gram_scale, pattern), expected)


@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [8, None])
@pytest.mark.parametrize("symmetric", [False, True])
@settings(max_examples=6)
@given(patterns, st.integers(0, 99))
def test_what_has_a_grid_is_on_it(name, bits, group, symmetric, pattern, seed):
    """Oracle: the multiples of the scale that codes of so many bits reach, entry by entry; eight bits lose less."""
    weight, h = oracles.problem(9, 16, seed=seed)
    losses = {}
    for b in {bits, 8}:
        pruner = dataclasses.replace(PRUNERS[name], grid=Grid(b, group, symmetric))
        found = pruner.prune(weight, pruner.prepare(gram := Gram(h, 1).damped(0.01)), pattern)
        sparse, scaling = found.sparse, found.scaling
        # Rounding to nearest does not look at H.
        losses[b] = oracles.loss(weight - sparse, torch.eye(16) if name == "rtn" else gram.matrix)
        step = group or 16
        multiples = sparse.double() / scaling.scale.repeat_interleave(step, 1).double()
        codes = multiples + scaling.zero.repeat_interleave(step, 1).double()
        assert torch.equal(codes, codes.round())
        assert 0 <= codes.amin() <= codes.amax() <= 2**b - 1
        assert torch.equal(sparse, pruner.prune(weight, pruner.prepare(gram), pattern).sparse)
    assert losses[8] <= losses[bits] * 1.05
