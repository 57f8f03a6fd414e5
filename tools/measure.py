"""Memory of a process by kind, as the kernel counts it, and room in a folder.

Linux tells everything, through `/proc`; other systems tell the resident size only, and what is not told is None.
How long something takes is left to `tools.bench`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """One process's memory at one moment, in bytes; None where the system does not tell.

    Attributes:
        rss: every resident page, shared or not.
        pss: the same, each page divided by the number of processes that share it; so a sum over processes is true.
        private: anonymous pages: what a copy takes, and what goes when the process goes.
        file_backed: pages of mapped files and of shared memory; the page cache holds them once for everybody.
    """

    rss: int
    pss: int | None = None
    private: int | None = None
    file_backed: int | None = None


def memory(pid: int | None = None) -> Memory | None:
    """Return the memory of process `pid` (this one: None), or None where it cannot be learnt."""
    process = os.getpid() if pid is None else pid
    try:
        fields = _kib_fields(Path(f"/proc/{process}/smaps_rollup"))
    except OSError:  # not Linux, or a sandbox that hides it
        rss = _rss(process)
        return None if rss is None else Memory(rss)
    rss, private = fields["Rss"], fields["Anonymous"]
    return Memory(rss=rss, pss=fields["Pss"], private=private, file_backed=rss - private)


def peak_rss() -> int | None:
    """Return the most that this process has had resident since it was started, or None where it cannot be learnt.

    On Linux from VmHWM and not from getrusage: a child's ru_maxrss starts at its parent's size (Linux keeps
    signal->maxrss through exec), so a small child of a large process would look large.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return _kib_fields(status).get("VmHWM")
    if sys.platform == "win32":
        return _windows_peak()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def begin_peak() -> int:
    """Have `peak_rss` start again from what is resident now, and return that; on Linux alone."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_rss() or 0


def private_bytes() -> int:
    """Return this process's anonymous memory; on Linux alone."""
    return _kib_fields(Path("/proc/self/smaps_rollup"))["Anonymous"]


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
    """Yield a function that tells by how much a process's private memory has grown at the most in the block; on Linux.

    It is looked at every few milliseconds.
    """
    status, done = Path(f"/proc/{pid}/status"), threading.Event()
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
    """Return how many bytes can be written to the file system that holds `folder`."""
    return shutil.disk_usage(folder).free


def _kib_fields(path: Path) -> dict[str, int]:
    """Return the `Name:   123 kB` lines of a file below /proc, in bytes."""
    fields = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields


def _rss(pid: int) -> int | None:
    """Return the resident size, from ps, which every Unix has; Windows has psutil or nothing."""
    if sys.platform == "win32":
        try:
            import psutil
        except ImportError:
            return None
        return int(psutil.Process(pid).memory_info().rss)
    try:
        told = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
        return int(told.stdout) * 1024
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def _windows_peak() -> int | None:
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.Process().memory_info().peak_wset)
