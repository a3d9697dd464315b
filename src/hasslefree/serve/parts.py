"""The layers of a folder that make up one linear layer of vLLM, such as q, k and v, and a rank's
share of each.

by outputs (column-parallel):  y[rows] = x S[rows]ᵀ + (x vᵀ) u[rows]ᵀ                    v whole
by inputs (row-parallel):      y = Σ_ranks x[columns] S[:, columns]ᵀ + (x[columns] v[:, columns]ᵀ)
uᵀ    u whole
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.checkpoint.entries import Entry, check_index, check_tensors
from hasslefree.core.factors import CodedRows
from hasslefree.errors import ServeError
from hasslefree.packed.layouts import PackedGroups, pack_bits, unpack_bits
from hasslefree.packed.spec import LayerSpec
from hasslefree.packed.storage import unpack_codes
from hasslefree.serve.requirements import DENSE


@dataclass(frozen=True)
class Shard:
    """A rank's rows, ranges (start, stop) in the rank's order, and range of columns of a weight
    (out, in).
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


def narrowed(spec: LayerSpec, tensors: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """`values` and `positions` of the share of a weight with the pattern N:M, from the tensors of
    the folder.
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


@dataclass(frozen=True)
class Part:
    """A layer of the folder, and this rank's share of it. entry: None if dense. slices: the outputs
    that it has.
    """

    name: str
    entry: Entry | None
    shape: tuple[int, int]
    slices: range
    shard: Shard

    def __post_init__(self) -> None:
        layout = self.entry.spec.storage.layout if self.entry else None
        if (
            self.entry
            and isinstance(layout, PackedGroups)
            and any(column % layout.m for column in self.shard.columns)
        ):
            raise ServeError(
                f"{self.name} has pattern {self.entry.spec.pattern}, which needs a multiple of"
                f" {layout.m} inputs per process, and its {self.shape[1]} inputs are split into"
                f" {self.shard.shape[1]} per process; use another tensor_parallel_size"
            )

    @property
    def rank(self) -> int:
        return self.entry.spec.rank if self.entry else 0

    @property
    def kind(self) -> str:
        return self.entry.spec.kind if self.entry else "no compression"

    @property
    def groups(self) -> PackedGroups | None:
        """The layout of S if it is N:M and on no grid."""
        layout = (
            self.entry.spec.storage.layout if self.entry and self.entry.spec.grid is None else None
        )
        return layout if isinstance(layout, PackedGroups) else None

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """The tensors that the folder holds, without the bias, with their dtypes; None for the
        model's.
        """
        return self.entry.spec.tensors() if self.entry else {"weight": (self.shape, None)}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare all tensors of the layer with its entry. Raises a CheckpointError, as
        `folder.read`.
        """
        check_tensors(self.name, self.tensors(), tensors)
        if self.entry is not None:
            check_index(self.name, self.entry, tensors[self.entry.spec.storage.layout.index])

    def factors(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's u (out, r) and v (r, in). r > 0."""
        u, v = tensors["low_rank_u"], tensors["low_rank_v"]
        if self.entry is not None and self.entry.spec.factor_bits is not None:
            u, v = (
                CodedRows(codes, tensors[f"low_rank_{key}_scale"]).values()
                for key, codes in (("u", u), ("v", v))
            )
        return self.shard.take_rows(u), self.shard.take_columns(v)

    def coded(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's share of a complete S on a grid: codes (out, in), and as in `Scaling` scale
        and zero.
        """
        assert self.entry is not None
        storage = self.entry.spec.storage
        assert storage.grid is not None
        codes = unpack_codes(tensors["weight_packed"], storage.grid.bits, self.shape[1])
        scale = tensors["weight_scale"]
        zero = tensors["weight_offset"] if storage.grid.offset else storage.zeros(tensors)
        first, last = (column * scale.shape[1] // self.shape[1] for column in self.shard.columns)
        scale, zero = (
            self.shard.take_rows(t)[:, first : max(last, first + 1)] for t in (scale, zero)
        )
        return self.shard.take_columns(self.shard.take_rows(codes)), scale, zero

    def unpacked(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's share of S, or of the dense weight."""
        whole = tensors.get("weight")
        if whole is None:
            assert self.entry is not None
            whole = self.entry.spec.storage.unpack(tensors, self.shape[1], self.entry.spec.nonzeros)
        return self.shard.take_columns(self.shard.take_rows(whole))


@dataclass(frozen=True)
class Division:
    """How vLLM divides a layer into slices of outputs, such as q, k and v, and among
    tensor-parallel ranks.
    """

    sizes: Sequence[int]
    local_sizes: Sequence[int]
    width: int
    local_width: int
    rank: int
    ranks: int

    def parts(self, entries: Mapping[str, Entry | None]) -> list[Part]:
        """The layers of the folder that make up the layer, in the order of their outputs; None:
        dense, one slice.
        """
        parts: list[Part] = []
        first = 0
        for name, entry in entries.items():
            last = first + 1
            while (
                entry
                and last < len(self.sizes)
                and sum(self.sizes[first:last]) < entry.spec.shape[0]
            ):
                last += 1
            shape = (sum(self.sizes[first:last]), self.width)
            if last > len(self.sizes) or (entry and entry.spec.shape != shape):
                break
            slices = range(first, last)
            parts.append(Part(name, entry, shape, slices, self._shard(slices)))
            first = last
        else:
            if first == len(self.sizes):
                return parts
        shapes = ", ".join(
            f"{name} {list(entry.spec.shape) if entry else 'dense'}"
            for name, entry in entries.items()
        )
        raise ServeError(
            f"the layers in config.json ({shapes}) do not add up to vLLM's layer, which has outputs"
            f" {list(self.sizes)} and {self.width} inputs: {DENSE}"
        )

    def _shard(self, slices: range) -> Shard:
        """This rank's share of some slices; of key heads that are fewer than ranks, neighbours hold
        the same.
        """
        rows, first = [], 0
        for size, local in ((self.sizes[index], self.local_sizes[index]) for index in slices):
            start = first + self.rank * (size // local) // self.ranks * local
            rows.append((start, start + local))
            first += size
        column = self.rank * self.local_width if self.local_width < self.width else 0
        return Shard(tuple(rows), (column, column + self.local_width))
