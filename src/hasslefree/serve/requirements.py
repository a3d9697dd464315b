"""Checks of vLLM's version, the device and the model, before any weights are read; each raises a
ServeError.
"""

import re
from collections.abc import Iterable

from hasslefree.errors import ServeError

# (major, minor) of vLLM; docs/howto/serve.md says what was run with each.
VERSIONS = ((0, 32), (0, 33))
EXPERT = re.compile(r"\.experts\.\d+\.")
DENSE = "write a dense model with `hasslefree export FOLDER --to dense DEST` and serve DEST"


def check_vllm(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    installed = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if installed in VERSIONS:
        return
    known, (major, minor) = (
        " and ".join(f"{major}.{minor}" for major, minor in VERSIONS),
        max(VERSIONS),
    )
    update = "update hasslefree, or " if installed > max(VERSIONS) else ""
    raise ServeError(
        f"this version of hasslefree serves compressed folders with vLLM {known}, but vLLM"
        f" {version} is installed: "
        f'{update}pip install "vllm=={major}.{minor}.*"'
    )


def check_device(name: str) -> None:
    """name: as vLLM calls the device. vLLM itself compares a GPU with `get_min_capability`."""
    if name not in ("cpu", "cuda"):
        raise ServeError(
            f"compressed folders are served on a CPU or an NVIDIA GPU, not on {name}: {DENSE}"
        )


def check_layers(names: Iterable[str]) -> None:
    if expert := next((name for name in names if EXPERT.search(name)), None):
        raise ServeError(
            f"{expert} belongs to a mixture of experts (MoE), and compressed experts cannot be"
            f" served: {DENSE}"
        )
