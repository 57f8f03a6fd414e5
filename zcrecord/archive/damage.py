"""Damaged ranges of an archive: all of them, found by several threads at memory speed.

The smallest unit of damage is a block of a payload that has checksums of blocks, else a payload. The index has to be
verified.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zcrecord.codec.blocks import Blocks
from zcrecord.codec.digests import RunningDigest, digest_of
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.index import Index
from zcrecord.codec.layout import NONE
from zcrecord.errors import FormatError, IntegrityError
from zcrecord.storage.threads import MOST_THREADS, WORTH_A_THREAD, Going, cores, run_threads
from zcrecord.tensors.strides import address

from . import unflatten
from .archive import Archive, Progress
from .payload_source import Array, Piece, is_twin

_PIECE = 8 << 20  # bytes hashed at a time, and, of small payloads, taken by a thread at a time
_CHANGED = "its digest does not match"
_FILLED = "bytes between payloads that are not zero"


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged range of a file, [offset, offset + nbytes): what is wrong, and the full names whose bytes lie there.

    Of a catalogue `path` is the damaged file; one that is missing, or no shard of it, has the range [0, 0).
    """

    what: str
    offset: int
    nbytes: int
    tensors: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()
    path: str | None = None


def find(archive: Archive, progress: Progress | None = None, *, threads: int | None = None) -> list[Damage]:
    """Return every payload whose digest does not match and every gap that is not zero (R73, R74), by ascending offset.

    In a part of an archive, or another format's file, only the index's payloads are checked. `progress` is called in
    this thread, with the bytes done and in all. LimitError if attributes' full names take far more than the index.
    """
    search = _DamageSearch(archive, progress)
    search.run(cores(threads))
    if progress:
        progress(search.total, search.total)
    if not search.damaged:
        return []
    ix, numbers, rows = archive.index, search.numbers, {damaged.row for damaged in search.damaged}
    unflatten.check_full_names(ix, archive.header.index_size)
    tensors = _tensor_users(ix, numbers, rows)
    attributes, metadata = (_attribute_users(ix, entries, numbers, rows) for entries in (ix.attributes, ix.metadata))
    out = []
    for start, end, row in sorted(search.damaged):
        users = tuple(tensors[row]), tuple(attributes[row]), tuple(metadata[row])
        out.append(Damage(_FILLED if row < 0 else _CHANGED, archive.offset + start, end - start, *users))
    return out


def check_digest(pieces: Iterable[Piece], tensor: str | None) -> None:
    """Raise IntegrityError, which names `tensor`, if a piece's digest does not match; pieces without one pass."""
    for source, number in pieces:
        digest = source.digest(number)
        if digest is not None and digest_of(source.payload(number)) != digest:
            fault = "its payload's digest does not match; the file is damaged, copy it again"
            raise IntegrityError(fault, path=source.path, tensor=tensor)


class BlockCheck:
    """Compares the blocks of a payload in memory with their checksums, each before a part of it is first used."""

    def __init__(self, piece: Piece, blocks: Blocks, tensor: str) -> None:
        self._piece, self.blocks, self._tensor = piece, blocks, tensor
        self._pending = bytearray(b"\1") * len(blocks.sums)  # by block, 1 until it was compared

    @classmethod
    def of(cls, piece: Piece, tensor: str) -> BlockCheck | None:
        """Return the check of a payload, whose errors name a tensor; None if no checksums of its blocks are known."""
        blocks = piece.source.sums(piece.number)
        return None if blocks is None else cls(piece, blocks, tensor)

    def pages(self, start: int, nbytes: int, request: Callable[[list[tuple[int, int]]], None]) -> None:
        """Check the blocks in memory [start, start + nbytes); `request` first gets [(address, size)] of new ones."""
        octets, size = np.frombuffer(self._piece.source.payload(self._piece.number), np.uint8), self.blocks.size
        lo, hi = max(start - address(octets), 0), min(start + nbytes - address(octets), len(octets))
        if self._pending.find(1, lo // size, -(-hi // size)) >= 0:
            first, end = self.whole(lo, hi)
            request([(address(octets) + first, end - first)])
            self(lo, hi)

    def __call__(self, lo: int, hi: int, read: memoryview | None = None) -> None:
        """Raise IntegrityError if a block that meets bytes [lo, hi) of the payload, maybe `read` before, is damaged."""
        block, last = lo // self.blocks.size, -(-hi // self.blocks.size)
        while (block := self._pending.find(1, block, last)) >= 0:
            start, end = self.blocks.bounds(block, self._piece.nbytes)
            if read is not None and lo <= start and end <= hi:
                digest = digest_of(read[start - lo : end - lo])
            else:
                digest = self._digest(start, end)
            if digest != int(self.blocks.sums[block]):
                source, base = self._piece.source, self._piece.source.offset + self._piece.start
                fault = f"bytes [{base + start:#x}, {base + end:#x}): their checksum does not match"
                fault += "; the file is damaged, copy it again"
                raise IntegrityError(fault, path=source.path, tensor=self._tensor, offset=base + start)
            self._pending[block] = 0

    def whole(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the range of the payload that the blocks of bytes [lo, hi) fill."""
        return self.blocks.around(lo, hi, self._piece.nbytes)

    def _digest(self, lo: int, hi: int) -> int:
        """Return the digest of bytes [lo, hi), read piece by piece: a stranger's file may have blocks of 1 GiB."""
        running = RunningDigest()
        for start in range(lo, hi, _PIECE):
            running.update(self._read(start, min(start + _PIECE, hi)))
        return running.intdigest()

    def _read(self, lo: int, hi: int) -> memoryview:
        """Return bytes [lo, hi) of the payload, from memory or its file."""
        source, number = self._piece.source, self._piece.number
        octets, offset = source.read_by(number) or (source.payload(number), 0)
        return octets[offset + lo : offset + hi]


def error_of(damage: list[Damage]) -> FormatError:
    """Return the error for one file's damage: it names the first damaged payload, else gap, and carries the list."""
    first, more = next((d for d in damage if d.what == _CHANGED), damage[0]), len(damage) - 1
    start, end = first.offset, first.offset + first.nbytes
    error: FormatError
    if first.what == _CHANGED:
        places = f" there and in {more} more place{'s' * (more > 1)}" if more else ""
        fault = f"payload [{start:#x}, {end:#x}): its digest does not match; the file is damaged{places}, copy it again"
        error = IntegrityError(fault, tensor=next(iter(first.tensors), None), offset=start)
    else:
        places = f", as do{'es' * (more == 1)} {more} more" if more else ""
        error = FormatError(f"the gap [{start:#x}, {end:#x}) holds bytes that are not zero{places}", offset=start)
    error.damage = tuple(damage)
    return error


class ByteCount:
    """Bytes done by several threads; progress is reported in the thread that made this object alone."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._caller, self._lock = threading.get_ident(), threading.Lock()

    def add(self, nbytes: int = 0) -> None:
        """Count bytes; in the first thread, also report bytes done and total."""
        with self._lock:
            self._done += nbytes
        if self._progress and threading.get_ident() == self._caller:
            self._progress(self._done, self._total)


class _DamagedRange(NamedTuple):
    """A damaged range of the archive, and the row of the payload in it, -1 for a gap."""

    start: int
    end: int
    row: int


class _DamageSearch:
    """Search of an archive by several threads, which append to `damaged`; `total` is the bytes to check."""

    def __init__(self, archive: Archive, progress: Progress | None) -> None:
        ix, header = archive.index, archive.header
        self.numbers = np.flatnonzero(~is_twin(ix.payloads))  # of payloads, each range once
        self.rows: Array = ix.payloads[self.numbers]  # their entries
        self.damaged: list[_DamagedRange] = []
        self._start, self._end = header.payload_region
        self.total = self._end - self._start
        self._archive, self._base = archive, header.payload_offset
        self._buffer, self._hashed = archive.buffer, bool(ix.digest_kind)
        self._count = ByteCount(progress, self.total)

    def _batches(self) -> list[tuple[int, int]]:
        """Return ranges [first, last) of `rows`; large payloads are alone, and first, so that threads end together."""
        sums = np.cumsum(self.rows["nbytes"], dtype=np.uint64)
        out: list[tuple[int, int]] = []
        first = 0
        while first < len(sums):
            before = int(sums[first - 1]) if first else 0
            last = max(int(np.searchsorted(sums, np.uint64(before + _PIECE), "right")), first + 1)
            out.append((first, last))
            first = last
        sizes = self.rows["nbytes"].tolist()
        return sorted(out, key=lambda batch: -sizes[batch[0]] if batch[1] - batch[0] == 1 else 0)

    def run(self, threads: int) -> None:
        """Check every payload and every gap, in up to so many threads."""
        nbytes = int(self.rows["nbytes"].sum()) if self._hashed else 0
        self._check_gap(self._end_of(len(self.rows) - 1), self._end)
        batches = self._batches()
        count = min(threads, MOST_THREADS, max(len(batches), 1), nbytes // WORTH_A_THREAD + 1)
        run_threads(self._check_batch, batches, count, self._count.add)

    def _end_of(self, row: int) -> int:
        """Return the end of a row's payload in the archive; for row -1 the start of the region of payloads."""
        return self._start if row < 0 else self._base + sum(self.rows[row].item()[:2])

    def _check_batch(self, batch: tuple[int, int], going: Going) -> None:
        """Check the payloads of a range of rows, and the gaps before them."""
        first, last = batch
        end = self._end_of(first - 1)
        for row, (offset, nbytes, digest) in enumerate(self.rows[first:last].tolist(), first):
            gap_start, start, end = end, self._base + offset, self._base + offset + nbytes
            self._check_gap(gap_start, start)
            if self._hashed and self._digest(start, end, going) != digest and going():
                self.damaged += [_DamagedRange(lo, hi, row) for lo, hi in self._damaged_blocks(row, start, end)]
        if nbytes <= _PIECE:  # a larger one was counted piece by piece
            self._count.add(int(self.rows["nbytes"][first:last].sum()))

    def _digest(self, lo: int, hi: int, going: Going) -> int:
        """Return the digest of bytes [lo, hi) of the archive; once `going` is False a wrong one, which is not used."""
        if hi - lo <= _PIECE:
            return digest_of(self._buffer[lo:hi])
        running = RunningDigest()
        for start in range(lo, hi, _PIECE):
            if not going():
                break
            piece = self._buffer[start : min(start + _PIECE, hi)]
            running.update(piece)
            self._count.add(len(piece))
        return running.intdigest()

    def _damaged_blocks(self, row: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """Return ranges of damaged blocks in a damaged payload, bytes [lo, hi); all of it if none is known."""
        [(source, number)] = self._archive.source.pieces(int(self.numbers[row]))
        if (blocks := source.sums(number)) is None:
            return [(lo, hi)]
        damaged: list[tuple[int, int]] = []
        for block, expected in enumerate(blocks.sums.tolist()):
            start, end = (lo + offset for offset in blocks.bounds(block, hi - lo))
            if digest_of(self._buffer[start:end]) != expected:
                if damaged and damaged[-1][1] == start:
                    start, _ = damaged.pop()
                damaged.append((start, end))
        return damaged or [(lo, hi)]

    def _check_gap(self, lo: int, hi: int) -> None:
        """Record bytes [lo, hi) as damaged unless they are zero; gaps of a part may be others' payloads."""
        if lo < hi and self._archive.whole and self._buffer[lo:hi].tobytes().strip(b"\0"):
            self.damaged.append(_DamagedRange(lo, hi, -1))


def _tensor_users(ix: Index, numbers: Array, damaged: set[int]) -> defaultdict[int, list[str]]:
    """Return the names of the tensors that use each damaged row; `numbers` are the rows' payloads."""
    payloads, users = ix.tensors["payload"], defaultdict[int, list[str]](list)
    rows = np.searchsorted(numbers, payloads, "right") - 1  # a twin has the row of the first payload of its range
    rows[payloads == NONE] = -1
    for i in np.flatnonzero(np.isin(rows, list(damaged - {-1}))).tolist():
        users[int(rows[i])].append(ix.name(i))
    return users


def _attribute_users(ix: Index, entries: Array, numbers: Array, damaged: set[int]) -> defaultdict[int, list[str]]:
    """Return the full names of the attributes, or metadata, that use each damaged row."""
    users = defaultdict[int, list[str]](list)
    for entry in unflatten.attribute_entries(ix, entries, PayloadId):
        module = ix.text_of(ix.modules[entry.parent]) if entry.parent != NONE else ""
        for row in {int(np.searchsorted(numbers, payload, "right")) - 1 for payload in entry.payloads()} & damaged:
            users[row].append(f"{module}.{entry.key}" if module else entry.key)
    return users
