"""The bytes of a remote archive for who brings them elsewhere: ahead, together, checked, and let go of again.

Loaders ask for payloads in the order of the file, or for pieces of them. Here these become batches: neighbours merged,
several requests at a time, three batches in memory at the most. A digest is counted along as batches come, so that a
payload may be larger than these; its error comes with its last byte. Which ranges are one request is `ranges`'s.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zcrecord.errors import IntegrityError, RecordError

from .cache import Entry
from .file import MOST_AT_ONCE
from .on_demand import Seal, Window
from .ranges import cut, merged

__all__ = ["LEAST", "Expected", "Feed", "batches"]

LEAST = 1 << 16  # bytes of a batch, however little memory may be taken: a request costs as much as they do
_LEAST_REQUEST = 1 << 20  # bytes of one of several requests, if there are as many: worth many round trips
_HELD = 2  # batches, and one that comes meanwhile: of threads that read in order some are late
_OVERTAKEN = 0.1  # seconds that a thread far ahead is given to be overtaken by those that are to come before

Range = tuple[int, int]


class Expected(NamedTuple):
    """What will be asked for: where it starts, how long it is, its digest (None: it is not checked), whose it is."""

    start: int
    nbytes: int
    digest: int | None
    name: str

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.start + self.nbytes


class _Part(NamedTuple):
    row: Expected
    lo: int
    hi: int

    @property
    def whole(self) -> bool:
        return (self.lo, self.hi) == (self.row.start, self.row.end)


@dataclass(slots=True)
class _Running:
    """A payload that comes in several batches: how far it was hashed, and where it is kept."""

    at: int
    seal: Seal
    hash: Any
    entry: Entry | None = None
    done: bool = False


class Feed:
    """A `RangeSource` of one plan, for any number of threads. What was not announced is fetched as it is asked for."""

    def __init__(self, window: Window) -> None:
        self._window, self._cache = window, window.cache
        self._changed = threading.Condition()
        self._busy = False
        self._asking: list[int] = []
        self.expect((), LEAST)

    def expect(self, rows: Iterable[Expected], most: int) -> None:
        """Say what will be asked for, in which order, and how many bytes may be held at a time."""
        known = sorted(set(rows))
        batch = max(most // (_HELD + 1), LEAST)
        self._request = max(batch // MOST_AT_ONCE, _LEAST_REQUEST)  # so that a batch is some at a time
        self._batches = batches(((row.start, row.end) for row in known), batch)
        self._ranges = [(lo, hi, n) for n, ranges in enumerate(self._batches) for lo, hi in ranges]
        self._parts: list[list[_Part]] = [[] for _ in self._batches]
        for row in known:
            first = bisect.bisect_right(self._ranges, row.start, key=lambda r: r[1])
            for lo, hi, n in self._ranges[first:]:
                if lo >= row.end:
                    break
                self._parts[n].append(_Part(row, max(lo, row.start), min(hi, row.end)))
        self._rooms: dict[int, dict[int, memoryview]] = {}
        self._failed: IntegrityError | None = None
        self._faults: list[RecordError] = []  # of fetching: who waited for that need not try it all over
        self._next = 0
        self._running: dict[Expected, _Running] = {}
        self._digests: dict[tuple[Expected, int], bytes] = {}  # of parts, so that they are known if they come again
        self._kept: set[Expected] = set()  # whole and right in the cache

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `offset` on.

        Raises:
            SourceError: they cannot be had. IntegrityError: a digest does not match, of any payload of the same batch.
        """
        target = target.cast("B")
        at, end = offset, offset + len(target)
        while at < end:
            i = bisect.bisect_right(self._ranges, at, key=lambda r: r[0]) - 1
            lo, hi, number = self._ranges[i] if i >= 0 else (0, 0, -1)
            if at < hi:
                stop = min(hi, end)
                target[at - offset : stop - offset] = self._room(number)[lo][at - lo : stop - lo]
            else:
                stop = min([end, *(r[0] for r in self._ranges[i + 1 : i + 2])])
                self._window.read([(at, target[at - offset : stop - offset])])
            at = stop

    def check_same(self) -> None:
        """Raise unless every payload that anything was read of is right, and the file still is the one it was.

        Of who has read in an order of its own, some are fetched once more.

        Raises:
            SourceError: the file was replaced, or cannot be had. IntegrityError: a digest does not match.
        """
        if self._failed is not None:
            raise self._failed
        begun = {row for row, _ in self._digests if not (row in self._running and self._running[row].done)}
        for number, parts in enumerate(self._parts):
            if any(part.row in begun for part in parts):
                self._load(number)
        self._rooms.clear()
        self._window.check_same()

    def _room(self, number: int) -> dict[int, memoryview]:
        """Return the bytes of a batch, by where they start, after fetching it or waiting for who does."""
        with self._changed:
            self._asking.append(number)
            try:
                self._await_turn(number)
            finally:
                self._asking.remove(number)
                self._changed.notify_all()
            if self._failed is not None:
                raise self._failed
            if number in self._rooms:
                return self._rooms[number]
            self._busy = True
        try:
            first = self._next if self._next <= number < self._next + _HELD else number
            for n in range(first, number + 1):
                room = self._load(n)
                with self._changed:
                    self._rooms[n], self._next = room, n + 1
                    for old in list(self._rooms)[:-_HELD]:
                        del self._rooms[old]
            return room
        except IntegrityError as error:  # nobody gets what came with it, whoever looks away
            self._failed = error
            self._drop()
            raise
        except RecordError as error:
            with self._changed:
                self._faults.append(error)
            raise
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _drop(self) -> None:
        """Take back what was begun to be kept."""
        for running in self._running.values():
            if running.entry is not None and not running.done:
                running.entry.drop()

    def _await_turn(self, number: int) -> None:
        """Return once a batch is there or may be fetched: by one thread at a time, and before later ones.

        Where a fetch fails meanwhile, its error is raised here, too: a server that takes minutes to be given up would
        else do so for each thread.

        Of threads that take what is to be read in order, one may ask before the one that has what comes before.
        """
        patient, known = True, len(self._faults)
        while number not in self._rooms and self._failed is None:
            if len(self._faults) > known:
                raise self._faults[-1]
            if self._busy or min(self._asking) < number:
                self._changed.wait()
            elif patient and self._next + _HELD <= number:
                patient = self._changed.wait(_OVERTAKEN)
            else:
                return

    def _load(self, number: int) -> dict[int, memoryview]:
        """Bring a batch, from the cache or the server, and check it."""
        room = {lo: np.empty(hi - lo, np.uint8).data for lo, hi in self._batches[number]}
        bounds = list(room)

        def place(lo: int, hi: int) -> memoryview:
            start = bounds[bisect.bisect_right(bounds, lo) - 1]
            return room[start][lo - start : hi - start]

        cached = [self._from_cache(part, place(part.lo, part.hi)) for part in self._parts[number]]
        missing = merged((p.lo, p.hi) for p, there in zip(self._parts[number], cached, strict=True) if not there)
        self._window.read([(lo, place(lo, hi)) for lo, hi in cut(missing, self._request)])
        for part, there in zip(self._parts[number], cached, strict=True):
            seal = self._window.seal(part.row.start, part.row.digest)
            if seal is None or part.row.digest is None:
                continue
            if part.whole:
                self._check_whole(part.row, place(part.lo, part.hi), seal, cached=there)
            else:
                self._check_part(part, place(part.lo, part.hi), seal)
        return room

    def _from_cache(self, part: _Part, target: memoryview) -> bool:
        row, cache = part.row, self._cache
        if cache is None or row.digest is None:
            return False
        if part.whole:
            return cache.get(row.start, row.digest, target)
        if part.lo == row.start and cache.has(
            row.start, row.nbytes, row.digest
        ):  # all of it, before any byte is given out
            self._kept.add(row)
        return row in self._kept and cache.read(row.start, row.nbytes, part.lo - row.start, target)

    def _check_whole(self, row: Expected, octets: memoryview, seal: Seal, *, cached: bool) -> None:
        if not seal.fits(octets):
            self._window.check_same()
            self._window.read([(row.start, octets)], again=True)  # a proxy's or a disk's fault may have passed by
            if not seal.fits(octets):
                raise self._damaged(row, "fetched twice; the file is damaged, copy it again")
        if self._cache is not None and row.digest is not None and not cached:
            self._cache.put(row.start, octets)

    def _check_part(self, part: _Part, octets: memoryview, seal: Seal) -> None:
        """Count a part into its payload's digest, if all before it came; else that is left to `check_same`."""
        row, found = part.row, seal.of(octets)  # as strong as what the whole is checked by
        if self._digests.setdefault((row, part.lo), found) != found:
            raise self._damaged(row, "what was fetched before differs; load it again")
        running = self._running.get(row)
        if part.lo == row.start and running is None:
            running = self._running[row] = _Running(row.start, seal, seal.new())
            if self._cache is not None and row.digest is not None and row not in self._kept:
                running.entry = self._cache.entry(row.start, row.nbytes)
        if running is None or running.at != part.lo:
            return
        running.hash.update(octets)
        running.at = part.hi
        if running.entry is not None:
            running.entry.write(octets)
        if part.hi == row.end:
            self._end(row, running)

    def _end(self, row: Expected, running: _Running) -> None:
        right = running.hash.digest() == running.seal.wanted
        if running.entry is not None:
            (running.entry.keep if right else running.entry.drop)()
        if not right:
            self._window.check_same()
            raise self._damaged(row, "load it again; where that does not help the file is damaged, copy it again")
        running.done = True

    def _damaged(self, row: Expected, what: str) -> IntegrityError:
        where = f"payload [{row.start:#x}, {row.end:#x})"
        what = f"{where}: its digest does not match, {what}"
        return IntegrityError(what, path=self._window.shown, offset=row.start, tensor=row.name)


def batches(wanted: Iterable[Range], most: int) -> list[list[Range]]:
    """Return ranges in lists of up to `most` bytes, those near to each other merged; cut where one begins, if possible.

    Example:
        >>> batches([(0, 40), (40, 80), (10**6, 10**6 + 130)], most=100)
        [[(0, 80)], [(1000000, 1000100)], [(1000100, 1000130)]]
    """
    known = sorted(wanted)
    starts = [lo for lo, _ in known]
    out: list[list[Range]] = []
    left = 0
    for lo, hi in merged(known):
        while lo < hi:
            stop = hi
            if hi - lo > left:
                stop = starts[bisect.bisect_right(starts, lo + left) - 1]
            if stop <= lo:  # nothing that begins here fits into what is left
                if left < most:
                    out.append([])
                    left = most
                    continue
                stop = lo + most
            out[-1].append((lo, stop))
            left -= stop - lo
            lo = stop
    return out
