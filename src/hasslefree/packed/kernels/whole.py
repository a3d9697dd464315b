"""Kernels that compute a whole layer, y = x (S + u v)ᵀ + b, without gradients.

A layer has one of them. What a kernel prepares from the tensors of the layer, such as codes in
another order, belongs to the kernel.
"""

import logging
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hasslefree.packed.kernels import arrays, backends
from hasslefree.packed.kernels.arrays import LayerArrays, is_traced, takes_few
from hasslefree.packed.kernels.byte_codes import ByteCodes
from hasslefree.packed.kernels.factors import FactorArrays, add_low_rank
from hasslefree.packed.kernels.int4 import Int4
from hasslefree.packed.layouts import Columns
from hasslefree.packed.spec import LayerSpec

if TYPE_CHECKING:
    from hasslefree.packed.linear import SparseLowRankLinear

logger = logging.getLogger(__name__)
# Entries of u and v that one thread multiplies faster than torch starts several.
MAX_FACTORS = 1 << 19


class Kernel(Protocol):
    """A way to compute a whole layer."""

    @property
    def bytes(self) -> int:
        """The memory of what the kernel has prepared."""

    def product(self, layer: "SparseLowRankLinear", x: Tensor) -> Tensor | None:
        """Compute the layer, and prepare for it if necessary: (..., in) → (..., out); None if the
        kernel cannot. No gradient is needed.
        """

    def release(self, layer: "SparseLowRankLinear") -> None:
        """Give the tensors that the kernel has taken back to the layer."""


def kernel_for(spec: LayerSpec) -> Kernel:
    """The kernel of a layer."""
    if spec.grid is not None:
        return CodesKernel()
    if isinstance(spec.layout, Columns):
        return NoKernel()
    return NumbaKernel()


class NoKernel:
    """No kernel computes the whole layer."""

    bytes = 0

    def product(self, layer: "SparseLowRankLinear", x: Tensor) -> None:
        return None

    def release(self, layer: "SparseLowRankLinear") -> None:
        pass


@dataclass(frozen=True)
class Prepared:
    """What `NumbaKernel` makes of the tensors of a layer.

    Args:
        key: of the tensors.
        tensors: what the key names; while they are held, no other tensor gets their addresses.
        sparse: S; and L and the bias as well, unless the factors are codes.
        factors: L and the bias, if the factors are codes that one thread multiplies.
    """

    key: tuple[tuple[int, int], ...]
    tensors: tuple[Tensor, ...]
    sparse: LayerArrays | None
    factors: FactorArrays | None = None


NOTHING = Prepared((), (), None)


class NumbaKernel:
    """The backend `numba` with a few tokens: a call for the whole layer, or where the factors are
    codes, one for S and one for L.
    """

    def __init__(self) -> None:
        self.prepared = NOTHING  # replaced as a whole, because threads may share a layer

    @property
    def bytes(self) -> int:
        """Without the scales and the bias of coded factors in float32."""
        sparse = self.prepared.sparse
        return 0 if sparse is None else sparse.bytes

    def product(self, layer: "SparseLowRankLinear", x: Tensor) -> Tensor | None:
        if not backends.HAS_NUMBA or layer.backend not in (None, "numba") or layer.wide_factors:
            return None
        if is_traced(x) or not takes_few(x) or not x.is_cpu:
            return None
        values = layer._parameters["values"]  # no look-up by the module: a token takes little time
        assert values is not None
        if x.shape[-1] != layer.in_features or x.dtype != values.dtype:
            return None
        key = key_of(layer)
        prepared = self.prepared
        if prepared.key != key:
            prepared = prepare(layer, key)
            self.prepared = prepared
        if prepared.sparse is None:
            return None
        y = prepared.sparse.product(x)
        if layer.spec.factor_bits is None:
            return y
        flat = y.view(-1, layer.out_features)
        inputs = x.reshape(-1, layer.in_features).contiguous()
        if prepared.factors is not None:
            prepared.factors.add(inputs, flat)
            return y
        factors = layer.factors()
        assert factors is not None
        y = add_low_rank(flat, inputs, *factors).view(y.shape)
        bias = layer._parameters["bias"]
        return y if bias is None else y.add_(bias)

    def release(self, layer: "SparseLowRankLinear") -> None:
        self.prepared = NOTHING


def prepare(layer: "SparseLowRankLinear", key: tuple[tuple[int, int], ...]) -> Prepared:
    """Make the arrays of a layer whose tensors have this key; none if a tensor is not contiguous in
    the memory of the CPU.
    """
    tensors = []
    for tensor in (*layer._parameters.values(), *layer._buffers.values()):
        if tensor is not None:
            if not tensor.is_cpu or not tensor.is_contiguous():
                return Prepared(key, (), None)
            tensors.append(tensor.detach())
    layout = layer.spec.layout
    assert not isinstance(layout, Columns)
    stored = (layout, layer.in_features, layer.values, layer.index)
    u = layer.low_rank_u
    v = layer.low_rank_v
    if layer.spec.factor_bits is None:
        return Prepared(key, tuple(tensors), LayerArrays(*stored, u, v, layer.bias))
    assert u is not None
    assert v is not None
    factors = None
    # Several threads of torch are faster for more.
    if layer.values.dtype == torch.bfloat16 and u.numel() + v.numel() <= MAX_FACTORS:
        u_scale = layer.get_parameter("low_rank_u_scale")
        v_scale = layer.get_parameter("low_rank_v_scale")
        factors = FactorArrays(u, v, u_scale, v_scale, layer.bias)
    return Prepared(key, tuple(tensors), LayerArrays(*stored), factors)


class CodesKernel:
    """The backends `int4` and `numba` for an S on a grid, whose pruned entries get the codes of
    their zeros.

    The kernel takes the buffer `weight_packed` of the layer, whose codes it holds in the order of
    torch's operators or in a byte each, so that one copy of the codes is in memory. `release`
    returns them. While the kernel holds codes, the buffer is None. Reading the tensors of the layer
    releases them, also while they are prepared: therefore the lock may be taken twice by one
    thread, and `key` is set last.
    """

    def __init__(self) -> None:
        self.operands: Int4 | ByteCodes | None = None
        self.index: Tensor | None = None  # of these codes, even if the layer gets another
        # L and the bias for a few tokens on a CPU; None without both, or if `takes_few` is false.
        self.factors: FactorArrays | None = None
        self.takes_few = False
        self.key: tuple[tuple[int, int], ...] = ()  # of the tensors that were prepared
        self.preparing = threading.RLock()  # threads may share a layer

    @property
    def bytes(self) -> int:
        if self.operands is None:
            return 0
        return self.operands.bytes

    def product(self, layer: "SparseLowRankLinear", x: Tensor) -> Tensor | None:
        if layer.backend not in (None, "int4", "numba") or layer.wide_factors:
            return None
        if x.dtype != layer.weight.dtype or x.shape[-1] != layer.in_features:
            return None
        flat = x.reshape(-1, x.shape[-1])
        traced = is_traced(x)
        if not traced and self.key != key_of(layer):
            with self.preparing:
                self._prepare(layer)
        operands = self.operands
        if operands is None or operands.codes.device != x.device:
            return None
        if self.takes_few and not traced and takes_few(x):
            y = operands.few_product(flat)
            if self.factors is not None:
                self.factors.add(flat.contiguous(), y)
        else:
            y = self._flat_product(operands, layer, flat)
        return y.view(*x.shape[:-1], layer.out_features)

    def _flat_product(
        self,
        operands: Int4 | ByteCodes,
        layer: "SparseLowRankLinear",
        x: Tensor,
    ) -> Tensor:
        """x: (tokens, in) → (tokens, out)."""
        u, v = layer.factors() or (None, None)
        y = operands.product(x, u, v)
        bias = layer._parameters["bias"]
        if bias is not None:
            y.add_(bias)
        return y

    def _prepare(self, layer: "SparseLowRankLinear") -> None:
        """Take the codes of the layer, if this is its backend and no other thread has done so."""
        if self.key == key_of(layer):
            return
        self.release(layer)
        case = layer.case()
        backend = backends.choose(case, layer.backend)
        if backend in ("int4", "numba"):
            self._take(layer, backend)
        else:
            obstacle = backends.BACKENDS["numba"](case)
            if obstacle and case.device == "cpu":
                log_slower(obstacle)
        self.key = key_of(layer)

    def _take(self, layer: "SparseLowRankLinear", backend: str) -> None:
        tensors = layer.tensors()
        spec = layer.spec
        assert spec.grid is not None
        codes = spec.codes(tensors)
        is_int4 = backend == "int4"
        scale, low = spec.scale_and_low(codes, tensors, rounded=is_int4)
        if is_int4:
            self.operands = Int4.of(codes, spec.grid.bits, scale, low)
        else:
            self.operands = ByteCodes(codes, scale.float(), low.float())
        self.index = layer.index
        layer._buffers["weight_packed"] = None
        if not scale.is_cpu:
            return
        for tensor in tensors.values():
            arrays.give_up_pages(tensor)
        self._take_factors(layer)

    def _take_factors(self, layer: "SparseLowRankLinear") -> None:
        """Prepare L and the bias for a few tokens."""
        u = layer.low_rank_u
        v = layer.low_rank_v
        if u is None or v is None:
            self.takes_few = layer.bias is None
            return
        is_few = u.numel() + v.numel() <= MAX_FACTORS
        self.takes_few = arrays.HAS_NUMBA and is_few and layer.weight.dtype == torch.bfloat16
        if self.takes_few:
            u_scale = layer._parameters.get("low_rank_u_scale")
            v_scale = layer._parameters.get("low_rank_v_scale")
            self.factors = FactorArrays(u, v, u_scale, v_scale, layer.bias)

    def codes_of_rows(self, selected: Tensor) -> Tensor:
        """Codes of rows of the buffer `weight_packed` that the kernel has taken: indices (rows,) →
        uint8 (rows, in).
        """
        assert self.operands is not None
        return self.operands.codes_of_rows(selected)

    def release(self, layer: "SparseLowRankLinear") -> None:
        if self.operands is None:
            return
        if layer._buffers["weight_packed"] is None:
            codes = self.operands.all_codes()
            assert self.index is not None
            layer._buffers["weight_packed"] = layer.spec.pack(codes, self.index)
        self.operands = None
        self.index = None
        self.factors = None
        self.takes_few = False
        self.key = ()


def key_of(layer: "SparseLowRankLinear") -> tuple[tuple[int, int], ...]:
    """Identify the tensors of a layer, and their contents by the versions that autograd counts."""
    key = []
    for tensors in (layer._parameters, layer._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                version = 0 if tensor.is_inference() else tensor._version
                key.append((tensor.data_ptr(), version))
    return tuple(key)


@cache
def log_slower(obstacle: str) -> None:
    """Log once why layers are slow."""
    logger.warning(
        "S is unpacked at every call, which is slow (%s); the backend unpacked (--backend unpacked)"
        " is faster, and takes the memory of the dense model",
        obstacle,
    )
