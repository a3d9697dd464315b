"""Which way is taken, and what a way that is not possible says."""

import pytest
import torch

from hasslefree.core.grids import Grid
from hasslefree.errors import KernelError, ShapeError, UnknownNameError
from hasslefree.packed.kernels import backends, int4, ops
from hasslefree.packed.kernels.backends import BACKENDS, Case, choose, product
from hasslefree.packed.layouts import Bitmask, Columns, PackedGroups
from tests.packed.kernels import reference


def case(**changes):
    fields = {"device": "cpu", "dtype": torch.float32, "layout": PackedGroups(2, 4), "tokens": 1, "grad": False}
    return Case(**{**fields, **changes})


@pytest.fixture
def everything(monkeypatch):
    """A machine with Numba and Triton."""
    monkeypatch.setattr(backends, "HAS_NUMBA", True)
    monkeypatch.setattr(backends, "HAS_TRITON", True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "numba"),
        ({"layout": PackedGroups(4, 8), "tokens": 4096}, "numba"),
        ({"layout": Bitmask(), "dtype": torch.float16}, "numba"),
        ({"layout": Columns()}, "dense"),
        ({"grad": True}, "dense"),
        ({"dtype": torch.float64}, "dense"),
        ({"device": "cuda"}, "triton"),
        ({"device": "cuda", "tokens": 17}, "unpacked"),
        ({"device": "cuda", "layout": Bitmask()}, "unpacked"),
        ({"device": "cuda", "grid": Grid()}, "unpacked"),
        ({"device": "cuda", "grad": True}, "dense"),
    ],
)
def test_the_rule(everything, changes, expected):
    assert choose(case(**changes)) == expected


def test_on_a_gpu_without_triton_s_is_unpacked_once(everything, monkeypatch):
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    assert choose(case(device="cuda")) == "unpacked"


def test_without_numba_the_rule_is_dense_and_the_wish_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(backends, "HAS_NUMBA", False)
    assert choose(case()) == "dense"
    with pytest.raises(KernelError, match=r'pip install "hasslefree\[fast\]"'):
        choose(case(), "numba")


@pytest.mark.parametrize(
    ("way", "changes", "reason"),
    [
        ("numba", {"device": "cuda"}, "use triton or dense"),
        ("numba", {"grad": True}, "no gradients"),
        ("numba", {"layout": Columns()}, "structured"),
        ("numba", {"dtype": torch.float64}, "float64"),
        ("triton", {}, "the layer is on cpu"),
        ("triton", {"device": "cuda", "grad": True}, "no gradients"),
        ("triton", {"device": "cuda", "layout": PackedGroups(4, 8)}, "such as 2:4"),
        ("triton", {"device": "cuda", "layout": Bitmask()}, "such as 2:4"),
        ("unpacked", {"grad": True}, "no gradients"),
    ],
)
def test_a_way_that_is_not_possible_says_why(everything, way, changes, reason):
    with pytest.raises(KernelError, match=f"backend '{way}' is not possible: .*{reason}"):
        choose(case(**changes), way)


@pytest.mark.parametrize("way", BACKENDS)
def test_a_way_that_is_possible_is_taken(everything, way, monkeypatch):
    monkeypatch.setattr(int4, "without_cuda", lambda: None)
    device = "cpu" if way in ("dense", "unpacked", "numba") else "cuda"
    codes = {"grid": Grid(), "shape": (64, 64), "layout": PackedGroups(1, 1)} if way == "int4" else {}
    assert choose(case(device=device, dtype=torch.bfloat16, **codes), way) == way


def test_a_long_prompt_goes_the_dense_way_where_triton_takes_few_tokens(everything):
    assert choose(case(device="cuda", tokens=16), "triton") == "triton"
    assert choose(case(device="cuda", tokens=17), "triton") == "dense"


def test_a_missing_triton_is_an_error_that_says_what_to_install(everything, monkeypatch):
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    with pytest.raises(KernelError, match="pip install triton"):
        choose(case(device="cuda", dtype=torch.float16), "triton")


@pytest.mark.parametrize(
    ("name", "hint"), [("nunba", "Did you mean 'numba'"), ("semi-structured", "Known: dense, int4, numba")]
)
def test_an_unknown_backend_is_an_error_that_lists_the_known(name, hint):
    with pytest.raises(UnknownNameError, match=f"unknown backend '{name}'.*{hint}"):
        choose(case(), name)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
def test_any_leading_dimensions(shape):
    """Oracle: float64 on the dense matrix, and the shape that F.linear gives."""
    pytest.importorskip("numba", reason="needs hasslefree[fast]")
    s = reference.sparse(24, 8, 2, 4, torch.float32, seed=4)
    x = torch.randn(*shape, s.shape[1], generator=torch.Generator().manual_seed(1))
    for layout, packed in ((PackedGroups(2, 4), reference.pack_groups(s, 2, 4)), (Bitmask(), reference.pack_mask(s))):
        y = product("numba", x, *packed, layout)
        assert y.shape == (*shape, 24)
        reference.assert_close(y, x, s)


def test_triton_refuses_masks_instead_of_reading_them_as_positions():
    pytest.importorskip("triton", reason="needs triton")
    s = reference.sparse(8, 4, 4, 8, torch.float32, seed=4)
    x = torch.randn(1, s.shape[1])
    values, positions = reference.pack_groups(s, 4, 8)
    factors = s.new_empty(8, 0), s.new_empty(0, 32)
    with pytest.raises(KernelError, match="4:8, which is stored as masks; use dense"):
        ops.decode_cuda._init_fn(x, values, positions, [factors[0]], factors[1], None, 4, 8)


def test_triton_refuses_tensors_that_do_not_go_together():
    pytest.importorskip("triton", reason="needs triton")
    s = reference.sparse(8, 4, 2, 4, torch.float32, seed=4)
    x, u, v = torch.randn(1, 16), torch.randn(8, 3), torch.randn(3, 16)
    values, positions = reference.pack_groups(s, 2, 4)

    def call(x=x, values=values, u=u, v=v, bias=None):
        return ops.decode_cuda._init_fn(x, values, positions, [u], v, bias, 2, 4)

    with pytest.raises(KernelError, match="takes 16 tokens at most, got 17"):
        call(x=torch.randn(17, 16))
    with pytest.raises(ShapeError, match="inputs of width 16 need a width divisible by"):
        call(values=values[1:])
    with pytest.raises(ShapeError, match=r"got \(8, 2\) of torch.float32 and \(3, 16\)"):
        call(u=u[:, :2])
    with pytest.raises(ShapeError, match=r"the dtype torch.float32, got .* and \(3, 16\) of torch.bfloat16"):
        call(v=v.bfloat16())
    with pytest.raises(ShapeError, match=r"the bias must have the shape \(8,\), got \(1, 8\)"):
        call(bias=torch.randn(1, 8))
