"""Sources of payloads: memory, a file, a remote archive's read-ahead, the shards that a split tensor lies in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.damage import BlockCheck
from zcrecord.archive.payload_source import Piece
from zcrecord.errors import RecordError
from zcrecord.remote.ranges import NEAR, Range, merged
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

    With `views` all bytes are in memory, remote ones after `prepare`; boxes are strided views, but those of packed
    elements, and those that lie in several shards, are copies.
    """

    def __init__(self, archive: Archive, views: bool) -> None:
        self._archive, self._views = archive, views
        self.path: str | None
        self.identity: tuple[int, ...] | None
        self.path, self.identity = archive.source.file or (None, None)
        remote = archive.source.remote
        self._ahead: Any = remote.read_ahead() if hasattr(remote, "read_ahead") else None
        self._source: RangeSource | None = self._ahead or remote
        self._start = archive.offset + archive.header.payload_offset
        self._offsets = archive.index.payloads["offset"].tolist()
        self._expected: list[tuple[int, int, int | None, str]] = []  # ranges of the archive, as `ReadAhead.expect` has
        self._pieces: dict[Region, list[_TensorPiece]] = {}
        self._checks: dict[int, BlockCheck | None] = {}  # of local payloads; views read nothing, and check nothing

    def shared_by(self, region: Region) -> Hashable:
        """Return the key of regions that one ref serves: the payload; a box that is gathered is served by itself."""
        return region if self._is_gathered(region) else region.payload

    def _is_gathered(self, region: Region) -> bool:
        return region.bounds is not None or (region.grid is not None and not (self._views and region.bits >= 8))

    def prepare(self, regions: Sequence[Region]) -> None:
        """Open the shards of split tensors, and fetch what must be in memory: their pieces, for `views` all bytes."""
        requests: dict[int, list[_Request]] = {}  # by source
        for region in dict.fromkeys(regions):  # tied tensors have one
            if region.bounds is not None:
                self._pieces[region] = _pieces_in(self._archive, region)
                boxes = [(part.piece, part.grid) for part in self._pieces[region]]
            elif self._views and self._ahead is not None:
                boxes = [(self._piece(region.payload), _grid(region))]
            else:
                continue
            for piece, grid in boxes:
                if piece.source.is_remote:
                    requests.setdefault(id(piece.source), []).append((piece, _ranges(piece, grid), region))
        for of_source in requests.values():
            self._fetch(of_source)
        if self._views and self._ahead is not None:
            self._source = self._ahead = None

    def _fetch(self, requests: list[_Request]) -> None:
        """Fetch ranges of payloads into the memory of their one archive; whole payloads and blocks are checked."""
        source = requests[0][0].source
        whole = {piece.number for piece, ranges, _ in requests if ranges == [(0, piece.nbytes)]}
        parts = [part for piece, ranges, _ in requests if piece.number not in whole for part in _parts(piece, ranges)]
        try:
            source.fetch(list(whole))
            source.remote.fetch_payloads([part for part in parts if part[2] is not None])
        except RecordError as error:
            offset = -1 if error.offset is None else error.offset
            damaged = (region for piece, _, region in requests if 0 <= offset - piece.start < piece.nbytes)
            name = next(map(self._name, damaged), None)
            raise self._archive.located(error.located(tensor=name)) from error.__cause__
        if any(digest is None for _, _, digest in parts):
            source.remote.fetch((start, start + nbytes) for start, nbytes, _ in parts)
            source.remote.check_same()

    def _name(self, region: Region) -> str:
        """Return the name of the first tensor that has a region's payload."""
        index = self._archive.index
        return index.name(int((index.tensors["payload"] == region.payload).argmax()))

    def announce(self, max_in_flight: int) -> int:
        """Plan the read-ahead of a remote archive; returns the share of `max_in_flight` that it takes."""
        if self._ahead is None:
            return 0
        self._ahead.expect(self._expected, max_in_flight // 2)
        return max_in_flight // 2

    def empty(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a tensor without bytes."""
        return _new_ref(name, region, offset=self._start, nbytes=0, payload=-1, buffer=memoryview(b""))

    def ref(self, name: str, region: Region, inside: Region | None = None) -> PayloadRef:
        """Return a ref of a tensor's region; or of the same tensor `inside` a region of more bytes."""
        if region.bounds is not None:
            return self._split_box_ref(name, region)
        if self._is_gathered(region):
            return self._strided_box_ref(name, region)
        read = region if inside is None else inside
        start, stop, number = read.start, read.start + read.nbytes, region.payload
        checked, octets = self._expect(number, None if inside is not None else _grid(read), name)
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
        read_by = None if self._views else self._archive.source.read_by(number)
        return read_by or (self._source, self._start + self._offsets[number])

    def _piece(self, number: int) -> Piece:
        """Return a payload that is not split, as the one piece that it is."""
        (piece,) = self._archive.source.pieces(number)
        return piece

    def _expect(self, number: int, grid: ByteGrid | None, name: str) -> tuple[bool, memoryview | None]:
        """Have a box read ahead, if its archive is; returns whether it is checked, and the payload if in memory."""
        if not self._archive.source.is_remote:
            if number not in self._checks and not self._views and self._archive.mode == "r":
                self._checks[number] = BlockCheck.of(self._piece(number), name)
            read = not self._views and self._archive.source.read_by(number)
            return self._checks.get(number) is not None, None if read else self._archive.payload(number)
        piece = self._piece(number)
        octets = _octets(piece) if self._source is None else None
        if grid is None:
            return False, octets
        ranges = _ranges(piece, grid)
        checked = _is_checked(piece, ranges)
        if self._ahead is not None:
            self._expected += [(*part, name) for part in _parts(piece, ranges)]
        return checked, octets

    def _strided_box_ref(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a box of one payload whose bytes are not contiguous."""
        assert region.grid is not None
        grid = region.grid
        checked, octets = self._expect(region.payload, grid, name)
        read, offset = self._place(region.payload)
        check = self._checks.get(region.payload)
        box = BoxPiece((0,) * len(grid.shape), grid, octets, read, offset, self._archive.source.file, check)
        source = BoxSource(offset + grid.start, grid.shape, [box])
        return self._box_ref(name, region._replace(strides=region.compact), source, grid.nbytes, checked)

    def _split_box_ref(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a box of a split tensor."""
        pieces = []
        checked = True
        for piece, origin, grid in self._pieces[region]:
            check = None if self._views or piece.source.is_remote else BlockCheck.of(piece, name)
            checked &= check is not None or _is_checked(piece, _ranges(piece, grid))
            by = None if self._views else piece.source.read_by(piece.number)
            read, offset = by or (None, piece.source.offset + piece.start)
            octets = None if by else _octets(piece)
            pieces.append(BoxPiece(origin, grid, octets, read, offset, piece.source.file, check))
        if self._views and len(pieces) == 1:
            [(piece, _, grid)] = self._pieces[region]
            strides = tuple(step // grid.shape[-1] for step in grid.strides[:-1])
            region = region._replace(strides=None if is_c_order(region.shape, strides) else strides)
            octets = _octets(piece)[grid.start : grid.end]
            return _new_ref(name, region, buffer=octets, nbytes=len(octets), checked=checked)
        if self._views and region.nbytes == int(self._archive.index.payloads["nbytes"][region.payload]):
            octets = self._archive.payload(region.payload)  # the copy that other views of it share
            return _new_ref(name, region, buffer=octets, nbytes=region.nbytes, checked=checked)
        source = BoxSource(0, (*region.shape, region.bits // 8), pieces)
        return self._box_ref(name, region, source, region.nbytes, checked)

    def _box_ref(self, name: str, region: Region, source: BoxSource, nbytes: int, checked: bool) -> PayloadRef:
        if not self._views:
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
    """Return the ranges of a payload to fetch for a box, of whole blocks if these have checksums.

    All of it if little else is left, or if it has a pin.
    """
    if piece.start in piece.source.pins():
        return [(0, piece.nbytes)]
    ranges = grid.ranges()
    if len(ranges) == 1 < len(grid.shape) and ranges[0][0] <= NEAR and piece.nbytes - ranges[0][1] <= NEAR:
        return [(0, piece.nbytes)]
    if (blocks := piece.source.sums(piece.number)) is not None:
        return merged((blocks.around(lo, hi, piece.nbytes) for lo, hi in ranges), 0)
    return ranges


def _parts(piece: Piece, ranges: list[Range]) -> list[tuple[int, int, int | None]]:
    """Return offset, size and digest of what is fetched of a payload: all of it, its blocks, or unchecked ranges."""
    whole = ranges == [(0, piece.nbytes)]
    blocks = None if whole else piece.source.sums(piece.number)
    if blocks is None:
        digest = (piece.source.digest(piece.number) or 0) if _is_checked(piece, ranges) else None
        return [(piece.start + lo, hi - lo, digest) for lo, hi in ranges]
    numbers = [k for lo, hi in ranges for k in range(lo // blocks.size, -(-hi // blocks.size))]
    bounds = [blocks.bounds(k, piece.nbytes) for k in numbers]
    sums = blocks.sums[numbers].tolist()
    return [(piece.start + lo, hi - lo, digest) for (lo, hi), digest in zip(bounds, sums, strict=True)]


def _is_checked(piece: Piece, ranges: list[Range]) -> bool:
    """Return True if these ranges are compared with digest, pin, or blocks' checksums, as they are fetched."""
    source = piece.source
    known = source.is_remote and (source.digest(piece.number) is not None or piece.start in source.pins())
    return known and (ranges == [(0, piece.nbytes)] or source.sums(piece.number) is not None)


def _pieces_in(archive: Archive, region: Region) -> list[_TensorPiece]:
    """Return the pieces of a split tensor that a box meets; opens their shards, and reads no payload."""
    assert region.bounds is not None
    item = region.bits // 8
    origins, extents = archive.boxes(region.tensor)
    low, high = np.array(region.bounds, np.int64).reshape(-1, 2).T
    chosen = np.flatnonzero(((low < origins + extents) & (origins < high)).all(axis=1)).tolist()
    pieces = archive.boxed_pieces(region.tensor, chosen)
    out = []
    for piece, origin, extent in zip(pieces, origins[chosen].tolist(), extents[chosen].tolist(), strict=True):
        whole = ByteGrid(0, (*extent, item), (*(step * item for step in c_strides(extent)), 1))
        both = overlap(region.bounds, origin, extent)
        assert both is not None, "chosen for it"
        first = *(lo for lo, _ in both[0]), 0
        out.append(_TensorPiece(piece, first, whole.cut((*both[1], (0, item)))))
    return out


def _grid(region: Region) -> ByteGrid:
    """Return the bytes of a region that are loaded."""
    return region.grid or ByteGrid(region.start, (region.nbytes,), (1,))
