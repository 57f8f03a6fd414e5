"""Memory of a remote archive that can also be streamed: verified, hashed into its content digest, or read ahead.

All of an archive is read once, in the order of the file, in little memory. Content digests are defined in
`archive.digest`, the rules of elements in `codec.element_rules`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from zcrecord.archive.digest import logical_sha256
from zcrecord.codec.element_rules import ElementRules
from zcrecord.codec.layout import NONE
from zcrecord.errors import FormatError

from .on_demand import OnDemandMemory, PayloadRange
from .read_ahead import ReadAhead

if TYPE_CHECKING:
    from zcrecord.archive.archive import Archive, Progress

_MOST = 32 << 20  # bytes in memory at a time; a smaller archive is fetched once, and stays in memory
_PIECE = 1 << 20  # bytes checked at a time: few enough to stay in a processor's cache


class RemoteMemory(OnDemandMemory):
    """Memory of a remote archive, of a `RemoteSource`: fetched on demand, or streamed without being kept."""

    def read_ahead(self) -> ReadAhead:
        """Return a source for a loader, which fetches batches ahead, checks them, and keeps nothing."""
        return ReadAhead(self)

    def check(self, archive: Archive, progress: Progress | None = None) -> None:
        """Check all payloads as they come (R70 to R74); those of strings, and small archives, stay in memory."""
        self._keep_small(archive)
        rules, base = ElementRules(archive.index, archive.place), archive.header.payload_offset
        gaps = set(_gaps(archive))
        for row, offset, piece in self._pieces([*_payloads(archive), *gaps], progress):
            if row in gaps and piece.any():
                what = f"the gap [{row.start:#x}, {row.end:#x}) holds bytes that are not zero"
                raise FormatError(what, path=self.shown, offset=row.start)
            if row not in gaps:
                place = 0, row.start - base, row.nbytes  # as `Archive.place` returns it, for the one file
                rules.check(place, piece, last=offset + len(piece) == row.end)
        for i in rules.strings:
            archive.view(i)  # which checks itself, and the archive remembers

    def sha256_of(self, archive: Archive) -> Callable[[int], bytes]:
        """Return a function that gives the SHA-256 of a tensor's logical bytes. Reads the whole archive.

        So each frame of a packed one is checked: its table and any zstd agree on its content. Payloads of strided
        tensors, and small archives, stay in memory. From then on each payload is checked by its SHA-256 whenever it is
        fetched: nobody can replace it by bytes with the same digest of 64 bits.
        """
        self._keep_small(archive)
        hashes: dict[int, Any] = {}
        gaps = _gaps(archive)
        for row, _, piece in self._pieces([*_payloads(archive), *gaps], None):
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

    def _keep_small(self, archive: Archive) -> None:
        if archive.header.archive_size <= _MOST:
            archive.fetch()

    def _pieces(self, rows: list[PayloadRange], progress: Progress | None) -> Iterator[tuple[PayloadRange, int, Any]]:
        """Yield all bytes of ranges in the order of the file: the range, the offset of the bytes, the bytes."""
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
                if progress:
                    progress(done, total)
        ahead.check_same()


def _payloads(archive: Archive) -> list[PayloadRange]:
    """Return all payloads, each once, with the name of a tensor that uses it."""
    ix, base = archive.index, archive.header.payload_offset
    users = dict(zip(ix.tensors["payload"][::-1].tolist(), range(len(ix.tensors) - 1, -1, -1), strict=True))
    pins = archive.source.pins()
    out: dict[int, PayloadRange] = {}
    for number, (offset, nbytes, digest) in enumerate(ix.payloads.tolist()):
        if base + offset not in out:
            name = ix.name(users[number]) if number in users else ""
            checked = bool(ix.digest_kind) or base + offset in pins
            out[base + offset] = PayloadRange(base + offset, nbytes, digest if checked else None, name)
    return list(out.values())


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
