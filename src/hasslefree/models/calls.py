"""How a model calls its blocks, and whether it can be run block by block."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.errors import ModelError
from hasslefree.models.extra_inputs import ExtraInputs, made_by_block


class Stop(Exception):  # noqa: N818 (not an error: it ends a forward pass early)
    pass


@dataclass(frozen=True)
class BlockCall:
    """The arguments of a block in addition to the hidden states: masks, positions, rotary
    embeddings.

    Hidden states are (segments, tokens, width), whatever shape they have in the model. Further
    arguments that depend on the text are stored as additional columns of the hidden states.

    Args:
        arguments: by name, or by number without the hidden states.
        outputs: length of the tuple or list that the block returns, hidden states first; 0 if it
            returns a tensor.
        batched: the block gives the same outputs for several segments together as for each alone.
        shape: of the hidden states of a token in the model; () if it is (width,).
        first: the first axis of `shape` precedes the axis of segments there.
        extra: the additional columns.
    """

    arguments: dict[int | str, Any]
    outputs: int = 0
    batched: bool = False
    shape: tuple[int, ...] = ()
    first: bool = False
    extra: ExtraInputs = field(default_factory=ExtraInputs)

    def hidden(self, states: Tensor) -> Tensor:
        """The hidden states alone: (segments, tokens, width)."""
        if not self.extra.columns:
            return states
        return states[..., : self.extra.width]

    def run(self, block: nn.Module, states: Tensor) -> Tensor:
        """The block's output for hidden states (segments, tokens, width), in their dtype, with
        gradients if enabled.

        If the dtype of the states is not the block's, call it within `precision.computing`.
        """
        count = len(states) if self.batched else 1
        parts = [self._run(block, part) for part in states.split(count)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)

    def _run(self, block: nn.Module, states: Tensor) -> Tensor:
        arguments = self.extra.arguments(self.arguments, states)
        positional = [value for key, value in arguments.items() if isinstance(key, int)]
        named = {key: value for key, value in arguments.items() if isinstance(key, str)}
        output, others = split_output(block(self.as_called(states), *positional, **named))
        hidden = self.as_rows(output).to(states.dtype)
        if not self.extra.columns:
            return hidden
        return self.extra.after(states, hidden, made_by_block(arguments, others))

    def as_called(self, states: Tensor) -> Tensor:
        """The hidden states as the block takes them."""
        hidden = self.hidden(states)
        if self.shape:
            hidden = hidden.unflatten(-1, self.shape)
        if self.first:
            return hidden.movedim(2, 0)
        return hidden

    def as_rows(self, hidden: Tensor) -> Tensor:
        """The hidden states of the model as (segments, tokens, width)."""
        if self.first:
            hidden = hidden.movedim(0, 2)
        return hidden.flatten(2)

    def as_output(self, states: Tensor) -> Any:
        """The output of the block with these hidden states, and None for its other outputs."""
        hidden = self.as_called(states)
        if not self.outputs:
            return hidden
        return (hidden, *[None] * (self.outputs - 1))


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
    """The hidden states of one segment, and the rest of the arguments that a block was called with.

    Raises a ModelError if the hidden states have no axis of one segment.
    """
    arguments = dict(enumerate(args[1:])) | kwargs
    hidden: Tensor = args[0] if args else arguments.pop("hidden_states")
    first = len(hidden) > 1
    if hidden.ndim > 3:
        rows = hidden.movedim(0, 2) if first else hidden
        return hidden, BlockCall(arguments, shape=tuple(rows.shape[2:]), first=first)
    if first:
        raise ModelError(
            f"the blocks are called with hidden states of shape {tuple(hidden.shape)} for one"
            " segment of text, expected (1, tokens, width); models of this kind are not supported"
        )
    return hidden, BlockCall(arguments)


def split_output(output: Any) -> tuple[Tensor, Sequence[Any]]:
    """The hidden states that a block returns, and its further outputs."""
    if isinstance(output, tuple | list):
        return output[0], output[1:]
    return output, ()


@contextmanager
def hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Remove the hooks at the end, whatever happens in between."""
    with ExitStack() as registered:
        for handle in handles:
            registered.callback(handle.remove)
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object within the context, and restore or delete it afterwards."""
    is_descriptor = inspect.isdatadescriptor(getattr(type(owner), name, None))
    instance_has_it = is_descriptor or name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if instance_has_it:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
