"""Binary file objects, written and read: pipes, buffers, what fsspec opens. What they refuse is one typed error.

Knows what file objects raise, and that they may take or give less than they were asked to; nothing of archives.
"""

from __future__ import annotations

import collections
import contextlib
import io
import mmap
import os
from collections.abc import Iterator
from typing import Any, NoReturn

from zcrecord.errors import PipeClosedError, RecordError, SourceError, UnsupportedError

from .mapping import aligned

__all__ = ["ObjectSink", "check_readable", "flat", "path_of_open", "read_to_end"]

_PIECE = 1 << 20  # bytes of one read


def flat(data: Any) -> memoryview:
    """Return a bytes-like as flat bytes; copies nothing."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class ObjectSink:
    """A binary file object. It counts as seekable only if it can be read back too: two kinds of sink, not three.

    One that appends cannot be patched either: wherever it is asked to, it writes at its end. What the system, or a
    store, says is one typed error, as of a path; any other exception of the object's is its owner's.
    """

    keeps = True

    def __init__(self, file: Any) -> None:
        self._file = file
        self._failed: RecordError | None = None
        self.position = 0
        self.can_rewind = False
        if isinstance(file, io.TextIOBase):
            raise UnsupportedError("a file object in text mode; open it in binary mode, as with open(path, 'wb')")
        with contextlib.suppress(AttributeError, OSError, ValueError):
            appends = "a" in str(getattr(file, "mode", ""))
            self.can_rewind = bool(file.seekable() and file.readable() and hasattr(file, "truncate") and not appends)
        with self._refusals():
            self._base = file.tell() if self.can_rewind else 0

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise what a file object said as one typed error, unless it is the object's own affair."""
        name = getattr(self._file, "name", None)
        path = "standard output" if name == "<stdout>" else name if isinstance(name, str) else None
        if isinstance(error, RecordError):
            raise error.located(path=path) from error.__cause__
        if self._failed is not None:  # cleaning up wrote once more; what went wrong first is what is told
            raise self._failed
        self._failed = _told(error, path, closed=getattr(self._file, "closed", False) is True)
        if self._failed is None:
            raise error
        raise self._failed from error

    def flush(self) -> None:
        """Nothing was gathered here; have the object hand on what it has."""
        if hasattr(self._file, "flush"):
            with self._refusals():
                self._file.flush()

    def reserve(self, nbytes: int) -> None:
        """Nothing to prepare."""

    def write(self, data: Any) -> None:
        """Append all of a bytes-like."""
        view = flat(data)
        while len(view):
            done = self._put(view)
            self.position += done
            view = view[done:]

    def _put(self, view: memoryview) -> int:
        try:
            done = self._file.write(view)
        except (OSError, ValueError, TypeError) as error:
            self._refuse(error)
        if done is None and not isinstance(self._file, io.RawIOBase):
            done = len(view)
        if not done:  # a raw file says None when it would block
            raise SourceError(f"the file object took none of {len(view)} bytes; open it in blocking mode")
        return int(done)

    def read_back(self, offset: int, size: int) -> bytes:
        """Return bytes written earlier."""
        with self._refusals():
            self._file.seek(self._base + offset)
            parts = []
            while size and (part := self._file.read(size)):
                parts.append(part)
                size -= len(part)
            self._file.seek(self._base + self.position)
            return b"".join(parts)

    def rewind(self, offset: int) -> None:
        """Forget everything from `offset` on."""
        with self._refusals():
            self._file.seek(self._base + offset)
            self._file.truncate()
        self.position = offset

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes written earlier; the position stays."""
        with self._refusals():
            self._file.seek(self._base + offset)
            view = memoryview(data)
            while len(view):
                view = view[self._put(view) :]
            self._file.seek(self._base + self.position)


def _told(error: Exception, path: str | None, *, closed: bool) -> RecordError | None:
    """Return the typed error for what a file object raised when it was written to; None if that is its own affair."""
    if isinstance(error, io.UnsupportedOperation):
        what = f"the file object is not open for writing ({error}); open it as with open(path, 'wb')"
        return SourceError(what, path=path)
    if isinstance(error, OSError):
        kind = PipeClosedError if isinstance(error, BrokenPipeError) else SourceError
        where = "" if path else " to the file object"
        what = f"cannot write{where}: {error.strerror or str(error) or type(error).__name__}"
        return kind(what, path=path, errno=error.errno)
    if isinstance(error, TypeError):
        what = f"the file object takes no bytes ({error}); open it in binary mode, as with open(path, 'wb')"
        return UnsupportedError(what, path=path)
    return SourceError("the file object is closed; open it again", path=path) if closed else None


def path_of_open(file: Any) -> str | None:
    """Return the path of a file opened by `open`, if it is at its first byte and that path still leads to it."""
    raw = getattr(file, "raw", file)
    if not isinstance(raw, io.FileIO) or not isinstance(raw.name, str):  # a gzip file has name and descriptor, too
        return None
    with contextlib.suppress(OSError, ValueError):
        if file.readable() and file.tell() == 0 and os.path.samestat(os.stat(raw.name), os.fstat(raw.fileno())):
            return raw.name
    return None


def check_readable(file: Any) -> None:
    """Refuse what can be seen not to be a binary file object that is open.

    Raises:
        UnsupportedError: it is in text mode. SourceError: it is closed.
    """
    if isinstance(file, io.TextIOBase):
        raise UnsupportedError("a file object in text mode; open it in binary mode, as with open(path, 'rb')")
    if getattr(file, "closed", False) is True:
        raise SourceError("the file object is closed; open it again")


def read_to_end(file: Any) -> tuple[mmap.mmap, memoryview]:
    """Return what a stream has left, in memory whose address is a multiple of 65536, and that memory's mapping.

    A stream tells its size only at its end, so it is read in pieces, each let go of once it is in its place.

    Raises:
        SourceError: it cannot be read. UnsupportedError: it gives no bytes.
    """
    check_readable(file)
    pieces: collections.deque[memoryview] = collections.deque()
    with _reading():
        while len(piece := _piece(file.read(_PIECE))):
            pieces.append(piece)
    block, octets = aligned(sum(map(len, pieces)))
    done = 0
    while pieces:
        piece = pieces.popleft()
        octets[done : done + len(piece)] = piece
        done += len(piece)
    return block, octets


def _piece(data: Any) -> memoryview:
    if data is None:
        raise SourceError("the file object has no bytes ready; open it in blocking mode")
    try:
        return flat(data)
    except TypeError:
        raise UnsupportedError(f"read() of the file object gave a {type(data).__name__} and no bytes") from None


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Turn whatever a file object raises when it is read into one typed error."""
    try:
        yield
    except (RecordError, MemoryError):
        raise
    except Exception as error:  # of the system, a store, a decompressor, or that it is closed
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise SourceError(f"cannot be read: {what}", errno=getattr(error, "errno", None)) from error
