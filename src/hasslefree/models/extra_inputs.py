"""Arguments of a block that depend on the text, as additional columns of the hidden states.

Most models call a block with hidden states and with arguments that are the same for every text:
masks, positions. Some also pass values per token: embeddings, per-layer inputs, the keys and values
of an earlier block, or the positions that it selected. As columns of the hidden states these are
stored, trained through and shared between processes.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from hasslefree.errors import ModelError

# The position of a value in the arguments of a call: the number or the name of the argument, and
# then the keys in it.
Path = tuple[Any, ...]
# What a column holds: a tensor of the text, ("text", number); an entry that blocks write into an
# argument, ("entry", *path); or an output of blocks, ("output", number).
Key = tuple[Any, ...]
Arguments = Mapping[int | str, Any]


@dataclass(frozen=True)
class BlockTrace:
    """A call of a block.

    Args:
        before: its arguments without the hidden states.
        after: the same arguments after the call: a block may write into them.
        outputs: what it returns after the hidden states.
    """

    before: Arguments
    after: Arguments
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Column:
    """Columns of the hidden states that hold a tensor.

    Args:
        first: the first of the columns.
        shape: of the tensor, after its first axis, which is that of the segments.
        axis: the axis of the tokens in the tensor.
        dtype: of the tensor.
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
        """The columns for a tensor of one segment; None if no axis of it is the tokens."""
        if len(value) != 1:
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
        """The columns of a tensor: (segments, tokens, size)."""
        tokens = self.shape[self.axis - 1]
        return value.movedim(self.axis, 1).reshape(len(value), tokens, self.size)

    def value(self, states: Tensor) -> Tensor:
        """The tensor, from states (segments, tokens, width). Integers below 2²⁴ are exact in
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
    """The columns of a model, and the use that one block makes of them.

    Args:
        width: of the hidden states, in front of the columns.
        columns: all columns of the model, in order.
        reads: for each argument that depends on the text, its column.
        writes: for each entry that the block writes into an argument, its column.
        yields: for each output after the hidden states, by its number, its column.
    """

    width: int
    columns: Mapping[Key, Column]
    reads: Mapping[Path, Key] = field(default_factory=dict)
    writes: Mapping[Path, Key] = field(default_factory=dict)
    yields: Mapping[int, Key] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Numbers per token in all columns."""
        return sum(column.size for column in self.columns.values())

    def without_unread(self) -> Self:
        """The same without what the block makes and no block reads."""
        writes = {path: key for path, key in self.writes.items() if key in self.columns}
        yields = {number: key for number, key in self.yields.items() if key in self.columns}
        return replace(self, writes=writes, yields=yields)

    def arguments(self, template: Arguments, states: Tensor) -> dict[int | str, Any]:
        """The arguments of a call for these states, in containers of their own: a block may write
        into them.
        """

        def put(path: Path, value: Any) -> Any:
            key = self.reads.get(path)
            if key is None:
                return value
            return self.columns[key].value(states)

        return {name: rebuilt(value, put, (name,)) for name, value in template.items()}

    def after(
        self, states: Tensor, hidden: Tensor, outputs: Sequence[Any], arguments: Arguments
    ) -> Tensor:
        """The states after the block.

        Args:
            states: before the block, (segments, tokens, width with columns).
            hidden: the hidden states that the block returns, (segments, tokens, width).
            outputs: its further outputs.
            arguments: its arguments after the call.
        """
        changed = {key: outputs[number] for number, key in self.yields.items()}
        if self.writes:
            written = dict(leaves(arguments))
            for path, key in self.writes.items():
                changed[key] = written[path]
        parts = [hidden]
        for key, column in self.columns.items():
            if key in changed:
                parts.append(column.rows(changed[key]).to(hidden.dtype))
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


def keep(path: Path, leaf: Any) -> Any:
    return leaf


def rebuilt(
    value: Any,
    put: Callable[[Path, Any], Any] = keep,
    path: Path = (),
) -> Any:
    """Copy nested containers, with `put(path, leaf)` in the place of each leaf."""
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = rebuilt(item, put, (*path, key))
        return copied
    if type(value) in (tuple, list):
        items = [rebuilt(item, put, (*path, index)) for index, item in enumerate(value)]
        return type(value)(items)
    return put(path, value)


@dataclass(frozen=True)
class Argument:
    """A tensor among the arguments of a call.

    Args:
        path: its position in the arguments.
        value: the tensor in the first pass.
        depends: True if it differs in the second pass, so that it depends on the text.
    """

    path: Path
    value: Tensor
    depends: bool


def arguments_of(
    name: str,
    first: BlockTrace,
    second: BlockTrace,
) -> list[Argument]:
    """List the tensors among the arguments of a block in two passes. name: of the block.

    Raises a ModelError if the second pass has further tensors.
    """
    others = dict(leaves(second.before))
    arguments = []
    for path, value in leaves(first.before):
        depends = not same(value, others.pop(path, None))
        arguments.append(Argument(path, value, depends))
    for path in others:
        raise depends_on_text(name, path)
    return arguments


@dataclass
class ColumnFinder:
    """Assigns columns to the tensors that blocks read, while it follows a pass.

    Args:
        width: of the hidden states, in front of the columns.
        tokens: of the segment.
        columns: those that were assigned.
        sources: the tensors that blocks made or read so far, with their keys, by identity. The
            tensors are kept, so that no identity is used again.
    """

    width: int
    tokens: int
    columns: dict[Key, Column] = field(default_factory=dict)
    sources: dict[int, tuple[Key, Tensor]] = field(default_factory=dict)

    def name(self, key: Key, value: Tensor) -> None:
        """Give a tensor that a block made its key."""
        self.sources[id(value)] = (key, value)

    def read(self, argument: Argument) -> Key | None:
        """The column of an argument; None if the argument is the same for every text, or has no
        axis of tokens.
        """
        value = argument.value
        if id(value) not in self.sources:
            if not argument.depends:
                return None
            texts = [key for key, _ in self.sources.values() if key[0] == "text"]
            self.name(("text", len(texts)), value)
        key, _ = self.sources[id(value)]
        if key not in self.columns:
            end = self.width + sum(column.size for column in self.columns.values())
            column = Column.of(value, self.tokens, end)
            if column is None:
                return None
            self.columns[key] = column
        if self.columns[key].shape == tuple(value.shape[1:]):
            return key
        return None


def learn(
    width: int,
    tokens: int,
    names: Sequence[str],
    first: Sequence[BlockTrace],
    second: Sequence[BlockTrace],
) -> list[ExtraInputs]:
    """Find the columns that every block reads and writes.

    Args:
        width: of the hidden states.
        tokens: of a segment.
        names: of the blocks.
        first, second: calls of the blocks for two segments that differ in their last token.

    Raises:
        ModelError: an argument depends on the text and has no axis of tokens.
    """
    finder = ColumnFinder(width, tokens)
    extras = []
    for name, one, other in zip(names, first, second, strict=True):
        reads = {}
        for argument in arguments_of(name, one, other):
            key = finder.read(argument)
            if key is not None:
                reads[argument.path] = key
            elif argument.depends:
                raise depends_on_text(name, argument.path)
        given = {id(value) for _, value in leaves(one.before)}
        writes: dict[Path, Key] = {}
        for path, value in leaves(one.after):
            if id(value) not in given:
                writes[path] = ("entry", *path)
                finder.name(writes[path], value)
        yields: dict[int, Key] = {}
        for number, value in enumerate(one.outputs):
            if isinstance(value, Tensor):
                yields[number] = ("output", number)
                finder.name(yields[number], value)
        extras.append(ExtraInputs(width, finder.columns, reads, writes, yields))
    return [extra.without_unread() for extra in extras]


def depends_on_text(name: str, path: Path) -> ModelError:
    which = f"argument {path[0]!r}"
    if isinstance(path[0], int):
        which = f"positional argument {path[0]}"
    return ModelError(
        f"the {which} of {name} depends on the text and does not have one entry per token, so this"
        " block cannot be run without the rest of the model; models of this kind are not supported"
    )


def same(one: Tensor, other: Tensor | None) -> bool:
    """Return True if two tensors are equal, but for the rounding of floating-point numbers."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    # Threads may round sines and cosines differently from one call to the next.
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5)
