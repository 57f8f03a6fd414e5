"""Open archives that were packed for transport: decompressed once into memory, or only the frames that are needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from zcrecord.archive.archive import Archive, Verify, open_archive
from zcrecord.archive.memory_source import FetchedSource
from zcrecord.archive.payload_source import Array, PayloadTable
from zcrecord.codec.layout import HEADER_SIZE, Header, decode_header
from zcrecord.errors import FormatError, IntegrityError, LimitError, SourceError, located
from zcrecord.storage.compressed import ZstdFrames, import_zstandard
from zcrecord.storage.memory import Memory, Mode, aligned, buffer_of, map_file
from zcrecord.storage.threads import cores

from . import frames

_PIECE = 1 << 20  # bytes decompressed at a time to count them


def open_packed(memory: Memory, *, verify: Verify, mode: Mode = "r", lazily: bool = False) -> Archive:
    """Return the archive whose packed form is in `memory`, decompressed once; in mode "c" it is writable as it is.

    With a seek table, frames are decompressed in parallel, or, lazily, when a payload in them is needed; without one
    (`zstd` writes none) one after the other.
    """
    packed = memory.octets
    with located(path=memory.path):
        table = frames.read_table(len(packed), lambda offset, nbytes: packed[offset : offset + nbytes])
        if lazily and table is not None:
            return _open_frames(memory, table)
        if table is None:
            owner, octets = _decompress_stream(memory)
        else:
            owner, octets = _allocate(table.nbytes, packed=len(packed))
            frames.decompress_frames(packed, table, octets, np.arange(len(table.sizes)), cores())
    return open_archive(memory._replace(octets=octets, mapping=owner, identity=None), verify=verify, mode=mode)


def _reopen(packed: str | bytes, header: bytes) -> Archive:
    """Open a pickled archive again, by path or bytes; IntegrityError unless it is packed and has this header."""
    memory = map_file(packed, least=0) if isinstance(packed, str) else Memory(buffer_of(packed))
    fault = "is not the archive that was pickled; it was replaced since"
    try:
        archive = open_packed(memory, verify="index", lazily=True)
    except FormatError as error:  # it was readable when it was pickled
        raise IntegrityError(fault, path=memory.path) from error
    if archive.header.encode() != header:
        raise IntegrityError(fault, path=memory.path)
    return archive


def sparse_memory(size: int, pieces: Iterable[tuple[int, Any]]) -> Memory:
    """Return memory with (offset, piece) in their places; elsewhere zeros, not resident. LimitError without room."""
    owner, octets = _allocate(size, sparse=True)
    for offset, piece in pieces:
        octets[offset : offset + len(piece)] = piece
    return Memory(octets, None, owner)


def _open_frames(memory: Memory, table: frames.SeekTable) -> Archive:
    """Return an archive in sparse memory, into which frames are decompressed when a payload in them is needed."""
    content = _FrameMemory(memory, table)
    header = content.trailer()
    content.decompress([(0, HEADER_SIZE), (header.index_offset, header.index_offset + header.index_size)])
    archive = open_archive(content.memory, verify="index", source_in=partial(PackedSource, content))
    packed = memory.octets if memory.absolute is None else memory.absolute  # a path does not keep the file open

    def recipe(archive: Archive) -> tuple[Any, ...]:  # for pickle: a function and its arguments
        return _reopen, (packed if isinstance(packed, str) else bytes(packed), archive.header.encode())

    archive.source.recipe = recipe
    return archive


class PackedSource(FetchedSource):
    """Payloads of an archive that was packed for transport; frames are decompressed, and checked, when needed."""

    def __init__(
        self, frame_memory: _FrameMemory, memory: Memory, octets: memoryview, table: PayloadTable, offset: int = 0
    ) -> None:
        super().__init__(memory, octets, table, offset)
        self._frames, self._lock = frame_memory, threading.Lock()
        self._ready = np.zeros(len(table.rows), bool)

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:  # noqa: ARG002  # all lie in one memory
        """Return the memory, and the offset of each payload that was decompressed."""
        return self.octets, np.where(self._ready, self.table.rows["offset"].astype(np.int64), -1)

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        """Decompress the frames of payloads, of all by default, unless they are there; from any thread."""
        chosen = np.arange(len(self.table.rows)) if numbers is None else np.array(numbers, np.int64)
        if self._ready[chosen].all():
            return
        rows = self.table.rows[chosen]
        starts = rows["offset"] + np.uint64(self.table.base)
        ranges = zip(starts.tolist(), (starts + rows["nbytes"]).tolist(), strict=True)
        with located(path=self.path), self._lock:
            self._frames.decompress(ranges)
            self._frames.close_file()  # nearly always nothing else is decompressed later
            self._ready[chosen] = True


class _FrameMemory:
    """Sparse memory for all of an archive, filled by frame; the packed file is mapped only while it is read."""

    def __init__(self, memory: Memory, table: frames.SeekTable) -> None:
        self._packed: memoryview | None = memory.octets
        self._path, self._identity, self._table = memory.absolute, memory.identity, table
        self._packed_nbytes = len(memory.octets)
        self._decompressed = np.zeros(len(table.sizes), bool)
        self._filled: list[tuple[int, int]] = []
        if table.nbytes < 2 * HEADER_SIZE:
            raise _too_few(table.nbytes)
        owner, self._octets = _allocate(table.nbytes, sparse=True)
        self.memory = Memory(self._octets, memory.path, owner, filled=self._filled, absolute=memory.absolute)

    def trailer(self) -> Header:
        """Return the decoded trailer; FormatError unless it is of an archive of the table's size."""
        size = self._table.nbytes
        self.decompress([(size - HEADER_SIZE, size)])
        trailer = decode_header(bytes(self._octets[-HEADER_SIZE:]), "trailer")
        if trailer is None or trailer.archive_size != size:
            fault = f"trailer: it is not that of an archive of {size} bytes"
            raise FormatError(f"{fault}; the file is damaged, copy it again")
        return trailer

    def decompress(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Decompress the frames that hold any byte of these ranges, unless that was done; one thread at a time."""
        covering = self._table.covering(ranges)
        chosen = covering[~self._decompressed[covering]]
        if not len(chosen):
            return
        decompressed = self._decompressed.copy()
        decompressed[chosen] = True
        frames.check_expansion(int(self._table.sizes[decompressed].sum()), self._packed_nbytes)
        frames.decompress_frames(self._packed_bytes(), self._table, self._octets, chosen, cores())
        self._decompressed = decompressed  # not before: after an error the frames are decompressed again
        self._filled += map(self._table.range, chosen.tolist())

    def close_file(self) -> None:
        """Let go of the packed file's mapping, if there is a path by which it can be mapped again."""
        if self._path is not None:
            self._packed = None

    def _packed_bytes(self) -> memoryview:
        """Return the packed file's bytes, mapped again if need be; SourceError if the file is another by now."""
        if self._packed is not None:
            return self._packed
        assert self._path is not None, "bytes without a path are kept"
        memory = map_file(self._path, least=0)
        if memory.identity != self._identity:
            raise SourceError("was replaced or changed since it was opened; load it again", path=self._path)
        return memory.octets


def _decompress_stream(memory: Memory) -> tuple[Any, memoryview]:
    """Return new memory, as `aligned` does, with the content of all frames; FormatError unless that is one archive."""
    package = import_zstandard()
    try:
        input_frames, reader = _reader(package, memory)
        with reader:
            header = reader.read(HEADER_SIZE)
            size, done = _content_size(package, memory, header), len(header)
            owner, octets = _allocate(size, packed=len(memory.octets))
            octets[:done] = header
            while done < size and (nbytes := reader.readinto(octets[done:])):
                done += nbytes
            excess = reader.read(1)
    except package.ZstdError as error:
        raise frames.zstd_error(error, "zstd") from None
    if done < size:
        raise FormatError(f"zstd: ends after {done} of {size} bytes; the file is truncated, copy it again")
    if excess:
        raise FormatError(f"zstd: holds more than the archive's {size} bytes; is it several, one after the other?")
    if not input_frames.complete:
        raise FormatError("zstd: ends inside a frame; the file is truncated, copy it again")
    return owner, octets


def _reader(package: Any, memory: Memory) -> tuple[ZstdFrames, Any]:
    """Return the frames in memory, and a reader that decompresses them as a stream."""
    position = 0

    def read(nbytes: int) -> bytes:
        nonlocal position
        position += nbytes
        return bytes(memory.octets[position - nbytes : position])

    input_frames = ZstdFrames(read)
    return input_frames, package.ZstdDecompressor().stream_reader(input_frames, read_across_frames=True)


def _content_size(package: Any, memory: Memory, start: bytes) -> int:
    """Return the size of a packed archive that has this start: from its header, or by decompressing it to count."""
    if len(start) < HEADER_SIZE:
        raise _too_few(len(start))
    header = decode_header(start)
    if header is not None:
        return header.archive_size
    size = 0
    _, reader = _reader(package, memory)
    with reader:
        while piece := reader.read(_PIECE):
            size += len(piece)
            frames.check_expansion(size, len(memory.octets))
    return size


def _too_few(size: int) -> FormatError:
    fault = f"{size} bytes come out of this zstd file, too few for an archive"
    return FormatError(f"{fault}; it is truncated, copy it again")


def _allocate(size: int, *, packed: int | None = None, sparse: bool = False) -> tuple[Any, memoryview]:
    """Return memory's owner and the memory, as `aligned` does; LimitError if it is too much for the packed bytes."""
    if packed is not None:
        frames.check_expansion(size, packed)
    try:
        return aligned(size, sparse=sparse)
    except (OSError, OverflowError, ValueError) as error:
        raise LimitError(f"no room in memory for {size} bytes: {error}") from error
