"""Packing: there and back bit for bit; the bytes against a slow packer that writes out one bit after the other."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasslefree.errors import PatternError, UnknownNameError
from hasslefree.packed import layouts
from hasslefree.packed.layouts import Bitmask, Columns, PackedGroups, layout_of
from tests.packed.kernels import reference
from tests.packed.kernels.reference import bits_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
GROUPS = [(2, 4), (1, 4), (4, 8), (3, 8), (2, 8), (2, 5), (1, 3), (2, 3), (1, 7), (0, 4), (4, 4), (1, 1), (0, 1),
          (1, 2), (2, 2), (3, 16), (2, 256), (1, 257)]  # fmt: skip


def packed_bits(bits):
    return torch.from_numpy(np.packbits(bits, bitorder="little"))[None]


@st.composite
def matrices(draw, m=1, at_most=None):
    """S (out, in), in a multiple of m, at most so many entries in each group of m, zeros of both signs among them."""
    rows, groups = draw(st.integers(1, 4)), draw(st.integers(1, 6 if 1 < m < 100 else 2 if m > 1 else 30))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    values = torch.randn(rows, groups, m, generator=generator).to(dtype)
    most = m if at_most is None else at_most
    counts = torch.randint(0, most + 1, (rows, groups, 1), generator=generator)
    order = torch.rand(rows, groups, m, generator=generator).argsort(-1).argsort(-1)
    values = torch.where(order < counts, values, 0)
    minus = (values != 0) & (torch.rand(values.shape, generator=generator) < 0.2)
    return torch.where(minus, torch.tensor(-0.0, dtype=dtype), values).view(rows, groups * m)


def there_and_back(layout, sparse):
    values, index = layout.pack(sparse)
    assert layout.shapes(sparse.shape, values.numel()) == (values.shape, index.shape)
    assert (values.dtype, index.dtype) == (sparse.dtype, layout.index_dtype)
    layout.validate(index, sparse.shape[1], values.numel())
    assert torch.equal(bits_of(layout.unpack(values, index, sparse.shape[1])), bits_of(sparse))
    return values, index


@pytest.mark.parametrize(("n", "m"), GROUPS)
@given(st.data())
def test_groups_there_and_back_and_as_the_format_words_it(n, m, data):
    sparse = data.draw(matrices(m, n))
    values, index = there_and_back(layout_of(f"{n}:{m}"), sparse)
    expected, expected_index = reference.pack_groups(sparse, n, m)
    assert torch.equal(index, expected_index)
    assert torch.equal(bits_of(values), bits_of(expected))


@given(matrices())
def test_a_bitmask_there_and_back_and_as_the_format_words_it(sparse):
    values, index = there_and_back(Bitmask(), sparse)
    expected, expected_index = reference.pack_mask(sparse)
    assert torch.equal(index, expected_index)
    assert torch.equal(bits_of(values), bits_of(expected))


@given(matrices(), st.integers(0, 255))
def test_columns_there_and_back(sparse, left):
    gone = torch.tensor([left >> j & 1 == 1 for j in range(8)]).repeat(sparse.shape[1] // 8 + 1)[: sparse.shape[1]]
    sparse = sparse.masked_fill(gone, 0.0)
    _, columns = there_and_back(Columns(), sparse)
    assert columns.tolist() == [j for j in range(sparse.shape[1]) if (bits_of(sparse)[:, j] != 0).any()]


def test_the_layout_of_a_name():
    assert layout_of("3:8") == PackedGroups(3, 8)
    assert layout_of("row") == layout_of("unstructured") == Bitmask()
    assert layout_of("structured") == Columns()
    with pytest.raises(UnknownNameError, match="Did you mean 'unstructured'"):
        layout_of("unstructred")
    with pytest.raises(PatternError, match="5:4 is impossible"):
        layout_of("5:4")


def test_more_entries_than_the_pattern_allows():
    sparse = torch.zeros(5, 12)
    sparse[3, 4:7] = torch.tensor([1.0, -0.0, 2.0])
    with pytest.raises(
        PatternError, match="row 3, inputs 4 to 7, has 3 non-zeros, but pattern 2:4 allows 2; use another pattern"
    ):
        PackedGroups(2, 4).pack(sparse)
    with pytest.raises(PatternError, match="12 inputs, no multiple of 5"):
        PackedGroups(2, 5).pack(sparse)


@pytest.mark.parametrize("layout", [PackedGroups(2, 4), PackedGroups(2, 8), PackedGroups(3, 8), Bitmask()], ids=str)
def test_row_chunks_change_nothing(layout, monkeypatch):
    """Oracle: the same in one piece. Errors name the row of the whole matrix."""
    sparse = torch.zeros(7, 24)
    sparse[:, ::4] = torch.arange(1, 43).view(7, 6).float()
    values, index = layout.pack(sparse)
    monkeypatch.setattr(layouts, "CHUNK", 48)
    assert all(map(torch.equal, layout.pack(sparse), (values, index)))
    if isinstance(layout, PackedGroups):
        sparse[5, 8:14] = 1.0
        with pytest.raises(PatternError, match="row 5, inputs 8 to"):
            layout.pack(sparse)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (2, 5), (1, 3), (2, 8), (3, 8), (1, 4)])
def test_exactly_the_codes_that_packing_writes_are_valid(n, m):
    """Oracle: all codes of one group, told apart by whether some support packs to them; 3 groups, the others sound.
    Padding bits are zeros.
    """
    layout, width = PackedGroups(n, m), 3 * m
    supports = itertools.combinations(range(m), n)
    written = {}
    for support in supports:
        sparse = torch.zeros(1, width)
        for group in range(3):
            sparse[0, [group * m + j for j in (support if group == 1 else range(n))]] = 1.0
        written[tuple(layout.pack(sparse)[1][0].tolist())] = sparse
    sound = next(iter(written))
    bits = [byte >> k & 1 for byte in sound for k in range(8)]
    start = layout.code_bits
    for code in range(2**layout.code_bits):
        changed = bits[:start] + [code >> k & 1 for k in range(layout.code_bits)] + bits[2 * start :]
        index = packed_bits(changed)
        if tuple(index[0].tolist()) in written:
            layout.validate(index, width, 3 * n)
        else:
            with pytest.raises(
                PatternError, match=rf"row 0, inputs {m} to {2 * m - 1}, is not a valid code of pattern {n}:{m}"
            ):
                layout.validate(index, width, 3 * n)
    for bit in range(3 * start, len(bits)):
        index = packed_bits([*bits[:bit], 1, *bits[bit + 1 :]])
        with pytest.raises(PatternError, match="padding bit at the end of row 0"):
            layout.validate(index, width, 3 * n)


def test_impossible_masks_and_columns():
    mask = torch.tensor([[0b101, 0b1], [0, 0b10]], dtype=torch.uint8)
    Bitmask().validate(mask, 10, 4)
    with pytest.raises(PatternError, match="marks 4 entries, but 5 values are stored"):
        Bitmask().validate(mask, 10, 5)
    with pytest.raises(PatternError, match="padding bit at the end of row 1"):
        Bitmask().validate(mask, 9, 4)
    for columns, message in [([0, 3, 3], "ascending order"), ([2, 1], "ascending order"), ([-1, 2], "between 0 and 4"),
                             ([1, 5], "between 0 and 4")]:  # fmt: skip
        with pytest.raises(PatternError, match=message):
            Columns().validate(torch.tensor(columns, dtype=torch.int32), 5, len(columns))
    Columns().validate(torch.tensor([0, 4], dtype=torch.int32), 5, 2)


@pytest.mark.parametrize(
    ("pattern", "nonzeros"),
    [("2:4", 95), ("2:4", 97), ("row", -1), ("row", 193), ("structured", 13), ("structured", -8)],
)
def test_counts_that_no_weight_has(pattern, nonzeros):
    layout_of(pattern).shapes((8, 24), {"2:4": 96, "row": 192, "structured": 16}[pattern])
    with pytest.raises(PatternError, match=str(nonzeros)):
        layout_of(pattern).shapes((8, 24), nonzeros)


@pytest.mark.parametrize("pattern", ["2:4", "2:8", "4:8", "row", "structured"])
def test_gradients_reach_the_values(pattern):
    """Oracle: the gradient of the dense matrix, read at the stored places."""
    sparse = torch.zeros(3, 16)
    sparse[:, ::4] = 1.0
    layout = layout_of(pattern)
    values, index = layout.pack(sparse)
    values.requires_grad_()
    weights = torch.randn(3, 16)
    (layout.unpack(values, index, 16) * weights).sum().backward()
    assert torch.equal(
        layout.unpack(values.grad, index, 16), weights * layout.unpack(torch.ones_like(values), index, 16)
    )
