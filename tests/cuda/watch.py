"""What a run does on a fake GPU that would cost time on a real one: waits of the CPU, and float64."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.cuda.fake_cuda import CudaTensor, FakeGpu, leaves

# Operations that let the CPU wait for the GPU, by their name in aten.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "allclose", "_unique2", "bincount"}
WAITING |= {"_linalg_check_errors"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Tensors of fewer numbers are scalars and vectors: nobody waits for their float64.
FEW = 1024


@dataclass
class Watch:
    """What a fake GPU was asked for, each with the function of hasslefree that asked: "solve/admm.py:run".

    Args:
        waits: how often the CPU waited for the GPU: it read a number, or copied from it.
        doubles: how often large tensors of float64 were computed.
    """

    waits: Counter[str] = field(default_factory=Counter)
    doubles: Counter[str] = field(default_factory=Counter)

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if waits(func, args, out):
            self.waits[asking()] += 1
        made = [each for each in leaves(out) if isinstance(each, CudaTensor)]
        if any(each.dtype == torch.float64 and each.numel() > FEW for each in made) and not func.is_view:
            self.doubles[asking()] += 1


@contextmanager
def watched(gpu: FakeGpu) -> Iterator[Watch]:
    """What happens on the GPU within it."""
    watch = Watch()
    gpu.listeners.append(watch)
    try:
        yield watch
    finally:
        gpu.listeners.remove(watch)


def waits(func: Any, args: tuple[Any, ...], out: Any) -> bool:
    """Whether the CPU waits for the GPU within an operation."""
    name = func.__name__.split(".")[0]
    if name in INDEXING:  # a mask is turned into indices, and their number is needed
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name in ("_to_copy", "copy_"):
        return isinstance(out, Tensor) and not isinstance(out, CudaTensor)
    return name in WAITING


def asking() -> str:
    """The innermost function of hasslefree that is running: its file and its name."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        _, inside, path = frame.f_code.co_filename.partition("/src/hasslefree/")
        if inside:
            return f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
