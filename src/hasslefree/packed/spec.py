"""The description of a compressed layer without its values: for plans, folders, reports, layers."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from hasslefree.core.factors import factor_tensors
from hasslefree.core.grids import Grid
from hasslefree.packed.storage import Storage
from hasslefree.validation import Count, Positive


@dataclass(frozen=True)
class LayerSpec:
    """Describe a compressed layer W ≈ S + u v.

    Args:
        pattern: the name of the sparsity pattern, such as "2:4". It decides how S is stored
            (`packed.layouts`).
        shape: (out, in) of the weight.
        rank: the rank of L = u v.
        nonzeros: the number of entries that S keeps, which is the number of stored values or codes.
        grid: the grid of a quantised S; None if the entries of S are floats.
        factor_bits: 8 if the factors are int8 codes; None if they have the model's dtype, and
            always None for rank 0.
    """

    pattern: str
    shape: tuple[Positive, Positive]
    rank: Count
    nonzeros: Count
    grid: Grid | None = None
    factor_bits: int | None = None

    def __post_init__(self) -> None:
        if not self.rank:
            object.__setattr__(self, "factor_bits", None)

    @property
    def storage(self) -> Storage:
        return Storage.of(self.pattern, self.grid)

    @property
    def kind(self) -> str:
        """How the layer is stored, in words, such as "2:4, int4 in groups of 64"."""
        words = [self.pattern]
        if self.grid:
            words.append(str(self.grid))
        if self.factor_bits:
            words.append(f"factors in int{self.factor_bits}")
        return ", ".join(words)

    @property
    def parameters(self) -> int:
        """The number of entries in S and both factors."""
        return self.nonzeros + self.rank * sum(self.shape)

    @property
    def trained(self) -> int:
        """The number of trainable parameters: the values of S, or the scales and offsets of its
        grid, and both factors.
        """
        factors = self.rank * sum(self.shape)
        if self.grid is None:
            return self.nonzeros + factors
        out, width = self.shape
        groups = out * self.grid.groups(width)
        offsets = groups if self.grid.offset else 0
        return groups + offsets + factors

    @property
    def dense_parameters(self) -> int:
        """The number of entries of the original weight."""
        return math.prod(self.shape)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Map the names of the stored tensors to their shapes and dtypes; None is the model's
        dtype.
        """
        storage = self.storage
        out, width = self.shape
        shapes = storage.shapes(out, width, self.nonzeros)
        sparse = {name: (shapes[name], dtype) for name, dtype in storage.dtypes().items()}
        return sparse | factor_tensors(out, width, self.rank, self.factor_bits)

    def bytes(self, dtype: torch.dtype) -> int:
        """The bytes of the stored tensors in a model of this dtype."""
        total = 0
        for shape, stored in self.tensors().values():
            total += math.prod(shape) * (stored or dtype).itemsize
        return total

    def dense_bytes(self, dtype: torch.dtype) -> int:
        """The bytes of the original weight in this dtype."""
        return self.dense_parameters * dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON, without those that are None."""
        fields = vars(self) | {"shape": list(self.shape), "grid": self.grid and self.grid.to_dict()}
        return {name: value for name, value in fields.items() if value is not None}
