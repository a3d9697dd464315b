"""What a run reads of tensors that have shapes alone, so that it goes on as it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
# Of the booleans that are read, those that say that all is well.
WELL = {"all": True, "any": False, "lt": False, "gt": False}
# A count is large: weights have no zeros.
LARGE = {"gt": True}
# Of all others, those of a ≥, two in five are true: so often ρ grows in `joint`, of twenty times that it looks.
OFTEN = (True, False, True, False, False)


class Guesses:
    """Losses fall a little each time that one is read, nothing is NaN or singular, masks hold half of the entries."""

    def __init__(self) -> None:
        self.read = self.asked = 0

    def operations(self) -> dict[Any, Callable[..., Any]]:
        """For `FakeGpu.instead`."""
        reductions = {op: self._noting(op, name) for name in WELL for op in _overloads(getattr(aten, name))}
        return reductions | {
            aten._local_scalar_dense.default: self.number,
            aten.equal.default: lambda one, other: True,
            aten.allclose.default: lambda *args, **kwargs: True,
            aten.nonzero.default: lambda mask: mask.new_empty((mask.numel() // 2, mask.ndim), dtype=torch.int64),
            aten.masked_select.default: lambda x, mask: x.new_empty(mask.numel() // 2),
            aten.index.Tensor: self.indexed,
        }

    def number(self, tensor: Tensor) -> float | int | bool:
        if tensor.is_floating_point():
            self.read += 1
            return 1.0 - 1e-5 * self.read
        if tensor.dtype != torch.bool:
            return 0
        self.asked += 1
        return getattr(tensor, "well", OFTEN[self.asked % len(OFTEN)])

    @staticmethod
    def _noting(op: Any, name: str) -> Callable[..., Tensor]:
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            out = op(*args, **kwargs)
            counts = isinstance(args[0], Tensor) and args[0].dtype == torch.int64
            out.well = (LARGE if counts else WELL).get(name, WELL[name])
            return out

        return noted

    @staticmethod
    def indexed(x: Tensor, indices: list[Tensor | None]) -> Tensor:
        """A mask as indices: half of them."""

        def numbers(index: Tensor | None) -> Any:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                return index
            return [index.new_empty(index.numel() // 2, dtype=torch.int64)] * index.ndim

        found: list[Any] = []
        for index in indices:
            made = numbers(index)
            found += made if isinstance(made, list) else [made]
        return aten.index.Tensor(x, found)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]
