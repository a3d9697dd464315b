"""y = x Sᵀ as torch operators, so that torch.compile sees one node and no graph break.

On a CPU, few tokens are multiplied with the packed rows directly; many tokens in bfloat16 with 2:4
use tables of the inputs, unless the processor multiplies tiles (AMX). Otherwise, from `DIRECT`
tokens on, rows of S are unpacked into a buffer, a tile at a time, and torch multiplies them: a
large S is never in memory as a whole.

There is no gradient: a call that needs one raises torch's error that no autograd formula was
registered. `choose` uses the dense backend for such calls.
"""

import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.linalg import multiplies_tiles
from hasslefree.errors import PatternError, ShapeError
from hasslefree.packed.layouts import PackedGroups

# The number of tokens from which unpacking a tile once is cheaper than reading packed rows for
# every token. With the vectors of `cpu.WIDE`, 2:4 halves the products as well, and float32 is never
# unpacked.
DIRECT_2_4 = {torch.float32: math.inf, torch.bfloat16: 33}
DIRECT_2_4_TILES = {
    torch.float32: math.inf,
    torch.bfloat16: 13,
}  # where dense products are of tiles, as on AMX
DIRECT_2_4_SCALAR = {torch.float32: 2, torch.bfloat16: 2}
DIRECT = {torch.float32: 6, torch.bfloat16: 6}
# Tokens for which a layer's products, sparse and low-rank, are one call: several cost more than the
# products.
FEW = 4
# Tokens that run through the packed rows of 2:4 together: their inputs stay in the second level of
# the cache.
TOGETHER = 32
# A tile that stays in the cache, and the rows that a product needs to be fast.
TILE_BYTES, LEAST_ROWS = 4 << 20, 256
# The rows of a tile that runs through tables: its sums stay in the second level of the cache.
MOST_ROWS = 1024
_KEPT = threading.local()
# Kept here because vLLM replaces torch's function, in its workers, by one that does nothing.
set_torch_threads = torch.set_num_threads


def groups_product(
    x: Tensor, values: Tensor, positions: Tensor, n: int, m: int,
    u: Tensor | None = None, v: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x Sᵀ for S with the pattern N:M, or where `takes_few` the whole layer x Sᵀ + x vᵀ uᵀ + b,
    summed in float32.

    x: (tokens, in). values: (out, in/M·N), of x's dtype. positions: (out, bytes), uint8: the codes
        of the groups.
    u: (out, r) and v: (r, in), of x's dtype. bias: (out,), only with factors.
    """
    _check_groups(x, values, positions, n, m)
    layout, kernels = PackedGroups(n, m), numba_kernels()
    if layout.is_mask:
        return mask_product(x, values.reshape(-1), positions)
    values, codes, bits = values.contiguous(), positions.numpy(), layout.position_bits
    if v is not None or len(x) < _direct(n, m).get(x.dtype, 0):
        if (n, m) == (2, 4):
            return _direct_2_4(x, values, positions, u, v, bias)
        inputs, y = x.float().contiguous().numpy(), torch.empty(len(x), len(values))
        kernels.dot_positions(as_numpy(values).reshape(-1), codes, n, m, bits, inputs, y.numpy())
        if u is not None and v is not None:
            factors = (as_numpy(tensor.contiguous()) for tensor in (v, u, u.new_empty(0)))
            kernels.add_layer(inputs, *factors, y.numpy())
        rounded = y.to(x.dtype)
        return rounded if bias is None else rounded + bias
    wide = (n, m) == (2, 4) and kernels.WIDE
    if (
        wide
        and x.dtype == torch.bfloat16
        and x.shape[1] % (4 * kernels.GROUPS) == 0
        and not multiplies_tiles()
    ):
        return _by_tables(x, values, positions)
    stored = _bits(values)

    def unpack(a: int, b: int, rows: Any) -> None:
        if wide:
            kernels.unpack_2_4(stored[a:b].reshape(-1), codes[a:b], rows, wide)
        else:
            kernels.unpack_positions(stored[a:b].reshape(-1), codes[a:b], n, m, bits, rows)

    return _by_tiles(x, len(values), unpack)


def _direct(n: int, m: int) -> Mapping[torch.dtype, float]:
    if (n, m) != (2, 4):
        return DIRECT
    if not numba_kernels().WIDE:
        return DIRECT_2_4_SCALAR
    return DIRECT_2_4_TILES if multiplies_tiles() else DIRECT_2_4


class Arrays:
    """Tensors as `arrays` for Numba. They share memory: changes in place take effect. A copy of a
    layer has none.
    """

    arrays: tuple[Any, ...]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Prepared(Arrays):
    """`groups_product` for a whole layer of 2:4, with arrays that are ready for Numba, and any
    leading dimensions of x.

    For few tokens the product is so short that Python's overhead counts. All tensors are
    contiguous, and all but the positions of one dtype, float32 or bfloat16. key: by which the
    caller recognises that they were replaced.
    """

    def __init__(
        self, values: Tensor, positions: Tensor, u: Tensor | None, v: Tensor | None, bias: Tensor | None,  # noqa: E501
        key: tuple[int, ...] = (),
    ):  # fmt: skip
        self.key, self.out = key, len(values)
        u = values.new_empty(self.out, 0) if u is None else u
        v = values.new_empty(0, 2 * values.shape[1]) if v is None else v
        bias = values.new_empty(0) if bias is None else bias
        self.arrays = (as_numpy(values), positions.numpy(), *map(as_numpy, (u, v, bias)))

    def __call__(self, x: Tensor) -> Tensor:
        """x: (..., in) → (..., out)."""
        y = torch.empty(*x.shape[:-1], self.out, dtype=x.dtype)
        arrays = (as_numpy(tensor).reshape(-1, tensor.shape[-1]) for tensor in (x.contiguous(), y))
        kernels = numba_kernels()
        kernels.layer_2_4(*self.arrays, *arrays, kernels.WIDE)
        return y


class PreparedFactors(Arrays):
    """y += x vᵀ uᵀ + b for a few tokens, with u (out, r), v (r, in) and b, contiguous and of one
    dtype.
    """

    def __init__(self, u: Tensor, v: Tensor, bias: Tensor | None):
        self.arrays = tuple(map(as_numpy, (v, u, u.new_empty(0) if bias is None else bias)))

    def add(self, x: Tensor, y: Tensor) -> None:
        """x: (tokens, in), y: (tokens, out), both contiguous."""
        numba_kernels().add_layer(as_numpy(x), *self.arrays, as_numpy(y))


def takes_few(x: Tensor) -> bool:
    """Whether a whole layer is one call for these inputs (..., in)."""
    return x.numel() <= FEW * x.shape[-1] and x.dtype in (torch.float32, torch.bfloat16)


def is_traced(x: Tensor) -> bool:
    """Whether the call is traced, which needs operators: for a small layer, these cost as much as
    the product.
    """
    return torch.compiler.is_compiling() or type(x) is not Tensor


def mask_product(x: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """x Sᵀ for S with any pattern. values: (nonzeros,), row by row, of x's dtype. mask: (out,
    ⌈in/8⌉), uint8.
    """
    _check_dtypes(x, values, mask)
    if mask.shape[1] != math.ceil(x.shape[1] / 8):
        raise ShapeError(
            f"the mask must have {math.ceil(x.shape[1] / 8)} bytes per row for inputs of width"
            f" {x.shape[1]}, got {mask.shape[1]}"
        )
    kernels, flat, rows_of_mask = numba_kernels(), values.contiguous(), mask.numpy()
    counts = torch.empty(len(mask), dtype=torch.int64)
    kernels.count_rows(rows_of_mask, counts.numpy())
    if (marked := int(counts.sum())) != values.numel():
        raise PatternError(
            f"the mask marks {marked} entries, but there are {values.numel()} values; load the"
            " model again"
        )
    starts = (counts.cumsum(0) - counts).numpy()
    if len(x) < DIRECT.get(x.dtype, 0):
        y = torch.empty(len(x), len(mask))
        inputs = x.float().contiguous().numpy()
        kernels.dot_mask(as_numpy(flat), starts, rows_of_mask, inputs, y.numpy(), kernels.WIDE)
        return y.to(x.dtype)
    stored = _bits(flat)

    def unpack(a: int, b: int, rows: Any) -> None:
        kernels.unpack_mask(stored, starts[a:b], rows_of_mask[a:b], rows, kernels.WIDE)

    return _by_tiles(x, len(mask), unpack)


as_operator: Any = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cpu")
linear_groups = as_operator("hasslefree::linear_groups", groups_product)
linear_mask = as_operator("hasslefree::linear_mask", mask_product)
for operator in (linear_groups, linear_mask):
    operator.register_fake(lambda x, values, index, *_: x.new_empty(x.shape[0], index.shape[0]))


def _direct_2_4(x: Tensor, *tensors: Tensor | None) -> Tensor:
    """x (S + u v)ᵀ + b from the packed rows of 2:4. tensors: as for `Prepared`, of any strides."""
    contiguous = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    product = Prepared(*contiguous)  # type: ignore[arg-type]
    return (
        product(x)
        if len(x) <= TOGETHER
        else torch.cat([product(part) for part in x.split(TOGETHER)])
    )


def _by_tables(x: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """x Sᵀ of 2:4 in bfloat16, 64 tokens at a time; a few that are left go directly."""
    kernels, out, tokens, parts = numba_kernels(), len(values), len(x), torch.get_num_threads()
    left = tokens % kernels.TOKENS
    y = x.new_empty(tokens, out)
    if 0 < left < DIRECT_2_4[x.dtype]:
        tokens -= left
        y[tokens:] = _direct_2_4(x[tokens:], values, positions, None, None, None)
    missing = -tokens % kernels.TOKENS
    inputs = F.pad(x[:tokens], (0, 0, 0, missing)) if missing else x[:tokens].contiguous()
    height = min(
        out, MOST_ROWS, max(kernels.TOKENS, -(-out * len(inputs) // (parts * kernels.TOKENS)))
    )
    shape = parts, kernels.TABLE_ROWS + height, kernels.TOKENS
    memory = workspace(4 * math.prod(shape)).view(torch.float32).view(shape).numpy()
    kernels.dot_tables_2_4(
        _bits(values), positions.numpy(), _bits(inputs), _bits(y[:tokens]), memory
    )
    return y


def _by_tiles(x: Tensor, out: int, unpack: Callable[[int, int, Any], None]) -> Tensor:
    """x Sᵀ. unpack(a, b, rows): the bits of rows a … b − 1 of S into an array (b − a, in)."""
    height = min(out, max(LEAST_ROWS, TILE_BYTES // max(1, x.shape[1] * x.itemsize)))
    tile = workspace(height * x.shape[1] * x.itemsize).view(x.dtype).view(height, x.shape[1])
    array = _bits(tile)
    if height == out:
        unpack(0, out, array)
        return F.linear(x, tile)
    y = x.new_empty(len(x), out)
    for start in range(0, out, height):
        count = min(height, out - start)
        unpack(start, start + count, array[:count])
        y[:, start : start + count] = F.linear(x, tile[:count])
    return y


def workspace(size: int) -> Tensor:
    """`size` bytes of this thread's own, kept from call to call: pages that are new cost more than
    unpacking.
    """
    memory: Tensor | None = getattr(_KEPT, "memory", None)
    if memory is None or memory.numel() < size:
        memory = _KEPT.memory = torch.empty(size, dtype=torch.uint8)
    return memory[:size]


def numba_kernels() -> Any:
    """The module of Numba's kernels, set to torch's number of threads."""
    import numba

    from hasslefree.packed.kernels import cpu

    count = torch.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    if (
        torch.get_num_threads() != count
    ):  # Numba's first start sets the number of OpenMP threads, which torch shares
        set_torch_threads(count)
    return cpu


def _bits(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as a NumPy array of unsigned integers."""
    return tensor.detach().view({2: torch.uint16, 4: torch.uint32}[tensor.itemsize]).numpy()


def as_numpy(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as a NumPy array: float32, or the bits of bfloat16."""
    return _bits(tensor) if tensor.dtype == torch.bfloat16 else tensor.detach().numpy()


def _check_groups(x: Tensor, values: Tensor, positions: Tensor, n: int, m: int) -> None:
    width, out = x.shape[1], len(positions)
    wanted = (out, width // m * n), (out, -(-(width // m * PackedGroups(n, m).code_bits) // 8))
    _check_dtypes(x, values, positions)
    if width % m or (values.shape, positions.shape) != wanted:
        raise ShapeError(
            f"pattern {n}:{m} and inputs of width {width} need a width divisible by {m}, values of"
            f" shape {wanted[0]} and positions of shape {wanted[1]}; got values of shape"
            f" {tuple(values.shape)} and positions of shape {tuple(positions.shape)}"
        )


def _check_dtypes(x: Tensor, values: Tensor, index: Tensor) -> None:
    if x.dtype != values.dtype or index.dtype != torch.uint8 or x.itemsize not in (2, 4):
        raise ShapeError(
            "inputs and values must have the same dtype, of 16 or 32 bits, and indices must be"
            f" torch.uint8; got inputs of {x.dtype}, values of {values.dtype} and indices of"
            f" {index.dtype}"
        )
