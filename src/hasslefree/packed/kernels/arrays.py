"""Tensors as arrays for Numba's kernels, and the module of these kernels."""

import threading
from typing import Any

import torch
from torch import Tensor

# Tokens for which a whole layer is one call at most: several calls cost more than the products.
FEW = 4
# Torch's own function, because vLLM replaces it in its workers by one that does nothing.
set_torch_threads = torch.set_num_threads
_kept = threading.local()


class LayerArrays:
    """A layer of 2:4 as arrays, for y = x (S + u v)ᵀ + b with a few tokens.

    The arrays share memory with the tensors, so that changes in place take effect. They are made
    once, because for a few tokens the product is so short that Python's overhead counts.

    Args:
        values: (out, in/2), contiguous, as are all tensors; float32 or bfloat16.
        positions: (out, ⌈in/8⌉), uint8.
        u: (out, r), of the dtype of the values; None for rank 0.
        v: (r, in), of the same dtype; None for rank 0.
        bias: (out,), of the same dtype, or None.
    """

    def __init__(
        self,
        values: Tensor,
        positions: Tensor,
        u: Tensor | None,
        v: Tensor | None,
        bias: Tensor | None,
    ):
        self.out = len(values)
        if u is None or v is None:
            u = values.new_empty(self.out, 0)
            v = values.new_empty(0, 2 * values.shape[1])
        if bias is None:
            bias = values.new_empty(0)
        factors = (as_numpy(u), as_numpy(v), as_numpy(bias))
        self.arrays = (as_numpy(values), positions.numpy(), *factors)

    def product(self, x: Tensor) -> Tensor:
        """x: (..., in) → (..., out), summed in float32 and rounded once."""
        y = torch.empty(*x.shape[:-1], self.out, dtype=x.dtype)
        inputs = as_numpy(x.contiguous()).reshape(-1, x.shape[-1])
        outputs = as_numpy(y).reshape(-1, self.out)
        kernels = numba_kernels()
        kernels.layer_2_4(*self.arrays, inputs, outputs, kernels.WIDE)
        return y


class FactorArrays:
    """u (out, r), v (r, in) and a bias or None as arrays, contiguous and of one dtype, for a few
    tokens.
    """

    def __init__(
        self,
        u: Tensor,
        v: Tensor,
        bias: Tensor | None,
    ):
        if bias is None:
            bias = u.new_empty(0)
        self.arrays = (as_numpy(v), as_numpy(u), as_numpy(bias))

    def add(self, x: Tensor, y: Tensor) -> None:
        """y += x vᵀ uᵀ + b, for x (tokens, in) and y (tokens, out), both contiguous."""
        numba_kernels().add_layer(as_numpy(x), *self.arrays, as_numpy(y))


def takes_few(x: Tensor) -> bool:
    """Tell whether a whole layer may be one call for these inputs (..., in)."""
    return x.numel() <= FEW * x.shape[-1] and x.dtype in (torch.float32, torch.bfloat16)


def is_traced(x: Tensor) -> bool:
    """Tell whether the call is traced, which needs operators: for a small layer, they cost as much
    as the product.
    """
    return torch.compiler.is_compiling() or type(x) is not Tensor


def numba_kernels() -> Any:
    """Import Numba's kernels, and set them to torch's number of threads."""
    import numba

    from hasslefree.packed.kernels import cpu

    count = torch.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    # Numba's first start sets the number of OpenMP threads, which torch shares.
    if torch.get_num_threads() != count:
        set_torch_threads(count)
    return cpu


def workspace(size: int) -> Tensor:
    """`size` bytes of this thread, kept from call to call: new pages cost more than unpacking."""
    memory: Tensor | None = getattr(_kept, "memory", None)
    if memory is None or memory.numel() < size:
        memory = torch.empty(size, dtype=torch.uint8)
        _kept.memory = memory
    return memory[:size]


def bits_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as a NumPy array of unsigned integers."""
    integers = {2: torch.uint16, 4: torch.uint32}
    return tensor.detach().view(integers[tensor.itemsize]).numpy()


def as_numpy(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as a NumPy array: float32, or the bits of bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return bits_of(tensor)
    return tensor.detach().numpy()
