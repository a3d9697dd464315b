"""Memory of a phase, of a process and of a command, and what `hasslefree plan` expects of a compression."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hasslefree import Recipe
from hasslefree.planning.memory import estimate, total
from hasslefree.planning.setup import setup_of


class Peak:
    """The bytes that a phase takes at most, beyond those that were taken when it was made."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.before = self.now()

    def now(self) -> int:
        """Bytes in use; the high-water mark begins here."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS")

    def reached(self) -> int:
        return (torch.cuda.max_memory_allocated() if self.cuda else self._status("VmHWM")) - self.before

    def _status(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def resident() -> int:
    """Bytes of the resident set, after what was freed has gone back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def idle_mb() -> int:
    """MB of a process that has imported hasslefree and done nothing."""
    script = "import hasslefree.pipeline.compress, resource as r; print(r.getrusage(r.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(done.stdout) // 1024


def command_peak(command: list[str], threads: int) -> dict[str, Any]:
    """Run a command; the largest resident set of it or of a process that it waited for, in MB, and seconds."""
    began = time.perf_counter()
    child = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stdout=subprocess.DEVNULL)
    # wait4 gives the peak of this child, and of the children that it has waited for.
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return {"peak_mb": usage.ru_maxrss // 1024, "seconds": round(time.perf_counter() - began, 1)}


def planned_mb(model: Path, recipe: Recipe, processes: int) -> int:
    """The peak of RAM that `hasslefree plan` says of a compression on the CPU."""
    setup = setup_of(str(model), recipe, torch.device("cpu"), "device", processes)
    return total(estimate(setup).ram) // 2**20
