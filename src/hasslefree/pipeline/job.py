"""The objects that a compression works on, made before the first layer is changed."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hasslefree.checkpoint.resume import Unfinished
from hasslefree.distributed import World
from hasslefree.models.rules import Selection
from hasslefree.models.walk import Walk
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.pipeline.text import Texts
from hasslefree.planning.plan import Plan
from hasslefree.recipe.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class Job:
    """A compression: the walk through the model, the plan of the layers, and the text.

    Args:
        name: of the model, as in `Record`.
        from_memory: a loaded model was given, not a name.
        tokenizer: None only if segments were given.
        selection: the blocks, and the matrices that are compressed or stay dense.
        plan: of the layers, before any allocation.
        room: the bytes that all layers may take.
        segments: calibration tokens of all processes, (samples, seqlen) int64.
        texts: the source of the segments; None if segments were given.
        work: the unfinished folder.
        ends: the compressed embedding and head by name, once they exist.
    """

    name: str
    from_memory: bool
    walk: Walk
    tokenizer: Any
    resolved: Resolved
    selection: Selection
    plan: Plan
    room: int
    segments: Tensor
    texts: Texts | None
    world: World
    work: Unfinished
    ends: dict[str, SparseLowRankLinear] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device on which blocks run and layers are solved."""
        return self.walk.weights.device

    @property
    def local_segments(self) -> Tensor:
        """The segments of this process, (samples, seqlen), on the device."""
        return self.world.share(self.segments).to(self.device)

    @property
    def deadline(self) -> float | None:
        """The end of the run in seconds of the performance counter; None if there is no limit."""
        minutes = self.resolved.minutes
        if minutes is None:
            return None
        return self.walk.phases.began + 60 * minutes
