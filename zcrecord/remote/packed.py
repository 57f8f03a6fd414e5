"""Archives packed for transport elsewhere, as if they were not: of the packed file only frames that are needed come.

Knows the way from a range of the archive to frames of the file; which ranges are wanted is left to who reads archives,
the frames themselves to `zcrecord.transport.frames`. Without a seek table there is no such way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from zcrecord.errors import FormatError, IntegrityError
from zcrecord.transport import frames

from .file import Piece, Place
from .ranges import cut, merged

__all__ = ["Unpacked", "table_of"]

_RECENT = 16 << 20  # bytes out of frames that are kept: small payloads share one, and are asked for one by one
_REQUEST = 2 << 20  # bytes of one request: of frames no more than _RECENT are fetched together
_TAIL = 1 << 16  # bytes asked for at the end: the table of 20 GiB of frames, and often what opens the archive


def table_of(place: Place, first: memoryview) -> tuple[frames.Table | None, list[Piece]]:
    """Return the seek table of a packed file whose first bytes came, and all bytes that came by then, by their offsets.

    Raises:
        FormatError: there is a table, and it is not that of this file. SourceError: it cannot be had.
    """
    start = max(min(len(first), place.size), place.size - _TAIL)
    tail = memoryview(bytearray(place.size - start))
    have = [(0, first[: place.size]), (start, tail)]
    if len(tail):
        place.fill([(start, tail)])
    return frames.read_table(place.size, lambda offset, nbytes: _bytes(place, have, offset, nbytes)), have


def _bytes(place: Place, have: list[Piece], offset: int, nbytes: int) -> memoryview:
    for at, octets in have:
        if at <= offset and offset + nbytes <= at + len(octets):
            return octets[offset - at : offset - at + nbytes]
    out = memoryview(bytearray(nbytes))
    place.fill([(offset + lo, out[lo:hi]) for lo, hi in cut([(0, nbytes)], _REQUEST)])
    return out


class Unpacked(Place):
    """The archive that comes out of a packed file elsewhere. Several threads may use it."""

    def __init__(self, packed: Place, table: frames.Table, have: list[Piece]) -> None:
        """Take a packed file, its seek table, and what came of the file already, which is kept."""
        self._packed, self._table, self._have = packed, table, have
        self.shown, self.size, self.tag, self.firm = packed.shown, table.nbytes, packed.tag, packed.firm
        self._recent: dict[int, memoryview] = {}
        self._seen = np.zeros(len(table.bounds) - 1, bool)

    def start(self, nbytes: int) -> memoryview:
        """Return the archive's first bytes."""
        out = memoryview(bytearray(min(nbytes, self.size)))
        self.fill([(0, out)])
        return out

    def fill(self, pieces: list[Piece]) -> None:
        """Fill every piece, from frames that came before or that are fetched now.

        Raises:
            SourceError: they cannot be had. FormatError, IntegrityError: a frame is damaged, even when it was fetched
            again. LimitError: what comes out of them is out of all proportion.
        """
        for piece in pieces:
            for group in self._groups(piece):
                self._put(piece, group, self._expanded(group))

    def check_same(self) -> None:
        """Raise SourceError if the packed file was replaced, as far as its server can tell."""
        self._packed.check_same()

    def _groups(self, piece: Piece) -> list[list[int]]:
        """Return the frames that hold a piece, some at a time, so that not all of them are in memory."""
        offset, target = piece
        sizes = np.diff(self._table.bounds)
        groups: list[list[int]] = []
        held = _RECENT
        for i in self._table.covering([(offset, offset + len(target))]).tolist():
            if held + int(sizes[i]) > _RECENT:
                groups.append([])
                held = 0
            groups[-1].append(i)
            held += int(sizes[i])
        return groups

    def _put(self, piece: Piece, group: Iterable[int], octets: dict[int, memoryview]) -> None:
        offset, target = piece
        for i in group:
            lo, hi = self._table.bounds[i : i + 2].tolist()
            start, stop = max(lo, offset), min(hi, offset + len(target))
            target[start - offset : stop - offset] = octets[i][start - lo : stop - lo]

    def _expanded(self, group: list[int]) -> dict[int, memoryview]:
        found = {i: octets for i in group if (octets := self._recent.get(i)) is not None}
        missing = [i for i in group if i not in found]
        self._seen[missing] = True
        claimed = int(np.diff(self._table.bounds)[self._seen].sum())
        frames.check_proportion(claimed, self._packed.size, "download it, ")
        try:
            made = self._fetched(missing)
        except (FormatError, IntegrityError):  # what cannot be had was asked for often enough
            self._packed.check_same()
            made = self._fetched(missing)  # a proxy's fault may have passed by
        recent = list({**self._recent, **made}.items())
        while sum(len(octets) for _, octets in recent) > _RECENT:
            del recent[0]
        self._recent = dict(recent)  # in one step: other threads look at the one before, or at this
        return found | made

    def _fetched(self, chosen: list[int]) -> dict[int, memoryview]:
        """Return what comes out of some frames, neighbours fetched together."""
        starts = self._table.starts
        room: dict[int, Any] = {}
        for lo, hi in merged(((int(starts[i]), int(starts[i + 1])) for i in chosen), near=0):
            room[lo] = _bytes(self._packed, self._have, lo, hi - lo)
        expand = frames.expanded()
        out: dict[int, memoryview] = {}
        for i in chosen:
            lo, hi = starts[i : i + 2].tolist()
            base = max(at for at in room if at <= lo)
            out[i] = np.empty(int(np.diff(self._table.bounds[i : i + 2])[0]), np.uint8).data
            checksum = None if self._table.checksums is None else int(self._table.checksums[i])
            expand(room[base][lo - base : hi - base], out[i], lo, checksum)
        return out
