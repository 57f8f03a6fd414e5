"""A mapping or a buffer, opened as an archive: header, trailer, index, and views of payloads. Copies no payload byte.

Rules are `verify`'s, names and trees `record`'s; here is where a view's address comes from and what keeps it alive.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
import zlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Literal

import numpy as np

from . import dtypes, verify
from .errors import FormatError, IntegrityError, RecordError, SourceError, SourceNotFoundError, UnsupportedError
from .index import Index, TensorEntry, decode
from .layout import HEADER_SIZE, MAX_ARCHIVE_SIZE, NONE, Header, decode_header
from .tensors import PackedTensor, StringTensor

__all__ = ["Archive", "Embedded", "Progress", "Verify", "buffer_of", "closed", "map_file"]

Verify = Literal["touch", "index", "full"]
Embedded = Literal["prefix", "suffix"]
Progress = Callable[[int, int], None]


def map_file(path: str) -> mmap.mmap:
    """Return a read-only mapping of a whole file.

    Raises:
        SourceError: it is missing (SourceNotFoundError), a directory, or cannot be read. FormatError: it is empty.
    """
    try:
        extra = ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK")  # a named pipe would wait for its writer
        fd = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in extra))
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise SourceError("is a directory; name an archive in it", path=path, errno=errno.EISDIR)
            if not stat.S_ISREG(status.st_mode):
                raise SourceError("not a regular file; read it and pass the bytes", path=path)
            if status.st_size < 2 * HEADER_SIZE:
                raise _too_short(status.st_size, os.read(fd, HEADER_SIZE)).located(path=path)
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
    except FileNotFoundError as error:
        raise SourceNotFoundError("no such file", path=path, errno=error.errno) from None
    except OSError as error:
        if isinstance(error, RecordError):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SourceError(f"cannot be read: {reason}", path=path, errno=error.errno) from error


def _too_short(size: int, start: bytes) -> RecordError:
    if not size:
        return FormatError("the file is empty")
    try:
        decode_header(start.ljust(HEADER_SIZE, b"\0"))
    except IntegrityError:
        pass
    except FormatError as error:
        return error
    return FormatError(f"{size} bytes are too few for an archive (at least {2 * HEADER_SIZE}); the file is truncated")


class _Released:
    """What an archive has in place of index and bytes once it is released: every use of it is the one typed error."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def __getattr__(self, _: str) -> Any:
        raise closed(self._path)

    def __getitem__(self, _: Any) -> Any:
        raise closed(self._path)


def closed(path: str | None) -> UnsupportedError:
    """Return what is raised for a record that was closed before, or by another thread meanwhile."""
    return UnsupportedError("the record is closed; views taken before stay valid", path=path)


class Archive:
    """An opened archive: its bytes, its index, and views of its payloads.

    Attributes:
        buffer: all bytes of the archive, read-only; every view keeps it, and with it the mapping, alive.
        header: the sealed header, or the trailer where the header is not sealed.
        offset: where the archive starts in the file or buffer.
        verified: what has been checked of the index so far.

    Another thread may release it at any time: who makes views takes hold of `_octets` first, and then of the index.
    """

    __slots__ = (
        "_checked", "_mapping", "_octets", "_pool", "_region", "_strings",
        "buffer", "header", "index", "offset", "path", "verified",
    )  # fmt: skip

    def __init__(
        self,
        source: memoryview,
        *,
        path: str | None,
        mapping: mmap.mmap | None,
        level: Verify,
        embedded: Embedded | None,
    ) -> None:
        self.path = path
        self._mapping: Any = mapping
        try:
            self.buffer, self.header, self.offset = _locate(source, embedded)
            h = self.header
            if level != "touch":
                self._check_crc()
            self.index: Index = decode(self.buffer[h.index_offset :], h.index_size)
            self.verified: Verify = level
            self._checked = bytearray(0)
            self._strings: set[tuple[int, int]] = set()  # payload and number of strings whose ends were checked
            self._pool = self.index.pool()
            if level == "touch":
                verify.check_header(self.index, h)
                self._checked = bytearray(len(self.index.tensors))
            else:
                verify.check_index(self.index, h)
            self._region = self.buffer[h.payload_offset :]
            # ndarray(buffer=memoryview) keeps what the memoryview is of: here an array that holds the buffer's export.
            self._octets = np.frombuffer(self._region, np.uint8).data
            if level == "full":
                self.check_contents()
        except RecordError as error:
            raise error.located(path=path) from None

    def _check_crc(self) -> None:
        h = self.header
        if zlib.crc32(self.buffer[h.index_offset : h.index_offset + h.index_size]) != h.index_crc:
            raise IntegrityError("index: its CRC does not match; the file is damaged, copy it again")

    def ensure(self, i: int) -> None:
        """Check tensor i unless that was done, at open or when it was touched before."""
        if self.verified != "touch" or self._checked[i]:
            return
        try:
            verify.check_touched(self.index, self.header, i, self._pool)
        except RecordError as error:
            raise error.located(path=self.path) from None
        self._checked[i] = 1

    def ensure_all(self) -> None:
        """Check the whole index, where only what was touched had been: modules, attributes and order included."""
        if self.verified != "touch":
            return
        try:
            self._check_crc()
            verify.check_index(self.index, self.header)
        except RecordError as error:
            raise error.located(path=self.path) from None
        self.verified = "index"

    def find(self, name: str) -> int:
        """Return the tensor with that full name, -1 if there is none; about log2(n) comparisons."""
        try:
            wanted = name.encode()
        except UnicodeEncodeError:
            return -1
        ix = self.index
        text, count = ix.text, len(ix.tensors)
        by_name, words = _integers(ix.by_name), _integers(ix.tensors)
        lo, hi = 0, count
        while lo < hi:
            mid = (lo + hi) >> 1
            i = by_name[mid]
            if i >= count:
                raise FormatError(f"by_name[{mid}] is {i}, of {count} tensors", path=self.path)
            start = words[12 * i]
            found = text[start : start + words[12 * i + 1]].tobytes()
            if found == wanted:
                self.ensure(i)
                return i
            if found < wanted:
                lo = mid + 1
            else:
                hi = mid
        return -1

    def row(self, i: int) -> TensorEntry:
        """Return the entry of tensor i, checked."""
        self.ensure(i)
        return self.index.tensor(i)

    def shape(self, row: TensorEntry) -> tuple[int, ...]:
        """Return the shape a row names."""
        start = row.dims
        return tuple(self.index.dims[start : start + row.rank].tolist())

    def strides(self, row: TensorEntry) -> tuple[int, ...] | None:
        """Return the strides a row names, in elements; None for C order."""
        start = row.strides
        return None if start == NONE else tuple(self.index.strides[start : start + row.rank].tolist())

    def payload(self, number: int) -> memoryview:
        """Return a payload's bytes; a read-only view. NONE gives an empty one."""
        if number == NONE:
            return self._region[:0]
        offset, nbytes, _ = self.index.payloads[number].item()
        return self._region[offset : offset + nbytes]

    def view(self, i: int) -> Any:
        """Return tensor i as an ndarray, PackedTensor or StringTensor over the archive's own bytes."""
        octets = self._octets
        row = self.row(i)
        shape, strides = self.shape(row), self.strides(row)
        kind = dtypes.by_code.get(row.dtype)
        number, bits = row.payload, row.bits
        if kind is None or kind is dtypes.STRING or bits < 8:
            return self._special(i, kind, number, shape)
        if number == NONE:
            return np.frombuffer(b"", kind.numpy).reshape(shape)  # read-only, as every view
        offset = self.index.payloads[number].item()[0] + row.byte_offset
        if strides is not None:
            strides = tuple(s * (bits >> 3) for s in strides)
        return np.ndarray(shape, kind.numpy, octets, offset, strides)

    def elements(self, i: int) -> np.ndarray[Any, Any]:
        """Return a strided tensor as opaque elements of its width; unlike a view, whatever its type."""
        octets = self._octets
        row = self.row(i)
        item = row.bits >> 3
        strides = tuple(s * item for s in self.strides(row) or ())
        offset = self.index.payloads[row.payload].item()[0] + row.byte_offset
        return np.ndarray(self.shape(row), np.dtype((np.void, item)), octets, offset, strides)

    def _special(self, i: int, kind: dtypes.DType | None, number: int, shape: tuple[int, ...]) -> Any:
        name = self.index.name(i)
        data = np.frombuffer(self.payload(number), np.uint8)
        if kind is None:
            code = self.row(i).dtype
            raise UnsupportedError(
                f"dtype code {code} is not known; .raw(name) gives its bytes", path=self.path, tensor=name
            )
        if kind is dtypes.STRING and (number, prod(shape)) in self._strings:
            return StringTensor(data, shape, checked=True)
        try:
            if kind is not dtypes.STRING:
                return PackedTensor(data, kind, shape)
            checked = StringTensor(data, shape)
            self._strings.add((number, prod(shape)))
            return checked
        except FormatError as error:
            raise error.located(path=self.path, tensor=name) from None

    def views(self) -> Iterator[Any]:
        """Yield every tensor in saved order, at a fraction of the cost of one call each."""
        octets, ndarray = self._octets, np.ndarray
        self.ensure_all()
        ix = self.index
        rows = ix.tensors
        plain = (rows["bits"] >= 8) & (rows["strides"] == NONE) & (rows["payload"] != NONE)
        codes = rows["dtype"].tolist()
        kinds: Any = {c: dtypes.by_code[c].numpy if c in dtypes.by_code else None for c in set(codes)}
        plain &= np.isin(rows["dtype"], [c for c, d in kinds.items() if d is not None])
        dims = ix.dims.tolist()
        shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        offsets = ix.payloads["offset"][np.where(plain, rows["payload"], 0)].tolist() if len(ix.payloads) else []
        columns = zip(plain.tolist(), codes, rows["dims"].tolist(), rows["rank"].tolist(), offsets, strict=False)
        if not offsets:
            yield from (self.view(i) for i in range(len(rows)))
            return
        for i, (simple, code, start, rank, offset) in enumerate(columns):
            if not simple:
                yield self.view(i)
                continue
            shape = shapes.get((start, rank))
            if shape is None:
                shape = shapes[start, rank] = tuple(dims[start : start + rank])
            yield ndarray(shape, kinds[code], octets, offset)

    def names(self) -> list[str]:
        """Return every full name in saved order."""
        self.ensure_all()
        ix, count = self.index, len(self.index.tensors)
        if not count:
            return []
        starts = ix.tensors["name"]
        ends = starts.astype(np.int64) + ix.tensors["name_size"]
        order = ix.by_name
        if (starts[order[1:]] == ends[order[:-1]] + 1).all():  # as our writer lays them: one decode for all
            joined = str(ix.text[int(starts[order[0]]) : int(ends[order[-1]])], "utf-8").split("\0")
            out = [""] * count
            for i, name in zip(order.tolist(), joined, strict=True):
                out[i] = name
            return out
        text = ix.text
        return [str(text[a:b], "utf-8") for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def check_contents(self, progress: Progress | None = None) -> None:
        """Check what only the payloads' bytes can tell: digests, zeros between, string ends, pad bits, bools.

        `progress` is called with the bytes checked so far, and with all there are to check.

        Raises:
            IntegrityError: a payload's digest does not match. FormatError: the rest.
        """
        from . import contents  # here, because few who open an archive read all of it

        self.ensure_all()
        try:
            contents.check(self, progress)
        except RecordError as error:
            raise error.located(path=self.path) from None

    def release(self) -> bool:
        """Drop the archive's own hold on its mapping; returns whether that, or a later view's end, released it."""
        released: Any = _Released(self.path)
        self.index = released  # first: numpy takes a lost `_octets` for leave to make new memory
        self.buffer = self._region = self._pool = self._octets = released
        mapping = self._mapping() if isinstance(self._mapping, weakref.ref) else self._mapping
        if mapping is None:
            return True
        self._mapping = weakref.ref(mapping)
        try:
            mapping.close()
        except BufferError:  # views live; the mapping goes with the last of them
            return False
        return True


def _integers(column: np.ndarray[Any, Any]) -> memoryview:
    """Return a column's 32-bit numbers as plain integers, at any address; 5 times faster than rows of an array."""
    return memoryview(column.view(np.uint8).data).cast("I")


def _locate(source: memoryview, embedded: Embedded | None) -> tuple[memoryview, Header, int]:
    """Return the archive's own bytes in `source`, its sealed header or trailer, and where it starts (R14 to R16)."""
    size = len(source)
    if size < 2 * HEADER_SIZE:
        raise _too_short(size, bytes(source[:HEADER_SIZE]))
    if embedded == "prefix":
        header = decode_header(bytes(source[:HEADER_SIZE]))
        if header is None:
            raise FormatError("header: not sealed, so its size is not known; open the whole file, or write it to one")
        if header.archive_size > size:
            raise FormatError(f"the archive has {header.archive_size} bytes, only {size} are there; it is truncated")
        source = source[: header.archive_size]
    elif embedded == "suffix":
        trailer = decode_header(bytes(source[size - HEADER_SIZE :]), "trailer")
        if trailer is None or not 2 * HEADER_SIZE <= trailer.archive_size <= size:
            raise FormatError(f"trailer: no archive of a size up to {size} ends here")
        source = source[size - trailer.archive_size :]
    return source, _sealed(source), (size - len(source) if embedded == "suffix" else 0)


def _sealed(archive: memoryview) -> Header:
    """Return what header and trailer agree on (R8, R9)."""
    first, last = bytes(archive[:HEADER_SIZE]), bytes(archive[-HEADER_SIZE:])
    size = len(archive)
    if size > MAX_ARCHIVE_SIZE:
        raise FormatError("the source is larger than 2^56 bytes")
    header = decode_header(first)
    if header is not None and header.archive_size != size:
        what = "truncated, copy it again" if header.archive_size > size else "followed by other bytes; see embedded="
        raise FormatError(f"the archive has {header.archive_size} bytes, the source {size}; it is {what}")
    trailer = header if first == last else decode_header(last, "trailer")
    if trailer is None:
        raise FormatError("trailer: not sealed")
    if trailer.archive_size != size:
        raise FormatError(f"trailer: the archive has {trailer.archive_size} bytes, the source {size}; copy it again")
    if header is not None and first != last:
        raise FormatError("header and trailer differ; the file is damaged, copy it again")
    if header is None and first[9] != last[9]:
        raise FormatError("header and trailer differ in their alignment; the file is damaged, copy it again")
    return trailer


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
