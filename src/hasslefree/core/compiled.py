"""Functions that Numba compiles and caches on disk for the next process."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit

logger = logging.getLogger(__name__)


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Numba's `njit` without the GIL and with NumPy's division by zero. The result is cached on
    disk, unless the disk cannot be written, such as in a read-only container.
    """
    options |= {"nogil": True, "error_model": "numpy"}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:
            log_uncached()
            return njit(**options)(function)

    return decorate


@cache
def log_uncached() -> None:
    """Warn once that every process compiles the functions again."""
    logger.warning(
        "Numba compiles its kernels again in every process, which is slow: it can write neither"
        " beside them nor in the home folder; set NUMBA_CACHE_DIR to a folder that it can write"
    )
