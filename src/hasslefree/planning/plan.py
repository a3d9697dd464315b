"""The plan of every layer."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch

from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Pattern
from hasslefree.packed.spec import LayerSpec


@dataclass(frozen=True)
class LayerPlan(LayerSpec):
    """The plan of one layer.

    Args:
        kept: the pattern with its exact count.
        dtype: of the model.
    """

    kept: Pattern = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True)

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        kept: Pattern,
        rank: int,
        dtype: torch.dtype,
        grid: Grid | None = None,
        factor_bits: int | None = None,
    ) -> "LayerPlan":
        """The plan of a weight (out, in). factor_bits: without effect at rank 0."""
        nonzeros = kept.kept(shape)
        return cls(str(kept), shape, rank, nonzeros, grid, factor_bits, kept=kept, dtype=dtype)

    @property
    def spec(self) -> LayerSpec:
        """The plan without the fields that `LayerSpec` does not have."""
        return LayerSpec(**{part.name: getattr(self, part.name) for part in fields(LayerSpec)})

    def like(self, spec: LayerSpec) -> "LayerPlan":
        """The plan of the same weight with the numbers of a spec."""
        kept = self.kept.with_kept(self.shape, spec.nonzeros)
        return LayerPlan.of(self.shape, kept, spec.rank, self.dtype, spec.grid, spec.factor_bits)

    @property
    def size(self) -> int:
        """The most bytes of its weight in the file: zeros among the kept entries are not stored."""
        return self.bytes(self.dtype)

    @property
    def dense_size(self) -> int:
        """The bytes of the dense weight."""
        return self.dense_bytes(self.dtype)

    @property
    def cost(self) -> float:
        """The time of the layer up to a factor: out · in².

        Every method spends most of its time on products out × in × in.
        """
        out, width = self.shape
        return out * width**2


@dataclass(frozen=True)
class Plan:
    """The plans of all compressed matrices.

    Args:
        blocks: for every block, the name of a layer in it → its plan.
        ends: the full name of an embedding or a head → its plan.
    """

    blocks: list[dict[str, LayerPlan]]
    ends: dict[str, LayerPlan] = field(default_factory=dict)

    @property
    def layers(self) -> list[LayerPlan]:
        """The plans of all layers in the blocks, in order."""
        return [layer for plans in self.blocks for layer in plans.values()]

    @property
    def matrices(self) -> list[LayerPlan]:
        """The plans of the ends, and of all layers in the blocks."""
        return [*self.ends.values(), *self.layers]

    @property
    def parts(self) -> list[dict[str, LayerPlan]]:
        """The plans of the ends, and those of each block, by name."""
        return [self.ends, *self.blocks]

    @property
    def size(self) -> int:
        """The bytes of all planned matrices."""
        return sum(matrix.size for matrix in self.matrices)

    @property
    def dense_size(self) -> int:
        """The bytes of their dense weights."""
        return sum(matrix.dense_size for matrix in self.matrices)


def bytes_of(plans: Mapping[str, LayerPlan]) -> int:
    """The bytes of the planned layers of a block."""
    return sum(layer.size for layer in plans.values())


def digest(plan: Plan) -> str:
    """CRC-32 of every matrix's rank, non-zeros and grid."""
    layers = []
    for plans in plan.parts:
        for name, layer in plans.items():
            grid = [str(layer.grid)] if layer.grid else []
            layers.append((name, layer.rank, layer.nonzeros, *grid))
    return f"{zlib.crc32(repr(layers).encode()):08x}"
