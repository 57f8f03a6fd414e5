"""Memory of a process by kind, as Linux counts it, and room in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """One process's memory at one moment, in bytes.

    Attributes:
        rss: every resident page, shared or not.
        pss: the same, each page divided by the number of processes that share it; so a sum over processes is true.
        private: anonymous pages: what a copy takes, and what goes when the process goes.
        file_backed: pages of mapped files and of shared memory; the page cache holds them once for everybody.
    """

    rss: int
    pss: int
    private: int
    file_backed: int


def memory(pid: int | None = None) -> Memory:
    """Return the memory of process `pid` (this one: None).

    Raises:
        OSError: the process is gone, or this is not Linux.
    """
    fields = _kib_fields(f"/proc/{os.getpid() if pid is None else pid}/smaps_rollup")
    rss, private = fields["Rss"], fields["Anonymous"]
    return Memory(rss=rss, pss=fields["Pss"], private=private, file_backed=rss - private)


def private_bytes() -> int:
    """Return this process's anonymous memory, as a function for workers."""
    return memory().private


def peak_rss() -> int:
    """Return the most that this process has had resident since it was started; on Linux and macOS.

    On Linux from VmHWM and not from getrusage: a child's ru_maxrss starts at its parent's size (Linux keeps
    signal->maxrss through exec), so a small child of a large process would look large.
    """
    if os.path.exists("/proc/self/status"):
        return _kib_fields("/proc/self/status")["VmHWM"]
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def begin_peak() -> int:
    """Have `peak_rss` start again from what is resident now, and return that; on Linux alone."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_rss()


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that a function takes, and the peak of resident memory above that before; on Linux alone."""
    before, start = begin_peak(), time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept
    return {"seconds": seconds, "peak": float(peak_rss() - before)}


def most_allocated(work: Callable[[], object]) -> int:
    """Return the most that Python and numpy have allocated at a time for a function and what it returns."""
    work()  # imports what is imported on the way
    tracemalloc.start()
    try:
        kept = work()
        most = tracemalloc.get_traced_memory()[1]
        del kept
    finally:
        tracemalloc.stop()
    return most


@contextlib.contextmanager
def private_peak(pid: int) -> Iterator[Callable[[], int]]:
    """Yield a function that returns by how much a process's private memory grew at most in the block; on Linux.

    It is looked at every few milliseconds.
    """
    status, done = f"/proc/{pid}/status", threading.Event()
    before = most = _kib_fields(status)["RssAnon"]

    def look() -> None:
        nonlocal most
        while not done.wait(0.003):
            most = max(most, _kib_fields(status)["RssAnon"])

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield lambda: most - before
    finally:
        done.set()
        looking.join()


def free_bytes(folder: str | os.PathLike[str]) -> int:
    return shutil.disk_usage(folder).free


def _kib_fields(path: str) -> dict[str, int]:
    """Return the `Name:   123 kB` lines of a file below /proc, in bytes."""
    lines = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
