"""Regions: the bytes of tensors, and of boxes of them, in their payloads. Arithmetic over the index."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from zcrecord import dtypes
from zcrecord.archive.archive import Archive
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import DType
from zcrecord.errors import UnsupportedError
from zcrecord.tensors.strides import c_strides, is_c_order, reach

from .boxes import Bounds, Box, ByteGrid, bounds_of, grid_of


class Region(NamedTuple):
    """A tensor's bytes in its payload, [start, start + nbytes), and its layout in them."""

    payload: int
    start: int
    nbytes: int
    dtype: DType
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    byte_offset: int
    grid: ByteGrid | None = None  # of a box with other bytes between its own
    compact: tuple[int, ...] | None = None  # strides of that box without the gaps, None for C order
    bounds: Bounds | None = None  # of a box of a split tensor, whose `start` has no meaning
    tensor: int = -1  # number of the first tensor with the payload and shape of that split tensor

    @staticmethod
    def raw(payload: int, start: int, nbytes: int) -> Region:
        """Return a range of a payload as bytes."""
        return Region(payload, start, nbytes, dtypes.by_name["uint8"], 8, (nbytes,), None, 0)


class Regions:
    """Regions of all tensors of an archive, whose whole index was checked; its columns are read once, for speed."""

    def __init__(self, archive: Archive, raw: bool, pools: tuple[list[int], list[int]]) -> None:
        """Read the columns; `pools` are the archive's dims and strides, which all parts of a catalogue share."""
        rows = archive.index.tensors
        fields = ("payload", "dtype", "bits", "dims", "rank", "strides", "byte_offset")
        self._rows = list(zip(*(rows[field].tolist() for field in fields), strict=True))
        self._dims, self._strides = pools
        self._nbytes = archive.index.payloads["nbytes"].tolist()
        self._raw = raw
        self._users: dict[tuple[int, tuple[int, ...], int], int] = {}  # of split payloads, the first tensor
        table = archive.source.piece_table() if archive.mode == "r" else None  # in mode "c" edits are in one memory
        self._split = frozenset() if table is None else table.split()

    def region(self, i: int, box: Box | None = None) -> Region:
        """Return a tensor's region, or that of a box of it; UnsupportedError for strings and unknown types."""
        payload, code, bits, dims, rank, strides, byte_offset = self._rows[i]
        payload_nbytes = 0 if payload == NONE else self._nbytes[payload]
        kind = dtypes.by_code.get(code)
        if kind is None or kind is dtypes.STRING:
            if not self._raw:
                reason = f"dtype code {code} is not known" if kind is None else "no device has tensors of strings"
                raise UnsupportedError(f"{reason}; leave it out with names=, or take its bytes with raw=True")
            whole = Region.raw(payload, 0, payload_nbytes)
            return whole if box is None else _box_region(whole, bounds_of(box, whole.shape))
        shape = tuple(self._dims[dims : dims + rank])
        if payload in self._split:
            bounds = bounds_of(() if box is None else box, shape)
            user = self._users.setdefault((payload, shape, bits), i)  # forged ones may differ: each is checked
            shape = tuple(hi - lo for lo, hi in bounds)
            return Region(payload, 0, prod(shape) * bits // 8, kind, bits, shape, None, 0, bounds=bounds, tensor=user)
        if strides == NONE:
            whole = Region(payload, 0, payload_nbytes, kind, bits, shape, None, 0)
        else:
            stored = tuple(self._strides[strides : strides + rank])
            whole = _strided_region(payload, kind, bits, shape, stored, byte_offset)
        return whole if box is None else _box_region(whole, bounds_of(box, shape))


def _strided_region(
    payload: int, kind: DType, bits: int, shape: tuple[int, ...], strides: tuple[int, ...], first: int
) -> Region:
    """Return the region of a strided tensor whose element [0, ..., 0] is at byte `first` of the payload."""
    itemsize = bits // 8
    lowest, highest = reach(shape, strides)
    low, high = first + lowest * itemsize, first + (highest + 1) * itemsize
    stored = None if is_c_order(shape, strides) else strides
    return Region(payload, low, high - low, kind, bits, shape, stored, first - low)


def _box_region(region: Region, bounds: Bounds) -> Region:
    """Return the region of a box of a tensor; UnsupportedError unless packed elements start and end on whole bytes."""
    shape = tuple(hi - lo for lo, hi in bounds)
    if shape == region.shape:
        return region
    if not prod(shape):
        return region._replace(nbytes=0, shape=shape, strides=None, byte_offset=0)
    strides = c_strides(region.shape) if region.strides is None else region.strides
    first = region.start + region.byte_offset
    box_bytes = grid_of(bounds, region.shape, strides, region.bits)
    if box_bytes is None:  # all bytes between its first and last are loaded
        first += sum(lo * step for (lo, _), step in zip(bounds, strides, strict=True)) * (region.bits // 8)
        return _strided_region(region.payload, region.dtype, region.bits, shape, strides, first)
    grid, compact = box_bytes
    grid = grid._replace(start=first + grid.start)
    without_gaps = None if is_c_order(shape, compact) else compact
    box_region = region._replace(start=grid.start, nbytes=grid.end - grid.start, shape=shape, byte_offset=0)
    if len(grid.shape) == 1:
        return box_region._replace(strides=without_gaps)
    return box_region._replace(strides=strides, grid=grid, compact=without_gaps)
