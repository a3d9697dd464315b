"""Arguments of a block that depend on the text, as additional columns of the hidden states.

Most models call a block with hidden states and with arguments that are the same for every text:
masks, positions. Some
also pass values per token: embeddings, per-layer inputs, the keys and values of an earlier block,
or the positions that it selected. As columns of the hidden states these are stored, trained through
and shared between processes.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from hasslefree.errors import ModelError

# Where a value is in the arguments of a call: the number or the name of the argument, and then the
# keys in it.
Path = tuple[Any, ...]
# What a column holds: a tensor of the text, an entry that blocks write into an argument, or an
# output of blocks.
Key = tuple[Any, ...]
Arguments = Mapping[int | str, Any]


@dataclass(frozen=True)
class BlockTrace:
    """A call of a block: its arguments, without the hidden states, before and after it, and its
    further outputs.
    """

    before: Arguments
    after: Arguments
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Column:
    """Columns of the hidden states, from `first` on, for a tensor of this shape after its first
    axis. axis: tokens.
    """

    first: int
    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Tensor, tokens: int, first: int) -> Self | None:
        """The column for a tensor of one segment; None if no axis of it is the tokens."""
        axes = [axis for axis in range(1, value.ndim) if value.shape[axis] == tokens]
        return (
            cls(first, tuple(value.shape[1:]), axes[0], value.dtype)
            if axes and len(value) == 1
            else None
        )

    @property
    def size(self) -> int:
        """Numbers a token."""
        return math.prod(self.shape) // self.shape[self.axis - 1]

    def rows(self, value: Tensor) -> Tensor:
        """(segments, tokens, size)."""
        return value.movedim(self.axis, 1).reshape(len(value), self.shape[self.axis - 1], self.size)

    def value(self, states: Tensor) -> Tensor:
        """The tensor, from states (segments, tokens, width). Integers below 2²⁴ are exact in
        float32.
        """
        rest = [side for axis, side in enumerate(self.shape, 1) if axis != self.axis]
        part = states[..., self.first : self.first + self.size].reshape(*states.shape[:2], *rest)
        tensor = part.movedim(1, self.axis)
        return tensor if self.dtype.is_floating_point else tensor.detach().round().to(self.dtype)


@dataclass(frozen=True)
class ExtraInputs:
    """The columns of a model, and what one block does with them.

    columns: in order, from `width`, that of the hidden states, on. reads: the column of each
    argument. writes: of each entry that the block writes into an argument. yields: of each output
    after the hidden states, by its number.
    """

    width: int
    columns: Mapping[Key, Column]
    reads: Mapping[Path, Key] = field(default_factory=dict)
    writes: Mapping[Path, Key] = field(default_factory=dict)
    yields: Mapping[int, Key] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Numbers a token in all columns."""
        return sum(column.size for column in self.columns.values())

    def arguments(self, template: Arguments, states: Tensor) -> dict[int | str, Any]:
        """Those of a call for these states, in containers of their own: a block may write into
        them.
        """

        def put(path: Path, value: Any) -> Any:
            key = self.reads.get(path)
            return value if key is None else self.columns[key].value(states)

        return {name: rebuilt(value, put, (name,)) for name, value in template.items()}

    def after(
        self, states: Tensor, hidden: Tensor, outputs: Sequence[Any], arguments: Arguments
    ) -> Tensor:
        """The states after the block. hidden: its output, (segments, tokens, width)."""
        new = {key: outputs[number] for number, key in self.yields.items()}
        if self.writes:
            written = dict(leaves(arguments))
            new |= {key: written[path] for path, key in self.writes.items()}
        parts = [hidden]
        for key, column in self.columns.items():
            old = states[..., column.first : column.first + column.size]
            parts.append(column.rows(new[key]).to(hidden.dtype) if key in new else old)
        return torch.cat(parts, -1)

    def of_text(self, arguments: Arguments) -> Iterator[tuple[Column, Tensor]]:
        """The columns that this block reads and no block writes, with their rows (segments, tokens,
        size).
        """
        tensors = dict(leaves(arguments))
        for path, key in self.reads.items():
            if key[0] == "text":
                yield self.columns[key], self.columns[key].rows(tensors[path])


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in nested containers, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping | tuple | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(item, (*path, key))


def rebuilt(
    value: Any, put: Callable[[Path, Any], Any] = lambda path, leaf: leaf, path: Path = ()
) -> Any:
    """A copy of nested containers, with `put(path, leaf)` in the place of each leaf."""
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = rebuilt(item, put, (*path, key))
        return copied
    if type(value) in (tuple, list):
        return type(value)(rebuilt(item, put, (*path, index)) for index, item in enumerate(value))
    return put(path, value)


def learn(
    width: int,
    tokens: int,
    names: Sequence[str],
    first: Sequence[BlockTrace],
    second: Sequence[BlockTrace],
) -> list[ExtraInputs]:
    """Which columns every block reads and writes, from passes of two segments that differ in their
    last token.
    """
    made: dict[int, Key] = {}  # by the identity of the tensor, which `first` keeps
    text: dict[int, Key] = {}
    roles: list[tuple[dict[Path, Key], dict[Path, Tensor], dict[int, Tensor]]] = []
    columns: dict[Key, Column] = {}
    next_column = width
    for name, one, other in zip(names, first, second, strict=True):
        before, others = dict(leaves(one.before)), dict(leaves(other.before))
        reads: dict[Path, Key] = {}
        for path, value in before.items():
            alike = same(value, others.get(path))
            if alike and id(value) not in made:
                continue
            key = made.get(id(value)) or text.setdefault(id(value), ("text", len(text)))
            column = columns.get(key) or Column.of(value, tokens, next_column)
            if column is None or column.shape != tuple(value.shape[1:]):
                if alike:  # a block makes it, of positions alone
                    continue
                raise depends(name, path)
            reads[path] = key
            if key not in columns:
                columns[key], next_column = column, next_column + column.size
        if strange := [path for path in others if path not in before]:
            raise depends(name, strange[0])
        there = {id(value) for value in before.values()}
        written = {path: value for path, value in leaves(one.after) if id(value) not in there}
        yielded = {
            number: value for number, value in enumerate(one.outputs) if isinstance(value, Tensor)
        }
        made |= {id(value): ("entry", *path) for path, value in written.items()}
        made |= {id(value): ("output", number) for number, value in yielded.items()}
        roles.append((reads, written, yielded))

    def kept(values: Mapping[Any, Tensor]) -> dict[Any, Key]:
        """Those that a block reads."""
        return {
            place: made[id(value)] for place, value in values.items() if made[id(value)] in columns
        }

    return [
        ExtraInputs(width, columns, reads, kept(written), kept(yielded))
        for reads, written, yielded in roles
    ]


def depends(name: str, path: Path) -> ModelError:
    which = (
        f"positional argument {path[0]}" if isinstance(path[0], int) else f"argument {path[0]!r}"
    )
    return ModelError(
        f"the {which} of {name} depends on the text and does not have one entry per token, so this"
        " block cannot be run without the rest of the model; models of this kind are not supported"
    )


def same(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Threads may round sines and cosines differently from one call to the next.
    return (
        torch.allclose(one, other, rtol=1e-3, atol=1e-5)
        if one.is_floating_point()
        else torch.equal(one, other)
    )
