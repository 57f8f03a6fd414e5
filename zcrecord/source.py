"""Where an archive's bytes come from: a mapped file, one read into memory, a private copy, or a buffer that was given.

Knows files, mappings and addresses; nothing of what the bytes say.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import mmap
import os
import stat
import sys
from typing import Any, Literal, NamedTuple

import numpy as np

from .errors import RecordError, SourceError, SourceNotFoundError, UnsupportedError
from .layout import ALIGNMENT, HEADER_SIZE, MAX_ALIGNMENT, too_short

__all__ = [
    "Memory",
    "Mode",
    "aligned",
    "aligned_empty",
    "buffer_of",
    "identity_of",
    "is_packed",
    "map_file",
    "private_copy",
    "read_file",
    "read_resource",
]

Mode = Literal["r", "c"]

_PACKED = (b"\xb5\x2f\xfd", b"\x2a\x4d\x18")  # zstd's magic from the second byte on: a frame, one to be skipped
_PIECE = 1 << 20  # bytes of one read; many times a network's round trip is worth
_READERS = 4  # reads under way at a time; a network file system answers each by itself
_GENERIC = sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64", "riscv64", "i686", "armv7l")
_NORESERVE = 0x4000 if _GENERIC else 0  # MAP_NORESERVE, which Python does not name; some machines number it otherwise


class Memory(NamedTuple):
    """Bytes that an archive may be opened from.

    Attributes:
        octets: all of them, flat; read-only unless they are nobody else's.
        path: the file they are of.
        mapping: what is closed to let go of them; None for a buffer that was given.
        identity: of the mapped file, to know it again: device, inode, size, time of change.
        filled: where there is anything, of memory most of which was never touched; None where there is everywhere.
    """

    octets: memoryview
    path: str | None = None
    mapping: mmap.mmap | None = None
    identity: tuple[int, ...] | None = None
    filled: list[tuple[int, int]] | None = None


def _open(path: str, least: int) -> tuple[int, tuple[int, ...]]:
    """Return a descriptor of a regular file that is long enough, and the file's identity."""
    extra = ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK")  # a named pipe would wait for its writer
    fd = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in extra))
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise SourceError("is a directory; name an archive in it", path=path, errno=errno.EISDIR)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("not a regular file; read it and pass the bytes", path=path)
        if status.st_size < least:
            raise too_short(status.st_size, os.read(fd, HEADER_SIZE)).located(path=path)
    except BaseException:
        os.close(fd)
        raise
    return fd, _identity(status)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def identity_of(fd: int) -> tuple[int, ...]:
    """Return what an open file is known again by, as `Memory.identity`."""
    return _identity(os.fstat(fd))


def _refused(error: OSError, path: str) -> Exception:
    if isinstance(error, RecordError):
        return error
    if isinstance(error, FileNotFoundError):
        return SourceNotFoundError("no such file", path=path, errno=error.errno)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return SourceError(f"cannot be read: {reason}", path=path, errno=error.errno)


def _cause(error: OSError) -> BaseException | None:
    """Return what is worth telling besides the typed error: what the system said, unless that says it all."""
    if isinstance(error, RecordError):
        return error.__cause__
    return None if isinstance(error, FileNotFoundError) else error


def map_file(path: str, *, private: bool = False, least: int = 2 * HEADER_SIZE) -> Memory:
    """Return a mapping of a whole file: read-only, or private, whose pages are copied when they are written.

    A private one reserves no memory for what may be written, so that files larger than it can be mapped, too.

    Raises:
        SourceError: it is missing (SourceNotFoundError), a directory, or cannot be read. FormatError: it is too short.
    """
    try:
        fd, identity = _open(path, least)
        try:
            if not identity[2]:
                return Memory(memoryview(b""), path, None, identity)  # nothing can be mapped of it
            if not private:
                mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            elif os.name == "posix":
                flags, prot = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                mapping = mmap.mmap(fd, 0, flags=flags, prot=prot)
            else:
                mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
    except OSError as error:
        raise _refused(error, path) from _cause(error)
    return Memory(memoryview(mapping), path, mapping, identity)


def read_file(path: str, *, least: int = 2 * HEADER_SIZE) -> Memory:
    """Return a whole file read into memory of its own, whose address is a multiple of 65536; several reads at a time.

    For network file systems, where page faults cost a round trip each, and for files that may shrink: a mapping's
    reader would be killed.

    Raises:
        SourceError: it is missing, a directory, cannot be read, or became shorter. FormatError: it is too short.
    """
    try:
        fd, identity = _open(path, least)
        try:
            block, octets = aligned(identity[2])
            _fill(fd, octets, path)
        finally:
            os.close(fd)
    except OSError as error:
        raise _refused(error, path) from _cause(error)
    return Memory(octets, path, block, identity)


def read_resource(resource: Any) -> Memory:
    """Return a package resource, as of `importlib.resources`, read into memory whose address is a multiple of 65536.

    It is for those that are no files of their own, as in a zip: such a stream tells its size only at its end, so it is
    read in pieces, each let go of once it is in its place.

    Raises:
        SourceError: it is missing, or whoever holds it cannot read it.
    """
    name = str(resource)
    try:
        with resource.open("rb") as stream:
            pieces = collections.deque(iter(lambda: stream.read(_PIECE), b""))
    except FileNotFoundError as error:
        raise SourceNotFoundError("no such resource", path=name, errno=error.errno) from None
    except Exception as error:  # of a zip, of its decompressor, of whatever loads the package
        raise SourceError(f"cannot be read: {error or type(error).__name__}", path=name) from error
    block, octets = aligned(sum(map(len, pieces)))
    done = 0
    while pieces:
        piece = pieces.popleft()
        octets[done : done + len(piece)] = piece
        done += len(piece)
    return Memory(octets, None, block)


def private_copy(octets: memoryview, filled: list[tuple[int, int]] | None = None) -> Memory:
    """Return a writable copy of bytes, or of the filled ranges of them, at an address that is a multiple of 65536."""
    block, out = aligned(len(octets), sparse=filled is not None)
    for start, end in [(0, len(octets))] if filled is None else filled:
        out[start:end] = octets[start:end]
    return Memory(out, None, block, filled=filled)


def aligned(size: int, *, sparse: bool = False) -> tuple[mmap.mmap, memoryview]:
    """Return zeroed memory, as a mapping to be closed and as its aligned part of `size` bytes.

    A sparse one reserves no memory for what is never touched, so it may be larger than the machine has. Without huge
    pages on purpose: several threads that first touch one each clear it, at three times the cost in all.
    """
    if os.name == "posix":  # not shared with the children of a fork, as Python's own default would be
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sparse else 0)
        block = mmap.mmap(-1, size + MAX_ALIGNMENT, flags=flags)
    else:
        block = mmap.mmap(-1, size + MAX_ALIGNMENT)
    whole = memoryview(block)
    start = -np.frombuffer(whole, np.uint8).__array_interface__["data"][0] % MAX_ALIGNMENT
    return block, whole[start : start + size]


def aligned_empty(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return new memory, not initialised, aligned as payloads are."""
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.__array_interface__["data"][0] % ALIGNMENT
    return room[start : start + nbytes]


def _fill(fd: int, target: memoryview, path: str) -> None:
    """Read a file's bytes from its start, several pieces at a time; the GIL is free meanwhile."""
    size = len(target)
    if not hasattr(os, "preadv"):
        with open(fd, "rb", buffering=0, closefd=False) as file:
            done = 0
            while done < size and (got := file.readinto(target[done : done + _PIECE])):
                done += got
        if done < size:
            raise _shrunk(path, done, size)
        return
    starts = itertools.count(0, _PIECE)  # next() of it is atomic
    failed: list[BaseException] = []

    def read() -> None:
        try:
            while not failed and (start := next(starts)) < size:
                end = min(start + _PIECE, size)
                while start < end:
                    got = os.preadv(fd, [target[start:end]], start)
                    if not got:
                        raise _shrunk(path, start, size)
                    start += got
        except BaseException as error:
            failed.append(error)

    import threading  # here, because few read rather than map

    others = [threading.Thread(target=read) for _ in range(min(_READERS, -(-size // _PIECE)) - 1)]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads are to be had: the others read it all
            for thread in others:
                thread.start()
        read()
    except KeyboardInterrupt as error:
        failed.append(error)
    for thread in others:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as error:  # the file stays open until nobody reads it any more
                failed.append(error)
    if failed:
        raise failed[0]


def _shrunk(path: str, at: int, size: int) -> SourceError:
    return SourceError(f"became shorter while it was read: {at} of {size} bytes; is it still being written?", path=path)


def is_packed(octets: Any) -> bool:
    """Return whether bytes begin as zstd frames do; what pzstd writes begins with one to be skipped."""
    return octets[1:4] in _PACKED


def buffer_of(source: Any) -> memoryview:
    """Return any bytes-like as flat, read-only bytes; copies nothing.

    Raises:
        UnsupportedError: it has no contiguous buffer.
    """
    try:
        if isinstance(source, np.ndarray) and source.dtype.isbuiltin != 1:
            source = source.view(np.uint8)
        return memoryview(source).cast("B").toreadonly()
    except (TypeError, ValueError, BufferError) as error:
        kind = type(source).__name__
        raise UnsupportedError(f"a {kind} is neither a path nor contiguous bytes: {error}") from None
