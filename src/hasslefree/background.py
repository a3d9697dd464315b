"""Calls that run in a thread of their own, beside the work: reads of what comes next, writes of what is done.

Reads, writes and checksums of large arrays leave Python's lock to the other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def begun(name: str, *calls: Callable[[], T]) -> list[Future[T]]:
    """Run calls one after the other in one new thread, which ends after the last one.

    Args:
        name: of the thread.

    Returns:
        For each call a future: its result, or the error that it raised. A call that has not begun can be cancelled.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return futures


def error_of(future: Future[T]) -> BaseException | None:
    """What a call raised, or None. It is waited for to its end: Ctrl-C does not cut the wait short."""
    while True:
        try:
            return future.exception()
        except KeyboardInterrupt:
            continue
