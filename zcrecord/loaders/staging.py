"""Staging buffers that go round: readers fill some while a device copies out of others. Nothing here is of any library.

    file, mapping    readers, several threads       ring of staging buffers        device
    or source    --> fill a buffer              --> [ filling | filling | full ] --> copies, then an event
                                                    taken again once its event has come

The thread that loads hands out buffers in turn, and waits only where all are taken; only it tells the plan what has
arrived. Small tensors share a buffer, and a read where they are neighbours; large ones take many buffers. How a device
copies is its `Lane`'s to know.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from zcrecord.codec.layout import ALIGNMENT, align_up
from zcrecord.errors import LimitError, RecordError, SourceError
from zcrecord.storage.files import identity_of, open_source
from zcrecord.storage.memory import read_at

from .plan import LoadPlan
from .protocol import PayloadRef, RangeSource

__all__ = ["Lane", "Ring"]

Octets = np.ndarray[Any, np.dtype[np.uint8]]

_LEAST_BUFFER, _LARGEST_BUFFER = 1 << 16, 1 << 24  # a copy's start costs as much as some 100 KiB of it
_GAP = 1 << 12  # bytes between two payloads that are rather read, too, than asked around; alignment leaves less


class Lane(Protocol):
    """How one device copies. `send` is called by readers, several at a time; the rest by the thread that loads."""

    def staging(self, nbytes: int) -> Any:
        """Return memory that it copies from fastest, as something with slices and `numpy()`; RuntimeError: none."""

    def event(self) -> Any:
        """Return what `send` marks the end of some copies with, used again and again."""

    def follow(self) -> None:
        """Have copies that are sent from now on come after what this thread has asked of the device."""

    def send(self, copies: Iterable[tuple[Any, Any]], event: Any) -> None:
        """Start copying each second to the first, part of staging memory to the device's, and mark their end."""

    def wait(self, event: Any) -> None:
        """Return once the copies before the event are done."""

    def drain(self) -> None:
        """Return once all copies are done."""


class _Piece(NamedTuple):
    """Some bytes of a ref, their place in a buffer, and on the device."""

    ref: PayloadRef
    start: int
    at: int
    target: Any

    @property
    def end(self) -> int:
        """Where it ends in the file or archive."""
        return self.ref.offset + self.start + len(self.target)

    def follows(self, other: _Piece) -> bool:
        """Return whether it lies as far behind another in the buffer as in the file or archive."""
        same = (self.ref.path, self.ref.source) == (other.ref.path, other.ref.source)
        return same and self.at - other.at == self.ref.offset + self.start - other.ref.offset - other.start


@dataclass(slots=True)
class _Buffer:
    """One of the ring: the same memory for readers and for the device, what it is filled with, and by whom."""

    octets: Octets
    staging: Any
    event: Any
    pieces: list[_Piece] = field(default_factory=list)
    filled: int = 0
    filling: Future[None] | None = None


class Ring:
    """Staging buffers, handed out in turn; each is filled by one reader, and taken again once the device has it.

    All together they are `plan.max_in_flight` bytes at the most. With `reads` files are read by position, in the place
    of being copied out of their mapping.

    Raises:
        LimitError: there is no memory for them. SourceError: the file is not the one that was opened.
    """

    def __init__(self, lane: Lane, plan: LoadPlan, readers: int, *, reads: bool = False) -> None:
        self._lane, self._plan = lane, plan
        self._file = _PlannedFile(plan) if reads and plan.path is not None else None
        apart = _GAP if any(self._source(ref) is not None for ref in plan.refs) else ALIGNMENT
        needed = max(1, plan.nbytes + apart * len(plan.refs))
        count = max(1, min(2 * readers, plan.max_in_flight // _LEAST_BUFFER))
        size = min(plan.max_in_flight // count, _LARGEST_BUFFER, needed)
        count = min(count, -(-needed // size))
        try:
            staging = lane.staging(count * size)
        except RuntimeError as error:
            if self._file is not None:
                self._file.close()
            what = f"no memory of {count * size} bytes to copy from can be had; lower max_in_flight"
            raise LimitError(what) from error
        if self._file is not None and not hasattr(os, "preadv"):
            readers = 1  # reading by position is seeking there first, and the file has one position
        octets = staging.numpy()
        parts = [slice(i * size, (i + 1) * size) for i in range(count)]
        self._buffers = [_Buffer(octets[part], staging[part], lane.event()) for part in parts]
        self._turn = 0
        self._readers = ThreadPoolExecutor(min(readers, count), thread_name_prefix="zcrecord-reader")

    def send(self, ref: PayloadRef, target: Any) -> None:
        """Have a ref's bytes read, and copied to `target`, a flat tensor of bytes; waits while all buffers are taken.

        Raises:
            RecordError: what reading anything before has come to; or whatever the plan's `advance` raises.
        """
        done = 0
        while done < ref.nbytes:
            buffer = self._buffers[self._turn]
            at = self._place(buffer, ref, done)
            count = min(len(buffer.octets) - at, ref.nbytes - done)
            if count <= 0:
                self._start()
                continue
            buffer.pieces.append(_Piece(ref, done, at, target[done : done + count]))
            buffer.filled = at + count
            done += count

    def finish(self) -> None:
        """Return once everything that was sent is on the device, and let go of all."""
        for _ in self._buffers:
            self._start()
        self._lane.drain()
        if self._file is not None:
            self._file.check("was changed while it was read")
        self._let_go()

    def abort(self) -> None:
        """Let go of all, as soon as nobody reads or copies any more; never raises."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(Exception):  # a device that has failed says so at each call
            self._lane.drain()
        self._let_go()

    def _let_go(self) -> None:
        self._readers.shutdown()
        if self._file is not None:
            self._file.close()

    def _start(self) -> None:
        """Have the buffer whose turn it is filled, and get the next one back."""
        buffer = self._buffers[self._turn]
        if buffer.pieces:
            buffer.filling = self._readers.submit(self._fill, buffer)
        self._turn = (self._turn + 1) % len(self._buffers)
        following = self._buffers[self._turn]
        if following.filling is None:
            return
        following.filling.result()
        self._lane.wait(following.event)
        arrived = sum(len(piece.target) for piece in following.pieces)
        following.pieces, following.filled, following.filling = [], 0, None
        self._plan.advance(arrived)

    def _place(self, buffer: _Buffer, ref: PayloadRef, start: int) -> int:
        """Return where in a buffer bytes go: what can be read with the last ones lies behind them as it does there."""
        if buffer.pieces and (last := buffer.pieces[-1]).ref is not ref and self._source(ref) is not None:
            gap = ref.offset + start - last.end
            if self._source(last.ref) is self._source(ref) and 0 <= gap <= _GAP:
                return buffer.filled + gap
        return align_up(buffer.filled, ALIGNMENT)

    def _source(self, ref: PayloadRef) -> RangeSource | None:
        """Return what reads a ref's bytes, neighbours with them; None where they are copied out of memory."""
        if self._file is not None and ref.path is not None:
            return self._file
        return ref.source if ref.buffer is None else None

    def _fill(self, buffer: _Buffer) -> None:
        """Read what a buffer is for, and have it copied; runs in a reader."""
        pieces = buffer.pieces
        first = 0
        for i, piece in enumerate(pieces, 1):
            if i < len(pieces) and self._source(piece.ref) is not None and pieces[i].follows(piece):
                continue
            try:
                self._read(pieces[first], buffer.octets[pieces[first].at : piece.at + len(piece.target)])
            except RecordError as error:
                raise error.located(path=piece.ref.path, tensor=pieces[first].ref.name) from error.__cause__
            first = i
        self._lane.send(((p.target, buffer.staging[p.at : p.at + len(p.target)]) for p in pieces), buffer.event)

    def _read(self, piece: _Piece, octets: Octets) -> None:
        """Read a piece, and those that follow it as far as there is room."""
        ref, start = piece.ref, piece.start
        source = self._source(ref)
        if source is not None:
            source.readinto_at(ref.offset + start, octets.data)
        elif ref.buffer is not None:
            stop = start + len(octets)
            octets[:] = np.frombuffer(ref.buffer, np.uint8)[start:stop]  # a memoryview's copy would keep the GIL
            ref.let_go(start, stop)
        else:
            ref.read_into(octets.data, start)  # which says that it cannot


class _PlannedFile:
    """The file of a plan, opened once more, and known to be the same."""

    def __init__(self, plan: LoadPlan) -> None:
        assert plan.path is not None
        self._path, self._identity = plan.path, plan.identity
        self._file, _ = open_source(plan.path)
        try:
            self.check("was replaced or changed since it was opened")
        except BaseException:
            self.close()
            raise

    def check(self, what: str) -> None:
        """Raise SourceError unless it is as it was when the record was opened."""
        if identity_of(self._file.fileno()) != self._identity:
            raise SourceError(f"{what}; load it again", path=self._path)

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `offset` on."""
        read_at(self._file.fileno(), target, offset)

    def close(self) -> None:
        """Let go of it."""
        self._file.close()
