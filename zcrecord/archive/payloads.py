"""Bytes passed on piece by piece, in bounded memory: of a file or a stream that is read, of a record that is written.

What is mapped counts as this process's memory once it was touched, so every piece is let go of soon after. Knows
files, mappings and views; nothing of any format.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash

from zcrecord.errors import FormatError, IntegrityError, LimitError, SourceError
from zcrecord.record.record import Record
from zcrecord.storage.file_objects import check_readable
from zcrecord.storage.files import Binary, open_source
from zcrecord.writing.sharing import extent

from .info import TensorInfo

__all__ = ["PIECE", "Payloads", "Reader"]

Array = np.ndarray[Any, np.dtype[Any]]

PIECE = 1 << 20  # bytes passed on at a time; with the hash and the write they stay in a core's cache
_SPAN = 2 << 20  # bytes of a record prepared at a time, in a thread of their own
_KEPT = 8 << 20  # bytes of a mapping that were passed and are not yet let go of
_AROUND = 4 << 20  # bytes before what was brought in that Linux may have mapped with it: a folio of the page cache
_NEAR = 1 << 16  # bytes between two pieces that still count as neighbours
_GATHERED = (
    16 << 20
)  # bytes of a strided tensor put together at a time: each touches many pages, so the more the better
_TIMES, _EXPANDED = 64, 1 << 30  # what tensors may come to without ties: so many times the archive, and so many bytes
_POPULATE = 22  # MADV_POPULATE_READ of Linux 5.14, which Python does not name


class _Mapped:
    """A read-only mapping of a file that is passed once: pages are brought in before and let go of after."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.view = memoryview(mapping)
        self._mapping = mapping
        self._lo = self._hi = 0  # brought in and not yet let go of
        self._rest = (0, 0)  # in use when what lies around it was let go of
        self.populates = True
        try:
            mapping.madvise(_POPULATE, 0, 1)
        except OSError:
            self.populates = False

    def bring(self, start: int, end: int, behind: int = 0) -> None:
        """Have pages in place before they are touched: failing to read them is an error here, and a signal later.

        `behind` bytes of what was brought in last are still in use, and are let go of later.

        Raises:
            SourceError: the file became shorter, or cannot be read there.
        """
        if not self._lo <= start <= self._hi + _NEAR or self._hi - self._lo >= _KEPT:
            used = max(self._hi - behind, self._lo)
            rest = (used, self._hi)
            self._hi = used
            self.let_go()
            self._rest, self._lo = rest, start
        self._hi = max(self._hi, end)
        if self.populates:
            page = start & -mmap.PAGESIZE
            try:
                self._mapping.madvise(_POPULATE, page, end - page)
            except OSError as error:
                what = "cannot be read any more; did it become shorter meanwhile?"
                raise SourceError(what, offset=start, errno=error.errno) from error

    def let_go(self) -> None:
        """Let go of what was brought in; the page cache keeps it, and views of it stay valid."""
        for lo, hi in (self._rest, (self._lo, self._hi)):
            page = max(lo - _AROUND, 0) & -mmap.PAGESIZE
            if hi > lo:
                self._mapping.madvise(mmap.MADV_DONTNEED, page, hi - page)
        self._lo = self._hi = 0
        self._rest = (0, 0)


def _map(file: io.FileIO, nbytes: int) -> _Mapped | None:
    """Return a mapping of a regular file, None where the system cannot say beforehand whether pages can be read."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    try:
        mapped = _Mapped(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return None
    return mapped if mapped.populates else None


class Reader:
    """A file or a stream, read in pieces that are valid until the next is asked for; it never holds more than one.

    A regular file is mapped where that is safe, which spares a copy, and can be read at any place; of a stream what
    was passed is gone. Attributes: `nbytes`, None for a stream; `position`; `path`, None unless one was given.

    Example:
        >>> with Reader(io.BytesIO(b"abcdef")) as file:
        ...     file.read(2), [bytes(piece) for piece in file.pieces(3)]
        (b'ab', [b'cde'])
    """

    def __init__(self, source: str | Binary) -> None:
        self.path = source if isinstance(source, str) else None
        self.nbytes: int | None = None
        self.position = 0
        self._own: io.FileIO | None = None
        self._stream: Any = source
        if isinstance(source, str):
            self._own, self.nbytes = open_source(source)
            self._stream = self._own
        else:
            check_readable(source)
        self._mapped = _map(self._own, self.nbytes) if self._own is not None and self.nbytes else None
        self._buffer: memoryview | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.close()
        self._mapped = None  # the mapping goes with the last piece

    @property
    def seekable(self) -> bool:
        """Whether it can be read at any place, and again."""
        return self.nbytes is not None

    def seek(self, offset: int) -> None:
        """Go to an offset; in a stream only to where it is."""
        if self.nbytes is None:
            assert offset == self.position, "a stream is read forward"
            return
        self.position = offset
        if self._mapped is not None:
            return
        try:
            self._stream.seek(offset)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror or error}", offset=offset, errno=error.errno) from error

    def pieces(self, nbytes: int, most: int = PIECE) -> Iterator[memoryview]:
        """Yield the next `nbytes` bytes, at most `most` at a time.

        Raises:
            FormatError: the file ends before. SourceError: it cannot be read.
        """
        while nbytes:
            piece = self.piece(min(nbytes, most))
            if not len(piece):
                where = self.position
                raise FormatError(f"ends at byte {where}, {nbytes} bytes early; it is truncated", offset=where)
            nbytes -= len(piece)
            yield piece

    def read(self, most: int) -> bytes:
        """Return the next bytes, fewer only at the end; held as they come, so that a stream cannot claim too many."""
        parts: list[bytes] = []
        while most and len(piece := self.piece(min(most, PIECE))):
            parts.append(bytes(piece))
            most -= len(piece)
        return b"".join(parts)

    def readinto(self, buffer: memoryview) -> int:
        """Copy the next bytes into a buffer; return how many, 0 at the end."""
        piece = self.piece(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def piece(self, most: int) -> memoryview:
        """Return some of the next bytes, at most so many, valid until more are asked for; none at the end."""
        start = self.position
        if self._mapped is not None:
            piece = self._mapped.view[start : start + most]
            if len(piece):
                self._mapped.bring(start, start + len(piece))
        else:
            if self._buffer is None:
                self._buffer = memoryview(bytearray(PIECE))
            piece = self._buffer[: self._into(self._buffer[: min(most, PIECE)])]
        self.position += len(piece)
        return piece

    def _into(self, buffer: memoryview) -> int:
        try:
            if hasattr(self._stream, "readinto"):
                done = self._stream.readinto(buffer)
            else:
                data = self._stream.read(len(buffer))
                done = None if data is None else len(data)
                buffer[: done or 0] = data or b""
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror or error}", path=self.path, errno=error.errno) from error
        if done is None:
            raise SourceError("the source is non-blocking and has no bytes ready; make it blocking")
        return int(done)


class Payloads:
    """The tensors of a loaded record as bytes in C order, in pieces; each payload is checked against its digest.

    Attributes:
        infos: what the index says of them, in saved order.
        nbytes: what they come to, ties each time.
    """

    def __init__(self, record: Record) -> None:
        """Raise LimitError if tensors that share their bytes would come to far more than the archive has."""
        self.infos = list(record.infos())
        self.nbytes = sum(info.nbytes for info in self.infos)
        if self.nbytes > _TIMES * record.archive_nbytes + _EXPANDED:
            what = f"its tensors share bytes, and written apart come to {self.nbytes}"
            raise LimitError(f"{what}; save what you need of it as a record of its own", path=record.archive.path)
        self._record = record
        self._sound: set[int] = set()
        self._mapped: _Mapped | None = None
        self._base = 0  # the mapping's address

    def pieces(self, info: TensorInfo) -> Iterator[Any]:
        """Yield a tensor's bytes, each piece valid until the next is asked for; copies only what is strided.

        Raises:
            IntegrityError: the payload is not what was saved. SourceError: it cannot be read any more.
        """
        if info.strides is None:
            yield from self.stored(info)
        elif info.payload is not None:
            if info.payload not in self._sound:
                for _ in self.stored(info):
                    pass
            held = np.empty(min(info.nbytes, _GATHERED), np.uint8)
            for block in _blocks(self._record.array(info.name)):
                octets = held[: block.nbytes]
                self._gather(octets.view(block.dtype).reshape(block.shape), block)
                yield octets

    def stored(self, info: TensorInfo) -> Iterator[memoryview]:
        """Yield the whole payload of a tensor as it lies, whatever the tensor's strides."""
        if info.payload is None:
            return
        raw = self._record.raw(info.name)
        start = self._find(raw)
        digest = None if info.payload in self._sound or self._record.mode != "r" else info.digest
        running = xxhash.xxh3_64()

        def prepared(at: int) -> memoryview:
            piece = raw[at : at + _SPAN]
            if self._mapped is not None:
                self._mapped.bring(start + at, start + at + len(piece), _SPAN)
            if digest is not None:
                running.update(piece)
            return piece

        yield from _ahead(prepared, range(0, len(raw), _SPAN))
        if digest is not None and running.intdigest() != digest:
            what = "its payload's digest does not match; the file is damaged, copy it again"
            raise IntegrityError(what, path=self._record.archive.path, tensor=info.name, offset=info.offset)
        self._sound.add(info.payload)

    def let_go(self) -> None:
        """Let go of what was read last."""
        if self._mapped is not None:
            self._mapped.let_go()

    def _find(self, raw: memoryview) -> int:
        """Return where in the mapping these bytes lie; memory that is no mapped file's is left alone."""
        if self._mapped is None and isinstance(raw.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            if not memoryview(raw.obj).readonly:
                return 0  # a private copy: to let go of it would undo what was written to it
            self._mapped = _Mapped(raw.obj)
            self._base = _address(self._mapped.view)
        return 0 if self._mapped is None else _address(raw) - self._base

    def _gather(self, out: Array, block: Array) -> None:
        """Copy a strided block, no more of its memory at a time than may be kept."""
        lo, hi = extent(block)
        if hi - lo <= _KEPT or block.size == 1:
            if self._mapped is not None:
                self._mapped.bring(lo - self._base, hi - self._base)
            out[...] = block
            return
        axis = max(range(block.ndim), key=lambda a: abs(block.strides[a]) if block.shape[a] > 1 else -1)
        step = max(1, _KEPT // abs(block.strides[axis]))
        before = (slice(None),) * axis
        for start in range(0, block.shape[axis], step):
            rows = (*before, slice(start, start + step))
            self._gather(out[rows], block[rows])


def _ahead(prepared: Callable[[int], memoryview], places: range) -> Iterator[memoryview]:
    """Yield what is prepared for each place, the next one while this one is used: hashing beside writing."""
    if len(places) < 2:
        yield from map(prepared, places)
        return
    from concurrent.futures import ThreadPoolExecutor  # here, because only what is large is worth a thread

    with ThreadPoolExecutor(1) as other:
        coming = other.submit(prepared, places[0])
        for at in places[1:]:
            piece = coming.result()
            coming = other.submit(prepared, at)
            yield piece
        yield coming.result()


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _blocks(view: Array) -> Iterator[Array]:
    """Yield an array in blocks of bounded size that follow one another in C order."""
    if view.nbytes <= _GATHERED:
        yield view
        return
    row = view.nbytes // len(view)
    if row > _GATHERED:
        for part in view:
            yield from _blocks(part)
        return
    step = _GATHERED // row
    for start in range(0, len(view), step):
        yield view[start : start + step]
