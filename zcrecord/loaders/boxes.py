"""Boxes of tensors: their bounds along each axis, their bytes in a payload, and reading these in bounded memory.

A box whose bytes are contiguous is a range. Any other is a `ByteGrid`: runs of equal length at regular distances.
`BoxSource` gives a loader the bytes of a box in C order, as if they were contiguous.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from types import EllipsisType
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from zcrecord.archive.damage import BlockCheck
from zcrecord.dtypes import Octets
from zcrecord.errors import UnsupportedError
from zcrecord.remote.ranges import NEAR, Range
from zcrecord.storage.files import Identity

from .protocol import RangeSource, unmap_pages

Rows = slice | Callable[[int], slice]  # of one axis; a function is given the axis' length
Box = Rows | tuple[Rows | EllipsisType, ...]
Bounds = tuple[Range, ...]  # first index and the one after the last, for each axis
File = tuple[str, Identity]  # absolute path, and identity when it was opened

_BLOCK = 4 << 20  # bytes of a payload, gaps included, that are read or mapped at a time


@dataclass(frozen=True, slots=True)
class _AxisShard:
    """The part of one axis for one rank, as `shard` returns it."""

    rank: int
    world: int
    axis: int
    uneven: bool

    def __call__(self, count: int) -> slice:
        if count % self.world and not self.uneven:
            elements = "rows" if self.axis == 0 else f"elements of axis {self.axis}"
            advice = "uneven=True divides as torch.chunk does"
            raise UnsupportedError(f"{count} {elements} cannot be divided equally among {self.world} ranks; {advice}")
        size = -(-count // self.world)
        return slice(min(size * self.rank, count), min(size * (self.rank + 1), count))


def shard(rank: int, world: int, axis: int = 0, *, uneven: bool = False) -> Callable[[int], slice]:
    """Return the box of one of `world` tensor-parallel ranks, for `slices=`: an equal part of one axis.

    With `uneven`, lengths need not divide: as in torch.chunk and FSDP, each rank gets `ceil(length / world)`, the last
    ones fewer, or none. Called with an axis' length, the result is a slice.

    Raises:
        UnsupportedError: there is no such rank; or later, the axis cannot be divided equally, or a tensor has no such
        axis.

    Example:
        >>> shard(1, 4)(100)
        slice(25, 50, None)
        >>> shard(3, 4, uneven=True)(10)
        slice(9, 10, None)
    """
    if not isinstance(rank, SupportsIndex) or not isinstance(world, SupportsIndex):
        raise UnsupportedError(f"rank {rank!r} of {world!r}: both are integers")
    if not isinstance(axis, SupportsIndex):
        raise UnsupportedError(f"axis={axis!r} is not an integer")
    rank, world = operator.index(rank), operator.index(world)
    if not 0 <= rank < world:
        raise UnsupportedError(f"rank {rank} of {world}: ranks are counted from 0")
    return _AxisShard(rank, world, operator.index(axis), uneven)


def is_box(value: Any) -> bool:
    """Return True for a slice, a function, or a tuple of these and `...`."""
    parts = value if isinstance(value, tuple) else (None if value is Ellipsis else value,)
    return all(part is Ellipsis or isinstance(part, slice) or callable(part) for part in parts)


def bounds_of(box: Box, shape: tuple[int, ...]) -> Bounds:
    """Return the bounds of a box along each axis of a shape, as numpy's slices have them; never negative.

    Example:
        >>> bounds_of((..., slice(-2, None)), (3, 4, 5))
        ((0, 3), (0, 4), (3, 5))
    """
    parts = list(box) if isinstance(box, tuple) else _on_its_axis(box, len(shape))
    dots = parts.count(Ellipsis)
    if dots > 1:
        raise UnsupportedError("slices= takes at most one ... in a box")
    if len(parts) - dots > len(shape):
        raise UnsupportedError(f"slices= has a box of {len(parts) - dots} axes, and this tensor has {len(shape)}")
    start = parts.index(Ellipsis) if dots else len(parts)
    parts[start : start + dots] = [slice(None)] * (len(shape) - len(parts) + dots)
    return tuple(map(_bounds, parts, shape))


def _on_its_axis(rows: Rows, rank: int) -> list[Any]:
    """Return a box of all axes up to that of the rows."""
    if not rank:
        raise UnsupportedError("slices= takes parts of axes, and this tensor has no axis")
    axis = rows.axis if isinstance(rows, _AxisShard) else 0
    if not -rank <= axis < rank:
        raise UnsupportedError(f"slices= takes a shard of axis {axis}, and this tensor has {rank}")
    return [*[slice(None)] * (axis % rank), rows]


def _bounds(rows: Any, count: int) -> Range:
    chosen = rows if isinstance(rows, slice) else rows(count)
    try:
        start, stop, step = chosen.indices(count)
    except (TypeError, AttributeError):
        raise UnsupportedError(f"slices= takes ranges, and not {chosen!r}") from None
    if step != 1:
        raise UnsupportedError(f"slices= takes contiguous elements, and not every {step}th")
    return start, max(start, stop)


def overlap(bounds: Bounds, origin: Sequence[int], extent: Sequence[int]) -> tuple[Bounds, Bounds] | None:
    """Return the part of a box that lies in another one, relative to the first and to the second; None if empty."""
    others = list(zip(origin, extent, strict=True))
    both = [(max(lo, start), min(hi, start + n)) for (lo, hi), (start, n) in zip(bounds, others, strict=True)]
    if any(lo >= hi for lo, hi in both):
        return None
    in_first = tuple((lo - start, hi - start) for (lo, hi), (start, _) in zip(both, bounds, strict=True))
    return in_first, tuple((lo - start, hi - start) for (lo, hi), start in zip(both, origin, strict=True))


class ByteGrid(NamedTuple):
    """Bytes of a box in its payload: runs of equal length at regular distances, none of which overlap."""

    start: int  # offset of the first byte in the payload
    shape: tuple[int, ...]  # the number of runs along each axis, the slowest first, and last the bytes of a run
    strides: tuple[int, ...]  # bytes from one to the next along each axis; the last is 1

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Offset of the byte after its last one."""
        return self.start + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))

    def cut(self, bounds: Bounds) -> ByteGrid:
        """Return the part with these bounds along its axes."""
        start = self.start + sum(lo * step for (lo, _), step in zip(bounds, self.strides, strict=True))
        return ByteGrid(start, tuple(hi - lo for lo, hi in bounds), self.strides)

    def ranges(self, near: int = NEAR) -> list[Range]:
        """Return its runs as ascending ranges of the payload, those with at most `near` bytes between them as one.

        Example:
            >>> ByteGrid(8, (2, 3, 4), (100, 10, 1)).ranges(near=6)
            [(8, 32), (108, 132)]
        """
        _, starts, part = self._parts(near)
        return [(start, start + part.end) for start in starts]

    def blocks(self, near: int = NEAR) -> Iterator[tuple[tuple[slice | int, ...], ByteGrid]]:
        """Yield parts that a single read brings: gaps of at most `near` bytes, 4 MiB where axes can be cut so."""
        outer, starts, part = self._parts(near)
        for index, start in zip(np.ndindex(*outer), starts, strict=True):
            yield from part._replace(start=start)._cut_to_size(index)

    def _parts(self, near: int) -> tuple[tuple[int, ...], list[int], ByteGrid]:
        """Cut the grid at gaps of more than `near` bytes: the number of parts along axes, their starts, a part at 0."""
        outer, nbytes = len(self.shape) - 1, self.shape[-1]
        while outer and (self.shape[outer - 1] == 1 or self.strides[outer - 1] - nbytes <= near):
            outer -= 1
            nbytes += (self.shape[outer] - 1) * self.strides[outer]
        starts = np.array([self.start])
        for count, step in zip(self.shape[:outer], self.strides[:outer], strict=True):
            starts = np.add.outer(starts, np.arange(count) * step).reshape(-1)
        return self.shape[:outer], starts.tolist(), ByteGrid(0, self.shape[outer:], self.strides[outer:])

    def _cut_to_size(self, index: tuple[slice | int, ...]) -> Iterator[tuple[tuple[slice | int, ...], ByteGrid]]:
        if self.end - self.start <= _BLOCK:
            yield index, self
            return
        step = self.strides[0]
        each = max(1, _BLOCK // step)
        for first in range(0, self.shape[0], each):
            count = min(each, self.shape[0] - first)
            part = ByteGrid(self.start + first * step, (count, *self.shape[1:]), self.strides)
            if each > 1 or len(self.shape) == 1:
                yield (*index, slice(first, first + count)), part
            else:
                yield from ByteGrid(part.start, self.shape[1:], self.strides[1:])._cut_to_size((*index, first))


@lru_cache(1000)  # most tensors of a model have one of few shapes
def grid_of(
    bounds: Bounds, shape: tuple[int, ...], strides: tuple[int, ...], bits: int
) -> tuple[ByteGrid, tuple[int, ...]] | None:
    """Return the bytes of a box, not empty, and its compact strides; None if axes overlap or run backwards."""
    counts = [hi - lo for lo, hi in bounds]
    axes = sorted((a for a, n in enumerate(counts) if n > 1), key=lambda a: strides[a])
    sizes: list[int] = []  # of runs along axes, in bits, the slowest first
    steps: list[int] = []
    run = covered = bits
    compact, step = [1] * len(shape), 1
    for axis in axes:
        distance, count = strides[axis] * bits, counts[axis]
        if distance < covered:
            return None
        compact[axis], step = step, step * count
        if not sizes and distance == run:
            run *= count
        elif sizes and distance == sizes[0] * steps[0]:
            sizes[0] *= count
        else:
            sizes.insert(0, count)
            steps.insert(0, distance)
        covered += (count - 1) * distance
    start = sum(lo * stride for (lo, _), stride in zip(bounds, strides, strict=True)) * bits
    to_the_end = not sizes and start + run == prod(shape) * bits
    if start % 8 or any(distance % 8 for distance in steps) or (run % 8 and not to_the_end):
        raise UnsupportedError(_whole_bytes_advice(bounds, shape, bits))
    return ByteGrid(start // 8, (*sizes, -(-run // 8)), (*(distance // 8 for distance in steps), 1)), tuple(compact)


def _whole_bytes_advice(bounds: Bounds, shape: tuple[int, ...], bits: int) -> str:
    axis = max(a for a, (lo, hi) in enumerate(bounds) if (lo, hi) != (0, shape[a]))
    unit = prod(shape[axis + 1 :]) * bits
    message = f"a box of {bits} bits an element does not start and end on whole bytes"
    if prod(shape[axis:]) * bits % 8 and axis:
        return f"{message} in every row; load the tensor whole"
    return f"{message}; let its bounds along axis {axis} be multiples of {8 // gcd(8, unit)}"


class BoxPiece(NamedTuple):
    """A part of a box whose bytes lie in one payload, which is in memory, in a mapping, or read by `source`."""

    origin: tuple[int, ...]  # its place in the bytes of the box, an index for each axis of `grid`
    grid: ByteGrid  # its bytes in the payload
    octets: memoryview | None
    source: RangeSource | None
    offset: int  # of the payload, in the file or in `source`
    file: File | None = None  # of the mapping, by which `BoxSource.read_by` can read it
    check: BlockCheck | None = None  # of the payload

    def read(self, bounds: Bounds, out: Octets) -> None:
        """Fill `out`, which has the shape of the bounds, with a part; 4 MiB of the payload at a time."""
        for index, grid in self.grid.cut(bounds).blocks():
            self._read_block(grid, out[index])

    def _read_block(self, grid: ByteGrid, out: Octets) -> None:
        """Fill `out` with one block, checked if the payload has checksums of its blocks."""
        start, end = grid.start, grid.end
        if self.octets is not None:
            if self.check is not None:
                self.check(start, end)
            np.copyto(out, _array(np.frombuffer(self.octets, np.uint8), grid))
            if self.file is not None:
                unmap_pages(self.octets, self.offset + start, self.offset + end)
            return
        assert self.source is not None
        if self.check is not None and self.check.blocks.size <= 2 * _BLOCK:  # else `check` reads each block once
            start, end = self.check.whole(start, end)
        elif self.check is None and end - start == grid.nbytes and out.flags.c_contiguous:
            self.source.readinto_at(self.offset + start, out.reshape(-1).data)
            return
        block = np.empty(end - start, np.uint8)
        self.source.readinto_at(self.offset + start, block.data)
        if self.check is not None:
            self.check(start, end, block.data)
        np.copyto(out, _array(block, grid._replace(start=grid.start - start)))


def _array(octets: Octets, grid: ByteGrid) -> Octets:
    return np.ndarray(grid.shape, np.uint8, octets, grid.start, grid.strides)


class BoxSource:
    """Source of a box's bytes, in C order as if contiguous, from `offset` on; `shape` is the box's in bytes."""

    def __init__(self, offset: int, shape: tuple[int, ...], pieces: Sequence[BoxPiece]) -> None:
        self.offset, self.shape, self.pieces = offset, shape, tuple(pieces)

    @property
    def sources(self) -> list[RangeSource]:
        """The sources of its pieces."""
        return [piece.source for piece in self.pieces if piece.source is not None]

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the box from `offset` on."""
        out, done = np.frombuffer(target, np.uint8), 0
        first = offset - self.offset
        for bounds in _boxes_of_range(self.shape, first, first + len(out)):
            shape = [hi - lo for lo, hi in bounds]
            part = out[done : done + prod(shape)].reshape(shape)
            for piece in self.pieces:
                if (both := overlap(bounds, piece.origin, piece.grid.shape)) is not None:
                    piece.read(both[1], part[tuple(slice(*ends) for ends in both[0])])
            done += part.size

    def read_by(self, opened: Callable[[File], RangeSource]) -> BoxSource:
        """Return the same source with its files read by position instead of out of their mappings."""
        pieces = [
            piece if piece.file is None else piece._replace(octets=None, source=opened(piece.file))
            for piece in self.pieces
        ]
        return BoxSource(self.offset, self.shape, pieces)


def _boxes_of_range(shape: tuple[int, ...], lo: int, hi: int) -> Iterator[Bounds]:
    """Yield the boxes, 2 * rank - 1 at the most, that elements [lo, hi) of a shape are, in C order.

    Example:
        >>> list(_boxes_of_range((4, 10), 5, 32))
        [((0, 1), (5, 10)), ((1, 3), (0, 10)), ((3, 4), (0, 2))]
    """
    if len(shape) == 1:
        yield ((lo, hi),)
        return
    inner = prod(shape[1:])
    while lo < hi:
        row, start = divmod(lo, inner)
        if start or hi - lo < inner:
            stop = min(hi - row * inner, inner)
            yield from (((row, row + 1), *rest) for rest in _boxes_of_range(shape[1:], start, stop))
            lo = row * inner + stop
        else:
            last = hi // inner
            yield ((row, last), *((0, n) for n in shape[1:]))
            lo = last * inner
