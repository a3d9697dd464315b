"""What the machine has: available memory, and the rate of its matrix products."""

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

# The control groups of this machine, and the list of those of this process
# (https://man7.org/linux/man-pages/man7/cgroups.7.html).
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Rows and columns of the matrices whose product is timed.
SIDE = 1024


def product_rate(device: torch.device) -> float:
    """FLOPs a second of a float32 product (SIDE, SIDE) × (SIDE, SIDE), the best of five."""
    one = torch.full((SIDE, SIDE), 0.5, device=device)  # no random numbers: a run draws its own
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        one @ one
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best


def free_memory(device: torch.device, processes: int = 1) -> int:
    """The bytes that this process may use, including those that it uses already.

    The processes of a machine share its RAM and its GPUs: each gets an equal part of what is left.

    Args:
        processes: those of the run, if torchrun does not say how many are on this machine.
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
    """The bytes that the device has, whoever uses them."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = psutil.virtual_memory().total
    container = container_memory()
    return total if container is None else min(total, container.limit)


def local_processes(processes: int) -> int:
    """The number of processes of a run on this machine, as torchrun states it.

    Args:
        processes: the number if torchrun has not started this process, as for `hasslefree plan`.
    """
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(count), 1) if count.isdigit() else processes


@dataclass(frozen=True)
class ContainerMemory:
    """The memory of the container of this process, in bytes.

    Args:
        limit: what the container may have.
        free: what its processes leave of the limit. Pages of files that the system can drop count
            as free.
    """

    limit: int
    free: int


class GroupFiles(NamedTuple):
    """The files of a control group in one version of them.

    Args:
        controller: as the list of a process's groups names it; also the folder of all groups.
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
    """The least limit of the control groups of this process, in either version of them, and the
    least that one of them leaves; None without a limit.
    """
    found: list[ContainerMemory] = []
    for files in VERSIONS:
        for group in own_groups(files.controller):
            folder = CGROUPS / files.controller / group.relative_to("/")
            limit = _read_number(folder / files.limit)
            used = _read_number(folder / files.used)
            if limit is not None and used is not None:
                held = max(used - _read_statistic(folder, files.cache), 0)
                found.append(ContainerMemory(limit, max(limit - held, 0)))
    if not found:
        return None
    return ContainerMemory(min(each.limit for each in found), min(each.free for each in found))


def own_groups(controller: str) -> set[PurePosixPath]:
    """The control group of this process and all that it is within, whose limits hold too.

    A container may see its own group as "/", whatever the list says.
    """
    groups = {PurePosixPath("/")}
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:  # not on Linux
        return groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = PurePosixPath(path)
            groups |= {group, *group.parents}
    return groups


def _read_number(file: Path) -> int | None:
    """The whole number in a file; None without one, as where the limit is "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_statistic(folder: Path, name: str) -> int:
    """A line of memory.stat, in bytes; 0 if it is not there."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    statistics = dict(line.split() for line in lines)
    return int(statistics.get(name, 0))


# Options of glibc's mallopt: the size from which each array gets memory of its own, which is
# returned at once.
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
# glibc's defaults, and the values with which memory of arrays up to 64 MB is kept for the next
# ones. That of larger arrays is not all used again: with `wanda`, a block of Llama-3.2-1B took
# 2.9 GB instead of 2.5 GB.
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
    return pass_bytes(numbers) <= room_for_sums(device)


def room_for_sums(device: torch.device) -> int:
    """The bytes that sums over tokens may take at a time: a quarter of all memory, as above."""
    return total_memory(device) // 4
