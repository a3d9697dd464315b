"""Tensors of a checkpoint, and how they are read before they are needed: by a thread, beside the work."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hasslefree.background import run_in_background
from hasslefree.errors import ModelError


@dataclass(frozen=True)
class Source:
    """Where a tensor of a checkpoint is.

    Args:
        stored: the tensors of a module in their files, as accelerate has them. leaf: the name of the tensor there.
        name: of the tensor in the model.
    """

    stored: Mapping[str, Tensor]
    leaf: str
    name: str

    def read(self) -> Tensor:
        """The tensor, on the CPU. What a safetensors file holds is mapped: its bytes are read when they are used."""
        try:
            return self.stored[self.leaf]
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self.name} cannot be read from {self.file()}: {error}; download or copy the file again"
            ) from error

    def file(self) -> str:
        """The path of its file: a checkpoint's, or one of the scratch folder with the tensor in another dtype."""
        files: Any = self.stored
        name = f"{files.prefix}{self.leaf}"
        return files.dataset.index[name].get("safetensors_file") or f"{files.dataset.save_folder}/{name}.dat"


class Prefetcher:
    """Reads the tensors that are taken next, in a thread, and holds them until they are.

    Args:
        device: where the tensors will be. For a GPU they are read into pinned memory, which it copies at the full rate
            of the bus; for a CPU they are the pages of the file.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._reads: dict[str, Future[Tensor]] = {}

    def start(self, sources: Iterable[Source]) -> None:
        """Start to read these tensors. Tensors of an earlier start that were not taken are dropped."""
        self.drop()
        calls = {source.name: partial(in_memory, source, self.device) for source in sources}
        self._reads = dict(zip(calls, run_in_background("read ahead", *calls.values()), strict=True))

    def take(self, source: Source) -> Tensor:
        """The tensor of a source, on the CPU: what was read ahead of it, or read now."""
        if source.name not in self._reads:
            return source.read()
        read = self._reads[source.name].result()
        del self._reads[source.name]
        return read

    def drop(self) -> None:
        """Drop tensors that were not taken. Afterwards no reads are running."""
        for read in self._reads.values():
            read.cancel()
        wait(self._reads.values())
        self._reads.clear()


def in_memory(source: Source, device: torch.device) -> Tensor:
    """The tensor of a source with its bytes read: in pinned memory for a GPU, else where it is, page by page."""
    tensor = source.read()
    if device.type == "cuda":
        return tensor.pin_memory()
    tensor.reshape(-1).view(torch.uint8).numpy()[:: mmap.PAGESIZE].sum()
    return tensor
