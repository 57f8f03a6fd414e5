"""An opened archive: a header, an index and a payload source, and views of its payloads. Copies no payload byte.

Every view keeps its memory, and with it the mapping, alive.
"""

from __future__ import annotations

import functools
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.blocks import BlockTable
from zcrecord.codec.conventions import CATALOGUE_TYPE, REFERENCES_TYPE
from zcrecord.codec.entries import TensorLayout
from zcrecord.codec.index import FORM, TENSOR, Index, Layout, Layouts, TensorEntry, TextPool, decode, numpy_type
from zcrecord.codec.layout import HEADER_SIZE, NONE, Header, locate
from zcrecord.codec.verify import check_header, check_index, check_touched
from zcrecord.errors import FormatError, IntegrityError, RecordError, UnsupportedError, located, printable
from zcrecord.storage.memory import Memory, Mode
from zcrecord.tensors.packed import PackedTensor, StringTensor

from .memory_source import source_in
from .part_source import PartSource
from .payload_source import Array, Closed, FileSource, PayloadSource, PayloadTable, Piece, Place
from .private_copy import PrivateSource

Embedded = Literal["prefix", "suffix"]
Progress = Callable[[int, int], None]
Verify = Literal["touch", "index", "full"]

_ndarray = np.ndarray  # found sooner than an attribute of numpy: a tenth of the time of a view
_NOWHERE: Place = (-1, 0, 0)  # the place of empty tensors
_UNKNOWN = -1  # the start in memory of a tensor that was not asked for yet, nor a neighbour of it
_ROW_WORDS = TENSOR.itemsize // 4  # words of 32 bits, the first two of which are start and size of the name
SourceIn = Callable[[Memory, memoryview, PayloadTable, int], FileSource]


def open_archive(
    memory: Memory, *, verify: Verify, embedded: Embedded | None = None, mode: Mode = "r",
    source_in: SourceIn = source_in,
) -> Archive:  # fmt: skip
    """Return the archive in `memory`, which it keeps alive; the whole index is checked, unless `verify` is "touch".

    Payloads are not read, whatever `verify` says. In mode "c" the memory must be writable and nobody else's, and the
    index is checked in any case. `source_in` makes the payload source. RecordError if `memory` has no valid archive.
    """
    touch = verify == "touch" and mode == "r"  # in mode "c" all was read anyway, and a copy of each twin is planned now
    make_source: SourceIn = PrivateSource if mode == "c" else source_in
    try:
        octets, header, offset = locate(memory.octets, embedded)
        if not touch:
            check_crc(octets, header)
        start = header.index_offset
        index = decode(octets.toreadonly()[start : start + header.index_size + HEADER_SIZE], header.index_size)
        (check_header if touch else check_index)(index, header)
        blocks = functools.cache(functools.partial(BlockTable, index))
        table = PayloadTable(index.payloads, bool(index.digest_kind), header.payload_offset, blocks)
        source = make_source(memory, octets, table, offset)
    except RecordError as error:
        raise error.located(path=memory.path) from None
    return Archive(header, index, source, verified="touch" if touch else "index", embedded=embedded, whole=True)


def check_crc(octets: memoryview, header: Header) -> None:
    """Raise IntegrityError unless the index in an archive's bytes has the CRC that the header names."""
    if zlib.crc32(octets[header.index_offset : header.index_offset + header.index_size]) != header.index_crc:
        raise IntegrityError("index: its CRC does not match; the file is damaged, copy it again")


def is_catalogue(archive: Archive) -> bool:
    """Return True if an archive's type name says that it is a catalogue; its tables are not checked."""
    return has_type_name(archive, CATALOGUE_TYPE)


def names_files(archive: Archive) -> bool:
    """Return True if an archive names files that hold its payloads: a catalogue, or an archive of references."""
    return archive.whole and (is_catalogue(archive) or has_type_name(archive, REFERENCES_TYPE))


def has_type_name(archive: Archive, type_name: str) -> bool:
    """Return True if module 0 has this type name; the index need not be verified."""
    row, name = archive.index.modules[0], f"{type_name}\0".encode()  # NUL ends each name in the pool (R27)
    start, end = int(row["type_name"]), int(row["type_name"]) + int(row["type_name_size"]) + 1
    return archive.index.text[start:end] == name


def require_archive(archive: Archive, user: str) -> None:
    """Raise UnsupportedError for another format's file; `user` names what needs an archive, as in "sign takes one"."""
    if not archive.whole and archive.part_of is None and not archive.source.file_names:
        name = printable(os.path.basename(archive.path or "model"))
        index = f"zcrecord index {name} model.zcr, which keeps the file, or " if user == "sign" else ""
        advice = f"make one by {index}zcrecord convert {name} model.zcr, and use model.zcr"
        raise UnsupportedError(f"is a file of another format, and {user} takes an archive; {advice}", path=archive.path)


def require_one_file(archive: Archive, user: str) -> None:
    """Raise UnsupportedError for a catalogue, or another format's file; `user` names what needs one archive file."""
    require_archive(archive, user)
    if not archive.source.file_names and not names_files(archive):
        return
    name = printable(os.path.basename(archive.path or "model.zcr"))
    advice = f"zcrecord convert {name} one.zcr makes one archive of it"
    raise UnsupportedError(f"is a catalogue of shards, and {user} takes one archive; {advice}", path=archive.path)


class TouchChecks:
    """The checks of tensors at level "touch", each made once: by an archive, its private copies and its source."""

    __slots__ = ("_header", "_pool", "checked", "index")

    def __init__(self, index: Index, header: Header) -> None:
        self.index, self._header = index, header
        self.checked: set[int] = set()
        self._pool: TextPool | None = None

    def ensure(self, i: int) -> None:
        """Raise RecordError if tensor i breaks a rule; checks it on the first call alone."""
        if i in self.checked:
            return
        if self._pool is None:
            self._pool = TextPool(self.index.text, self.index.memory)
        check_touched(self.index, self._header, i, self._pool)
        self.checked.add(i)


@dataclass(slots=True, eq=False)
class _PreparedViews:
    """By tensor, the parts of a view: layout, memory, and start there (-1: not known yet)."""

    layouts: list[Layout | None]
    memories: list[Any]
    starts: list[int]


class Archive:
    """An opened archive, another format's bytes under an index made for them, or a part of one.

    Threads may share it, and one of them may close it at any time: then all others get UnsupportedError. `verified` is
    "index" once the whole index is checked, "touch" where tensors are checked on use; `whole` is True for all bytes of
    an archive, `part_of` the archive of which this is a part; `tied` keeps names of tied tensors by their payload.
    """

    __slots__ = (
        "_checks", "_mappings", "_prepared", "_strings", "absolute", "embedded", "header", "index", "mode", "part_of",
        "path", "source", "tied", "verified", "whole",
    )  # fmt: skip

    def __init__(
        self, header: Header, index: Index, source: PayloadSource, *,
        verified: Literal["touch", "index"] = "index", embedded: Embedded | None = None, whole: bool = False,
        checks: TouchChecks | None = None, part_of: Archive | None = None,
    ) -> None:  # fmt: skip
        """Put header, index and source together; checks nothing."""
        self.path, self.absolute, self.mode = source.path, source.absolute, source.mode
        self.header, self.index, self.source = header, index, source
        self.verified, self.embedded, self.whole, self.part_of = verified, embedded, whole, part_of
        self.tied: dict[int, tuple[str, ...]] = {}
        self._checks: TouchChecks | None = checks or (TouchChecks(index, header) if verified == "touch" else None)
        self._strings: set[tuple[Place, int]] = set()  # payloads whose ends of strings were checked, and how many ends
        self._prepared: _PreparedViews | None = None
        self._mappings: list[weakref.ref[Any]] | None = None  # set on closing: the mappings that were open

    @classmethod
    def foreign(cls, memory: Memory, index: Index) -> Archive:
        """Return an archive over another format's file, by an index that was made of it, with all payloads inside."""
        source = source_in(memory, memory.octets, PayloadTable(index.payloads, False, 0))
        return cls(Header.of_payloads(len(memory.octets)), index, source)

    def _with_source(self, source: PayloadSource) -> Archive:
        """Return an archive with the same index over another source; checks made of one count for both."""
        archive = Archive(
            self.header, self.index, source, verified=self.verified, embedded=self.embedded, whole=self.whole,
            checks=self._checks, part_of=self.part_of,
        )  # fmt: skip
        archive._strings = self._strings
        return archive

    def shared(self) -> Archive:
        """Return another Archive over the same source; closing one leaves the other open."""
        return self._with_source(self.source)

    def private(self, numbers: Array | None = None) -> Archive:
        """Return the archive over a private copy of its bytes, in mode "c"; `numbers` are the payloads to be used."""
        if self.source.is_remote:
            self.ensure_all()  # all payloads are fetched
        try:
            return self._with_source(self.source.private(numbers))
        except RecordError as error:
            raise self.located(error) from error.__cause__

    def before_edits(self) -> Archive:
        """Return the read-only archive that this is a copy of, or itself; UnsupportedError if it was not kept."""
        if self.mode == "r":
            return self
        if (source := self.source.original) is None:
            fault = "may have been edited, and its original bytes were not kept; load it with verify='full'"
            raise UnsupportedError(fault, path=self.path)
        return self._with_source(source)

    def part(self, index: Index, numbers: Sequence[int]) -> Archive:
        """Return an archive with another index, whose payload i is payload `numbers[i]` of this one."""
        return Archive(self.header, index, PartSource(self.source, numbers), part_of=self)

    @property
    def root(self) -> Archive:
        """The archive that this is a part of, however deep; itself if it is no part."""
        return self if self.part_of is None else self.part_of.root

    @property
    def buffer(self) -> memoryview:
        """Header, index and trailer at their offsets, and all payloads that lie in the same memory; read-only."""
        return self.source.buffer

    @property
    def offset(self) -> int:
        """Offset of the archive in the file or buffer."""
        return self.source.offset

    @property
    def described(self) -> tuple[int, int]:
        """Start and end, in the file, of the bytes that identify it: an archive's index, another format's header."""
        start = self.source.offset + self.header.index_offset
        return start, start + self.header.index_size

    def ensure(self, i: int) -> None:
        """Raise RecordError, with the path, if tensor i breaks a rule; checks nothing twice."""
        if self.verified == "touch" and (checks := self._checks) is not None:
            try:
                checks.ensure(i)
            except RecordError as error:
                raise error.located(path=self.path) from None

    def ensure_all(self) -> None:
        """Raise RecordError if the index breaks a rule; checks all of it, unless that was done."""
        if self.verified == "touch":
            with located(path=self.path):
                check_crc(self.buffer, self.header)
                check_index(self.index, self.header)
            self.verified = "index"

    def find(self, name: str) -> int:
        """Return the number of the tensor with a full name, -1 without one; FormatError for a bad entry on the way."""
        try:
            target = name.encode()
        except UnicodeEncodeError:
            return -1
        ix, row_words = self.index, _ROW_WORDS
        text, size, count = ix.text, len(ix.text), len(ix.tensors)
        # Plain integers, at any address: 5 times faster than rows of an array.
        by_name = memoryview(ix.by_name.view(np.uint8).data).cast("I")
        words = memoryview(ix.tensors.view(np.uint8).data).cast("I")
        low, high = 0, count
        while low < high:
            middle = (low + high) >> 1
            i = by_name[middle]
            if i >= count:
                raise FormatError(f"by_name[{middle}] is {i}, of {count} tensors", path=self.path)
            start = words[row_words * i]
            end = start + words[row_words * i + 1]
            if end >= size or text[end]:
                self.ensure(i)  # raises: the name breaks R27
            candidate = text[start:end].tobytes()
            if candidate == target:
                self.ensure(i)
                return i
            if candidate < target:
                low = middle + 1
            else:
                high = middle
        return -1

    def early_view(self, _name: str) -> Any:
        """Return None; a deferred archive returns a view of a tensor as long as it has no index."""

    def with_index(self) -> Archive:
        """Return this archive; a deferred one makes its index, and returns the archive over it."""
        return self

    def row(self, i: int) -> TensorEntry:
        """Return the entry of tensor i; RecordError if it breaks a rule."""
        self.ensure(i)
        return self.index.tensor(i)

    def nbytes(self, row: TensorEntry) -> int:
        """Return the size in bytes of a tensor's elements: its payload's, unless strides pick some of them."""
        if row.payload == NONE:
            return 0
        if row.strides == NONE:
            return int(self.index.payloads[row.payload].item()[1])
        return dtypes.nbytes(prod(self.shape(row)), row.bits)

    def tensor_layout(self, row: TensorEntry) -> TensorLayout:
        """Return the layout of a tensor's elements in its payload, by its entry."""
        return TensorLayout(row.dtype, row.bits, self.shape(row), self.strides(row), row.byte_offset)

    def shape(self, row: TensorEntry) -> tuple[int, ...]:
        """Return the shape of a tensor by its entry."""
        return tuple(self.index.dims[row.dims : row.dims + row.rank].tolist())

    def strides(self, row: TensorEntry) -> tuple[int, ...] | None:
        """Return the strides of a tensor by its entry, in elements; None for C order."""
        start = row.strides
        return None if start == NONE else tuple(self.index.strides[start : start + row.rank].tolist())

    def payload(self, number: int) -> memoryview:
        """Return a payload's bytes, read-only: a view, of a split tensor a copy; empty for NONE."""
        if number == NONE:
            return memoryview(b"")
        try:
            return self.source.payload(number)
        except RecordError as error:
            raise self.located(error) from error.__cause__

    def blocks(self, number: int) -> Iterator[memoryview]:
        """Yield a payload's bytes, each block valid until the next; a split tensor is not put together."""
        return iter(()) if number == NONE else self.source.blocks(number)

    def place(self, number: int) -> Place:
        """Return a payload's file and its range there, which identify it: payloads of one place are the same bytes."""
        return _NOWHERE if number == NONE else self.source.place(number)

    def boxes(self, i: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return first indices and sizes, along each axis, of the boxes that tile tensor i; no rows if it is empty."""
        row = self.row(i)
        if row.payload == NONE:
            return np.zeros((0, row.rank), np.int64), np.zeros((0, row.rank), np.int64)
        try:
            return self.source.boxes(row.payload, self.shape(row), row.bits)
        except RecordError as error:
            raise error.located(path=self.path, tensor=self.index.name(i)) from error.__cause__

    def boxed_pieces(self, i: int, chosen: Sequence[int] | None = None) -> list[Piece]:
        """Return the pieces of a split tensor i, or those at `chosen` positions; FormatError for a wrong size."""
        row, (_, extent) = self.row(i), self.boxes(i)
        sizes = extent.tolist() if chosen is None else extent[list(chosen)].tolist()
        pieces = self.source.pieces(row.payload, chosen)
        for piece, size in zip(pieces, sizes, strict=True):
            if piece.nbytes != prod(size) * (row.bits >> 3):
                fault = "a piece of it has another size than its box"
                raise FormatError(fault, path=piece.source.path, tensor=self.index.name(i))
        return pieces

    def stored_nbytes(self) -> int:
        """Return the size of index and payloads in bytes, each range once; limits of memory are multiples of it."""
        return (self.header.index_size or self.header.archive_size) + self.source.stored_nbytes()

    def seal(self) -> bytes:
        """Return bytes that tell this archive from others: its source's seal, or else its header."""
        return self.source.seal() or self.header.encode()

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        """Have payloads of a remote archive in memory, all by default, each compared with its digest."""
        if numbers is None:
            self.ensure_all()
        try:
            self.source.fetch(None if numbers is None else [number for number in numbers if number != NONE])
        except RecordError as error:
            raise self.located(error) from error.__cause__

    def located(self, error: RecordError) -> RecordError:
        """Return an error of the source, completed by the path and the tensor whose payload its offset lies in."""
        if error.offset is not None and error.tensor is None and not self.source.file_names:
            ix, offset = self.index, error.offset - self.header.payload_offset
            starts, sizes = ix.payloads["offset"], ix.payloads["nbytes"]
            payloads: Any = np.flatnonzero((starts <= offset) & (offset - starts < sizes)) if offset >= 0 else ()
            users = np.flatnonzero(np.isin(ix.tensors["payload"], payloads)).tolist()
            error.located(tensor=ix.name(users[0]) if users else None)
        return error.located(path=self.path)

    def view(self, i: int) -> Any:
        """Return tensor i as an ndarray, PackedTensor or StringTensor over its bytes' memory, which it keeps alive."""
        prepared = self._prepared
        if prepared is not None and (start := prepared.starts[i]) >= 0:
            shape, dtype, strides = prepared.layouts[i]  # type: ignore[misc]  # it has a start
            return _ndarray(shape, dtype, prepared.memories[i], start, strides)
        row = self.row(i)
        layout = self.layout_of(row.dims, row.strides, row.dtype, row.bits, row.rank)
        if layout is None:
            return self._packed_or_strings(i, row)
        shape, dtype, strides = layout
        if row.payload == NONE:
            return np.frombuffer(b"" if self.mode == "r" else bytearray(), dtype).reshape(shape)
        octets, start = self._locate(i, row.payload)
        if prepared is not None:
            self._locate_neighbours(row.payload, prepared)
        return np.ndarray(shape, dtype, octets, start + row.byte_offset, strides)

    def layout_of(self, dims: int, strides: int, code: int, bits: int, rank: int) -> Layout | None:
        """Return the layout of a tensor whose entry has these fields; None if it is packed, of strings, or unknown."""
        dtype = numpy_type(code)
        if dtype is None or bits < 8:
            return None
        ix = self.index
        shape = tuple(ix.dims[dims : dims + rank].tolist())
        if strides == NONE:
            return shape, dtype, None
        return shape, dtype, tuple((ix.strides[strides : strides + rank] * (bits >> 3)).tolist())

    def layouts(self) -> list[Layout | None]:
        """Return the `layout_of` every tensor, in saved order; equal ones are one object."""
        return list(map(Layouts(self.layout_of).__getitem__, self.index.tensors.view(FORM)["form"].tolist()))

    def prepare_views(self) -> None:
        """Compute all layouts, so that views of many tensors take less time each; not at "touch". Opens no file."""
        if self._prepared is None and self.verified != "touch":
            layouts = self.layouts()
            self._prepared = _PreparedViews(layouts, [None] * len(layouts), [_UNKNOWN] * len(layouts))
            if isinstance(self.source, Closed):
                self._prepared = None  # another thread closed the archive meanwhile

    def _locate_neighbours(self, number: int, prepared: _PreparedViews) -> None:
        """Put memory and start of all tensors whose payloads lie in the same memory as this one into `prepared`."""
        memories, starts = prepared.memories, prepared.starts
        neighbours = self.source.neighbours(number)
        if neighbours is None:
            return
        octets, offsets = neighbours
        rows = self.index.tensors
        payload_starts = np.append(offsets, -1)[np.minimum(rows["payload"], len(offsets))]
        new = np.where(payload_starts < 0, _UNKNOWN, payload_starts + rows["byte_offset"].astype(np.int64))
        if (new >= 0).all() and None not in prepared.layouts:
            memories[:], starts[:] = [octets] * len(starts), new.tolist()
            return
        for i in np.flatnonzero(new >= 0).tolist():
            if prepared.layouts[i] is not None:
                memories[i] = octets
                starts[i] = int(new[i])  # after the memory: another thread may read both as soon as this is set

    def elements(self, i: int) -> np.ndarray[Any, Any]:
        """Return a view of a strided tensor of any type, known or not, as opaque elements of its width."""
        row = self.row(i)
        width = row.bits >> 3
        strides = tuple(stride * width for stride in self.strides(row) or ())
        octets, start = self._locate(i, row.payload)
        return np.ndarray(self.shape(row), np.dtype((np.void, width)), octets, start + row.byte_offset, strides)

    def _locate(self, i: int, number: int) -> tuple[memoryview, int]:
        """Return memory with the payload of tensor i, and its offset there; errors get path and tensor."""
        try:
            return self.source.locate(number)
        except RecordError as error:  # with an offset it is of this payload, else of a whole file
            name = None if error.offset is None else self.index.name(i)
            raise error.located(path=self.path, tensor=name) from error.__cause__

    def _packed_or_strings(self, i: int, row: TensorEntry) -> PackedTensor | StringTensor:
        """Return a view of a tensor of packed elements or of strings; UnsupportedError for an unknown type."""
        kind, name, shape, number = dtypes.by_code.get(row.dtype), self.index.name(i), self.shape(row), row.payload
        if kind is None:
            fault = f"dtype code {row.dtype} is not known; .raw(name) gives its bytes"
            raise UnsupportedError(fault, path=self.path, tensor=name)
        memory, start = (memoryview(b""), 0) if number == NONE else self._locate(i, number)
        octets = memory[start : start + self.nbytes(row)]
        if kind is not dtypes.STRING:
            return PackedTensor(np.frombuffer(octets, np.uint8), kind, shape)
        key = self.place(number), prod(shape)
        with located(path=self.path, tensor=name):
            strings = StringTensor(np.frombuffer(octets.toreadonly(), np.uint8), shape, checked=key in self._strings)
        self._strings.add(key)
        return strings

    def views(self) -> Iterator[Any]:
        """Return an iterator over views of all tensors, in saved order; remote payloads are fetched at once."""
        self.ensure_all()
        self.fetch()
        self.prepare_views()
        return map(self.view, range(len(self.index.tensors)))

    def names(self) -> list[str]:
        """Return every full name in saved order."""
        self.ensure_all()
        text, order, starts = self.index.text, self.index.by_name, self.index.tensors["name"]
        ends = starts.astype(np.int64) + self.index.tensors["name_size"]
        if len(order) and (starts[order[1:]] == ends[order[:-1]] + 1).all():  # as our writer has them: decode at once
            joined = str(text[int(starts[order[0]]) : int(ends[order[-1]])], "utf-8").split("\0")
            names = dict(zip(order.tolist(), joined, strict=True))
            return [names[i] for i in range(len(joined))]
        return [str(text[start:end], "utf-8") for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mode == "c":
            fault = "a record of mode 'c' may hold edits that its file does not; save it, or pickle single tensors"
            raise UnsupportedError(fault, path=self.path)
        if self.source.recipe is None:
            raise UnsupportedError("only records of archives can be pickled; convert the file", path=self.path)
        return self.source.recipe(self)

    def close(self) -> bool:
        """End all use of the archive; True if its mappings are released. Parts and views keep what they use."""
        if self._mappings is None:
            self._mappings = self.source.mappings()
            closed: Any = Closed(self.path)
            self.index = self.source = closed
            self._prepared = self._checks = self.part_of = None
        return all(mapping() is None for mapping in self._mappings)
