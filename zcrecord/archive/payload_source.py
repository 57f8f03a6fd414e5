"""The protocol of payload sources: an archive is a header, an index, and one of these.

A source gives the bytes of payloads by their numbers. It knows files and memory, and nothing of tensors or names. Each
kind of storage is one class in a file of its own:

| kind | class |
|---|---|
| memory: bytes that were given, read or decompressed | `memory_source.MemorySource` |
| a mapped file | `memory_source.MappedSource` |
| a private copy, whose views may be written | `private_copy.PrivateSource` |
| a part of another source | `part_source.PartSource` |
| the shards of a catalogue | `sharded.ShardedSource` |
| a file behind a URL | `remote.source.RemoteSource` |
| frames of a packed file | `transport.open_packed.PackedSource` |
| files of another format; any local files that are read on demand | `foreign_source.ForeignSource` |

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
    """The CRC-32 that another format has of a range of its file, and the name that it has for the range."""

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

    # Bytes.

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
        octets, at = self.locate(number)
        return octets[at : at + self.nbytes(number)].toreadonly()

    def blocks(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a payload in order, each block valid until the next; a split one is not put together."""
        yield self.payload(number)

    def decoding(self, _number: int) -> str | None:
        """Return why a payload is decoded when it is used, as another format may ask; None if it is used as it lies."""
        return None

    @abstractmethod
    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        """Return memory in which a payload lies, and the offset there of every payload, or -1; None if not at hand."""

    def fetch(self, numbers: Sequence[int] | None = None) -> None:  # noqa: B027  # local ones are there
        """Have payloads in memory, all by default, each compared with its digest; local ones are there."""

    # Places.

    @abstractmethod
    def place(self, number: int) -> Place:
        """Return the identity of a payload: its file and its range there. Opens that file, and reads no payload."""

    @abstractmethod
    def pieces(self, number: int, chosen: Sequence[int] | None = None) -> list[Piece]:
        """Return the payloads of single files that a payload is stored as, or some of them; opens those files."""

    def boxes(self, _number: int, shape: tuple[int, ...], _bits: int) -> tuple[Array, Array]:
        """Return first index and size along each axis of each piece of a payload's tensor; they tile the shape."""
        return np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64)

    @abstractmethod
    def stored_nbytes(self, numbers: Array | None = None) -> int:
        """Return the bytes that payloads take, all by default, each range once; holes do not count."""

    @abstractmethod
    def opened_nbytes(self) -> int:
        """Return the bytes of all files that are open."""

    # Files.

    @property
    def file(self) -> tuple[str, tuple[int, ...]] | None:
        """Absolute path and identity of the one mapped file with all payloads, unedited; None without one."""
        return None

    @property
    def mapping(self) -> Any:
        """The mapping of that file, or of a private copy of it; None if there is not one alone."""
        return None

    @property
    def gone(self) -> bool:
        """True if an opened file was replaced or removed at its path; a mapping of it is as it was."""
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
        """Return numbers of the table of pieces as those of payloads in the archive of their file."""
        return numbers

    def open_files(self, files: Iterable[int]) -> None:  # noqa: B027  # there is one, and it is open
        """Open further files, by their numbers, so that they can be read even if they are removed."""

    def file_name(self, number: int) -> str | None:
        """Return the name of the further file that a payload lies in, whole; None for others."""
        table = self.piece_table()
        file = NONE if table is None else int(table.whole()[number])
        return None if file == NONE else self.file_names[file]

    def read_by(self, _number: int) -> tuple[Any, int] | None:
        """Return the source, as a loader's, that reads a payload, and its offset there; None for others."""
        return None

    def keep(self, number: int) -> None:  # noqa: B027  # others are in memory, or mapped
        """Read a payload of one file that is read on demand now, and use that memory from now on."""

    @property
    def is_mapped(self) -> bool:
        """True if the bytes are those of files, mapped or read on demand, and nobody can have written to them."""
        return self.file is not None

    @property
    def is_remote(self) -> bool:
        """True if payloads are fetched when they are needed."""
        return self.remote is not None

    @property
    def remote(self) -> Any:
        """Fetches ranges of the one file by position; None if the file is local, or there are several."""
        return None

    # Expected SHA-256 digests.

    def seal(self) -> bytes | None:
        """Return bytes that tell this source from others; None if the archive's header does."""
        return None

    def pins(self) -> dict[Any, Any]:
        """Return the SHA-256 digests that remote payloads had when all of the record was hashed, for `pin`."""
        return {}

    def pin(self, pins: Mapping[Any, Any]) -> None:
        """Compare remote payloads, whenever they are fetched, with the SHA-256 digests that they had."""
        if any(isinstance(key, str) for key in pins):
            raise IntegrityError("is not the catalogue that was checked; it was replaced since", path=self.path)

    def expected(self, number: int) -> list[bytes | None]:
        """Return the SHA-256 that each piece of a payload is compared with; None where it is not known."""
        return [piece.source.pins().get(piece.start) for piece in self.pieces(number)]

    # Sources made of this one.

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
        """Return the mappings that are open, which live as long as anything uses them."""


class PayloadTable(NamedTuple):
    """The payloads of one archive: their entries, True if these have digests, and the base of their offsets.

    `blocks` returns the checksums of their blocks.
    """

    rows: Array
    hashed: bool
    base: int
    blocks: Callable[[], BlockTable | None] = lambda: None


def is_twin(payloads: Array) -> Array:
    """Return True for each entry of a payload with the same range as the one before it: equal bytes, stored once."""
    offsets = payloads["offset"]
    return np.append(False, offsets[1:] == offsets[:-1])[: len(offsets)]


def distinct_nbytes(payloads: Array) -> int:
    """Return the bytes that entries of payloads of one file take, each byte once, whatever unchecked entries claim."""
    offsets, sizes = payloads["offset"], payloads["nbytes"]
    if (offsets[1:] < offsets[:-1]).any():
        order = np.argsort(offsets)
        offsets, sizes = offsets[order], sizes[order]
    starts = offsets.astype(np.float64)  # exact for every size of a file; 64 bits would wrap
    ends = np.maximum.accumulate(starts + sizes)
    return int((ends - np.maximum(starts, np.append(0.0, ends)[:-1])).sum())


def was_replaced(memory: Memory) -> bool:
    """Return True if a mapped file was replaced or removed at its path."""
    if memory.identity is None or memory.absolute is None:
        return False
    try:
        now = os.stat(memory.absolute)
    except OSError as error:  # any other failure is raised when the file is opened
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return (now.st_dev, now.st_ino) != memory.identity[:2]


class FileSource(PayloadSource):
    """The payloads of one archive, all in `memory`, that of a file or buffer; `octets` starts with the first."""

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
        return None if table is None else table.find(*self.table.rows[number].item()[:0:-1])

    def start(self, number: int) -> int:
        """Return the offset of a payload in the archive."""
        return self.table.base + int(self.table.rows["offset"][number])

    def locate(self, number: int) -> tuple[memoryview, int]:
        return self.octets, self.table.rows[number].item()[0]

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
