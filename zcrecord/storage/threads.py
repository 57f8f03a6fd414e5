"""Work shared by several threads: each item by one of them, or results in the order of the items.

Releasing the interpreter's lock is left to the callers.
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

T = TypeVar("T")
R = TypeVar("R")
Going = Callable[[], bool]  # returns True until an item fails, or Ctrl-C
Start = Callable[[], Callable[[T], R]]  # called once in each thread: the result may keep state that cannot be shared

MOST_THREADS = 16  # a few saturate any memory
WORTH_A_THREAD = 16 << 20  # bytes to read: less is read before a thread has started

_POLL = 0.05  # seconds between two checks of the other threads


def cores(threads: int | None = None) -> int:
    """Return the number of threads to use: `threads` if given, else one for each core that this process may use."""
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(threads, int) or threads < 1:
        raise UnsupportedError(f"threads={threads!r}: expected a number of at least 1, or None for all cores")
    return threads


def run_threads(
    work: Callable[[T, Going], object], items: Iterable[T], threads: int, poll: Callable[[], None] = lambda: None
) -> None:
    """Call `work` for every item, in order, in `threads` threads; raise the first error of any, once all have ended.

    The calling thread is one of them, and calls `poll` while it waits for the others. `work` calls its second argument
    now and then, and ends if that is False: Ctrl-C takes effect. SourceError in a child that `work` or `poll` forked.
    """
    process = os.getpid()
    queue = deque(items)
    errors: list[BaseException] = []

    def is_going() -> bool:
        return not errors

    def work_on_queue() -> None:
        try:
            while is_going():
                try:
                    item = queue.popleft()
                except IndexError:  # another thread took the last
                    return
                work(item, is_going)
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=work_on_queue) for _ in range(threads - 1)]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads can be started: the others do the work
            for thread in others:
                thread.start()
        work_on_queue()
        for thread in others:
            while thread.is_alive() and is_going():
                thread.join(_POLL)
                poll()
    except BaseException as error:
        errors.append(error)
    for thread in others:
        while thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):  # it ends by itself, within an item
                thread.join()
    if errors:
        raise errors[0]
    if others and os.getpid() != process:
        raise SourceError("the process was forked meanwhile, and the child has no other threads; call it again")


def each_piece(
    work: Callable[[T], int], pieces: Sequence[T], *, threads: int, advance: Callable[[int], None] | None = None
) -> None:
    """Call `work` for every piece by `run_threads`, and `advance` with each result, but only in the calling thread."""
    caller = threading.get_ident()
    results: deque[int] = deque()

    def report() -> None:
        while advance is not None and results:
            advance(results.popleft())

    def work_on_piece(piece: T, _: Going) -> None:
        results.append(work(piece))
        if threading.get_ident() == caller:
            report()

    run_threads(work_on_piece, pieces, min(threads, len(pieces)), report)
    report()


def map_ordered(start: Start[T, R], items: Iterable[T], threads: int) -> Generator[R, None, None]:
    """Yield `start()(item)` for each item, in order; each thread calls `start` once, and is given two items at most."""
    if threads == 1:
        yield from map(start(), items)
        return
    from concurrent.futures import ThreadPoolExecutor  # here, because only large inputs are worth a thread

    of_thread = threading.local()

    def work_on_item(item: T) -> R:
        if not hasattr(of_thread, "work"):
            of_thread.work = start()
        result: R = of_thread.work(item)
        return result

    pool = ThreadPoolExecutor(threads)
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work_on_item, item))
            if len(pending) == 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
