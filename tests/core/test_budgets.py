import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasslefree
from hasslefree import Budget
from hasslefree.core.patterns import Row, SemiStructured, Structured, Unstructured
from hasslefree.errors import BudgetError, HasslefreeError, PatternError, UnknownNameError


def test_fixed_rank():
    assert Budget("2:4", rank=64).resolve(4096, 1024) == (SemiStructured(2, 4), 64)
    assert Budget("row", sparsity=0.9, rank=1).resolve(7, 100) == (Row(10), 1)
    assert Budget("structured", sparsity=0.75).resolve(7, 100) == (Structured(25), 0)


@pytest.mark.parametrize("sparsity", [i / 100 for i in range(101)])
def test_the_count_is_that_of_the_decimal(sparsity):
    """0.9 in binary is a little less than 9/10; the count of kept entries must not notice."""
    pattern, _ = Budget("unstructured", sparsity=sparsity).resolve(10, 10)
    assert pattern == Unstructured(100 - round(sparsity * 100))


@pytest.mark.parametrize(("pattern", "kept", "rank"), [("2:8", 0.25, 512), ("3:8", 0.375, 256), ("2:4", 0.5, 0)])
def test_ratio_with_semi_structured_follows_the_paper(pattern, kept, rank):
    """r = ⌊(1 − ρ − N/M)·out·in/(out + in)⌋ at ρ = 0.5 and 4096²: the ranks that the formula gives by hand."""
    assert Budget(pattern, ratio=0.5).resolve(4096, 4096)[1] == rank == int((0.5 - kept) * 4096 * 4096 / 8192)


@given(st.integers(8, 300), st.integers(8, 300), st.integers(0, 100), st.integers(0, 100))
def test_a_ratio_is_never_exceeded_and_never_wasted(out, width, percent, share):
    budget = Budget("unstructured", ratio=percent / 100, rank_share=share / 100)
    try:
        pattern, rank = budget.resolve(out, width)
    except BudgetError:
        return  # rank beyond the weight: kept whole and all of it low-rank
    allowed = (100 - percent) / 100 * out * width
    used = pattern.count + rank * (out + width)
    assert used <= allowed + 1e-6
    assert used > allowed - (out + width) - 2


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget("2:4", ratio=0.6), "infeasible with 2:4.*largest feasible ratio is 0.5"),
        (Budget("2:4", ratio=0.5, rank=4), "not both"),
        (Budget("2:4", sparsity=0.5), "already fixes the sparsity"),
        (Budget("2:4", ratio=0.5, rank_share=0.1), "leave out rank_share"),
        (Budget("unstructured"), "needs a sparsity"),
        (Budget("unstructured", ratio=0.5), "needs rank_share"),
        (Budget("row", sparsity=0.5, ratio=0.5), "not both"),
        (Budget("row", sparsity=0.5, rank_share=0.5), "with sparsity, give rank"),
        (Budget(SemiStructured(2, 4), ratio=0.5), "already holds its count"),
        (Budget("2:4", rank=9), "rank 9 is larger than the weight .8×16.; use rank=8 or less"),
    ],
)
def test_errors(budget, message):
    with pytest.raises(BudgetError, match=message):
        budget.resolve(8, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": -1}, "rank must be at least 0, got -1"),
        ({"rank": 1.9}, "rank must be a valid integer, got 1.9"),
        ({"rank": True}, "rank must be a valid integer"),
        ({"sparsity": 1.5}, "sparsity must be less than or equal to 1, got 1.5"),
        ({"ratio": math.nan}, "ratio must be .*got nan"),
        ({"rank_share": "x"}, "rank_share must be a valid number"),
        ({"pattern": "9" * 5000 + ":4"}, "not of the form"),
    ],
)
def test_values_that_cannot_be(fields, message):
    with pytest.raises(HasslefreeError, match=message):
        Budget(**{"pattern": "row", **fields}).resolve(8, 16)
    with pytest.raises(HasslefreeError, match=message):
        hasslefree.decompose(torch.ones(8, 16), **fields)


@pytest.mark.parametrize("given", [{"seed": 10**400}, {"seed": -1}, {"method": 3}, {"gram": torch.eye(16)}])
def test_arguments_of_decompose_that_cannot_be(given):
    with pytest.raises(HasslefreeError, match=next(iter(given))):
        hasslefree.decompose(torch.ones(8, 16), rank=1, **given)


def test_a_number_of_numpy_is_a_number():
    assert Budget("2:4", rank=numpy.int64(3)) == Budget("2:4", rank=3)


def test_errors_of_the_pattern():
    for name, kind, message in [
        ("5:4", PatternError, "impossible"),
        ("2:x", PatternError, "not of the form"),
        ("unstructred", UnknownNameError, "Did you mean 'unstructured'"),
    ]:
        with pytest.raises(HasslefreeError, match=message):
            Budget(name, rank=1).resolve(8, 16)
        assert list(Budget(name, rank=1).problems()), kind
    with pytest.raises(PatternError, match="no multiple of 4"):
        Budget("2:4", rank=1).resolve(8, 15)
