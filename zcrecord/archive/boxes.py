"""Elements of a tensor that is split into boxes, in C order, a block at a time."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord.errors import located
from zcrecord.storage.stream_reader import SequentialMapping
from zcrecord.tensors.strides import address

from .payload_source import Array, PayloadSource

BLOCK = 8 << 20  # bytes of a block: large enough that even hundreds of files each give a part worth a read
_WORTH = 1 << 16  # bytes that are worth a write of their own; fewer are copied into a block with others


class Box(NamedTuple):
    """A part of a tensor: the index of its first element along each axis, its elements, and the file they lie in."""

    origin: tuple[int, ...]
    values: Array
    mapped: SequentialMapping | None = None  # None: they are no mapped file's
    path: str | None = None

    def part(self, start: int, stop: int) -> Array:
        """Return the elements of some of the tensor's leading indices, their pages populated."""
        values = self.values[max(start - self.origin[0], 0) : stop - self.origin[0]]
        if self.mapped is not None:
            start = address(values) - address(self.mapped.view)
            with located(path=self.path):
                self.mapped.populate(start, start + values.nbytes)
        return values

    def row(self, index: int) -> Box:
        """Return the elements of one leading index, as a box of one axis less."""
        return self._replace(origin=self.origin[1:], values=self.values[index - self.origin[0]])

    def release(self) -> None:
        """Release the populated pages."""
        if self.mapped is not None:
            self.mapped.release()


def box_of(origin: Sequence[int], values: Array, source: PayloadSource) -> Box:
    """Return a box of a file's payload; if the file is mapped, pages are populated, and released after."""
    # Not of a private copy: to release it would undo what was written to it.
    mapping: Any = source.mapping if source.mode == "r" and values.nbytes >= _WORTH else None
    is_mapped = isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED")
    return Box(tuple(origin), values, SequentialMapping(mapping) if is_mapped else None, source.path)


def put_together(out: Array, boxes: Sequence[Box], first: int = 0) -> None:
    """Copy the elements of boxes into an array that has a tensor's leading indices from `first` on."""
    for box in boxes:
        start, stop = max(box.origin[0], first), min(box.origin[0] + len(box.values), first + len(out))
        rest = (slice(a, a + n) for a, n in zip(box.origin[1:], box.values.shape[1:], strict=True))
        out[(slice(start - first, stop - first), *rest)] = box.part(start, stop)
        box.release()


def blocks_of(shape: tuple[int, ...], boxes: Sequence[Box], most: int = BLOCK) -> Iterator[Array]:
    """Yield a tensor's elements in C order as contiguous arrays of at most `most` bytes, each valid until the next.

    Elements that lie in a box as they do in the tensor are views of it; the others are put together, a block at a time.
    The boxes, of one type, cover each element once.
    """
    dtype = boxes[0].values.dtype
    return _blocks(shape, boxes, np.empty(max(1, min(most // dtype.itemsize, prod(shape))), dtype))


def _blocks(shape: tuple[int, ...], boxes: Sequence[Box], room: Array) -> Iterator[Array]:
    """Yield the blocks of `blocks_of`; `room` is the memory of one block."""
    starts = np.array([box.origin[0] for box in boxes])
    stops = starts + [len(box.values) for box in boxes]
    row = prod(shape[1:])
    step, done = len(room) // row, 0
    while done < shape[0]:
        stop = min(done + max(step, 1), shape[0])
        met = [boxes[i] for i in np.flatnonzero((starts < stop) & (stops > done)).tolist()]
        whole = _whole_rows(met, done, row)
        if whole is not None and step:
            stop = min(stop, whole.origin[0] + len(whole.values))
            yield whole.part(done, stop)
            whole.release()
        elif step:
            block = room[: (stop - done) * row].reshape(stop - done, *shape[1:])
            put_together(block, met, done)
            yield block
        else:
            yield from _blocks(shape[1:], [box.row(done) for box in met], room)
        done = stop


def _whole_rows(boxes: Sequence[Box], first: int, row: int) -> Box | None:
    """Return the box that has the tensor's elements from a leading index on, if they are worth a block of their own."""
    for box in boxes:
        count = box.origin[0] + len(box.values) - first
        if box.origin[0] <= first and box.values.size == len(box.values) * row:
            return box if len(boxes) == 1 or count * row * box.values.itemsize >= _WORTH else None
    return None
