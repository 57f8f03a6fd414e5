"""An archive written again with other entries: stored payloads go from file to file unread, new ones follow them.

The index stays in front or behind, and what stays keeps its order and its alignment. Neighbours move together, by
multiples of the base alignment, so that the file system can clone them: it shares whole blocks. Which entries and which
payloads is `record.edit`'s.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.digests import RunningDigest
from zcrecord.codec.entries import Entries, encode
from zcrecord.codec.index import PAYLOAD, Array
from zcrecord.codec.layout import HEADER_SIZE, LARGE_PAYLOAD, Header, align_up, payload_alignment
from zcrecord.errors import ProducerError
from zcrecord.storage.copying import BLOCK
from zcrecord.storage.sink import Sink
from zcrecord.tensors.lazy import LazyTensor

from .equal import equal_sources
from .sharing import chunks
from .writers import renumber_payloads

_WORTH = 1 << 16  # bytes of a run from which on it is handed to the file system, and has to stay on its blocks
_PIECE = 16 << 20  # bytes written at a time where it is not: signals are handled between two

Progress = Callable[[int, int], None]


class StoredArchive(NamedTuple):
    """An archive in a file: its header, its payloads' rows, all its bytes, mapped, and a descriptor of the file."""

    header: Header
    rows: Array
    buffer: memoryview
    file: int

    def payload(self, number: int) -> Array:
        """Return the bytes of a payload."""
        offset, nbytes, _ = self.rows[number].item()
        start = self.header.payload_offset + offset
        return np.frombuffer(self.buffer[start : start + nbytes], np.uint8)


class Written(NamedTuple):
    """Bytes of an archive that was written, and those of them that the file system cloned."""

    nbytes: int
    cloned: int


class _KeptRange(NamedTuple):
    """Neighbouring payloads that stay, and where they start: before and now, from the payloads' first byte on."""

    before: int
    now: int
    nbytes: int


class EditedArchive(NamedTuple):
    """An archive to be written, each byte's place known; `entries` are complete but for digests of lazy values."""

    stored: StoredArchive
    header: Header
    entries: Entries
    encoded: bytearray  # the index
    runs: list[_KeptRange]
    added: list[tuple[int, Any, int]]  # offset, source and row of each new payload

    @property
    def unchanged(self) -> bool:
        """True if it has the index, and so the payloads, that the stored archive has."""
        old = self.stored.header
        before = self.stored.buffer[old.index_offset : old.index_offset + old.index_size]
        return not self.added and before == self.encoded

    def write(self, sink: Sink, progress: Progress | None) -> Written:
        """Write the archive from the sink's first byte on; where values are lazy, to a sink that can rewind.

        Raises:
            ProducerError: a LazyTensor gave other bytes than it declared. SourceError: the file system refused.
        """
        out = _PayloadOutput(sink, self.stored, self.header, progress)
        sink.write(_front(self.header, self.encoded))
        for run in self.runs:
            out.to(run.now)
            out.copy(run)
        for start, source, row in self.added:
            out.to(start)
            self._add(source, row, out)
        header, index = self.header, self.encoded
        if any(isinstance(source, LazyTensor) for _, source, _ in self.added):  # their digests are known by now
            index = _padded(encode(self.entries), len(index))
            header = header._replace(index_crc=zlib.crc32(index))
            sink.patch(0, _front(header, index))
        end = header.archive_size - HEADER_SIZE if header.front else header.index_offset
        sink.write(bytes(end - sink.position) + (b"" if header.front else index) + header.encode())
        return Written(header.archive_size, out.cloned)

    def _add(self, source: Any, row: int, out: _PayloadOutput) -> None:
        """Write a new payload; the digest of values that are produced now is noted."""
        if not isinstance(source, LazyTensor):
            for chunk in chunks(source):
                out.write(chunk)
            return
        digest = RunningDigest()
        try:
            for piece in source.pieces():
                digest.update(piece)
                out.write(piece)
        except ProducerError as error:
            raise error.located(
                tensor=self.entries.names[self.entries.payloads.tolist().index(row)]
            ) from error.__cause__
        if self.entries.digest_kind:
            self.entries.payload_rows["digest"][row] = digest.intdigest()


class _PayloadOutput:
    """The sink of an archive, by offsets from the payloads' first byte on."""

    def __init__(self, sink: Sink, stored: StoredArchive, header: Header, progress: Progress | None) -> None:
        self._sink, self._stored, self._header, self._progress = sink, stored, header, progress
        self.cloned = 0

    def to(self, offset: int) -> None:
        """Write zeros up to an offset."""
        self._sink.write(bytes(self._header.payload_offset + offset - self._sink.position))

    def write(self, data: Any) -> None:
        """Write bytes that are in memory."""
        self._sink.write(data)
        self._tell()

    def copy(self, run: _KeptRange) -> None:
        """Write stored bytes: whole blocks by the file system, where it can, the rest out of the mapping."""
        sink, stored = self._sink, self._stored
        at = stored.header.payload_offset + run.before
        end = at + run.nbytes
        if run.nbytes >= _WORTH:
            first = at + -sink.position % BLOCK
            self.write(stored.buffer[at:first])
            at, last = first, end - (end - first) % BLOCK
            while at < last:
                done, cloned = sink.copy_from(stored.file, at, last - at)
                if not done:
                    break
                at += done
                self.cloned += done if cloned else 0
                self._tell()
        for start in range(at, end, _PIECE):
            self.write(stored.buffer[start : min(start + _PIECE, end)])

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._sink.position, self._header.archive_size)


def plan_edited(
    stored: StoredArchive, staying: Sequence[int], entries: Entries, sources: Sequence[Any]
) -> EditedArchive:
    """Return the archive to be written, with every place in it.

    A new payload that equals a stored one, or another new one, is stored with it, if the archive has digests.

    Args:
        staying: the numbers of stored payloads that stay, ascending.
        entries: their payloads are places in `staying`, then in `sources`; they are renumbered.
        sources: new payloads, none of them empty: arrays, `SplitSource`s, `LazyTensor`s.
    """
    old, first, total = stored.header, len(staying), len(stored.rows)
    rows = np.zeros(first + len(sources), PAYLOAD)
    rows[:first] = stored.rows[staying]
    rows["nbytes"][first:] = [source.nbytes for source in sources]
    numbers = list(range(total, total + len(sources)))  # of the payloads that sources are stored with
    if entries.digest_kind and sources:
        known = list(zip(*(stored.rows[column].tolist() for column in ("nbytes", "digest")), strict=True))
        numbers, rows["digest"][first:] = equal_sources(sources, known, stored.payload)
    used = sorted({*staying, *(number for number in numbers if number < total)})
    places = np.zeros(total + len(sources), np.uint64)
    runs, places[used], end = _plan_runs(stored, used)
    own = [s for s, number in enumerate(numbers) if number == total + s]
    alignments = [payload_alignment(sources[s].nbytes, old.alignment) for s in own]
    base = max([old.base_alignment, *alignments])
    phase = old.payload_offset % base  # the payloads' first byte may move, by multiples of that
    for s, alignment in zip(own, alignments, strict=True):
        start = align_up(phase + end, alignment) - phase
        places[total + s] = start
        end = start + sources[s].nbytes
    rows["offset"] = places[[*staying, *numbers]]
    order = renumber_payloads(entries, rows)
    new = dict(zip(order.tolist(), range(len(order)), strict=True))
    header, index = _plan_header(old, encode(entries), base, end)
    added = [(int(places[total + s]), sources[s], new[first + s]) for s in own]
    return EditedArchive(stored, header, entries, index, runs, added)


def _plan_runs(stored: StoredArchive, used: Sequence[int]) -> tuple[list[_KeptRange], Any, int]:
    """Return runs of neighbours that stay, the new offset of each payload, and where the last one ends.

    A run moves to the front as far as its alignment lets it. One that is worth cloning goes by multiples of the base
    alignment: on that every payload lies as it did, and holes stay smaller (R59).
    """
    everything, rows = stored.rows["offset"], stored.rows[used]
    ranges = np.cumsum(np.append(True, everything[1:] != everything[:-1])[: len(everything)])[used]
    starts = np.flatnonzero(np.append(True, np.diff(ranges) > 1)[: len(rows)]).tolist()
    runs, end = [], 0
    for lo, hi in itertools.pairwise([*starts, len(rows)]):
        before, last = int(rows["offset"][lo]), int(rows["offset"][hi - 1])
        nbytes = last + int(rows["nbytes"][hi - 1]) - before
        step = stored.header.base_alignment if nbytes >= _WORTH else stored.header.alignment
        now = end + (before - end) % step
        rows["offset"][lo:hi] -= np.uint64(before - now)
        runs.append(_KeptRange(before, now, nbytes))
        end = now + nbytes
    return runs, rows["offset"], end


def _plan_header(old: Header, index: bytearray, base: int, end: int) -> tuple[Header, bytearray]:
    """Return the header, and the index, padded where that puts the payloads on the blocks that they were on."""
    start = old.payload_offset
    if not old.front:
        at = align_up(start + end, old.alignment)
        size = at + len(index) + HEADER_SIZE
        return Header(old.alignment, base, at, len(index), start, size, zlib.crc32(index)), index
    least = HEADER_SIZE + len(index)
    if not least <= start < least + base:
        start = least + (start - least) % (max(base, BLOCK) if end >= LARGE_PAYLOAD else base)
    if start - least >= base:  # zeros there would be too many (R12); in the index they mean nothing
        index = _padded(index, start - HEADER_SIZE)
    size = start + align_up(end, old.alignment) + HEADER_SIZE
    return Header(old.alignment, base, HEADER_SIZE, len(index), start, size, zlib.crc32(index)), index


def _padded(index: bytearray, nbytes: int) -> bytearray:
    return index + bytes(nbytes - len(index))


def _front(header: Header, index: bytearray) -> bytes:
    """Return the bytes before the payloads."""
    head = header.encode() + (index if header.front else b"")
    return head + bytes(header.payload_offset - len(head))
