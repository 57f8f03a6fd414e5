"""Files and streams read in pieces, in bounded memory.

A mapped page counts as this process's memory once it was touched, so every piece is released soon after. Knows files,
mappings and streams; nothing of any format.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator
from typing import Any, Self

from zcrecord.errors import FormatError, SourceError, UnsupportedError

from .files import Binary, open_source, read_error

PIECE = 1 << 20  # bytes passed on at a time; with the hash and the write they stay in a core's cache
KEPT = 8 << 20  # bytes of a mapping that were passed and are not yet released
_AROUND = 4 << 20  # bytes before a range that Linux may have mapped with it: a folio of the page cache
_NEAR = 1 << 16  # bytes between two pieces that still count as neighbours
_POPULATE = 22  # MADV_POPULATE_READ of Linux 5.14, which Python does not name


class SequentialMapping:
    """A read-only mapping of a file that is passed once: pages are populated before, and released after."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.view = memoryview(mapping)
        self._mapping = mapping
        self._start = self._end = 0  # the range that is populated and not yet released
        self._earlier = (0, 0)  # a range before it, still in use when all before it was released
        self.populates = True  # the system can, since Linux 5.14
        try:
            mapping.madvise(_POPULATE, 0, 1)
        except OSError:
            self.populates = False

    def populate(self, start: int, end: int, behind: int = 0) -> None:
        """Populate pages before they are touched; SourceError if they cannot be read: a touch would raise SIGBUS.

        The last `behind` bytes that were populated are still in use, and are released later.
        """
        if not self._start <= start <= self._end + _NEAR or self._end - self._start >= KEPT:
            in_use = max(self._end - behind, self._start)
            earlier = (in_use, self._end)
            self._end = in_use
            self.release()
            self._earlier, self._start = earlier, start
        self._end = max(self._end, end)
        if self.populates:
            page = start & -mmap.PAGESIZE
            try:
                self._mapping.madvise(_POPULATE, page, end - page)
            except OSError as error:
                fault = "cannot be read any more; did it become shorter meanwhile?"
                raise SourceError(fault, offset=start, errno=error.errno) from error

    def release(self) -> None:
        """Release the populated pages; the page cache keeps them, and views of them stay valid."""
        for start, end in (self._earlier, (self._start, self._end)):
            page = max(start - _AROUND, 0) & -mmap.PAGESIZE
            if end > start:
                self._mapping.madvise(mmap.MADV_DONTNEED, page, end - page)
        self._start = self._end = 0
        self._earlier = (0, 0)


def _map_safely(file: io.FileIO, nbytes: int) -> SequentialMapping | None:
    """Map a regular file; None if the system cannot report beforehand that pages cannot be read."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    try:
        mapping = SequentialMapping(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return None
    return mapping if mapping.populates else None


class StreamReader:
    """A file or a stream, read in pieces that are valid until the next is asked for; it never holds more than one.

    A regular file is mapped where that is safe, which spares a copy, and can be read at any place, and again. It has
    `nbytes` (None for a stream), `position` and `path` (None for an object). `regular` is that of `open_source`.
    """

    def __init__(self, source: str | Binary, *, regular: bool = False) -> None:
        self.path = source if isinstance(source, str) else None
        self.nbytes: int | None = None
        self.position = 0
        self._file: io.FileIO | None = None
        self._stream: Any = source
        if isinstance(source, str):
            self._file, self.nbytes = open_source(source, regular=regular)
            self._stream = self._file
        else:
            check_readable(source)
        self._mapped = _map_safely(self._file, self.nbytes) if self._file is not None and self.nbytes else None
        self._buffer: memoryview | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._mapped = None  # the mapping goes with the last piece

    def fileno(self) -> int:
        """Return the descriptor of the file that was opened by its path, which is closed with this reader."""
        assert self._file is not None, "opened by its path"
        return self._file.fileno()

    @property
    def inode(self) -> tuple[int, int] | None:
        """Device and inode of the file that was opened by its path; None of a stream."""
        if self._file is None:
            return None
        status = os.fstat(self._file.fileno())
        return status.st_dev, status.st_ino

    @property
    def seekable(self) -> bool:
        """True if it can be read at any place, and again."""
        return self.nbytes is not None

    def seek(self, offset: int) -> None:
        """Go to an offset; in a stream only to its position."""
        if self.nbytes is None:
            assert offset == self.position, "a stream is read forward"
            return
        self.position = offset
        if self._mapped is not None:
            return
        try:
            self._stream.seek(offset)
        except OSError as error:
            raise read_error(error, offset=offset) from error

    def pieces(self, nbytes: int, limit: int = PIECE) -> Iterator[memoryview]:
        """Yield the next `nbytes` bytes, at most `limit` at a time."""
        while nbytes:
            piece = self.piece(min(nbytes, limit))
            if not len(piece):
                end = self.position
                raise FormatError(f"ends at byte {end}, {nbytes} bytes early; it is truncated", offset=end)
            nbytes -= len(piece)
            yield piece

    def read(self, limit: int) -> bytes:
        """Return the next `limit` bytes, fewer only at the end; memory grows with the bytes that really arrive."""
        parts: list[bytes] = []
        while limit and len(piece := self.piece(min(limit, PIECE))):
            parts.append(bytes(piece))
            limit -= len(piece)
        return b"".join(parts)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Go to an offset, and return a range of the file from there; less at its end."""
        self.seek(offset)
        return self.read(nbytes)

    def readinto(self, buffer: memoryview) -> int:
        """Copy the next bytes into a buffer; return their number, 0 at the end."""
        piece = self.piece(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def piece(self, limit: int) -> memoryview:
        """Return some of the next bytes, at most `limit`, valid until more are asked for; none at the end."""
        start = self.position
        if self._mapped is not None:
            piece = self._mapped.view[start : start + limit]
            if len(piece):
                self._mapped.populate(start, start + len(piece))
        else:
            if self._buffer is None:
                self._buffer = memoryview(bytearray(PIECE))
            nbytes = read_into(self._stream, self._buffer[: min(limit, PIECE)], self.path)
            if nbytes is None:
                raise SourceError("the source is non-blocking and has no bytes ready; make it blocking")
            piece = self._buffer[:nbytes]
        self.position += len(piece)
        return piece


def read_into(stream: Any, buffer: Any, path: str | None = None) -> int | None:
    """Read some bytes of a stream into a buffer; return how many, 0 at the end, None if it has none ready."""
    try:
        if hasattr(stream, "readinto"):
            nbytes = stream.readinto(buffer)
            return None if nbytes is None else int(nbytes)
        data = stream.read(len(buffer))
    except SourceError:  # of a remote file, whose message is better
        raise
    except OSError as error:
        raise read_error(error, path) from error
    if data is None:
        return None
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) > len(buffer):
        limit = len(buffer)
        raise UnsupportedError(f"read({limit}) gave a {type(data).__name__} of {len(data)}, not at most {limit} bytes")
    buffer[: len(data)] = data
    return len(data)


def check_readable(file: Any) -> None:
    """Raise UnsupportedError for a file object in text mode, and SourceError for a closed one."""
    if isinstance(file, io.TextIOBase):
        raise UnsupportedError("a file object in text mode; open it in binary mode, as with open(path, 'rb')")
    if getattr(file, "closed", False) is True:
        raise SourceError("the file object is closed; open it again")
