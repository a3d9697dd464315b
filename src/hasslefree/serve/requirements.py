"""Checks of vLLM's version, the device and the model, before any weights of a compressed folder are read."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hasslefree.errors import ServeError

# (major, minor) of vLLM; docs/howto/serve.md says what was run with each.
VERSIONS = ((0, 32), (0, 33))
# (major, minor) of the least compute capability for which the kernels are compiled.
LEAST_CAPABILITY = (8, 0)
EXPERT = re.compile(r"\.experts\.\d+\.")
DENSE = "write a dense model with `hasslefree export FOLDER --to dense DEST` and serve DEST"


def check_vllm(version: str) -> None:
    """Raise ServeError where the plugin does not support this version of vLLM."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if found in VERSIONS:
        return
    known, (major, minor) = " and ".join(f"{major}.{minor}" for major, minor in VERSIONS), max(VERSIONS)
    update = "update hasslefree, or " if found > max(VERSIONS) else ""
    raise ServeError(
        f"this version of hasslefree serves compressed folders with vLLM {known}, but vLLM {version} is installed: "
        f'{update}pip install "vllm=={major}.{minor}.*"'
    )


def check_device(name: str, capability: tuple[int, int] | None) -> None:
    """Raise ServeError where there are no kernels for the device.

    Args:
        name: "cpu", "cuda" or another one, as vLLM calls it. capability: (major, minor) of an NVIDIA GPU, else None.
    """
    if name == "cpu":
        return
    if name != "cuda" or capability is None:
        raise ServeError(f"compressed folders are served on a CPU or an NVIDIA GPU, not on {name}: {DENSE}")
    if capability < LEAST_CAPABILITY:
        least, found = (f"{major}.{minor}" for major, minor in (LEAST_CAPABILITY, capability))
        raise ServeError(
            f"compressed folders need a GPU of compute capability {least}, and this one has {found}: {DENSE}"
        )


def check_layers(names: Iterable[str]) -> None:
    """Raise ServeError where one of these compressed layers belongs to a mixture of experts."""
    if expert := next((name for name in names if EXPERT.search(name)), None):
        raise ServeError(
            f"{expert} belongs to a mixture of experts (MoE), and compressed experts cannot be served: {DENSE}"
        )
