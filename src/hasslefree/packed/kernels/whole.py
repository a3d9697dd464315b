"""Kernels that compute a whole layer, y = x (S + u v)ᵀ + b, without gradients.

Each layer has one kernel, which holds whatever it prepares from the tensors of the layer, such as
codes in another order.
"""

import logging
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasslefree.core.products import is_traced
from hasslefree.packed.kernels import arrays, backends
from hasslefree.packed.kernels.arrays import LayerArrays, takes_few
from hasslefree.packed.kernels.byte_codes import ByteCodes
from hasslefree.packed.kernels.factors import FactorArrays, add_low_rank
from hasslefree.packed.kernels.int4 import Int4
from hasslefree.packed.kernels.int8 import Int8
from hasslefree.packed.layouts import Columns
from hasslefree.packed.spec import LayerSpec

if TYPE_CHECKING:
    from hasslefree.packed.linear import SparseLowRankLinear

# The codes and scales of S on a grid, in the form that a backend multiplies by.
Operands = Int4 | Int8 | ByteCodes
# The addresses and versions of a layer's tensors.
Key = tuple[tuple[int, int], ...]
logger = logging.getLogger(__name__)
# The most entries of u and v that one thread multiplies faster than torch starts several threads.
MAX_FACTORS = 1 << 19


class Kernel:
    """A kernel for a whole layer. The base class computes no layer."""

    @property
    def bytes(self) -> int:
        """Memory used by what the kernel has prepared, in bytes."""
        return 0

    def product(self, layer: "SparseLowRankLinear", x: Tensor) -> Tensor | None:
        """Compute the layer without gradients, after preparing for it if necessary: (..., in) →
        (..., out); None if the kernel cannot.
        """
        return None

    def release(self, layer: "SparseLowRankLinear") -> None:
        """Return to the layer the tensors that the kernel has taken."""

    def forget(self) -> None:
        """Drop what was prepared, after `release`."""

    def lock(self) -> AbstractContextManager[Any]:
        """A lock: while one thread holds it, no other thread takes or releases tensors."""
        return nullcontext()


def kernel_for(spec: LayerSpec) -> Kernel:
    """The kernel of a layer."""
    if spec.grid is not None:
        return CodesKernel()
    if isinstance(spec.layout, Columns):
        return Kernel()
    return NumbaKernel()


@dataclass(frozen=True)
class Prepared:
    """The arrays that `NumbaKernel` prepares from the tensors of a layer.

    Args:
        key: of the tensors.
        tensors: the tensors, held so that no others get their addresses.
        sparse: S; also L and the bias, unless the factors are codes. None if not possible.
        factors: L and the bias, if the factors are codes that one thread multiplies.
    """

    key: Key = ()
    tensors: tuple[Tensor, ...] = ()
    sparse: LayerArrays | None = None
    factors: FactorArrays | None = None


NOTHING = Prepared()


class NumbaKernel(Kernel):
    """The backend `numba` for a few tokens: one call for the whole layer or, if the factors are
    codes, one for S and one for L.
    """

    def __init__(self) -> None:
        self.prepared = NOTHING  # replaced as a whole, because threads may share a layer

    @property
    def bytes(self) -> int:
        """As in `Kernel`, without the float32 scales and bias of coded factors."""
        sparse = self.prepared.sparse
        return 0 if sparse is None else sparse.bytes

    def product(self, layer: "SparseLowRankLinear", x: Tensor) -> Tensor | None:
        if not backends.HAS_NUMBA or layer.backend not in (None, "numba") or layer.wide_factors:
            return None
        if is_traced(x) or not takes_few(x) or not x.is_cpu:
            return None
        values = layer._parameters["values"]  # faster than `layer.values`
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
        self.forget()

    def forget(self) -> None:
        self.prepared = NOTHING


def prepare(layer: "SparseLowRankLinear", key: Key) -> Prepared:
    """Make the arrays of a layer whose tensors have this key, unless a tensor is on another device
    than the CPU or is not contiguous.
    """
    tensors = tensors_of(layer)
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors):
        return Prepared(key)
    layout = layer.spec.layout
    assert not isinstance(layout, Columns)
    stored = (layout, layer.in_features, layer.values, layer.index)
    if layer.spec.factor_bits is None:
        plain = (layer.low_rank_u, layer.low_rank_v, layer.bias)
        return Prepared(key, tensors, LayerArrays(*stored, *plain))
    return Prepared(key, tensors, LayerArrays(*stored), factor_arrays(layer))


@dataclass(frozen=True)
class PreparedCodes:
    """The operands that `CodesKernel` prepares from the tensors of a layer.

    Args:
        key: of the tensors that remain in the layer.
        tensors: these tensors, held so that no others get their addresses; empty without operands.
        operands: the codes and scales; None if another backend multiplies.
        index: of these codes, kept in case the layer gets another index.
        factors: L and the bias, if one thread multiplies them for a few tokens on a CPU.
        takes_few: True if a few tokens on a CPU need no product of torch with L.
    """

    key: Key = ()
    tensors: tuple[Tensor, ...] = ()
    operands: Operands | None = None
    index: Tensor | None = None
    factors: FactorArrays | None = None
    takes_few: bool = False


NO_CODES = PreparedCodes()


class CodesKernel(Kernel):
    """The backends `backends.OF_CODES`, for S on a grid. Pruned entries get the codes of zeros.

    The kernel takes the buffer `weight_packed` from the layer and holds the codes in the order of
    torch's operators or in a byte each, so that memory has one copy of them. Meanwhile the buffer
    of the layer is None; `release` restores it. Reading the tensors of the layer calls `release`,
    also during preparation, so the lock is reentrant.
    """

    def __init__(self) -> None:
        self.prepared = NO_CODES  # replaced as a whole, because threads may share a layer
        self.taking = threading.RLock()

    @property
    def bytes(self) -> int:
        operands = self.prepared.operands
        return 0 if operands is None else operands.bytes

    def lock(self) -> AbstractContextManager[Any]:
        if torch.compiler.is_compiling():  # a lock cannot be traced
            return nullcontext()
        return self.taking

    def product(self, layer: "SparseLowRankLinear", x: Tensor) -> Tensor | None:
        if layer.backend not in (None, *backends.OF_CODES) or layer.wide_factors:
            return None
        weight_scale = layer._parameters.get("weight_scale")
        if weight_scale is None:  # replaced by a tensor, as in `functional_call`
            return None
        if x.dtype != weight_scale.dtype or x.shape[-1] != layer.in_features:
            return None
        if self.prepared.operands is not None and layer._buffers["weight_packed"] is not None:
            return None  # the layer has been given other codes
        flat = x.reshape(-1, x.shape[-1])
        traced = is_traced(x)
        prepared = self.prepared
        if not traced and prepared.key != key_of(layer):
            with self.taking:
                prepared = self._prepare(layer)
        operands = prepared.operands
        if operands is None or operands.codes.device != x.device:
            return None
        input_scale = layer._parameters.get("weight_input_scale")
        scaled = flat if input_scale is None else flat * input_scale
        shape = (*x.shape[:-1], layer.out_features)
        if prepared.takes_few and not traced and takes_few(x):
            y = operands.few_product(scaled)
            if prepared.factors is not None:
                prepared.factors.add(flat.contiguous(), y)
            return y.view(shape)
        u, v = layer.factors() or (None, None)
        if input_scale is None:
            y = operands.product(flat, u, v)
        else:
            y = add_low_rank(operands.product(scaled), flat, u, v)
        bias = layer._parameters["bias"]
        if bias is not None:
            y.add_(bias)
        return y.view(shape)

    def _prepare(self, layer: "SparseLowRankLinear") -> PreparedCodes:
        """Take the codes, if the layer has a backend for codes and no other thread took them."""
        if self.prepared.key == key_of(layer):
            return self.prepared
        case = layer.case()
        backend = backends.choose(case, layer.backend)
        if backend in backends.OF_CODES:
            self.prepared = self._take(layer, backend)
        else:
            self.release(layer)
            obstacle = backends.BACKENDS["numba"](case)
            if obstacle and case.device == "cpu":
                log_slower(obstacle)
            self.prepared = PreparedCodes(key_of(layer))
        return self.prepared

    def _take(self, layer: "SparseLowRankLinear", backend: str) -> PreparedCodes:
        """Take the codes of the layer and convert them for a backend."""
        spec = layer.spec
        assert spec.grid is not None
        taken = self.prepared.operands
        is_taken = layer._buffers["weight_packed"] is None
        if taken is not None and is_taken and spec.grid.rate is not None:
            # Only other tensors have changed. Entropy coding the codes would be slow.
            tensors = layer._sparse_tensors()
            codes = taken.all_codes()
        else:
            tensors = layer.tensors()
            codes = layer.codes(tensors)
        layer.decoded = None
        scale, low = spec.scale_and_low(codes, tensors, rounded=backend == "int4")
        operands: Operands
        if backend == "int4":
            operands = Int4.of(codes, spec.grid.bits, scale, low)
        elif backend == "int8":
            operands = Int8.of(codes, scale)
        else:
            operands = ByteCodes.of(codes, spec.grid.bits, scale, low)
        layer._buffers["weight_packed"] = None
        factors = None
        is_few = False
        if scale.is_cpu:
            for tensor in tensors.values():
                if tensor is not None:
                    arrays.give_up_pages(tensor)
            factors = factor_arrays(layer)
            is_few = factors is not None or (layer.low_rank_u is None and layer.bias is None)
        left = tensors_of(layer)
        return PreparedCodes(key_of(layer), left, operands, layer.index, factors, is_few)

    def release(self, layer: "SparseLowRankLinear") -> None:
        prepared = self.prepared
        if prepared.operands is None or layer._buffers["weight_packed"] is not None:
            return
        codes = prepared.operands.all_codes()
        assert prepared.index is not None
        with torch.inference_mode(False):  # so that the buffer can be changed in place
            layer._buffers["weight_packed"] = layer.spec.pack(codes, prepared.index)
        self.forget()

    def forget(self) -> None:
        self.prepared = NO_CODES


def factor_arrays(layer: "SparseLowRankLinear") -> FactorArrays | None:
    """L and the bias of a layer as arrays; None without L, or if torch is faster than one thread of
    Numba for a few tokens.
    """
    u = layer.low_rank_u
    v = layer.low_rank_v
    if not arrays.HAS_NUMBA or u is None or v is None:
        return None
    if u.numel() + v.numel() > MAX_FACTORS or layer.weight.dtype != torch.bfloat16:
        return None
    u_scale = layer._parameters.get("low_rank_u_scale")
    v_scale = layer._parameters.get("low_rank_v_scale")
    return FactorArrays(u, v, u_scale, v_scale, layer.bias)


def key_of(layer: "SparseLowRankLinear") -> Key:
    """Identify the tensors of a layer, and their contents by the versions that autograd counts."""
    key = []
    for tensor in (*layer._parameters.values(), *layer._buffers.values()):
        if tensor is not None:
            key.append((tensor.data_ptr(), version_of(tensor)))
    return tuple(key)


def version_of(tensor: Tensor) -> int:
    """A number that rises when a tensor is changed in place; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def tensors_of(layer: "SparseLowRankLinear") -> tuple[Tensor, ...]:
    """The tensors that `key_of` identifies."""
    tensors = (*layer._parameters.values(), *layer._buffers.values())
    return tuple(tensor.detach() for tensor in tensors if tensor is not None)


@cache
def log_slower(obstacle: str) -> None:
    """Log, once per reason, why layers are slow."""
    logger.warning(
        "S is unpacked at every call, which is slow (%s); the backend unpacked (--backend unpacked)"
        " is faster, and takes the memory of the dense model",
        obstacle,
    )
