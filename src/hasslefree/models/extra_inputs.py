"""Arguments of a block that depend on the text, as additional columns of the hidden states.

Most models call a block with hidden states and with arguments that are the same for every text,
such as masks and positions. Some also pass values per token: embeddings, per-layer inputs, keys and
values of an earlier block, or positions that it selected. As columns of the hidden states, these
values are stored, trained through and shared between processes.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from hasslefree.errors import ModelError

# The position of a value in the arguments of a call: the number or name of the argument, followed
# by the keys of nested containers.
Path = tuple[Any, ...]
# The content of a column: a tensor of the text, ("text", number); an entry that blocks write into
# an argument, ("entry", *path); or an output of blocks, ("output", *path).
Key = tuple[Any, ...]
Arguments = Mapping[int | str, Any]


@dataclass(frozen=True)
class BlockTrace:
    """The tensors of one call of a block.

    Args:
        name: name of the block.
        given: tensors in its arguments before the call, without the hidden states.
        made: tensors that the block may have made, from `made_by_block`.
    """

    name: str
    given: Mapping[Path, Tensor]
    made: Mapping[Key, Tensor]


@dataclass(frozen=True)
class Column:
    """The columns of the hidden states that hold one tensor (segments, …).

    Args:
        first: index of the first column.
        shape: shape of the tensor without the axis of segments.
        axis: the axis of tokens in the tensor.
        dtype: dtype of the tensor.
    """

    first: int
    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        value: Tensor,
        tokens: int,
        first: int,
    ) -> Self | None:
        """The columns for a tensor of one segment; None if it has no axis of tokens."""
        if value.shape[:1] != (1,):  # also a scalar, which has no axes
            return None
        for axis in range(1, value.ndim):
            if value.shape[axis] == tokens:
                return cls(first, tuple(value.shape[1:]), axis, value.dtype)
        return None

    @property
    def size(self) -> int:
        """Numbers per token."""
        return math.prod(self.shape) // self.shape[self.axis - 1]

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.size)

    def rows(self, value: Tensor) -> Tensor:
        """Reshape the tensor to columns: (segments, tokens, size)."""
        tokens = self.shape[self.axis - 1]
        return value.movedim(self.axis, 1).reshape(len(value), tokens, self.size)

    def value(self, states: Tensor) -> Tensor:
        """Read the tensor from states (segments, tokens, width). Integers below 2²⁴ are exact in
        float32.
        """
        sides = list(self.shape)
        del sides[self.axis - 1]
        part = states[..., self.columns].reshape(*states.shape[:2], *sides)
        tensor = part.movedim(1, self.axis)
        if self.dtype.is_floating_point:
            return tensor
        return tensor.detach().round().to(self.dtype)


@dataclass(frozen=True)
class ExtraInputs:
    """The columns of a model, and which of them one block reads and writes.

    Args:
        width: width of the hidden states, which precede the columns.
        columns: all columns of the model, in order.
        reads: for each argument that depends on the text, the key of its column.
        makes: keys of the tensors that the block writes or returns; some have no column.
    """

    width: int = 0
    columns: Mapping[Key, Column] = field(default_factory=dict)
    reads: Mapping[Path, Key] = field(default_factory=dict)
    makes: frozenset[Key] = frozenset()

    @property
    def size(self) -> int:
        """Numbers per token in all columns."""
        return sum(column.size for column in self.columns.values())

    def arguments(self, template: Arguments, states: Tensor) -> dict[int | str, Any]:
        """The arguments of a call for these states, in their dtype, and in new containers, since a
        block may write into them.
        """

        def put(path: Path, value: Any) -> Any:
            if path in self.reads:
                return self.columns[self.reads[path]].value(states)
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(states.dtype)
            return value

        return rebuilt(template, put)

    def after(self, states: Tensor, hidden: Tensor, made: Mapping[Key, Tensor]) -> Tensor:
        """The states after the block.

        Args:
            states: states before the block, (segments, tokens, width with columns).
            hidden: hidden states that the block returns, (segments, tokens, width).
            made: tensors that the block may have made, from `made_by_block`.
        """
        parts = [hidden]
        for key, column in self.columns.items():
            if key in self.makes:
                parts.append(column.rows(made[key]).to(hidden.dtype))
            else:
                parts.append(states[..., column.columns])
        return torch.cat(parts, -1)

    def of_text(self, arguments: Arguments) -> Iterator[tuple[Column, Tensor]]:
        """Yield the columns that this block reads and that no block writes, with their rows
        (segments, tokens, size).
        """
        tensors = dict(leaves(arguments))
        for path, key in self.reads.items():
            if key[0] == "text":
                column = self.columns[key]
                yield column, column.rows(tensors[path])


def made_by_block(arguments: Arguments, outputs: Sequence[Any]) -> dict[Key, Tensor]:
    """All tensors that a block may have made, by key. arguments: as they are after the call."""
    made: dict[Key, Tensor] = {("entry", *path): value for path, value in leaves(arguments)}
    made |= {("output", *path): value for path, value in leaves(outputs)}
    return made


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in nested containers, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))


def rebuilt(value: Any, put: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Copy nested containers, and replace each leaf by `put(path, leaf)`."""
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = rebuilt(item, put, (*path, key))
        return copied
    if type(value) in (tuple, list):
        items = [rebuilt(item, put, (*path, index)) for index, item in enumerate(value)]
        return type(value)(items)
    return put(path, value)


def learn(
    width: int,
    tokens: int,
    first: Sequence[BlockTrace],
    second: Sequence[BlockTrace],
) -> list[ExtraInputs]:
    """Find the columns that every block reads and writes.

    Args:
        width: width of the hidden states.
        tokens: tokens per segment.
        first, second: calls of the blocks for two segments that differ in their last token.

    Raises:
        ModelError: an argument depends on the text and has no axis of tokens.
    """
    columns: dict[Key, Column] = {}
    # Tensors that depend on the text, or that blocks made: id → last key. The traces keep them
    # alive, so ids stay unique.
    keys: dict[int, Key] = {}
    extras = []
    for one, other in zip(first, second, strict=True):
        reads = {}
        for path, value in one.given.items():
            depends = not same(value, other.given.get(path))
            if depends:
                keys.setdefault(id(value), ("text", len(keys)))
            key = keys.get(id(value))
            if key is None:  # the same for every text
                continue
            if key not in columns:
                end = width + sum(column.size for column in columns.values())
                column = Column.of(value, tokens, end)
                if column is not None:
                    columns[key] = column
            if key in columns and columns[key].shape == tuple(value.shape[1:]):
                reads[path] = key
            elif depends:
                raise depends_on_text(one.name, path)
        makes = set()
        for key, value in one.made.items():
            is_given = any(value is tensor for tensor in one.given.values())
            if key[0] == "output" or not is_given:
                makes.add(key)
                keys[id(value)] = key
        extras.append(ExtraInputs(width, columns, reads, frozenset(makes)))
    return extras


def depends_on_text(name: str, path: Path) -> ModelError:
    which = f"argument {path[0]!r}"
    if isinstance(path[0], int):
        which = f"positional argument {path[0]}"
    return ModelError(
        f"the {which} of {name} depends on the text and does not have one entry per token, so this"
        " block cannot be run without the rest of the model; models of this kind are not supported"
    )


def same(one: Tensor, other: Tensor | None) -> bool:
    """Return True if two tensors are equal, apart from rounding."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    # Threads may round sines and cosines differently from one call to the next.
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5)
