"""Sinks, into which bytes are written forward: binary file objects, pipes included, and a sink that only counts.

Knows the exceptions of file objects, and that they may take less than they were given; nothing of archives. Sinks over
local files are `files.open_sink`'s.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from zcrecord.errors import PipeClosedError, RecordError, SourceError, UnsupportedError

__all__ = ["NullSink", "ObjectSink", "Sink", "flat_view"]


def flat_view(data: Any) -> memoryview:
    """Return a bytes-like as flat bytes; copies nothing."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class Sink(Protocol):
    """A destination that is written forward.

    Attributes:
        position: bytes written so far.
        can_rewind: `rewind` and `patch` work, and `read_back` if it `keeps` the bytes.
        keeps: bytes written earlier can be read back, if it can rewind.
    """

    position: int
    can_rewind: bool
    keeps: bool

    def write(self, data: Any) -> None:
        """Append all of a bytes-like."""

    def flush(self) -> None:
        """Hand on the bytes that `write` gathered, so that a failure is told now."""

    def reserve(self, nbytes: int) -> None:
        """Say how many bytes will be written in all."""

    def read_back(self, offset: int, size: int) -> bytes:
        """Return bytes written earlier."""

    def rewind(self, offset: int) -> None:
        """Forget everything from `offset` on."""

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes written earlier; the position stays."""

    def copy_from(self, file: int, offset: int, nbytes: int) -> tuple[int, bool]:
        """Append bytes of an open file without reading them; return how many, maybe none, and True for a clone."""


class ObjectSink:
    """A binary file object. It counts as seekable only if it can be read back too: two kinds of sink, not three.

    One that appends cannot be patched either: it writes at its end, always. Refusals of the system, or of a store,
    are one typed error, as of a path; any other exception of the object's is its owner's.
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
        """Raise an exception of the file object as one typed error, unless it is the object's own affair."""
        name = getattr(self._file, "name", None)
        path = "standard output" if name == "<stdout>" else name if isinstance(name, str) else None
        if isinstance(error, RecordError):
            raise error.located(path=path) from error.__cause__
        if self._failed is not None:  # cleaning up wrote once more; the first error is told
            raise self._failed
        self._failed = _told(error, path, closed=getattr(self._file, "closed", False) is True)
        if self._failed is None:
            raise error
        raise self._failed from error

    def flush(self) -> None:
        """Flush the object; nothing was gathered here."""
        if hasattr(self._file, "flush"):
            with self._refusals():
                self._file.flush()

    def reserve(self, nbytes: int) -> None:
        """Do nothing: there is nothing to prepare."""

    def write(self, data: Any) -> None:
        """Append all of a bytes-like."""
        view = flat_view(data)
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

    def copy_from(self, _file: int, _offset: int, _nbytes: int) -> tuple[int, bool]:
        """Append nothing: the object takes bytes alone."""
        return 0, False


def _told(error: Exception, path: str | None, *, closed: bool) -> RecordError | None:
    """Return the typed error for an exception of a file object's `write`; None if it is the object's own affair."""
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


class NullSink:
    """A sink that counts bytes and keeps none."""

    can_rewind, keeps = True, False

    def __init__(self) -> None:
        self.position = 0

    def reserve(self, nbytes: int) -> None:
        """Do nothing: there is nothing to prepare."""

    def write(self, data: Any) -> None:
        """Count it."""
        self.position += memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: nothing was gathered."""

    def read_back(self, offset: int, size: int) -> bytes:
        """Refuse: nothing was kept."""
        raise UnsupportedError(f"bytes [{offset}, {offset + size}) were counted and not kept")

    def rewind(self, offset: int) -> None:
        """Forget everything from `offset` on."""
        self.position = offset

    def patch(self, offset: int, data: bytes) -> None:
        """Do nothing: there is nothing to overwrite."""

    def copy_from(self, _file: int, _offset: int, _nbytes: int) -> tuple[int, bool]:
        """Append nothing: bytes are counted by `write`."""
        return 0, False
