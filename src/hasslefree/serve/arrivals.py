"""Collects the tensors of compressed layers, which a loader reads one by one, in any order, from several files."""

from __future__ import annotations

from torch import Tensor

from hasslefree.errors import ServeError
from hasslefree.serve.stacked import StackedLinear

# How vLLM names the slices of its fused attention layer; those of other layers have numbers.
ATTENTION = {"q": 0, "k": 1, "v": 2}


class Arrivals:
    """Keeps the tensors of a part until it is complete, and then loads it into the stack.

    Args:
        stack: what they are for.
    """

    def __init__(self, stack: StackedLinear):
        self.stack = stack
        self.waiting: list[dict[str, Tensor]] = [{} for _ in stack.parts]

    def add(self, leaf: str, tensor: Tensor, slices: str | int | tuple[int, ...] | None) -> None:
        """Take one tensor.

        Args:
            leaf: its name without that of the layer. tensor: whole.
            slices: which outputs of vLLM's layer it is for, as vLLM counts them; None for a layer that is not fused.

        Raises:
            CheckpointError: the part that this completes is damaged. ServeError: there is no such part.
        """
        index = self._part(slices)
        waiting, wanted = self.waiting[index], self.stack.parts[index].tensors()
        if leaf not in wanted:
            raise ServeError(
                f"the weight files contain {self.stack.parts[index].name}.{leaf}, which the layer that config.json "
                "describes does not have; download or copy the folder again"
            )
        waiting[leaf] = tensor.detach().clone()  # some of vLLM's loaders read the next tensor into the same memory
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
            f"vLLM loads part {slices!r} of a fused layer of {names}, a part that this version of hasslefree does not "
            "know; update hasslefree"
        )
