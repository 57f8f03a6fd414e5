"""An archive written again with other entries: the system copies stored payloads from file to file, then come new ones.

The index stays in front or behind, and stored payloads keep their order and alignment. Neighbours move together, by
multiples of the base alignment, so that the file system can clone them. `record.edit` chooses entries and payloads.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.blocks import BLOCK as SUMMED
from zcrecord.codec.blocks import BlockDigest, BlockTable, Checksums, add_blocks
from zcrecord.codec.entries import Entries, encode
from zcrecord.codec.index import PAYLOAD, Array
from zcrecord.codec.layout import HEADER_SIZE, LARGE_PAYLOAD, Header, align_up, back_header, payload_alignment
from zcrecord.errors import ProducerError
from zcrecord.storage.new_files import BLOCK
from zcrecord.storage.sink import Sink
from zcrecord.tensors.lazy import LazyTensor

from .equal import equal_sources
from .sharing import chunks
from .writers import renumber_payloads

_LEAST_CLONED = 1 << 16  # bytes of the smallest run that the file system may clone; such runs stay on its blocks
_PIECE = 16 << 20  # bytes of other runs written at a time: signals are handled in between
Progress = Callable[[int, int], None]


class StoredArchive(NamedTuple):
    """An archive in a file: header, its payloads' rows, all its bytes, mapped, the file's descriptor, blocks."""

    header: Header
    rows: Array
    buffer: memoryview
    file: int
    blocks: BlockTable

    def payload(self, number: int) -> Array:
        """Return a payload's bytes, a view of the mapping."""
        offset, nbytes, _ = self.rows[number].item()
        start = self.header.payload_offset + offset
        return np.frombuffer(self.buffer[start : start + nbytes], np.uint8)


class _MovedRun(NamedTuple):
    """Neighbouring payloads that stay: their old and new offset from the first payload, and their bytes."""

    old: int
    new: int
    nbytes: int


class EditedArchive(NamedTuple):
    """An archive to be written, every offset known; `entries` lack only digests of lazy values."""

    stored: StoredArchive
    header: Header
    entries: Entries
    encoded: bytearray  # the index
    runs: list[_MovedRun]
    added: list[tuple[int, Any, int]]  # offset, source and row of each new payload
    checksums: Checksums

    @property
    def unchanged(self) -> bool:
        """True if it has the stored archive's index, and so its payloads."""
        old = self.stored.header
        old_index = self.stored.buffer[old.index_offset : old.index_offset + old.index_size]
        return not self.added and old_index == self.encoded

    def write(self, sink: Sink, progress: Progress | None) -> int:
        """Write the archive into an empty sink, which can rewind if values are lazy; return the bytes cloned."""
        out = _PayloadOutput(sink, self.stored, self.header, progress)
        sink.write(_before_payloads(self.header, self.encoded))
        for run in self.runs:
            out.fill_to(run.new)
            out.copy(run)
        for start, source, row in self.added:
            out.fill_to(start)
            self._write_source(source, row, out)
        header, index = self.header, self.encoded
        if any(isinstance(source, LazyTensor) for _, source, _ in self.added):  # their digests are known now
            add_blocks(self.entries, self.checksums)
            index = encode(self.entries).ljust(len(index), b"\0")
            header = header._replace(index_crc=zlib.crc32(index))
            sink.patch(0, _before_payloads(header, index))
        end = header.archive_size - HEADER_SIZE if header.front else header.index_offset
        sink.write(bytes(end - sink.position) + (b"" if header.front else index) + header.encode())
        return out.cloned

    def _write_source(self, source: Any, row: int, out: _PayloadOutput) -> None:
        """Write a new payload; put the digest of a LazyTensor into its row. A ProducerError names the tensor."""
        if not isinstance(source, LazyTensor):
            for chunk in chunks(source):
                out.write(chunk)
            return
        digest = BlockDigest()
        try:
            for piece in source.pieces():
                digest.update(piece)
                out.write(piece)
        except ProducerError as error:
            tensor = self.entries.payloads.tolist().index(row)
            raise error.located(tensor=self.entries.names[tensor]) from error.__cause__
        if self.entries.digest_kind:
            self.entries.payload_rows["digest"][row] = digest.finish(source.nbytes, self.checksums)


class _PayloadOutput:
    """The sink of an archive, by offsets from its first payload; `cloned` counts the bytes that were cloned."""

    def __init__(self, sink: Sink, stored: StoredArchive, header: Header, progress: Progress | None) -> None:
        self._sink, self._stored, self._header = sink, stored, header
        self._progress = progress or (lambda *_: None)
        self.cloned = 0

    def fill_to(self, offset: int) -> None:
        """Write zeros up to an offset."""
        self._sink.write(bytes(self._header.payload_offset + offset - self._sink.position))

    def write(self, data: Any) -> None:
        """Write bytes, and report progress."""
        self._sink.write(data)
        self._progress(self._sink.position, self._header.archive_size)

    def copy(self, run: _MovedRun) -> None:
        """Write stored bytes: whole blocks by the file system, where it can, the rest from the mapping."""
        sink, stored = self._sink, self._stored
        start = stored.header.payload_offset + run.old
        end = start + run.nbytes
        if run.nbytes >= _LEAST_CLONED:
            first_block = start + -sink.position % BLOCK
            self.write(stored.buffer[start:first_block])
            start, blocks_end = first_block, end - (end - first_block) % BLOCK
            while start < blocks_end:
                copied, is_cloned = sink.copy_from(stored.file, start, blocks_end - start)
                if not copied:  # the system cannot; the rest comes from the mapping
                    break
                start += copied
                self.cloned += copied if is_cloned else 0
                self._progress(sink.position, self._header.archive_size)
        for piece in range(start, end, _PIECE):
            self.write(stored.buffer[piece : min(piece + _PIECE, end)])


def plan_edited(
    stored: StoredArchive, staying: Sequence[int], entries: Entries, sources: Sequence[Any]
) -> EditedArchive:
    """Return the archive to be written, with all offsets; with digests, equal payloads are stored once.

    Args:
        staying: the numbers of stored payloads that stay, ascending.
        entries: their payloads are indices into `staying`, then `sources`; they are renumbered.
        sources: new payloads, none of them empty: arrays, `SplitSource`s, `LazyTensor`s.
    """
    old, stay_count, stored_count = stored.header, len(staying), len(stored.rows)
    rows = np.zeros(stay_count + len(sources), PAYLOAD)
    rows[:stay_count] = stored.rows[staying]
    rows["nbytes"][stay_count:] = [source.nbytes for source in sources]
    numbers = list(range(stored_count, stored_count + len(sources)))  # of each source, or of the payload it equals
    checksums = stored.blocks.checksums_of(rows[:stay_count])
    if entries.digest_kind and sources:
        keys = list(zip(*(stored.rows[column].tolist() for column in ("nbytes", "digest")), strict=True))
        numbers, rows["digest"][stay_count:] = equal_sources(sources, checksums, keys, stored.payload)
    used = sorted({*staying, *(number for number in numbers if number < stored_count)})
    offsets = np.zeros(stored_count + len(sources), np.uint64)
    runs, offsets[used], end = _plan_runs(stored, used)
    new_sources = [i for i, number in enumerate(numbers) if number == stored_count + i]
    alignments = [payload_alignment(sources[i].nbytes, old.alignment) for i in new_sources]
    base = max([old.base_alignment, *alignments])
    phase = old.payload_offset % base  # the first payload may move, by multiples of `base`
    for i, alignment in zip(new_sources, alignments, strict=True):
        start = align_up(phase + end, alignment) - phase
        offsets[stored_count + i] = start
        end = start + sources[i].nbytes
    rows["offset"] = offsets[[*staying, *numbers]]
    order = renumber_payloads(entries, rows)
    new_rows = {old_row: row for row, old_row in enumerate(order.tolist())}
    for i, source in enumerate(sources):
        if isinstance(source, LazyTensor) and entries.digest_kind:  # until its digest is known
            entries.payload_rows["digest"][new_rows[stay_count + i]] = i  # distinct, so that each has room in the index
            checksums[i, source.nbytes] = bytes(8 * -(-source.nbytes // SUMMED))
    if checksums or stored.blocks.block:
        add_blocks(entries, checksums)
    header, index = _plan_header(old, encode(entries), base, end)
    added = [(int(offsets[stored_count + i]), sources[i], new_rows[stay_count + i]) for i in new_sources]
    return EditedArchive(stored, header, entries, index, runs, added, checksums)


def _plan_runs(stored: StoredArchive, used: Sequence[int]) -> tuple[list[_MovedRun], Any, int]:
    """Return runs of neighbouring payloads in `used`, the new offset of each payload, and the end of the last one.

    Offsets are from the first payload. A run moves to the front, one to be cloned by multiples of the base alignment:
    so gaps stay smaller than that (R59).
    """
    offsets, rows = stored.rows["offset"], stored.rows[used]
    ranges = np.cumsum(np.append(True, offsets[1:] != offsets[:-1])[: len(offsets)])[used]  # equal payloads share one
    starts = np.flatnonzero(np.append(True, np.diff(ranges) > 1)[: len(rows)]).tolist()
    runs, end = [], 0
    for start, stop in itertools.pairwise([*starts, len(rows)]):
        old, last = int(rows["offset"][start]), int(rows["offset"][stop - 1])
        nbytes = last + int(rows["nbytes"][stop - 1]) - old
        step = stored.header.base_alignment if nbytes >= _LEAST_CLONED else stored.header.alignment
        new = end + (old - end) % step
        rows["offset"][start:stop] -= np.uint64(old - new)
        runs.append(_MovedRun(old, new, nbytes))
        end = new + nbytes
    return runs, rows["offset"], end


def _plan_header(old: Header, index: bytearray, base: int, end: int) -> tuple[Header, bytearray]:
    """Return header and index, padded if that keeps payloads on their blocks; `end` is that of the payloads."""
    start = old.payload_offset
    if not old.front:
        return back_header(index, old.alignment, base, start, start + end), index
    index_end = HEADER_SIZE + len(index)
    if not index_end <= start < index_end + base:
        start = index_end + (start - index_end) % (max(base, BLOCK) if end >= LARGE_PAYLOAD else base)
    if start - index_end >= base:  # a gap would be too large (R12); the index may end in zeros
        index = index.ljust(start - HEADER_SIZE, b"\0")
    size = start + align_up(end, old.alignment) + HEADER_SIZE
    return Header(old.alignment, base, HEADER_SIZE, len(index), start, size, zlib.crc32(index)), index


def _before_payloads(header: Header, index: bytearray) -> bytes:
    head = header.encode() + (index if header.front else b"")
    return head + bytes(header.payload_offset - len(head))
