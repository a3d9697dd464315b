"""From the first block to the last: one block in memory at a time, with the hidden states running
through it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.models.activations import Activations
from hasslefree.models.blocks import Blocks
from hasslefree.models.calibrate import run_block, with_batching
from hasslefree.models.calls import BlockCall
from hasslefree.models.probe import block_calls, entering
from hasslefree.models.sites import Site, find_sites
from hasslefree.models.weights import Weights, outside
from hasslefree.progress import PREFLIGHT, Phases


@dataclass
class Visit:
    """A block while it is in memory. prefix: its name. has_run: whether its inputs were replaced by
    its outputs.
    """

    index: int
    prefix: str
    block: nn.Module
    call: BlockCall
    has_run: bool = False

    def sites(self, names: Sequence[str]) -> dict[str, Site]:
        """The sites of these names in the block, as it is now."""
        sites = find_sites(self.block)
        return {name: sites[name] for name in names}


@dataclass(frozen=True)
class Walk:
    """A model that is run block by block.

    calls: how each block is called. storage, folder: as for `Activations`. phases: those in which
    blocks are counted.
    """

    model: PreTrainedModel
    blocks: Blocks
    weights: Weights
    calls: Sequence[BlockCall]
    storage: str = "device"
    folder: Path = Path()
    phases: Phases = field(default_factory=Phases)

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        blocks: Blocks,
        weights: Weights,
        segment: Tensor,
        storage: str = "device",
        folder: Path = Path(),
        inspect: Callable[[int], None] = lambda index: None,
        phases: Phases | None = None,
    ) -> Self:
        """Learn from one segment (1, tokens) how the model calls its blocks. inspect: as for
        `block_calls`.
        """
        phases = phases or Phases()
        with phases.phase(PREFLIGHT, 2 * len(blocks.modules), "blocks") as phase:
            calls = block_calls(model, blocks, segment, weights, inspect, phase.advance)
        return cls(model, blocks, weights, calls, storage, folder, phases)

    @property
    def width(self) -> int | None:
        """Values per token that pass from block to block; None where that is the width of the
        embeddings.
        """
        call = self.calls[0]
        if call.extra is not None:
            return call.extra.width + call.extra.size
        return math.prod(call.shape) if call.shape else None

    def outside(self) -> AbstractContextManager[None]:
        """Within it, the modules outside the blocks are in memory: embeddings, the last norm, the
        output head.
        """
        return self.weights.present(outside(self.model, self.blocks))

    def outer(self) -> list[nn.Module]:
        """The modules outside the blocks."""
        return list(outside(self.model, self.blocks)())

    def entering(self, segments: Tensor) -> Activations:
        """What enters the first block, for segments (samples, tokens), in float32 at least."""
        with self.outside():
            states = (
                entering(self.model, self.blocks, self.calls, segment[None]) for segment in segments
            )
            first = next(states)
            shape = (len(segments), first.shape[1], first.shape[2])
            hidden = Activations(shape, first.dtype, first.device, self.storage, self.folder)
            for index, entered in enumerate(chain([first], states)):
                hidden[index] = entered
        return hidden

    def visits(self, hidden: Activations, to_end: bool = True) -> Iterator[Visit]:
        """The blocks in order, one in memory at a time, with `hidden` as their inputs.

        `hidden` then runs through the block as it is, unless it `has_run`. to_end: through the last
        block too.
        """
        for index, block in enumerate(self.blocks.modules):
            with self.weights.present(block.modules, self.blocks.part(index + 1)):
                call = with_batching(block, self.calls[index], hidden)
                visit = Visit(index, self.blocks.prefix(index), block, call)
                yield visit
                if not visit.has_run and (to_end or index + 1 < len(self.blocks.modules)):
                    run_block(block, call, hidden)

    def backwards(self) -> Iterator[Visit]:
        """The blocks from the last to the first, one in memory at a time."""
        for index in reversed(range(len(self.blocks.modules))):
            with self.weights.present(
                self.blocks.modules[index].modules, self.blocks.part(index - 1)
            ):
                yield Visit(
                    index, self.blocks.prefix(index), self.blocks.modules[index], self.calls[index]
                )
