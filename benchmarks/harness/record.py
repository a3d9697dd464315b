"""What every benchmark does with its figures: the machine beside them, files that a later run goes on with, means."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """The processor, the cores and the versions that the figures were measured with."""
    import torch

    names = ("torch", "transformers", "hasslefree")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def resumed(path: Path, header: dict[str, Any], rows: str) -> dict[str, Any]:
    """What `path` holds already, or a fresh start; rows of another header must not be mixed with these.

    Args:
        header: what the rows depend on, beside the machine. rows: the field that holds them.
    """
    header = {"machine": machine(), **header}
    if not path.exists():
        return {**header, rows: {}}
    content: dict[str, Any] = json.loads(path.read_text())
    if differing := [key for key, value in header.items() if content.get(key) != value]:
        raise SystemExit(f"{path} was measured with another {', '.join(differing)}; move it away, or take its settings")
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON in one step, so that a run that is cut short leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(mean(map(math.log, values)))
