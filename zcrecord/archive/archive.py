"""An opened archive: a header, an index and a payload source, and views of its payloads. Copies no payload byte.

Every view keeps its memory, and with it the mapping, alive.
"""

from __future__ import annotations

import functools
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.blocks import BlockTable
from zcrecord.codec.conventions import CATALOGUE_TYPE, REFERENCES_TYPE
from zcrecord.codec.entries import TensorLayout
from zcrecord.codec.index import FORM, Index, Layout, Layouts, TensorEntry, decode, numpy_type
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
_UNKNOWN = -1  # in the place of a tensor's start in memory, until one of its neighbours is asked for
SourceIn = Callable[[Memory, memoryview, PayloadTable, int], FileSource]


def open_archive(
    memory: Memory,
    *,
    verify: Verify,
    embedded: Embedded | None = None,
    mode: Mode = "r",
    source_in: SourceIn = source_in,
) -> Archive:
    """Return the archive in `memory`, with the whole index checked, or ("touch") only what opening it needs.

    Payloads are not read, whatever `verify` says. In mode "c" the memory must be writable and nobody else's, and the
    index is checked in any case. `source_in` makes the payload source.
    """
    touch = verify == "touch" and mode == "r"  # in mode "c" all was read anyway, and a copy of each twin is planned now
    try:
        octets, header, offset = locate(memory.octets, embedded)
        if not touch:
            check_crc(octets, header)
        start = header.index_offset
        index = decode(octets.toreadonly()[start : start + header.index_size + HEADER_SIZE], header.index_size)
        (check_header if touch else check_index)(index, header)
        blocks = functools.cache(functools.partial(BlockTable, index))
        table = PayloadTable(index.payloads, bool(index.digest_kind), header.payload_offset, blocks)
        source = (PrivateSource if mode == "c" else source_in)(memory, octets, table, offset)
    except RecordError as error:
        raise error.located(path=memory.path) from None
    return Archive(header, index, source, verified="touch" if touch else "index", embedded=embedded, whole=True)


def check_crc(octets: memoryview, header: Header) -> None:
    """Raise IntegrityError unless an archive's index has the CRC that its header names."""
    if zlib.crc32(octets[header.index_offset : header.index_offset + header.index_size]) != header.index_crc:
        raise IntegrityError("index: its CRC does not match; the file is damaged, copy it again")


def is_catalogue(archive: Archive) -> bool:
    """Return True if an archive says that it is a catalogue; checks nothing else of it."""
    return has_type_name(archive, CATALOGUE_TYPE)


def names_files(archive: Archive) -> bool:
    """Return True if an archive says that its payloads lie in other files; another format's file cannot say so."""
    return archive.whole and (is_catalogue(archive) or has_type_name(archive, REFERENCES_TYPE))


def has_type_name(archive: Archive, type_name: str) -> bool:
    """Return True if module 0 of an archive has a type name that ends in NUL (R27); checks nothing else of it."""
    rows, name = archive.index.modules[:1], f"{type_name}\0".encode()
    spans = zip(rows["type_name"].tolist(), rows["type_name_size"].tolist(), strict=True)
    return any(size + 1 == len(name) and archive.index.text[at : at + size + 1] == name for at, size in spans)


def takes_archive(archive: Archive, user: str) -> None:
    """Raise UnsupportedError for a file of another format, which `user`, a phrase, does not take."""
    if not archive.whole and archive.part_of is None and not archive.source.file_names:
        name = printable(os.path.basename(archive.path or "model"))
        index = f"zcrecord index {name} model.zcr, which keeps the file, or " if user == "sign" else ""
        advice = f"make one by {index}zcrecord convert {name} model.zcr, and use model.zcr"
        raise UnsupportedError(f"is a file of another format, and {user} takes an archive; {advice}", path=archive.path)


def takes_one_file(archive: Archive, user: str) -> None:
    """Raise UnsupportedError for a catalogue, or a file of another format; `user`, a phrase, takes one archive file."""
    takes_archive(archive, user)
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
        self._pool: Any = None

    def ensure(self, i: int) -> None:
        """Check tensor i, unless that was done."""
        if i in self.checked:
            return
        if self._pool is None:
            self._pool = self.index.pool()
        check_touched(self.index, self._header, i, self._pool)
        self.checked.add(i)


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
        self,
        header: Header,
        index: Index,
        source: PayloadSource,
        *,
        verified: Literal["touch", "index"] = "index",
        embedded: Embedded | None = None,
        whole: bool = False,
        checks: TouchChecks | None = None,
        part_of: Archive | None = None,
    ) -> None:
        """Put header, index and source together; checks nothing."""
        self.path, self.absolute, self.mode = source.path, source.absolute, source.mode
        self.header, self.index, self.source = header, index, source
        self.verified, self.embedded, self.whole, self.part_of = verified, embedded, whole, part_of
        self.tied: dict[int, tuple[str, ...]] = {}
        self._checks: TouchChecks | None = checks or (TouchChecks(index, header) if verified == "touch" else None)
        self._strings: set[tuple[Place, int]] = set()  # payloads whose ends of strings were checked, and how many ends
        self._prepared: tuple[list[Layout | None], list[Any], list[int]] | None = None
        self._mappings: list[weakref.ref[Any]] | None = None  # of a closed archive, those that it had open

    @classmethod
    def foreign(cls, memory: Memory, index: Index) -> Archive:
        """Return an archive over another format's bytes, by an index whose maker checked that payloads lie inside."""
        header = Header(1, 1, 0, 0, 0, len(memory.octets), 0)
        return cls(header, index, source_in(memory, memory.octets, PayloadTable(index.payloads, False, 0)))

    def _with_source(self, source: PayloadSource) -> Archive:
        out = Archive(self.header, self.index, source, verified=self.verified, whole=self.whole, part_of=self.part_of)
        out.embedded, out._checks, out._strings = self.embedded, self._checks, self._strings
        return out

    def shared(self) -> Archive:
        """Return this archive once more, to be closed by itself: parts outlive their record."""
        return self._with_source(self.source)

    def private(self, numbers: Array | None = None) -> Archive:
        """Return the same archive over a private copy of its bytes, as `PayloadSource.private` makes it."""
        if self.source.is_remote:
            self.ensure_all()  # all payloads are fetched
        try:
            return self._with_source(self.source.private(numbers))
        except RecordError as error:
            raise self.located(error) from error.__cause__

    def before_edits(self) -> Archive:
        """Return the archive without the edits of a private copy; UnsupportedError if the original was not kept."""
        if self.mode == "r":
            return self
        if (source := self.source.original) is None:
            fault = "may have been edited, and its original bytes were not kept; load it with verify='full'"
            raise UnsupportedError(fault, path=self.path)
        return self._with_source(source)

    def part(self, index: Index, numbers: Sequence[int]) -> Archive:
        """Return an archive with another index, whose payloads are those of this one that have these numbers."""
        return Archive(self.header, index, PartSource(self.source, numbers), part_of=self)

    @property
    def root(self) -> Archive:
        """The archive that this is a part of, or itself."""
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
        """The range of the file that identifies it: of an archive its index, of a referenced file its header."""
        h = self.header
        start = self.source.offset + h.index_offset
        return start, start + h.index_size

    def ensure(self, i: int) -> None:
        """Check tensor i, unless it was checked at open or on an earlier use."""
        if self.verified == "touch" and (checks := self._checks) is not None:
            try:
                checks.ensure(i)
            except RecordError as error:
                raise error.located(path=self.path) from None

    def ensure_all(self) -> None:
        """Check the whole index, modules, attributes and order included, unless that was done."""
        if self.verified == "touch":
            with located(path=self.path):
                check_crc(self.buffer, self.header)
                check_index(self.index, self.header)
            self.verified = "index"

    def find(self, name: str) -> int:
        """Return the tensor with that full name, -1 if there is none, by FORMAT.md's search at level `touch`."""
        try:
            target = name.encode()
        except UnicodeEncodeError:
            return -1
        ix = self.index
        text, size, count = ix.text, len(ix.text), len(ix.tensors)
        # Plain integers, at any address: 5 times faster than rows of an array.
        by_name = memoryview(ix.by_name.view(np.uint8).data).cast("I")
        words = memoryview(ix.tensors.view(np.uint8).data).cast("I")
        lo, hi = 0, count
        while lo < hi:
            mid = (lo + hi) >> 1
            i = by_name[mid]
            if i >= count:
                raise FormatError(f"by_name[{mid}] is {i}, of {count} tensors", path=self.path)
            start = words[12 * i]
            end = start + words[12 * i + 1]
            if end >= size or text[end]:
                self.ensure(i)  # raises: the name breaks R27
            candidate = text[start:end].tobytes()
            if candidate == target:
                self.ensure(i)
                return i
            if candidate < target:
                lo = mid + 1
            else:
                hi = mid
        return -1

    def early(self, _name: str) -> Any:
        """Return None; a deferred archive returns a view of a tensor while it has no index yet."""

    def made(self) -> Archive:
        """Return this archive; a deferred one makes its index, and returns the archive."""
        return self

    def row(self, i: int) -> TensorEntry:
        """Return the entry of tensor i, checked."""
        self.ensure(i)
        return self.index.tensor(i)

    def nbytes(self, row: TensorEntry) -> int:
        """Return the bytes of a tensor's own elements: its payload's, unless strides pick some of them."""
        if row.payload == NONE:
            return 0
        if row.strides == NONE:
            return int(self.index.payloads[row.payload].item()[1])
        return dtypes.nbytes(prod(self.shape(row)), row.bits)

    def tensor_layout(self, row: TensorEntry) -> TensorLayout:
        """Return the layout of a tensor's elements in its payload."""
        return TensorLayout(row.dtype, row.bits, self.shape(row), self.strides(row), row.byte_offset)

    def shape(self, row: TensorEntry) -> tuple[int, ...]:
        """Return the shape a row names."""
        start = row.dims
        return tuple(self.index.dims[start : start + row.rank].tolist())

    def strides(self, row: TensorEntry) -> tuple[int, ...] | None:
        """Return the strides a row names, in elements; None for C order."""
        start = row.strides
        return None if start == NONE else tuple(self.index.strides[start : start + row.rank].tolist())

    def payload(self, number: int) -> memoryview:
        """Return a payload's bytes; a read-only view, of a split tensor a copy. NONE gives an empty one."""
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
        """Return the identity of a payload, its file and its range there. Payloads of one place are the same bytes."""
        return _NOWHERE if number == NONE else self.source.place(number)

    def boxes(self, i: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return first indices and sizes of the pieces that tile tensor i, a row for each; none if it is empty."""
        row = self.row(i)
        if row.payload == NONE:
            return np.zeros((0, row.rank), np.int64), np.zeros((0, row.rank), np.int64)
        try:
            return self.source.boxes(row.payload, self.shape(row), row.bits)
        except RecordError as error:
            raise error.located(path=self.path, tensor=self.index.name(i)) from error.__cause__

    def boxed_pieces(self, i: int, chosen: Sequence[int] | None = None) -> list[Piece]:
        """Return the pieces of a split tensor i, or some of them, each of its box's size; opens their files."""
        row, (_, extent) = self.row(i), self.boxes(i)
        sizes = extent.tolist() if chosen is None else extent[list(chosen)].tolist()
        pieces = self.source.pieces(row.payload, chosen)
        for piece, size in zip(pieces, sizes, strict=True):
            if piece.nbytes != prod(size) * (row.bits >> 3):
                fault = "a piece of it has another size than its box"
                raise FormatError(fault, path=piece.source.path, tensor=self.index.name(i))
        return pieces

    def stored_nbytes(self) -> int:
        """Return the bytes of the index and of the payloads, each range once: limits of memory are multiples of it."""
        return (self.header.index_size or self.header.archive_size) + self.source.stored_nbytes()

    def seal(self) -> bytes:
        """Return the bytes that tell this archive from others: its header, or the SHA-256 that its source has."""
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
        """Return an error of the source with the path, and the tensor whose payload its offset lies in."""
        if error.offset is not None and error.tensor is None and not self.source.file_names:
            ix, at = self.index, error.offset - self.header.payload_offset
            starts, sizes = ix.payloads["offset"], ix.payloads["nbytes"]
            payloads: Any = np.flatnonzero((starts <= at) & (at - starts < sizes)) if at >= 0 else ()
            users = np.flatnonzero(np.isin(ix.tensors["payload"], payloads)).tolist()
            error.located(tensor=ix.name(users[0]) if users else None)
        return error.located(path=self.path)

    def view(self, i: int) -> Any:
        """Return tensor i as an ndarray, PackedTensor or StringTensor over the memory its bytes lie in."""
        prepared = self._prepared
        if prepared is not None:
            layouts, memories, starts = prepared
            if (start := starts[i]) >= 0:
                shape, kind, strides = layouts[i]  # type: ignore[misc]  # it has a start
                return _ndarray(shape, kind, memories[i], start, strides)
        row = self.row(i)
        number = row.payload
        layout = self.layout_of(row.dims, row.strides, row.dtype, row.bits, row.rank)
        if layout is None:
            return self._special(i, row)
        shape, kind, strides = layout
        if number == NONE:
            return np.frombuffer(b"" if self.mode == "r" else bytearray(), kind).reshape(shape)
        octets, start = self._locate(i, number)
        if prepared is not None:
            self._fill(number, prepared)
        return np.ndarray(shape, kind, octets, start + row.byte_offset, strides)

    def layout_of(self, dims: int, strides: int, code: int, bits: int, rank: int) -> Layout | None:
        """Return shape, dtype and strides of an ndarray with these entries in its row; None for other tensors."""
        kind = numpy_type(code)
        if kind is None or bits < 8:
            return None
        ix = self.index
        shape = tuple(ix.dims[dims : dims + rank].tolist())
        if strides == NONE:
            return shape, kind, None
        return shape, kind, tuple((ix.strides[strides : strides + rank] * (bits >> 3)).tolist())

    def layouts(self) -> list[Layout | None]:
        """Return shape, dtype and strides of every tensor that is an ndarray, each distinct one made once."""
        return list(map(Layouts(self.layout_of).__getitem__, self.index.tensors.view(FORM)["form"].tolist()))

    def prepare_views(self) -> None:
        """Prepare for views of all tensors, which makes each a fraction of the work; not at "touch". Opens no file."""
        if self._prepared is None and self.verified != "touch":
            layouts = self.layouts()
            self._prepared = layouts, [None] * len(layouts), [_UNKNOWN] * len(layouts)
            if isinstance(self.source, Closed):
                self._prepared = None  # another thread closed the archive meanwhile

    def _fill(self, number: int, prepared: tuple[list[Layout | None], list[Any], list[int]]) -> None:
        """Fill in the places of all tensors whose payloads lie in the same memory as a payload."""
        layouts, memories, starts = prepared
        neighbours = self.source.neighbours(number)
        if neighbours is None:
            return
        octets, offsets = neighbours
        rows = self.index.tensors
        at = np.append(offsets, -1)[np.minimum(rows["payload"], len(offsets))]
        places = np.where(at < 0, _UNKNOWN, at + rows["byte_offset"].astype(np.int64))
        if (places >= 0).all() and None not in layouts:
            memories[:], starts[:] = [octets] * len(starts), places.tolist()
            return
        for i in np.flatnonzero(places >= 0).tolist():
            if layouts[i] is not None:
                memories[i] = octets
                starts[i] = int(places[i])  # last: another thread may read it now

    def elements(self, i: int) -> np.ndarray[Any, Any]:
        """Return a strided tensor of any type as opaque elements of its width."""
        row = self.row(i)
        item = row.bits >> 3
        strides = tuple(s * item for s in self.strides(row) or ())
        octets, start = self._locate(i, row.payload)
        return np.ndarray(self.shape(row), np.dtype((np.void, item)), octets, start + row.byte_offset, strides)

    def _locate(self, i: int, number: int) -> tuple[memoryview, int]:
        try:
            return self.source.locate(number)
        except RecordError as error:  # of a payload, if it has an offset; else of a file
            name = None if error.offset is None else self.index.name(i)
            raise error.located(path=self.path, tensor=name) from error.__cause__

    def _special(self, i: int, row: TensorEntry) -> PackedTensor | StringTensor:
        """Return a tensor of packed elements or of strings."""
        kind, name, shape, number = dtypes.by_code.get(row.dtype), self.index.name(i), self.shape(row), row.payload
        if kind is None:
            fault = f"dtype code {row.dtype} is not known; .raw(name) gives its bytes"
            raise UnsupportedError(fault, path=self.path, tensor=name)
        memory, at = (memoryview(b""), 0) if number == NONE else self._locate(i, number)
        octets = memory[at : at + self.nbytes(row)]
        if kind is not dtypes.STRING:
            return PackedTensor(np.frombuffer(octets, np.uint8), kind, shape)
        key = self.place(number), prod(shape)
        with located(path=self.path, tensor=name):
            strings = StringTensor(np.frombuffer(octets.toreadonly(), np.uint8), shape, checked=key in self._strings)
        self._strings.add(key)
        return strings

    def views(self) -> Iterator[Any]:
        """Yield every tensor in saved order, at a fraction of the cost of a first lookup each."""
        self.ensure_all()
        self.fetch()
        self.prepare_views()
        return map(self.view, range(len(self.index.tensors)))

    def names(self) -> list[str]:
        """Return every full name in saved order."""
        self.ensure_all()
        text, order, starts = self.index.text, self.index.by_name, self.index.tensors["name"]
        ends = starts.astype(np.int64) + self.index.tensors["name_size"]
        if len(order) and (starts[order[1:]] == ends[order[:-1]] + 1).all():  # as our writer lays them: decoded at once
            joined = str(text[int(starts[order[0]]) : int(ends[order[-1]])], "utf-8").split("\0")
            names = dict(zip(order.tolist(), joined, strict=True))
            return [names[i] for i in range(len(joined))]
        return [str(text[a:b], "utf-8") for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mode == "c":
            fault = "a record of mode 'c' may hold edits that its file does not; save it, or pickle single tensors"
            raise UnsupportedError(fault, path=self.path)
        if self.source.recipe is None:
            raise UnsupportedError("only records of archives can be pickled; convert the file", path=self.path)
        return self.source.recipe(self)

    def close(self) -> bool:
        """End all use of the archive; parts and views keep what they use. Returns True if its mappings are released."""
        if self._mappings is None:
            self._mappings = self.source.mappings()
            closed: Any = Closed(self.path)
            self.index = self.source = closed
            self._prepared = self._checks = self.part_of = None
        return all(mapping() is None for mapping in self._mappings)
