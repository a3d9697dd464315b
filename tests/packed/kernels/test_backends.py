"""Which backend is chosen, and what a backend that is not possible says."""

import pytest
import torch

from hasslefree.core.grids import Grid
from hasslefree.errors import KernelError
from hasslefree.packed.kernels import backends, int4, int8
from hasslefree.packed.kernels.backends import BACKENDS, Case, choose
from hasslefree.packed.layouts import Bitmask, Columns, PackedGroups

# A layer in codes of four bits that torch's operators take.
CODED = {"grid": Grid(), "shape": (64, 128), "layout": PackedGroups(1, 1), "dtype": torch.bfloat16}
# One whose codes have eight bits, and a scale for each row.
IN_BYTES = CODED | {"grid": Grid(8, None, symmetric=True)}


def case(**changes):
    fields = {"device": "cpu", "dtype": torch.float32, "layout": PackedGroups(2, 4), "grad": False}
    return Case(**{**fields, **changes})


@pytest.fixture
def everything(monkeypatch):
    """A machine with Numba, with torch's operator for eight bits, and with a GPU whose torch has those for four."""
    monkeypatch.setattr(backends, "HAS_NUMBA", True)
    monkeypatch.setattr(int8, "without", lambda: None)
    monkeypatch.setattr(int4, "without_cuda", lambda: None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "numba"),
        ({"layout": PackedGroups(4, 8)}, "numba"),
        ({"layout": Bitmask(), "dtype": torch.float16}, "numba"),
        ({"layout": Columns()}, "dense"),
        ({"grad": True}, "dense"),
        ({"dtype": torch.float64}, "dense"),
        ({"device": "cuda"}, "dense"),
        ({"device": "cuda", "layout": Bitmask()}, "dense"),
        ({"device": "cuda", **CODED}, "int4"),
        ({"device": "cuda", **CODED, "grid": Grid(5, 16)}, "int4"),
        ({"device": "cuda", **CODED, "grad": True}, "dense"),
        (IN_BYTES, "int8"),
        ({**IN_BYTES, "dtype": torch.float32}, "numba"),
        ({**IN_BYTES, "device": "cuda"}, "int4"),
        ({**IN_BYTES, "grad": True}, "dense"),
    ],
)
def test_the_rule(everything, changes, expected):
    assert choose(case(**changes)) == expected


def test_without_numba_the_rule_is_dense_and_the_wish_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(backends, "HAS_NUMBA", False)
    assert choose(case()) == "dense"
    with pytest.raises(KernelError, match=r'pip install "hasslefree\[fast\]"'):
        choose(case(), "numba")


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        ("numba", {"device": "cuda"}, "use dense"),
        ("numba", {"grad": True}, "no gradients"),
        ("numba", {"layout": Columns()}, "structured"),
        ("numba", {"dtype": torch.float64}, "float64"),
        ("unpacked", {"grad": True}, "no gradients"),
    ],
)
def test_a_backend_that_is_not_possible_says_why(everything, backend, changes, reason):
    with pytest.raises(KernelError, match=f"backend '{backend}' is not possible: .*{reason}"):
        choose(case(**changes), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_that_is_possible_is_taken(everything, backend):
    changes = {"int4": {"device": "cuda", **CODED}, "int8": IN_BYTES}.get(backend, {"dtype": torch.bfloat16})
    assert choose(case(**changes), backend) == backend
