"""The description of a compressed layer without its values, used by the plan, the folder, the
reports and the layer.
"""

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
    """A compressed layer.

    Args:
        pattern: the name of the sparsity pattern, such as "2:4"; it says how S is stored
            (`packed.layouts`).
        shape: (out, in) of the weight. rank: of the low-rank part.
        nonzeros: the entries that S keeps; of a stored layer, the number of stored values or codes.
        grid: of a quantised S; None where S may hold any number.
        factor_bits: 8 for factors as int8 codes; None for those of the model's dtype, and for rank
            0.
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
        """How the layer is stored, in words: the pattern, the grid if any, and the factors if they
        are codes.
        """
        grid = [str(self.grid)] if self.grid else []
        factors = [f"factors in int{self.factor_bits}"] if self.factor_bits else []
        return ", ".join([self.pattern, *grid, *factors])

    @property
    def parameters(self) -> int:
        """Non-zeros and both factors, beside `dense_parameters` before."""
        return self.nonzeros + self.rank * sum(self.shape)

    @property
    def trained(self) -> int:
        """The numbers that training moves: the values of S or the scales and offsets of its grid,
        and both factors.
        """
        groups = self.shape[0] * self.grid.groups(self.shape[1]) if self.grid else 0
        sparse = groups * (1 + self.grid.offset) if self.grid else self.nonzeros
        return sparse + self.rank * sum(self.shape)

    @property
    def dense_parameters(self) -> int:
        return math.prod(self.shape)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """The tensors of S and of the factors, with their shapes and dtypes; None for the model's
        dtype.
        """
        storage, (out, width) = self.storage, self.shape
        shapes = storage.shapes(out, width, self.nonzeros)
        sparse = {name: (shapes[name], dtype) for name, dtype in storage.dtypes().items()}
        return sparse | factor_tensors(out, width, self.rank, self.factor_bits)

    def bytes(self, dtype: torch.dtype) -> int:
        """The size of those tensors in a model of this dtype."""
        return sum(
            math.prod(shape) * (stored or dtype).itemsize
            for shape, stored in self.tensors().values()
        )

    def dense_bytes(self, dtype: torch.dtype) -> int:
        """The size of the weight before."""
        return self.dense_parameters * dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the grid and the bits of factors only where there are any."""
        fields = vars(self) | {"shape": list(self.shape), "grid": self.grid and self.grid.to_dict()}
        return {name: value for name, value in fields.items() if value is not None}
