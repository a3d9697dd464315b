"""Compressed layers that read the same inputs, run as one: S stacked by rows, v stacked by rows, u per layer.

y_i = x S_iᵀ + (x v_iᵀ) u_iᵀ        one product with all S_i, one with all v_i, one with each u_i
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.errors import CheckpointError
from hasslefree.packed.layouts import PackedGroups
from hasslefree.serve.operators import add_low_rank, stacked_linear, stacked_product
from hasslefree.serve.parts import Part
from hasslefree.serve.shards import narrowed


class StackedLinear(nn.Module):
    """The product with all layers of a stack. Tensors are empty until `load` has filled in every part.

    S stays packed where all parts have the same N:M, no grid, and this device has a kernel for it. Otherwise it is
    unpacked when it is loaded, and takes the memory of a dense layer.

    Args:
        parts: they have the same inputs. dtype, device: of the product; None for torch's defaults.
    """

    def __init__(self, parts: list[Part], dtype: torch.dtype | None = None, device: torch.device | str | None = None):
        super().__init__()
        self.parts = parts
        self.outs = [part.shard.shape[0] for part in parts]
        self.ranks = [part.rank for part in parts]
        self.missing = set(range(len(parts)))
        rows, width = sum(self.outs), parts[0].shard.shape[1]
        self.u_sizes = [out * rank for out, rank in zip(self.outs, self.ranks, strict=True)]
        self.low_rank_u = self._empty((sum(self.u_sizes),), dtype, device)
        self.low_rank_v = self._empty((sum(self.ranks), width), dtype, device)
        self.groups = common_groups(parts, self.low_rank_v.device)
        if self.groups is None:
            self.sparse = self._empty((rows, width), dtype, device)
        else:
            shapes = self.groups.shapes(rows, width, rows * (width // self.groups.m) * self.groups.n)
            self.values = self._empty(shapes["values"], dtype, device)
            self.positions = self._empty(shapes["positions"], torch.uint8, device)

    @staticmethod
    def _empty(shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def load(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill in this rank's share of one part.

        Args:
            tensors: all of the part's, whole, as the folder holds them.

        Raises:
            CheckpointError: they do not match the entry, or are damaged.
        """
        part, row = self.parts[index], sum(self.outs[:index])
        part.check(tensors)
        # Before codes are multiplied by their scales: the product is rounded to the dtype of the scale.
        dtype = self.low_rank_v.dtype
        tensors = {leaf: each.to(dtype) if each.is_floating_point() else each for leaf, each in tensors.items()}
        rows = slice(row, row + self.outs[index])
        with torch.no_grad():
            if self.groups is None:
                self.sparse[rows] = part.unpacked(tensors)
            else:
                assert part.entry is not None
                for leaf, share in narrowed(part.entry.spec, tensors, part.shard).items():
                    getattr(self, leaf)[rows] = share
            if part.rank:
                u, v = part.factors(tensors)
                self.low_rank_u.split(self.u_sizes)[index].copy_(u.flatten())
                self.low_rank_v.split(self.ranks)[index].copy_(v)
        self.missing.discard(index)

    def finish(self) -> None:
        """Raise a CheckpointError where a part was not loaded."""
        if self.missing:
            names = ", ".join(self.parts[index].name for index in sorted(self.missing))
            raise CheckpointError(f"the weight files lack tensors of {names}; download or copy the folder again")

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in) → (…, Σ out), without the bias."""
        flat = x.reshape(-1, x.shape[-1])
        if self.groups is None:
            y = F.linear(flat, self.sparse)
            y = add_low_rank(y, flat, self.low_rank_u, self.low_rank_v, self.outs, self.ranks)
        else:
            linear = stacked_linear if torch.compiler.is_compiling() else stacked_product
            packed = (self.values, self.positions, self.groups.n, self.groups.m)
            y = linear(flat, *packed, self.low_rank_u, self.low_rank_v, self.outs, self.ranks)
        return y.view(*x.shape[:-1], y.shape[-1])


def common_groups(parts: list[Part], device: torch.device) -> PackedGroups | None:
    """The N:M in which a stack stays packed; None where the parts differ, or no kernel of this device reads it."""
    first = parts[0].groups
    if first is None or any(part.groups != first for part in parts):
        return None
    readable = device.type != "cuda" or (0 < first.position_bits <= 8 and not first.is_mask)
    return first if readable else None
