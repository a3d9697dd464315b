"""Compressed layers that read the same inputs, run as one layer of vLLM.

If vLLM has a kernel for the codes of S, S stays packed, and the low-rank parts are added:

    y_i = x S_iᵀ + (x v_iᵀ) u_iᵀ      one product with all S_i, one with all v_i, one with each u_i

Otherwise, S + u v is summed when the weights are loaded, and the layer is dense.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.core.grids import Grid
from hasslefree.errors import CheckpointError, ServeError
from hasslefree.serve.parts import Part

# The names that vLLM gives the slices of its fused attention layer; other slices have numbers.
ATTENTION = {"q": 0, "k": 1, "v": 2}

# vLLM's name for the slices of a fused layer that a tensor belongs to.
Slices = str | int | tuple[int, ...] | None

# Makes a `serve.kernels.VllmKernel` for a complete S with this grid, shape (out, in) and dtype;
# returns None if vLLM has none.
KernelFor = Callable[[Grid, tuple[int, int], torch.dtype], Any]


class FusedLinear(nn.Module):
    """Multiply by all parts of a layer. The tensors are uninitialised until every part is loaded.

    Args:
        parts: the compressed layers, in the order of their outputs.
        dtype: of the inputs and of the tensors.
        kernel_for: makes vLLM's kernel. Called if all parts are complete and on the same grid. None
            without vLLM.
    """

    def __init__(
        self,
        parts: list[Part],
        dtype: torch.dtype,
        kernel_for: KernelFor | None = None,
    ):
        super().__init__()
        self.parts = parts
        self.dtype = dtype
        self.outs = [part.local_shape[0] for part in parts]
        self.ranks = [part.rank for part in parts]
        # The tensors of each incomplete part, by its index.
        self.waiting: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(parts))}
        # The codes, scales and zeros of each loaded part, until all parts are loaded.
        self.codes: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        shape = (sum(self.outs), parts[0].local_shape[1])
        self.grid = common_grid(parts)
        self.kernel: Any = None
        if self.grid is not None and kernel_for is not None:
            self.kernel = kernel_for(self.grid, shape, dtype)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

        if self.kernel is None:
            self.weight = empty(*shape)
            return
        factors = zip(self.outs, self.ranks, strict=True)
        self.low_rank_u = nn.ParameterList([empty(out, rank) for out, rank in factors])
        self.low_rank_v = empty(sum(self.ranks), shape[1])

    def add(
        self,
        leaf: str,
        tensor: Tensor,
        slices: Slices,
    ) -> None:
        """Store one tensor, and load its part once that is complete. The order does not matter.

        Args:
            leaf: the tensor's name within the layer, such as `weight_scale`.
            tensor: the whole tensor.
            slices: the slices of the fused layer that the tensor is for, as vLLM names them.

        Raises:
            ServeError: the layer has no such tensor or part.
            CheckpointError: the tensors of the part are damaged.
        """
        index = self._part(slices)
        waiting = self.waiting.setdefault(index, {})
        wanted = self.parts[index].tensors()
        if leaf not in wanted:
            raise ServeError(
                f"the weight files contain {self.parts[index].name}.{leaf}, which the layer that"
                " config.json describes does not have; download or copy the folder again"
            )
        # A copy, because some of vLLM's loaders read the next tensor into the same memory.
        waiting[leaf] = tensor.detach().clone()
        if waiting.keys() == wanted.keys():
            self._load(index, waiting)
            del self.waiting[index]

    def _part(self, slices: Slices) -> int:
        """The index of the part that these slices belong to."""
        if slices is None and len(self.parts) == 1:
            return 0
        first = slices
        if isinstance(first, tuple):
            first = first[0]
        if isinstance(first, str):
            first = ATTENTION.get(first)
        for index, part in enumerate(self.parts):
            if first in part.slices:
                return index
        names = ", ".join(part.name for part in self.parts)
        raise ServeError(
            f"vLLM loads part {slices!r} of a fused layer of {names}, a part that this version of"
            " hasslefree does not know; update hasslefree"
        )

    def _load(self, index: int, tensors: dict[str, Tensor]) -> None:
        """Load one part from its whole tensors, which are cast in place."""
        part = self.parts[index]
        part.check(tensors)
        # Before codes are multiplied by their scales: a product has the dtype of its scale.
        for leaf, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[leaf] = tensor.to(self.dtype)
        if self.kernel is None:
            self.weight.data.split(self.outs)[index].copy_(part.dense(tensors))
            return
        factors = part.factors(tensors)
        if factors is not None:
            self.low_rank_u[index].data.copy_(factors[0])
            self.low_rank_v.data.split(self.ranks)[index].copy_(factors[1])
        self.codes[index] = part.codes(tensors)
        if len(self.codes) == len(self.parts):
            ordered = [self.codes.pop(i) for i in range(len(self.parts))]
            codes, scales, zeros = zip(*ordered, strict=True)
            self.kernel.load(torch.cat(codes), torch.cat(scales), torch.cat(zeros))

    def finish(self) -> None:
        """Prepare the kernel, if any. Raises a CheckpointError if a part was not loaded."""
        if self.waiting:
            names = ", ".join(self.parts[index].name for index in sorted(self.waiting))
            raise CheckpointError(
                f"the weight files lack tensors of {names}; download or copy the folder again"
            )
        if self.kernel is not None:
            self.kernel.finish()

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in) → (…, Σ out), without the bias."""
        if self.kernel is None:
            return F.linear(x, self.weight)
        flat = x.reshape(-1, x.shape[-1])
        y: Tensor = self.kernel.product(flat)
        if len(self.low_rank_v):
            hidden = F.linear(flat, self.low_rank_v).split(self.ranks, 1)
            outputs = y.split(self.outs, 1)
            for output, inner, u in zip(outputs, hidden, self.low_rank_u, strict=True):
                if u.shape[1]:
                    output.addmm_(inner, u.T)
        return y.view(*x.shape[:-1], y.shape[-1])


def common_grid(parts: list[Part]) -> Grid | None:
    """The grid of all parts, if each is complete and holds whole groups; otherwise None."""
    grids = set()
    for part in parts:
        if part.entry is None or part.entry.spec.pattern != "dense":
            return None
        grids.add(part.entry.spec.grid)
    if len(grids) > 1:
        return None
    [grid] = grids
    width = parts[0].local_shape[1]
    if grid is None or width % (grid.group or width):
        return None
    return grid
