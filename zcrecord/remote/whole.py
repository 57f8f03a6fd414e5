"""All of a remote archive read once, in little memory: verified, or hashed into its content digest.

Knows the order of the file, in which bytes come and go again. What a content digest consists of is `contents`'s; the
rules of elements stand there a second time, for payloads that are in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.layout import HEADER_SIZE, NONE
from zcrecord.errors import FormatError

from .on_demand import Window
from .read_ahead import Expected, Feed

if TYPE_CHECKING:
    from zcrecord.archive.archive import Archive, Progress

__all__ = ["Streamed"]

_MOST = 32 << 20  # bytes held at a time; an archive of no more is rather kept than fetched twice
_PIECE = 1 << 20  # bytes looked at at a time: few enough to stay in a processor's cache


class Streamed(Window):
    """A window through which all of an archive can be read, too, without its staying there."""

    def check(self, archive: Archive, progress: Progress | None = None) -> None:
        """Check what `contents.check` does (R70 to R74); payloads of strings, and small archives, stay in memory.

        Raises:
            IntegrityError: a digest does not match. FormatError: another rule is broken. SourceError: it cannot be had.
        """
        self._keep_small(archive)
        bools, pads = _bools(archive), _pads(archive)
        gaps = set(_gaps(archive))
        for row, at, piece in self._pieces([*_payloads(archive), *gaps], progress):
            if row in gaps and piece.any():
                what = f"the gap [{row.start:#x}, {row.end:#x}) holds bytes that are not zero"
                raise FormatError(what, path=self.shown, offset=row.start)
            if row.start in bools and row not in gaps and piece.max() > 1:
                raise FormatError("a bool is neither 0 nor 1", path=self.shown, tensor=bools[row.start])
            if row.start in pads and row not in gaps and at + len(piece) == row.end and piece[-1] >> pads[row.start][0]:
                what = "the pad bits after its last element are not zero"
                raise FormatError(what, path=self.shown, tensor=pads[row.start][1])
        for i in _of(archive, "string").tolist():
            archive.view(i)  # it checks itself, and the archive remembers

    def sha256_of(self, archive: Archive) -> Callable[[int], bytes]:
        """Return what gives the SHA-256 of a tensor's logical bytes.

        Payloads of strided ones, and small archives, stay in memory.

        From then on a payload has to have that very SHA-256 whenever it is fetched: what was found to be right cannot
        be exchanged for something else that has its digest of 64 bits.

        Raises:
            IntegrityError: a digest does not match. SourceError: it cannot be had.
        """
        self._keep_small(archive)
        found: dict[int, Any] = {}
        for row, _, piece in self._pieces(_payloads(archive), None):
            found.setdefault(row.start, hashlib.sha256()).update(piece)
        known: dict[int, bytes] = {start: running.digest() for start, running in found.items()}
        self.pin(known)

        def sha256(i: int) -> bytes:
            row = archive.row(i)
            if row.payload == NONE:
                return hashlib.sha256().digest()
            if archive.strides(row) is None:
                return known[archive.header.payload_offset + int(archive.index.payloads["offset"][row.payload])]
            return hashlib.sha256(np.ascontiguousarray(archive.elements(i)).data.cast("B")).digest()

        return sha256

    def _keep_small(self, archive: Archive) -> None:
        if archive.header.archive_size <= _MOST:
            archive.bring()

    def _pieces(self, rows: list[Expected], progress: Progress | None) -> Iterator[tuple[Expected, int, Any]]:
        """Yield all bytes of ranges in the order of the file: the range, where they start, the bytes."""
        feed = Feed(self)
        feed.expect(rows, _MOST)
        room = np.empty(_PIECE, np.uint8)
        total, done = sum(row.nbytes for row in rows), 0
        for row in sorted(rows):
            for at in range(row.start, row.end, _PIECE):
                piece = room[: min(_PIECE, row.end - at)]
                feed.readinto_at(at, piece.data)
                yield row, at, piece
                done += len(piece)
                if progress:
                    progress(done, total)
        feed.check_same()


def _payloads(archive: Archive) -> list[Expected]:
    """Return all payloads, each once, with the name of a tensor that uses it."""
    ix, base = archive.index, archive.header.payload_offset
    users = dict(zip(ix.tensors["payload"][::-1].tolist(), range(len(ix.tensors) - 1, -1, -1), strict=True))
    out: dict[int, Expected] = {}
    for number, (offset, nbytes, digest) in enumerate(ix.payloads.tolist()):
        if base + offset not in out:
            name = ix.name(users[number]) if number in users else ""
            out[base + offset] = Expected(base + offset, nbytes, digest if ix.digest_kind else None, name)
    return list(out.values())


def _gaps(archive: Archive) -> list[Expected]:
    """Return what lies between the payloads of a whole archive, and before and after them."""
    if not archive.whole:
        return []
    h = archive.header
    at = HEADER_SIZE + h.index_size if h.front else HEADER_SIZE
    end = h.archive_size - HEADER_SIZE if h.front else h.index_offset
    out = []
    for start, stop in [*((row.start, row.end) for row in _payloads(archive)), (end, end)]:
        if at < start:
            out.append(Expected(at, start - at, None, ""))
        at = stop
    return out


def _of(archive: Archive, *names: str) -> Any:
    """Return the numbers of tensors of some element types, which have bytes."""
    rows = archive.index.tensors
    codes = [dtypes.by_name[name].code for name in names]
    return np.flatnonzero(np.isin(rows["dtype"], codes) & (rows["payload"] != NONE))


def _start(archive: Archive, i: int) -> int:
    return archive.header.payload_offset + int(archive.index.payloads["offset"][archive.row(i).payload])


def _bools(archive: Archive) -> dict[int, str]:
    """Return where payloads of bools start, and the names of these."""
    return {_start(archive, i): archive.index.name(i) for i in _of(archive, "bool")[::-1].tolist()}


def _pads(archive: Archive) -> dict[int, tuple[int, str]]:
    """Return where payloads of packed elements start that do not fill their last byte: bits used of it, and a name."""
    rows = archive.index.tensors
    known = [kind.name for kind in dtypes.by_code.values() if kind is not dtypes.STRING]
    out: dict[int, tuple[int, str]] = {}
    for i in _of(archive, *known).tolist():
        if rows["bits"][i] < 8:
            row = archive.row(i)
            used = prod(archive.shape(row)) * row.bits % 8
            before = out.get(_start(archive, i), (8, ""))
            if used and used < before[0]:
                out[_start(archive, i)] = used, archive.index.name(i)
    return out
