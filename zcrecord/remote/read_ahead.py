"""Streams of remote archives, for loaders and for verification: batches of merged requests, verified, and not kept.

Loaders ask for payloads, or pieces of them, in the order of the file. Here these become batches of several requests, at
most three in memory. Digests are computed batch by batch, so that a payload may be larger than these; an error of its
digest comes with its last byte.
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zcrecord.archive.digest import logical_sha256
from zcrecord.codec.element_rules import ElementRules
from zcrecord.codec.layout import NONE
from zcrecord.errors import FormatError, IntegrityError, RecordError

from .cache import CacheEntry
from .file import MOST_AT_ONCE
from .on_demand import Checksum, OnDemandMemory
from .ranges import PayloadRange, Range, cut, merged

if TYPE_CHECKING:
    from zcrecord.archive.archive import Archive, Progress

LEAST = 1 << 16  # bytes of a batch, however little memory may be used: a request costs as much as they do
_LEAST_REQUEST = 1 << 20  # bytes of a request, if a batch has several: worth many round trips
_STORED = 2  # batches, and one that is fetched meanwhile: of threads that read in order some are late
_OVERTAKEN = 0.1  # seconds that a thread far ahead waits for threads with earlier batches
_MOST = 32 << 20  # bytes in memory while all is streamed; a smaller archive is fetched once, and stays in memory
_PIECE = 1 << 20  # bytes checked at a time: few enough to stay in a processor's cache


class _RangePart(NamedTuple):
    """The bytes [lo, hi) of an expected range that lie in one batch."""

    row: PayloadRange
    lo: int
    hi: int

    @property
    def is_whole(self) -> bool:
        return (self.lo, self.hi) == (self.row.start, self.row.end)


@dataclass(slots=True)
class _PayloadProgress:
    """A payload that comes in several batches: bytes before `position` are hashed, and in the cache entry."""

    position: int
    checksum: Checksum
    running_digest: Any
    entry: CacheEntry | None = None
    is_checked: bool = False


class ReadAhead:
    """Source of one load plan's bytes, for any number of threads. Other ranges are fetched as they are asked for."""

    def __init__(self, memory: OnDemandMemory) -> None:
        self._memory, self._cache = memory, memory.cache
        self._changed = threading.Condition()
        self._busy = False
        self._awaited: list[int] = []  # batches that threads wait for
        self.expect((), LEAST)

    def expect(self, rows: Iterable[PayloadRange], max_nbytes: int) -> None:
        """Plan the batches of these ranges, so that at most `max_nbytes` are in memory at a time; forget all before."""
        rows = sorted(set(rows))
        batch_nbytes = max(max_nbytes // (_STORED + 1), LEAST)
        self._request_nbytes = max(batch_nbytes // MOST_AT_ONCE, _LEAST_REQUEST)  # so that a batch is several at a time
        self._batches = batches(((row.start, row.end) for row in rows), batch_nbytes)
        self._ranges = [(lo, hi, n) for n, ranges in enumerate(self._batches) for lo, hi in ranges]
        self._parts: list[list[_RangePart]] = [[] for _ in self._batches]
        for row in rows:
            first = bisect.bisect_right(self._ranges, row.start, key=lambda part: part[1])
            for lo, hi, n in self._ranges[first:]:
                if lo >= row.end:
                    break
                self._parts[n].append(_RangePart(row, max(lo, row.start), min(hi, row.end)))
        self._stored: dict[int, dict[int, memoryview]] = {}  # batches in memory: the bytes of each range, by its offset
        self._failed: IntegrityError | None = None
        self._faults: list[RecordError] = []  # of fetching: threads that waited for a batch raise them, too
        self._next = 0
        self._progress: dict[PayloadRange, _PayloadProgress] = {}
        self._digests: dict[tuple[PayloadRange, int], bytes] = {}  # of parts that may come again
        self._cached: set[PayloadRange] = set()  # ranges of which the cache has all bytes, undamaged

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `offset` on; those that were not expected are fetched alone."""
        target = target.cast("B")
        position, end = offset, offset + len(target)
        while position < end:
            following = bisect.bisect_right(self._ranges, position, key=lambda part: part[0])  # starts behind it
            lo, hi, number = self._ranges[following - 1] if following else (0, 0, -1)
            if position < hi:
                stop = min(hi, end)
                target[position - offset : stop - offset] = self._batch(number)[lo][position - lo : stop - lo]
            else:
                stop = min(end, self._ranges[following][0]) if following < len(self._ranges) else end
                self._memory.read([(position, target[position - offset : stop - offset])])
            position = stop

    def check_same(self) -> None:
        """Check the digests of all payloads that were read, even in part, and that the file was not replaced."""
        if self._failed is not None:
            raise self._failed
        checked = {row for row, progress in self._progress.items() if progress.is_checked}
        unchecked = {row for row, _ in self._digests} - checked
        for number, parts in enumerate(self._parts):
            if any(part.row in unchecked and part.hi > self._hashed_to(part.row) for part in parts):
                self._load(number)
        self._stored.clear()
        self._memory.check_same()

    def _hashed_to(self, row: PayloadRange) -> int:
        """Return the offset up to which a payload's bytes are in its running digest."""
        return self._progress[row].position if row in self._progress else row.start

    def _batch(self, number: int) -> dict[int, memoryview]:
        """Return the bytes of a batch, by offset; it is fetched, or waited for if another thread fetches it."""
        with self._changed:
            self._awaited.append(number)
            try:
                self._await_turn(number)
            finally:
                self._awaited.remove(number)
                self._changed.notify_all()
            if self._failed is not None:
                raise self._failed
            if number in self._stored:
                return self._stored[number]
            self._busy = True
        try:
            return self._load_up_to(number)
        except IntegrityError as error:  # no thread gets bytes of that batch
            self._failed = error
            for progress in self._progress.values():
                if progress.entry is not None and not progress.is_checked:
                    progress.entry.drop()
            raise
        except RecordError as error:
            with self._changed:
                self._faults.append(copy.copy(error))  # without its traceback, whose frames hold the batch
            raise
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _await_turn(self, number: int) -> None:
        """Wait until a batch is stored, or this thread may fetch it: one thread at a time, earlier batches first.

        A thread far ahead first waits until no thread has reported anything for _OVERTAKEN seconds, since earlier
        batches may still be asked for. The error of a fetch that fails meanwhile is raised in every waiting thread,
        else each would try the failing server itself.
        """
        may_be_overtaking, faults_before = True, len(self._faults)
        while number not in self._stored and self._failed is None:
            if len(self._faults) > faults_before:
                raise copy.copy(self._faults[-1])  # one for each thread: raising changes its traceback
            if self._busy or min(self._awaited) < number:
                self._changed.wait()
            elif may_be_overtaking and self._next + _STORED <= number:
                may_be_overtaking = self._changed.wait(_OVERTAKEN)
            else:
                return

    def _load_up_to(self, number: int) -> dict[int, memoryview]:
        """Read a batch, and those before it that were just passed over: they are asked for soon; keep the last ones."""
        first = self._next if self._next <= number < self._next + _STORED else number
        for n in range(first, number + 1):
            batch = self._load(n)
            with self._changed:
                self._stored[n], self._next = batch, n + 1
                for old in list(self._stored)[:-_STORED]:
                    del self._stored[old]
        return batch

    def _load(self, number: int) -> dict[int, memoryview]:
        """Read a batch from the cache or the server, and check it."""
        batch = {lo: np.empty(hi - lo, np.uint8).data for lo, hi in self._batches[number]}
        starts = list(batch)

        def octets(lo: int, hi: int) -> memoryview:
            start = starts[bisect.bisect_right(starts, lo) - 1]
            return batch[start][lo - start : hi - start]

        parts = self._parts[number]
        cached = [self._read_cached(part, octets(part.lo, part.hi)) for part in parts]
        uncached = [(part.lo, part.hi) for part, is_cached in zip(parts, cached, strict=True) if not is_cached]
        missing = merged(uncached, self._memory.near)
        self._memory.read([(lo, octets(lo, hi)) for lo, hi in cut(missing, self._request_nbytes)])
        for part, is_cached in zip(parts, cached, strict=True):
            checksum = self._memory.checksum(part.row.start, part.row.digest)
            if checksum is None or part.row.digest is None:
                continue
            if part.is_whole:
                self._check_whole(part.row, octets(part.lo, part.hi), checksum, is_cached=is_cached)
            else:
                self._check_part(part, octets(part.lo, part.hi), checksum)
        return batch

    def _read_cached(self, part: _RangePart, target: memoryview) -> bool:
        """Read a part from the cache; False if it is missing there, or damaged."""
        row, cache = part.row, self._cache
        if cache is None or row.digest is None:
            return False
        if part.is_whole:
            return cache.get(row.start, row.digest, target)
        if part.lo == row.start and cache.has(row.start, row.nbytes, row.digest):  # all of it, before any byte is used
            self._cached.add(row)
        return row in self._cached and cache.read(row.start, row.nbytes, part.lo - row.start, target)

    def _check_whole(self, row: PayloadRange, octets: memoryview, checksum: Checksum, *, is_cached: bool) -> None:
        """Compare a payload with its digest, fetched once more if it does not match; then put it into the cache."""
        if not checksum.matches(octets):
            self._memory.check_same()
            self._memory.read([(row.start, octets)], again=True)  # a proxy's or a disk's fault may have passed
            if not checksum.matches(octets):
                self._memory.check_same()  # replaced in between, it is not damaged
                raise self._digest_error(row, "fetched twice; the file is damaged, copy it again")
        if self._cache is not None and not is_cached:
            self._cache.put(row.start, octets)

    def _check_part(self, part: _RangePart, octets: memoryview, checksum: Checksum) -> None:
        """Add a part to its payload's running digest if all parts before it were added; else `check_same` does it."""
        row, digest = part.row, checksum.digest(octets)  # as strong as the check of the whole
        if self._digests.setdefault((row, part.lo), digest) != digest:
            raise self._digest_error(row, "bytes fetched before differ; load it again")
        progress = self._progress.get(row)
        if part.lo == row.start and progress is None:
            progress = self._progress[row] = _PayloadProgress(row.start, checksum, checksum.new())
            if self._cache is not None and row.digest is not None and row not in self._cached:
                progress.entry = self._cache.entry(row.start, row.nbytes)
        if progress is None or progress.position != part.lo:
            return
        progress.running_digest.update(octets)
        progress.position = part.hi
        if progress.entry is not None:
            progress.entry.write(octets)
        if part.hi == row.end:
            self._finish_payload(row, progress)

    def _finish_payload(self, row: PayloadRange, progress: _PayloadProgress) -> None:
        """Compare a payload's complete digest; keep the cache entry if it matches, else drop it and raise."""
        progress.is_checked = progress.running_digest.digest() == progress.checksum.expected
        if progress.is_checked:
            if progress.entry is not None:
                progress.entry.keep()
        else:
            if progress.entry is not None:
                progress.entry.drop()
            self._memory.check_same()
            raise self._digest_error(row, "load it again; if that does not help the file is damaged, copy it again")

    def _digest_error(self, row: PayloadRange, reason: str) -> IntegrityError:
        fault = f"payload [{row.start:#x}, {row.end:#x}): its digest does not match, {reason}"
        return IntegrityError(fault, path=self._memory.shown, offset=row.start, tensor=row.name)


def batches(ranges: Iterable[Range], most: int) -> list[list[Range]]:
    """Return ranges in lists of up to `most` bytes, near ones merged; cut where a range begins, if possible."""
    ranges = sorted(ranges)
    starts = [lo for lo, _ in ranges]
    out: list[list[Range]] = []
    room = 0  # bytes for which the last list has room
    for lo, hi in merged(ranges):
        while lo < hi:
            stop = hi
            if hi - lo > room:
                stop = starts[bisect.bisect_right(starts, lo + room) - 1]
            if stop <= lo:  # no range that begins here fits into the rest
                if room < most:
                    out.append([])
                    room = most
                    continue
                stop = lo + most
            out[-1].append((lo, stop))
            room -= stop - lo
            lo = stop
    return out


class RemoteMemory(OnDemandMemory):
    """Memory of a remote archive, of a `RemoteSource`: fetched on demand, or streamed without being kept."""

    def read_ahead(self) -> ReadAhead:
        """Return a source for a loader, which fetches batches ahead, checks them, and keeps nothing."""
        return ReadAhead(self)

    def check(self, archive: Archive, progress: Progress | None = None) -> None:
        """Check all payloads as they come (R70 to R74); those of strings, and small archives, stay in memory."""
        if archive.header.archive_size <= _MOST:
            archive.fetch()
        rules, base = ElementRules(archive.index, archive.place), archive.header.payload_offset
        gaps = set(_gaps(archive))
        for row, offset, piece in self._pieces([*_payloads(archive), *gaps], progress):
            if row in gaps and piece.any():
                fault = f"the gap [{row.start:#x}, {row.end:#x}) holds bytes that are not zero"
                raise FormatError(fault, path=self.shown, offset=row.start)
            if row not in gaps:
                place = 0, row.start - base, row.nbytes  # as `Archive.place` returns it, for the one file
                rules.check(place, piece, last=offset + len(piece) == row.end)
        for i in rules.strings:
            archive.view(i)  # checks the ends, once

    def sha256_of(self, archive: Archive, progress: Progress | None = None) -> Callable[[int], bytes]:
        """Return a function that gives the SHA-256 of a tensor's logical bytes. Reads the whole archive.

        Payloads of strided tensors, and small archives, stay in memory. From then on each payload is compared with its
        SHA-256 whenever it is fetched: nobody can replace it by bytes with the same digest of 64 bits.
        """
        if archive.header.archive_size <= _MOST:
            archive.fetch()
        hashes: dict[int, Any] = {}
        gaps = _gaps(archive)
        for row, _, piece in self._pieces([*_payloads(archive), *gaps], progress):
            hashes.setdefault(row.start, hashlib.sha256()).update(piece)
        for gap in gaps:
            del hashes[gap.start]
        digests: dict[int, bytes] = {start: running.digest() for start, running in hashes.items()}
        self.pin(digests)

        def sha256(i: int) -> bytes:
            row = archive.row(i)
            if row.payload == NONE or row.strides != NONE:
                return logical_sha256(archive, i)
            return digests[archive.header.payload_offset + int(archive.index.payloads["offset"][row.payload])]

        return sha256

    def _pieces(self, rows: list[PayloadRange], progress: Progress | None) -> Iterator[tuple[PayloadRange, int, Any]]:
        """Yield (range, offset, bytes) for all bytes of ranges, in file order; the bytes are valid until the next.

        Those of a payload in several batches come before its digest is checked: use results after the last piece.
        """
        ahead = self.read_ahead()
        ahead.expect(rows, _MOST)
        buffer = np.empty(_PIECE, np.uint8)
        total, done = sum(row.nbytes for row in rows), 0
        for row in sorted(rows):
            for offset in range(row.start, row.end, _PIECE):
                piece = buffer[: min(_PIECE, row.end - offset)]
                ahead.readinto_at(offset, piece.data)
                yield row, offset, piece
                done += len(piece)
                if progress is not None:
                    progress(done, total)
        ahead.check_same()


def _payloads(archive: Archive) -> list[PayloadRange]:
    """Return all payloads, each once, with the name of a tensor that uses it."""
    index, base = archive.index, archive.header.payload_offset
    payloads = index.tensors["payload"].tolist()
    users = {payloads[i]: i for i in reversed(range(len(payloads)))}  # the first tensor of each payload
    pins = archive.source.pins()
    by_start: dict[int, PayloadRange] = {}
    for number, (offset, nbytes, digest) in enumerate(index.payloads.tolist()):
        start = base + offset
        if start not in by_start:
            name = index.name(users[number]) if number in users else ""
            has_checksum = bool(index.digest_kind) or start in pins
            by_start[start] = PayloadRange(start, nbytes, digest if has_checksum else None, name)
    return list(by_start.values())


def _gaps(archive: Archive) -> list[PayloadRange]:
    """Return the gaps between the payloads of a whole archive, before the first and after the last."""
    if not archive.whole:
        return []
    position, end = archive.header.payload_region
    out = []
    for start, stop in [*((row.start, row.end) for row in _payloads(archive)), (end, end)]:
        if position < start:
            out.append(PayloadRange(position, start - position, None))
        position = stop
    return out
