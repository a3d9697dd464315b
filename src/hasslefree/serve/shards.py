"""The share of a compressed layer that one rank of tensor parallelism holds.

by outputs (column-parallel):  y[rows] = x S[rows]ᵀ + (x vᵀ) u[rows]ᵀ                    v whole
by inputs (row-parallel):      y = Σ_ranks x[columns] S[:, columns]ᵀ + (x[columns] v[:, columns]ᵀ) uᵀ    u whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.errors import ServeError
from hasslefree.packed.bits import pack_bits, unpack_bits
from hasslefree.packed.layouts import PackedGroups
from hasslefree.packed.spec import LayerSpec


@dataclass(frozen=True)
class Shard:
    """A rank's rows and columns of a weight (out, in).

    Args:
        rows: ranges (start, stop) of outputs, in the order in which the rank holds them. columns: the range of inputs.
    """

    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the share."""
        return sum(stop - start for start, stop in self.rows), self.columns[1] - self.columns[0]

    def take_rows(self, tensor: Tensor) -> Tensor:
        """The share of a tensor (out, …)."""
        return torch.cat([tensor[start:stop] for start, stop in self.rows])

    def take_columns(self, tensor: Tensor) -> Tensor:
        """The share of a tensor (…, in)."""
        return tensor[..., slice(*self.columns)]


def shard_of(
    sizes: Sequence[int], local_sizes: Sequence[int], width: int, local_width: int, rank: int, ranks: int
) -> Shard:
    """The share of rank `rank` of `ranks`.

    Args:
        sizes: the outputs of the slices that the weight consists of, such as q, k and v in one matrix.
        local_sizes: how many of each slice a rank holds. Where they are more than 1/ranks of the slice, as of key heads
            that are fewer than ranks, neighbouring ranks hold the same.
        width, local_width: the inputs of the weight, and of a rank.
    """
    rows, first = [], 0
    for size, local in zip(sizes, local_sizes, strict=True):
        start = first + rank * (size // local) // ranks * local
        rows.append((start, start + local))
        first += size
    column = rank * local_width if local_width < width else 0
    return Shard(tuple(rows), (column, column + local_width))


def check_groups(name: str, spec: LayerSpec, shard: Shard) -> None:
    """Raise ServeError where the columns of a share split a group of N:M."""
    layout = spec.storage.layout
    if isinstance(layout, PackedGroups) and any(column % layout.m for column in shard.columns):
        raise ServeError(
            f"{name} has pattern {spec.pattern}, which needs a multiple of {layout.m} inputs per process, and its "
            f"{spec.shape[1]} inputs are split into {shard.shape[1]} per process; use another tensor_parallel_size"
        )


def narrowed(spec: LayerSpec, tensors: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """`values` and `positions` of the share of a weight with the pattern N:M.

    Args:
        tensors: `values` (out, in/M·N) and `positions` (out, bytes), as the folder stores them.
    """
    layout = spec.storage.layout
    assert isinstance(layout, PackedGroups)
    first, last = (column // layout.m for column in shard.columns)
    values = shard.take_rows(tensors["values"])[:, first * layout.n : last * layout.n]
    positions = shard.take_rows(tensors["positions"])
    start, stop = first * layout.code_bits, last * layout.code_bits
    if start % 8 == stop % 8 == 0:
        positions = positions[:, start // 8 : stop // 8]
    elif shard.columns != (0, spec.shape[1]):  # the share begins or ends within a byte
        positions = pack_bits(unpack_bits(positions)[:, start:stop])
    return {"values": values, "positions": positions}
