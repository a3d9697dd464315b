"""The layer y = x (S + u v)ᵀ + b, with S packed and separate factors."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from hasslefree.core.factors import BITS, CodedRows
from hasslefree.core.products import linear
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import MemoryShortError, ShapeError
from hasslefree.packed.kernels import backends, ops
from hasslefree.packed.kernels.factors import add_low_rank
from hasslefree.packed.kernels.whole import (
    CodesKernel,
    NumbaKernel,
    Operands,
    kernel_for,
    version_of,
)
from hasslefree.packed.layouts import Columns
from hasslefree.packed.spec import LayerSpec
from hasslefree.packed.storage import pack_sparse, unpack_codes
from hasslefree.validation import typed


class Decoded(NamedTuple):
    """An entropy-coded stream, its version when it was decoded, and its codes."""

    stream: Tensor
    version: int
    codes: Tensor


class SparseLowRankLinear(nn.Module):
    """A linear layer whose weight is a sparse or quantised matrix S plus a low-rank one, u v.

    S is stored in two tensors: the parameter `values`, and the integer buffer `positions`, `mask`
    or `columns`, which keeps its dtype if the layer is cast. On a grid (`packed.storage`), the
    integer buffers `weight_packed` and `weight_zero_point` and the parameter `weight_scale` replace
    the values. If scales are multiples of a unit of their row, `weight_scale` holds the units, and
    the buffer `weight_scale_packed` the multiples. The factors are `low_rank_u` (out, r) and
    `low_rank_v` (r, in), absent for rank 0. In eight bits they are int8 buffers, with the
    parameters `low_rank_u_scale` (out,) and `low_rank_v_scale` (r,), and are unpacked at every
    call.

    The backend that computes x Sᵀ is chosen at every call (`packed.kernels.backends`), or set by
    `use`. A kernel may hold the codes of a layer in another order and take the buffer from the
    layer meanwhile; `tensors` and state dicts are complete nevertheless.

    Args:
        spec: pattern, shape, rank, and the storage of S and of the factors.
        bias: True for a layer with a bias.
        dtype: of the parameters; torch's default if None.
        device: of all tensors.
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
        self.spec = spec
        self.out_features, self.in_features = spec.shape
        self.kernel = kernel_for(spec)
        self.backend: str | None = None
        # S unpacked, for calls without gradients. The caller promises not to change S meanwhile.
        self.unpacked_copy: Tensor | None = None
        # Held with its stream, so that no other stream gets the same address.
        self.decoded: Decoded | None = None
        # S + u v, which replaces all tensors but the bias while gradients are computed.
        self.merged_weight: Tensor | None = None
        # The values of coded factors while they are trained, by name.
        self.wide_factors: dict[str, Tensor] = {}
        tensors = spec.tensors()
        if bias:
            tensors["bias"] = ((self.out_features,), None)
        for name, (shape, stored) in tensors.items():
            if stored is None:
                values = torch.empty(shape, dtype=dtype, device=device)
                self.register_parameter(name, nn.Parameter(values))
            else:
                self.register_buffer(name, torch.zeros(shape, dtype=stored, device=device))
        for name in ("low_rank_u", "low_rank_v", "bias"):
            if name not in tensors:
                self.register_parameter(name, None)

    @classmethod
    def from_decomposition(cls, result: Decomposition, bias: Tensor | None, pattern: str) -> Self:
        """Build the layer of a decomposition, with the dtype and on the device of S.

        Args:
            result: S (out, in), on a grid or not, and the factors, coded or not.
            bias: (out,), or None.
            pattern: the name of the pattern of S, such as "2:4".

        Raises:
            PatternError: S does not have the pattern.
        """
        sparse = result.sparse
        grid = result.quantised.scaling.grid if result.quantised else None
        tensors, nonzeros = pack_sparse(pattern, sparse, result.quantised)
        factor_bits = None
        if result.factors:
            factor_bits = BITS
            tensors["low_rank_u"] = result.factors.u.codes
            tensors["low_rank_v"] = result.factors.v.codes
            tensors["low_rank_u_scale"] = result.factors.u.scale
            tensors["low_rank_v_scale"] = result.factors.v.scale
        elif result.low_rank.rank:
            tensors["low_rank_u"] = result.low_rank.u
            tensors["low_rank_v"] = result.low_rank.v
        if bias is not None:
            tensors["bias"] = bias
        out, width = sparse.shape
        rank = result.low_rank.rank
        spec = LayerSpec(pattern, (out, width), rank, nonzeros, grid, factor_bits)
        layer = cls(spec, bias is not None, sparse.dtype, sparse.device)
        layer.load_state_dict(tensors)
        return layer

    @property
    def index(self) -> Tensor:
        """The positions of the values: the buffer `positions`, `mask` or `columns`."""
        return self.get_buffer(self.spec.layout.index)

    @property
    def weight(self) -> Tensor:
        """The values, or the scales of the grid or their units; not the matrix. Models read the
        dtype and device of this attribute.
        """
        if self.spec.grid is None:
            return self.values
        scale: Tensor = self.weight_scale  # type: ignore[assignment]
        return scale

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of S, by their names in the file."""
        with self.kernel.lock():
            self.kernel.release(self)
            return self._sparse_tensors()

    def _sparse_tensors(self) -> dict[str, Any]:
        """`tensors`, but None for a buffer that the kernel has taken."""
        return {name: getattr(self, name) for name in self.spec.sparse_tensors()}

    def unpacked(self) -> Tensor:
        """S: (out, in), a new tensor at each call."""
        grid = self.spec.grid
        if grid is None:
            return self.spec.unpack(self.tensors())
        with self.kernel.lock():
            is_taken = self._buffers["weight_packed"] is None
            if is_taken and (grid.rate is not None or torch.compiler.is_compiling()):
                # The kernel keeps the codes: entropy coding is slow, and packing is not traced.
                codes = self._taken().all_codes()
                tensors = self._sparse_tensors()
            else:
                tensors = self.tensors()
                codes = self.codes(tensors)
        return self.spec.values(codes, tensors)

    def _taken(self) -> Operands:
        """The codes that the kernel has taken from the layer."""
        assert isinstance(self.kernel, CodesKernel)
        assert self.kernel.prepared.operands is not None
        return self.kernel.prepared.operands

    def codes(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The codes in `tensors`, uint8 (out, in). An entropy-coded stream is decoded once."""
        assert self.spec.grid is not None
        if self.spec.grid.rate is None:
            return self.spec.codes(tensors)
        codes = self._decoded_now()
        if codes is None:
            stream = tensors["weight_packed"]
            codes = self.spec.codes(tensors)
            self.decoded = Decoded(stream, version_of(stream), codes)
        return codes

    def _decoded_now(self) -> Tensor | None:
        """The codes of the stream, if they have been decoded since it last changed."""
        decoded = self.decoded
        if decoded is None or decoded.stream is not self._buffers["weight_packed"]:
            return None
        if torch.compiler.is_compiling():  # a version cannot be traced
            return decoded.codes
        if decoded.version != version_of(decoded.stream):
            return None
        return decoded.codes

    def rows(self, selected: Tensor) -> Tensor:
        """Some rows of a complete S on a grid: indices (rows,) → (rows, in).

        A kernel keeps the codes that it holds.

        Raises:
            IndexError: an index is negative or too large.
        """
        if self.unpacked_copy is not None:
            return self.unpacked_copy.index_select(0, selected)
        grid = self.spec.grid
        assert grid is not None
        with self.kernel.lock():
            stored = self._buffers["weight_packed"]
            if stored is None:  # the kernel has taken it
                codes = self._taken().codes_of_rows(selected)
            elif grid.rate is not None:
                codes = self.codes({"weight_packed": stored}).index_select(0, selected)
            else:
                words = stored.index_select(0, selected)
                codes = unpack_codes(words, grid.bits, self.in_features)
            tensors = {}
            for name, tensor in self._sparse_tensors().items():
                is_whole = name in ("weight_packed", "weight_input_scale")
                tensors[name] = tensor if is_whole else tensor.index_select(0, selected)
        shape = (len(selected), self.in_features)
        spec = dataclasses.replace(self.spec, shape=shape, nonzeros=shape[0] * shape[1])
        return spec.values(codes, tensors)

    def support(self) -> Tensor:
        """The positions of the stored values, which are in row-major order: (out, in) bool."""
        return self.spec.support(self.index)

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """u: (out, r) and v: (r, in), in the dtype of the layer; None for rank 0. Factors in codes
        are unpacked at each call.
        """
        u = self.low_rank_u
        v = self.low_rank_v
        if u is None or v is None:
            return None
        if self.spec.factor_bits is None:
            return u, v
        if self.wide_factors:
            return self.wide_factors["low_rank_u"], self.wide_factors["low_rank_v"]
        u_rows = CodedRows(u, self.get_parameter("low_rank_u_scale"))
        v_rows = CodedRows(v, self.get_parameter("low_rank_v_scale"))
        return u_rows.values(), v_rows.values()

    @property
    def stored_bytes(self) -> int:
        """The size of S and the factors on disk, in bytes."""
        return self.spec.bytes(self.weight.dtype)

    @property
    def held_bytes(self) -> int:
        """Memory of kernel and unpacked copies, beside parameters and buffers, in bytes."""
        copy = 0 if self.unpacked_copy is None else self.unpacked_copy.nbytes
        codes = 0 if self.decoded is None else self.decoded.codes.nbytes
        return self.kernel.bytes + codes + copy

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) → (..., out)."""
        if self.merged_weight is not None:
            return linear(x, self.merged_weight, self.bias)
        # A kernel would keep tensors in memory that accelerate offloads after each call.
        is_offloaded = getattr(self.__dict__.get("_hf_hook"), "offload", False)
        if self.unpacked_copy is None and not is_offloaded and not self._needs_gradients(x):
            y = self.kernel.product(self, x)
            if y is not None:
                return y
        factors = self.factors()
        y = self.sparse_product(x)
        if factors is not None:
            flat = y.reshape(-1, self.out_features)
            y = add_low_rank(flat, x, *factors).view(y.shape)
        if self.bias is None:
            return y
        return y + self.bias

    def _needs_gradients(self, x: Tensor) -> bool:
        if not torch.is_grad_enabled():
            return False
        if x.requires_grad:
            return True
        return any(p is not None and p.requires_grad for p in self._parameters.values())

    def sparse_product(self, x: Tensor) -> Tensor:
        """x Sᵀ: (..., in) → (..., out)."""
        grad = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if self.unpacked_copy is not None and not grad:
            return linear(x, self.unpacked_copy)
        backend = backends.choose(self.case(grad), self.backend)
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"the layer has {self.in_features} inputs, got {x.shape[-1]}")
        if backend == "numba" and self.spec.grid is None and x.dtype == self.values.dtype:
            flat = x.reshape(-1, self.in_features)
            y = ops.packed_product(flat, self.values, self.index, self.spec.pattern)
            return y.reshape(*x.shape[:-1], self.out_features)
        if self.spec.grid is None and isinstance(self.spec.layout, Columns):
            return linear(x.index_select(-1, self.index), self.values)
        return linear(x, self.unpacked())

    def use(self, backend: str | None) -> None:
        """Set the backend that computes x Sᵀ. With None, it is chosen at every call.

        The backend `unpacked` holds a copy of S: call `use` again after S has changed or moved.
        Also call it after the buffer `weight_packed` was replaced by another, so that the kernel
        drops the old codes.

        Args:
            backend: one of `hasslefree.packed.kernels.backends.BACKENDS`.

        Raises:
            UnknownNameError: no such backend.
            KernelError: the backend cannot run this layer; the message says why.
        """
        if backend is not None:
            backends.choose(self.case(), backend)
        self.unpacked_copy = None
        if backend == "unpacked":
            try:
                with torch.no_grad():
                    self.unpacked_copy = self.unpacked()
            except torch.OutOfMemoryError:
                raise MemoryShortError(
                    "not enough GPU memory for a second copy of a sparse matrix of shape"
                    f" {self.spec.shape}; call"
                    ' hasslefree.use_backend(model, "dense"), which keeps no copy but is slower'
                ) from None
            self.decoded = None  # calls with gradients decode the stream again
        with self.kernel.lock():
            self.kernel.release(self)
            self.kernel.forget()
            self.backend = backend

    def case(self, grad: bool = False) -> backends.Case:
        """Describe a call, to choose its backend. grad: x or S needs a gradient."""
        weight = self.weight
        return backends.Case(
            device=weight.device.type,
            dtype=weight.dtype,
            layout=self.spec.layout,
            grad=grad,
            grid=self.spec.grid,
            shape=self.spec.shape,
        )

    def extra_repr(self) -> str:
        backend = self.backend or backends.choose(self.case())
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" rank={self.spec.rank}, bias={self.bias is not None}, backend={backend},"
            f" {self.spec.kind}"
        )

    # Before tensors are saved, replaced, moved or copied, the kernel returns those that it has
    # taken. The lock keeps it from taking any meanwhile.

    def _save_to_state_dict(self, *args: Any) -> None:
        with self.kernel.lock():
            self.kernel.release(self)
            super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        with self.kernel.lock():
            self.kernel.release(self)
            self.decoded = None
            super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SparseLowRankLinear":
        with self.kernel.lock():
            self.kernel.release(self)
            decoded = self._decoded_now()
            super()._apply(fn, recurse)
            if decoded is not None:  # moved with the stream instead of decoded again
                stream = self.get_buffer("weight_packed")
                self.decoded = Decoded(stream, version_of(stream), fn(decoded))
            return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["kernel"]
        state["decoded"] = None
        with self.kernel.lock():
            self.kernel.release(self)
            state["_buffers"] = self._buffers.copy()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.kernel = kernel_for(self.spec)


def compressed_layers(model: nn.Module) -> dict[str, SparseLowRankLinear]:
    """The compressed layers of a model, by full name."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, SparseLowRankLinear):
            layers[name] = module
    return layers


def layers_without_numba(model: nn.Module) -> list[str]:
    """The names of the layers that unpack S at every call because Numba is not installed."""
    if backends.HAS_NUMBA:
        return []
    names = []
    for name, layer in compressed_layers(model).items():
        if layer.weight.is_cpu and isinstance(layer.kernel, NumbaKernel):
            names.append(name)
    return names


@typed
def use_backend(model: nn.Module, backend: str | None) -> None:
    """Call `SparseLowRankLinear.use` for every compressed layer of a model.

    Raises:
        UnknownNameError, KernelError: as for `SparseLowRankLinear.use`. If one layer cannot use
            the backend, no layer is changed.
    """
    layers = compressed_layers(model).values()
    if backend is not None:
        backends.check_backend(backend)
        for layer in layers:
            backends.choose(layer.case(), backend)
    for layer in layers:
        layer.use(backend)


@contextmanager
def unpacked_once(root: nn.Module) -> Iterator[None]:
    """Keep S unpacked in the compressed layers of `root` within the context. Their tensors must not
    change meanwhile.
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
