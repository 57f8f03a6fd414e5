"""Elements of a tensor that is split into boxes, in C order, a block at a time.

Knows arrays alone. The rules of a tiling, and the places of its boxes in files, are `shards`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

__all__ = ["BLOCK", "Box", "blocks_of", "put_together"]

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 8 << 20  # bytes of a block: of hundreds of files each still gives enough of it to be worth a read
_WORTH = 1 << 16  # bytes that are passed on by themselves; of fewer, to put several together costs less than a write


class Box(NamedTuple):
    """A part of a tensor: the index of its first element along each axis, and its elements."""

    origin: tuple[int, ...]
    values: Array


def put_together(out: Array, boxes: Sequence[Box], first: int = 0) -> None:
    """Copy the elements of boxes into an array that has a tensor's leading indices from `first` on."""
    for origin, values in boxes:
        start, stop = max(origin[0], first), min(origin[0] + len(values), first + len(out))
        if start < stop:
            rest = (slice(a, a + n) for a, n in zip(origin[1:], values.shape[1:], strict=True))
            out[(slice(start - first, stop - first), *rest)] = values[start - origin[0] : stop - origin[0]]


def blocks_of(shape: tuple[int, ...], boxes: Sequence[Box], most: int = BLOCK) -> Iterator[Array]:
    """Yield a tensor's elements in C order as contiguous arrays of at most `most` bytes, each valid until the next.

    Elements that lie in a box as they do in the tensor are views of it; the others are put together, a block at a time.

    Args:
        boxes: boxes in C order that cover each element once, all of one type.
    """
    dtype = boxes[0].values.dtype
    return _blocks(shape, boxes, np.empty(max(1, min(most // dtype.itemsize, prod(shape))), dtype))


def _blocks(shape: tuple[int, ...], boxes: Sequence[Box], held: Array) -> Iterator[Array]:
    starts = np.array([box.origin[0] for box in boxes])
    stops = starts + [len(box.values) for box in boxes]
    row = prod(shape[1:])
    step, done = len(held) // row, 0
    while done < shape[0]:
        stop = min(done + max(step, 1), shape[0])
        here = [boxes[i] for i in np.flatnonzero((starts < stop) & (stops > done)).tolist()]
        lone = _lone(here, done, row)
        if lone is not None:
            stop = done + len(lone)
            flat = lone.reshape(-1)
            yield from (flat[at : at + len(held)] for at in range(0, len(flat), len(held)))
        elif step:
            block = held[: (stop - done) * row].reshape(stop - done, *shape[1:])
            put_together(block, here, done)
            yield block
        else:
            rows = (Box(box.origin[1:], box.values[done - box.origin[0]]) for box in here)
            yield from _blocks(shape[1:], list(rows), held)
        done = stop


def _lone(boxes: Sequence[Box], first: int, row: int) -> Array | None:
    """Return the elements of a box from a leading index on, if they are the tensor's and worth a block of their own."""
    for origin, values in boxes:
        rest = values[max(first - origin[0], 0) :]
        if origin[0] <= first and rest.size == len(rest) * row and (len(boxes) == 1 or rest.nbytes >= _WORTH):
            return rest
    return None
