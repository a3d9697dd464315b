"""What the machine has: available memory, and the rate of its matrix products."""

import ctypes
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from hasslefree.models.calibrate import pass_bytes
from hasslefree.models.weights import trim


def product_rate(device: torch.device, side: int = 1024) -> float:
    """FLOPs a second of a float32 product (side, side) × (side, side), the best of five."""
    one = torch.full((side, side), 0.5, device=device)  # no random numbers: a run draws its own
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        one @ one
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def free_memory(device: torch.device) -> int:
    """Bytes that this process could use in total, including those in use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    own = psutil.Process().memory_info().rss
    return min([psutil.virtual_memory().available + own, *cgroup_limits()])


def total_memory(device: torch.device) -> int:
    """Bytes that the device has, whoever uses them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min([psutil.virtual_memory().total, *cgroup_limits()])


def cgroup_limits() -> Iterator[int]:
    """The bytes of memory that the container of this process may have, if it is in one."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).exists() and (text := Path(file).read_text().strip()).isdigit():
            yield int(text)


# Options of glibc's mallopt: the size from which each array gets memory of its own, which is
# returned at once.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
# glibc's defaults, and the values with which memory of arrays up to 64 MB is kept for the next
# ones. That of larger
# arrays is not all used again: with `wanda`, a block of Llama-3.2-1B took 2.9 GB instead of 2.5 GB.
DEFAULT = {MMAP_THRESHOLD: 128 << 10, TRIM_THRESHOLD: 128 << 10}
KEPT = {MMAP_THRESHOLD: 1 << 26, TRIM_THRESHOLD: 2**31 - 1}


@contextmanager
def memory_reused() -> Iterator[None]:
    """Within it, the C library keeps the memory of freed arrays for the next ones; `trim` gives it
    back.

    glibc asks the system for new memory for every large array, and the system then clears its pages
    one by one, which takes a good part of a forward pass on a CPU. With other C libraries nothing
    changes.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if adjust is None:
        yield
        return
    try:
        for option, size in KEPT.items():
            adjust(option, size)
        yield
    finally:
        for option, size in DEFAULT.items():
            adjust(option, size)
        trim()


def in_one_pass(numbers: float, device: torch.device) -> bool:
    """Whether a quarter of all memory, the same in every run, holds a pass of this many numbers
    (`activation_values`).
    """
    return pass_bytes(numbers) <= total_memory(device) / 4


def room_for_sums(device: torch.device) -> int:
    """The bytes that sums over tokens may take at a time: a quarter of all memory, as above."""
    return total_memory(device) // 4
