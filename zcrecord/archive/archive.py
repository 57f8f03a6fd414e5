"""A mapping or a buffer, opened as an archive: header, trailer, index, and views of payloads. Copies no payload byte.

The rules are `codec.verify`'s, names and trees `record`'s; payloads' bytes are verified by `digest`.
"""

from __future__ import annotations

import errno
import mmap as _mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from zcrecord.codec import verify
from zcrecord.codec.index import Index, decode
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, Header, locate
from zcrecord.errors import LimitError, RecordError, SourceError, UnsupportedError
from zcrecord.storage.memory import Memory, Mode, map_file, private_copy

from .views import Verify, Views, closed

__all__ = ["Archive", "Embedded", "Progress"]

Embedded = Literal["prefix", "suffix"]
Progress = Callable[[int, int], None]

_APART, _APART_FREE = 64, 1 << 30  # times what was given, and bytes, that loading it may take in all: twins in mode "c"
_NEAR = 1 << 16  # bytes between payloads for which one piece of advice does


class _Released:
    """What an archive has in place of index and bytes once it is released: every use of it is the one typed error."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def __getattr__(self, _: str) -> Any:
        raise closed(self._path)

    def __getitem__(self, _: Any) -> Any:
        raise closed(self._path)


class Archive(Views):
    """An opened archive: its bytes, its index, and views of its payloads.

    Attributes:
        path: the file, as it was named and as errors tell it.
        absolute: its absolute path, by which it is opened again; None where the bytes are no local file's.
        buffer: all bytes of the archive, read-only; every view keeps it, and with it the mapping, alive.
        header: the sealed header, or the trailer where the header is not sealed.
        offset: where the archive starts in the file or buffer.
        mode: "r", or "c" where views may be written, to a private copy.
        verified: what has been checked of the index so far.
        original: the read-only archive that a private copy is of.
        parent: the archive whose payloads these are some of, and their numbers there.
        whole: whether the bytes are an archive's from end to end, and not part of one or another format's.
        recipe: gives for this archive a function and its arguments, which open it again, as pickle takes them; None
            where nothing is known to open.
        remote: what fetches payloads, and reads by position, where not all bytes are in memory; None where they are.
        tied: the names of the tensors of one payload, by its number, as far as they were asked for.

    Another thread may release it at any time: who makes views takes hold of `_octets` first, and then of the index.
    """

    __slots__ = ()

    def __init__(self, memory: Memory, *, level: Verify, embedded: Embedded | None, mode: Mode = "r") -> None:
        """Open `memory`; in mode "c" it must be writable and nobody else's."""
        self._prepare(memory)
        self.embedded = embedded
        if mode == "c" and level == "touch":
            level = "index"  # all of it was read anyway, and twins are told apart now
        try:
            octets, self.header, self.offset = locate(memory.octets, embedded)
            self._place(octets, mode)
            h = self.header
            if level != "touch":
                self.check_crc()
            self.index = decode(self.buffer[h.index_offset :], h.index_size)
            self.verified = level
            if level == "touch":
                verify.check_header(self.index, h)
            else:
                verify.check_index(self.index, h)
            self._pool = self.index.pool()
            if mode == "c":
                for number in self._twins():  # nothing keeps the bytes as they were: before the first can be edited
                    self.home(number)
        except RecordError as error:
            raise error.located(path=self.path) from None

    def _prepare(self, memory: Memory) -> None:
        self.path, self.absolute = memory.path, memory.absolute
        self.original: Archive | None = None
        self.parent: tuple[Archive, list[int]] | None = None
        self.recipe = None
        self.remote = memory.remote
        self.whole = True
        self.embedded: Embedded | None = None
        self._memory: Memory | None = memory
        self._mappings = [] if memory.mapping is None else [weakref.ref(memory.mapping)]
        self._checked: set[int] = set()
        self._strings: set[tuple[int, int]] = set()  # offsets of payloads whose ends of strings were checked, how many
        self._own: dict[int, memoryview] = {}  # payloads with memory of their own, in mode "c"
        self.tied = {}
        self._prepared = None
        self._again: dict[int, Archive] = {}  # the file mapped again, for the large ones among those
        self.index: Index
        self.verified: Verify

    def _place(self, octets: memoryview, mode: Mode) -> None:
        """Say where the archive's own bytes are."""
        self.mode: Mode = mode
        self.buffer = octets.toreadonly()
        self._region = self.buffer[self.header.payload_offset :]
        writable = (self.buffer if mode == "r" else octets)[self.header.payload_offset :]
        # ndarray(buffer=memoryview) keeps what the memoryview is of: here an array that holds the buffer's export.
        self._octets = np.frombuffer(writable, np.uint8).data

    def private(self) -> Archive:
        """Return the same archive over a private copy of its bytes, which may be written and which nobody else sees.

        Of a mapped file it is a mapping whose pages are copied when they are written, of bytes in memory a whole copy.

        Raises:
            SourceError: the file was replaced since it was opened. LimitError: equal tensors, each by itself, would
            take out of all proportion to the archive.
        """
        if self.verified != "touch":
            self._twins()
        self.bring()
        return self._private()

    def _private(self) -> Archive:
        if self.parent is not None:
            return self.parent[0]._private().part(self.index, self.parent[1])
        held = self._held()
        if held.absolute is None or not self.mapped:
            memory, at = private_copy(self.buffer, held.filled), 0
        else:
            memory, at = map_file(held.absolute, private=True, least=0), self.offset
            if memory.identity != held.identity:
                what = "was replaced or changed since it was opened; load it again"
                raise SourceError(what, path=held.absolute)
        out = Archive.__new__(Archive)
        out._prepare(memory)
        out.path, out.absolute, out.original = self.path, self.absolute, self
        out.whole, out.embedded = self.whole, self.embedded
        out.header, out.offset, out.index, out.verified = self.header, self.offset, self.index, self.verified
        out._pool, out._checked, out._strings = self._pool, self._checked, self._strings
        out._place(memory.octets[at : at + len(self.buffer)], "c")
        return out

    @classmethod
    def foreign(cls, memory: Memory, index: Index) -> Archive:
        """Return an archive over another format's bytes, by an index made for it, whose payloads are offsets in them.

        The index is taken for granted: who made it has checked that every payload lies inside.
        """
        out = cls.__new__(cls)
        out._prepare(memory)
        out.header, out.offset, out.index = Header(1, 1, 0, 0, 0, len(memory.octets), 0), 0, index
        out.verified, out.whole, out._pool = "index", False, index.pool()
        out._place(memory.octets, "r")
        return out

    def part(self, index: Index, numbers: list[int]) -> Archive:
        """Return an archive with another index, whose payloads are those of this one that have these numbers."""
        self._held()
        out = Archive.__new__(Archive)
        out._prepare(Memory(self.buffer, self.path, absolute=self.absolute))
        out.parent, out.whole, out._mappings, out.remote = (self, numbers), False, self._mappings, self.remote
        out.header, out.offset, out.mode, out.index, out.verified = self.header, self.offset, self.mode, index, "index"
        out._pool, out.buffer, out._region, out._octets = index.pool(), self.buffer, self._region, self._octets
        return out

    def kept(self) -> Archive:
        """Return this archive once more, over the same memory, to be released by itself: parts outlive their record."""
        out = Archive.__new__(Archive)
        for name in filter("index".__ne__, Views.__slots__):
            setattr(out, name, getattr(self, name))
        out.index = self.index  # last: if another thread releases this one meanwhile, it goes first
        out.original = out.original and out.original.kept()
        return out

    @property
    def mapped(self) -> bool:
        """Whether its bytes are those of a mapped file, and nobody can have written to them."""
        held = self._held()
        return held.mapping is not None and held.identity is not None and held.octets.readonly

    @property
    def gone(self) -> bool:
        """True if the mapped file was replaced or removed at its path; the mapping is as it was."""
        held = self.root._held()
        if held.identity is None or held.absolute is None:
            return False
        try:
            now = os.stat(held.absolute)
        except OSError as error:  # whatever else keeps that unknown is told by who opens it
            return error.errno in (errno.ENOENT, errno.ENOTDIR)
        return (now.st_dev, now.st_ino) != held.identity[:2]

    @property
    def file(self) -> tuple[str, tuple[int, ...]] | None:
        """Absolute path and identity of the mapped file whose very bytes these are; None for others, or if edited.

        What lies in the archive at an offset lies in that file `self.offset` further on.
        """
        root = self.root
        held = root._held()
        return (held.absolute, held.identity) if root.mapped and held.absolute is not None and held.identity else None

    @property
    def root(self) -> Archive:
        """The archive that this is a part of, or itself."""
        root = self
        while root.parent is not None:
            root = root.parent[0]
        return root

    def prefetch(self) -> None:
        """Advise the system that all payloads will be read soon; those of a remote archive are fetched."""
        if self.remote is not None:
            self.bring()
            return
        whole = self.root
        mapping: Any = whole._held().mapping
        if not (whole.original or whole).mapped or not hasattr(mapping, "madvise"):
            return
        rows = self.index.payloads
        page, base = _mmap.PAGESIZE, self.offset + self.header.payload_offset
        start = end = 0
        for offset, nbytes, _ in [*rows.tolist(), (MAX_ARCHIVE_SIZE, 0, 0)]:
            if offset > end + _NEAR:
                lo = (base + start) // page * page
                if end > start:
                    mapping.madvise(_mmap.MADV_WILLNEED, lo, base + end - lo)
                start = offset
            end = max(end, offset + nbytes) if offset <= end + _NEAR else offset + nbytes

    def _twins(self) -> list[int]:
        """Return the payloads whose bytes are stored once with another's.

        Raises:
            LimitError: apart they would take out of all proportion to the archive.
        """
        rows = self.index.payloads
        same = rows["offset"][1:] == rows["offset"][:-1]
        if not np.count_nonzero(same):  # as in most archives
            return []
        twins = np.flatnonzero(same) + 1
        apart = float(rows["nbytes"][twins].sum(dtype=np.float64))
        if apart > _APART * len(self.buffer) + _APART_FREE:
            what = f"equal tensors that are not tied would take {apart:.3g} bytes, each by itself, in mode 'c'"
            raise LimitError(what, path=self.path)
        return twins.tolist()

    def _held(self) -> Memory:
        if self._memory is None:
            raise closed(self.path)
        return self._memory

    def __reduce__(self) -> tuple[Any, ...]:
        if self.mode == "c":
            what = "a record of mode 'c' may hold edits that its file does not; save it, or pickle single tensors"
            raise UnsupportedError(what, path=self.path)
        if self.recipe is None:
            raise UnsupportedError("only records of archives can be pickled", path=self.path)
        return self.recipe(self)

    def release(self) -> bool:
        """Drop the archive's own hold on its mapping; returns whether that, or a later view's end, released it."""
        released: Any = _Released(self.path)
        self.index = released  # first: numpy takes a lost `_octets` for leave to make new memory
        self.buffer = self._region = self._pool = self._octets = released
        self._memory = self.parent = self.recipe = self.remote = self._prepared = None
        self._own, self._again = {}, {}
        gone = self.original is None or self.original.release()
        for reference in self._mappings:
            mapping = reference()
            try:
                if mapping is not None:
                    mapping.close()
            except BufferError:  # views live, or parts; the mapping goes with the last of them
                gone = False
        return gone
