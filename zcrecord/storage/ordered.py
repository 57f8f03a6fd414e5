"""Work done in several threads at a time, its results in the order of what was to be done, and never many of them.

What the work is, and whether it lets go of the interpreter's lock, is left to who has it done.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, TypeVar

from zcrecord.errors import UnsupportedError

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Start", "cores", "in_order"]

T = TypeVar("T")
R = TypeVar("R")
Start = Callable[[], Callable[[T], R]]  # called once in each thread: what it returns may keep what cannot be shared


def cores(threads: int | None = None) -> int:
    """Return how many threads to use: as many as were asked for, or one for each core that this process may use.

    Raises:
        UnsupportedError: that is no number of threads.
    """
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(threads, int) or threads < 1:
        raise UnsupportedError(f"threads={threads!r} is not a number from 1 on, or None for all cores")
    return threads


def in_order(start: Start[T, R], items: Iterable[T], threads: int) -> Generator[R, None, None]:
    """Yield what `start()(item)` gives for each item, in their order, from several threads.

    Items are taken as they are needed, and at most two for each thread are under way or waiting to be yielded.
    """
    if threads == 1:
        yield from map(start(), items)
        return
    from concurrent.futures import ThreadPoolExecutor  # here, because only what is large is worth a thread

    own = threading.local()

    def run(item: T) -> R:
        if not hasattr(own, "work"):
            own.work = start()
        out: R = own.work(item)
        return out

    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(run, item))
            if len(waiting) == 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
