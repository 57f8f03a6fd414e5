"""Tensors read from the file by position, in parallel, straight into the caller's buffers or into memory of their own.

For network file systems and cold disks, where a page fault of the mapping costs a round trip each: neighbouring
payloads come with one read, several reads are under way, and no byte is copied once it was read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from zcrecord.dtypes import DType
from zcrecord.errors import UnsupportedError
from zcrecord.storage.memory import Piece, aligned, aligned_empty, read_pieces
from zcrecord.storage.threads import each_piece

from .mapped import Octets, as_tensor, room_of
from .protocol import LoadPlan, PayloadRef, RangeSource

__all__ = ["ReadingLoader"]

_READ = 1 << 20  # bytes of one read; many times what a network's round trip is worth
_FETCH, _FETCHERS = 8 << 20, 4  # of one request to a remote archive, and how many there are at a time
_GAP = 1 << 16  # bytes between two payloads that are rather read, too, than asked around
_HUGE = 4 << 20  # from which numpy asks for huge pages
_BUFFERS = 1000  # of one read; systems take 1024


class ReadingLoader:
    """Tensors in memory of their own, or the caller's (`dst=`), read from the file; ties share one.

    `load` only says where the bytes go, `finish` reads them all, those of remote archives in the same way. What lies in
    memory is copied in `load`. A file that was replaced, changed or became shorter since it was opened, is a
    SourceError.

    Whoever gives up, by `cancel` or Ctrl-C, waits for the reads that are under way, since they fill memory that may be
    the caller's: four of 1 MiB each of a file; of a remote archive the requests of one batch, each with its tries,
    which end as its server's time limit says. No further one is begun.
    """

    device = "read"

    def __init__(self) -> None:
        self._plan: LoadPlan | None = None
        self._wanted: list[tuple[PayloadRef, Octets]] = []

    def can_load(self, device: str, dtype: DType) -> bool:
        """Return whether it is this machine's memory, and a type with elements of a fixed size."""
        return device == self.device and dtype.bits > 0

    def begin(self, plan: LoadPlan) -> None:
        """Keep the plan; nothing is opened yet."""
        self._plan, self._wanted = plan, []
        plan.advance(0)  # nothing will be there when `load` returns

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor, whose bytes come with `finish`."""
        room = _fresh(ref.nbytes) if dst is None else room_of(dst, ref)
        if ref.path is not None or ref.source is not None:
            self._wanted.append((ref, room))
        else:
            for start in range(0, ref.nbytes, _FETCH):
                target = room[start : start + _FETCH]
                ref.read_into(target.data, start)
                self._begun().advance(len(target))
        return as_tensor(room, ref)

    def _begun(self) -> LoadPlan:
        if self._plan is None:
            raise UnsupportedError("begin(plan) comes first")
        return self._plan

    def view(self, loaded: Octets, ref: PayloadRef) -> Any:
        """Return one of several tensors of a payload."""
        return as_tensor(loaded, ref)

    def finish(self) -> None:
        """Read everything, in the order of the file.

        Raises:
            SourceError: the file cannot be read, or is not as it was when the record was opened.
        """
        plan, wanted = self._begun(), self._wanted
        self._plan, self._wanted = None, []
        if not wanted:
            return
        done = _Arrived(plan).add
        source = wanted[0][0].source  # of all, as is the path
        if source is not None:
            most = max(1, min(_FETCH, plan.max_in_flight // _FETCHERS))  # each may have as much in memory besides
            pieces = _pieces(wanted, most, gap=0)  # it merges near ones itself
            each_piece(partial(_fetch, source), pieces, done=done, threads=_FETCHERS)
        else:
            assert plan.path is not None and plan.identity is not None
            pieces = _pieces(wanted, min(_READ, plan.max_in_flight))
            read_pieces(plan.path, pieces, identity=plan.identity, done=done)

    def abort(self) -> None:
        """Let go of the buffers. Nothing else is held between two calls."""
        self._plan, self._wanted = None, []


def _fresh(nbytes: int) -> Octets:
    """Return new memory, without huge pages where numpy would take them: several threads clearing one is slow."""
    return aligned_empty(nbytes) if nbytes < _HUGE else np.frombuffer(aligned(nbytes)[1], np.uint8)


class _Arrived:
    """Tells the plan what has arrived, gaps left out at the end: they are read, and are nobody's."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan, self._due = plan, plan.nbytes

    def add(self, nbytes: int) -> None:
        """Say that so many more bytes were read."""
        told = min(nbytes, self._due)
        self._due -= told
        self._plan.advance(told)


def _fetch(source: RangeSource, piece: Piece) -> int:
    """Bring a piece of a remote archive and return its bytes, with one request even if it goes to several places."""
    if len(piece.buffers) == 1:
        source.readinto_at(piece.offset, piece.buffers[0])
        return len(piece.buffers[0])
    whole = room = np.empty(sum(map(len, piece.buffers)), np.uint8).data
    source.readinto_at(piece.offset, room)
    for buffer in piece.buffers:
        buffer[:] = room[: len(buffer)]
        room = room[len(buffer) :]
    return len(whole)


def _pieces(wanted: list[tuple[PayloadRef, Octets]], most: int, gap: int = _GAP) -> list[Piece]:
    """Return the reads that bring all this, each of up to `most` bytes: neighbours in one, large ones in several."""
    pieces: list[Piece] = []
    nowhere = np.empty(min(gap, most), np.uint8).data  # takes what lies between two; nobody looks at it
    end = size = -1  # of the last piece: where it ends in the file, how many bytes it has
    for ref, room in sorted(wanted, key=lambda item: item[0].offset):
        apart = ref.offset - end
        start = 0
        if pieces and 0 <= apart <= len(nowhere) and size + apart < most and len(pieces[-1].buffers) < _BUFFERS:
            start = min(ref.nbytes, most - size - apart)
            pieces[-1].buffers.extend([nowhere[:apart], room[:start].data])
            end, size = ref.offset + start, size + apart + start
        while start < ref.nbytes:
            stop = min(start + most, ref.nbytes)
            pieces.append(Piece(ref.offset + start, [room[start:stop].data]))
            end, size, start = ref.offset + stop, stop - start, stop
    return pieces
