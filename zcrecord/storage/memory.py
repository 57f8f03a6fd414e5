"""Where an archive's bytes come from: a mapped file, one read into memory, a private copy, or a buffer that was given.

Knows files, mappings and addresses; nothing of what the bytes say.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import re
import stat
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from zcrecord.codec.layout import ALIGNMENT, HEADER_SIZE, too_short
from zcrecord.errors import RecordError, SourceError, SourceNotFoundError, UnsupportedError
from zcrecord.tensors.strides import address

from .file_objects import check_readable, read_to_end
from .mapping import aligned, map_descriptor
from .threads import each_piece

__all__ = [
    "Memory",
    "Mode",
    "Piece",
    "aligned",
    "aligned_empty",
    "buffer_of",
    "identity_of",
    "is_packed",
    "is_url",
    "map_file",
    "private_copy",
    "read_at",
    "read_file",
    "read_pieces",
    "read_resource",
    "read_some",
    "read_stream",
]

Mode = Literal["r", "c"]

_PACKED = (b"\xb5\x2f\xfd", b"\x2a\x4d\x18")  # zstd's magic from the second byte on: a frame, one to be skipped
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z][A-Za-z0-9+.-]+)*://")
_PIECE = 1 << 20  # bytes of one read; many times a network's round trip is worth
_READERS = 4  # reads under way at a time; a network file system answers each by itself


class Memory(NamedTuple):
    """Bytes that an archive may be opened from.

    Attributes:
        octets: all of them, flat; read-only unless they are nobody else's.
        path: the file they are of, as it was named.
        mapping: what is closed to let go of them; None for a buffer that was given.
        identity: of the mapped file, to know it again: device, inode, size, time of change.
        filled: where there is anything, of memory most of which was never touched; None where there is everywhere.
        remote: what reads the rest by position (`loaders.protocol.RangeSource`), where payloads lie elsewhere.
        absolute: the file's absolute path, by which it is opened again: the working folder may change meanwhile.
    """

    octets: memoryview
    path: str | None = None
    mapping: mmap.mmap | None = None
    identity: tuple[int, ...] | None = None
    filled: list[tuple[int, int]] | None = None
    remote: Any = None
    absolute: str | None = None


class Piece(NamedTuple):
    """What one read brings: a file's bytes from an offset on, into buffers one after the other, a thousand at most."""

    offset: int
    buffers: list[memoryview]


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


def _absolute(path: str) -> str:
    """Return a path that stays right when the working folder changes; `..` is left to the system, for links' sake."""
    if os.name == "nt":
        return os.path.abspath(path)
    if path.startswith("/"):
        return path
    with contextlib.suppress(FileNotFoundError):  # the working folder was removed
        return os.path.join(os.getcwd(), path)
    return path


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def identity_of(fd: int) -> tuple[int, ...]:
    """Return what an open file is known again by, as `Memory.identity`.

    Raises:
        SourceError: the system does not tell.
    """
    try:
        return _identity(os.fstat(fd))
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", errno=error.errno) from error


def _refused(error: OSError, path: str) -> Exception:
    if isinstance(error, RecordError):
        return error.located(path=path)
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
        absolute = _absolute(path)
        fd, identity = _open(path, least)
        try:
            if not identity[2]:
                return Memory(memoryview(b""), path, None, identity, absolute=absolute)  # nothing can be mapped of it
            mapping = _mapping(fd, identity[2], private)
        finally:
            os.close(fd)
    except OSError as error:
        raise _refused(error, path) from _cause(error)
    return Memory(memoryview(mapping), path, mapping, identity, absolute=absolute)


def _mapping(fd: int, nbytes: int, private: bool) -> mmap.mmap:
    """Map a file that had `nbytes` bytes when it was opened.

    Raises:
        SourceError: it has fewer by now; who touched the rest would be killed.
    """
    mapping = None
    with contextlib.suppress(ValueError):  # nothing is left of it
        mapping = map_descriptor(fd, private=private)
    if mapping is None or len(mapping) < nbytes:
        raise SourceError("became shorter while it was opened; is it still being written?", offset=0)
    return mapping


def read_file(path: str, *, least: int = 2 * HEADER_SIZE) -> Memory:
    """Return a whole file read into memory of its own, whose address is a multiple of 65536; several reads at a time.

    For network file systems, where page faults cost a round trip each, and for files that may shrink: a mapping's
    reader would be killed.

    Raises:
        SourceError: it is missing, a directory, cannot be read, or became shorter. FormatError: it is too short.
    """
    try:
        absolute = _absolute(path)
        fd, identity = _open(path, least)
        try:
            block, octets = aligned(identity[2])
            starts = range(0, len(octets), _PIECE)
            _read_all(fd, [Piece(start, [octets[start : start + _PIECE]]) for start in starts])
        finally:
            os.close(fd)
    except OSError as error:
        raise _refused(error, path) from _cause(error)
    return Memory(octets, path, block, identity, absolute=absolute)


def read_resource(resource: Any) -> Memory:
    """Return a package resource, as of `importlib.resources`, read into memory whose address is a multiple of 65536.

    It is for those that are no files of their own, as in a zip.

    Raises:
        SourceError: it is missing, or whoever holds it cannot read it.
    """
    name = str(resource)
    try:
        stream = resource.open("rb")
    except FileNotFoundError as error:
        raise SourceNotFoundError("no such resource", path=name, errno=error.errno) from None
    except Exception as error:  # of a zip, of whatever loads the package
        raise SourceError(f"cannot be read: {error or type(error).__name__}", path=name) from error
    try:
        with stream:
            return read_stream(stream)
    except RecordError as error:
        raise error.located(path=name) from error.__cause__


def read_stream(file: Any) -> Memory:
    """Return what a binary file object has from where it is to its end: a BytesIO's own bytes, of others a copy.

    Raises:
        SourceError: it cannot be read. UnsupportedError: it gives text.
    """
    check_readable(file)
    if isinstance(file, io.BytesIO):
        return Memory(memoryview(file.getvalue())[file.tell() :])  # shared until it is written to next
    block, octets = read_to_end(file)
    return Memory(octets, None, block)


def private_copy(octets: memoryview, filled: list[tuple[int, int]] | None = None) -> Memory:
    """Return a writable copy of bytes, or of the filled ranges of them, at an address that is a multiple of 65536."""
    block, out = aligned(len(octets), sparse=filled is not None)
    for start, end in [(0, len(octets))] if filled is None else filled:
        out[start:end] = octets[start:end]
    return Memory(out, None, block, filled=filled)


def aligned_empty(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return new memory, not initialised, aligned as payloads are."""
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address(room) % ALIGNMENT
    return room[start : start + nbytes]


def read_some(fd: int, buffer: memoryview, offset: int) -> int:
    """Read a file's bytes from an offset, as many as fit or come at once; returns how many, 0 at its end."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    os.lseek(fd, offset, os.SEEK_SET)
    data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def read_at(fd: int, target: memoryview, offset: int) -> None:
    """Read a file's bytes from `offset` on into memory, as many as it has room for.

    Raises:
        SourceError: the file cannot be read, or ends before.
    """
    try:
        _read_piece(fd, Piece(offset, [target]))
    except OSError as error:
        if isinstance(error, RecordError):
            raise
        raise SourceError(f"cannot be read: {error.strerror}", offset=offset, errno=error.errno) from error


def read_pieces(
    path: str, pieces: Sequence[Piece], *, identity: tuple[int, ...], done: Callable[[int], None] | None = None
) -> None:
    """Read pieces of a file straight into memory, several at a time; the GIL is free meanwhile.

    `done` is called, by this thread, with the bytes that were read since; what it raises ends the reading.

    Raises:
        SourceError: the file is missing, cannot be read, became shorter, or is not the one that `identity` tells.
    """
    try:
        fd, found = _open(path, 0)
        try:
            if found != identity:
                raise SourceError("was replaced or changed since it was opened; load it again", path=path)
            _read_all(fd, pieces, done)
            if identity_of(fd) != identity:
                raise SourceError("was changed while it was read; load it again", path=path)
        finally:
            os.close(fd)
    except OSError as error:
        raise _refused(error, path) from _cause(error)


def _read_piece(fd: int, piece: Piece) -> int:
    """Read one piece and return its bytes; a short read goes on where it ended, an interrupted one Python repeats."""
    offset, left = piece.offset, [buffer for buffer in piece.buffers if len(buffer)]
    while left:
        got = os.preadv(fd, left, offset) if hasattr(os, "preadv") else read_some(fd, left[0], offset)
        if not got:
            end = min(offset, os.fstat(fd).st_size)  # another reader's bytes may be missing, too
            what = f"became shorter while it was read: it ends at byte {end}; is it still being written?"
            raise SourceError(what, offset=end)
        offset += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if got:
            left[0] = left[0][got:]
    return offset - piece.offset


def _read_all(fd: int, pieces: Sequence[Piece], done: Callable[[int], None] | None = None) -> None:
    threads = _READERS if hasattr(os, "preadv") else 1
    each_piece(lambda piece: _read_piece(fd, piece), pieces, threads=threads, done=done)


def is_packed(octets: Any) -> bool:
    """Return whether bytes begin as zstd frames do; what pzstd writes begins with one to be skipped."""
    return octets[1:4] in _PACKED


def is_url(source: Any) -> bool:
    """Return whether a source is a URL such as `https://...`, several chained ones included; a Windows path is none.

    Only text is: a file in a folder named `https:` is reached by a `pathlib.Path`, or with `./` before its path.
    """
    return isinstance(source, str) and "://" in source and _URL.match(source) is not None


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
