"""A choice of bits and ranks within a size, with its expected loss."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from hasslefree.planning.plan import Plan


@dataclass(frozen=True)
class Advice:
    """A plan within a size, and its estimated loss.

    Args:
        plan: the plan of every layer.
        bits: the least and the most bits of a layer; None without grids.
        rank: the least and the largest rank of a layer.
        bytes: the size of all weights of the model, including those that stay dense.
        divergence: the estimated loss, in nats per token, before any training; an upper bound for
            ranks above the measured ones.
    """

    plan: Plan = dataclasses.field(repr=False)
    bits: tuple[float, float] | None
    rank: tuple[int, int]
    bytes: int
    divergence: float

    @classmethod
    def of(cls, plan: Plan, dense: int, divergence: float) -> "Advice":
        """The advice for a plan.

        Args:
            dense: bytes of the weights that stay dense.
            divergence: see the class.
        """
        layers = plan.layers
        ranks = [layer.rank for layer in layers]
        bits = [layer.grid.stored_bits for layer in layers if layer.grid]
        bit_range = (min(bits), max(bits)) if bits else None
        rank_range = (min(ranks), max(ranks))
        return cls(plan, bit_range, rank_range, dense + plan.size, divergence)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the plan, for JSON."""
        fields = dict(vars(self))
        del fields["plan"]
        return fields
