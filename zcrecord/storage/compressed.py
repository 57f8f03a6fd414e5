"""Compressed input, zstd or gzip, recognised by its first bytes and decompressed on the way.

In bounded memory, however far the data expand, and without seeking. Data that end early are an error.

Source: RFC 8878 (zstd: frames 3.1.1, blocks 3.1.1.2, skippable frames 3.1.2); RFC 1952 (gzip).
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any

from zcrecord.errors import FormatError, RecordError, missing_package

from .stream_reader import check_readable, read_into

SUFFIXES = (".zst", ".gz")  # of files that are decompressed when they are read
_ZSTD, _GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_SKIPPABLE = bytes(range(0x50, 0x60)), b"\x2a\x4d\x18"  # the first byte, and the three after it
_EMPTY_RAW, _EMPTY_REPEATED = b"\1\0\0", b"\3\0\0\0"  # last blocks without content: no bytes, a byte repeated no times
_HEAD = 256  # bytes of a stream that are peeked at


class PeekableStream(io.RawIOBase):
    """A stream whose first bytes, `head`, are known and will be read again; `position` counts the bytes read."""

    def __init__(self, stream: Any) -> None:
        check_readable(stream)
        self._stream = stream
        self.position = 0
        head, nbytes = memoryview(bytearray(_HEAD)), 0
        while nbytes < _HEAD and (count := read_into(stream, head[nbytes:])):
            nbytes += count
        self.head = self._unread_head = head[:nbytes].tobytes()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read some bytes, as the stream does."""
        if self._unread_head:
            nbytes = min(len(buffer), len(self._unread_head))
            buffer[:nbytes], self._unread_head = self._unread_head[:nbytes], self._unread_head[nbytes:]
            self.position += nbytes
            return nbytes
        count = read_into(self._stream, buffer)
        self.position += count or 0
        return count


def decompressed(stream: PeekableStream) -> Any:
    """Return a stream that decompresses zstd or gzip; any other as it is. DependencyError without zstandard."""
    if stream.head.startswith(_GZIP):
        import gzip

        return _Decompressed(stream, gzip.GzipFile(fileobj=stream, mode="rb"), "gzip", (EOFError, zlib.error))
    if stream.head.startswith(_ZSTD) or _is_skippable(stream.head[:4]):
        frames, package = ZstdFrames(io.BufferedReader(stream, 1 << 17).read), import_zstandard()
        # A frame may ask for any amount of memory; zstd itself refuses more than 128 MiB.
        reader = package.ZstdDecompressor().stream_reader(frames, read_across_frames=True)
        return _Decompressed(stream, reader, "zstd", (package.ZstdError,), frames)
    return stream


def import_zstandard() -> Any:
    """Return the module; a DependencyError if it is not installed."""
    try:
        import zstandard as module
    except ImportError as error:
        raise missing_package("zstandard", extra="zstd") from error
    return module


def is_one_frame(data: memoryview) -> bool:
    """Return True if zstd data are exactly one whole frame with content; reads only headers of frame and blocks."""
    frames, offset = ZstdFrames(bytes), 0
    while offset < len(data) and data[:4] == _ZSTD and frames.begun < 2:  # bytes of zero are as many blocks
        piece = data[offset : offset + frames.due]
        frames.feed(piece)
        offset += len(piece)
    return offset == len(data) and frames.complete and frames.begun == 1


def _is_skippable(magic: bytes) -> bool:
    return magic[1:] == _SKIPPABLE[1] and magic[0] in _SKIPPABLE[0]


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a stream; errors of the decompressor become one typed error."""

    def __init__(
        self, stream: PeekableStream, reader: Any, kind: str, errors: tuple[Any, ...], frames: ZstdFrames | None = None
    ) -> None:
        self._stream, self._reader, self._kind, self._errors, self._frames = stream, reader, kind, errors, frames

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            nbytes = int(self._reader.readinto(buffer))
        except RecordError:  # of reading the input
            raise
        except (OSError, *self._errors) as error:  # gzip reports damage by an OSError without a number
            if getattr(error, "errno", None) is not None:
                raise
            raise self._damage_error(str(error)) from error
        if not nbytes and len(buffer) and self._frames is not None and not self._frames.complete:
            raise self._damage_error("it ends inside a frame")
        return nbytes

    def _damage_error(self, reason: str) -> FormatError:
        fault = f"the {self._kind} stream is truncated or damaged ({reason}); copy or download it again"
        return FormatError(fault, offset=self._stream.position)


class ZstdFrames:
    """Cuts zstd data for the decompressor: each header, and each block, is a piece of its own.

    The decompressor accepts any end as the end. For an invalid frame, which refers to bytes before its window, its
    result depends on how the input is cut, and on whether the output has room for all of it. So the input is always cut
    in this way, or passed whole, and the output has as little room as the window (`transport.frames`).

    The decompressor does not compare a frame's declared size if the last block has no bytes, unless the frame is passed
    whole. So that block is replaced by another one without content, after which it does.

    Attributes: `begun`, the number of frames that have begun.
    """

    def __init__(self, source: Callable[[int], bytes]) -> None:
        """Read the data by `source(size)`, which returns fewer bytes only at their end."""
        self._source = source
        self._skip = 0  # bytes until the next header
        self._parse_next, self._header_size = self._parse_magic, 4
        self._header = b""
        self._checksum_size = 0
        self._has_room = True  # the frame may have content
        self.begun = 0

    @property
    def due(self) -> int:
        """The most bytes of the next piece."""
        return self._skip or self._header_size - len(self._header)

    def read(self, size: int) -> bytes:
        """Return the next piece, of at most `size` bytes; none at the end."""
        data = self._source(min(size, self.due)) or b""  # None from one that does not wait, and has none ready
        is_block = self._parse_next == self._parse_block and not self._skip and self._has_room
        self.feed(data)
        return _EMPTY_REPEATED if is_block and data == _EMPTY_RAW else data

    def feed(self, piece: Any) -> None:
        """Parse the headers in the next bytes, of which at most `due` are given."""
        if self._skip:
            self._skip -= len(piece)
            return
        self._header += piece
        if len(self._header) == self._header_size:
            header, self._header = self._header, b""
            self._parse_next(header)

    @property
    def complete(self) -> bool:
        """True if the pieces so far end with a frame."""
        return not (self._skip or self._header) and self._parse_next == self._parse_magic

    def _expect(self, parse: Any, nbytes: int, skip: int = 0) -> None:
        """Have `parse` parse the next header, of `nbytes` bytes, which comes after `skip` bytes."""
        self._parse_next, self._header_size, self._skip = parse, nbytes, skip

    def _parse_magic(self, header: bytes) -> None:
        self.begun += 1
        if _is_skippable(header):
            self._expect(self._parse_skippable, 4)
        else:  # if it is not a frame, the decompressor reports it
            self._expect(self._parse_descriptor, 1)

    def _parse_skippable(self, header: bytes) -> None:
        self._expect(self._parse_magic, 4, int.from_bytes(header, "little"))

    def _parse_descriptor(self, header: bytes) -> None:
        single = header[0] >> 5 & 1  # 1: the frame is one segment, and has no window descriptor
        content = (single, 2, 4, 8)[header[0] >> 6]  # bytes of the content size
        self._checksum_size = 4 * (header[0] >> 2 & 1)
        self._has_room = not single or content == 2  # 0 in two bytes is 256
        self._expect(self._parse_content_size, (1 - single) + (0, 1, 2, 4)[header[0] & 3] + content)

    def _parse_content_size(self, header: bytes) -> None:
        self._has_room = self._has_room or any(header)  # or a block of one byte is too large for the frame
        self._expect(self._parse_block, 3)

    def _parse_block(self, header: bytes) -> None:
        """Expect a block's content and the next block; after the last one the checksum and the next frame."""
        number = int.from_bytes(header, "little")
        nbytes = 1 if number >> 1 & 3 == 1 else number >> 3  # 1: one byte, repeated
        if number & 1:
            self._expect(self._parse_magic, 4, nbytes + self._checksum_size)
        else:
            self._expect(self._parse_block, 3, nbytes)
