"""Sinks, into which bytes are written forward: binary file objects, pipes included, and a sink that only counts.

Knows the exceptions of file objects, and that they may accept less than they were given; nothing of archives. Sinks
over local files are opened by `files.open_sink`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from zcrecord.errors import PipeClosedError, RecordError, SourceError, UnsupportedError


def flat_view(data: Any) -> memoryview:
    """Return a bytes-like as flat bytes; copies nothing."""
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class Sink:
    """Base class of destinations that are written forward."""

    position = 0  # bytes written so far
    can_rewind = False  # `rewind` and `patch` work, and `read_back` if it `keeps` the bytes
    keeps = False  # bytes written earlier can be read back, if `can_rewind`

    def write(self, data: Any) -> None:
        """Append all of a bytes-like."""
        raise NotImplementedError

    def flush(self) -> None:
        """Pass on buffered bytes, so that a failure is reported now."""

    def reserve(self, nbytes: int) -> None:
        """Prepare for `nbytes` bytes in all."""

    def read_back(self, offset: int, size: int) -> bytes:
        """Return bytes written earlier."""
        raise UnsupportedError(f"bytes [{offset}, {offset + size}) were written and not kept")

    def rewind(self, offset: int) -> None:
        """Forget everything from `offset` on."""
        raise NotImplementedError

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes written earlier; the position stays."""
        raise NotImplementedError

    def copy_from(self, file: int, offset: int, nbytes: int) -> tuple[int, bool]:  # noqa: ARG002  # of files alone
        """Append bytes of a file's descriptor without reading them; return how many, maybe 0, and True for a clone."""
        return 0, False


class NullSink(Sink):
    """A sink that counts bytes and keeps none."""

    can_rewind = True

    def write(self, data: Any) -> None:
        self.position += memoryview(data).nbytes

    def rewind(self, offset: int) -> None:
        self.position = offset

    def patch(self, offset: int, data: bytes) -> None:
        pass


class ObjectSink(Sink):
    """A binary file object, which can rewind if it can be read back and does not append; raises typed errors."""

    keeps = True

    def __init__(self, file: Any) -> None:
        self._file = file
        self._first_error: RecordError | None = None
        if isinstance(file, io.TextIOBase):
            raise UnsupportedError("a file object in text mode; open it in binary mode, as with open(path, 'wb')")
        with contextlib.suppress(AttributeError, OSError, ValueError):
            appends = "a" in str(getattr(file, "mode", ""))
            self.can_rewind = bool(file.seekable() and file.readable() and hasattr(file, "truncate") and not appends)
        with self._typed_errors():
            self._start = file.tell() if self.can_rewind else 0

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Raise the file object's exceptions as typed errors; after the first one always that one."""
        try:
            yield
        except (OSError, ValueError, TypeError) as error:
            name = getattr(self._file, "name", None)
            path = "standard output" if name == "<stdout>" else name if isinstance(name, str) else None
            if isinstance(error, RecordError):
                raise error.located(path=path) from error.__cause__
            if self._first_error is not None:  # cleaning up wrote once more
                raise self._first_error from self._first_error.__cause__
            self._first_error = _typed_error(error, path, closed=getattr(self._file, "closed", False) is True)
            if self._first_error is None:
                raise
            raise self._first_error from error

    def flush(self) -> None:
        if hasattr(self._file, "flush"):
            with self._typed_errors():
                self._file.flush()

    def write(self, data: Any) -> None:
        view = flat_view(data)
        while len(view):
            written = self._write(view)
            self.position += written
            view = view[written:]

    def _write(self, view: memoryview) -> int:
        """Write some bytes at the file object's position; return how many, at least one. `position` stays."""
        with self._typed_errors():
            written = self._file.write(view)
        if written is None and not isinstance(self._file, io.RawIOBase):
            written = len(view)
        if not written:  # a raw file returns None when it would block
            raise SourceError(f"the file object accepted 0 of {len(view)} bytes; open it in blocking mode")
        if written > len(view):
            raise UnsupportedError(f"write() of the file object returned {written}, expected at most {len(view)}")
        return int(written)

    def read_back(self, offset: int, size: int) -> bytes:
        with self._typed_errors():
            self._file.seek(self._start + offset)
            parts = []
            while size and (part := self._file.read(size)):
                parts.append(part)
                size -= len(part)
            self._file.seek(self._start + self.position)
            return b"".join(parts)

    def rewind(self, offset: int) -> None:
        with self._typed_errors():
            self._file.seek(self._start + offset)
            self._file.truncate()
        self.position = offset

    def patch(self, offset: int, data: bytes) -> None:
        with self._typed_errors():
            self._file.seek(self._start + offset)
            view = memoryview(data)
            while len(view):
                view = view[self._write(view) :]
            self._file.seek(self._start + self.position)


def _typed_error(error: Exception, path: str | None, *, closed: bool) -> RecordError | None:
    """Return the typed error for an exception of a file object's `write`; None if it is passed on as it is."""
    if isinstance(error, io.UnsupportedOperation):
        fault = f"the file object is not open for writing ({error}); open it as with open(path, 'wb')"
        return SourceError(fault, path=path)
    if isinstance(error, OSError):
        kind = PipeClosedError if isinstance(error, BrokenPipeError) else SourceError
        where = "" if path else " to the file object"
        fault = f"cannot write{where}: {error.strerror or str(error) or type(error).__name__}"
        return kind(fault, path=path, errno=error.errno)
    if isinstance(error, TypeError):
        fault = f"the file object does not accept bytes ({error}); open it in binary mode, as with open(path, 'wb')"
        return UnsupportedError(fault, path=path)
    return SourceError("the file object is closed; open it again", path=path) if closed else None
