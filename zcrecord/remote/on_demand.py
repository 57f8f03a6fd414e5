"""Memory of a remote archive: addresses for all of it, bytes fetched on demand, payloads checked before they are seen.

Knows which bytes are present and which are being fetched. Requests are left to `file` and its kinds, entries on disk to
`cache`, the meaning of the bytes to the archive.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from zcrecord.codec.digests import RunningDigest
from zcrecord.errors import IntegrityError

from .cache import VersionCache
from .file import RemoteFile, Request
from .ranges import PayloadRange, Range, RangeSet, cut, merged

_PIECE = 8 << 20  # bytes hashed at a time, so that Ctrl-C need not wait for a large payload


class Checksum(NamedTuple):
    """Expected digest of a payload, and the function that makes a running digest of its kind."""

    new: Callable[[], Any]
    expected: bytes

    def matches(self, octets: memoryview) -> bool:
        """Return True if bytes have the expected digest."""
        return self.digest(octets) == self.expected

    def digest(self, octets: memoryview) -> bytes:
        """Return the digest of bytes, of the kind of the expected one."""
        running = self.new()
        for start in range(0, len(octets), _PIECE):
            running.update(octets[start : start + _PIECE])
        return bytes(running.digest())


class OnDemandMemory:
    """Bytes of one remote archive, fetched once, when they are asked for; for threads, and forked processes."""

    def __init__(self, file: RemoteFile, octets: memoryview, present: RangeSet, cache: VersionCache | None) -> None:
        """Take the file, memory as large as the file, the ranges in memory, and this version's cache entries."""
        self._file, self._octets, self._present, self.cache = file, octets, present, cache
        self.near, self.shown = file.near, file.shown
        self.pins: dict[int, bytes] = {}  # SHA-256 digests by the offset of their payload
        self._checked: set[Range] = set()  # offset and size of payloads and blocks that are present and were checked
        self._fetching: dict[Range, threading.Event] = {}  # of those that a thread is fetching
        self._pid = os.getpid()
        self._reset()

    def _reset(self) -> None:
        """Start with no thread at work: at first, and in a forked process, which has no other threads."""
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._writing: list[Range] = []  # ranges that a thread fills: no other thread fills or reads them
        self._fetching.clear()

    def _reset_after_fork(self) -> None:
        """Forget the threads of the parent process, the first time in a forked one."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._reset()

    def fetch_payloads(self, payloads: list[PayloadRange]) -> None:
        """Have payloads in memory, each checked; returns once this thread, or others, have fetched them all."""
        if self._checked.issuperset(payload[:2] for payload in payloads):  # nearly always: no lock is taken then
            return
        by_range = {payload[:2]: payload for payload in payloads}
        while True:
            claimed, fetched_elsewhere = self._claim(by_range)
            if claimed:
                try:
                    self._fetch_and_check(claimed)
                    self._checked.update(payload[:2] for payload in claimed)
                finally:
                    with self._lock:
                        for payload in claimed:
                            self._fetching.pop(payload[:2]).set()
            for event in fetched_elsewhere:
                event.wait()
            if not fetched_elsewhere:  # else once more: another thread may have failed
                return

    def read(self, requests: Iterable[Request], *, again: bool = False) -> None:
        """Fill targets with bytes of the file, unchecked and not kept; with `again` fetch those in memory, too."""
        self._reset_after_fork()
        missing_requests = []
        for offset, target in requests:
            end = offset + len(target)
            with self._lock:
                missing = [(offset, end)] if again else self._present.missing(offset, end)
            position = offset
            for start, stop in [
                *missing,
                (end, end),
            ]:  # present ones lie before each missing range, and at the end
                target[position - offset : start - offset] = self._octets[position:start]
                position = stop
            missing_requests += [(start, target[start - offset : stop - offset]) for start, stop in cut(missing)]
        if missing_requests:
            self._file.fill(missing_requests)

    def pin(self, digests: Mapping[int, bytes]) -> None:
        """Check payloads, given by their offsets, by SHA-256 from now on, and not by 64 bits alone."""
        self.pins = {**self.pins, **digests}  # a new dict: the old one is a snapshot of its time

    def checksum(self, start: int, digest: int | None) -> Checksum | None:
        """Return the checksum of the payload at an offset; None if it has neither a pin nor a digest."""
        if start in self.pins:
            import hashlib  # here, because it takes 3 ms

            return Checksum(hashlib.sha256, self.pins[start])
        return None if digest is None else Checksum(RunningDigest, digest.to_bytes(8, "big"))

    def check_same(self) -> None:
        """Raise SourceError if the file was replaced since it was opened, as far as its server can tell."""
        self._file.check_same()

    def _claim(self, payloads: dict[Range, PayloadRange]) -> tuple[list[PayloadRange], list[threading.Event]]:
        """Return the payloads that this thread is to fetch, and the events of those that others are fetching."""
        self._reset_after_fork()
        with self._lock:
            unchecked = {key: payload for key, payload in payloads.items() if key not in self._checked}
            events = [self._fetching[key] for key in unchecked if key in self._fetching]
            claimed = {key: payload for key, payload in unchecked.items() if key not in self._fetching}
            self._fetching.update({key: threading.Event() for key in claimed})
        return list(claimed.values()), events

    def _fetch_and_check(self, payloads: list[PayloadRange]) -> None:
        """Fetch payloads from cache or server, and check them; IntegrityError for one that does not match twice."""
        cache, fetched = self.cache, payloads
        if cache is not None:
            fetched = [payload for payload in payloads if not self._read_cached(cache, payload)]
        self.fetch((payload.start, payload.end) for payload in fetched)
        bad = [payload for payload in fetched if not self._matches(payload)]
        if bad:  # a proxy's or a disk's fault may have passed; damage of the file has not
            self._file.check_same()
            self._fill([(payload.start, payload.end) for payload in bad])
        for payload in bad:
            if not self._matches(payload):
                self._file.check_same()  # replaced in between, it is not damaged
                name = f"payload [{payload.start:#x}, {payload.end:#x})"
                fault = f"{name}: its digest does not match, fetched twice; the file is damaged, copy it again"
                raise IntegrityError(fault, offset=payload.start)
        if any(payload.digest is None for payload in fetched):
            self._file.check_same()
        if cache is not None:
            for payload in fetched:
                if payload.digest is not None:
                    cache.put(payload.start, self._bytes(payload))

    def _read_cached(self, cache: VersionCache, payload: PayloadRange) -> bool:
        """Read a payload from the cache, and check it; False if it is not there undamaged, or partly in memory."""
        whole = payload.start, payload.end
        with self._lock:
            is_present = not self._present.missing(*whole)
            if payload.digest is None or is_present or self._not_being_filled([whole]) != [whole]:
                return False
            self._writing.append(whole)
        try:
            if not cache.get(payload.start, payload.digest, self._bytes(payload)):
                return False
            if self.pins and not self._matches(payload):  # the cache compares 64 bits only
                return False
            self._add([whole])
            return True
        finally:
            self._finish_filling([whole])

    def _bytes(self, payload: PayloadRange) -> memoryview:
        return self._octets[payload.start : payload.end]

    def _matches(self, payload: PayloadRange) -> bool:
        checksum = self.checksum(payload.start, payload.digest)
        return checksum is None or checksum.matches(self._bytes(payload))

    def fetch(self, ranges: Iterable[Range]) -> None:
        """Fetch the ranges that are missing, unchecked; those that other threads are filling are waited for."""
        self._reset_after_fork()
        ranges = list(ranges)
        while True:
            with self._lock:
                missing = self._missing(ranges)
                if not missing:
                    return
                free = self._not_being_filled(missing)
                if not free:
                    self._written.wait()
                    continue
                # Gaps between two of them are fetched, too, unless they are present: views of those may be in use.
                claimed = self._not_being_filled(self._missing(merged(free, self.near)))
                self._writing += claimed
            try:
                self._fill(claimed)
            finally:
                self._finish_filling(claimed)

    def fetch_range(self, start: int, end: int) -> None:
        """Fetch one range of the file, as `fetch` does."""
        self.fetch([(start, end)])

    def _missing(self, ranges: Iterable[Range]) -> list[Range]:
        return [part for start, end in ranges for part in self._present.missing(start, end)]

    def _not_being_filled(self, ranges: Iterable[Range]) -> list[Range]:
        """Return the parts of ranges that no thread is filling."""
        writing = RangeSet()
        for start, end in self._writing:
            writing.add(start, end)
        return [part for start, end in ranges for part in writing.missing(start, end)]

    def _finish_filling(self, ranges: list[Range]) -> None:
        with self._lock:
            for part in ranges:
                self._writing.remove(part)
            self._written.notify_all()

    def _fill(self, ranges: list[Range]) -> None:
        if ranges:
            self._file.fill([(start, self._octets[start:end]) for start, end in cut(ranges)])
            self._add(ranges)

    def _add(self, ranges: list[Range]) -> None:
        with self._lock:
            for start, end in ranges:
                self._present.add(start, end)
