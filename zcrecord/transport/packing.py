"""An archive on its way into zstd frames, from a file or a stream; and what to make sure of while one passes.

Where it is cut is `cutting`'s, what becomes of the frames `transport`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from itertools import chain, pairwise, repeat
from typing import Any

import numpy as np

from zcrecord.archive.archive import open_archive
from zcrecord.codec.layout import HEADER_SIZE, Header, decode_header, locate, too_short
from zcrecord.errors import FormatError, LimitError, SourceError, UnsupportedError
from zcrecord.storage.compressed import import_zstandard
from zcrecord.storage.files import Progress, identity_of, open_source
from zcrecord.storage.memory import map_file, read_at
from zcrecord.storage.sink import Sink
from zcrecord.storage.stream_reader import StreamReader
from zcrecord.storage.threads import Start, map_ordered

from .cutting import FRAME, cuts
from .frames import EXPANDED, Row
from .open import outline

__all__ = ["PREADV", "Watch", "compressors_of", "of_file", "of_stream"]

PREADV = hasattr(os, "preadv")  # threads can read a file each by itself
_INDEX_FREE = 32 << 20  # bytes of an index that may come out of next to nothing


class Watch:
    """What passes of an archive: how much, both its ends, and its index if the header says where that is.

    `packed` tells how many bytes it comes out of, where it is being unpacked: the index is held in memory, and must not
    take out of all proportion to them.
    """

    def __init__(self, progress: Progress | None, packed: Callable[[], int] | None = None) -> None:
        self._packed = packed
        self.expected: int | None = None
        self.done = self.size = 0
        self._progress = progress
        self._first = self._last = b""
        self._header: Header | None = None
        self._index = bytearray()

    def advance(self, nbytes: int) -> None:
        """Say that so many more bytes are done."""
        self.done += nbytes
        if self._progress is not None:
            self._progress(self.done, self.expected)

    def see(self, piece: Any) -> None:
        """Take notice of the next bytes.

        Raises:
            FormatError: no archive starts so, or it is over already. LimitError: see above.
        """
        start, end = self.size, self.size + len(piece)
        if start < HEADER_SIZE:
            self._first += bytes(piece[: HEADER_SIZE - start])
            if end >= HEADER_SIZE:
                self._header = decode_header(self._first)
        if self._header is not None:
            if end > self._header.archive_size:  # said now: a small frame may go on for terabytes
                whole = self._header.archive_size
                raise FormatError(f"holds more than the archive's {whole} bytes; the file is damaged")
            begin, stop = self._header.index_offset, self._header.index_offset + self._header.index_size
            self._index += piece[max(begin - start, 0) : max(stop - start, 0)]
            if self._packed is not None and len(self._index) > EXPANDED * self._packed() + _INDEX_FREE:
                what = f"its index takes more than {EXPANDED} times the bytes it is packed into"
                raise LimitError(f"{what}; `zstd -d` decompresses it")
        self._last = (self._last + bytes(piece[-HEADER_SIZE:]))[-HEADER_SIZE:]
        self.size = end

    def check(self, sink: Sink | None = None) -> None:
        """Make sure that it was an archive; its index may be read back from where the archive was written.

        Raises:
            FormatError: it was none. IntegrityError: its index is damaged.
        """
        if self.size < 2 * HEADER_SIZE:
            raise too_short(self.size, self._first)
        memory = outline(self.size, [(0, self._first), (self.size - HEADER_SIZE, self._last)])
        header = locate(memory.octets, None)[1]
        index: bytes | bytearray = self._index
        if not index and sink is not None and sink.can_rewind:
            index = sink.read_back(header.index_offset, header.index_size)
        if index:
            memory.octets[header.index_offset : header.index_offset + len(index)] = index
            open_archive(memory, verify="index")


def compressors_of(level: int) -> Start[Any, tuple[Row, bytes]]:
    """Return what makes, for each thread, what compresses a piece into a frame."""
    package = import_zstandard()
    if not isinstance(level, int) or not 1 <= level <= package.MAX_COMPRESSION_LEVEL:
        raise UnsupportedError(f"level={level!r} is not a number from 1 to {package.MAX_COMPRESSION_LEVEL}")

    def start() -> Callable[[Any], tuple[Row, bytes]]:
        compressor = package.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)

        def work(piece: Any) -> tuple[Row, bytes]:
            frame = compressor.compress(piece)
            return Row(len(frame), len(piece), int.from_bytes(frame[-4:], "little")), frame

        return work

    return start


def of_file(
    path: str, watch: Watch, compressors: Start[Any, tuple[Row, bytes]], threads: int
) -> Generator[tuple[Row, bytes], None, None]:
    """Yield the frames of an archive in a file, which each thread reads by itself.

    Raises:
        FormatError: it is no archive. SourceError: it was changed meanwhile.
    """
    memory = map_file(path)
    archive = open_archive(memory, verify="index")
    where = cuts(archive.header, archive.index.payloads["offset"])
    archive.release()
    watch.expected = where[-1]
    file, _ = open_source(path)

    def start() -> Callable[[tuple[int, int]], tuple[Row, bytes]]:
        compress, buffer = compressors(), np.empty(max(np.diff(where)), np.uint8).data

        def work(span: tuple[int, int]) -> tuple[Row, bytes]:
            piece = buffer[: span[1] - span[0]]
            read_at(file.fileno(), piece, span[0])
            return compress(piece)

        return work

    with file:
        yield from map_ordered(start, pairwise(where), threads)
        if identity_of(file.fileno()) != memory.identity:
            raise SourceError("was changed or replaced while it was packed; pack it again")


def of_stream(
    reader: StreamReader, watch: Watch, compressors: Start[Any, tuple[Row, bytes]], threads: int
) -> Generator[tuple[Row, bytes], None, None]:
    """Yield the frames of an archive as it comes, and make sure that it was one."""
    yield from map_ordered(compressors, _pieces(reader, watch), threads)
    watch.check()


def _pieces(reader: StreamReader, watch: Watch) -> Iterator[bytes]:
    """Yield an archive in the pieces that become frames.

    Raises:
        FormatError: it is no archive, or ends too early or too late.
    """
    held, where = _planned(reader)
    watch.expected = None if where is None else where[-1]
    sizes = chain([HEADER_SIZE], repeat(FRAME)) if where is None else np.diff(where).tolist()
    for size in sizes:
        piece = held[:size].tobytes()
        held = held[size:]
        piece += reader.read(size - len(piece))
        if len(piece) < size and where is not None:
            what = f"ends after {watch.size + len(piece)} of {where[-1]} bytes"
            raise FormatError(f"{what}; it is truncated, or still being written")
        if not len(piece):
            return
        watch.see(piece)
        yield piece
    if reader.read(1):
        raise FormatError(f"the archive has {watch.size} bytes, and is followed by others; pack it by itself")


def _planned(reader: StreamReader) -> tuple[memoryview, list[int] | None]:
    """Return what was read to learn where to cut, and the cuts, both ends included; None where that is not known."""
    head = reader.read(HEADER_SIZE)
    if len(head) < HEADER_SIZE:
        raise too_short(len(head), head)
    header = decode_header(head)
    if header is None:
        return memoryview(head), None
    if not header.front:
        return memoryview(head), cuts(header, None)
    head += reader.read(header.index_size)
    if len(head) < HEADER_SIZE + header.index_size:
        raise FormatError(f"ends after {len(head)} of {header.archive_size} bytes; it is truncated, copy it again")
    size = header.archive_size
    archive = open_archive(outline(size, [(0, head), (size - HEADER_SIZE, head[:HEADER_SIZE])]), verify="index")
    return memoryview(head), cuts(header, archive.index.payloads["offset"])
