"""The available memory of the machine, and the rate of its matrix products."""

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil
import torch

from hasslefree.models.calibrate import pass_bytes
from hasslefree.models.weights import trim

# The control groups of this machine, and the list of the groups of this process
# (https://man7.org/linux/man-pages/man7/cgroups.7.html).
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Rows and columns of the matrices in the timed product.
SIDE = 1024


def product_rate(device: torch.device) -> float:
    """FLOPs per second of a float32 product (SIDE, SIDE) × (SIDE, SIDE), the best of five."""
    one = torch.full((SIDE, SIDE), 0.5, device=device)  # torch.rand would change the run's draws
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        one @ one
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best


def free_memory(device: torch.device, processes: int = 1) -> int:
    """The bytes that this process may use, including those already in use by it.

    The processes on a machine share its RAM and its GPUs: each gets an equal part of the free
    memory.

    Args:
        processes: as for `local_processes`.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        sharing = math.ceil(local_processes(processes) / torch.cuda.device_count())
        return torch.cuda.memory_reserved(device) + free // sharing
    used = psutil.Process().memory_info().rss
    available = psutil.virtual_memory().available
    container = container_memory()
    if container is not None:
        available = min(available, container.free)
    return used + available // local_processes(processes)


def total_memory(device: torch.device) -> int:
    """The bytes of the device, free or in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = psutil.virtual_memory().total
    container = container_memory()
    return total if container is None else min(total, container.limit)


def local_processes(processes: int) -> int:
    """The number of processes of the run on this machine, as torchrun sets it.

    Args:
        processes: the number if this process was not started by torchrun, as in `hasslefree plan`.
    """
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(count), 1) if count.isdigit() else processes


@dataclass(frozen=True)
class ContainerMemory:
    """The memory of the container of this process, in bytes.

    Args:
        limit: the most that the container may use.
        free: the rest of the limit. Pages of files that the system can drop count as free.
    """

    limit: int
    free: int


class GroupFiles(NamedTuple):
    """The names of the files of a control group in version 2 or 1 of control groups.

    Args:
        controller: its name in the list of a process's groups, and the folder of all groups.
        limit: file with the limit, in bytes.
        used: file with the memory in use, in bytes.
        cache: the line of memory.stat with the pages of files that the system can drop.
    """

    controller: str
    limit: str
    used: str
    cache: str


VERSIONS = (
    GroupFiles("", "memory.max", "memory.current", "inactive_file"),
    GroupFiles("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def container_memory() -> ContainerMemory | None:
    """The smallest limit and the smallest free memory among the control groups of this process, of
    both versions; None without a limit.
    """
    found: list[ContainerMemory] = []
    for files in VERSIONS:
        for group in own_groups(files.controller):
            folder = CGROUPS / files.controller / group.relative_to("/")
            limit = _read_number(folder / files.limit)
            used = _read_number(folder / files.used)
            if limit is not None and used is not None:
                held = max(used - _read_statistic(folder / "memory.stat", files.cache), 0)
                found.append(ContainerMemory(limit, max(limit - held, 0)))
    if not found:
        return None
    limit = min(each.limit for each in found)
    free = min(each.free for each in found)
    return ContainerMemory(limit, free)


def own_groups(controller: str) -> set[PurePosixPath]:
    """The control group of this process and all groups above it, whose limits hold too.

    A container may see its own group as "/", even if the list names another.
    """
    groups = {PurePosixPath("/")}
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = PurePosixPath(path)
            groups |= {group, *group.parents}
    return groups


def _read(file: Path) -> str:
    """The text of a file; empty if the file is missing, as on systems other than Linux."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _read_number(file: Path) -> int | None:
    """The whole number in a file; None without one, such as for the limit "max"."""
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read_statistic(file: Path, name: str) -> int:
    """A line of memory.stat, in bytes; 0 if it is missing."""
    statistics = dict(line.split() for line in _read(file).splitlines())
    return int(statistics.get(name, 0))


# Options of glibc's mallopt: the size from which an array gets its own mapping, returned to the
# system when the array is freed; and the free memory that is kept at the top of the heap.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
# glibc's defaults, and the values that keep the memory of arrays up to 64 MB for the next ones.
# Memory of larger arrays would not all be used again: with `wanda`, a block of Llama-3.2-1B took
# 2.9 GB instead of 2.5 GB.
DEFAULT = {MMAP_THRESHOLD: 128 << 10, TRIM_THRESHOLD: 128 << 10}
KEPT = {MMAP_THRESHOLD: 1 << 26, TRIM_THRESHOLD: 2**31 - 1}


@contextmanager
def memory_reused() -> Iterator[None]:
    """In this context, glibc keeps the memory of freed arrays for the next ones; `trim` returns it.

    Otherwise glibc asks the system for new memory for every large array, and the system clears its
    pages one by one, which takes a good part of a forward pass on a CPU. Other C libraries are left
    as they are.
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
    """Return True if a quarter of all memory, the same in every run, holds a pass of this many
    numbers (`activation_values`).
    """
    return pass_bytes(numbers) <= room_for_sums(device)


def room_for_sums(device: torch.device) -> int:
    """The bytes that sums over tokens may take at a time: a quarter of all memory."""
    return total_memory(device) // 4
