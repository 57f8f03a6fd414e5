"""Ring of staging buffers: readers fill some while a device copies out of others. Imports no framework.

    mapping          readers, several threads       ring of staging buffers        device
    or source    --> fill a buffer              --> [ filling | filling | full ] --> copies, then an event
                                                    used again once its event has come

The loading thread hands out buffers in turn, and waits only if all are in use; it alone reports arrived bytes to the
plan. Small tensors share a buffer, and a read if they are neighbours; large ones take many buffers. The device's
`DeviceCopier` does the copying.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zcrecord.codec.layout import ALIGNMENT, align_up
from zcrecord.dtypes import Octets
from zcrecord.errors import LimitError, located

from .protocol import LoadPlan, PayloadRef

_LEAST_BUFFER, _LARGEST_BUFFER = 1 << 16, 1 << 24  # starting a copy costs as much as copying some 100 KiB
_GAP = 1 << 12  # bytes between two payloads that are read, too; alignment leaves smaller gaps


class DeviceCopier:
    """Copies to one device of torch: to cuda from pinned memory, on a stream of its own; else each copy is waited for.

    Each reader calls `begin_reader` once, and several `send` at a time; the loading thread calls the rest.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device, self._cuda = torch, device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None

    def begin_reader(self) -> None:
        """Make the device the reader's own; else leaving `cuda.stream` would make a context on the first device."""
        if self._cuda:
            self._torch.cuda.set_device(self._device)

    def staging(self, nbytes: int) -> Any:
        """Return host memory from which copies are fastest; RuntimeError if there is none."""
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=self._cuda)

    def event(self) -> Any:
        """Return an event, which `send` records after its copies, again and again."""
        # Waiting without spinning leaves the core to the readers.
        return self._torch.cuda.Event(blocking=True) if self._cuda else None

    def follow(self) -> None:
        """Order later copies after this thread's work on the device, which may still use the memory of the target."""
        if self._stream is not None:
            self._stream.wait_stream(self._torch.cuda.current_stream(self._device))

    def send(self, copies: Iterable[tuple[Any, Any]], event: Any) -> None:
        """Start copies of pairs (device memory, staging memory), and record the event after them."""
        with self._torch.cuda.stream(self._stream) if self._cuda else contextlib.nullcontext():
            for target, source in copies:
                target.copy_(source, non_blocking=self._cuda)
            if event is not None:
                event.record(self._stream)

    def drain(self) -> None:
        """Return once all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def synchronize(self) -> None:
        """Return once this thread's work on the device is done."""
        if self._cuda:
            self._torch.cuda.current_stream(self._device).synchronize()


class _StagedPart(NamedTuple):
    """Bytes of a ref from `start` on, their offset in a buffer, and their memory on the device."""

    ref: PayloadRef
    start: int
    offset: int
    target: Any

    @property
    def end(self) -> int:
        """Offset of the byte after it in the file or archive."""
        return self.ref.offset + self.start + len(self.target)

    def follows(self, other: _StagedPart) -> bool:
        """Return True if its distance from another part is the same in the buffer as in the file or archive."""
        same = (self.ref.path, self.ref.source) == (other.ref.path, other.ref.source)
        return same and self.offset - other.offset == self.ref.offset + self.start - other.ref.offset - other.start


@dataclass(slots=True)
class _StagingBuffer:
    """A buffer of the ring: its memory for readers and for the device, its parts, and the reader that fills it."""

    octets: Octets
    staging: Any
    event: Any
    parts: list[_StagedPart] = field(default_factory=list)
    filled: int = 0
    filling: Future[None] | None = None


class StagingRing:
    """Staging buffers, at most `plan.max_in_flight` bytes in all, each filled by a reader, copied, then reused."""

    def __init__(self, copier: DeviceCopier, plan: LoadPlan, readers: int) -> None:
        self._copier, self._plan, self._turn = copier, plan, 0
        gap = _GAP if any(ref.buffer is None for ref in plan.refs) else ALIGNMENT
        needed = max(1, plan.nbytes + gap * len(plan.refs))
        count = max(1, min(2 * readers, plan.max_in_flight // _LEAST_BUFFER))  # two a reader: one fills, one copies
        size = min(plan.max_in_flight // count, _LARGEST_BUFFER, needed)
        count = min(count, -(-needed // size))
        try:
            staging = copier.staging(count * size)
        except RuntimeError as error:
            raise LimitError(f"cannot allocate {count * size} bytes to copy from; lower max_in_flight") from error
        octets = staging.numpy()
        ranges = [slice(i * size, (i + 1) * size) for i in range(count)]
        self._buffers = [_StagingBuffer(octets[part], staging[part], copier.event()) for part in ranges]
        self._readers = ThreadPoolExecutor(min(readers, count), "zcrecord-reader", initializer=copier.begin_reader)

    def send(self, ref: PayloadRef, target: Any) -> None:
        """Queue a ref's bytes for `target`, a flat tensor of bytes; waits for a buffer, raises earlier errors."""
        done = 0
        while done < ref.nbytes:
            buffer = self._buffers[self._turn]
            offset = self._place(buffer, ref, done)
            count = min(len(buffer.octets) - offset, ref.nbytes - done)
            if count <= 0:
                self._submit()
                continue
            buffer.parts.append(_StagedPart(ref, done, offset, target[done : done + count]))
            buffer.filled = offset + count
            done += count

    def finish(self) -> None:
        """Wait until everything that was sent is on the device; release all."""
        for _ in self._buffers:
            self._submit()
        self._copier.drain()
        self._readers.shutdown()

    def abort(self) -> None:
        """Wait for reads and copies under way, and release all; never raises."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(Exception):  # a failed device raises at each call
            self._copier.drain()

    def _submit(self) -> None:
        """Submit the current buffer to a reader, and wait until the next one is free; raises a reader's error."""
        buffer = self._buffers[self._turn]
        if buffer.parts:
            buffer.filling = self._readers.submit(self._fill, buffer)
        self._turn = (self._turn + 1) % len(self._buffers)
        following = self._buffers[self._turn]
        if following.filling is None:
            return
        following.filling.result()
        if following.event is not None:
            following.event.synchronize()
        arrived = sum(len(part.target) for part in following.parts)
        following.parts, following.filled, following.filling = [], 0, None
        self._plan.advance(arrived)

    def _place(self, buffer: _StagingBuffer, ref: PayloadRef, start: int) -> int:
        """Return the offset in a buffer for bytes of a ref; neighbours in the file keep their distance: one read."""
        if buffer.parts and (last := buffer.parts[-1]).ref is not ref and ref.buffer is None:
            gap = ref.offset + start - last.end
            if last.ref.source is ref.source and 0 <= gap <= _GAP:
                return buffer.filled + gap
        return align_up(buffer.filled, ALIGNMENT)

    def _fill(self, buffer: _StagingBuffer) -> None:
        """Read a buffer's parts, and send their copies; runs in a reader."""
        parts = buffer.parts
        first = parts[0]  # of the parts that the next read brings
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if following is not None and part.ref.buffer is None and following.follows(part):
                continue
            ref, start = first.ref, first.start
            octets = buffer.octets[first.offset : part.offset + len(part.target)]
            with located(path=ref.path, tensor=ref.name):
                ref.read_into(octets.data, start)
            ref.let_go(start, start + len(octets))
            if following is not None:
                first = following
        copies = ((part.target, buffer.staging[part.offset : part.offset + len(part.target)]) for part in parts)
        self._copier.send(copies, buffer.event)
