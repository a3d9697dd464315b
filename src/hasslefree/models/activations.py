"""Keep the hidden states between two blocks: on the device, in RAM or in a file."""

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from hasslefree.errors import OutputError, UnknownNameError, option

STORAGES = ("device", "cpu", "disk")


def check_storage(storage: str) -> None:
    """Raise an UnknownNameError if there is no such storage."""
    if storage not in STORAGES:
        raise UnknownNameError("storage of activations", storage, STORAGES)


class Activations:
    """Hidden states (samples, tokens, width), read and replaced a few segments at a time.

    Args:
        shape: (samples, tokens, width).
        device: where segments are used.
        storage: "device", "cpu" (RAM), or "disk": a file without a name in `folder`, mapped into
            memory, which is gone with the process.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        storage: str,
        folder: Path,
    ):
        self.shape = shape
        self.device = device
        self.storage = storage
        self.folder = folder
        if storage == "disk":
            self.states = _in_file(shape, dtype, folder)
        else:
            target = device if storage == "device" else "cpu"
            self.states = torch.empty(shape, dtype=dtype, device=target)

    def copy(self) -> Self:
        other = type(self)(self.shape, self.states.dtype, self.device, self.storage, self.folder)
        other.states.copy_(self.states)
        return other

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int | slice) -> Tensor:
        """Segments (segments, tokens, width) on the device. Raises an IndexError past the end, at
        which a loop stops.
        """
        states = self.states[index]
        if not isinstance(index, slice):
            states = states.unsqueeze(0)
        return states.to(self.device)

    def __setitem__(self, index: int | slice, states: Tensor) -> None:
        """Replace segments. states: (segments, tokens, width)."""
        self.states[index] = states

    def batches(self, tokens: int) -> Iterator[slice]:
        """Yield slices of all segments: at most `tokens` tokens at a time, and at least one
        segment.
        """
        count = max(tokens // self.shape[1], 1)
        for first in range(0, len(self), count):
            yield slice(first, first + count)


def _in_file(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    folder: Path,
) -> Tensor:
    numbers = math.prod(shape)
    size = numbers * dtype.itemsize
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                # Disk blocks are taken now: a full disk would be a SIGBUS later.
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                os.truncate(file.fileno(), size)
            # Mapped, it needs neither its name nor a descriptor, of which a process has few.
            states = torch.from_file(file.name, shared=True, size=numbers, dtype=dtype)
            return states.view(shape)
    except OSError as error:
        raise OutputError(
            f"no room for {size / 1e6:,.0f} MB of activations in {folder}: {error}; "
            f"make room, or use {option('activations', 'cpu')}"
        ) from error
