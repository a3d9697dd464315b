"""The call of a block: its arguments, and the shapes of its inputs and outputs."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.errors import ModelError
from hasslefree.models.extra_inputs import ExtraInputs, made_by_block


class Stop(Exception):  # noqa: N818 (no error)
    """Ends a forward pass early."""


@dataclass(frozen=True)
class BlockCall:
    """How a model calls a block: the arguments in addition to the hidden states, such as masks,
    positions and rotary embeddings, and the form of the hidden states.

    Here, hidden states are always (segments, tokens, width). Other arguments that depend on the
    text are additional columns of the hidden states.

    Args:
        arguments: the other arguments by name, or by position, counted after the hidden states.
        outputs: length of the tuple or list that the block returns, hidden states first; 0 if it
            returns a tensor.
        batched: True if the block gives the same outputs for several segments together as for each
            alone.
        shape: shape of a token's hidden states in the model; () if it is (width,).
        first: True if, in the model, the first axis of `shape` precedes the axis of segments.
        extra: the additional columns.
    """

    arguments: dict[int | str, Any]
    outputs: int = 0
    batched: bool = False
    shape: tuple[int, ...] = ()
    first: bool = False
    extra: ExtraInputs = field(default_factory=ExtraInputs)

    def hidden(self, states: Tensor) -> Tensor:
        """Hidden states without the additional columns: (segments, tokens, width)."""
        if not self.extra.columns:
            return states
        return states[..., : self.extra.width]

    def run(self, block: nn.Module, states: Tensor) -> Tensor:
        """Run the block on hidden states (segments, tokens, width), with gradients if enabled, and
        return its output in their dtype.

        If the dtype of the states is not that of the block, call this within
        `precision.computing`.
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
        """Hidden states in the shape in which the block takes them."""
        hidden = self.hidden(states)
        if self.shape:
            hidden = hidden.unflatten(-1, self.shape)
        if self.first:
            return hidden.movedim(2, 0)
        return hidden

    def as_rows(self, hidden: Tensor) -> Tensor:
        """Hidden states of the model, reshaped to (segments, tokens, width)."""
        if self.first:
            hidden = hidden.movedim(0, 2)
        return hidden.flatten(2)

    def as_output(self, states: Tensor) -> Any:
        """The block's output with these hidden states, and None for its other outputs."""
        hidden = self.as_called(states)
        if not self.outputs:
            return hidden
        return (hidden, *[None] * (self.outputs - 1))


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, BlockCall]:
    """Split the arguments of a block, called for one segment, into the hidden states and the rest.

    Raises a ModelError if the hidden states have no axis of segments.
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
    """Split the output of a block into the hidden states and the other outputs."""
    if isinstance(output, tuple | list):
        return output[0], output[1:]
    return output, ()


@contextmanager
def hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Remove hooks when the context ends."""
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
