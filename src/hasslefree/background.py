"""Calls that run in a background thread: reads of the next part, writes of the finished one.

Reads, writes and checksums of large arrays release Python's lock for other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_background(name: str, *calls: Callable[[], T]) -> list[Future[T]]:
    """Run calls one after the other in one new thread, which ends after the last one.

    Args:
        name: of the thread.

    Returns:
        For each call a future: its result, or the error that it raised. A call that has not started can be cancelled.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return futures


def error_of(future: Future[T]) -> BaseException | None:
    """The error of a call, or None. It waits until the call has ended, even after Ctrl-C."""
    while True:
        try:
            return future.exception()
        except KeyboardInterrupt:
            continue
