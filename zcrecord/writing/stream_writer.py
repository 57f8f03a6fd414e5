"""An archive written forward: payloads as they come, the index behind them, what equals an earlier one stored once.

Which tensors share bytes on purpose is decided by `sharing`, what the entries say by `tree` and `paths`, where the
bytes go by `sink`.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from zcrecord.codec.entries import Entries, PayloadId, change_values
from zcrecord.codec.index import PAYLOAD, encode
from zcrecord.codec.layout import (
    HEADER_SIZE,
    LARGE_PAYLOAD,
    MAX_ALIGNMENT,
    NONE,
    Header,
    align_up,
    check_alignment,
    encode_unsealed,
    payload_alignment,
)
from zcrecord.errors import IntegrityError, UnsupportedError
from zcrecord.storage.sink import Sink
from zcrecord.tensors.lazy import LazyTensor

from .front_writer import SaveReport, digest_kind, report_of
from .sharing import chunks

__all__ = ["HELD", "StreamWriter"]

_COMPARE = 1 << 20  # bytes compared at a time
_ZEROS = bytes(MAX_ALIGNMENT)
HELD = 1 << 19  # bytes of a payload on its way into a pipe that are held until it is whole


class StreamWriter:
    """A back-indexed archive, written forward as payloads come; nothing but their places is held.

    Into a sink that can seek and be read back, a payload equal to an earlier one is taken back after its digest and
    its bytes were compared, and the header is sealed at the end. Into a pipe, payloads up to HELD bytes wait until
    they are whole, and those equal to an earlier one of that size are not written; their bytes are gone by then, so
    it is their SHA-256 that is compared. Larger ones all stay. The header is unsealed, which readers of whole files
    do not mind.

    Example:
        >>> import io
        >>> from zcrecord.storage.sink import open_sink
        >>> with open_sink(io.BytesIO()) as sink:
        ...     out = StreamWriter(sink)
        ...     out.begin(4)
        ...     out.write(b"abcd")
        ...     out.end()
        0
    """

    def __init__(self, sink: Sink, *, alignment: int = 64, digest: str | None = "xxh3") -> None:
        self._sink = sink
        self._alignment = check_alignment(alignment)
        self._kind = digest_kind(digest)
        self._base = alignment
        self._payload_offset = align_up(HEADER_SIZE, alignment)
        self._rows = array("Q")  # offset, nbytes, digest of each payload; numbers, not objects: there may be millions
        self._seen: dict[Any, int] = {}  # digest and nbytes as one number, or SHA-256 -> absolute offset
        self._before: tuple[int, int, Any] = (0, 0, None)  # the last payload: end and base without it, key in `_seen`
        self._start = -1
        self._end = self._payload_offset
        self._hash = xxhash.xxh3_64()
        self._held: bytearray | None = None  # the payload in progress, while it may turn out to be there already
        self._waiting: tuple[int, bytearray] | None = None  # the payload before it, and where it is to start
        self.index: bytes | bytearray = b""  # as it was written
        sink.write(encode_unsealed(alignment) + bytes(self._payload_offset - HEADER_SIZE))

    def store(self, source: Any) -> int:
        """Write one payload: what a LazyTensor produces, or the bytes of an array or SplitSource; return its id."""
        self.begin(source.nbytes)
        for piece in source.pieces() if isinstance(source, LazyTensor) else chunks(source):
            self.write(piece)
        return self.end()

    def add_all(self, payloads: Sequence[Any]) -> None:
        """Write payloads from bytes in memory, none of them empty; their ids follow the last one given.

        One that equals an earlier one is not written, where the sink can be read back.
        """
        sink = self._sink
        if not self._kind or not sink.can_rewind or max(map(len, payloads), default=0) >= LARGE_PAYLOAD:
            for data in payloads:
                self.begin(len(data))
                self.write(data)
                self.end()
            return
        assert self._start < 0, "end() the payload in progress first"
        parts: list[Any] = []  # written together, each after zeros up to its alignment
        position, rows, seen = sink.position, self._rows, self._seen
        for data, digest in zip(payloads, map(xxhash.xxh3_64_intdigest, payloads), strict=True):
            nbytes = len(data)
            gap = -position & self._alignment - 1
            start = position + gap
            key = nbytes << 64 | digest
            earlier = seen.setdefault(key, start)
            self._before = self._end, self._base, key if earlier == start else None
            if earlier != start:
                sink.write(b"".join(parts))
                parts.clear()
            if earlier == start or sink.read_back(earlier, nbytes) != data:
                earlier = start
                parts += _ZEROS[:gap], data
                position = self._end = start + nbytes
            rows.extend((earlier - self._payload_offset, nbytes, digest))
        sink.write(b"".join(parts))

    @property
    def payloads(self) -> int:
        """How many there are: the next one's id."""
        return len(self._rows) // 3

    def begin(self, nbytes: int) -> None:
        """Start a payload of about `nbytes` bytes; the number only decides its alignment."""
        assert self._start < 0, "end() the payload in progress first"
        self._settle()
        strongest = payload_alignment(nbytes, self._alignment)
        self._before = self._end, self._base, None
        self._base = max(self._base, strongest)
        self._start = align_up(self._sink.position, strongest)
        self._hash.reset()
        if self._kind and not self._sink.can_rewind and nbytes <= HELD:
            self._held = bytearray()

    def write(self, data: Any) -> None:
        """Append any bytes-like to the payload in progress."""
        if self._held is not None:
            self._held.extend(data)  # not +=, which an ndarray takes for arithmetic
            if len(self._held) <= HELD:
                return
            data, self._held = self._held, None
        self._hash.update(data)
        if memoryview(data).nbytes:  # only then: where no byte follows there must be no zeros either (R13)
            self._put(self._start, data)

    def _put(self, start: int, data: Any) -> None:
        gap = start - self._sink.position
        if gap > 0:
            self._sink.write(bytes(gap))
        self._sink.write(data)

    def end(self) -> int:
        """Finish the payload in progress and return its id, NONE if no byte was written."""
        start, self._start = self._start, -1
        if self._held is not None:
            held, self._held = self._held, None
            return self._end_held(start, held) if held else NONE
        nbytes = self._sink.position - start
        if nbytes <= 0:
            return NONE
        digest = self._hash.intdigest() if self._kind else 0
        if self._kind and self._sink.can_rewind:
            earlier = self._note(nbytes << 64 | digest, start)
            if earlier != start and self._equal(earlier, start, nbytes):
                self._sink.rewind(self._end)
                start = earlier
        return self._row(start, nbytes, digest)

    def _end_held(self, start: int, data: bytearray) -> int:
        """Finish a payload of which no byte is written yet."""
        import hashlib  # here, because few write into pipes

        earlier = self._note(hashlib.sha256(data).digest(), start)
        if earlier == start:
            self._waiting = start, data
        return self._row(earlier, len(data), xxhash.xxh3_64_intdigest(data))

    def _note(self, key: Any, start: int) -> int:
        """Return where a payload with this key starts: an earlier one, or this one."""
        earlier = self._seen.setdefault(key, start)
        if earlier == start:
            self._before = *self._before[:2], key
        return earlier

    def _row(self, start: int, nbytes: int, digest: int) -> int:
        if start + nbytes > self._end:
            self._end = start + nbytes
        self._rows.extend((start - self._payload_offset, nbytes, digest))
        return len(self._rows) // 3 - 1

    def _settle(self) -> None:
        """Write the payload that waited."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._put(*waiting)

    def forget(self, number: int) -> None:
        """Take back the payload that was ended last, by its id, which must not be used.

        Raises:
            UnsupportedError: another was written since, or it is on its way through a pipe.
        """
        if number != len(self._rows) // 3 - 1:
            raise UnsupportedError("only the last payload can be taken back")
        start = self._rows[-3] + self._payload_offset
        del self._rows[-3:]
        end, base, key = self._before
        if start < end:
            return  # equal to an earlier one: nothing was added
        if self._waiting is None and not self._sink.can_rewind:
            raise UnsupportedError("what went into a pipe cannot be taken back; write to a file")
        self._waiting = None
        self._seen.pop(key, None)
        if self._sink.can_rewind:
            self._sink.rewind(end)
        self._end, self._base = end, base

    def _equal(self, a: int, b: int, nbytes: int) -> bool:
        for done in range(0, nbytes, _COMPARE):
            size = min(_COMPARE, nbytes - done)
            if self._sink.read_back(a + done, size) != self._sink.read_back(b + done, size):
                return False
        return True

    def finish(self, entries: Entries) -> SaveReport:
        """Write index and trailer, and seal the header where the sink can seek."""
        assert self._start < 0, "end() the payload in progress first"
        self._add_bytes(entries)
        self._settle()
        self._sort(entries)
        entries.digest_kind = self._kind
        self.index = index = encode(entries)
        at = align_up(self._sink.position, self._alignment)
        self._sink.write(bytes(at - self._sink.position) + index)
        size = at + len(index) + HEADER_SIZE
        header = Header(self._alignment, self._base, at, len(index), self._payload_offset, size, zlib.crc32(index))
        self._sink.write(header.encode())
        if self._sink.can_rewind:
            self._sink.patch(0, header.encode())
        return report_of(entries, size)

    def verify_written(self) -> None:
        """Read back what was written, and compare it with the digests taken when it came and with the index.

        Raises:
            IntegrityError: the file holds something else. UnsupportedError: the sink cannot be read back.
        """
        if not self._sink.can_rewind:
            raise UnsupportedError("what went into a pipe cannot be read back; write to a file")
        for offset, nbytes, digest in np.unique(np.array(self._rows, np.uint64).reshape(-1, 3), axis=0).tolist():
            start = self._payload_offset + offset
            running = xxhash.xxh3_64()
            for done in range(start, start + nbytes, _COMPARE):
                running.update(self._sink.read_back(done, min(_COMPARE, start + nbytes - done)))
            if self._kind and running.intdigest() != digest:
                what = f"bytes [{start:#x}, {start + nbytes:#x}) are not what was written"
                raise IntegrityError(f"{what}; the disk or the memory is failing", offset=start)
        at = self._sink.position - HEADER_SIZE - len(self.index)
        if self._sink.read_back(at, len(self.index)) != self.index:
            raise IntegrityError("its index is not what was written; the disk or the memory is failing", offset=at)

    def _add_bytes(self, entries: Entries) -> None:
        """Store the bytes of attributes that were not streamed as payloads of their own."""

        def stored(value: Any) -> Any:
            if isinstance(value, bytes | memoryview):
                value = bytes(value)
                self.begin(len(value))
                self.write(value)
                return PayloadId(self.end())
            return value

        change_values(entries.attributes, stored)
        change_values(entries.metadata, stored)

    def _sort(self, entries: Entries) -> None:
        """Order payloads by offset, equal ranges side by side, and renumber who names them."""
        rows = np.array(self._rows, np.uint64).view(PAYLOAD)
        order = np.argsort(rows["offset"], kind="stable")
        entries.payload_rows = rows[order]
        if (order == np.arange(len(order))).all():
            return
        new = {old: i for i, old in enumerate(order.tolist())} | {NONE: NONE}

        def renumbered(value: Any) -> Any:
            return PayloadId(new[value]) if isinstance(value, PayloadId) else value

        entries.payloads = [new[p] for p in entries.payloads]
        change_values(entries.attributes, renumbered)
        change_values(entries.metadata, renumbered)
