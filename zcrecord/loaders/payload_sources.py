"""Sources of payloads: memory, a file, a remote archive's read-ahead, the shards that a split tensor lies in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.payload_source import Piece
from zcrecord.errors import RecordError
from zcrecord.remote.ranges import NEAR, Range
from zcrecord.storage.memory import aligned_empty
from zcrecord.tensors.strides import c_strides, is_c_order

from .boxes import BoxPiece, BoxSource, ByteGrid
from .protocol import PayloadRef, RangeSource
from .regions import Region

__all__ = ["PayloadSources"]


def _octets(piece: Piece) -> memoryview:
    """Return a payload; of a remote archive its memory, in which only what was fetched is there."""
    if not piece.source.is_remote:
        return piece.source.payload(piece.number)
    return piece.source.buffer[piece.start : piece.start + piece.nbytes]


def _ranges(piece: Piece, grid: ByteGrid) -> list[Range]:
    """Return the ranges of a payload to fetch for a box.

    All of it, to be checked, if only little else is left, or if its SHA-256 is known: after `expect=` the server's
    word is not taken for any part.
    """
    ranges, nbytes = grid.ranges(), piece.nbytes
    if piece.start in piece.source.pins():
        return [(0, nbytes)]
    if len(ranges) == 1 < len(grid.shape) and ranges[0][0] <= NEAR and nbytes - ranges[0][1] <= NEAR:
        return [(0, nbytes)]
    return ranges


def _is_checked(piece: Piece, ranges: list[Range]) -> bool:
    """Return True if these ranges are compared with the payload's digest, or its pin, as they are fetched."""
    source = piece.source
    known = source.is_remote and (source.digest(piece.number) is not None or piece.start in source.pins())
    return known and ranges == [(0, piece.nbytes)]


class _BoxPiece(NamedTuple):
    """A piece of a split tensor that a box meets: its first index and its size along each axis."""

    piece: Piece
    origin: tuple[int, ...]
    extent: tuple[int, ...]


class PayloadSources:
    """Sources of an archive's payloads, for refs.

    With `views` all bytes are in memory: a remote archive's payloads and ranges are fetched by `prepare`; boxes are
    strided views, but those of packed elements, and those that lie in several shards, are copied.

    Attributes:
        path, identity: of the mapped file that the payloads lie in; None where they lie elsewhere.
    """

    def __init__(self, archive: Archive, views: bool) -> None:
        self._archive, self._views = archive, views
        file = archive.source.file
        self.path = None if file is None else file[0]
        self.identity = None if file is None else file[1]
        remote = archive.source.remote
        self._ahead: Any = remote.read_ahead() if hasattr(remote, "read_ahead") else None
        self._source: RangeSource | None = self._ahead or remote
        self._start = archive.offset + archive.header.payload_offset
        self._offsets = archive.index.payloads["offset"].tolist()
        self._expected: list[tuple[int, int, int | None, str]] = []  # ranges of the archive, as `ReadAhead.expect` has
        self._pieces: dict[Region, list[_BoxPiece]] = {}

    def shared_by(self, region: Region) -> Hashable:
        """Return the key of regions that one ref serves: the payload; a box that is gathered is served by itself."""
        return region if self._is_gathered(region) else region.payload

    def _is_gathered(self, region: Region) -> bool:
        return region.bounds is not None or (region.grid is not None and not (self._views and region.bits >= 8))

    def prepare(self, regions: Sequence[Region]) -> None:
        """Open the shards of split tensors, and fetch what must be in memory; whole payloads are checked.

        Of a remote archive that is everything if `views`. Pieces of split tensors always are: their payloads are not
        read in the order of a file.
        """
        wanted: dict[int, list[tuple[Piece, list[Range], str | None]]] = {}
        for region in regions:
            name = None if region.bounds is None else self._archive.index.name(region.tensor)
            if region.bounds is not None:
                self._pieces[region] = _pieces_in(self._archive, region)
                boxes = [(box.piece, _box_in(box, region)[1]) for box in self._pieces[region]]
            elif self._views and self._ahead is not None:
                boxes = [(self._piece(region.payload), _grid(region))]
            else:
                continue
            for piece, grid in boxes:
                if piece.source.is_remote:
                    wanted.setdefault(id(piece.source), []).append((piece, _ranges(piece, grid), name))
        for each in wanted.values():
            self._fetch(each)
        if self._views and self._ahead is not None:
            self._source = self._ahead = None

    def _fetch(self, wanted: list[tuple[Piece, list[Range], str | None]]) -> None:
        """Fetch ranges of payloads of one remote archive into its memory; whole payloads are checked."""
        source = wanted[0][0].source
        whole = {piece.number: (piece, name) for piece, ranges, name in wanted if ranges == [(0, piece.nbytes)]}
        try:
            source.fetch(list(whole))
        except RecordError as error:
            name = next((name for piece, name in whole.values() if piece.start == error.offset), None)
            raise self._archive.located(error.located(tensor=name)) from error.__cause__
        parts = [(piece.start + lo, piece.start + hi) for piece, ranges, _ in wanted for lo, hi in ranges]
        if len(whole) < len(wanted):
            source.remote.fetch(parts)  # whole ones are there
            source.remote.check_same()

    def announce(self, max_in_flight: int) -> int:
        """Plan the read-ahead of a remote archive; returns the share of `max_in_flight` that it takes."""
        if self._ahead is None:
            return 0
        self._ahead.expect(self._expected, max_in_flight // 2)
        return max_in_flight // 2

    def empty(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a tensor without bytes."""
        return self._made(name, region, offset=self._start, nbytes=0, payload=-1, buffer=memoryview(b""), byte_offset=0)

    def ref(self, name: str, region: Region, inside: Region | None = None) -> PayloadRef:
        """Return a ref of a tensor's region; or of the same tensor `inside` a region of more bytes."""
        if self._is_gathered(region):
            return self._gathered(name, region)
        read = region if inside is None else inside
        start, stop, number = read.start, read.start + read.nbytes, region.payload
        checked = False
        if self._archive.source.is_remote:
            checked = inside is None and self._expect(self._piece(number), _grid(read), name)
            octets = _octets(self._piece(number)) if self._source is None else None
        else:
            octets = self._archive.payload(number)
        return PayloadRef(
            name=name,
            path=self.path,
            buffer=None if octets is None else octets[start:stop],
            source=self._source,
            offset=self._start + self._offsets[number] + start,
            nbytes=stop - start,
            dtype=region.dtype,
            bits=region.bits,
            shape=region.shape,
            strides=region.strides,
            payload=number,
            byte_offset=region.start - start + region.byte_offset,
            checked=checked,
        )

    def _piece(self, number: int) -> Piece:
        """Return a payload that is not split, as the one piece that it is."""
        (piece,) = self._archive.source.pieces(number)
        return piece

    def _expect(self, piece: Piece, grid: ByteGrid, name: str) -> bool:
        """Have a box's ranges read ahead, if they are; returns whether they are checked."""
        if not piece.source.is_remote:
            return False
        ranges = _ranges(piece, grid)
        checked = _is_checked(piece, ranges)
        if self._ahead is not None:
            digest = (piece.source.digest(piece.number) or 0) if checked else None
            self._expected += [(piece.start + lo, hi - lo, digest, name) for lo, hi in ranges]
        return checked

    def _gathered(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a box whose bytes do not lie one after the other in one payload."""
        if region.bounds is not None:
            return self._split(name, region)
        assert region.grid is not None
        grid, checked, octets = region.grid, False, None
        if not self._archive.source.is_remote:
            octets = self._archive.payload(region.payload)
        else:
            piece = self._piece(region.payload)
            checked = self._expect(piece, grid, name)
            octets = _octets(piece) if self._source is None else None
        offset = self._start + self._offsets[region.payload]
        box = BoxPiece((0,) * len(grid.shape), grid, octets, self._source, offset, self._archive.source.file)
        source = BoxSource(offset + grid.start, grid.shape, [box])
        return self._of_box(name, region._replace(strides=region.compact), source, grid.nbytes, checked)

    def _split(self, name: str, region: Region) -> PayloadRef:
        pieces = []
        checked = True
        for box in self._pieces[region]:
            origin, grid = _box_in(box, region)
            checked &= self._expect(box.piece, grid, name)
            offset = box.piece.source.offset + box.piece.start
            pieces.append(BoxPiece(origin, grid, _octets(box.piece), None, offset, box.piece.source.file))
        if self._views and len(pieces) == 1:
            return self._view_of_piece(name, region, self._pieces[region][0], pieces[0], checked)
        if self._views and region.nbytes == int(self._archive.index.payloads["nbytes"][region.payload]):
            octets = self._archive.payload(region.payload)  # the copy that other views of it share
            return self._made(name, region, buffer=octets, nbytes=region.nbytes, checked=checked)
        source = BoxSource(0, (*region.shape, region.bits // 8), pieces)
        return self._of_box(name, region, source, region.nbytes, checked)

    def _view_of_piece(self, name: str, region: Region, piece: _BoxPiece, box: BoxPiece, checked: bool) -> PayloadRef:
        assert box.octets is not None
        strides = c_strides(piece.extent)
        region = region._replace(strides=None if is_c_order(region.shape, strides) else strides)
        octets = box.octets[box.grid.start : box.grid.end]
        return self._made(name, region, buffer=octets, nbytes=len(octets), checked=checked)

    def _of_box(self, name: str, region: Region, source: BoxSource, nbytes: int, checked: bool) -> PayloadRef:
        region = region._replace(byte_offset=0)
        if not self._views:
            return self._made(name, region, source=source, offset=source.offset, nbytes=nbytes, checked=checked)
        octets = aligned_empty(nbytes)
        source.readinto_at(source.offset, octets.data)
        return self._made(name, region, buffer=octets.data.toreadonly(), nbytes=nbytes, checked=checked)

    def _made(self, name: str, region: Region, **how: Any) -> PayloadRef:
        given = {"path": None, "buffer": None, "source": None, "offset": 0, "payload": region.payload, **how}
        return PayloadRef(
            name=name, dtype=region.dtype, bits=region.bits, shape=region.shape, strides=region.strides, **given
        )


def _pieces_in(archive: Archive, region: Region) -> list[_BoxPiece]:
    """Return the pieces of a split tensor that a box meets; opens their shards, and reads no payload.

    Raises:
        FormatError: its pieces do not tile it, or one has another size than its box.
    """
    origin, extent = archive.boxes(region.tensor)
    low, high = np.array(region.bounds, np.int64).reshape(-1, 2).T
    chosen = np.flatnonzero(((low < origin + extent) & (origin < high)).all(axis=1)).tolist()
    pieces = archive.boxed_pieces(region.tensor, chosen)
    corners = zip(origin[chosen].tolist(), extent[chosen].tolist(), strict=True)
    return [_BoxPiece(piece, tuple(at), tuple(size)) for piece, (at, size) in zip(pieces, corners, strict=True)]


def _grid(region: Region) -> ByteGrid:
    """Return the bytes of a region that are loaded."""
    return region.grid or ByteGrid(region.start, (region.nbytes,), (1,))


def _box_in(piece: _BoxPiece, region: Region) -> tuple[tuple[int, ...], ByteGrid]:
    """Return the part of a box that lies in a piece: its first byte's place in the box, and its bytes in the piece."""
    assert region.bounds is not None
    item = region.bits // 8
    whole = ByteGrid(0, (*piece.extent, item), (*(step * item for step in c_strides(piece.extent)), 1))
    ends = zip(region.bounds, piece.origin, piece.extent, strict=True)
    meets = [(max(lo, at), min(hi, at + n)) for (lo, hi), at, n in ends]
    here = tuple(lo - start for (lo, _), (start, _) in zip(meets, region.bounds, strict=True))
    there = [(lo - at, hi - at) for (lo, hi), at in zip(meets, piece.origin, strict=True)]
    return (*here, 0), whole.cut((*there, (0, item)))
