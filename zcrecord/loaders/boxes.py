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
        """Return the rank's part of an axis of `count` elements; UnsupportedError if it cannot be divided equally."""
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
    parts = list(box) if isinstance(box, tuple) else _box_of_rows(box, len(shape))
    ellipses = parts.count(Ellipsis)
    if ellipses > 1:
        raise UnsupportedError("slices= takes at most one ... in a box")
    axes = len(parts) - ellipses
    if axes > len(shape):
        raise UnsupportedError(f"slices= has a box of {axes} axes, and this tensor has {len(shape)}")
    start = parts.index(Ellipsis) if ellipses else len(parts)  # whole axes stand for the ellipsis, or follow the box
    parts[start : start + ellipses] = [slice(None)] * (len(shape) - axes)
    return tuple(map(_bounds, parts, shape))


def _box_of_rows(rows: Rows, axes: int) -> list[Any]:
    """Return a box of `axes` axes that is whole except for `rows`: of a shard's axis, else of axis 0."""
    if not axes:
        raise UnsupportedError("slices= takes parts of axes, and this tensor has no axis")
    axis = rows.axis if isinstance(rows, _AxisShard) else 0
    if not -axes <= axis < axes:
        raise UnsupportedError(f"slices= has a shard of axis {axis}, and this tensor has {axes} axes")
    return [*[slice(None)] * (axis % axes), rows]


def _bounds(rows: Any, count: int) -> Range:
    """Return the bounds of a slice, or of a function's slice, of an axis of `count` elements."""
    part = rows if isinstance(rows, slice) else rows(count)
    try:
        start, stop, step = part.indices(count)
    except (TypeError, AttributeError):
        raise UnsupportedError(f"slices= takes ranges, and not {part!r}") from None
    if step != 1:
        raise UnsupportedError(f"slices= takes contiguous elements, and not every {step}th")
    return start, max(start, stop)


def overlap(bounds: Bounds, origin: Sequence[int], extent: Sequence[int]) -> tuple[Bounds, Bounds] | None:
    """Return the common part of a box and the one at `origin`, by bounds in each of the two; None if it is empty."""
    axes = zip(bounds, origin, extent, strict=True)
    common = [(max(lo, start), min(hi, start + count)) for (lo, hi), start, count in axes]
    if any(lo >= hi for lo, hi in common):
        return None
    in_first = tuple((lo - start, hi - start) for (lo, hi), (start, _) in zip(common, bounds, strict=True))
    return in_first, tuple((lo - start, hi - start) for (lo, hi), start in zip(common, origin, strict=True))


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
        return self.start + 1 + sum((count - 1) * step for count, step in zip(self.shape, self.strides, strict=True))

    def cut(self, bounds: Bounds) -> ByteGrid:
        """Return the grid of the part with these bounds along its axes, which include that of a run's bytes."""
        start = self.start + sum(lo * step for (lo, _), step in zip(bounds, self.strides, strict=True))
        return ByteGrid(start, tuple(hi - lo for lo, hi in bounds), self.strides)

    def ranges(self, near: int = NEAR) -> list[Range]:
        """Return its runs as ascending ranges of the payload, those with at most `near` bytes between them as one.

        Example:
            >>> ByteGrid(8, (2, 3, 4), (100, 10, 1)).ranges(near=6)
            [(8, 32), (108, 132)]
        """
        _, starts, part = self._split_at_gaps(near)
        return [(start, start + part.end) for start in starts]

    def blocks(self, near: int = NEAR) -> Iterator[tuple[tuple[slice | int, ...], ByteGrid]]:
        """Yield parts to read at once, with small gaps, 4 MiB if axes allow: index in the grid's shape, and bytes."""
        outer, starts, part = self._split_at_gaps(near)
        for index, start in zip(np.ndindex(*outer), starts, strict=True):
            yield from part._replace(start=start)._cut_to_size(index)

    def _split_at_gaps(self, near: int) -> tuple[tuple[int, ...], list[int], ByteGrid]:
        """Split at gaps of more than `near` bytes: return the number of parts along axes, their starts, a part at 0."""
        outer, nbytes = len(self.shape) - 1, self.shape[-1]  # axes between parts, bytes from a part's first to its last
        while outer and (self.shape[outer - 1] == 1 or self.strides[outer - 1] - nbytes <= near):
            outer -= 1
            nbytes += (self.shape[outer] - 1) * self.strides[outer]
        starts = np.array([self.start])
        for count, step in zip(self.shape[:outer], self.strides[:outer], strict=True):
            starts = np.add.outer(starts, np.arange(count) * step).reshape(-1)
        return self.shape[:outer], starts.tolist(), ByteGrid(0, self.shape[outer:], self.strides[outer:])

    def _cut_to_size(self, index: tuple[slice | int, ...]) -> Iterator[tuple[tuple[slice | int, ...], ByteGrid]]:
        """Yield index and bytes of parts of up to 4 MiB, cut along the slowest axes; `index` is the grid's own."""
        if self.end - self.start <= _BLOCK:
            yield index, self
            return
        step = self.strides[0]
        rows_at_once = max(1, _BLOCK // step)
        for first in range(0, self.shape[0], rows_at_once):
            count = min(rows_at_once, self.shape[0] - first)
            part = ByteGrid(self.start + first * step, (count, *self.shape[1:]), self.strides)
            if rows_at_once > 1 or len(self.shape) == 1:
                yield (*index, slice(first, first + count)), part
            else:
                yield from ByteGrid(part.start, self.shape[1:], self.strides[1:])._cut_to_size((*index, first))


@lru_cache(1000)  # most tensors of a model have one of few shapes
def grid_of(
    bounds: Bounds, shape: tuple[int, ...], strides: tuple[int, ...], bits: int
) -> tuple[ByteGrid, tuple[int, ...]] | None:
    """Return the bytes of a box, not empty, and its strides without gaps; None if axes overlap or run backwards."""
    counts = [hi - lo for lo, hi in bounds]
    axes = sorted((axis for axis, count in enumerate(counts) if count > 1), key=lambda axis: strides[axis])
    run_counts: list[int] = []  # the number of runs along each axis, the slowest first
    distances: list[int] = []  # from one run to the next along it, in bits
    run = span = bits  # of one run, and from the first bit to the last one of the axes so far
    compact, compact_stride = [1] * len(shape), 1
    for axis in axes:  # the fastest first
        distance, count = strides[axis] * bits, counts[axis]
        if distance < span:
            return None
        compact[axis], compact_stride = compact_stride, compact_stride * count
        if not run_counts and distance == run:  # no gap: a longer run
            run *= count
        elif run_counts and distance == run_counts[0] * distances[0]:  # continues the axis before
            run_counts[0] *= count
        else:
            run_counts.insert(0, count)
            distances.insert(0, distance)
        span += (count - 1) * distance
    start = sum(lo * stride for (lo, _), stride in zip(bounds, strides, strict=True)) * bits
    to_the_end = not run_counts and start + run == prod(shape) * bits  # the last byte may have unused bits
    if start % 8 or any(distance % 8 for distance in distances) or (run % 8 and not to_the_end):
        raise UnsupportedError(_whole_bytes_advice(bounds, shape, bits))
    byte_strides = *(distance // 8 for distance in distances), 1
    return ByteGrid(start // 8, (*run_counts, -(-run // 8)), byte_strides), tuple(compact)


def _whole_bytes_advice(bounds: Bounds, shape: tuple[int, ...], bits: int) -> str:
    """Return the error's text for a box of packed elements: the fault, and bounds that fit."""
    axis = max(axis for axis, (lo, hi) in enumerate(bounds) if (lo, hi) != (0, shape[axis]))  # the fastest that is cut
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
    file: File | None = None  # of the mapping, by which `BoxSource.reading_files` can read it
    check: BlockCheck | None = None  # of the payload

    def read(self, bounds: Bounds, out: Octets) -> None:
        """Fill `out` with the bytes in these bounds, whose shape it has; reads 4 MiB of the payload at a time."""
        for index, grid in self.grid.cut(bounds).blocks():
            self._read_block(grid, out[index])

    def _read_block(self, grid: ByteGrid, out: Octets) -> None:
        """Fill `out` with one block, checked if the payload has checksums of its blocks."""
        start, end = grid.start, grid.end
        if self.octets is not None:
            if self.check is not None:
                self.check(start, end)
            np.copyto(out, _view_of(np.frombuffer(self.octets, np.uint8), grid))
            if self.file is not None:  # else mapped pages count as this process's memory
                unmap_pages(self.octets, self.offset + start, self.offset + end)
            return
        assert self.source is not None, "a piece is in memory, or has a source"
        if self.check is None and end - start == grid.nbytes and out.flags.c_contiguous:  # no gaps: needs no copy
            self.source.readinto_at(self.offset + start, out.reshape(-1).data)
            return
        if self.check is not None and self.check.blocks.size <= 2 * _BLOCK:  # larger ones are read by `check` alone
            start, end = self.check.whole(start, end)
        block = np.empty(end - start, np.uint8)
        self.source.readinto_at(self.offset + start, block.data)
        if self.check is not None:
            self.check(start, end, block.data)
        np.copyto(out, _view_of(block, grid._replace(start=grid.start - start)))


def _view_of(octets: Octets, grid: ByteGrid) -> Octets:
    return np.ndarray(grid.shape, np.uint8, octets, grid.start, grid.strides)


class BoxSource:
    """Source of a box's bytes, in C order as if contiguous, from `offset` on; `shape` is the box's in bytes."""

    def __init__(self, offset: int, shape: tuple[int, ...], pieces: Sequence[BoxPiece]) -> None:
        self.offset, self.shape, self.pieces = offset, shape, tuple(pieces)

    @property
    def sources(self) -> list[RangeSource]:
        """Sources of its pieces."""
        return [piece.source for piece in self.pieces if piece.source is not None]

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the box from `offset` on."""
        out, done = np.frombuffer(target, np.uint8), 0
        first = offset - self.offset
        for bounds in _boxes_of_range(self.shape, first, first + len(out)):
            shape = [hi - lo for lo, hi in bounds]
            part = out[done : done + prod(shape)].reshape(shape)
            for piece in self.pieces:
                if (common := overlap(bounds, piece.origin, piece.grid.shape)) is not None:
                    in_part, in_piece = common
                    piece.read(in_piece, part[tuple(slice(*ends) for ends in in_part)])
            done += part.size

    def reading_files(self, open_file: Callable[[File], RangeSource]) -> BoxSource:
        """Return the same source with its files read by position instead of out of their mappings."""

        def reading(piece: BoxPiece) -> BoxPiece:
            return piece if piece.file is None else piece._replace(octets=None, source=open_file(piece.file))

        return BoxSource(self.offset, self.shape, list(map(reading, self.pieces)))


def _boxes_of_range(shape: tuple[int, ...], lo: int, hi: int) -> Iterator[Bounds]:
    """Yield boxes, at most 2 * rank - 1, that together are the elements [lo, hi) of a shape in C order, in this order.

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
            end_row = hi // inner
            yield ((row, end_row), *((0, count) for count in shape[1:]))
            lo = end_row * inner
