"""Elements of a tensor that is split into boxes, in C order, block by block."""

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
_MIN_VIEW = 1 << 16  # bytes that are worth a block of their own; fewer are copied into a block with others


class Box(NamedTuple):
    """A part of a tensor: the index of its first element along each axis, its elements, and the file they lie in."""

    origin: tuple[int, ...]
    values: Array
    mapped: SequentialMapping | None = None  # None unless they are views of a mapped file
    path: str | None = None

    def part(self, start: int, stop: int) -> Array:
        """Return the box's elements of the tensor's leading indices [start, stop), after populating their pages."""
        values = self.values[max(start - self.origin[0], 0) : stop - self.origin[0]]
        if self.mapped is not None:
            offset = address(values) - address(self.mapped.view)
            with located(path=self.path):
                self.mapped.populate(offset, offset + values.nbytes)
        return values

    def row(self, index: int) -> Box:
        """Return the box's elements of one leading index of the tensor, as a box of one axis less."""
        return self._replace(origin=self.origin[1:], values=self.values[index - self.origin[0]])

    def release(self) -> None:
        """Release the pages that `part` populated; views of them stay valid."""
        if self.mapped is not None:
            self.mapped.release()


def box_of(origin: Sequence[int], values: Array, source: PayloadSource) -> Box:
    """Return a box of a payload's elements, large ones with their file's mapping, so that pages can be released."""
    # Without the mapping of a private copy: to release its pages would undo what was written to them.
    mapping: Any = source.mapping if source.mode == "r" and values.nbytes >= _MIN_VIEW else None
    is_mapped = isinstance(mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED")
    return Box(tuple(origin), values, SequentialMapping(mapping) if is_mapped else None, source.path)


def put_together(out: Array, boxes: Sequence[Box], first: int = 0) -> None:
    """Copy elements of boxes into `out`, which has a tensor's leading indices [first, first + len(out))."""
    for box in boxes:
        start, stop = max(box.origin[0], first), min(box.origin[0] + len(box.values), first + len(out))
        inner = (slice(a, a + size) for a, size in zip(box.origin[1:], box.values.shape[1:], strict=True))
        out[(slice(start - first, stop - first), *inner)] = box.part(start, stop)
        box.release()


def blocks_of(shape: tuple[int, ...], boxes: Sequence[Box], limit: int = BLOCK) -> Iterator[Array]:
    """Yield a tensor's elements in C order as contiguous arrays, each valid until the next.

    Rows that lie whole in one box are views of it; others are copied together, up to `limit` bytes at a time. The
    boxes, of one dtype, must cover each element once.
    """
    dtype = boxes[0].values.dtype
    return _blocks(shape, boxes, np.empty(max(1, min(limit // dtype.itemsize, prod(shape))), dtype))


def _blocks(shape: tuple[int, ...], boxes: Sequence[Box], buffer: Array) -> Iterator[Array]:
    """Yield the blocks of `blocks_of`; elements are copied together into `buffer`."""
    starts = np.array([box.origin[0] for box in boxes])
    stops = starts + [len(box.values) for box in boxes]
    row_size = prod(shape[1:])
    rows_per_block, start = len(buffer) // row_size, 0
    while start < shape[0]:
        stop = min(start + max(rows_per_block, 1), shape[0])
        near = [boxes[i] for i in np.flatnonzero((starts < stop) & (stops > start)).tolist()]
        whole = _box_of_whole_rows(near, start, row_size)
        if not rows_per_block:  # one row is too large: split it along the next axis
            yield from _blocks(shape[1:], [box.row(start) for box in near], buffer)
        elif whole is not None:
            stop = min(stop, whole.origin[0] + len(whole.values))
            yield whole.part(start, stop)
            whole.release()
        else:
            block = buffer[: (stop - start) * row_size].reshape(stop - start, *shape[1:])
            put_together(block, near, start)
            yield block
        start = stop


def _box_of_whole_rows(boxes: Sequence[Box], first: int, row_size: int) -> Box | None:
    """Return the box that has all elements of the rows from `first` on, if they are worth a block of their own."""
    for box in boxes:
        count = box.origin[0] + len(box.values) - first
        if box.origin[0] <= first and box.values.size == len(box.values) * row_size:
            return box if len(boxes) == 1 or count * row_size * box.values.itemsize >= _MIN_VIEW else None
    return None
