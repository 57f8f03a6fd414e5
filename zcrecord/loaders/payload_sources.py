"""Sources of payloads: memory, a file, a remote archive's read-ahead, the shards that a split tensor lies in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.damage import BlockCheck
from zcrecord.archive.payload_source import Piece
from zcrecord.errors import RecordError
from zcrecord.remote.ranges import NEAR, PayloadRange, Range, merged
from zcrecord.storage.memory import aligned_empty
from zcrecord.tensors.strides import c_strides, is_c_order

from .boxes import BoxPiece, BoxSource, ByteGrid, overlap
from .protocol import PayloadRef, RangeSource
from .regions import Region


class _TensorPiece(NamedTuple):
    """A piece of a split tensor that a box meets, and the bytes that they have in common."""

    piece: Piece
    origin: tuple[int, ...]  # the place of the first common byte in the bytes of the box
    grid: ByteGrid  # the common bytes in the piece


_Request = tuple[Piece, list[Range], Region]  # ranges of a payload to fetch, for this region


class PayloadSources:
    """Sources of an archive's payloads, for refs; `path` and `identity` are the mapped file's, None without.

    With `as_views` all bytes are in memory, remote ones after `prepare`; boxes are strided views, but those of packed
    elements, and those that lie in several shards, are copies.
    """

    def __init__(self, archive: Archive, as_views: bool) -> None:
        self._archive, self._as_views = archive, as_views
        self.path: str | None
        self.identity: tuple[int, ...] | None
        self.path, self.identity = archive.source.file or (None, None)
        remote = archive.source.remote
        self._read_ahead: Any = remote.read_ahead() if hasattr(remote, "read_ahead") else None
        self._source: RangeSource | None = self._read_ahead or remote
        self._base = archive.offset + archive.header.payload_offset  # what payloads' offsets are counted from
        self._offsets = archive.index.payloads["offset"].tolist()
        self._expected: list[PayloadRange] = []  # what the read-ahead will be asked for
        self._pieces: dict[Region, list[_TensorPiece]] = {}
        self._checks: dict[int, BlockCheck | None] = {}  # of local payloads; views read nothing, and check nothing

    def shared_by(self, region: Region) -> Hashable:
        """Return the key of regions that one ref serves: the payload; a box that is gathered is served by itself."""
        return region if self._is_gathered(region) else region.payload

    def _is_gathered(self, region: Region) -> bool:
        return region.bounds is not None or (region.grid is not None and not (self._as_views and region.bits >= 8))

    def prepare(self, regions: Sequence[Region]) -> None:
        """Open the shards of split tensors, and fetch what must be in memory: their pieces, for views all bytes."""
        requests: dict[int, list[_Request]] = {}  # by source
        for region in dict.fromkeys(regions):  # tied tensors have one
            if region.bounds is not None:
                self._pieces[region] = _pieces_in(self._archive, region)
                boxes = [(part.piece, part.grid) for part in self._pieces[region]]
            elif self._as_views and self._read_ahead is not None:
                boxes = [(self._piece(region.payload), _grid(region))]
            else:
                continue
            for piece, grid in boxes:
                if piece.source.is_remote:
                    requests.setdefault(id(piece.source), []).append((piece, _ranges(piece, grid), region))
        for source_requests in requests.values():
            self._fetch(source_requests)
        if self._as_views and self._read_ahead is not None:
            self._source = self._read_ahead = None

    def _fetch(self, requests: list[_Request]) -> None:
        """Fetch ranges of payloads into the memory of their one archive; whole payloads and blocks are checked."""
        source = next(piece.source for piece, _, _ in requests)
        whole = {piece.number for piece, ranges, _ in requests if ranges == [(0, piece.nbytes)]}
        parts = [part for piece, ranges, _ in requests if piece.number not in whole for part in _parts(piece, ranges)]
        try:
            source.fetch(list(whole))
            source.remote.fetch_payloads([part for part in parts if part.digest is not None])
        except RecordError as error:
            offset = -1 if error.offset is None else error.offset
            damaged = (region for piece, _, region in requests if 0 <= offset - piece.start < piece.nbytes)
            name = next(map(self._name, damaged), None)
            raise self._archive.located(error.located(tensor=name)) from error.__cause__
        if any(part.digest is None for part in parts):
            source.remote.fetch((part.start, part.end) for part in parts)
            source.remote.check_same()

    def _name(self, region: Region) -> str:
        """Return the name of the first tensor that has a region's payload."""
        index = self._archive.index
        return index.name(int((index.tensors["payload"] == region.payload).argmax()))

    def announce(self, max_in_flight: int) -> int:
        """Plan the read-ahead of a remote archive; returns the bytes of `max_in_flight` that it takes."""
        if self._read_ahead is None:
            return 0
        self._read_ahead.expect(self._expected, max_in_flight // 2)
        return max_in_flight // 2

    def empty(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a tensor without bytes."""
        return _new_ref(name, region, offset=self._base, nbytes=0, payload=-1, buffer=memoryview(b""))

    def ref(self, name: str, region: Region, loaded: Region | None = None) -> PayloadRef:
        """Return the ref to load for a tensor's region; with `loaded` that of the tensor as a view of those bytes."""
        if region.bounds is not None:
            return self._split_box_ref(name, region)
        if self._is_gathered(region):
            return self._strided_box_ref(name, region)
        checked, octets = self._expect(region.payload, _grid(region) if loaded is None else None, name)
        loaded = loaded or region
        start, stop, number = loaded.start, loaded.start + loaded.nbytes, region.payload
        source, offset = self._place(number)
        return _new_ref(
            name,
            region,
            path=self.path,
            buffer=None if octets is None else octets[start:stop],
            source=source,
            offset=offset + start,
            nbytes=stop - start,
            byte_offset=region.start - start + region.byte_offset,
            checked=checked,
            check=self._checks.get(number),
            inside=start,
        )

    def _place(self, number: int) -> tuple[RangeSource | None, int]:
        """Return the source of a payload that is not split, None for memory, and its offset there or in its file."""
        read_by = None if self._as_views else self._archive.source.read_by(number)
        return read_by or (self._source, self._base + self._offsets[number])

    def _piece(self, number: int) -> Piece:
        """Return a payload that is not split, as the one piece that it is."""
        (piece,) = self._archive.source.pieces(number)
        return piece

    def _expect(self, number: int, grid: ByteGrid | None, name: str) -> tuple[bool, memoryview | None]:
        """Plan to read a box (None: planned already); return True if it will be checked, and a payload in memory."""
        if not self._archive.source.is_remote:
            if number not in self._checks and not self._as_views and self._archive.mode == "r":
                self._checks[number] = BlockCheck.of(self._piece(number), name)
            is_read = not self._as_views and self._archive.source.read_by(number) is not None
            return self._checks.get(number) is not None, None if is_read else self._archive.payload(number)
        piece = self._piece(number)
        octets = _octets(piece) if self._source is None else None
        if grid is None:
            return False, octets
        ranges = _ranges(piece, grid)
        if self._read_ahead is not None:
            self._expected += _parts(piece, ranges, name)
        return _is_checked(piece, ranges), octets

    def _strided_box_ref(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a box of one payload whose bytes are not contiguous."""
        assert region.grid is not None
        grid = region.grid
        checked, octets = self._expect(region.payload, grid, name)
        range_source, offset = self._place(region.payload)
        check = self._checks.get(region.payload)
        box = BoxPiece((0,) * len(grid.shape), grid, octets, range_source, offset, self._archive.source.file, check)
        source = BoxSource(offset + grid.start, grid.shape, [box])
        return self._box_ref(name, region._replace(strides=region.compact), source, grid.nbytes, checked)

    def _split_box_ref(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a box of a split tensor: a view if one piece has all of it, else gathered from pieces."""
        pieces = [self._box_piece(part, name) for part in self._pieces[region]]
        checked = all(
            piece.check is not None or _is_checked(part.piece, _ranges(part.piece, part.grid))
            for piece, part in zip(pieces, self._pieces[region], strict=True)
        )
        if self._as_views and len(pieces) == 1:
            [(piece, _, grid)] = self._pieces[region]
            strides = tuple(step // grid.shape[-1] for step in grid.strides[:-1])
            region = region._replace(strides=None if is_c_order(region.shape, strides) else strides)
            octets = _octets(piece)[grid.start : grid.end]
            return _new_ref(name, region, buffer=octets, nbytes=len(octets), checked=checked)
        if self._as_views and region.nbytes == int(self._archive.index.payloads["nbytes"][region.payload]):
            octets = self._archive.payload(region.payload)  # the copy that other views of it share
            return _new_ref(name, region, buffer=octets, nbytes=region.nbytes, checked=checked)
        source = BoxSource(0, (*region.shape, region.bits // 8), pieces)
        return self._box_ref(name, region, source, region.nbytes, checked)

    def _box_piece(self, part: _TensorPiece, name: str) -> BoxPiece:
        """Return the part of a box in one piece of a tensor `name`, in memory or read by the piece's own source."""
        piece, origin, grid = part
        check = None if self._as_views or piece.source.is_remote else BlockCheck.of(piece, name)
        if not self._as_views and (read_by := piece.source.read_by(piece.number)) is not None:
            return BoxPiece(origin, grid, None, *read_by, piece.source.file, check)
        offset = piece.source.offset + piece.start
        return BoxPiece(origin, grid, _octets(piece), None, offset, piece.source.file, check)

    def _box_ref(self, name: str, region: Region, source: BoxSource, nbytes: int, checked: bool) -> PayloadRef:
        """Return the ref of a gathered box: read by `source` later or, for views, copied to memory now."""
        if not self._as_views:
            return _new_ref(name, region, source=source, offset=source.offset, nbytes=nbytes, checked=checked)
        octets = aligned_empty(nbytes)
        source.readinto_at(source.offset, octets.data)
        return _new_ref(name, region, buffer=octets.data.toreadonly(), nbytes=nbytes, checked=checked)


def _new_ref(name: str, region: Region, **places: Any) -> PayloadRef:
    fields = {"path": None, "buffer": None, "source": None, "offset": 0, "payload": region.payload, **places}
    return PayloadRef(
        name=name, dtype=region.dtype, bits=region.bits, shape=region.shape, strides=region.strides, **fields
    )


def _octets(piece: Piece) -> memoryview:
    """Return a payload; of a remote archive its memory, in which only fetched ranges have data."""
    if not piece.source.is_remote:
        return piece.source.payload(piece.number)
    return piece.source.buffer[piece.start : piece.start + piece.nbytes]


def _ranges(piece: Piece, grid: ByteGrid) -> list[Range]:
    """Return ranges of a payload to fetch for a box: blocks, if these have checksums; all, if pinned or little more."""
    if piece.start in piece.source.pins():
        return [(0, piece.nbytes)]
    ranges = grid.ranges()
    if len(ranges) == 1 < len(grid.shape) and ranges[0][0] <= NEAR and piece.nbytes - ranges[0][1] <= NEAR:
        return [(0, piece.nbytes)]
    if (blocks := piece.source.sums(piece.number)) is not None:
        return merged((blocks.around(lo, hi, piece.nbytes) for lo, hi in ranges), 0)
    return ranges


def _parts(piece: Piece, ranges: list[Range], name: str = "") -> list[PayloadRange]:
    """Return the parts of the file to fetch for ranges of a payload, each with its digest: all of it, or its blocks."""
    blocks = None if ranges == [(0, piece.nbytes)] else piece.source.sums(piece.number)
    if blocks is None:
        digest = (piece.source.digest(piece.number) or 0) if _is_checked(piece, ranges) else None  # 0: it has a pin
        return [PayloadRange(piece.start + lo, hi - lo, digest, name) for lo, hi in ranges]
    numbers = [k for lo, hi in ranges for k in range(lo // blocks.size, -(-hi // blocks.size))]
    bounds = [blocks.bounds(k, piece.nbytes) for k in numbers]
    sums = blocks.sums[numbers].tolist()
    parts = zip(bounds, sums, strict=True)
    return [PayloadRange(piece.start + lo, hi - lo, digest, name) for (lo, hi), digest in parts]


def _is_checked(piece: Piece, ranges: list[Range]) -> bool:
    """Return True if these ranges are compared with digest, pin, or blocks' checksums, as they are fetched."""
    source = piece.source
    known = source.is_remote and (source.digest(piece.number) is not None or piece.start in source.pins())
    return known and (ranges == [(0, piece.nbytes)] or source.sums(piece.number) is not None)


def _pieces_in(archive: Archive, region: Region) -> list[_TensorPiece]:
    """Return the pieces of a split tensor that a box meets; opens their shards, and reads no payload."""
    assert region.bounds is not None
    itemsize = region.bits // 8
    origins, extents = archive.boxes(region.tensor)
    low, high = np.array(region.bounds, np.int64).reshape(-1, 2).T
    met = np.flatnonzero(((low < origins + extents) & (origins < high)).all(axis=1)).tolist()
    pieces = archive.boxed_pieces(region.tensor, met)
    out = []
    for piece, origin, extent in zip(pieces, origins[met].tolist(), extents[met].tolist(), strict=True):
        whole = ByteGrid(0, (*extent, itemsize), (*(step * itemsize for step in c_strides(extent)), 1))
        common = overlap(region.bounds, origin, extent)
        assert common is not None, "the box meets this piece"
        in_box, in_piece = common
        first = *(lo for lo, _ in in_box), 0
        out.append(_TensorPiece(piece, first, whole.cut((*in_piece, (0, itemsize)))))
    return out


def _grid(region: Region) -> ByteGrid:
    """Return the bytes of a region that are loaded."""
    return region.grid or ByteGrid(region.start, (region.nbytes,), (1,))
