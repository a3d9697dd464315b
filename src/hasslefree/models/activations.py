"""Storage of the hidden states between two blocks: on the device, in RAM or in a file."""

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from hasslefree.core.products import tiles
from hasslefree.errors import OutputError, UnknownNameError, option

STORAGES = ("device", "cpu", "disk")


def check_storage(storage: str) -> None:
    """Raise an UnknownNameError unless `storage` is one of `STORAGES`."""
    if storage not in STORAGES:
        raise UnknownNameError("storage of activations", storage, STORAGES)


class Activations:
    """Hidden states (samples, tokens, width), read and replaced a few segments at a time.

    Args:
        shape: (samples, tokens, width).
        device: device on which segments are used.
        storage: "device", "cpu" (RAM), or "disk": an unnamed, memory-mapped file in `folder`, which
            the system deletes when the process ends.
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
        """Return segments (segments, tokens, width) on the device. An index past the end raises an
        IndexError, which ends a `for` loop.
        """
        states = self.states[index]
        if not isinstance(index, slice):
            states = states.unsqueeze(0)
        return states.to(self.device)

    def __setitem__(self, index: int | slice, states: Tensor) -> None:
        """Replace segments. states: (segments, tokens, width)."""
        self.states[index] = states

    def batches(self, tokens: int) -> Iterator[slice]:
        """Slices that cover all segments, each of at most `tokens` tokens or one segment."""
        return tiles(len(self), tokens // self.shape[1])


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
                # Allocate now: if the disk is full later, a write raises SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                os.truncate(file.fileno(), size)
            # The mapping outlives the name and the descriptor; descriptors are scarce.
            states = torch.from_file(file.name, shared=True, size=numbers, dtype=dtype)
            return states.view(shape)
    except OSError as error:
        raise OutputError(
            f"no room for {size / 1e6:,.0f} MB of activations in {folder}: {error}; "
            f"make room, or use {option('activations', 'cpu')}"
        ) from error
