"""Damaged ranges of an archive: all of them, found by several threads at memory speed.

The smallest unit of damage is a block of a payload that has checksums of blocks, else a payload. The index has to be
verified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zcrecord.codec.blocks import Blocks
from zcrecord.codec.digests import RunningDigest, digest_of
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.layout import NONE
from zcrecord.errors import FormatError, IntegrityError
from zcrecord.storage.threads import MOST_THREADS, WORTH_A_THREAD, Going, cores, run_threads
from zcrecord.tensors.strides import address

from . import unflatten
from .payload_source import Array, Piece, is_twin

if TYPE_CHECKING:
    from .archive import Archive

Progress = Callable[[int, int], None]

_PIECE = 8 << 20  # bytes hashed at a time, and, of small payloads, taken by a thread at a time
_CHANGED = "its digest does not match"
_FILLED = "bytes between payloads that are not zero"


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged range of the file, [offset, offset + nbytes): the kind of damage, and the full names that use it.

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
    """Return every payload whose digest does not match and every gap that is not zero (R73, R74), by their offsets.

    Of a part of an archive, and of another format's bytes, only what its index names. `progress` is called in this
    thread, with the bytes done and the bytes there are. LimitError if the names of all users would take out of all
    proportion.
    """
    search = _DamageSearch(archive, progress)
    search.run(cores(threads))
    if progress:
        progress(search.total, search.total)
    if not search.damaged:
        return []
    tensors, attributes, metadata = _users(archive, search.numbers, {number for _, _, number in search.damaged})
    out = []
    for lo, hi, n in sorted(search.damaged):
        users = [tuple(names.get(n, ())) for names in (tensors, attributes, metadata)]
        out.append(Damage(_FILLED if n < 0 else _CHANGED, lo, hi - lo, users[0], users[1], users[2]))
    return out


def check_digest(pieces: Iterable[Piece], tensor: str | None) -> None:
    """Check the digests of the pieces of a payload; the error names `tensor`. Those without digests pass."""
    for source, there in pieces:
        digest = source.digest(there)
        if digest is not None and digest_of(source.payload(there)) != digest:
            fault = "its payload's digest does not match; the file is damaged, copy it again"
            raise IntegrityError(fault, path=source.path, tensor=tensor)


class BlockCheck:
    """Compares the blocks of a payload in memory with their checksums, each before a part of it is first used."""

    def __init__(self, piece: Piece, blocks: Blocks, tensor: str) -> None:
        self._piece, self.blocks, self._tensor = piece, blocks, tensor
        self._pending = bytearray(b"\1") * len(blocks.sums)

    @classmethod
    def of(cls, piece: Piece, tensor: str) -> BlockCheck | None:
        """Return the check of a payload, whose errors name a tensor; None if no checksums of its blocks are known."""
        blocks = piece.source.sums(piece.number)
        return None if blocks is None else cls(piece, blocks, tensor)

    def pages(self, start: int, nbytes: int, request: Callable[[list[tuple[int, int]]], None]) -> None:
        """Check the blocks on pages of the payload's mapping, from an address on; `request` gets their addresses."""
        octets, size = np.frombuffer(self._piece.source.payload(self._piece.number), np.uint8), self.blocks.size
        lo, hi = max(start - address(octets), 0), min(start + nbytes - address(octets), len(octets))
        if self._pending.find(1, lo // size, -(-hi // size)) >= 0:
            first, end = self.whole(lo, hi)
            request([(address(octets) + first, end - first)])
            self(lo, hi)

    def __call__(self, lo: int, hi: int, read: memoryview | None = None) -> None:
        """Check the blocks that bytes [lo, hi) of the payload meet, those that lie in `read`, these bytes, there.

        Raises:
            IntegrityError: one is damaged.
        """
        k, last = lo // self.blocks.size, -(-hi // self.blocks.size)
        while (k := self._pending.find(1, k, last)) >= 0:
            start, end = self.blocks.range(k, self._piece.nbytes)
            here = read is not None and lo <= start and end <= hi
            digest = digest_of(read[start - lo : end - lo]) if here and read is not None else self._digest(start, end)
            if digest != int(self.blocks.sums[k]):
                source, at = self._piece.source, self._piece.source.offset + self._piece.start
                what = f"bytes [{at + start:#x}, {at + end:#x}): their checksum does not match; the file is damaged"
                raise IntegrityError(f"{what}, copy it again", path=source.path, tensor=self._tensor, offset=at + start)
            self._pending[k] = 0

    def whole(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the range of the payload that the blocks of bytes [lo, hi) fill."""
        return self.blocks.around(lo, hi, self._piece.nbytes)

    def _digest(self, lo: int, hi: int) -> int:
        running = RunningDigest()  # of one that a stranger made as large as 1 GiB, a piece is in memory at a time
        for at in range(lo, hi, _PIECE):
            running.update(self._read(at, min(at + _PIECE, hi)))
        return running.intdigest()

    def _read(self, lo: int, hi: int) -> memoryview:
        source, number = self._piece.source, self._piece.number
        octets, offset = source.read_by(number) or (source.payload(number), 0)
        return octets[offset + lo : offset + hi]


def error_of(damage: list[Damage]) -> FormatError:
    """Return the error that names the first damaged payload, or gap if no payload is, counts the rest, and has all."""
    first, more = next((d for d in damage if d.what == _CHANGED), damage[0]), len(damage) - 1
    lo, hi = first.offset, first.offset + first.nbytes
    error: FormatError
    if first.what == _CHANGED:
        places = f" there and in {more} more place{'s' * (more > 1)}" if more else ""
        fault = f"payload [{lo:#x}, {hi:#x}): its digest does not match; the file is damaged{places}, copy it again"
        error = IntegrityError(fault, tensor=next(iter(first.tensors), None), offset=lo)
    else:
        places = f", as do{'es' * (more == 1)} {more} more" if more else ""
        error = FormatError(f"the gap [{lo:#x}, {hi:#x}) holds bytes that are not zero{places}", offset=lo)
    error.damage = tuple(damage)
    return error


class Count:
    """Bytes done by several threads. Progress is reported in the thread that counts from the start."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._caller, self._lock = threading.get_ident(), threading.Lock()

    def add(self, nbytes: int = 0) -> None:
        """Count bytes, and report."""
        with self._lock:
            self._done += nbytes
        if self._progress and threading.get_ident() == self._caller:
            self._progress(self._done, self._total)


class _DamageSearch:
    """Search of an archive by several threads, which append to `damaged`."""

    def __init__(self, archive: Archive, progress: Progress | None) -> None:
        ix, h = archive.index, archive.header
        self.numbers = np.flatnonzero(~is_twin(ix.payloads))
        self.rows: Array = ix.payloads[self.numbers]
        self.damaged: list[tuple[int, int, int]] = []  # start, end, and the number in `rows`; -1 for a gap
        self._start, self._end = h.payload_region
        self.total = self._end - self._start
        self._base, self._shift, self._source = h.payload_offset, archive.offset, archive.source
        self._buffer, self._whole, self._hashed = archive.buffer, archive.whole, bool(ix.digest_kind)
        self._count = Count(progress, self.total)

    def _batches(self) -> list[tuple[int, int]]:
        """Return ranges of `rows`, large payloads by themselves: those first, so that none is left for the end."""
        sums = np.cumsum(self.rows["nbytes"], dtype=np.uint64)
        out: list[tuple[int, int]] = []
        first = 0
        while first < len(sums):
            before = int(sums[first - 1]) if first else 0
            last = int(np.searchsorted(sums, np.uint64(before + _PIECE), "right"))
            last = max(last, first + 1)
            out.append((first, last))
            first = last
        sizes = self.rows["nbytes"].tolist()
        return sorted(out, key=lambda batch: -sizes[batch[0]] if batch[1] - batch[0] == 1 else 0)

    def run(self, threads: int) -> None:
        """Check every payload, and every gap."""
        nbytes = int(self.rows["nbytes"].sum()) if self._hashed else 0
        self._check_gap(self._end_of(len(self.rows) - 1), self._end)
        batches = self._batches()
        count = min(threads, MOST_THREADS, max(len(batches), 1), nbytes // WORTH_A_THREAD + 1)
        run_threads(self._check_batch, batches, count, self._count.add)

    def _end_of(self, row: int) -> int:
        """Return the end of a payload in the archive; of -1 the start of the region of payloads."""
        return self._start if row < 0 else self._base + sum(self.rows[row].item()[:2])

    def _check_batch(self, batch: tuple[int, int], going: Going) -> None:
        first, last = batch
        done = self._end_of(first - 1)
        for number, (offset, nbytes, digest) in enumerate(self.rows[first:last].tolist(), first):
            lo, hi = self._base + offset, self._base + offset + nbytes
            self._check_gap(done, lo)
            if self._hashed and self._digest(lo, hi, going) != digest and going():
                bad = self._blocks(number, lo, hi)
                self.damaged += [(start + self._shift, end + self._shift, number) for start, end in bad]
            done = hi
        if hi - lo <= _PIECE:  # larger ones counted pieces
            self._count.add(int(self.rows["nbytes"][first:last].sum()))

    def _digest(self, lo: int, hi: int, going: Going) -> int:
        """Return the digest of bytes [lo, hi), hashed in pieces: Ctrl-C and progress take effect between them.

        If another thread has failed it stops early with a wrong digest; nobody sees it, since `run_threads` raises.
        """
        if hi - lo <= _PIECE:
            return digest_of(self._buffer[lo:hi])
        running = RunningDigest()
        for at in range(lo, hi, _PIECE):
            if not going():
                break
            piece = self._buffer[at : min(at + _PIECE, hi)]
            running.update(piece)
            self._count.add(len(piece))
        return running.intdigest()

    def _blocks(self, number: int, lo: int, hi: int) -> list[tuple[int, int]]:
        """Return the damaged blocks of a damaged payload, bytes [lo, hi), neighbours as one; else all of it."""
        [(source, there)] = self._source.pieces(int(self.numbers[number]))
        bad: list[tuple[int, int]] = []
        if (blocks := source.sums(there)) is not None:
            for k, expected in enumerate(blocks.sums.tolist()):
                start, end = (lo + at for at in blocks.range(k, hi - lo))
                if digest_of(self._buffer[start:end]) != expected:
                    bad = [*bad[:-1], (bad[-1][0], end)] if bad and bad[-1][1] == start else [*bad, (start, end)]
        return bad or [(lo, hi)]

    def _check_gap(self, lo: int, hi: int) -> None:
        if lo < hi and self._whole and self._buffer[lo:hi].tobytes().strip(b"\0"):
            self.damaged.append((lo + self._shift, hi + self._shift, -1))


def _users(archive: Archive, numbers: Array, damaged: set[int]) -> Iterator[dict[int, list[str]]]:
    """Yield the names of tensors, attributes and metadata that use each damaged range."""
    ix = archive.index
    unflatten.check_full_names(ix, archive.header.index_size)
    tensors: dict[int, list[str]] = {}
    at = np.searchsorted(numbers, ix.tensors["payload"], "right") - 1
    at[ix.tensors["payload"] == NONE] = -1
    for i in np.flatnonzero(np.isin(at, list(damaged - {-1}))).tolist():
        tensors.setdefault(int(at[i]), []).append(ix.name(i))
    yield tensors
    for rows in (ix.attributes, ix.metadata):
        out: dict[int, list[str]] = {}
        for a in unflatten.attribute_entries(ix, rows, PayloadId):
            values = a.value if isinstance(a.value, list | tuple) else [a.value]
            module = ix.text_of(ix.modules[a.parent]) if a.parent != NONE else ""
            used = {int(np.searchsorted(numbers, int(v), "right")) - 1 for v in values if isinstance(v, PayloadId)}
            for number in used & damaged:
                out.setdefault(number, []).append(f"{module}.{a.key}" if module else a.key)
        yield out
