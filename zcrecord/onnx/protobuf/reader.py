"""Protobuf's wire format, read forward only: a fixed-size buffer over a stream, and the message that is kept.

The reader never seeks and never holds a payload; what it passes is kept byte for byte in a `Skeleton`, if it was given
one, except for what is dropped. Knows tags, lengths, varints and groups, and when they are malformed; the meaning of
fields is left to `scanner`, files that can be read at any place to `lazy.locate`.

Source: https://protobuf.dev/programming-guides/encoding/ (proto2; limits as in protobuf's own parsers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from zcrecord.errors import OnnxError, SourceError

VARINT, FIXED64, LEN, GROUP, END_GROUP, FIXED32 = range(6)
MAX_NESTING = 100  # messages in messages, groups included: protobuf's own default
MAX_LENGTH = (1 << 31) - 1  # of one field: protobuf's limit for a message
MOST_TAG = 5  # bytes of a tag or a length: a varint may have 10, but protobuf's parsers stop here
MAX_TEXT = 1 << 16  # bytes of a name that is looked at
WINDOW = 1 << 19  # bytes held of the stream; with the hash and the write they stay in a core's cache
OPEN_END = 1 << 62  # the end of a message of unknown length: the model itself
PIECE = 1 << 20  # bytes of a large value handed out at a time
HEADER = 20  # bytes of the longest tag and length
SLACK = 10  # readable bytes that VarintDecoder wants behind the last varint
_LARGEST = 3 << 19  # bytes; more than most arrays that a piece of varints takes

# How the 7-bit groups of a word are squeezed together, two neighbours at a time: bits that move, by how many, and the
# bytes after its first of a varint that has any. To move bits down by n is to subtract, 2^n - 1 times, their value at
# the new place from the word.
_STEPS = [(0x7F007F007F007F00, 1, 1), (0x3FFF00003FFF0000, 2, 2), (0x0FFFFFFF00000000, 4, 4)]
# Bits of a word that belong to a varint, by bytes after its first.
_MASKS = {
    size: np.array([int.from_bytes(b"\x7f" * min(n + 1, size), "little") for n in range(10)], f"u{size}")
    for size in (2, 4, 8)
}
_TAIL_MASKS = np.array([0x7F, 0x17F], np.uint64)  # of a ninth byte, of a ninth and the one bit of a tenth

Array = npt.NDArray[Any]
Mark = tuple[int, int, int, int]  # of an open message: tag and size as read; offset and size of its header as kept

DAMAGED = "the model is truncated or damaged, copy or export it again"


def encode_varint(value: int) -> bytes:
    """Encode a non-negative number as a varint."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_field(number: int, data: bytes) -> bytes:
    """Encode a length-delimited field with its tag."""
    return encode_varint(number << 3 | LEN) + encode_varint(len(data)) + data


class Skeleton:
    """A message under construction whose parts may be views of foreign buffers."""

    __slots__ = ("_size", "parts", "tail")

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.tail = bytearray()
        self._size = 0  # of the parts, without the tail

    def __len__(self) -> int:
        return self._size + len(self.tail)

    def replace(self, offset: int, nbytes: int, header: bytes) -> None:
        """Replace the header of a message at an offset, which is not in an inserted part."""
        place, number = offset - self._size, len(self.parts)
        while place < 0:
            number -= 1
            place += len(self.parts[number])
        part = self.tail if number == len(self.parts) else self.parts[number]
        part[place : place + nbytes] = header
        self._size += 0 if part is self.tail else len(header) - nbytes

    def insert(self, data: Any) -> None:
        """Append a bytes-like as a part of its own, uncopied."""
        self.push()
        self.parts.append(data)
        self._size += len(data)

    def push(self) -> None:
        """Begin another part: so a longer header at the end of one moves no other byte."""
        self.parts.append(self.tail)
        self._size += len(self.tail)
        self.tail = bytearray()

    def finish(self) -> list[Any]:
        """Return the parts, in order."""
        if self.tail:
            self.push()
        return self.parts


class ProtobufReader:
    """A forward reader whose buffer has at most WINDOW bytes of the stream, from `pos` to `limit`.

    Offsets of the stream are `base` + position. Bytes from `mark` to `pos` go to the skeleton when the buffer is
    refilled; `mark` is -1 while they are dropped, and always without a skeleton. Slack behind `limit` allows a header
    to be read with one check of the limit, after it. A source with a method `piece`, as `StreamReader` has it, hands
    out large values without copying them into the buffer.
    """

    __slots__ = ("_eof", "_piece", "_progress", "_readinto", "base", "buffer", "limit", "mark", "pos", "skeleton",
                 "view")  # fmt: skip

    def __init__(
        self, source: Any, skeleton: Skeleton | None = None, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read a binary file object that has `readinto`, or bytes, which are all buffered at once."""
        whole = not hasattr(source, "readinto")
        self._readinto: Any = getattr(source, "readinto", None)
        self._piece = getattr(source, "piece", None)
        self._progress = progress
        self._eof = whole
        self.skeleton = skeleton
        self.buffer: Any = bytearray((len(source) if whole else WINDOW) + 2 * HEADER)
        self.view = memoryview(self.buffer)
        self.base = self.pos = self.limit = 0
        if whole:
            self.limit = len(source)
            self.view[: self.limit] = source
        self.mark = -1 if skeleton is None else 0

    @classmethod
    def over(cls, memory: memoryview) -> ProtobufReader:
        """Read memory uncopied; its last 2 * HEADER bytes are the slack."""
        reader = cls(b"")
        reader.buffer = reader.view = memory
        reader.limit = len(memory) - 2 * HEADER
        return reader

    def fail(self, fault: str, pos: int | None = None, *, do: str = DAMAGED) -> OnnxError:
        """Return the error for a fault at a position of the buffer; `do` is the advice."""
        offset = self.base + (self.pos if pos is None else pos)
        return OnnxError(f"byte {offset:#x}: {fault}; {do}", offset=offset)

    def fill(self, need: int) -> int:
        """Refill the buffer until it has `need` bytes from `pos` on, or the stream ends; return their number."""
        if self.mark >= 0 and self.skeleton is not None:
            self.skeleton.tail += self.view[self.mark : self.pos]
            self.mark = 0
        unread = self.limit - self.pos
        self.view[:unread] = self.view[self.pos : self.limit]
        self.base += self.pos
        self.pos, self.limit = 0, unread
        while self.limit < need and not self._eof:
            count = self.read(self.view[self.limit : WINDOW])
            self._eof = not count
            self.limit += count
        if self._progress is not None:
            self._progress(self.base + self.limit)
        return self.limit

    def read(self, buffer: memoryview) -> int:
        """Read the next bytes of the stream; return their number, 0 at the end."""
        try:
            count = self._readinto(buffer)
        except OSError as error:
            raise SourceError(f"cannot read: {error.strerror or error}", errno=error.errno) from error
        if count is None:
            raise SourceError("the source is non-blocking and has no bytes ready; make it blocking")
        return int(count)

    def at_end(self) -> bool:
        """Return True if the stream has no byte left."""
        return self.pos == self.limit and not self.fill(1)

    def header(self, end: int) -> tuple[int, int, int]:
        """Pass a field's tag and its length or varint; return the position of its start, the tag, the length or value.

        `end` is the offset in the stream at which the message ends. Bytes are looked at before it is known that the
        buffer has them: behind its limit is slack, and `pos` past the limit is an OnnxError then, as a malformed field.
        """
        if self.limit - self.pos < HEADER and self.base + self.limit < end:
            self.fill(HEADER)
        start, buffer = self.pos, self.buffer
        tag = buffer[start]
        pos = start + 1
        if tag > 127:
            tag, pos = self.varint(start)
            if tag >> 32 or pos - start > MOST_TAG:
                raise self.fail(f"a tag of more than 32 bits, or {MOST_TAG} bytes", start)
        kind = tag & 7
        if kind == LEN:
            value = buffer[pos]
            pos += 1
            if value > 127:
                value, pos = self.length(pos - 1)
            field_end = pos + value
        elif kind == VARINT:
            value = buffer[pos]
            pos += 1
            if value > 127:
                value, pos = self.varint(pos - 1)
            field_end = pos
        else:
            value = 8 if kind == FIXED64 else 4 if kind == FIXED32 else 0
            field_end = pos + value
        if pos > self.limit:
            raise self.fail("the stream ends inside a field", start)
        if tag < 8:
            raise self.fail("a field with number 0", start)
        if kind > FIXED32:
            raise self.fail(f"field {tag >> 3} has wire type {kind}, which does not exist", start)
        if self.base + field_end > end:
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
                fault = "the stream ends inside a varint" if pos > self.limit else "a varint of more than 10 bytes"
                raise self.fail(fault, start)

    def length(self, pos: int) -> tuple[int, int]:
        """Return the length at a position, and the position behind it."""
        value, after = self.varint(pos)
        if after - pos > MOST_TAG:
            raise self.fail(f"a length of more than {MOST_TAG} bytes", pos)
        return value, after

    @property
    def offset(self) -> int:
        """The offset in the stream of the next byte."""
        return self.base + self.pos

    def fields(self, end: int = OPEN_END, depth: int = 0) -> Iterator[tuple[int, int, int]]:
        """Yield the `header` of each field up to an offset; passes those fields that the caller does not."""
        if depth > MAX_NESTING:
            raise self.fail(f"messages nested more than {MAX_NESTING} deep")
        while self.base + self.pos < end:
            if self.pos == self.limit and self.at_end() and end == OPEN_END:
                return
            field = _, tag, value = self.header(end)
            body = self.base + self.pos
            yield field
            if tag & 7 != VARINT and self.base + self.pos == body:
                self.skip(tag, value, end, depth)

    def skip(self, tag: int, value: int, end: int, depth: int = 0) -> None:
        """Pass the rest of a field whose header was read."""
        kind = tag & 7
        if kind == LEN and value <= self.limit - self.pos:
            self.pos += value
        elif kind == GROUP:
            self._skip_group(tag, end, depth + 1)
        elif kind == END_GROUP:
            raise self.fail(f"the end of group {tag >> 3}, which was never started")
        elif kind != VARINT:
            self.advance(value)

    def _skip_group(self, tag: int, end: int, depth: int) -> None:
        """Pass a group up to its end tag, in a message that ends at an offset."""
        if depth > MAX_NESTING:
            raise self.fail(f"nested more than {MAX_NESTING} deep")
        while self.base + self.pos < end and not self.at_end():
            start, inner_tag, value = self.header(end)
            if inner_tag & 7 == END_GROUP:
                if inner_tag >> 3 != tag >> 3:
                    raise self.fail(f"group {tag >> 3} ends as group {inner_tag >> 3}", start)
                return
            self.skip(inner_tag, value, end, depth)
        raise self.fail(f"group {tag >> 3} never ends")

    def advance(self, nbytes: int) -> None:
        """Pass so many bytes, kept or dropped as `mark` says."""
        while nbytes > self.limit - self.pos:
            nbytes -= self.limit - self.pos
            self.pos = self.limit
            if not self.fill(1):
                raise self.fail(f"the stream ends {nbytes} bytes early")
        self.pos += nbytes

    def text(self, nbytes: int) -> bytes:
        """Pass a short field and return it."""
        if nbytes > MAX_TEXT:
            raise self.fail(f"a name of {nbytes} bytes, more than {MAX_TEXT}", do="shorten it")
        if nbytes > self.limit - self.pos and (nbytes > WINDOW or self.fill(nbytes) < nbytes):
            raise self.fail("the stream ends inside a name")
        self.pos += nbytes
        return bytes(self.view[self.pos - nbytes : self.pos])

    def chunks(self, nbytes: int) -> Iterator[memoryview]:
        """Pass `nbytes` bytes and yield them in chunks, each valid until the next; an early end is an OnnxError."""
        while nbytes:
            count = min(nbytes, self.limit - self.pos)
            if count:
                self.pos += count
                nbytes -= count
                yield self.view[self.pos - count : self.pos]
            elif self._piece is not None and nbytes > WINDOW:
                piece = self._piece(min(nbytes, PIECE))
                if not len(piece):
                    raise self._early_end(nbytes)
                self.base += len(piece)  # nothing is left in the buffer
                nbytes -= len(piece)
                if self._progress is not None:
                    self._progress(self.base + self.limit)
                yield piece
            elif not self.fill(1):
                raise self._early_end(nbytes)

    def _early_end(self, nbytes: int) -> OnnxError:
        return self.fail(f"the stream ends {nbytes} bytes before its tensor's values do")

    def drop(self, start: int) -> None:
        """Keep the bytes before a position of the buffer, drop those that follow until `keep`."""
        if self.mark >= 0 and self.skeleton is not None:
            self.skeleton.tail += self.view[self.mark : start]
        self.mark = -1

    def keep(self) -> None:
        """Keep the bytes that follow."""
        if self.skeleton is not None:
            self.mark = self.pos

    def open(self, start: int, tag: int, nbytes: int) -> Mark | None:
        """Begin a message in the skeleton, whose header began at `start`; return the mark for `close`."""
        skeleton = self.skeleton
        if skeleton is None:
            return None
        mark = tag, nbytes, len(skeleton) + start - self.mark, self.pos - start
        if nbytes > WINDOW:  # its header ends a part, so that `close` moves few bytes for a longer one
            self.finish()
            self.keep()
            skeleton.push()
        return mark

    def close(self, mark: Mark | None) -> None:
        """End the message opened last; gives it another header if its size has changed in the skeleton."""
        skeleton = self.skeleton
        if mark is not None and skeleton is not None:
            tag, nbytes_read, offset, header_size = mark
            nbytes = len(skeleton) + self.pos - self.mark - offset - header_size
            if nbytes != nbytes_read:
                self.finish()
                self.keep()
                skeleton.replace(offset, header_size, encode_varint(tag) + encode_varint(nbytes))

    def finish(self) -> None:
        """Keep the bytes that were passed last."""
        self.drop(self.pos)


def read_pair(reader: ProtobufReader, end: int) -> tuple[str, str]:
    """Pass a StringStringEntryProto that ends at this offset of the stream, and return its key and value."""
    key_tag, value_tag = 1 << 3 | LEN, 2 << 3 | LEN
    texts = {key_tag: b"", value_tag: b""}
    for _, tag, nbytes in reader.fields(end):
        if tag in texts:
            texts[tag] = reader.text(nbytes)
    key, value = (text.decode("utf-8", "surrogateescape") for text in texts.values())
    return key, value


class VarintDecoder:
    """Decodes many varints at a time, in memory that it keeps: fresh memory costs more than the arithmetic does."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        # The C library of Linux maps blocks larger than the largest it has seen freed, and unmaps them again: a
        # page fault for every 4 KiB each time. It learns from one block, of which nothing is touched.
        np.empty(_LARGEST, np.uint8)

    def _array(self, name: str, count: int, kind: Any) -> Array:
        """Return an array of kept memory, uninitialised; valid until the next call with this name."""
        memory = self._memory.get(name)
        if memory is None or len(memory) < count:
            self._memory[name] = memory = np.empty(count + (count >> 2), kind)
        return memory[:count]

    def decode(self, data: Array, nbytes: int) -> Array:
        """Return the varints in the first `nbytes` bytes of `data`, unsigned, valid until the next call.

        At least SLACK bytes must follow them, and the last must be whole. A varint of more than 10 bytes gives
        ValueError with its position.
        """
        is_last = np.less(data[:nbytes], 128, out=self._array("last", nbytes, np.bool_))
        if is_last.all():
            return data[:nbytes]
        ends = np.flatnonzero(is_last)
        starts = self._array("starts", len(ends), np.int64)
        starts[:1] = 0
        np.add(ends[:-1], 1, out=starts[1:])
        extra = np.subtract(ends, starts, out=self._array("extra", len(ends), np.int64))  # bytes after the first
        most_extra = int(extra.max())
        if most_extra > 9:
            raise ValueError(int(starts[extra.argmax()]))
        size = 2 if most_extra < 2 else 4 if most_extra < 4 else 8  # bytes of the word for a varint
        kind = np.dtype(f"u{size}").type
        words_at = self._words_at_each_byte(data, size)
        words = np.take(words_at, starts, out=self._array(f"words{size}", len(starts), kind), mode="clip")
        scratch = self._array(f"scratch{size}", len(words), kind)
        words &= np.take(_MASKS[size], extra, out=scratch, mode="clip")
        all_bits = (1 << 8 * size) - 1
        for moved_bits, shift, least_extra in _STEPS:
            if most_extra >= least_extra:
                np.bitwise_and(words, kind(moved_bits & all_bits), out=scratch)
                scratch >>= kind(shift)
                if shift > 1:
                    scratch *= kind((1 << shift) - 1)
                words -= scratch
        if most_extra > 7:
            _add_tails(words, words_at, starts, extra)
        return words

    def _words_at_each_byte(self, data: Array, size: int) -> Array:
        """Return the `size` bytes from each byte on as numbers, in aligned memory, which numpy's take needs."""
        count = len(data) - size + 1
        words = self._array(f"words_at{size}", count, f"u{size}")
        words[:] = np.ndarray((count,), f"<u{size}", data, strides=(1,))
        return words


def _add_tails(words: Array, words_at: Array, starts: Array, extra: Array) -> None:
    """Add the bits of ninth and tenth bytes to the numbers of varints that have such bytes."""
    long = np.flatnonzero(extra > 7)
    tails = words_at.take(starts.take(long) + 8)
    tails &= _TAIL_MASKS.take(extra.take(long) - 8)
    top = tails >> np.uint64(8) << np.uint64(63)
    tails <<= np.uint64(56)
    words[long] |= tails | top
