"""What the machine has: memory that can be had, and the rate of its products."""

from __future__ import annotations

import math
import time
from pathlib import Path

import psutil
import torch


def product_rate(device: torch.device, side: int = 1024) -> float:
    """FLOPs a second of a float32 product (side, side) × (side, side), the best of five."""
    one = torch.randn(side, side, device=device)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        one @ one
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def free_memory(device: torch.device) -> int:
    """Bytes that this process could have in all, including what it has now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    own = psutil.Process().memory_info().rss
    limits = [psutil.virtual_memory().available + own]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).exists() and (text := Path(file).read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)
