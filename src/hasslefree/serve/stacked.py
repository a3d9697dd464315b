"""Compressed layers that read the same inputs, run as one: S stacked by rows, v stacked by rows, u
per layer.

y_i = x S_iᵀ + (x v_iᵀ) u_iᵀ        one product with all S_i, one with all v_i, one with each u_i

The product of packed layers is one torch operator, for torch.compile and CUDA graphs: which kernel
runs is decided within it, so that a compiled graph for any number of tokens has one node.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.core.grids import Grid
from hasslefree.errors import CheckpointError, ServeError
from hasslefree.packed.kernels.backends import Case, choose, product, takes_layer
from hasslefree.packed.kernels.int4 import Int4, obstacle
from hasslefree.packed.layouts import PackedGroups
from hasslefree.serve.parts import Part, narrowed

# How vLLM names the slices of its fused attention layer; those of other layers have numbers.
ATTENTION = {"q": 0, "k": 1, "v": 2}

# A `serve.kernels.VllmKernel` for a complete S with this grid, (out, in) and dtype, or None.
KernelFor = Callable[[Grid, tuple[int, int], torch.dtype], Any]


def stacked_product(
    x: Tensor, values: Tensor, positions: Tensor, n: int, m: int,
    low_rank_u: Tensor, low_rank_v: Tensor, outs: list[int], ranks: list[int],
) -> Tensor:  # fmt: skip
    """x (S + L)ᵀ, (tokens, Σ out), of layers that read the same x (tokens, in); other tensors as in
    `StackedLinear`.
    """
    layout = PackedGroups(n, m)
    backend = choose(Case(x.device.type, x.dtype, layout, len(x), grad=False))
    if takes_layer(backend, x, layout, max(ranks)) and len(outs) == 1:
        [u] = factors_of(low_rank_u, outs, ranks)
        return product(x, values, positions, layout, u, low_rank_v)
    if backend == "numba":
        y = product(x, values, positions, layout)
    else:
        y = F.linear(x, layout.unpack(values, positions, x.shape[1]))
    return add_low_ranks(y, x, low_rank_u, low_rank_v, outs, ranks)


stacked_linear = torch.library.custom_op(
    "hasslefree::stacked_linear", stacked_product, mutates_args=()
)
stacked_linear.register_fake(
    lambda x, values, positions, *_: x.new_empty(x.shape[0], positions.shape[0])
)


def factors_of(low_rank_u: Tensor, outs: list[int], ranks: list[int]) -> list[Tensor]:
    """The u (out, r) of each layer, as views of all of them (Σ out·r,)."""
    parts = low_rank_u.split([out * rank for out, rank in zip(outs, ranks, strict=True)])
    return [part.view(out, rank) for part, out, rank in zip(parts, outs, ranks, strict=True)]


def add_low_ranks(
    y: Tensor, x: Tensor, low_rank_u: Tensor, low_rank_v: Tensor, outs: list[int], ranks: list[int]
) -> Tensor:
    """y (tokens, Σ out) with the low-rank part of each layer, of this out and rank, added in place
    to its outputs.
    """
    if not len(low_rank_v):
        return y
    hidden = F.linear(x, low_rank_v).split(ranks, 1)
    for part, inner, u in zip(
        y.split(outs, 1), hidden, factors_of(low_rank_u, outs, ranks), strict=True
    ):
        if u.shape[1]:
            part.addmm_(inner, u.T)
    return y


class StackedLinear(nn.Module):
    """The product with all layers of a stack. Tensors are empty until `load` has filled in every
    part.

    S stays packed if all parts have the same N:M, no grid, and this device has a kernel for it; or
    if all are complete and have the same grid, and `kernel_for` has a kernel for it or, on a CPU,
    torch's operators for four bits suit. Otherwise it is unpacked when it is loaded, and takes the
    memory of a dense layer.
    """

    def __init__(
        self, parts: list[Part], dtype: torch.dtype, device: torch.device | str | None = None,
        kernel_for: KernelFor = lambda *_: None,
    ):  # fmt: skip
        super().__init__()
        self.parts = parts
        self.outs = [part.shard.shape[0] for part in parts]
        self.ranks = [part.rank for part in parts]
        self.missing = set(range(len(parts)))
        rows, width = sum(self.outs), parts[0].shard.shape[1]
        size = sum(out * rank for out, rank in zip(self.outs, self.ranks, strict=True))
        self.low_rank_u = self._empty((size,), dtype, device)
        self.low_rank_v = self._empty((sum(self.ranks), width), dtype, device)
        self.groups = common_groups(parts, self.low_rank_v.device)
        self.grid = common_grid(parts)
        self.kernel = kernel_for(self.grid, (rows, width), dtype) if self.grid else None
        on = self.low_rank_v.device.type
        if (
            self.grid
            and not self.kernel
            and (on != "cpu" or obstacle(on, dtype, self.grid, (rows, width)))
        ):
            self.grid = None
        self.coded: dict[
            int, tuple[Tensor, Tensor, Tensor]
        ] = {}  # of each part, until all are loaded
        self.int4: Int4 | None = None
        if self.is_unpacked:
            self.sparse = self._empty((rows, width), dtype, device)
        elif self.groups is not None:
            shapes = self.groups.shapes(
                rows, width, rows * (width // self.groups.m) * self.groups.n
            )
            self.values = self._empty(shapes["values"], dtype, device)
            self.positions = self._empty(shapes["positions"], torch.uint8, device)

    @property
    def is_unpacked(self) -> bool:
        """Whether S is in memory as a dense matrix."""
        return self.groups is None and self.grid is None

    @staticmethod
    def _empty(
        shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None
    ) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def load(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill in this rank's share of one part from all its tensors; a CheckpointError if they are
        damaged.
        """
        part, row = self.parts[index], sum(self.outs[:index])
        part.check(tensors)
        # Before codes are multiplied by their scales: the product is rounded to the dtype of the
        # scale.
        dtype = self.low_rank_v.dtype
        tensors = {leaf: t.to(dtype) if t.is_floating_point() else t for leaf, t in tensors.items()}
        rows = slice(row, row + self.outs[index])
        with torch.no_grad():
            if self.is_unpacked:
                self.sparse[rows] = part.unpacked(tensors)
            elif self.groups is None:
                self.coded[index] = part.coded(tensors)
            else:
                assert part.entry is not None
                for leaf, share in narrowed(part.entry.spec, tensors, part.shard).items():
                    getattr(self, leaf)[rows] = share
            if part.rank:
                u, v = part.factors(tensors)
                factors_of(self.low_rank_u, self.outs, self.ranks)[index].copy_(u)
                self.low_rank_v.split(self.ranks)[index].copy_(v)
        self.missing.discard(index)
        if self.grid and not self.missing:
            codes, scale, zero = map(
                torch.cat, zip(*(self.coded.pop(i) for i in range(len(self.parts))), strict=True)
            )
            if self.kernel:
                self.kernel.load(codes, scale, zero)
            else:
                self.int4 = Int4.of(
                    codes, scale, zero if self.grid.offset else -zero * scale.float()
                )

    def finish(self) -> None:
        """Raise a CheckpointError where a part was not loaded."""
        if self.missing:
            names = ", ".join(self.parts[index].name for index in sorted(self.missing))
            raise CheckpointError(
                f"the weight files lack tensors of {names}; download or copy the folder again"
            )
        if self.kernel:
            self.kernel.finish()

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in) → (…, Σ out), without the bias."""
        flat = x.reshape(-1, x.shape[-1])
        if self.groups is None:
            kernel = self.kernel or self.int4
            y = kernel.product(flat) if kernel else F.linear(flat, self.sparse)
            y = add_low_ranks(y, flat, self.low_rank_u, self.low_rank_v, self.outs, self.ranks)
        else:
            linear = stacked_linear if torch.compiler.is_compiling() else stacked_product
            packed = (self.values, self.positions, self.groups.n, self.groups.m)
            y = linear(flat, *packed, self.low_rank_u, self.low_rank_v, self.outs, self.ranks)
        return y.view(*x.shape[:-1], y.shape[-1])


def common_groups(parts: list[Part], device: torch.device) -> PackedGroups | None:
    """The N:M in which a stack stays packed; None where the parts differ, or no kernel of this
    device reads it.
    """
    first = parts[0].groups
    if first is None or any(part.groups != first for part in parts):
        return None
    return first if device.type == "cpu" else None


def common_grid(parts: list[Part]) -> Grid | None:
    """The grid that all parts of a stack have, if they are complete and hold whole groups; or
    None.
    """
    specs = [part.entry.spec for part in parts if part.entry]
    if len(specs) < len(parts) or any(spec.pattern != "dense" for spec in specs):
        return None
    grid, (_, width) = specs[0].grid, parts[0].shard.shape
    if grid is None or any(spec.grid != grid for spec in specs) or width % (grid.group or width):
        return None
    return grid


class LoadBuffer:
    """Keeps the tensors of a part, which come in any order and from several files, until it is
    complete.
    """

    def __init__(self, stack: StackedLinear):
        self.stack = stack
        self.waiting: list[dict[str, Tensor]] = [{} for _ in stack.parts]

    def add(self, leaf: str, tensor: Tensor, slices: str | int | tuple[int, ...] | None) -> None:
        """Take one whole tensor, for these slices as vLLM counts them, and load the part that it
        completes.
        """
        index = self._part(slices)
        waiting, wanted = self.waiting[index], self.stack.parts[index].tensors()
        if leaf not in wanted:
            raise ServeError(
                f"the weight files contain {self.stack.parts[index].name}.{leaf}, which the layer"
                " that config.json describes does not have; download or copy the folder again"
            )
        waiting[leaf] = (
            tensor.detach().clone()
        )  # some of vLLM's loaders read the next tensor into the same memory
        if waiting.keys() == wanted.keys():
            self.stack.load(index, waiting)
            waiting.clear()

    def _part(self, slices: str | int | tuple[int, ...] | None) -> int:
        if slices is None and len(self.stack.parts) == 1:
            return 0
        number = slices[0] if isinstance(slices, tuple) else slices
        first = ATTENTION.get(number) if isinstance(number, str) else number
        for index, part in enumerate(self.stack.parts):
            if first in part.slices:
                return index
        names = ", ".join(part.name for part in self.stack.parts)
        raise ServeError(
            f"vLLM loads part {slices!r} of a fused layer of {names}, a part that this version of"
            " hasslefree does not know; update hasslefree"
        )
