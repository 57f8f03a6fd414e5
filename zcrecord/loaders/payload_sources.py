"""Sources of payloads: memory, a file, a remote archive's read-ahead, the shards that a split tensor lies in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from zcrecord.archive.archive import Archive
from zcrecord.archive.catalogue import ShardedArchive, SplitPiece
from zcrecord.remote.ranges import NEAR, Range
from zcrecord.storage.memory import aligned_empty
from zcrecord.tensors.strides import c_strides, is_c_order

from .boxes import BoxPiece, BoxSource, ByteGrid
from .protocol import PayloadRef, RangeSource
from .regions import Region

__all__ = ["PayloadSources"]


class _StoredPayload(NamedTuple):
    """The payload that bytes lie in: its archive, and its number there."""

    archive: Archive
    number: int

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return int(self.archive.index.payloads["nbytes"][self.number])

    @property
    def start(self) -> int:
        """Offset of the payload in its archive."""
        return self.archive.header.payload_offset + int(self.archive.index.payloads["offset"][self.number])

    @property
    def octets(self) -> memoryview:
        """The payload; of a remote archive its memory, in which only what was fetched is there."""
        if self.archive.remote is None:
            return self.archive.payload(self.number)
        return self.archive.buffer[self.start : self.start + self.nbytes]

    def ranges(self, grid: ByteGrid) -> list[Range]:
        """Return the ranges of the payload to fetch for a box.

        All of it, to be checked, if only little else is left, or if its SHA-256 is known: after `expect=` the server's
        word is not taken for any part.
        """
        found, nbytes = grid.ranges(), self.nbytes
        if self.start in self.archive.pins():
            return [(0, nbytes)]
        if len(found) == 1 < len(grid.shape) and found[0][0] <= NEAR and nbytes - found[0][1] <= NEAR:
            return [(0, nbytes)]
        return found

    def is_checked(self, ranges: list[Range]) -> bool:
        """Return True if these ranges are compared with the payload's digest, or its pin, as they are fetched."""
        archive = self.archive
        known = archive.remote is not None and (archive.index.digest_kind or self.start in archive.pins())
        return bool(known) and ranges == [(0, self.nbytes)]


class PayloadSources:
    """Sources of an archive's payloads, for refs.

    With `views` all bytes are in memory: a remote archive's payloads and ranges are fetched by `prepare`; boxes are
    strided views, but those of packed elements, and those that lie in several shards, are copied.

    Attributes:
        path, identity: of the mapped file that the payloads lie in; None where they lie elsewhere.
    """

    def __init__(self, archive: Archive, views: bool) -> None:
        self._archive, self._views = archive, views
        file = archive.file
        self.path = None if file is None else file[0]
        self.identity = None if file is None else file[1]
        remote = archive.remote
        self._ahead: Any = remote.read_ahead() if hasattr(remote, "read_ahead") else None
        self._source: RangeSource | None = self._ahead or remote
        self._start = archive.offset + archive.header.payload_offset
        self._offsets = archive.index.payloads["offset"].tolist()
        self._expected: list[tuple[int, int, int | None, str]] = []  # ranges of the archive, as `ReadAhead.expect` has
        self._pieces: dict[Region, list[SplitPiece]] = {}

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
        wanted: dict[int, list[tuple[_StoredPayload, list[Range]]]] = {}
        for region in regions:
            if region.bounds is not None:
                assert isinstance(self._archive, ShardedArchive)  # no other has split tensors
                self._pieces[region] = self._archive.split_pieces(region.tensor, region.bounds)
                homes = [(_StoredPayload(p.archive, p.payload), _box_in(p, region)[1]) for p in self._pieces[region]]
            elif self._views and self._ahead is not None:
                homes = [(_StoredPayload(self._archive, region.payload), _grid(region))]
            else:
                continue
            for home, grid in homes:
                if home.archive.remote is not None:
                    wanted.setdefault(id(home.archive), []).append((home, home.ranges(grid)))
        for each in wanted.values():
            _fetch(each)
        if self._views and self._ahead is not None:
            self._source = self._ahead = None

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
        held = region if inside is None else inside
        start, stop, number = held.start, held.start + held.nbytes, region.payload
        checked = False
        if self._archive.remote is not None:
            checked = inside is None and self._expect(_StoredPayload(self._archive, number), _grid(held), name)
            octets = _StoredPayload(self._archive, number).octets if self._source is None else None
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

    def _expect(self, home: _StoredPayload, grid: ByteGrid, name: str) -> bool:
        """Have a box's ranges read ahead, if they are; returns whether they are checked."""
        if home.archive.remote is None:
            return False
        ranges = home.ranges(grid)
        checked = home.is_checked(ranges)
        if self._ahead is not None:
            digest = int(home.archive.index.payloads["digest"][home.number]) if checked else None
            self._expected += [(home.start + lo, hi - lo, digest, name) for lo, hi in ranges]
        return checked

    def _gathered(self, name: str, region: Region) -> PayloadRef:
        """Return the ref of a box whose bytes do not lie one after the other in one payload."""
        if region.bounds is not None:
            return self._split(name, region)
        assert region.grid is not None
        home, grid = _StoredPayload(self._archive, region.payload), region.grid
        checked = self._expect(home, grid, name)
        octets = home.octets if self._source is None else None
        offset = self._start + self._offsets[region.payload]
        piece = BoxPiece((0,) * len(grid.shape), grid, octets, self._source, offset, self._archive.file)
        source = BoxSource(offset + grid.start, grid.shape, [piece])
        return self._of_box(name, region._replace(strides=region.compact), source, grid.nbytes, checked)

    def _split(self, name: str, region: Region) -> PayloadRef:
        pieces = []
        checked = True
        for piece in self._pieces[region]:
            home = _StoredPayload(piece.archive, piece.payload)
            origin, grid = _box_in(piece, region)
            checked &= self._expect(home, grid, name)
            offset = piece.archive.offset + home.start
            pieces.append(BoxPiece(origin, grid, home.octets, None, offset, piece.archive.file))
        if self._views and len(pieces) == 1:
            return self._view_of_piece(name, region, self._pieces[region][0], pieces[0], checked)
        if self._views and region.nbytes == int(self._archive.index.payloads["nbytes"][region.payload]):
            octets = self._archive.payload(region.payload)  # the copy that other views of it share
            return self._made(name, region, buffer=octets, nbytes=region.nbytes, checked=checked)
        source = BoxSource(0, (*region.shape, region.bits // 8), pieces)
        return self._of_box(name, region, source, region.nbytes, checked)

    def _view_of_piece(self, name: str, region: Region, piece: SplitPiece, box: BoxPiece, checked: bool) -> PayloadRef:
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


def _fetch(wanted: list[tuple[_StoredPayload, list[Range]]]) -> None:
    """Fetch ranges of payloads of one remote archive into its memory; whole payloads are checked."""
    archive = wanted[0][0].archive
    whole = [home.number for home, ranges in wanted if ranges == [(0, home.nbytes)]]
    archive.bring(whole)
    parts = [(home.start + lo, home.start + hi) for home, ranges in wanted for lo, hi in ranges]
    remote = archive.remote
    assert remote is not None
    if len(whole) < len(wanted):
        remote.fetch(parts)  # what was brought is there
        remote.check_same()


def _grid(region: Region) -> ByteGrid:
    """Return the bytes of a region that are loaded."""
    return region.grid or ByteGrid(region.start, (region.nbytes,), (1,))


def _box_in(piece: SplitPiece, region: Region) -> tuple[tuple[int, ...], ByteGrid]:
    """Return the part of a box that lies in a piece: its first byte's place in the box, and its bytes in the piece."""
    assert region.bounds is not None
    item = region.bits // 8
    whole = ByteGrid(0, (*piece.extent, item), (*(step * item for step in c_strides(piece.extent)), 1))
    ends = zip(region.bounds, piece.origin, piece.extent, strict=True)
    meets = [(max(lo, at), min(hi, at + n)) for (lo, hi), at, n in ends]
    here = tuple(lo - start for (lo, _), (start, _) in zip(meets, region.bounds, strict=True))
    there = [(lo - at, hi - at) for (lo, hi), at in zip(meets, piece.origin, strict=True)]
    return (*here, 0), whole.cut((*there, (0, item)))
