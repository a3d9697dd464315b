"""Which backend computes a product x Sᵀ, by the rule of docs/howto/run.md: measured on a
CPU.

`dense` and `unpacked` are up to the caller, who unpacks S by torch at every call, or once; `ops`
has `numba`, and `int4` has `int4`.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.grids import Grid
from hasslefree.errors import KernelError, UnknownNameError
from hasslefree.packed.kernels import int4, ops
from hasslefree.packed.layouts import Columns, Layout, PackedGroups

# Looked up once: torch.compile cannot trace the search.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
NO_CODES = "S is stored as quantised codes, which it cannot read; use int4, dense or unpacked"
NO_GRADIENTS = "it computes no gradients; use dense, or torch.no_grad()"


@dataclass(frozen=True)
class Case:
    """What decides the backend of x Sᵀ. grad: x or the values need a gradient. grid, shape: of a
    quantised S.
    """

    device: str
    dtype: torch.dtype
    layout: Layout
    tokens: int
    grad: bool
    grid: Grid | None = None
    shape: tuple[int, int] = (0, 0)


def choose(case: Case, backend: str | None = None) -> str:
    """The name of the backend: the requested one, or by the rule of docs/howto/run.md.

    By that rule a CPU uses `numba` or `int4` where possible, CUDA uses `int4` for few tokens where
    possible, and everything else is `dense`. `unpacked`, which keeps a second copy of S, is never
    chosen. A KernelError says why a requested backend is not possible.
    """
    many = case.device == "cuda" and case.tokens > int4.CUDA_TOKENS
    if backend is None:
        for name in ("numba", "int4"):
            if not many and BACKENDS[name](case) is None:
                return name
        return "dense"
    check_backend(backend)
    if obstacle := BACKENDS[backend](case):
        raise KernelError(f"backend {backend!r} is not possible: {obstacle}")
    return "dense" if backend == "int4" and many else backend


def check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)


def product(
    x: Tensor, values: Tensor, index: Tensor, layout: Any,
    u: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x Sᵀ, or where `takes_layer` x Sᵀ + x vᵀ uᵀ + b, by `numba`: (..., in) → (..., out).

    u: (out, r); v: (r, in).
    """
    flat, traced = x.reshape(-1, x.shape[-1]), ops.is_traced(x)
    if isinstance(layout, PackedGroups):
        groups = ops.linear_groups if traced else ops.groups_product
        y = groups(flat, values, index, layout.n, layout.m, u, v, bias)
    else:
        y = (ops.linear_mask if traced else ops.mask_product)(flat, values, index)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def takes_layer(backend: str, x: Tensor, layout: PackedGroups, rank: int) -> bool:
    """Whether `numba` computes a whole layer in one call, for inputs (..., in)."""
    return backend == "numba" and rank > 0 and not layout.is_mask and ops.takes_few(x)


def _numba(case: Case) -> str | None:
    if case.grid:
        return NO_CODES
    if not HAS_NUMBA:
        return 'Numba is not installed; pip install "hasslefree[fast]"'
    if case.device != "cpu":
        return f"it runs on a CPU, and the layer is on {case.device}; use dense"
    if case.grad:
        return NO_GRADIENTS
    if isinstance(case.layout, Columns):
        return "there is no kernel for pattern structured, which keeps whole columns; use dense"
    if case.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes float32, bfloat16 and float16, not {case.dtype}; use dense"
    return None


def _int4(case: Case) -> str | None:
    if (
        case.grid is None
        or not isinstance(case.layout, PackedGroups)
        or case.layout.n < case.layout.m
    ):
        return "it takes a complete S as quantised codes, pattern dense; use numba or dense"
    if case.grad:
        return NO_GRADIENTS
    obstacle = int4.obstacle(case.device, case.dtype, case.grid, case.shape)
    return obstacle and f"{obstacle}; use dense or unpacked"


# By name: what says why a backend is not possible in a case, or None.
BACKENDS: dict[str, Callable[[Case], str | None]] = {
    "dense": lambda case: None,
    "unpacked": lambda case: NO_GRADIENTS if case.grad else None,
    "numba": _numba,
    "int4": _int4,
}
