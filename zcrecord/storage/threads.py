"""One piece of work done by the calling thread and others, until nothing of it is left or one of them fails.

How it is divided, and whether it lets go of the interpreter's lock, is left to who has it done.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from zcrecord.errors import SourceError

__all__ = ["MOST_THREADS", "WORTH_A_THREAD", "Going", "together"]

Going = Callable[[], bool]  # whether to go on: nobody has failed, or was interrupted

MOST_THREADS = 16  # a few saturate any memory
WORTH_A_THREAD = 16 << 20  # bytes to read: less is read before a thread has started

_LOOK = 0.05  # seconds between two looks at how far the others are


def together(work: Callable[[Going], None], threads: int, look: Callable[[], None]) -> None:
    """Call `work` in so many threads, this one among them, and return when all have; `look` is called while waiting.

    `work` takes its share from what all have in common, and asks now and then whether to go on. The first exception of
    any thread, Ctrl-C included, ends it, and is raised once none works any more.

    Raises:
        SourceError: `work` or `look` forked, and this is the child: the other threads' shares are not done in it.
    """
    process = os.getpid()
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work(lambda: not failed)
        except BaseException as error:
            failed.append(error)

    others = [threading.Thread(target=guarded) for _ in range(threads - 1)]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads are to be had: the rest do it all
            for thread in others:
                thread.start()
        guarded()
        for thread in others:
            while thread.is_alive() and not failed:
                thread.join(_LOOK)
                look()
    except BaseException as error:
        failed.append(error)
    for thread in others:
        while thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):  # it ends by itself, within a piece
                thread.join()
    if failed:
        raise failed[0]
    if others and os.getpid() != process:
        raise SourceError("the process was forked in the middle of this, and its other threads are not here; ask again")
