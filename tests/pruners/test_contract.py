"""What every pruner in the table keeps to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Gram, Refit
from hasslefree.core.patterns import Row, SemiStructured, Structured, Unstructured
from hasslefree.pruners import PRUNERS
from tests import oracles

patterns = st.sampled_from(
    [SemiStructured(2, 4), SemiStructured(1, 8), SemiStructured(3, 8), Unstructured(50), Row(5), Structured(6)]
)
ALL = PRUNERS | {"wanda, refit": Refit(PRUNERS["wanda"])}
pruners = pytest.mark.parametrize("pruner", ALL.values(), ids=ALL)


def gram_of(h):
    """A Gram with all that any method asks for."""
    return Gram(h, 1, oracles.mean_of(h))


def run(pruner, weight, h, pattern):
    return pruner.prune(weight, pruner.prepare(gram_of(h).damped(0.01)), pattern)


@pruners
@settings(max_examples=25)
@given(patterns, st.integers(0, 999))
def test_counts_are_exact_and_inputs_are_left_alone(pruner, pattern, seed):
    weight, h = oracles.problem(9, 16, seed=seed)
    before, h_before = weight.clone(), h.clone()
    prepared = pruner.prepare(gram_of(h).damped(0.01))
    first = pruner.prune(weight, prepared, pattern)
    assert first.count_nonzero() == pattern.kept((9, 16))
    assert torch.equal(weight, before)
    assert torch.equal(h, h_before)
    assert torch.equal(first, pruner.prune(weight, prepared, pattern)), "not deterministic, or `prepared` was changed"


@pruners
def test_full_density_is_the_identity(pruner):
    weight, h = oracles.problem(6, 16)
    for pattern in (SemiStructured(4, 4), Unstructured(96), Row(16), Structured(16)):
        assert torch.equal(run(pruner, weight, h, pattern), weight)


@pruners
@settings(max_examples=15)
@given(patterns, st.integers(0, 99))
def test_rows_may_be_permuted(pruner, pattern, seed):
    weight, h = oracles.problem(9, 16, seed=seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(run(pruner, weight[order], h, pattern), run(pruner, weight, h, pattern)[order])


@pruners
@settings(max_examples=15)
@given(patterns, st.sampled_from([0.25, 2.0, 1024.0]), st.sampled_from([0.5, 16.0]))
def test_the_scale_of_weight_and_gram_does_not_matter(pruner, pattern, scale, gram_scale):
    """Powers of two, so that the arithmetic is the same to the bit."""
    weight, h = oracles.problem(9, 16)
    expected = run(pruner, weight, h, pattern) * scale
    torch.testing.assert_close(run(pruner, weight * scale, h * gram_scale, pattern), expected)


@pruners
def test_nothing_is_kept_at_zero_density(pruner):
    weight, h = oracles.problem(6, 16)
    for pattern in (SemiStructured(0, 4), Unstructured(0), Row(0), Structured(0)):
        assert not run(pruner, weight, h, pattern).any()
