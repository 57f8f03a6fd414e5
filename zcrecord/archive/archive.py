"""An opened archive: its bytes, its index, and views of its payloads. Copies no payload byte in mode "r".

Computes the memory range of each view; every view keeps the mapping open. `codec.verify` checks the rules of the
index, `digest` the bytes of payloads.
"""

from __future__ import annotations

import errno
import os
import weakref
import zlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Literal

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.conventions import CATALOGUE_TYPE
from zcrecord.codec.index import FORM, NUMPY, Index, Layout, Layouts, TensorEntry, decode
from zcrecord.codec.layout import NONE, Header, locate
from zcrecord.codec.verify import check_header, check_index, check_touched
from zcrecord.errors import FormatError, IntegrityError, RecordError, UnsupportedError, printable
from zcrecord.storage.memory import Memory, Mode
from zcrecord.tensors.packed import PackedTensor, StringTensor

from .private_copy import Twins, check_apart, private_memory, twins_nbytes, twins_of
from .released import Released, closed

__all__ = [
    "Archive", "Embedded", "Place", "Progress", "Verify", "check_crc", "is_catalogue",
    "open_archive", "takes_one_file",
]  # fmt: skip

Embedded = Literal["prefix", "suffix"]
Progress = Callable[[int, int], None]
Verify = Literal["touch", "index", "full"]

_ndarray = np.ndarray  # found sooner than an attribute of numpy: a tenth of the time of a view
Place = tuple[int, int, int]  # a file, by its number, and the offset and size of a range of bytes in it
_NOWHERE: Place = (-1, 0, 0)  # the place of no bytes


def open_archive(memory: Memory, *, verify: Verify, embedded: Embedded | None = None, mode: Mode = "r") -> Archive:
    """Return the archive in `memory`, with the whole index checked, or ("touch") only what opening it needs.

    Payloads are not read, whatever `verify` says. In mode "c" the memory must be writable and nobody else's, and the
    index is checked in any case.

    Raises:
        FormatError: a rule is broken. IntegrityError: the index has another CRC. LimitError: a limit of the format is
        passed; or equal tensors, each by itself, would take out of all proportion to the archive.
    """
    touch = verify == "touch" and mode == "r"  # in mode "c" all of it was read anyway, and twins are told apart now
    try:
        octets, header, offset = locate(memory.octets, embedded)
        if not touch:
            check_crc(octets, header)
        index = decode(octets.toreadonly()[header.index_offset :], header.index_size)
        (check_header if touch else check_index)(index, header)
        how: dict[str, Any] = {"offset": offset, "mode": mode, "embedded": embedded, "whole": True}
        archive = Archive(memory, octets, header, index, verified="touch" if touch else "index", **how)
        if mode == "c":
            check_apart(twins_nbytes(index, len(octets)), len(octets), None)
            for number in twins_of(index).tolist():
                archive.home(number)  # before the first can be edited: nothing keeps the bytes as they were
    except RecordError as error:
        raise error.located(path=memory.path) from None
    return archive


def check_crc(octets: memoryview, header: Header) -> None:
    """Raise IntegrityError unless an archive's index has the CRC that its header names."""
    if zlib.crc32(octets[header.index_offset : header.index_offset + header.index_size]) != header.index_crc:
        raise IntegrityError("index: its CRC does not match; the file is damaged, copy it again")


def is_catalogue(archive: Archive) -> bool:
    """Return True if an archive says that it is a catalogue, by a name that keeps R27; checks nothing else of it."""
    rows, name = archive.index.modules[:1], f"{CATALOGUE_TYPE}\0".encode()
    spans = zip(rows["type_name"].tolist(), rows["type_name_size"].tolist(), strict=True)
    return any(size + 1 == len(name) and archive.index.text[at : at + size + 1] == name for at, size in spans)


def takes_one_file(archive: Archive, what: str) -> None:
    """Raise UnsupportedError if an archive is a catalogue, for `what`, which takes all bytes in one file."""
    if not archive.shard_names and not is_catalogue(archive):
        return
    name = printable(os.path.basename(archive.path or "model.zcr"))
    advice = f"zcrecord convert {name} one.zcr makes one archive of it"
    raise UnsupportedError(f"is a catalogue of shards, and {what} takes one archive; {advice}", path=archive.path)


class Archive:
    """An opened archive, another format's bytes under an index made for them, or a part of one.

    Attributes:
        path: the file, as it was named and as errors tell it.
        absolute: its absolute path, by which it is opened again; None where the bytes are no local file's.
        buffer: all bytes of the archive, read-only; every view keeps it, and with it the mapping, alive.
        header: the sealed header, or the trailer where the header is not sealed.
        offset: where the archive starts in the file or buffer.
        mode: "r", or "c" where views may be written, to a private copy.
        verified: "index" once the whole index is checked; "touch" where each tensor is checked when it is used.
        embedded: how the archive was found among other bytes.
        whole: whether the bytes are an archive's from end to end, and not part of one or another format's.
        original: the read-only archive that a private copy is of.
        parent: the archive whose payloads these are some of, and their numbers there.
        recipe: gives for this archive a function and its arguments, which open it again, as pickle takes them; None
            where nothing is known to open.
        remote: fetches payloads, and reads by position, where not all bytes are in memory; None where they are.
        tied: the names of the tensors of one payload, by its number, as far as they were asked for.

    Another thread may release it at any time: code that makes views reads `_octets` first, and the index after it.
    """

    __slots__ = (
        "_checked", "_mappings", "_memory", "_octets", "_pool", "_prepared", "_strings", "_twins", "absolute", "buffer",
        "embedded", "header", "index", "mode", "offset", "original", "parent", "path", "recipe", "remote", "tied",
        "verified", "whole",
    )  # fmt: skip

    def __init__(
        self,
        memory: Memory,
        octets: memoryview,
        header: Header,
        index: Index,
        *,
        offset: int = 0,
        mode: Mode = "r",
        verified: Literal["touch", "index"] = "index",
        embedded: Embedded | None = None,
        whole: bool = False,
        original: Archive | None = None,
    ) -> None:
        """Take over `memory`, of which `octets` are the archive's own bytes; checks nothing."""
        self.path, self.absolute, self.remote = memory.path, memory.absolute, memory.remote
        self.header, self.index, self.offset, self.mode = header, index, offset, mode
        self.verified, self.embedded, self.whole, self.original = verified, embedded, whole, original
        self.parent: tuple[Archive, list[int]] | None = None
        self.recipe: Callable[[Archive], tuple[Any, ...]] | None = None
        self.tied: dict[int, tuple[str, ...]] = {}
        self.buffer = octets.toreadonly()
        # ndarray(buffer=memoryview) keeps what the memoryview is of: here an array that holds the buffer's export.
        writable = (self.buffer if mode == "r" else octets)[header.payload_offset :]
        self._octets: memoryview = np.frombuffer(writable, np.uint8).data
        self._memory: Memory | None = memory
        self._mappings: list[weakref.ref[Any]] = [] if memory.mapping is None else [weakref.ref(memory.mapping)]
        self._pool: Any = None  # with `_checked` for level "touch"
        self._checked: set[int] = set()
        self._strings: set[tuple[Place, int]] = set()  # payloads whose ends of strings were checked, and how many ends
        self._prepared: tuple[memoryview, list[Layout | None], list[int]] | None = None
        self._twins: Twins | None = None
        if mode == "c":
            source = self if original is None else original
            self._twins = Twins(index, source.buffer, header.payload_offset, self._mappings)

    @classmethod
    def foreign(cls, memory: Memory, index: Index) -> Archive:
        """Return an archive over another format's bytes, by an index made for it, whose payloads are offsets in them.

        The index is taken for granted: its maker has checked that every payload lies inside.
        """
        return cls(memory, memory.octets, Header(1, 1, 0, 0, 0, len(memory.octets), 0), index)

    def private(self) -> Archive:
        """Return the same archive over a private copy of its bytes, which may be written and which nobody else sees.

        Of a mapped file it is a mapping whose pages are copied when they are written, of bytes in memory a whole copy.

        Raises:
            SourceError: the file was replaced since it was opened. LimitError: equal tensors, each by itself, would
            take out of all proportion to the archive.
        """
        nbytes = self.opened_nbytes()
        check_apart(twins_nbytes(self.index, nbytes), nbytes, self.path)
        self.bring()
        return self._private()

    def _private(self) -> Archive:
        if self.parent is not None:
            whole, numbers = self.parent
            return whole._private().part(self.index, numbers)
        memory = self.private_memory()
        how: dict[str, Any] = {"offset": self.offset, "embedded": self.embedded, "whole": self.whole}
        out = Archive(
            memory, memory.octets, self.header, self.index, mode="c", verified=self.verified, original=self, **how
        )
        out._checked, out._strings, out._pool = self._checked, self._strings, self._pool
        return out

    def private_memory(self) -> Memory:
        """Return a private copy of the archive's bytes.

        Raises:
            SourceError: the file was replaced since it was opened.
        """
        return private_memory(self.held(), self.buffer, self.offset, self.mapped)._replace(path=self.path)

    def _map_again(self) -> Memory | None:
        original = self.original
        return original.private_memory() if original is not None and original.mapped else None

    def part(self, index: Index, numbers: list[int]) -> Archive:
        """Return an archive with another index, whose payloads are those of this one that have these numbers."""
        self.held()
        memory = Memory(self.buffer, self.path, remote=self.remote, absolute=self.absolute)
        out = Archive(memory, self.buffer, self.header, index, offset=self.offset, mode=self.mode)
        out.parent, out._mappings, out._twins = (self, numbers), self._mappings, None
        return out

    def parts_by_file(self) -> list[Archive]:
        """Return parts by file: itself; of a catalogue one for each shard, without modules, some perhaps in memory."""
        return [self]

    def files(self) -> list[tuple[int, Callable[[], Archive]]]:
        """Return size and opener of each archive that verification reads: itself; of a catalogue itself and its shards.

        Of a part of a catalogue they are parts of those that it lies in.
        """
        return [(self.header.archive_size, lambda: self)]

    @property
    def shard_names(self) -> list[str]:
        """The file names of a catalogue's shards; none of any other archive."""
        return []

    def file_of(self, _number: int) -> str | None:
        """Return the name of the shard that a payload of a catalogue lies in, whole; None of any other archive."""
        return None

    def kept(self) -> Archive:
        """Return this archive once more, over the same memory, to be released by itself: parts outlive their record."""
        out = Archive.__new__(Archive)
        for name in filter("index".__ne__, Archive.__slots__):
            setattr(out, name, getattr(self, name))
        out.index = self.index  # last: if another thread releases this one meanwhile, it goes first
        out.original = out.original and out.original.kept()
        return out

    @property
    def mapped(self) -> bool:
        """True if its bytes are those of a mapped file, and nobody can have written to them."""
        held = self.held()
        return held.mapping is not None and held.identity is not None and held.octets.readonly

    @property
    def gone(self) -> bool:
        """True if the mapped file was replaced or removed at its path; the mapping is as it was."""
        held = self.root.held()
        if held.identity is None or held.absolute is None:
            return False
        try:
            now = os.stat(held.absolute)
        except OSError as error:  # any other failure is raised when the file is opened
            return error.errno in (errno.ENOENT, errno.ENOTDIR)
        return (now.st_dev, now.st_ino) != held.identity[:2]

    @property
    def file(self) -> tuple[str, tuple[int, ...]] | None:
        """Absolute path and identity of the mapped file whose very bytes these are; None for others, or if edited.

        An offset in the archive is an offset in that file once `self.offset` is added.
        """
        root = self.root
        held = root.held()
        return (held.absolute, held.identity) if root.mapped and held.absolute is not None and held.identity else None

    @property
    def root(self) -> Archive:
        """The archive that this is a part of, or itself."""
        return self if self.parent is None else self.parent[0].root

    def held(self) -> Memory:
        """Return the memory of the whole file or buffer; raises UnsupportedError if the archive was released."""
        if self._memory is None:
            raise closed(self.path)
        return self._memory

    @property
    def mapping(self) -> Any:
        """The mapping of the whole file; None where the bytes are not a mapped file's, or not as they are there."""
        whole = self.root
        return whole.held().mapping if (whole.original or whole).mapped else None

    def ensure(self, i: int) -> None:
        """Check tensor i unless that was done, at open or when it was touched before."""
        if self.verified != "touch" or i in self._checked:
            return
        if self._pool is None:
            self._pool = self.index.pool()
        try:
            check_touched(self.index, self.header, i, self._pool)
        except RecordError as error:
            raise error.located(path=self.path) from None
        self._checked.add(i)

    def ensure_all(self) -> None:
        """Check the whole index, modules, attributes and order included, unless that was done."""
        if self.verified != "touch":
            return
        try:
            check_crc(self.buffer, self.header)
            check_index(self.index, self.header)
        except RecordError as error:
            raise error.located(path=self.path) from None
        self.verified = "index"

    def find(self, name: str) -> int:
        """Return the tensor with that full name, -1 if there is none, by FORMAT.md's search at level `touch`."""
        try:
            wanted = name.encode()
        except UnicodeEncodeError:
            return -1
        ix = self.index
        text, size, count = ix.text, len(ix.text), len(ix.tensors)
        by_name, words = _integers(ix.by_name), _integers(ix.tensors)
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
            found = text[start:end].tobytes()
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
            return self.buffer[:0]
        if self.remote is not None:
            self.bring([number])
        offset, nbytes, _ = self.index.payloads[number].item()
        if self.mode == "c":
            octets, at = self.home(number)
            return octets[at : at + nbytes].toreadonly()
        start = self.header.payload_offset + offset
        return self.buffer[start : start + nbytes]

    def place_of(self, number: int) -> Place:
        """Return the identity of a payload: its file and its range there. Payloads of one place are the same bytes.

        Nothing else tells so: an offset in an index is an address within one layout, and of a catalogue two payloads of
        one offset may lie in two files. In mode "c" each payload is memory of its own, and so a file of its own.
        """
        if number == NONE:
            return _NOWHERE
        if self.mode == "c":
            return number, 0, 0
        offset, nbytes, _ = self.index.payloads[number].item()
        return 0, offset, nbytes

    def stored_nbytes(self) -> int:
        """Return the bytes of the index and of the payloads, each range once; of foreign bytes, those of the file.

        Holes do not count, and neither do sizes that nothing holds: what work a record may ask for is measured by it.
        """
        rows = self.index.payloads
        _, first = np.unique(rows["offset"], return_index=True)
        return (self.header.index_size or self.header.archive_size) + int(rows["nbytes"][first].sum(dtype=np.uint64))

    def opened_nbytes(self) -> int:
        """Return the bytes of the archive, of a catalogue those of the shards that are open."""
        return len(self.buffer)

    def seal(self) -> bytes:
        """Return the bytes that tell this archive from others: its header; of a catalogue the SHA-256 of all of it."""
        return self.header.encode()

    def pins(self) -> dict[Any, Any]:
        """Return the SHA-256 digests that payloads of a remote archive had when all of it was hashed, for `pin`."""
        return {} if self.remote is None else self.remote.pins

    def pin(self, pins: dict[Any, Any]) -> None:
        """Compare payloads of a remote archive, whenever they are fetched, with what they were then.

        Raises:
            IntegrityError: they are those of a catalogue, or of another one.
        """
        if any(isinstance(key, str) for key in pins):
            raise IntegrityError("is not the catalogue that was checked; it was replaced since", path=self.path)
        if self.remote is not None:
            self.remote.pin(pins)

    def pieces_of(self, number: int) -> list[tuple[Archive, int]]:
        """Return the archives in which a payload is stored, piece by piece, and its numbers there."""
        return [(self, number)]

    def split(self, number: int) -> Iterator[memoryview] | None:  # noqa: ARG002  # a catalogue looks it up
        """Return the bytes of a payload in several pieces, block by block; None: it is in one, as all are here."""
        return None

    def bring(self, numbers: list[int] | None = None) -> None:
        """Fetch payloads of a remote archive (all by default) and check their digests; does nothing for a local one.

        Raises:
            SourceError: they cannot be had. IntegrityError: a digest does not match.
        """
        remote = self.remote
        if remote is None:
            return
        if numbers is None:
            self.ensure_all()
        ix = self.index
        rows = (ix.payloads if numbers is None else ix.payloads[numbers]).tolist()
        base, known = self.header.payload_offset, bool(ix.digest_kind)
        try:
            remote.bring([(base + offset, nbytes, digest if known else None) for offset, nbytes, digest in rows])
        except RecordError as error:
            at = None if error.offset is None else error.offset - base
            used = ix.payloads["offset"][np.minimum(ix.tensors["payload"], max(len(ix.payloads) - 1, 0))]
            user = [] if at is None else np.flatnonzero((used == at) & (ix.tensors["payload"] != NONE)).tolist()
            name = ix.name(user[0]) if user else None
            raise error.located(path=self.path, tensor=name) from error.__cause__

    def view(self, i: int) -> Any:
        """Return tensor i as an ndarray, PackedTensor or StringTensor over the archive's own bytes."""
        prepared = self._prepared
        if prepared is not None:
            octets, layouts, offsets = prepared
            if (layout := layouts[i]) is not None:
                shape, kind, strides = layout
                return _ndarray(shape, kind, octets, offsets[i], strides)
        row = self.row(i)
        number = row.payload
        layout = self.layout_of(row.dims, row.strides, row.dtype, row.bits, row.rank)
        if layout is None:
            return self._special(i, dtypes.by_code.get(row.dtype), number, self.shape(row))
        shape, kind, strides = layout
        if number == NONE:
            return np.frombuffer(b"" if self.mode == "r" else bytearray(), kind).reshape(shape)
        octets, start = self.home(number)
        return np.ndarray(shape, kind, octets, start + row.byte_offset, strides)

    def layout_of(self, dims: int, strides: int, code: int, bits: int, rank: int) -> Layout | None:
        """Return shape, dtype and strides of an ndarray with these entries in its row; None for other tensors."""
        kind = NUMPY[code]
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
        """Prepare for views of all tensors, each of which then takes a fraction of the time; 48 bytes for each.

        Does nothing at level "touch", where each tensor is checked on use. All payloads of a remote archive must have
        been fetched.
        """
        if self._prepared is not None or self.verified == "touch":
            return
        octets, ix = self._octets, self.index
        rows = ix.tensors
        near = rows["payload"] != NONE
        if self.mode == "c":
            near &= False if self._twins is None else self._twins.are_at_home(rows["payload"])
        layouts = self.layouts()
        for i in np.flatnonzero(~near).tolist():
            layouts[i] = None
        offsets = rows["byte_offset"].copy()
        offsets[near] += ix.payloads["offset"][rows["payload"][near]]
        self._prepared = octets, layouts, offsets.tolist()
        if self._memory is None:
            self._prepared = None  # another thread released the archive meanwhile

    def elements(self, i: int) -> np.ndarray[Any, Any]:
        """Return a strided tensor as opaque elements of its width; unlike a view, whatever its type."""
        row = self.row(i)
        item = row.bits >> 3
        strides = tuple(s * item for s in self.strides(row) or ())
        octets, start = self.home(row.payload)
        return np.ndarray(self.shape(row), np.dtype((np.void, item)), octets, start + row.byte_offset, strides)

    def _special(self, i: int, kind: dtypes.DType | None, number: int, shape: tuple[int, ...]) -> Any:
        name = self.index.name(i)
        data = np.frombuffer(self.payload(number), np.uint8)
        if kind is None:
            code = self.row(i).dtype
            what = f"dtype code {code} is not known; .raw(name) gives its bytes"
            raise UnsupportedError(what, path=self.path, tensor=name)
        known = (self.place_of(number), prod(shape))
        if kind is dtypes.STRING and known in self._strings:
            return StringTensor(data, shape, checked=True)
        try:
            if kind is not dtypes.STRING:
                if self.mode == "c" and number != NONE:
                    octets, at = self.home(number)
                    data = np.frombuffer(octets, np.uint8)[at : at + len(data)]
                return PackedTensor(data, kind, shape)
            checked = StringTensor(data, shape)
            self._strings.add(known)
            return checked
        except FormatError as error:
            raise error.located(path=self.path, tensor=name) from None

    def views(self) -> Iterator[Any]:
        """Yield every tensor in saved order, at a fraction of the cost of a first lookup each."""
        self.ensure_all()
        self.bring()
        self.prepare_views()
        return map(self.view, range(len(self.index.tensors)))

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

    def home(self, number: int) -> tuple[memoryview, int]:
        """Return the bytes in which a payload lies, and its offset in them.

        In mode "c" payloads of equal bytes, stored once, have each its memory: their tensors are not tied.
        """
        octets = self._octets  # first: after another thread's release the index says so
        if self.remote is not None:
            self.bring([number])
        offset, nbytes, _ = self.index.payloads[number].item()
        if self.mode == "r":
            return octets, offset
        if self.parent is not None:
            return self.parent[0].home(self.parent[1][number])
        own = None if self._twins is None else self._twins.memory(number, offset, nbytes, self._map_again)
        return (octets, offset) if own is None else (own, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mode == "c":
            what = "a record of mode 'c' may hold edits that its file does not; save it, or pickle single tensors"
            raise UnsupportedError(what, path=self.path)
        if self.recipe is None:
            raise UnsupportedError("only records of archives can be pickled", path=self.path)
        return self.recipe(self)

    def release(self) -> bool:
        """Drop the archive's own hold on its mapping; returns whether that, or a later view's end, released it."""
        released: Any = Released(self.path)
        self.index = released  # first: numpy takes a lost `_octets` for leave to make new memory
        self.buffer = self._octets = released
        self._memory = self.parent = self.recipe = self.remote = self._prepared = self._twins = self._pool = None
        gone = self.original is None or self.original.release()
        for reference in self._mappings:
            mapping = reference()
            try:
                if mapping is not None:
                    mapping.close()
            except BufferError:  # views live, or parts; the mapping goes with the last of them
                gone = False
        return gone


def _integers(column: np.ndarray[Any, Any]) -> memoryview:
    """Return a column's 32-bit numbers as plain integers, at any address; 5 times faster than rows of an array."""
    return memoryview(column.view(np.uint8).data).cast("I")
