"""Memory with addresses for all of a remote archive, and bytes where they were asked for.

Knows what is there, what is on its way, and that a payload is checked before anyone sees it. Requests are `place`'s,
what lies on the disk is `cache`'s, what the bytes mean is the archive's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from zcrecord.codec.digests import RunningDigest
from zcrecord.errors import IntegrityError

from .cache import Cache
from .file import Piece, Place
from .ranges import Held, cut, merged

__all__ = ["Row", "Seal", "Window"]

_PIECE = 8 << 20  # bytes hashed at a time, so that Ctrl-C need not wait for a large payload


class Seal(NamedTuple):
    """What tells whether bytes are right: what hashes them, and what it has to give."""

    new: Callable[[], Any]
    wanted: bytes

    def fits(self, octets: memoryview) -> bool:
        """Return whether bytes are right."""
        return self.of(octets) == self.wanted

    def of(self, octets: memoryview) -> bytes:
        """Return what hashing bytes gives; in pieces, so that Ctrl-C need not wait for a large payload."""
        running = self.new()
        for at in range(0, len(octets), _PIECE):
            running.update(octets[at : at + _PIECE])
        found: bytes = running.digest()
        return found


class Row(NamedTuple):
    """A payload: where it starts in the file, how long it is, its digest (None: it has none)."""

    start: int
    nbytes: int
    digest: int | None


class Window:
    """The bytes of one remote archive, fetched as they are asked for; what is there is never fetched again."""

    def __init__(self, place: Place, octets: memoryview, held: Held, cache: Cache | None) -> None:
        self._place, self._octets, self._held, self._cache = place, octets, held, cache
        self._ready: set[int] = set()  # offsets of payloads that are there and were checked
        self._flying: dict[int, threading.Event] = {}  # of those that some thread is fetching
        self._pins: dict[int, bytes] = {}
        self._pid = os.getpid()
        self._begin()

    def _begin(self) -> None:
        """Start with no thread at work: at first, and in a forked process, where no other thread goes on."""
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._writing: list[tuple[int, int]] = []  # ranges that some thread fills: nobody else does, or looks at them
        self._flying.clear()

    def _here(self) -> None:
        """Begin anew if this is a forked process by now."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._begin()

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have ranges of the file there; of payloads `bring` checks them, too.

        Raises:
            SourceError: they cannot be had.
        """
        self._here()
        self._get(ranges)

    def bring(self, rows: list[tuple[int, int, int | None]]) -> None:
        """Have payloads there, each checked against its digest; from the cache, else in few merged requests.

        What another thread is fetching already is waited for.

        Raises:
            SourceError: they cannot be had. IntegrityError: a digest does not match.
        """
        if self._ready.issuperset(row[0] for row in rows):  # as nearly always: no lock is taken then
            return
        wanted = {row[0]: Row(*row) for row in rows}
        while True:
            mine, others = self._claim(wanted)
            if mine:
                try:
                    self._bring(mine)
                    self._ready.update(row.start for row in mine)
                finally:
                    self._let_go(mine)
            for other in others:
                other.wait()
            if not others:  # where another thread failed, this one tries itself
                return

    @property
    def shown(self) -> str:
        """The archive's URL as errors name it."""
        return self._place.shown

    @property
    def cache(self) -> Cache | None:
        """Where payloads are kept, if anywhere."""
        return self._cache

    def read(self, pieces: Iterable[Piece], *, again: bool = False) -> None:
        """Fill pieces with the file's bytes, several at a time, without keeping them; checks no digest.

        What is there already is copied, unless it is to be fetched `again`.

        Raises:
            SourceError: they cannot be had.
        """
        self._here()
        wanted = []
        for offset, target in pieces:
            end = offset + len(target)
            with self._lock:
                missing = [(offset, end)] if again else self._held.missing(offset, end)
            at = offset
            for start, stop in [*missing, (end, end)]:
                target[at - offset : start - offset] = self._octets[at:start]
                at = stop
            wanted += [(start, target[start - offset : stop - offset]) for start, stop in cut(missing)]
        if wanted:
            self._place.fill(wanted)

    def pin(self, known: Mapping[int, bytes]) -> None:
        """Have payloads, by where they start, be checked by their SHA-256 from now on, and not by 64 bits alone."""
        self._pins |= known

    @property
    def pins(self) -> dict[int, bytes]:
        """Digests given to `pin`, for opening the archive again."""
        return dict(self._pins)

    def seal(self, start: int, digest: int | None) -> Seal | None:
        """Return what tells whether the payload that starts there is right; None if nothing does."""
        if start in self._pins:
            import hashlib  # here, because it takes 3 ms

            return Seal(hashlib.sha256, self._pins[start])
        return None if digest is None else Seal(RunningDigest, digest.to_bytes(8, "big"))

    def check_same(self) -> None:
        """Raise SourceError if the file was replaced since it was opened, as far as its server can tell."""
        self._place.check_same()

    def _claim(self, wanted: dict[int, Row]) -> tuple[list[Row], list[threading.Event]]:
        """Return the payloads that this thread is to fetch, and what tells when others have theirs."""
        self._here()
        with self._lock:
            lacking = [row for start, row in wanted.items() if start not in self._ready]
            others = [self._flying[row.start] for row in lacking if row.start in self._flying]
            mine = [row for row in lacking if row.start not in self._flying]
            self._flying.update({row.start: threading.Event() for row in mine})
        return mine, others

    def _let_go(self, rows: list[Row]) -> None:
        with self._lock:
            for row in rows:
                self._flying.pop(row.start).set()

    def _bring(self, rows: list[Row]) -> None:
        cache, fetched = self._cache, rows
        if cache is not None:
            fetched = [row for row in rows if not self._from_cache(cache, row)]
        self._get((row.start, row.start + row.nbytes) for row in fetched)
        bad = [row for row in fetched if not self._is_right(row)]
        if bad:  # a proxy's or a disk's fault may have passed by; the file's own has not
            self._place.check_same()
            self._get_again(bad)
        for row in bad:
            if not self._is_right(row):
                where = f"[{row.start:#x}, {row.start + row.nbytes:#x})"
                what = f"payload {where}: its digest does not match, fetched twice; the file is damaged, copy it again"
                raise IntegrityError(what, offset=row.start)
        if any(row.digest is None for row in fetched):
            self._place.check_same()
        if cache is not None:
            for row in fetched:
                if row.digest is not None:
                    cache.put(row.start, self._bytes(row))

    def _from_cache(self, cache: Cache, row: Row) -> bool:
        whole = row.start, row.start + row.nbytes
        with self._lock:
            if row.digest is None or not self._held.missing(*whole) or self._unclaimed([whole]) != [whole]:
                return False
            self._writing.append(whole)
        try:
            if not cache.get(row.start, row.digest, self._bytes(row)) or (self._pins and not self._is_right(row)):
                return False
            self._note([whole])
            return True
        finally:
            self._end([whole])

    def _bytes(self, row: Row) -> memoryview:
        return self._octets[row.start : row.start + row.nbytes]

    def _is_right(self, row: Row) -> bool:
        seal = self.seal(row.start, row.digest)
        return seal is None or seal.fits(self._bytes(row))

    def _get(self, ranges: Iterable[tuple[int, int]]) -> None:
        wanted = list(ranges)
        while True:
            with self._lock:
                missing = self._missing(wanted)
                if not missing:
                    return
                free = self._unclaimed(missing)
                if not free:  # others are at the rest
                    self._written.wait()
                    continue
                # What lies between two of them is fetched along, unless it is there: views of it may be in use.
                together = self._unclaimed(self._missing(merged(free)))
                self._writing += together
            try:
                self._fill(together)
            finally:
                self._end(together)

    def _missing(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        return [part for start, end in ranges for part in self._held.missing(start, end)]

    def _unclaimed(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return what of some ranges no thread is filling."""
        taken = Held()
        for start, end in self._writing:
            taken.add(start, end)
        return [part for start, end in ranges for part in taken.missing(start, end)]

    def _end(self, ranges: list[tuple[int, int]]) -> None:
        with self._lock:
            for part in ranges:
                self._writing.remove(part)
            self._written.notify_all()

    def _get_again(self, rows: list[Row]) -> None:
        self._fill([(row.start, row.start + row.nbytes) for row in rows])

    def _fill(self, ranges: list[tuple[int, int]]) -> None:
        if ranges:
            self._place.fill([(start, self._octets[start:end]) for start, end in cut(ranges)])
            self._note(ranges)

    def _note(self, ranges: list[tuple[int, int]]) -> None:
        with self._lock:
            for start, end in ranges:
                self._held.add(start, end)
