"""Products and unpacked rows from packed tensors, on the CPU. Oracle: float64 on the dense matrix."""

import ctypes
import importlib
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasslefree.errors import PatternError
from hasslefree.packed.kernels import arrays, ops
from hasslefree.packed.layouts import Bitmask, PackedGroups
from tests.packed.kernels import reference

pytest.importorskip("numba", reason="needs hasslefree[fast]")
masks = importlib.import_module("hasslefree.packed.kernels.masks")
# The operator, which traced calls use; others call the function.
linear_packed = torch.ops.hasslefree.packed_product.default

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Positions in one byte, across bytes, of no bits; masks of 5, 4 and 8 bits; a group that is longer than a word.
PATTERNS = [(2, 4), (1, 4), (2, 8), (1, 12), (2, 66), (1, 1), (2, 5), (3, 4), (4, 8), (3, 8), (4, 4), (0, 4)]
# Of this processor, and of those with less.
STEPS = [step for step in (0, masks.WITH_AVX2, masks.WITH_AVX512) if step <= masks.STEP]
steps = pytest.mark.parametrize("step", STEPS)
# On both sides of every change of way.
TOKENS = st.sampled_from([1, 2, 5, 6, 16, 17, 50])


def unpacked(op, *packed, dtype, width):
    """S, by way of the tiles: the product with the identity is exact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "direct_tokens", lambda *_: 0)
        return op(torch.eye(width, dtype=dtype), *packed).T


def inputs(tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    pattern=st.sampled_from(PATTERNS), out=st.integers(1, 70), groups=st.integers(1, 40), tokens=TOKENS,
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_groups(pattern, out, groups, tokens, dtype, seed):
    n, m = pattern
    s = reference.sparse(out, groups, n, m, dtype, seed)
    values, positions = reference.pack_groups(s, n, m)
    x = inputs(tokens, s.shape[1], dtype, seed)
    y = linear_packed(x, values, positions, f"{n}:{m}")
    assert y.dtype == dtype
    reference.assert_close(y, x, s)


@given(
    out=st.integers(1, 70), width=st.integers(1, 300), tokens=TOKENS,
    dtype=st.sampled_from(DTYPES), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_of_a_bitmask(out, width, tokens, dtype, share, seed):
    generator = torch.Generator().manual_seed(seed)
    s = inputs(out, width, dtype, seed) * (torch.rand(out, width, generator=generator) < share)
    s[1::3] = 0
    values, mask = reference.pack_mask(s)
    x = inputs(tokens, width, dtype, seed + 1)
    y = linear_packed(x, values, mask, "row")
    assert y.dtype == dtype
    reference.assert_close(y, x, s)


@steps
@pytest.mark.parametrize(
    ("pattern", "dtype"), [(p, DTYPES[i % 3]) for i, p in enumerate([p for p in PATTERNS if p[0]] + [(1, 1030)])]
)
def test_rows_are_unpacked_exactly(pattern, dtype, step, monkeypatch):
    """Oracle: the matrix that was packed, by registers and bit by bit. An odd number of groups leaves half a byte; the
    last row has no values behind it; positions of 1:1030 lie across three bytes.
    """
    monkeypatch.setattr(masks, "STEP", step)
    name = "{}:{}".format(*pattern)
    for groups in (1, 2, 7, 8, 9, 33):
        if groups * pattern[1] > 3000:
            continue
        s = reference.sparse(5, groups, *pattern, dtype, seed=groups)
        values, positions = reference.pack_groups(s, *pattern)
        like = {"dtype": dtype, "width": s.shape[1]}
        assert torch.equal(unpacked(linear_packed, values, positions, name, **like), s)
        assert torch.equal(unpacked(linear_packed, *reference.pack_mask(s), "row", **like), s)
        x = inputs(1, s.shape[1], dtype)
        reference.assert_close(linear_packed(x, values, positions, name), x, s)


@steps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4, 7, 8, 9, 33, 513])
def test_registers_of_2_4_and_what_they_leave(groups, dtype, step, monkeypatch):
    """Whole registers and every remainder, with and without vectors, for one token and more than go at once."""
    monkeypatch.setattr(masks, "STEP", step)
    monkeypatch.setattr(ops, "direct_tokens", lambda *_: 100)
    s = reference.sparse(7, groups, 2, 4, dtype, seed=groups)
    packed = reference.pack_groups(s, 2, 4)
    for tokens in (1, 3, 4, 5, 9):
        x = inputs(tokens, s.shape[1], dtype)
        reference.assert_close(linear_packed(x, *packed, "2:4"), x, s)


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_layer_of_several_tiles_that_do_not_come_out_even(tokens, monkeypatch):
    monkeypatch.setattr(ops, "TILE_BYTES", 1)
    monkeypatch.setattr(ops, "direct_tokens", lambda *_: 0)
    s = reference.sparse(3 * ops.MIN_TILE_ROWS + 5, 9, 2, 4, torch.float32, seed=0)
    x = inputs(tokens, s.shape[1], torch.float32)
    reference.assert_close(linear_packed(x, *reference.pack_groups(s, 2, 4), "2:4"), x, s)
    reference.assert_close(linear_packed(x, *reference.pack_mask(s), "row"), x, s)


@given(
    layout=st.sampled_from([*[PackedGroups(*pattern) for pattern in PATTERNS], Bitmask()]), out=st.integers(1, 70),
    groups=st.integers(1, 40), rank=st.integers(0, 20), with_bias=st.booleans(), tokens=st.integers(1, 9),
    step=st.sampled_from(STEPS), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_whole_layer_in_one_call(layout, out, groups, rank, with_bias, tokens, step, dtype, seed):
    """Oracle: the sum of its products in float64. Bits of a mask fill registers if 32 divides the inputs."""
    n, m = (layout.n, layout.m) if isinstance(layout, PackedGroups) else (16, 32)
    s = reference.sparse(out, groups, n, m, dtype, seed)
    packed = reference.pack_groups(s, n, m) if isinstance(layout, PackedGroups) else reference.pack_mask(s)
    u, v, b = (inputs(*shape, dtype, seed + 1) for shape in ((out, rank), (rank, s.shape[1]), (1, out)))
    x = inputs(tokens, s.shape[1], dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "STEP", step)
        layer = arrays.LayerArrays(layout, s.shape[1], *packed, u, v, b[0] if with_bias else None)
        y = layer.product(x)
    assert y.dtype == dtype
    b = b.double() if with_bias else torch.zeros(1, 1)
    expected = x.double() @ (s.double() + u.double() @ v.double()).T + b
    scale = x.double().abs() @ (s.double().abs() + u.double().abs() @ v.double().abs()).T + b.abs()
    epsilon = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[dtype]
    assert ((y.double() - expected).abs() <= epsilon * scale).all()


@pytest.mark.parametrize(
    ("out", "width", "tokens", "tiles"),
    [(1, 64, 33, False), (15, 64, 64, False), (16, 128, 65, False), (70, 64, 100, False), (150, 192, 161, False),
     (150, 192, 161, True)],
)  # fmt: skip
def test_many_tokens_by_tables_or_by_tiles(out, width, tokens, tiles, monkeypatch):
    """Whole tiles and blocks of tokens, and what they leave."""
    monkeypatch.setattr(ops, "multiplies_tiles", lambda: tiles)
    monkeypatch.setattr(ops, "MAX_TABLE_ROWS", 64)
    s = reference.sparse(out, width // 4, 2, 4, torch.bfloat16, seed=out)
    x = inputs(tokens + 1, width, torch.bfloat16).view(-1)[3 : 3 + tokens * width].view(tokens, width)  # 2-byte aligned
    reference.assert_close(linear_packed(x, *reference.pack_groups(s, 2, 4), "2:4"), x, s)


@pytest.mark.parametrize("out", [64, 600])
def test_the_dtype_of_a_product_under_autocast_is_that_of_its_inputs(out):
    """In one tile (64 rows) and in several (600)."""
    s = reference.sparse(out, 1024, 2, 4, torch.float32, seed=3)
    x = inputs(20, 4096, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.packed_product(x, *reference.pack_mask(s), "row")
    assert y.dtype == torch.float32


def test_every_pair_of_a_table_is_exact(monkeypatch):
    """Oracle: the matrix that was packed, by the product with the identity; NaN and Inf pass where they are used."""
    monkeypatch.setattr(ops, "multiplies_tiles", lambda: False)
    s = reference.sparse(96, 32, 2, 4, torch.bfloat16, seed=2, empty_rows=False)
    packed = reference.pack_groups(s, 2, 4)
    assert torch.equal(linear_packed(torch.eye(128).bfloat16(), *packed, "2:4").T, s)
    if masks.STEP != masks.WITH_AVX512:
        pytest.skip("this processor multiplies unpacked rows, in which a zero times NaN is NaN: tables need AVX-512")
    for value in (float("inf"), float("nan")):
        x = torch.zeros(64, 128).bfloat16()
        x[5, 7] = value
        y = linear_packed(x, *packed, "2:4")
        assert torch.equal(y[5].isfinite(), s[:, 7] == 0)
        assert y[torch.arange(64) != 5].isfinite().all()
        assert torch.equal(y[5].isnan(), (s[:, 7] != 0) & x[5, 7].isnan())


def test_sums_are_rounded_to_the_nearest_and_ties_to_even(monkeypatch):
    """Oracle: torch's cast. The sums are 1 + i/512, with ties of both kinds, and their negatives."""
    monkeypatch.setattr(ops, "multiplies_tiles", lambda: False)
    parts = torch.tensor([[1.0, i / 512] for i in range(32)]).repeat(2, 1)
    parts[32:] *= -1
    s = torch.zeros(64, 64).bfloat16()
    s[:, :2] = parts.bfloat16()
    x = torch.ones(64, 64).bfloat16()
    expected = s.float().sum(1).bfloat16().expand(64, 64)
    assert torch.equal(linear_packed(x, *reference.pack_groups(s, 2, 4), "2:4"), expected)


def test_inputs_and_values_may_be_views():
    """Oracle: their contiguous copies."""
    s = reference.sparse(16, 8, 2, 4, torch.float32, seed=1)
    values, positions = reference.pack_groups(s, 2, 4)
    x = inputs(1, 2 * s.shape[1], torch.float32)[:, ::2]
    strided = torch.stack([values, values], -1)[..., 0]
    assert torch.equal(
        linear_packed(x, strided, positions, "2:4"), linear_packed(x.contiguous(), values, positions, "2:4")
    )


@pytest.mark.parametrize("width", [15, 20, 64])
def test_no_index_reaches_outside_its_row(width):
    """Every bit of the index is set. Oracle: the row that follows in memory stays as it was."""
    groups = width // 5
    marked = np.zeros((2, -(-groups * 5 // 8)), np.uint8)
    masks.mark_positions(np.full((1, groups * 3 // 8 + 1), 255, np.uint8), 1, 5, 3, groups * 5, marked[:1])
    assert not marked[1].any()
    bits = np.unpackbits(marked[0], bitorder="little", count=groups * 5).reshape(groups, 5)
    assert (bits == [0, 0, 0, 0, 1]).all(), "the last of its group"
    rows = np.full((2, width), 7, np.uint32)
    all_set = np.full((1, -(-width // 8)), 255, np.uint8)
    masks.unpack_by_masks(np.ones(width + 64, np.uint32), np.zeros(1, np.int64), all_set, rows[:1], masks.STEP)
    assert (rows[0] == 1).all()
    assert (rows[1] == 7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="forbids a page by mprotect")
@steps
def test_registers_read_no_value_beyond_the_last(step, monkeypatch):
    """The values end where a page begins that nobody may read: to read it would end the process."""
    monkeypatch.setattr(masks, "STEP", step)
    page = mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, 2 * page), dtype=torch.float32)
    protect = ctypes.CDLL(None).mprotect
    second = ctypes.c_void_p(memory.data_ptr() + page)
    x = inputs(1, 64, torch.float32)
    for kept in (4, 1):  # one of so many entries; complete rows end with the last value
        s = inputs(3, 64, torch.float32) * (torch.arange(64) % kept == 0) + 0.0
        values, mask = reference.pack_mask(s)
        at_end = memory[: page // 4][-len(values) :]
        at_end.copy_(values)
        assert protect(second, ctypes.c_size_t(page), 0) == 0  # PROT_NONE
        try:
            reference.assert_close(arrays.LayerArrays(Bitmask(), 64, at_end, mask).product(x), x, s)
        finally:
            protect(second, ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)


@steps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inf_stays_in_its_row(step, dtype, monkeypatch):
    """Registers hold values of other inputs and of the row that follows: these count nothing."""
    monkeypatch.setattr(masks, "STEP", step)
    s = inputs(3, 64, dtype)
    s[0, 60:] = 0
    s[1] = torch.inf
    s[2, :8] = 0
    s[2, 5] = torch.inf
    x = inputs(1, 64, dtype).abs()
    y = arrays.LayerArrays(Bitmask(), 64, *reference.pack_mask(s)).product(x)
    reference.assert_close(y[:, :1], x, s[:1])
    assert (y[:, 1:] == torch.inf).all()


def test_a_mask_of_more_bits_than_values_reads_no_others():
    """Oracle: the values that are there. The mask has changed since the rows were counted."""
    s = inputs(2, 24, torch.float32) * (torch.arange(24) % 3 == 0) + 0.0  # no −0.0, which is stored
    values, mask = reference.pack_mask(s)
    layer = arrays.LayerArrays(Bitmask(), 24, values, mask)
    mask.fill_(255)
    y = layer.product(torch.ones(1, 24))
    torch.testing.assert_close(y[0, 0], values.sum())
    torch.testing.assert_close(y[0, 1], values[8:].sum())


@pytest.mark.parametrize("tokens", [1, 20, 64])
def test_an_index_may_be_a_view(tokens):
    """Oracle: its contiguous copy."""
    s = reference.sparse(64, 16, 2, 4, torch.bfloat16, seed=1)
    x = inputs(tokens, 64, torch.bfloat16)
    values, positions = reference.pack_groups(s, 2, 4)
    packed, mask = reference.pack_mask(s)
    by_columns = [index.T.contiguous().T for index in (positions, mask)]
    assert torch.equal(linear_packed(x, values, by_columns[0], "2:4"), linear_packed(x, values, positions, "2:4"))
    assert torch.equal(linear_packed(x, packed, by_columns[1], "row"), linear_packed(x, packed, mask, "row"))


def test_a_mask_of_another_number_of_entries_than_values():
    with pytest.raises(PatternError, match="8 entries, but there are 7 values"):
        linear_packed(inputs(1, 16, torch.float32), torch.ones(7), torch.full((1, 2), 0x0F, dtype=torch.uint8), "row")


def test_a_gradient_is_refused_and_not_left_out():
    s = reference.sparse(4, 4, 2, 4, torch.float32, seed=3)
    y = linear_packed(inputs(1, 16, torch.float32).requires_grad_(), *reference.pack_groups(s, 2, 4), "2:4")
    with pytest.raises(RuntimeError, match="autograd"):
        y.sum().backward()


@pytest.mark.parametrize("tokens", [1, 20])
def test_one_node_of_a_compiled_graph(tokens):
    """Oracle: the same without torch.compile; fullgraph raises at a break."""
    s = reference.sparse(24, 8, 2, 4, torch.float32, seed=4)
    values, positions = reference.pack_groups(s, 2, 4)
    packed, mask = reference.pack_mask(s)

    def both(x):
        return linear_packed(x, values, positions, "2:4") + linear_packed(x, packed, mask, "row")

    x = inputs(tokens, s.shape[1], torch.float32)
    with torch.no_grad():
        assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x))
    values = values.clone()
    for args in ((x, values, positions, "2:4"), (x, packed, mask, "row")):
        torch.library.opcheck(linear_packed, args)


THREADS = """
import json, sys, torch
from hasslefree.packed.kernels import arrays, ops
from tests.packed.kernels import reference
torch.set_num_threads(int(sys.argv[1]))
torch.set_num_threads = lambda count: None  # as vLLM does in its workers
answers = []
for n, m in ((2, 4), (4, 8)):
    s = reference.sparse(257, 32, n, m, torch.float32, seed=5)
    x = torch.randn(1, s.shape[1], generator=torch.Generator().manual_seed(6))
    packed = reference.pack_groups(s, n, m)
    answers.append(ops.packed_product(x, *packed, f"{n}:{m}").view(torch.int32).tolist())
    answers.append(ops.packed_product(torch.eye(s.shape[1]), *packed, f"{n}:{m}").view(torch.int32).tolist())
    answers.append(ops.packed_product(x, *reference.pack_mask(s), "row").view(torch.int32).tolist())
s = reference.sparse(257, 32, 2, 4, torch.bfloat16, seed=5)
x = torch.randn(200, 128, generator=torch.Generator().manual_seed(6)).bfloat16()
answers.append(ops.packed_product(x, *reference.pack_groups(s, 2, 4), "2:4").view(torch.int16).tolist())
import numba
print(json.dumps([[numba.get_num_threads(), torch.get_num_threads()], answers]))
"""


@pytest.mark.nightly
def test_the_number_of_threads_changes_no_bit():
    """Oracle: one thread. Numba fixes the most that it can use when it starts, hence the processes."""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "4", "OMP_NUM_THREADS": "4"}
    root = Path(__file__).parents[3]
    answers = {}
    for threads in (1, 3):
        command = [sys.executable, "-c", THREADS, str(threads)]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
        used, answers[threads] = json.loads(done.stdout)
        assert used == [threads, threads], "torch's number of threads is honoured, and left as it was"
    assert answers[3] == answers[1]
