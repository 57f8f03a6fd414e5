"""The protocol of payload sources: an archive is a header, an index, and one of these.

A source gives the bytes of payloads by their numbers. It knows files and memory, and nothing of tensors or names. Each
kind of storage is one class: bytes in memory or a mapped file (`memory_source`), a private copy, whose views may be
written (`private_copy`), a part of another source (`part_source`), the shards of a catalogue (`sharded`), a file behind
a URL (`remote.source`), frames of a packed file (`transport.open_packed`), files of another format, and local files
that are read on demand (`foreign_source`).

An archive, its parts and views hold the source or its memory; the last of them to go releases the mapping. No code asks
what kind a source is.
"""

from __future__ import annotations

import errno
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.blocks import Blocks, BlockTable
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import Array as Array
from zcrecord.errors import IntegrityError, UnsupportedError
from zcrecord.storage.memory import Memory, Mode, private_copy

from .piece_table import PieceTable

Place = tuple[int, int, int]  # a file, by its number in the source, and the offset and size of a range of bytes in it


class MemberSum(NamedTuple):
    """A member of another format's zip file: its bytes, the CRC-32 that the file has of them, and its name."""

    octets: memoryview
    crc: int
    name: str


class Piece(NamedTuple):
    """A payload of one file that is a payload of the record, or a box of a split one: the file's source, its number."""

    source: FileSource
    number: int

    @property
    def nbytes(self) -> int:
        """Size of the piece."""
        return self.source.nbytes(self.number)

    @property
    def start(self) -> int:
        """Offset of the piece in its archive."""
        return self.source.start(self.number)


class PayloadSource(ABC):
    """The bytes of payloads, by their numbers in an index. NONE is never one of the numbers.

    A payload's identity is its place: its file and its range there. Nothing else tells that two payloads are the same
    bytes; an offset in an index is an address within one layout.
    """

    path: str | None  # the file as it was named; None for bytes
    absolute: str | None  # its absolute path, by which it is opened again; None unless it is a local file
    mode: Mode  # "r", or "c" where the memory may be written
    buffer: memoryview  # header, index and trailer at their offsets, with all payloads in the same memory; read-only
    offset: int = 0  # where the archive starts in the file or buffer
    # Returns for an archive over this source what `__reduce__` does; None where nothing can be opened again.
    recipe: Callable[[Any], tuple[Any, ...]] | None = None
    member_sums: Callable[[], Iterable[MemberSum]] = tuple  # of another format's files, for full verification
    on_demand: bool = False  # local payloads are read when they are used, into memory that goes with their views

    @abstractmethod
    def nbytes(self, number: int) -> int:
        """Return the size of a payload."""

    @abstractmethod
    def locate(self, number: int) -> tuple[memoryview, int]:
        """Return memory in which a payload lies, and its offset there, after it was fetched, checked and put together.

        In mode "c" the memory is writable, and payloads of equal bytes that are stored once each have their own.
        """

    def payload(self, number: int) -> memoryview:
        """Return the bytes of a payload, read-only."""
        octets, start = self.locate(number)
        return octets[start : start + self.nbytes(number)].toreadonly()

    def blocks(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a payload in order, each block valid until the next; a split one is not put together."""
        yield self.payload(number)

    def decoding(self, _number: int) -> str | None:
        """Return the reason, in words, why a payload is decoded or copied on use; None if views are of its file."""
        return None

    @abstractmethod
    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        """Return memory with a payload, and by payload the offset there, or -1; None if bytes are made on use."""

    def fetch(self, numbers: Sequence[int] | None = None) -> None:  # noqa: B027  # local ones are there
        """Fetch payloads of a remote archive into memory, all by default, and compare each with its digest."""

    @abstractmethod
    def place(self, number: int) -> Place:
        """Return the identity of a payload: its file and its range there. Opens that file, and reads no payload."""

    @abstractmethod
    def pieces(self, number: int, chosen: Sequence[int] | None = None) -> list[Piece]:
        """Return the pieces that a payload is stored as, or those at `chosen` positions; opens their files."""

    def boxes(self, _number: int, shape: tuple[int, ...], _bits: int) -> tuple[Array, Array]:
        """Return by piece first index and size along each axis of a tensor; FormatError unless they tile its shape."""
        return np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64)

    @abstractmethod
    def stored_nbytes(self, numbers: Array | None = None) -> int:
        """Return the bytes that payloads take, all by default, each byte of a file once; gaps do not count."""

    @abstractmethod
    def opened_nbytes(self) -> int:
        """Return the bytes of all files that are open."""

    @property
    def file(self) -> tuple[str, tuple[int, ...]] | None:
        """Absolute path and identity of the one local file with all payloads, unedited; None without one."""
        return None

    @property
    def mapping(self) -> Any:
        """The mapping of the one file with all payloads, or of a private copy; None if there is no such mapping."""
        return None

    @property
    def gone(self) -> bool:
        """True if an opened file was replaced or removed at its path; mappings of it stay valid."""
        return False

    @property
    def file_names(self) -> list[str]:
        """Names of the further files that payloads lie in, beside this one, by their numbers."""
        return []

    def piece_table(self) -> PieceTable | None:
        """Return the pieces of all payloads, by further file, as columns; None if there are no further files."""
        return None

    def file_size(self, _file: int) -> int:
        """Return the size of a further file; NONE is this one, as in the table of pieces."""
        return len(self.buffer)

    def file_archive(self, _file: int) -> Any:  # an Archive, which stands above this
        """Return the archive of a further file, opened and compared with the table of pieces; NONE is this one."""
        raise UnsupportedError("its payloads lie in one file", path=self.path)

    def numbers_in_file(self, _file: int, numbers: Array) -> Array:
        """Return the payloads' numbers in the archive of a further file, by their numbers in the table of pieces."""
        return numbers

    def open_files(self, files: Iterable[int]) -> None:  # noqa: B027  # there is one, and it is open
        """Open further files, by their numbers, so that they can be read even if they are removed."""

    def file_name(self, number: int) -> str | None:
        """Return the name of the further file that a payload lies in, whole; None for others."""
        table = self.piece_table()
        file = NONE if table is None else int(table.whole()[number])
        return None if file == NONE else self.file_names[file]

    def read_by(self, _number: int) -> tuple[Any, int] | None:
        """Return a loader's source that reads a payload from its file, and its offset there; None if it is mapped."""
        return None

    def keep(self, number: int) -> None:  # noqa: B027  # others are in memory, or mapped
        """Read a payload now if it is read on demand, and use that memory from now on."""

    @property
    def is_mapped(self) -> bool:
        """True if payloads are the bytes of local files, mapped or read on demand, and cannot have been edited."""
        return self.file is not None

    @property
    def is_remote(self) -> bool:
        """True if payloads are fetched when they are needed."""
        return self.remote is not None

    @property
    def remote(self) -> Any:
        """The RemoteFile that fetches ranges of the one file; None if the file is local, or there are several."""
        return None

    def seal(self) -> bytes | None:
        """Return bytes that tell this source from others; None if the archive's header is enough."""
        return None

    def pins(self) -> dict[Any, Any]:
        """Return the SHA-256 of remote payloads by their offset, as they were when they were fetched or hashed."""
        return {}

    def pin(self, pins: Mapping[Any, Any]) -> None:
        """Compare remote payloads, whenever they are fetched, with `pins` of the same archive; else IntegrityError."""
        if any(isinstance(key, str) for key in pins):
            raise IntegrityError("is not the catalogue that was checked; it was replaced since", path=self.path)

    def expected_sha256(self, number: int) -> list[bytes | None]:
        """Return the pinned SHA-256 of each piece of a payload; None where there is none."""
        return [piece.source.pins().get(piece.start) for piece in self.pieces(number)]

    @abstractmethod
    def private(self, numbers: Array | None = None) -> PayloadSource:
        """Return a source over a private copy of the bytes, in mode "c"; `numbers` are the payloads that will be used.

        SourceError if a file was replaced; LimitError if equal payloads apart would be out of all proportion.
        """

    @property
    def original(self) -> PayloadSource | None:
        """The read-only source that this is a private copy of; itself if it is read-only; None if it was not kept."""
        return self if self.mode == "r" else None

    @abstractmethod
    def mappings(self) -> list[weakref.ref[Any]]:
        """Return weak references to the open mappings, each of which lives as long as a view of it."""


class PayloadTable(NamedTuple):
    """The payloads of one archive."""

    rows: Array  # their entries in the index
    hashed: bool  # True if entries have digests
    base: int  # the offset that their offsets count from
    blocks: Callable[[], BlockTable | None] = lambda: None  # returns the checksums of their blocks


def is_twin(payloads: Array) -> Array:
    """Return True for each entry of a payload with the same range as the one before it: equal bytes, stored once."""
    offsets = payloads["offset"]
    return np.append(False, offsets[1:] == offsets[:-1])[: len(offsets)]


def distinct_nbytes(payloads: Array) -> int:
    """Return the size in bytes of the union of payloads' ranges in one file; entries need not be verified."""
    offsets, sizes = payloads["offset"], payloads["nbytes"]
    if (offsets[1:] < offsets[:-1]).any():
        order = np.argsort(offsets)
        offsets, sizes = offsets[order], sizes[order]
    starts = offsets.astype(np.float64)  # exact for every size of a file; sums of 64 bits would wrap
    ends = np.maximum.accumulate(starts + sizes)
    return int((ends - np.maximum(starts, np.append(0.0, ends)[:-1])).sum())


def was_replaced(memory: Memory) -> bool:
    """Return True if another file, or none, is at the path of a mapped file; False for memory without one."""
    if memory.identity is None or memory.absolute is None:
        return False
    try:
        now = os.stat(memory.absolute)
    except OSError as error:  # any other failure is raised when the file is opened
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return (now.st_dev, now.st_ino) != memory.identity[:2]


class FileSource(PayloadSource):
    """The payloads of one archive, all in `memory`, that of a file or buffer; their offsets count in `octets`."""

    mode: Mode = "r"
    sealed: Callable[[], bytes] | None = None  # of another format: returns the SHA-256 of the index made of its file

    def __init__(self, memory: Memory, octets: memoryview, table: PayloadTable, offset: int = 0) -> None:
        """Take over `memory`, of which `octets`, at `offset`, are the archive's own bytes; checks nothing."""
        self.path, self.absolute, self.offset, self.memory = memory.path, memory.absolute, offset, memory
        self.table = table
        self.buffer, self.on_demand = octets.toreadonly(), memory.on_demand
        # ndarray(buffer=memoryview) keeps what the memoryview is of: here an array that holds the buffer's export.
        own = (self.buffer if self.mode == "r" else octets)[table.base :]
        self.octets: memoryview = own if memory.on_demand else np.frombuffer(own, np.uint8).data

    def seal(self) -> bytes | None:
        return None if self.sealed is None else self.sealed()

    def nbytes(self, number: int) -> int:
        return int(self.table.rows["nbytes"][number])

    def digest(self, number: int) -> int | None:
        """Return the digest of a payload; None if the archive has none."""
        return int(self.table.rows["digest"][number]) if self.table.hashed else None

    def sums(self, number: int) -> Blocks | None:
        """Return the checksums of a payload's blocks; None if they are not known, or its bytes may be edited."""
        table = self.table.blocks() if self.table.hashed and self.mode == "r" else None
        _, nbytes, digest = self.table.rows[number].item()
        return None if table is None else table.find(digest, nbytes)

    def start(self, number: int) -> int:
        """Return the offset of a payload in the archive."""
        return self.table.base + int(self.table.rows["offset"][number])

    def locate(self, number: int) -> tuple[memoryview, int]:
        offset, _, _ = self.table.rows[number].item()
        return self.octets, offset

    def payload(self, number: int) -> memoryview:
        start = self.start(number)
        return self.buffer[start : start + self.nbytes(number)]

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:  # noqa: ARG002  # all lie in one memory
        return self.octets, self.table.rows["offset"].astype(np.int64)

    def place(self, number: int) -> Place:
        """Return file 0 and the payload's range there."""
        offset, nbytes, _ = self.table.rows[number].item()
        return 0, offset, nbytes

    def pieces(self, number: int, chosen: Sequence[int] | None = None) -> list[Piece]:  # noqa: ARG002  # there is one
        return [Piece(self, number)]

    def stored_nbytes(self, numbers: Array | None = None) -> int:
        return distinct_nbytes(self.table.rows if numbers is None else self.table.rows[numbers])

    def opened_nbytes(self) -> int:
        return len(self.buffer)

    @property
    def gone(self) -> bool:
        return was_replaced(self.memory)

    def mappings(self) -> list[weakref.ref[Any]]:
        return [] if self.memory.mapping is None else [weakref.ref(self.memory.mapping)]

    def private_memory(self) -> Memory:
        """Return a private copy of the archive's bytes; SourceError if the file was replaced since it was opened."""
        return private_copy(self.buffer, self.memory.filled)._replace(path=self.path, absolute=self.absolute)


class Closed:
    """The source and the index of a closed archive: every use raises UnsupportedError."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    @staticmethod
    def error(path: str | None) -> UnsupportedError:
        """Return the error for a record that was closed, perhaps by another thread."""
        return UnsupportedError("the record is closed; views taken before stay valid", path=path)

    def __getattr__(self, _: str) -> Any:
        raise Closed.error(self._path)
