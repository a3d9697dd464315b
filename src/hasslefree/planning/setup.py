"""A compression as the planner sees it: a model, the plan of its layers, and amounts of text."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hasslefree.models.activations import check_storage
from hasslefree.models.blocks import Blocks
from hasslefree.models.calibrate import activation_values, probes
from hasslefree.models.experts import split_experts
from hasslefree.models.load import load_shapes, refuse_compressed, resolve_seqlen
from hasslefree.planning.machine import in_one_pass
from hasslefree.planning.plan import Plan
from hasslefree.planning.schedule import segments_for, segments_held_out
from hasslefree.planning.uniform import select_and_plan
from hasslefree.recipe.recipe import Recipe
from hasslefree.recipe.resolve import Resolved


@dataclass(frozen=True)
class Setup:
    """A compression, on one of its processes.

    Args:
        samples: calibration segments of all processes.
        seqlen: tokens per segment.
        width: numbers per token between blocks; None for the width of the embeddings. It is only
            known after a run of the model if blocks pass on more than hidden states.
    """

    model: PreTrainedModel
    blocks: Blocks
    plan: Plan
    resolved: Resolved
    samples: int
    seqlen: int
    device: torch.device
    storage: str
    processes: int = 1
    width: int | None = None

    @property
    def model_bytes(self) -> int:
        """Bytes of the dense model."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @property
    def trained(self) -> int:
        """Trainable numbers of all layers."""
        return sum(layer.trained for layer in self.plan.layers)

    @property
    def embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def state_width(self) -> int:
        """Numbers per token between blocks."""
        return self.width or self.embeddings.embedding_dim

    def local_tokens(self, segments: int) -> int:
        """Tokens per process if all processes share these segments."""
        return math.ceil(segments / self.processes) * self.seqlen

    @property
    def text_tokens(self) -> int:
        """Calibration tokens per process."""
        return self.local_tokens(self.samples)

    @property
    def probe_tokens(self) -> int:
        """Tokens per process that run through the dense model with gradients; 0 without probes."""
        if self.resolved.allocate != "error":
            return 0
        return self.local_tokens(probes(self.samples, self.seqlen))

    @property
    def matched_tokens(self) -> int:
        """The most tokens per process for matching predictions; 0 without matching."""
        return self.local_tokens(segments_for(self.resolved.match_predictions, self.seqlen))

    @property
    def checked_tokens(self) -> int:
        """The most held-out tokens, of text and of code; every process runs all of them."""
        if not self.resolved.check:
            return 0
        return 2 * segments_held_out(self.seqlen) * self.seqlen

    @property
    def at_once(self) -> bool:
        """True if layers are solved during one pass of all segments through the block."""
        if self.resolved.sequential != "layer":
            return False
        return in_one_pass(max(self.activation_values(self.text_tokens)), self.device)

    def activation_values(self, tokens: int) -> list[float]:
        """The `activation_values` of the planned layers of each block."""
        values: list[float] = []
        for block, plans in zip(self.blocks.modules, self.plan.blocks, strict=True):
            shapes = {name: layer.shape for name, layer in plans.items()}
            values.append(activation_values(block, shapes, tokens))
        return values


def setup_of(
    name: str,
    recipe: Recipe,
    device: torch.device,
    storage: str,
    processes: int = 1,
    trust_remote_code: bool = False,
) -> Setup:
    """The setup for a model by name, from its configuration alone."""
    resolved = recipe.resolve(with_text=False)
    check_storage(storage)
    model = load_shapes(name, recipe.dtype, trust_remote_code)
    refuse_compressed(model.config, name)
    split_experts(model)
    resolved, selection, plan = select_and_plan(model, resolved)
    seqlen = resolve_seqlen(model, recipe.seqlen)
    return Setup(
        model,
        selection.blocks,
        plan,
        resolved,
        recipe.samples,
        seqlen,
        device,
        storage,
        processes,
    )
