"""The layer that takes the place of a linear one: y = x (S + u v)ᵀ + b, with S packed and separate
factors.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.core.factors import BITS, CodedRows
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import MemoryShortError
from hasslefree.packed.kernels import backends
from hasslefree.packed.kernels.int4 import CUDA_TOKENS, Int4, plain
from hasslefree.packed.kernels.ops import (
    Prepared,
    PreparedFactors,
    is_traced,
    takes_few,
)
from hasslefree.packed.layouts import Columns, PackedGroups
from hasslefree.packed.spec import LayerSpec
from hasslefree.packed.storage import Storage, pack_codes, unpack_codes
from hasslefree.validation import typed

logger = logging.getLogger(__name__)
FACTORS = ("low_rank_u", "low_rank_v")
OTHER_BITS = (
    "only 4 bits have fast operators; the backend unpacked is faster, and takes the dense model's"
    " memory"
)


class SparseLowRankLinear(nn.Module):
    """A linear layer whose weight is a sparse matrix plus a low-rank one.

    Args:
        spec: pattern, shape, rank and how S and the factors are stored. bias: whether there is one.

    S is in two tensors: the parameter `values`, and the integer buffer `positions`, `mask` or
    `columns`, which no cast to another dtype touches. On a grid (`packed.storage`), the integer
    buffers `weight_packed` and `weight_zero_point` and the parameter `weight_scale` take the place
    of the values. Where the backend `int4` runs on a CPU, the buffer `weight_packed` is uint8, in
    the order of the backend; `tensors` and state dicts have that of the file. The factors are
    `low_rank_u` (out, r) and `low_rank_v` (r, in), absent for rank 0. In eight bits they are int8
    buffers, with the parameters `low_rank_u_scale` (out,) and `low_rank_v_scale` (r,), and unpacked
    at every call. How x Sᵀ is computed is chosen at every call
    (`hasslefree.packed.kernels.backends`), or set by `use`.
    """

    values: nn.Parameter
    low_rank_u: Tensor | None
    low_rank_v: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        spec: LayerSpec,
        bias: bool,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.spec, self.storage = spec, spec.storage
        self.out_features, self.in_features = spec.shape
        self.backend: str | None = None
        self.merged_weight: Tensor | None = None  # S + u v, which replaces all three
        # S unpacked, for calls without gradients; whoever asked for it promised not to change S.
        self.unpacked_copy: Tensor | None = None
        self.wide_factors: dict[
            str, Tensor
        ] = {}  # the values of coded factors, while they are trained
        self.prepared: Prepared | None = None  # the arrays for a few tokens on a CPU
        self.int4: Int4 | None = None  # codes of four bits as torch's operators take them
        self.int4_key: tuple[
            tuple[int, int], ...
        ] = ()  # the tensors for which it was prepared, or is not possible
        self.prepared_factors: PreparedFactors | None = (
            None  # beside them, for a few tokens on a CPU
        )
        self._fuses = isinstance(self.storage.layout, PackedGroups) and not (
            spec.grid or spec.factor_bits
        )
        tensors = spec.tensors()
        if bias:
            tensors["bias"] = (self.out_features,), None
        for name, (shape, stored) in tensors.items():
            if stored is None:
                self.register_parameter(
                    name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
                )
            else:
                self.register_buffer(name, torch.zeros(shape, dtype=stored, device=device))
        for name in ("low_rank_u", "low_rank_v", "bias"):
            if name not in tensors:
                self.register_parameter(name, None)
        if spec.grid is not None:
            self.register_state_dict_pre_hook(SparseLowRankLinear._restore)
            self.register_load_state_dict_pre_hook(SparseLowRankLinear._restore)

    @classmethod
    def from_decomposition(
        cls, result: Decomposition, bias: Tensor | None, pattern: str
    ) -> "SparseLowRankLinear":
        """The layer of a decomposition, in its dtype and on its device; a PatternError where S
        lacks the pattern.
        """
        (out, width), sparse = result.sparse.shape, result.sparse
        grid = result.quantised.scaling.grid if result.quantised else None
        tensors, nonzeros = Storage.of(pattern, grid).pack(sparse, result.quantised)
        rank, bits = result.low_rank.rank, BITS if result.factors else None
        if result.factors:
            for name, rows in (("low_rank_u", result.factors.u), ("low_rank_v", result.factors.v)):
                tensors |= {name: rows.codes, f"{name}_scale": rows.scale}
        elif rank:
            tensors |= {"low_rank_u": result.low_rank.u, "low_rank_v": result.low_rank.v}
        spec = LayerSpec(pattern, (out, width), rank, nonzeros, grid, bits)
        layer = cls(spec, bias is not None, sparse.dtype, sparse.device)
        with torch.no_grad():
            for name, tensor in tensors.items():
                getattr(layer, name).copy_(tensor)
            if bias is not None and layer.bias is not None:
                layer.bias.copy_(bias)
        return layer

    @property
    def index(self) -> Tensor:
        """The positions of the values: the buffer `positions`, `mask` or `columns`."""
        return self.get_buffer(self.storage.layout.index)

    @property
    def weight(self) -> Tensor:
        """The values, or the scales of the grid; not the matrix. Model code looks up its dtype and
        device.
        """
        return self.values if self.spec.grid is None else self.get_parameter("weight_scale")

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of S by their names in the file, with codes in its order."""
        self._restore()
        return {name: getattr(self, name) for name in self.storage.dtypes()}

    def unpacked(self) -> Tensor:
        """S: (out, in), a new tensor at each call."""
        return self.storage.unpack(self.tensors(), self.in_features, self.spec.nonzeros)

    def support(self) -> Tensor:
        """The positions of the stored values, which are in row-major order: (out, in) bool. Not for
        a quantised S.
        """
        ones = torch.ones_like(self.values, dtype=torch.uint8)
        return self.storage.layout.unpack(ones, self.index, self.in_features).bool()

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """u: (out, r) and v: (r, in), in the dtype of the layer; None for rank 0. Codes are
        unpacked at each call.
        """
        u, v = self.low_rank_u, self.low_rank_v
        if u is None or v is None:
            return None
        if self.spec.factor_bits is None:
            return u, v
        if self.wide_factors:
            return self.wide_factors["low_rank_u"], self.wide_factors["low_rank_v"]
        scales = self.get_parameter("low_rank_u_scale"), self.get_parameter("low_rank_v_scale")
        return CodedRows(u, scales[0]).values(), CodedRows(v, scales[1]).values()

    @property
    def stored_bytes(self) -> int:
        """Bytes of S and the factors on disk."""
        return sum(t.nbytes for name, t in self.state_dict().items() if name != "bias")

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) → (..., out)."""
        if self.merged_weight is not None:
            return F.linear(x, self.merged_weight, self.bias)
        if self._fuses and (y := self._in_one_call(x)) is not None:
            return y
        if self.spec.grid is not None and (y := self._by_int4(x)) is not None:
            return y
        factors = self.factors()
        y = self.sparse_product(x)
        if factors is not None:
            y = add_low_rank(y.reshape(-1, self.out_features), x, *factors).view(y.shape)
        return y if self.bias is None else y + self.bias

    def _by_int4(self, x: Tensor) -> Tensor | None:
        """The layer without gradients, with S by torch's operators for codes of four bits; None
        where they cannot.
        """
        # Python's overhead counts for a token: no look-up by the module.
        parameters = self._parameters
        grad = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, *parameters.values())
        )
        if (
            grad
            or self.wide_factors
            or self.backend not in (None, "int4")
            or x.dtype != torch.bfloat16
        ):
            return None
        flat, scale, bias = (
            x.reshape(-1, x.shape[-1]),
            parameters["weight_scale"],
            parameters["bias"],
        )
        few = x.is_cpu or len(flat) <= CUDA_TOKENS
        if (
            self.unpacked_copy is not None
            or x.shape[-1] != self.in_features
            or not few
            or scale is None
        ):
            return None
        if not is_traced(x) and self.int4_key != self._key():
            self._prepare_int4()
            self.int4_key = self._key()
        operands = self.int4
        if operands is None or scale.device != x.device:
            return None
        if self.prepared_factors is not None and takes_few(flat) and not is_traced(x):
            y = operands.product(flat)
            self.prepared_factors.add(flat.contiguous(), y)
        else:
            y = operands.product(flat, *(self.factors() or (None, None)))
            y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], self.out_features)

    def _key(self) -> tuple[tuple[int, int], ...]:
        """What changes with every tensor of which `int4` and `prepared_factors` are made."""
        tensors = self._parameters | self._buffers
        given = map(
            tensors.get, ("weight_packed", "weight_scale", "weight_offset", *FACTORS, "bias")
        )
        return tuple(
            (t.data_ptr(), 0 if t.is_inference() else t._version) for t in given if t is not None
        )

    def _prepare_int4(self) -> None:
        """Make `int4`, where it is the backend; on a CPU the buffer then holds the codes in its
        order.
        """
        tensors, case = self.tensors(), self._case()
        self.int4 = self.prepared_factors = None
        if backends.choose(case, self.backend) != "int4":
            obstacle = backends.BACKENDS["int4"](case)
            if obstacle and case.device == "cpu" and self.spec.pattern == "dense":
                other = self.spec.grid is not None and self.spec.grid.bits != 4
                log_slower(OTHER_BITS if other else obstacle)
            return
        codes = unpack_codes(tensors["weight_packed"], 4, self.in_features)
        self.int4 = Int4.of(codes, tensors["weight_scale"].detach(), self.storage.lowest(tensors))
        if case.device == "cpu":
            self._buffers["weight_packed"] = self.int4.codes
            if backends.HAS_NUMBA and (factors := self.factors()) is not None:
                u, v = factors
                self.prepared_factors = PreparedFactors(u.contiguous(), v.contiguous(), self.bias)

    def _restore(self, *_: Any) -> None:
        """Hold the codes in the order of the file again."""
        packed = self._buffers.get("weight_packed")
        if packed is not None and packed.dtype == torch.uint8:
            self._buffers["weight_packed"] = pack_codes(plain(packed), 4)
            self.int4 = self.prepared_factors = None

    def _in_one_call(self, x: Tensor) -> Tensor | None:
        """The layer for a few tokens without gradients, by one call of a kernel; None if no kernel
        does that.
        """
        grad = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, *self._tensors())
        )
        if self.unpacked_copy is not None or x.dtype != self.values.dtype or grad:
            return None
        layout = self.storage.layout
        assert isinstance(layout, PackedGroups)
        if (
            self.spec.pattern == "2:4"
            and backends.HAS_NUMBA
            and self.backend in (None, "numba")
            and not is_traced(x)
        ):
            on_cpu = x.device.type == self.values.device.type == "cpu"
            if on_cpu and x.shape[-1] == self.in_features and takes_few(x):
                tensors = self._tensors()
                key = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
                current = self.prepared is not None and self.prepared.key == key
                if not current and all(
                    tensor is None or tensor.is_contiguous() for tensor in tensors
                ):
                    self.prepared = Prepared(
                        self.values, self.index, self.low_rank_u, self.low_rank_v, self.bias, key
                    )
                if self.prepared is not None and self.prepared.key == key:
                    return self.prepared(x)
        backend = backends.choose(self._case(x.numel() // self.in_features), self.backend)
        if not backends.takes_layer(backend, x, layout, self.spec.rank):
            return None
        return backends.product(
            x, self.values, self.index, layout, self.low_rank_u, self.low_rank_v, self.bias
        )

    def _tensors(self) -> list[Tensor | None]:
        """S that is on no grid, u, v and the bias. Python's overhead counts here: no look-up by the
        module.
        """
        index, parameters = self._buffers[self.storage.layout.index], self._parameters
        return [
            parameters["values"],
            index,
            *(parameters[name] for name in ("low_rank_u", "low_rank_v", "bias")),
        ]

    def sparse_product(self, x: Tensor) -> Tensor:
        """x Sᵀ: (..., in) → (..., out)."""
        grad = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if self.unpacked_copy is not None and not grad:
            return F.linear(x, self.unpacked_copy)
        backend = backends.choose(self._case(x.numel() // self.in_features, grad), self.backend)
        if backend == "numba":
            return backends.product(x, self.values, self.index, self.storage.layout)
        return F.linear(x, self.unpacked())

    def use(self, backend: str | None) -> None:
        """Set how x Sᵀ is computed from now on; with None, it is chosen at every call.

        `unpacked` holds a second copy of S: call it again after the layer has changed or moved.

        Args:
            backend: one of `hasslefree.packed.kernels.backends.BACKENDS`.

        Raises:
            UnknownNameError: no such backend. KernelError: it is not possible here; the message
                says why.
        """
        if backend is not None:
            backends.choose(self._case(), backend)
        with torch.no_grad(), remedy_for_copies(self.spec.shape):
            self.unpacked_copy = self.unpacked() if backend == "unpacked" else None
        self.backend = backend

    def _case(self, tokens: int = 1, grad: bool = False) -> backends.Case:
        weight, spec = self.weight, self.spec
        return backends.Case(
            weight.device.type,
            weight.dtype,
            self.storage.layout,
            tokens,
            grad,
            spec.grid,
            spec.shape,
        )

    def extra_repr(self) -> str:
        spec, backend = self.spec, self.backend or backends.choose(self._case())
        sizes = (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={spec.rank}"
        )
        return f"{sizes}, bias={self.bias is not None}, backend={backend}, {spec.kind}"


def add_low_rank(y: Tensor, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """y + x vᵀ uᵀ, y: (tokens, out), x: (..., in)."""
    hidden = F.linear(x, v).reshape(-1, len(v))
    # In place, where autocast leaves the dtypes alike: for a long prompt new memory costs more than
    # this.
    return (y.addmm_ if y.dtype == hidden.dtype == u.dtype else y.addmm)(hidden, u.T)


@cache
def log_slower(obstacle: str) -> None:
    logger.warning("S is unpacked at every call, which is slow: %s", obstacle)


@contextmanager
def remedy_for_copies(shape: tuple[int, int]) -> Iterator[None]:
    """Turn an out-of-memory error for a second copy of S, of this shape, into a MemoryShortError
    with a remedy.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise MemoryShortError(
            f"not enough GPU memory for a second copy of a sparse matrix of shape {shape}; call "
            'hasslefree.use_backend(model, "dense"), which keeps no copy but is slower'
        ) from None


def compressed_layers(model: nn.Module) -> dict[str, SparseLowRankLinear]:
    """The compressed layers by their full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SparseLowRankLinear)
    }


def layers_without_numba(model: nn.Module) -> list[str]:
    """The layers that unpack S at every call because Numba is not installed, by their full name."""
    if backends.HAS_NUMBA:
        return []
    cases = {name: layer._case() for name, layer in compressed_layers(model).items()}
    return [
        n
        for n, case in cases.items()
        if case.device == "cpu" and not (isinstance(case.layout, Columns) or case.grid)
    ]


@typed
def use_backend(model: nn.Module, backend: str | None) -> None:
    """`SparseLowRankLinear.use` for every such layer of a model.

    Raises:
        UnknownNameError, KernelError: as there, before any layer is changed where one of them
            cannot use that backend.
    """
    layers = compressed_layers(model).values()
    if backend is not None:
        backends.check_backend(backend)
        for layer in layers:
            backends.choose(layer._case(), backend)
    for layer in layers:
        layer.use(backend)


@contextmanager
def unpacked_once(root: nn.Module) -> Iterator[None]:
    """Within it, the layers in `root` hold S unpacked over all calls. Their tensors must not change
    meanwhile.
    """
    layers = compressed_layers(root).values()
    before = [layer.unpacked_copy for layer in layers]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.unpacked_copy = layer.unpacked()
        yield
    finally:
        for layer, copy in zip(layers, before, strict=True):
            layer.unpacked_copy = copy
