"""Remote archives that were packed for transport: a range of the archive is read from the frames that hold it.

Maps ranges of the archive to frames of the packed file; frames and seek table are `zcrecord.transport.frames`. A packed
file without a seek table is not read here, but fetched whole.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from zcrecord.errors import FormatError, IntegrityError
from zcrecord.storage.memory import aligned
from zcrecord.transport import frames

from .file import RemoteFile, Request
from .ranges import NEAR, cut, merged

_RECENT = 16 << 20  # decompressed bytes that are kept: small payloads share a frame, and are asked for one by one
_REQUEST = 2 << 20  # bytes of one request: of frames no more than _RECENT are fetched together
_TAIL = 1 << 16  # bytes fetched of the end: the table of 20 GiB of frames, and often header, index and trailer


def read_table(packed: RemoteFile, first: memoryview) -> tuple[frames.SeekTable | None, list[Request]]:
    """Return a packed file's seek table, None if it has none, and all bytes fetched so far, the `first` included."""
    start = max(min(len(first), packed.size), packed.size - _TAIL)
    tail = memoryview(bytearray(packed.size - start))
    fetched = [(0, first[: packed.size]), (start, tail)]
    if len(tail):
        packed.fill([(start, tail)])
    return frames.read_table(packed.size, partial(_read_or_fetch, packed, fetched)), fetched


def _read_or_fetch(packed: RemoteFile, fetched: list[Request], offset: int, nbytes: int) -> memoryview:
    """Return bytes of the packed file, requested unless `fetched` has them."""
    for start, octets in fetched:
        if start <= offset and offset + nbytes <= start + len(octets):
            return octets[offset - start : offset - start + nbytes]
    _, out = aligned(nbytes, sparse=True)  # a server may claim 4 GiB: pages are taken as its bytes come
    packed.fill([(offset + lo, out[lo:hi]) for lo, hi in cut([(0, nbytes)], _REQUEST)])
    return out


class UnpackedFile(RemoteFile):
    """The archive in a remote packed file, read as if it were not packed: only frames asked for are decompressed."""

    near = 0

    def __init__(self, packed: RemoteFile, table: frames.SeekTable, fetched: list[Request]) -> None:
        """Open a packed file by its seek table; the bytes fetched so far are kept and not fetched again."""
        self._packed, self._table, self._fetched = packed, table, fetched
        self.shown, self.size, self.tag, self.strong = packed.shown, table.nbytes, packed.tag, packed.strong
        self._recent: dict[int, memoryview] = {}
        self._requested = np.zeros(len(table.sizes), bool)

    def start(self, nbytes: int) -> memoryview:
        out = memoryview(bytearray(min(nbytes, self.size)))
        self.fill([(0, out)])
        return out

    def fill(self, requests: list[Request]) -> None:
        """Fill requests from the frames that hold their bytes, each frame decompressed once."""
        by_frame: dict[int, list[Request]] = {}
        for offset, target in requests:
            for i in self._table.covering([(offset, offset + len(target))]).tolist():
                by_frame.setdefault(i, []).append((offset, target))
        for group in self._frame_groups(sorted(by_frame)):
            for i, content in self._contents(group).items():
                lo, hi = self._table.range(i)
                for offset, target in by_frame[i]:
                    start, stop = max(lo, offset), min(hi, offset + len(target))
                    target[start - offset : stop - offset] = content[start - lo : stop - lo]

    def check_same(self) -> None:
        self._packed.check_same()

    def _frame_groups(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of frames in groups of up to 16 MiB, so that not all of them are in memory at a time."""
        starts = self._table.starts
        sizes = np.maximum(self._table.sizes, np.diff(starts))
        groups: list[list[int]] = []
        total = 0
        for i in numbers:
            gap = min(int(starts[i] - starts[groups[-1][-1] + 1]), NEAR) if groups else 0
            if not groups or total + gap + int(sizes[i]) > _RECENT:
                groups.append([])
                total = gap = 0
            groups[-1].append(i)
            total += gap + int(sizes[i])
        return groups

    def _contents(self, group: list[int]) -> dict[int, memoryview]:
        """Return the content of frames by their numbers; those decompressed recently are not fetched again."""
        known = {i: octets for i in group if (octets := self._recent.get(i)) is not None}
        missing = [i for i in group if i not in known]
        self._requested[missing] = True
        packed = int(np.diff(self._table.starts)[self._requested].sum())  # whatever size the server claims
        frames.check_expansion(int(self._table.sizes[self._requested].sum()), packed, "download it, ")
        try:
            new = self._fetch(missing)
        except (FormatError, IntegrityError):  # a SourceError was retried already
            self._packed.check_same()
            new = self._fetch(missing)  # a proxy's fault may have passed
        recent = {**self._recent, **new}
        total = sum(map(len, recent.values()))
        for i in list(recent):
            if total <= _RECENT:
                break
            total -= len(recent.pop(i))
        self._recent = recent  # in one step: other threads see the old dict or the new one
        return known | new

    def _fetch(self, numbers: list[int]) -> dict[int, memoryview]:
        """Return the content of frames by their numbers, near ones fetched together."""
        table = self._table
        ranges = merged(table.packed_range(i) for i in numbers)
        fetched = {lo: _read_or_fetch(self._packed, self._fetched, lo, hi - lo) for lo, hi in ranges}
        decompress = frames.frame_decompressor(table)
        out: dict[int, memoryview] = {}
        for i in numbers:
            lo, hi = table.packed_range(i)
            base = max(start for start in fetched if start <= lo)
            out[i] = np.empty(int(table.sizes[i]), np.uint8).data
            decompress(i, fetched[base][lo - base : hi - base], out[i])
        return out
