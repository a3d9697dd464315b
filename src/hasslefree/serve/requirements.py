"""Checks of vLLM's version, the device and the model, before any weights are read; each raises a
ServeError.
"""

import re
from collections.abc import Iterable

from hasslefree.errors import ServeError

# (major, minor) of vLLM, the newest last; docs/howto/serve.md says what was run with each.
VERSIONS = ((0, 32), (0, 33))
EXPERT = re.compile(r"\.experts\.\d+\.")
DENSE = "write a dense model with `hasslefree export FOLDER --to dense DEST` and serve DEST"


def check_vllm(version: str) -> None:
    """Raise a ServeError for a version of vLLM that is not in `VERSIONS`."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    installed = (0, 0)
    if numbers:
        installed = (int(numbers[1]), int(numbers[2]))
    if installed in VERSIONS:
        return
    known = [f"{major}.{minor}" for major, minor in VERSIONS]
    update = ""
    if installed > max(VERSIONS):
        update = "update hasslefree, or "
    raise ServeError(
        f"this version of hasslefree serves compressed folders with vLLM {' and '.join(known)}, but"
        f' vLLM {version} is installed: {update}pip install "vllm=={known[-1]}.*"'
    )


def check_device(name: str) -> None:
    """Raise a ServeError for a device that is neither a CPU nor CUDA. vLLM itself compares a GPU
    with `get_min_capability`.
    """
    if name not in ("cpu", "cuda"):
        raise ServeError(
            f"compressed folders are served on a CPU or an NVIDIA GPU, not on {name}: {DENSE}"
        )


def check_layers(names: Iterable[str]) -> None:
    """Raise a ServeError if one of the compressed layers is an expert."""
    for name in names:
        if EXPERT.search(name):
            raise ServeError(
                f"{name} belongs to a mixture of experts (MoE), and compressed experts cannot be"
                f" served: {DENSE}"
            )
