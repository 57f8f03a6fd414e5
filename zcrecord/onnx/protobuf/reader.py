"""Protobuf's wire format, read forward only: a window of fixed size over a stream, and the message that is kept.

The window never seeks and never holds a payload; what it passes is kept byte for byte in a `Skeleton` unless the
reader drops it. (One that may seek, in a file, is `placed`'s.) Knows tags, lengths, varints and groups, and when they
are malformed; which fields mean what is left to `scanner`.

Source: https://protobuf.dev/programming-guides/encoding/ (proto2; limits as in protobuf's own parsers).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import IO, Any

from zcrecord.errors import OnnxError, SourceError

__all__ = ["MAX_NESTING", "VARINT", "ProtobufReader", "Skeleton", "encode_field", "encode_varint"]

VARINT, FIXED64, LEN, GROUP, END_GROUP, FIXED32 = range(6)
MAX_NESTING = 100  # messages in messages, groups included: protobuf's own default
MAX_LENGTH = (1 << 31) - 1  # of one field: protobuf's limit for a message
MOST_TAG = 5  # bytes of a tag or a length: a varint may have 10, but protobuf's parsers stop here
MAX_TEXT = 1 << 16  # bytes of a name that is looked at
WINDOW = 1 << 19  # bytes held of the stream; with the hash and the write they stay in a core's cache
OPEN_END = 1 << 62  # where a message ends whose length is not known: the model itself
PIECE = 1 << 20  # bytes of a large value handed out at a time
HEADER = 20  # bytes of the longest tag and length

Binary = IO[bytes] | io.RawIOBase | io.BufferedIOBase
DAMAGED = "the model is truncated or damaged, copy or export it again"


def encode_varint(value: int) -> bytes:
    """Return a non-negative number as a varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field, its tag included."""
    return encode_varint(number << 3 | LEN) + encode_varint(len(data)) + data


class Skeleton:
    """A message under construction whose parts may be other people's buffers; lengths are put in as messages close.

    Example:
        >>> s = Skeleton()
        >>> s.tail += b"\\x3a"
        >>> mark = s.open()
        >>> s.tail += b"abc"
        >>> s.close(mark)
        >>> bytes().join(s.finish())
        b':\\x03abc'
    """

    __slots__ = ("_size", "parts", "tail")

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.tail = bytearray()
        self._size = 0  # of the parts, without the tail

    def __len__(self) -> int:
        return self._size + len(self.tail)

    def open(self, nbytes: int = 0) -> tuple[int, int, int]:
        """Start a message of about `nbytes` bytes, its tag written already; returns what `close` wants back."""
        if nbytes > WINDOW and self.tail:  # so that a later length goes to the end of a part and moves nothing
            self._push()
            return len(self.parts) - 1, len(self.parts[-1]), self._size
        return len(self.parts), len(self.tail), self._size + len(self.tail)

    def close(self, mark: tuple[int, int, int]) -> None:
        """Put in the length of the message opened last and still open."""
        part, position, start = mark
        length = encode_varint(self._size + len(self.tail) - start)
        if part < len(self.parts):
            self.parts[part][position:position] = length
            self._size += len(length)
        else:
            self.tail[position:position] = length

    def insert(self, data: Any) -> None:
        """Append a bytes-like as a part of its own: not copied, so it must stay as it is."""
        self._push()
        self.parts.append(data)
        self._size += len(data)

    def _push(self) -> None:
        self.parts.append(self.tail)
        self._size += len(self.tail)
        self.tail = bytearray()

    def finish(self) -> list[Any]:
        """Return the parts, in order."""
        if self.tail:
            self._push()
        return self.parts


class ProtobufReader:
    """The bytes of a stream from `pos` to `limit`, at most WINDOW of them, refilled as they are passed.

    Offsets of the stream are `base` + position. Bytes from `mark` to `pos` go to the skeleton when the window moves
    on; `mark` is -1 while they are dropped. Behind the window lie a few bytes of slack, so that a header can be read
    without a check for each byte; whether it was all there is checked once after it. A source with a method `piece`, as
    `StreamReader` has it, hands out large values without their being copied into the window.
    """

    __slots__ = ("_eof", "_piece", "_progress", "_readinto", "base", "buffer", "limit", "mark", "pos", "skeleton",
                 "view")  # fmt: skip

    def __init__(self, source: Binary, skeleton: Skeleton, progress: Callable[[int], None] | None = None) -> None:
        self._readinto = _readinto(source)
        self._piece = getattr(source, "piece", None)
        self._progress = progress
        self._eof = False
        self.skeleton = skeleton
        self.buffer = bytearray(WINDOW + 2 * HEADER)
        self.view = memoryview(self.buffer)
        self.base = self.pos = self.limit = self.mark = 0

    def fail(self, what: str, pos: int | None = None, *, tensor: str | None = None, do: str = DAMAGED) -> OnnxError:
        """Return the error for something wrong at a position of the window; `do` says what to do about it."""
        offset = self.base + (self.pos if pos is None else pos)
        return OnnxError(f"byte {offset:#x}: {what}; {do}", tensor=tensor or None, offset=offset)

    def fill(self, need: int) -> int:
        """Move the window on until it holds `need` bytes, or the stream ends; returns how many it holds."""
        if self.mark >= 0:
            self.skeleton.tail += self.view[self.mark : self.pos]
            self.mark = 0
        rest = self.limit - self.pos
        self.view[:rest] = self.view[self.pos : self.limit]
        self.base += self.pos
        self.pos, self.limit = 0, rest
        while self.limit < need and not self._eof:
            done = self.read(self.view[self.limit : WINDOW])
            self._eof = not done
            self.limit += done
        if self._progress is not None:
            self._progress(self.base + self.limit)
        return self.limit

    def read(self, buffer: memoryview) -> int:
        """Read what follows in the stream, as much as is there and fits; returns how many bytes, 0 at the end."""
        return self._readinto(buffer)

    def at_end(self) -> bool:
        """Return whether the stream has no byte left."""
        return self.pos == self.limit and not self.fill(1)

    def header(self, end: int) -> tuple[int, int, int]:
        """Pass a field's tag and length; return where it started, the tag, and a length or a varint's value.

        `end` is the offset in the stream at which the message ends. The length is that of what follows; a varint is
        passed too.
        """
        if self.limit - self.pos < HEADER and self.base + self.limit < end:
            self.fill(HEADER)
        start = self.pos
        buffer = self.buffer
        tag = buffer[start]
        pos = start + 1
        if tag > 127:
            tag, pos = self.varint(start)
            if tag >> 32 or pos - start > MOST_TAG:
                raise self.fail(f"a tag of more than 32 bits, or {MOST_TAG} bytes", start)
        kind = tag & 7
        if kind in (LEN, VARINT):
            value = buffer[pos]
            pos += 1
            if value > 127:
                value, pos = self.varint(pos - 1) if kind == VARINT else self.length(pos - 1)
        else:
            value = 8 if kind == FIXED64 else 4 if kind == FIXED32 else 0
        if pos > self.limit:
            raise self.fail("the stream ends inside a field", start)
        if tag < 8:
            raise self.fail("a field with number 0", start)
        if kind > FIXED32:
            raise self.fail(f"field {tag >> 3} has wire type {kind}, which does not exist", start)
        if self.base + pos + (0 if kind == VARINT else value) > end:
            raise self.fail(f"field {tag >> 3} reaches past the end of the message it is in", start)
        if value > MAX_LENGTH and kind == LEN:
            raise self.fail(f"field {tag >> 3} claims {value} bytes, more than protobuf's 2 GiB", start)
        self.pos = pos
        return start, tag, value

    def varint(self, pos: int) -> tuple[int, int]:
        """Return the varint at a position, and the position behind it."""
        value = shift = 0
        start = pos
        while True:
            byte = self.buffer[pos]
            pos += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & 0xFFFFFFFFFFFFFFFF, pos
            shift += 7
            if pos - start == 10 or pos > self.limit:
                what = "the stream ends inside a varint" if pos > self.limit else "a varint of more than 10 bytes"
                raise self.fail(what, start)

    def length(self, pos: int) -> tuple[int, int]:
        """Return the length at a position, and the position behind it; protobuf reads no more of it than of a tag."""
        value, after = self.varint(pos)
        if after - pos > MOST_TAG:
            raise self.fail(f"a length of more than {MOST_TAG} bytes", pos)
        return value, after

    def skip(self, tag: int, value: int, end: int, depth: int = 0) -> None:
        """Pass the rest of a field whose header was read; it stays in the skeleton."""
        kind = tag & 7
        if kind == GROUP:
            self._skip_group(tag, end, depth + 1)
        elif kind == END_GROUP:
            raise self.fail(f"the end of group {tag >> 3}, which was never started")
        elif kind != VARINT:
            self.advance(value)

    def _skip_group(self, tag: int, end: int, depth: int) -> None:
        if depth > MAX_NESTING:
            raise self.fail(f"nested more than {MAX_NESTING} deep")
        while self.base + self.pos < end and not self.at_end():
            start, inner, value = self.header(end)
            if inner & 7 == END_GROUP:
                if inner >> 3 != tag >> 3:
                    raise self.fail(f"group {tag >> 3} ends as group {inner >> 3}", start)
                return
            self.skip(inner, value, end, depth)
        raise self.fail(f"group {tag >> 3} never ends")

    def advance(self, nbytes: int) -> None:
        """Pass so many bytes, kept or dropped as `mark` says."""
        while nbytes > self.limit - self.pos:
            nbytes -= self.limit - self.pos
            self.pos = self.limit
            if not self.fill(1):
                raise self.fail(f"the stream ends {nbytes} bytes early")
        self.pos += nbytes

    def hold(self, nbytes: int) -> bool:
        """Return whether the next `nbytes` bytes lie in the window together, after moving it if that helps."""
        if nbytes <= self.limit - self.pos:
            return True
        return nbytes <= WINDOW and self.fill(nbytes) >= nbytes

    def text(self, nbytes: int) -> bytes:
        """Pass a short field and return it."""
        if nbytes > MAX_TEXT:
            raise self.fail(f"a name of {nbytes} bytes, more than {MAX_TEXT}", do="shorten it")
        if not self.hold(nbytes):
            raise self.fail("the stream ends inside a name")
        self.pos += nbytes
        return bytes(self.view[self.pos - nbytes : self.pos])

    def chunks(self, nbytes: int) -> Iterator[memoryview]:
        """Pass `nbytes` bytes, each chunk valid until the next is asked for."""
        while nbytes:
            here = min(nbytes, self.limit - self.pos)
            if here:
                self.pos += here
                nbytes -= here
                yield self.view[self.pos - here : self.pos]
            elif self._piece is not None and nbytes > WINDOW:
                piece = self._piece(min(nbytes, PIECE))
                if not len(piece):
                    raise self._early(nbytes)
                self.base += len(piece)  # of the window nothing is left
                nbytes -= len(piece)
                if self._progress is not None:
                    self._progress(self.base + self.limit)
                yield piece
            elif not self.fill(1):
                raise self._early(nbytes)

    def _early(self, nbytes: int) -> OnnxError:
        return self.fail(f"the stream ends {nbytes} bytes before its tensor's values do")

    def drop(self, start: int) -> None:
        """Keep what lies before a position of the window, drop what follows until `keep`."""
        if self.mark >= 0:
            self.skeleton.tail += self.view[self.mark : start]
        self.mark = -1

    def keep(self) -> None:
        """Keep what follows."""
        self.mark = self.pos

    def finish(self) -> None:
        """Keep what was passed last."""
        self.drop(self.pos)


def _readinto(source: Binary) -> Callable[[memoryview], int]:
    """Return a function that reads some bytes of any binary source into a buffer, 0 at its end."""
    into = getattr(source, "readinto", None)

    def read(buffer: memoryview) -> int:
        try:
            if into is not None:
                done = into(buffer)
            else:
                data = source.read(len(buffer))
                done = None if data is None else len(data)
                buffer[: done or 0] = data or b""
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror or error}", errno=error.errno) from error
        if done is None:
            raise SourceError("the source is non-blocking and has no bytes ready; make it blocking")
        return int(done)

    return read
