"""Pack archives for transport: `.zcr.zst`, zstd frames that begin where payloads do, and a seek table after them.

Memory: for each thread two or three frames of up to 6 MiB, packed or not, and zstd's own state (1 MiB at the default
level, 50 MiB at 19); the index; 200 bytes for each frame.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np

from zcrecord.archive.archive import Archive, open_archive, require_one_file
from zcrecord.codec.layout import HEADER_SIZE, Header, decode_header, locate, too_short
from zcrecord.errors import FormatError, LimitError, SourceError, UnsupportedError, located
from zcrecord.storage.compressed import import_zstandard
from zcrecord.storage.files import Progress, check_destination, identity_of, open_sink, open_source, path_of, place_for
from zcrecord.storage.memory import map_file, read_at
from zcrecord.storage.sink import Sink
from zcrecord.storage.stream_reader import StreamReader
from zcrecord.storage.threads import Start, cores, map_ordered
from zcrecord.writing.writers import peak_rss

from .frames import EXPANDED, SeekEntry, encode_table
from .open_packed import sparse_memory

PREADV = hasattr(os, "preadv")  # threads can read one file by position
_FRAME = 4 << 20  # bytes of a frame of larger payloads; the last may be 1.5 times as large
_GATHERED = 1 << 20  # bytes up to which neighbouring payloads share a frame
_PACKING = "pack"
_INDEX_FREE = 32 << 20  # bytes of an index that may come from any number of packed bytes

PackedFrame = tuple[SeekEntry, bytes]
Frames = Generator[PackedFrame, None, None]
Compressors = Start[Any, PackedFrame]


@dataclass(frozen=True, slots=True)
class PackReport:
    """Result of packing or unpacking; sizes in bytes. Paths, `frames` and `peak_rss` are None if they are not known."""

    source: str | None
    dest: str | None
    archive_bytes: int
    packed_bytes: int
    frames: int | None
    seconds: float
    peak_rss: int | None

    @property
    def ratio(self) -> float:
        """Bytes of archive per packed byte."""
        return self.archive_bytes / self.packed_bytes


def pack(
    source: Any,
    dest: Any,
    *,
    level: int = 1,
    threads: int | None = None,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> PackReport:
    """Compress an archive into zstd frames, from which `unpack` or `zstd -d` restores the identical bytes.

    Frames begin where payloads begin, except for a stream whose index follows its payloads: there a frame begins every
    4 MiB, and the index is checked only if the header gives its offset. A path is read as a stream where the system has
    no `preadv`. For the same kind of source the bytes depend only on archive, level and zstd library.

    Args:
        source: a path or a binary file object, read forward once.
        dest: a path or a URL, which appears whole or not at all, or a binary file object.
        level: zstd's level, from 1 to 22; levels above 1 take longer and gain little on weights.
        threads: number of compressing threads; None is one for each core.
        force: replace a file that exists.
        durable: wait until the file would survive power loss.
        progress: called with the archive's bytes done, and with their total, if that is known.
        storage_options: for fsspec, if `dest` is a URL.

    Raises:
        FormatError: the source is not an archive. UnsupportedError: it is a catalogue, or `level` or `threads` is out
        of range. DestinationExistsError: `dest` exists and `force` was not given, or it is the source. SourceError: the
        file system reports an error. DependencyError: the package zstandard is not installed.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones(1000), "v": np.zeros(9)}, "model.zcr")
        >>> pack("model.zcr", "model.zcr.zst").frames
        3
        >>> zcrecord.load_record("model.zcr.zst", names="v")["v"].sum().item()
        0.0
    """
    started = time.perf_counter()
    source_path, dest_path, sink_place = resolve_paths(source, dest, force=force, options=storage_options)
    compressors, threads = _compressors(level), cores(threads)
    check = ArchiveCheck(progress)
    entries: list[SeekEntry] = []
    with located(path=source_path), StreamReader(source_path or source) as reader:
        if source_path is not None and reader.seekable and PREADV:
            packed = _pack_file(source_path, check, compressors, threads)
        else:
            packed = _pack_stream(reader, check, compressors, threads)
        with open_sink(sink_place, durable=durable, options=storage_options) as sink, closing(packed):
            for entry, frame in packed:
                sink.write(frame)
                entries.append(entry)
                check.advance(entry.nbytes)
            sink.write(encode_table(entries))
            packed_bytes = sink.position
    seconds = time.perf_counter() - started
    return PackReport(source_path, dest_path, check.done, packed_bytes, len(entries), seconds, peak_rss())


def resolve_paths(
    source: Any, dest: Any, *, force: bool, options: Mapping[str, Any] | None
) -> tuple[str | None, str | None, Any]:
    """Return both paths, None for a file object, and the argument for `open_sink`. Raises as `check_destination`."""
    source_path = None if hasattr(source, "read") else path_of(source)
    dest_path = None if hasattr(dest, "write") else path_of(dest)
    version = check_destination(source_path, dest_path, force, options)
    return source_path, dest_path, place_for(dest, version, options)


class ArchiveCheck:
    """Check of an archive's bytes as they pass: size, header and trailer, and the index if the header locates it.

    When unpacking, `packed` returns the number of packed bytes, which limits the index. Attributes: `size`, bytes that
    passed; `done`, bytes reported by `advance`; `expected`, their total if known.
    """

    def __init__(self, progress: Progress | None, packed: Callable[[], int] | None = None) -> None:
        self._progress, self._packed = progress, packed
        self.size = self.done = 0
        self.expected: int | None = None
        self._first = self._last = b""  # bytes of header and trailer
        self._header: Header | None = None
        self._index = bytearray()

    def advance(self, nbytes: int) -> None:
        """Report that `nbytes` more bytes are done."""
        self.done += nbytes
        if self._progress is not None:
            self._progress(self.done, self.expected)

    def update(self, piece: Any) -> None:
        """Check the next bytes, and keep those of header, index and trailer.

        Raises:
            FormatError: the header is damaged, or there are more bytes than it says. LimitError: when unpacking, the
                index is far larger than the packed bytes.
        """
        start, end = self.size, self.size + len(piece)
        if start < HEADER_SIZE:
            self._first += bytes(piece[: HEADER_SIZE - start])
            if end >= HEADER_SIZE:
                self._header = decode_header(self._first)
        if self._header is not None:
            if end > self._header.archive_size:  # raised now: a small frame may go on for terabytes
                size = self._header.archive_size
                raise FormatError(f"holds more than the archive's {size} bytes; the file is damaged, copy it again")
            index_start, index_end = self._header.index_offset, self._header.index_offset + self._header.index_size
            self._index += piece[max(index_start - start, 0) : max(index_end - start, 0)]
            if self._packed is not None and len(self._index) > EXPANDED * self._packed() + _INDEX_FREE:
                fault = f"its index takes more than {EXPANDED} times the bytes it is packed into"
                raise LimitError(f"{fault}; `zstd -d` decompresses it")
        self._last = (self._last + bytes(piece[-HEADER_SIZE:]))[-HEADER_SIZE:]
        self.size = end

    def finish(self, sink: Sink | None = None) -> Archive | None:
        """Check header, trailer and index, read back from `sink` if need be; return the archive, None without."""
        if self.size < 2 * HEADER_SIZE:
            raise too_short(self.size, self._first)
        memory = sparse_memory(self.size, [(0, self._first), (self.size - HEADER_SIZE, self._last)])
        header = locate(memory.octets, None)[1]
        index: bytes | bytearray = self._index
        if not index and sink is not None and sink.can_rewind:
            index = sink.read_back(header.index_offset, header.index_size)
        if index:
            memory.octets[header.index_offset : header.index_offset + len(index)] = index
            return open_archive(memory, verify="index")
        return None


def _compressors(level: int) -> Compressors:
    """Return a factory of functions, one for each thread, that compress a piece; UnsupportedError for a wrong level."""
    package = import_zstandard()
    if not isinstance(level, int) or not 1 <= level <= package.MAX_COMPRESSION_LEVEL:
        raise UnsupportedError(f"level={level!r} is not a number from 1 to {package.MAX_COMPRESSION_LEVEL}")

    def start_thread() -> Callable[[Any], PackedFrame]:
        compressor = package.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)

        def compress(piece: Any) -> PackedFrame:
            frame = compressor.compress(piece)
            checksum = int.from_bytes(frame[-4:], "little")  # a frame ends in it
            return SeekEntry(len(frame), len(piece), checksum), frame

        return compress

    return start_thread


def _pack_file(path: str, check: ArchiveCheck, compressors: Compressors, threads: int) -> Frames:
    """Yield the frames of an archive in a file, which each thread reads by itself."""
    memory = map_file(path)
    archive = open_archive(memory, verify="index")
    require_one_file(archive, _PACKING)
    bounds = _frame_bounds(archive.header, archive.index.payloads["offset"])
    archive.close()
    check.expected = bounds[-1]
    file, _ = open_source(path)

    def start_thread() -> Callable[[tuple[int, int]], PackedFrame]:
        compress, buffer = compressors(), np.empty(max(np.diff(bounds)), np.uint8).data

        def read_and_compress(span: tuple[int, int]) -> PackedFrame:
            start, end = span
            read_at(file.fileno(), buffer[: end - start], start)
            return compress(buffer[: end - start])

        return read_and_compress

    with file:
        yield from map_ordered(start_thread, pairwise(bounds), threads)
        if identity_of(file.fileno()) != memory.identity:
            raise SourceError("was changed or replaced while it was packed; pack it again")


def _pack_stream(reader: StreamReader, check: ArchiveCheck, compressors: Compressors, threads: int) -> Frames:
    """Yield the frames of an archive from a stream, and check it at its end."""
    yield from map_ordered(compressors, _frame_contents(reader, check), threads)
    archive = check.finish()
    if archive is not None:
        require_one_file(archive, _PACKING)


def _frame_contents(reader: StreamReader, check: ArchiveCheck) -> Iterator[bytes]:
    """Yield a stream's archive in the pieces that become frames, each checked; FormatError unless it is one archive."""
    head, bounds = _stream_bounds(reader)
    check.expected = None if bounds is None else bounds[-1]
    sizes = chain([HEADER_SIZE], repeat(_FRAME)) if bounds is None else np.diff(bounds).tolist()
    for size in sizes:
        piece = head[:size].tobytes()
        head = head[size:]
        piece += reader.read(size - len(piece))
        if len(piece) < size and bounds is not None:
            fault = f"ends after {check.size + len(piece)} of {bounds[-1]} bytes"
            raise FormatError(f"{fault}; it is truncated, or still being written")
        if not len(piece):
            return
        check.update(piece)
        yield piece
    if reader.read(1):
        raise FormatError(f"the archive has {check.size} bytes, and is followed by others; pack it by itself")


def _stream_bounds(reader: StreamReader) -> tuple[memoryview, list[int] | None]:
    """Return the first bytes, read to plan the frames, and the frames' bounds, None if these are not in the header."""
    head = reader.read(HEADER_SIZE)
    if len(head) < HEADER_SIZE:
        raise too_short(len(head), head)
    header = decode_header(head)
    if header is None:
        return memoryview(head), None
    if not header.front:
        return memoryview(head), _frame_bounds(header, None)
    head += reader.read(header.index_size)
    if len(head) < HEADER_SIZE + header.index_size:
        raise FormatError(f"ends after {len(head)} of {header.archive_size} bytes; it is truncated, copy it again")
    size = header.archive_size
    memory = sparse_memory(size, [(0, head), (size - HEADER_SIZE, head[:HEADER_SIZE])])
    archive = open_archive(memory, verify="index")
    require_one_file(archive, _PACKING)
    return memoryview(head), _frame_bounds(header, archive.index.payloads["offset"])


def _frame_bounds(header: Header, payload_offsets: Any | None) -> list[int]:
    """Return the offsets at which frames begin, at payloads if their offsets are known, and the archive's end (R82)."""
    end = header.payload_region[1]
    if payload_offsets is None:
        first, payload_frames = header.payload_offset, iter(range(header.payload_offset, end, _FRAME))
    else:
        marks = np.append(np.unique(payload_offsets.astype(np.int64) + header.payload_offset), end)
        first, payload_frames = int(marks[0]), _payload_frame_starts(marks)
    last_frames = _frame_starts(end, header.archive_size)
    return [*_frame_starts(0, first), *payload_frames, *last_frames, header.archive_size]


def _frame_starts(start: int, end: int) -> range:
    """Return the starts of the frames of one region; the last frame may be 1.5 times as large."""
    return range(start, max(end - _FRAME // 2, start + 1), _FRAME)


def _payload_frame_starts(marks: Any) -> Iterator[int]:
    """Yield the starts of the payloads' frames, of which small ones share one; `marks` are their starts and end."""
    i, last = 0, len(marks) - 1
    while i < last:
        start, following = marks[i : i + 2].tolist()
        if following - start >= _GATHERED:
            yield from _frame_starts(start, following)
            i += 1
        else:
            yield start
            i = int(np.searchsorted(marks, start + _GATHERED, "right")) - 1  # the last start within _GATHERED
