"""Ring of staging buffers: readers fill some while a device copies out of others. Uses no framework.

    file, mapping    readers, several threads       ring of staging buffers        device
    or source    --> fill a buffer              --> [ filling | filling | full ] --> copies, then an event
                                                    taken again once its event has come

The loading thread hands out buffers in turn, and waits only if all are in use; it alone reports arrived bytes to the
plan. Small tensors share a buffer, and a read if they are neighbours; large ones take many buffers. The device's
`DeviceCopier` does the copying.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from zcrecord.codec.layout import ALIGNMENT, align_up
from zcrecord.errors import LimitError, RecordError

from .boxes import BoxSource
from .pread import PlannedFile, PlannedFiles
from .protocol import LoadPlan, PayloadRef, RangeSource

__all__ = ["DeviceCopier", "StagingRing"]

Octets = np.ndarray[Any, np.dtype[np.uint8]]

_LEAST_BUFFER, _LARGEST_BUFFER = 1 << 16, 1 << 24  # starting a copy costs as much as copying some 100 KiB
_GAP = 1 << 12  # bytes between two payloads that are read, too; alignment leaves smaller gaps


class DeviceCopier(Protocol):
    """Copying to one device. Each reader calls `begin_reader` once, and several `send` at a time; the rest is called by
    the loading thread.
    """

    def begin_reader(self) -> None:
        """Make the device the calling thread's own."""

    def staging(self, nbytes: int) -> Any:
        """Return memory that it copies from fastest, with slices and `numpy()`; RuntimeError if there is none."""

    def event(self) -> Any:
        """Return an event, which `send` records after its copies, again and again."""

    def follow(self) -> None:
        """Order copies sent from now on after this thread's earlier work on the device."""

    def send(self, copies: Iterable[tuple[Any, Any]], event: Any) -> None:
        """Start copies of pairs (device memory, staging memory), and record the event after them."""

    def wait(self, event: Any) -> None:
        """Return once the copies before the event are done."""

    def drain(self) -> None:
        """Return once all copies are done."""


class _StagedPart(NamedTuple):
    """Bytes of a ref from `start` on, their offset `at` in a buffer, and their memory on the device."""

    ref: PayloadRef
    start: int
    at: int
    target: Any

    @property
    def end(self) -> int:
        """Offset of the byte after it in the file or archive."""
        return self.ref.offset + self.start + len(self.target)

    def follows(self, other: _StagedPart) -> bool:
        """Return True if its distance from another part is the same in the buffer as in the file or archive."""
        same = (self.ref.path, self.ref.source) == (other.ref.path, other.ref.source)
        return same and self.at - other.at == self.ref.offset + self.start - other.ref.offset - other.start


@dataclass(slots=True)
class _StagingBuffer:
    """A buffer of the ring: its memory for readers and for the device, its parts, and the reader that fills it."""

    octets: Octets
    staging: Any
    event: Any
    pieces: list[_StagedPart] = field(default_factory=list)
    filled: int = 0
    filling: Future[None] | None = None


class StagingRing:
    """Staging buffers, handed out in turn; each is filled by one reader, and reused once the device has copied it.

    Together they have at most `plan.max_in_flight` bytes. With `reads` files are read by position instead of copied out
    of their mapping.

    Raises:
        LimitError: there is no memory for them. SourceError: the file is not the one that was opened.
    """

    def __init__(self, lane: DeviceCopier, plan: LoadPlan, readers: int, *, reads: bool = False) -> None:
        self._lane, self._plan = lane, plan
        self._files = PlannedFiles()
        self._file: PlannedFile | None = None
        if reads and plan.path is not None:
            assert plan.identity is not None
            self._file = self._files((plan.path, plan.identity))
        self._boxes = _boxes_by_position(plan, self._files) if reads else {}
        apart = _GAP if any(self._source(ref) is not None for ref in plan.refs) else ALIGNMENT
        needed = max(1, plan.nbytes + apart * len(plan.refs))
        count = max(1, min(2 * readers, plan.max_in_flight // _LEAST_BUFFER))
        size = min(plan.max_in_flight // count, _LARGEST_BUFFER, needed)
        count = min(count, -(-needed // size))
        try:
            staging = lane.staging(count * size)
        except RuntimeError as error:
            self._files.close()
            what = f"no memory of {count * size} bytes to copy from can be had; lower max_in_flight"
            raise LimitError(what) from error
        octets = staging.numpy()
        parts = [slice(i * size, (i + 1) * size) for i in range(count)]
        self._buffers = [_StagingBuffer(octets[part], staging[part], lane.event()) for part in parts]
        self._turn = 0
        self._readers = ThreadPoolExecutor(min(readers, count), "zcrecord-reader", initializer=lane.begin_reader)

    def send(self, ref: PayloadRef, target: Any) -> None:
        """Queue a ref's bytes to be read, and copied to `target`, a flat tensor of bytes; waits for a free buffer.

        Raises:
            RecordError: an earlier read failed. And the errors of the plan's `advance`.
        """
        done = 0
        while done < ref.nbytes:
            buffer = self._buffers[self._turn]
            at = self._place(buffer, ref, done)
            count = min(len(buffer.octets) - at, ref.nbytes - done)
            if count <= 0:
                self._start()
                continue
            buffer.pieces.append(_StagedPart(ref, done, at, target[done : done + count]))
            buffer.filled = at + count
            done += count

    def finish(self) -> None:
        """Wait until everything that was sent is on the device; release all."""
        for _ in self._buffers:
            self._start()
        self._lane.drain()
        self._files.check()
        self._close()

    def abort(self) -> None:
        """Wait for reads and copies under way, and release all; never raises."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(Exception):  # a failed device raises at each call
            self._lane.drain()
        self._close()

    def _close(self) -> None:
        self._readers.shutdown()
        self._files.close()

    def _start(self) -> None:
        """Submit the current buffer to a reader, and wait until the next one is free."""
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

    def _place(self, buffer: _StagingBuffer, ref: PayloadRef, start: int) -> int:
        """Return the offset in a buffer for bytes of a ref; neighbours in the file keep their distance."""
        if buffer.pieces and (last := buffer.pieces[-1]).ref is not ref and self._source(ref) is not None:
            gap = ref.offset + start - last.end
            if self._source(last.ref) is self._source(ref) and 0 <= gap <= _GAP:
                return buffer.filled + gap
        return align_up(buffer.filled, ALIGNMENT)

    def _source(self, ref: PayloadRef) -> RangeSource | None:
        """Return the source that reads a ref's bytes, with neighbours; None if they are copied out of memory."""
        if self._file is not None and ref.path is not None:
            return self._file
        return self._boxes.get(id(ref.source), ref.source) if ref.buffer is None else None

    def _fill(self, buffer: _StagingBuffer) -> None:
        """Read a buffer's parts, and send their copies; runs in a reader."""
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

    def _read(self, piece: _StagedPart, octets: Octets) -> None:
        """Read a part, and those that follow it, into `octets`."""
        ref, start = piece.ref, piece.start
        source = self._source(ref)
        if source is not None:
            source.readinto_at(ref.offset + start, octets.data)
        elif ref.buffer is not None:
            stop = start + len(octets)
            octets[:] = np.frombuffer(ref.buffer, np.uint8)[start:stop]  # a memoryview's copy would keep the GIL
            ref.let_go(start, stop)
        else:
            ref.read_into(octets.data, start)  # raises: the bytes are in a file alone


def _boxes_by_position(plan: LoadPlan, files: PlannedFiles) -> dict[int, RangeSource]:
    """Return the sources of a plan's boxes with their files read by position, by the identity of those of its refs."""
    found = {id(ref.source): ref.source for ref in plan.refs if isinstance(ref.source, BoxSource)}
    return {key: source.read_by(files) for key, source in found.items()}
