"""Work shared by several threads: each item by one of them, or results in the order of the items.

The work, and letting go of the interpreter's lock, are the callers'.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from zcrecord.errors import SourceError, UnsupportedError

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["MOST_THREADS", "WORTH_A_THREAD", "Going", "Start", "cores", "each_piece", "map_ordered", "run_threads"]

T = TypeVar("T")
R = TypeVar("R")
Going = Callable[[], bool]  # True while to go on: nothing has failed, or was interrupted
Start = Callable[[], Callable[[T], R]]  # called once in each thread: the result may keep state that cannot be shared

MOST_THREADS = 16  # a few saturate any memory
WORTH_A_THREAD = 16 << 20  # bytes to read: less is read before a thread has started

_LOOK = 0.05  # seconds between two looks at how far the others are


def cores(threads: int | None = None) -> int:
    """Return the number of threads to use: as many as were asked for, or one for each core that this process may use.

    Raises:
        UnsupportedError: that is no number of threads.
    """
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(threads, int) or threads < 1:
        raise UnsupportedError(f"threads={threads!r} is not a number from 1 on, or None for all cores")
    return threads


def run_threads(
    work: Callable[[T, Going], object], items: Iterable[T], threads: int, look: Callable[[], None] = lambda: None
) -> None:
    """Call `work` for every item, in so many threads, this one among them; `look` is called while waiting for others.

    Items are taken in their order. `work` asks now and then whether to go on. The first exception of any thread, Ctrl-C
    included, ends it, and is raised once no thread works any more.

    Raises:
        SourceError: `work` or `look` forked, and this is the child: the other threads' shares are not done in it.
    """
    process = os.getpid()
    left = deque(items)
    failed: list[BaseException] = []

    def going() -> bool:
        return not failed

    def take() -> None:
        try:
            while going():
                try:
                    item = left.popleft()
                except IndexError:  # another thread took the last
                    return
                work(item, going)
        except BaseException as error:
            failed.append(error)

    others = [threading.Thread(target=take) for _ in range(threads - 1)]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads are to be had: the rest do it all
            for thread in others:
                thread.start()
        take()
        for thread in others:
            while thread.is_alive() and going():
                thread.join(_LOOK)
                look()
    except BaseException as error:
        failed.append(error)
    for thread in others:
        while thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):  # it ends by itself, within an item
                thread.join()
    if failed:
        raise failed[0]
    if others and os.getpid() != process:
        raise SourceError("the process was forked in the middle of this, and its other threads are not here; ask again")


def each_piece(
    work: Callable[[T], int], pieces: Sequence[T], *, threads: int, done: Callable[[int], None] | None = None
) -> None:
    """Call `work` for every piece, as `run_threads` does, and `done` with each of its answers, the bytes that are done.

    `done` is called by the calling thread alone, and its exception ends the work.
    """
    caller = threading.get_ident()
    arrived: deque[int] = deque()

    def tell() -> None:
        while done is not None and arrived:
            done(arrived.popleft())

    def one(piece: T, _: Going) -> None:
        arrived.append(work(piece))
        if threading.get_ident() == caller:
            tell()

    run_threads(one, pieces, min(threads, len(pieces)), tell)
    tell()


def map_ordered(start: Start[T, R], items: Iterable[T], threads: int) -> Generator[R, None, None]:
    """Yield `start()(item)` for each item, in their order, from several threads.

    Items are taken as they are needed, and at most two for each thread are under way or waiting to be yielded.
    """
    if threads == 1:
        yield from map(start(), items)
        return
    from concurrent.futures import ThreadPoolExecutor  # here, because only large inputs are worth a thread

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
