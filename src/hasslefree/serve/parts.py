"""The layers of a folder that make up one linear layer of vLLM, such as q, k and v, and the shard
of each that a tensor-parallel rank holds.

Column-parallel layers are divided by outputs: a rank holds rows of S and u, and all of v.
Row-parallel layers are divided by inputs: a rank holds columns of S and v, and all of u.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.checkpoint.entries import Entry, check_index, check_tensors
from hasslefree.core.factors import CodedRows, TensorSpecs
from hasslefree.core.low_rank import LowRank
from hasslefree.errors import ServeError
from hasslefree.serve.requirements import DENSE

# The stored tensors of a layer, by their name within the layer.
Tensors = Mapping[str, Tensor]
# The layers of a folder that make up a layer of vLLM, by name, in the order of their outputs; None
# for a layer that stayed dense.
Entries = Mapping[str, Entry | None]


@dataclass(frozen=True)
class Part:
    """A layer of the folder within a layer of vLLM, and this rank's shard of it.

    Args:
        name: the layer's name in vLLM, for messages.
        entry: the layer's entry in config.json; None for a layer that stayed dense.
        shape: (out, in) of the whole weight.
        slices: the slices of vLLM's layer that the layer fills.
        rows: the rows of the shard, in the rank's order.
        columns: the columns of the shard.
    """

    name: str
    entry: Entry | None
    shape: tuple[int, int]
    slices: range
    rows: tuple[slice, ...]
    columns: slice

    @property
    def local_shape(self) -> tuple[int, int]:
        """(out, in) of the shard."""
        height = sum(rows.stop - rows.start for rows in self.rows)
        return height, self.columns.stop - self.columns.start

    @property
    def kind(self) -> str:
        """How the layer is stored, in words."""
        if self.entry:
            return self.entry.spec.kind
        return "no compression"

    @property
    def rank(self) -> int:
        """The rank of the low-rank part."""
        if self.entry:
            return self.entry.spec.rank
        return 0

    def tensors(self) -> TensorSpecs:
        """The shapes and dtypes of the stored tensors by name, without the bias. None stands for
        the model's dtype.
        """
        if self.entry:
            return self.entry.spec.tensors()
        return {"weight": (self.shape, None)}

    def check(self, tensors: Tensors) -> None:
        """Raise a CheckpointError if the layer's tensors do not match its entry."""
        check_tensors(self.name, self.tensors(), tensors)
        if self.entry is not None:
            check_index(self.name, self.entry, tensors[self.entry.spec.layout.index])

    def local_rows(self, tensor: Tensor) -> Tensor:
        """Select the shard's rows of a tensor (out, …)."""
        return torch.cat([tensor[rows] for rows in self.rows])

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        """This rank's u (out, r) and v (r, in); None for rank 0."""
        if not self.rank:
            return None
        u = tensors["low_rank_u"]
        v = tensors["low_rank_v"]
        if "low_rank_u_scale" in tensors:
            u = CodedRows(u, tensors["low_rank_u_scale"]).values()
            v = CodedRows(v, tensors["low_rank_v_scale"]).values()
        return self.local_rows(u), v[:, self.columns]

    def codes(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's shard of a complete S on a grid without offsets: codes (out, in), scales and
        zeros (out, groups).
        """
        assert self.entry is not None
        spec = self.entry.spec
        scale = tensors["weight_scale"]
        groups = scale.shape[1]
        width = self.shape[1]
        first = self.columns.start * groups // width
        last = self.columns.stop * groups // width
        last = max(last, first + 1)  # a group that is a whole row belongs to every rank
        return (
            self.local_rows(spec.codes(tensors))[:, self.columns],
            self.local_rows(scale)[:, first:last],
            self.local_rows(spec.zeros(tensors))[:, first:last],
        )

    def dense(self, tensors: Tensors) -> Tensor:
        """This rank's shard of S + u v, or of the dense weight."""
        whole = self.entry.spec.unpack(tensors) if self.entry else tensors["weight"]
        shard = self.local_rows(whole)[:, self.columns]
        factors = self.factors(tensors)
        if factors is None:
            return shard
        return LowRank(*factors).added_to(shard)


@dataclass(frozen=True)
class Division:
    """How vLLM divides a layer into slices of outputs, such as q, k and v, and among ranks.

    Args:
        sizes: the outputs of each slice on all ranks together.
        local_sizes: the outputs of each slice on this rank.
        width: the inputs of the layer.
        local_width: the inputs on this rank.
        rank: the number of this rank.
        ranks: the number of ranks.
    """

    sizes: Sequence[int]
    local_sizes: Sequence[int]
    width: int
    local_width: int
    rank: int
    ranks: int

    def parts(self, entries: Entries) -> list[Part]:
        """Assign the slices of the layer to the layers of the folder.

        A dense layer fills one slice.

        Raises:
            ServeError: their shapes do not add up to the layer.
        """
        parts: list[Part] = []
        column = 0
        if self.local_width < self.width:
            column = self.rank * self.local_width
        columns = slice(column, column + self.local_width)
        first = 0
        for name, entry in entries.items():
            last = self._last_slice(entry, first)
            slices = range(first, last)
            shape = (sum(self.sizes[first:last]), self.width)
            if last > len(self.sizes) or (entry and entry.spec.shape != shape):
                raise self._mismatch(entries)
            parts.append(Part(name, entry, shape, slices, self._rows(slices), columns))
            first = last
        if first < len(self.sizes):
            raise self._mismatch(entries)
        return parts

    def _last_slice(self, entry: Entry | None, first: int) -> int:
        """The end of the range of slices from `first` that together have an entry's outputs."""
        last = first + 1
        if entry is None:
            return last
        out = entry.spec.shape[0]
        while last < len(self.sizes) and sum(self.sizes[first:last]) < out:
            last += 1
        return last

    def _mismatch(self, entries: Entries) -> ServeError:
        shapes = []
        for name, entry in entries.items():
            shapes.append(f"{name} {list(entry.spec.shape) if entry else 'dense'}")
        return ServeError(
            f"the layers in config.json ({', '.join(shapes)}) do not add up to vLLM's layer, which"
            f" has outputs {list(self.sizes)} and {self.width} inputs: {DENSE}"
        )

    def _rows(self, slices: range) -> tuple[slice, ...]:
        """This rank's rows of some slices. If there are more ranks than key heads, neighbouring
        ranks hold the same heads.
        """
        rows = []
        offset = 0
        for index in slices:
            size = self.sizes[index]
            local = self.local_sizes[index]
            start = offset + self.rank * (size // local) // self.ranks * local
            rows.append(slice(start, start + local))
            offset += size
        return tuple(rows)
