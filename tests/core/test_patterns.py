from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree.core.patterns import (
    SAMPLES,
    Row,
    SemiStructured,
    Structured,
    Unstructured,
    largest,
    largest_by_pairs,
    smallest_of_largest,
)
from hasslefree.errors import PatternError

# Few distinct values, so that there are ties all the time.
scores = st.builds(
    lambda seed, out, width: torch.randint(0, 3, (out, width), generator=torch.Generator().manual_seed(seed)).float(),
    st.integers(0, 9999),
    st.integers(1, 7),
    st.sampled_from([8, 16, 24]),
)


@given(scores, st.integers(0, 8))
def test_semi_structured_keeps_n_of_each_group(score, n):
    mask = SemiStructured(n, 8).mask(score)
    assert (mask.reshape(len(score), -1, 8).sum(-1) == n).all()
    assert mask.sum() == SemiStructured(n, 8).kept(tuple(score.shape))


@given(scores, st.floats(0, 1))
def test_unstructured_row_and_structured_keep_exact_counts(score, share):
    out, width = score.shape
    for pattern in (Unstructured(int(share * out * width)), Row(int(share * width)), Structured(int(share * width))):
        mask = pattern.mask(score)
        assert mask.sum() == pattern.kept((out, width))
        if isinstance(pattern, Row):
            assert (mask.sum(1) == pattern.count).all()
        if isinstance(pattern, Structured):
            assert (mask.all(0) | ~mask.any(0)).all()


@given(scores, st.data())
def test_the_largest_are_kept_and_ties_go_to_the_left(score, data):
    """Oracle: Python's stable sort."""
    row = score[0]
    count = data.draw(st.integers(0, len(row)))
    expected = set(sorted(range(len(row)), key=lambda i: -float(row[i]))[:count])
    assert set(largest(row, count).nonzero().flatten().tolist()) == expected
    assert set(largest_by_pairs(row[None], count)[0].nonzero().flatten().tolist()) == expected


@given(st.integers(0, 40), st.integers(1, 7), st.sampled_from([Unstructured, Row, Structured]))
def test_parts_of_a_pattern_add_up(count, block, kind):
    cuts = [*range(0, 40, block), 40]
    parts = [kind(count).restricted(slice(a, b), 40).count for a, b in pairwise(cuts)]
    assert sum(parts) == count


def test_structured_keeps_the_columns_of_largest_total():
    score = torch.tensor([[9.0, 1.0, 5.0], [0.0, 1.0, 5.0]])
    assert Structured(1).mask(score).tolist() == [[False, False, True]] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SemiStructured(5, 4), "5:4 is impossible"),
        (lambda: SemiStructured(0, 0), "impossible"),
        (lambda: SemiStructured(2, 4).check((3, 1027)), "divides 1027, or pattern='row' sparsity=0.5"),
        (lambda: Unstructured(13).check((3, 4)), "from 0 to 12 entries, got 13"),
        (lambda: Row(5).check((3, 4)), "from 0 to 4 entries of a row, got 5"),
        (lambda: Structured(-1).check((3, 4)), "from 0 to 4 input channels, got -1"),
    ],
)
def test_errors(make, message):
    with pytest.raises(PatternError, match=message):
        make()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.floats(0, 1), st.sampled_from([1, 64, 300]))
def test_a_long_row_is_cut_where_sorting_would_cut_it(seed, share, levels):
    """Oracle: a whole sort. Few levels make ties; sorted rows make misleading samples."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(levels, (70_000,), generator=generator).float()
    if levels == 300:
        score += torch.rand(70_000, generator=generator)
    count = min(max(int(share * 70_000), 1), 70_000)
    for row in (score, score.sort().values, torch.cat([score[:-9], torch.full((9,), 1e9)])):
        assert smallest_of_largest(row, count).item() == row.sort(descending=True).values[count - 1].item()
        assert largest(row, count).sum() == count


def test_bad_luck_in_the_samples_costs_time_and_not_the_answer():
    """Every sample is one of the largest, and what is looked for is none of them."""
    row = torch.rand(70_000, generator=torch.Generator().manual_seed(0))
    row[:: 70_000 // SAMPLES | 1] += 1
    assert smallest_of_largest(row, 60_000).item() == row.sort(descending=True).values[59_999].item()
