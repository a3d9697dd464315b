"""Run a model from its first block to the last, with one block in memory at a time."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.errors import ModelError, option
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import Blocks
from hasslefree.models.calibrate import run_block, with_batching
from hasslefree.models.calls import BlockCall, replaced
from hasslefree.models.precision import computing
from hasslefree.models.probe import block_calls, entering, run_with
from hasslefree.models.weights import Weights, outside
from hasslefree.progress import PREFLIGHT, REFERENCE, Phases

# Options of a configuration for outputs that only blocks can compute.
OUTPUT_OPTIONS = ("output_router_logits", "output_attentions", "output_hidden_states")


@dataclass
class Visit:
    """A block while it is in memory.

    Args:
        index: index of the block.
        prefix: name of the block in the model.
        call: how the model calls the block.
        has_run: True once the inputs of the block were replaced by its outputs.
    """

    index: int
    prefix: str
    block: nn.Module
    call: BlockCall
    has_run: bool = False


@dataclass(frozen=True)
class Walk:
    """A model that is run block by block.

    Args:
        calls: how the model calls each block.
        storage, folder: as for `Activations`.
        phases: phases of the run, which count blocks.
        rounded: values of the embedding and the head in the compressed model, by parameter name.
    """

    model: PreTrainedModel
    blocks: Blocks
    weights: Weights
    calls: Sequence[BlockCall]
    storage: str
    folder: Path
    phases: Phases
    rounded: dict[str, Tensor] = field(default_factory=dict)

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
        """Learn from one segment (1, tokens) how the model calls its blocks.

        inspect: as for `block_calls`.
        """
        phases = phases or Phases()
        with phases.phase(PREFLIGHT, 2 * len(blocks.modules), "blocks") as phase:
            calls = block_calls(model, blocks, segment, weights, inspect, phase.advance)
        return cls(model, blocks, weights, calls, storage, folder, phases)

    @property
    def width(self) -> int | None:
        """Values per token that pass from block to block; None if this is the width of the
        embeddings.
        """
        call = self.calls[0]
        if call.extra.columns:
            return call.extra.width + call.extra.size
        if call.shape:
            return math.prod(call.shape)
        return None

    @contextmanager
    def outside(self, dense: bool = False) -> Iterator[None]:
        """Bring the modules outside the blocks into memory: embeddings, the last norm, the output
        head.

        Args:
            dense: use the dense values of embedding and head, even if `rounded` has others.
        """
        modules = outside(self.model, self.blocks)
        values = {} if dense else self.rounded
        with self.weights.present(modules), values_replaced(self.model, values):
            yield

    @contextmanager
    def head(self, dense: bool = False) -> Iterator[None]:
        """Let the output head run, as `logits` needs it. dense: as for `outside`."""
        modules = outside(self.model, self.blocks)
        with self.outside(dense), computing(self.model, modules(), unpack=False):
            yield

    def logits(self, segment: Tensor, states: Tensor) -> Tensor:
        """Compute the logits (tokens, vocabulary) from the output of the last block, within `head`;
        no block runs.

        Args:
            segment: token ids (tokens,).
            states: output of the last block, (1, tokens, width).
        """

        def forward(index: int, *args: Any, **kwargs: Any) -> Any:
            return self.calls[index].as_output(states)

        config = self.model.config
        with ExitStack() as changes:
            for name in OUTPUT_OPTIONS:
                if getattr(config, name, False):
                    changes.enter_context(replaced(config, name, False))
            output = run_with(self.model, self.blocks, segment[None], forward)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise ModelError(
                f"{type(self.model).__name__} has no output head, and"
                f" {option('allocate', 'error')} and prediction matching need the model's"
                " predictions; load it as a causal language model (AutoModelForCausalLM), or use"
                f" {option('allocate', 'uniform')} and {option('match_predictions', 0)}"
            )
        return logits[0]

    def entering(self, segments: Tensor) -> Activations:
        """Compute the inputs of the first block, at least in float32. segments: token ids (samples,
        tokens).
        """
        hidden: Activations | None = None
        with self.outside():
            for index, segment in enumerate(segments):
                states = entering(self.model, self.blocks, self.calls, segment[None])
                if hidden is None:
                    shape = (len(segments), states.shape[1], states.shape[2])
                    hidden = Activations(
                        shape, states.dtype, states.device, self.storage, self.folder
                    )
                hidden[index] = states
        assert hidden is not None
        return hidden

    def visits(self, hidden: Activations, to_end: bool = True) -> Iterator[Visit]:
        """Visit the blocks in order, one in memory at a time.

        After each visit, `hidden` runs through the block, which the visit may have changed, unless
        `has_run` is set.

        Args:
            to_end: run the last block too.
        """
        for index, block in enumerate(self.blocks.modules):
            with self.weights.present(block.modules, self.blocks.part(index + 1)):
                call = with_batching(block, self.calls[index], hidden)
                visit = Visit(index, self.blocks.prefix(index), block, call)
                yield visit
                if not visit.has_run and (to_end or index + 1 < len(self.blocks.modules)):
                    run_block(block, call, hidden)

    def run_dense(self, hidden: Activations) -> None:
        """Run all blocks of the dense model, and replace the inputs of the first block by the
        outputs of the last one.
        """
        count = len(self.blocks.modules)
        for _ in self.phases.counted(REFERENCE, self.visits(hidden), count, "blocks"):
            pass

    def backwards(self) -> Iterator[Visit]:
        """Visit the blocks from the last to the first, one in memory at a time."""
        for index, block in reversed(list(enumerate(self.blocks.modules))):
            with self.weights.present(block.modules, self.blocks.part(index - 1)):
                yield Visit(index, self.blocks.prefix(index), block, self.calls[index])


@contextmanager
def values_replaced(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace values of parameters, given by name. No gradient may outlive the context."""
    with ExitStack() as changes:
        for name, value in values.items():
            changes.enter_context(replaced(model.get_parameter(name), "data", value))
        yield
