"""The choice of the backend that computes a product x Sᵀ.

`dense` and `unpacked` are torch's product with S, unpacked at every call or once; `int4` and `int8`
are in the modules of these names; `numba` is in `ops`, and for codes in `byte_codes`. The order of
preference, which docs/howto/run.md explains, was measured on CPUs: `int8` before `int4` with AVX2
only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hasslefree.core.grids import Grid
from hasslefree.errors import KernelError, UnknownNameError
from hasslefree.packed.kernels import int4, int8
from hasslefree.packed.kernels.arrays import HAS_NUMBA as HAS_NUMBA
from hasslefree.packed.layouts import Columns, Layout

# Backends with a kernel for a whole layer on a grid, in order of preference.
OF_CODES = ("int8", "int4", "numba")
NO_GRADIENTS = "it computes no gradients; use dense, or torch.no_grad()"


@dataclass(frozen=True)
class Case:
    """The properties of a product x Sᵀ that decide the backend.

    Args:
        device: the type of S's device, such as "cpu".
        dtype: of S, and of the scales of a quantised S.
        layout: of S in storage.
        grad: x or S needs a gradient.
        grid: of a quantised S.
        shape: (out, in) of a quantised S.
    """

    device: str
    dtype: torch.dtype
    layout: Layout
    grad: bool
    grid: Grid | None = None
    shape: tuple[int, int] = (0, 0)


def choose(case: Case, backend: str | None = None) -> str:
    """Choose the backend of a product.

    Unless one is requested, a CPU uses the first possible backend of `int8`, `int4` and `numba`,
    CUDA uses `int4` if possible, and the backend is `dense` otherwise. `unpacked`, which keeps a
    second copy of S, must be requested.

    Args:
        case: the product.
        backend: the requested backend, or None.

    Raises:
        UnknownNameError: no such backend.
        KernelError: the requested backend is not possible; the message says why.
    """
    if backend is not None:
        check_backend(backend)
        obstacle = BACKENDS[backend](case)
        if obstacle is not None:
            raise KernelError(f"backend {backend!r} is not possible: {obstacle}")
        return backend
    for name in OF_CODES:
        if BACKENDS[name](case) is None:
            return name
    return "dense"


def check_backend(name: str) -> None:
    """Raise an UnknownNameError if no backend has this name."""
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)


def _dense(case: Case) -> None:
    return None


def _unpacked(case: Case) -> str | None:
    if case.grad:
        return NO_GRADIENTS
    return None


def _numba(case: Case) -> str | None:
    if not HAS_NUMBA:
        return 'Numba is not installed; pip install "hasslefree[fast]"'
    if case.device != "cpu":
        return f"it runs on a CPU, and the layer is on {case.device}; use dense"
    if case.grad:
        return NO_GRADIENTS
    if case.grid is None and isinstance(case.layout, Columns):
        return "there is no kernel for pattern structured, which keeps whole columns; use dense"
    if case.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 and float16, not {case.dtype}; use dense"
    return None


def _by_torch(
    obstacle_of: Callable[[str, torch.dtype, Grid, tuple[int, int]], str | None],
    case: Case,
) -> str | None:
    """The reason why torch's operators for codes cannot be used; None if they can."""
    if case.grid is None:
        return "it multiplies quantised codes, and S is stored as floats; use numba or dense"
    if case.grad:
        return NO_GRADIENTS
    obstacle = obstacle_of(case.device, case.dtype, case.grid, case.shape)
    if obstacle is None:
        return None
    return f"{obstacle}; leave out the backend, or use dense or unpacked"


# By name of the backend: the reason why it is not possible in a case, or None.
BACKENDS: dict[str, Callable[[Case], str | None]] = {
    "dense": _dense,
    "unpacked": _unpacked,
    "numba": _numba,
    "int4": partial(_by_torch, int4.obstacle),
    "int8": partial(_by_torch, int8.obstacle),
}
