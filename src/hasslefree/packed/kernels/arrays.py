"""Tensors as arrays for the Numba kernels, and the import of these kernels."""

import ctypes
import importlib.util
import math
import mmap
import sys
import threading
from typing import Any

import torch
from torch import Tensor

from hasslefree.errors import PatternError
from hasslefree.packed.layouts import Bitmask, PackedGroups

# Looked up once: torch.compile cannot trace the search.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
# The most tokens for which a layer is one call: several calls cost more than such few products.
FEW = 4
# Linux's MADV_PAGEOUT.
PAGE_OUT = 21
# Looked up here because vLLM replaces the function in its workers by one that does nothing.
set_torch_threads = torch.set_num_threads
_kept = threading.local()


class LayerArrays:
    """A layer as arrays, for y = x (S + u v)ᵀ + b with a few tokens.

    The arrays share memory with the tensors, so that in-place changes take effect, except changes
    of the index if the pattern is not 2:4. They are made once, because for a few tokens the product
    is so short that Python's overhead matters.

    Args:
        layout: of S.
        width: the number of inputs.
        values: of S, contiguous, as are all tensors; float32 or bfloat16.
        index: of S, uint8.
        u: (out, r), of the dtype of the values; None for rank 0.
        v: (r, in), of the same dtype; None for rank 0.
        bias: (out,), of the same dtype, or None.

    Raises:
        PatternError: the index does not mark as many entries as there are values.
    """

    def __init__(
        self,
        layout: PackedGroups | Bitmask,
        width: int,
        values: Tensor,
        index: Tensor,
        u: Tensor | None = None,
        v: Tensor | None = None,
        bias: Tensor | None = None,
    ):
        self.out = len(index)
        self.bytes = 0  # in memory, beside the tensors
        kernels = numba_kernels()
        # With AVX2, masks are faster than pairs of inputs.
        self.is_2_4 = layout == PackedGroups(2, 4) and kernels.STEP != kernels.WITH_AVX2
        if u is None or v is None:
            u = values.new_empty(self.out, 0)
            v = values.new_empty(0, width)
        if bias is None:
            bias = values.new_empty(0)
        stored: tuple[Any, ...]
        if self.is_2_4:
            stored = (as_numpy(values), index.numpy())
        else:
            masks, starts = masks_of(layout, index, width, values.numel())
            self.bytes = starts.nbytes
            if masks is not index:
                self.bytes += masks.nbytes
            stored = (as_numpy(values.view(-1)), starts.numpy(), masks.numpy())
        self.arrays = (*stored, as_numpy(u), as_numpy(v), as_numpy(bias))

    def product(self, x: Tensor) -> Tensor:
        """x: (..., in) → (..., out), summed in float32 and rounded once."""
        y = torch.empty(*x.shape[:-1], self.out, dtype=x.dtype)
        inputs = as_numpy(x.contiguous()).reshape(-1, x.shape[-1])
        outputs = as_numpy(y).reshape(-1, self.out)
        kernels = numba_kernels()
        if self.is_2_4:
            wide = kernels.STEP == kernels.WITH_AVX512
            kernels.layer_2_4(*self.arrays, inputs, outputs, wide)
        else:
            kernels.layer_by_masks(*self.arrays, inputs, outputs, kernels.STEP)
        return y


def masks_of(
    layout: PackedGroups | Bitmask,
    index: Tensor,
    width: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The masks of the rows, uint8 (out, ⌈in/8⌉), and the number of values before each row, int64
    (out,). If the index holds masks, the index itself is returned.

    Raises:
        PatternError: the masks do not mark `count` entries.
    """
    kernels = numba_kernels()
    masks = index
    if isinstance(layout, PackedGroups) and not layout.is_mask:
        masks = torch.zeros(len(index), -(-width // 8), dtype=torch.uint8)
        pattern = (layout.n, layout.m, layout.position_bits)
        kernels.mark_positions(index.numpy(), *pattern, width, masks.numpy())
    counts = torch.empty(len(masks), dtype=torch.int64)
    kernels.count_rows(masks.numpy(), counts.numpy())
    marked = int(counts.sum())
    if marked != count:
        raise PatternError(
            f"the index marks {marked} entries, but there are {count} values; load the model again"
        )
    return masks, counts.cumsum(0) - counts


def takes_few(x: Tensor) -> bool:
    """True if one call can compute a whole layer for these inputs (..., in)."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        return False
    return x.numel() <= FEW * x.shape[-1]


def numba_kernels() -> Any:
    """Import the Numba kernels, and give Numba as many threads as torch."""
    import numba

    from hasslefree.packed.kernels import masks

    count = torch.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    # At its start, Numba sets the number of OpenMP threads, which torch shares.
    if torch.get_num_threads() != count:
        set_torch_threads(count)
    return masks


def workspace(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in memory that this thread keeps from call to call: new pages cost
    more than unpacking.
    """
    size = math.prod(shape) * dtype.itemsize
    memory: Tensor | None = getattr(_kept, "memory", None)
    if memory is None or memory.numel() < size:
        memory = torch.empty(size, dtype=torch.uint8)
        _kept.memory = memory
    return memory[:size].view(dtype).view(shape)


def give_up_pages(tensor: Tensor) -> None:
    """Let Linux reclaim the memory of a tensor that is mapped from a file and no longer read. A
    later access reads the file again.
    """
    is_torch_memory = tensor.untyped_storage().resizable()
    if sys.platform != "linux" or is_torch_memory:
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    if size > 0:
        # Linux before 5.4 returns an error, which is ignored.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), PAGE_OUT)


def bits_of(tensor: Tensor) -> Any:
    """A NumPy array of the bits of a contiguous tensor, as unsigned integers."""
    integers = {2: torch.uint16, 4: torch.uint32}
    return tensor.detach().view(integers[tensor.itemsize]).numpy()


def as_numpy(tensor: Tensor) -> Any:
    """A NumPy array that shares memory with a contiguous tensor; of bfloat16, the bits."""
    if tensor.dtype == torch.bfloat16:
        return bits_of(tensor)
    return tensor.detach().numpy()
