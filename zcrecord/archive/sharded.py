"""The payload source of a catalogue: payloads lie in shards, each opened when something in it is first needed.

The tables are those of CONVENTIONS.md. Copies nothing but tensors that are split over shards.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from math import prod
from typing import Any

import numpy as np

from zcrecord.codec.digests import digest_of
from zcrecord.codec.index import Index, decode
from zcrecord.codec.layout import HEADER_SIZE, NONE, Header, decode_header
from zcrecord.codec.verify import check_header
from zcrecord.errors import FormatError, IntegrityError, located
from zcrecord.storage.memory import Mode

from .archive import Archive, TouchChecks, check_crc
from .boxes import Box, blocks_of, box_of, put_together
from .payload_source import Array, PayloadSource, Piece, Place, distinct_nbytes
from .piece_table import PieceTable
from .private_copy import check_apart
from .shards import COPY_AGAIN, Shards, table_of
from .tilings import tiles

_SPLIT = -2  # instead of a file, in the place of a split payload, whose pieces lie in several


def open_catalogue(archive: Archive, make_shards: Callable[[Archive, Index], Shards]) -> Archive:
    """Return the archive whose payloads lie in the files that a catalogue, or an archive of references, names.

    Opens none of them; `make_shards` returns the Shards, by the catalogue and the index of the whole. That index's
    checksum is checked, and tensors on use. FormatError for a bad table, IntegrityError for a damaged index.
    """
    with located(path=archive.path):
        archive.ensure_all()
        header, outline = _outline(archive)
        index = decode(outline[HEADER_SIZE:], header.index_size)
        check_header(index, header)
        shards = make_shards(archive, index)
        _check_split(index, shards.table)
        checks = TouchChecks(index, header)
        source = ShardedSource(outline, shards, checks)
        return Archive(header, index, source, verified="touch", checks=checks)


def _check_split(index: Index, table: PieceTable) -> None:
    """Raise FormatError if a tensor over a payload in pieces has strides, or another shape than one it is tied to.

    Boxes are of elements in C order: any other view would have other elements than its boxes.
    """
    if table.first is None:
        return
    is_whole = np.append(table.first[1:] - table.first[:-1] == 1, True)
    rows = index.tensors
    split = np.flatnonzero(~is_whole[np.minimum(rows["payload"], len(index.payloads))])
    shapes: dict[int, tuple[int, ...]] = {}  # by payload, of its first tensor
    columns = (rows[field][split].tolist() for field in ("payload", "strides", "dims", "rank"))
    for i, payload, strides, start, rank in zip(split.tolist(), *columns, strict=True):
        shape = tuple(index.dims[start : start + rank].tolist())
        if strides != NONE or shapes.setdefault(payload, shape) != shape:
            fault = "has strides" if strides != NONE else "has another shape than a tensor it is tied to"
            fault += ", and its payload is in pieces; the catalogue is damaged, or of another writer"
            raise FormatError(fault, tensor=index.name(i))


def _outline(archive: Archive) -> tuple[Header, memoryview]:
    """Return the header of the whole, and the bytes of its header, index and trailer, after checking them."""
    outline = table_of(archive, "outline", np.uint8, (-1,)).data.toreadonly()
    header = decode_header(bytes(outline[:HEADER_SIZE]), "outline") if len(outline) >= 2 * HEADER_SIZE else None
    if header is None or not header.front or header.index_size + 2 * HEADER_SIZE != len(outline):
        raise FormatError("is not a sealed header, the index behind it, and a trailer", tensor="outline")
    if outline[:HEADER_SIZE] != outline[-HEADER_SIZE:]:
        raise FormatError("header and trailer differ", tensor="outline")
    if archive.index.digest_kind:  # faster than the CRC
        payload = archive.row(archive.find("outline")).payload
        if digest_of(outline) != archive.index.payloads["digest"][payload]:
            raise IntegrityError("its digest does not match; the file is damaged, copy it again", tensor="outline")
    else:
        check_crc(outline, header)
    return header, outline


class ShardedSource(PayloadSource):
    """Payloads that lie in several files. Their offsets in the index are those that they would have in one file."""

    def __init__(self, outline: memoryview, shards: Shards, checks: TouchChecks) -> None:
        catalogue = shards.catalogue
        self.path, self.absolute, self.recipe = catalogue.path, catalogue.absolute, None
        self.mode: Mode = "r"
        self.buffer, self.on_demand = outline, shards.catalogue.source.on_demand
        self.shards, self._table, self._checks, self._index = shards, shards.table, checks, checks.index
        self._original: ShardedSource | None = None
        self._compared: set[int] = set()  # files whose payloads were compared with this index
        self._tiled: set[Any] = set()  # shapes, with boxes that tile them
        self._counted, self._counted_nbytes = set[int](), 0  # split payloads that were put together: pieces may repeat
        # Split payloads in memory, while someone uses them.
        self._assembled: MutableMapping[int, Array] = weakref.WeakValueDictionary()
        self._first_tensors: Array | None = None  # by payload, the first tensor that uses it

    def private(self, numbers: Array | None = None) -> PayloadSource:
        """Return a source over private copies of the shards, each made when something in it is first needed."""
        table = None if numbers is None else self._table.chosen(numbers)

        def used_payloads(file: int) -> Array | None:
            self.file_archive(file)  # checks that the file has the payloads in the table
            return None if table is None else np.unique(table.payload[table.in_file(file)])

        copy = ShardedSource(self.buffer, self.shards.private(used_payloads), self._checks)
        copy.mode, copy._original, copy._assembled = "c", self, {}  # edits of split tensors stay
        return copy

    @property
    def original(self) -> PayloadSource | None:
        return self if self.mode == "r" else self._original

    def nbytes(self, number: int) -> int:
        return int(self._index.payloads["nbytes"][number])

    def locate(self, number: int) -> tuple[memoryview, int]:
        """Return memory in which a payload lies, and its offset there; a split one is put together. Opens its files."""
        if len(self._table.pieces(number)) > 1:
            octets = self._assembled_bytes(number).data
            return (octets.toreadonly() if self.mode == "r" else octets), 0
        piece = self._only_piece(number)
        return piece.source.locate(piece.number)

    def payload(self, number: int) -> memoryview:
        if len(self._table.pieces(number)) > 1:
            return super().payload(number)
        piece = self._only_piece(number)
        return piece.source.payload(piece.number)

    def blocks(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a payload in order; a split one by its pieces, unless it is in memory, perhaps edited."""
        if len(self._table.pieces(number)) < 2 or number in self._assembled:
            yield self.payload(number)
            return
        for block in blocks_of(*self._filled_boxes(number)):
            yield block.reshape(-1).view(np.uint8).data

    def neighbours(self, number: int) -> tuple[memoryview, Array] | None:
        """Return the memory of a payload's shard, and by payload its offset there, or -1; None for a split payload."""
        whole = self._table.whole()
        if (file := int(whole[number])) == NONE:
            return None
        numbers = self._table.numbers()
        neighbours = self.file_archive(file).source.neighbours(int(numbers[number]))
        if neighbours is None:
            return None
        octets, offsets_in_file = neighbours
        in_file = whole == file
        offsets = np.full(len(whole), -1, np.int64)
        offsets[in_file] = offsets_in_file[numbers[in_file]]
        return octets, offsets

    def fetch(self, numbers: Sequence[int] | None = None) -> None:
        table = self._table if numbers is None else self._table.chosen(list(numbers))
        for file in table.files():
            if file != NONE:
                self.file_archive(file).fetch(table.payload[table.in_file(file)].tolist())

    def _assembled_bytes(self, number: int) -> Array:
        """Return a split payload in one array, kept while a view of it lives, in mode "c" for good; checks limits."""
        if (octets := self._assembled.get(number)) is not None:
            return octets
        shape, boxes = self._filled_boxes(number)
        dtype = boxes[0].values.dtype
        nbytes = prod(shape) * dtype.itemsize
        self._counted_nbytes += 0 if number in self._counted else nbytes
        self._counted.add(number)
        check_apart(self._counted_nbytes, self.opened_nbytes(), self.path)
        out = np.empty(nbytes, np.uint8)  # the owner of the memory: views keep it alive
        put_together(out.view(dtype).reshape(shape), boxes)
        return self._assembled.setdefault(number, out)  # another thread's, if it was first

    def _filled_boxes(self, number: int) -> tuple[tuple[int, ...], list[Box]]:
        """Return the shape of a split payload's tensor, and its boxes, which are views of its shards; opens those."""
        i = self._first_tensor(number)
        self._checks.ensure(i)
        ix, row = self._index, self._index.tensor(i)
        shape, width = tuple(ix.dims[row.dims : row.dims + row.rank].tolist()), row.bits >> 3
        dtype, boxes = np.dtype((np.void, width)), []
        with located(tensor=ix.name(i)):
            origin, extent = self.boxes(number, shape, row.bits)
            for piece, start, size in zip(self.pieces(number), origin.tolist(), extent.tolist(), strict=True):
                if piece.nbytes != prod(size) * width:
                    fault = f"a piece of it has {piece.nbytes} bytes, its box {prod(size) * width}; {COPY_AGAIN}"
                    raise FormatError(fault, path=piece.source.path)
                values = np.frombuffer(piece.source.payload(piece.number), dtype).reshape(size)
                boxes.append(box_of(start, values, piece.source))
        return shape, boxes

    def _first_tensor(self, number: int) -> int:
        """Return the number of the first tensor that uses a payload; FormatError if none does."""
        if self._first_tensors is None:
            payloads = self._index.tensors["payload"]
            # At level "touch" any number may be there.
            order = np.flatnonzero(payloads < len(self._index.payloads))[::-1]
            first_tensors = np.full(len(self._index.payloads), NONE, np.uint32)
            first_tensors[payloads[order]] = order  # of several tensors the last that is assigned stays: the first
            self._first_tensors = first_tensors
        if self._first_tensors[number] == NONE:
            raise FormatError(f"payload {number} is in pieces, and no tensor's", path=self.path)
        return int(self._first_tensors[number])

    def place(self, number: int) -> Place:
        """Return the file of a payload and its range there; for a split payload a place that no other has."""
        if self.mode == "c":
            return number, 0, 0
        pieces = self._table.pieces(number)
        if len(pieces) > 1:
            return _SPLIT, number, self.nbytes(number)
        piece = self._only_piece(number)
        return int(self._table.file[pieces[0]]), *piece.source.place(piece.number)[1:]

    def pieces(self, number: int, chosen: Sequence[int] | None = None) -> list[Piece]:
        pieces = self._table.pieces(number)
        return [self._piece(position) for position in (pieces if chosen is None else map(pieces.__getitem__, chosen))]

    def boxes(self, number: int, shape: tuple[int, ...], bits: int) -> tuple[Array, Array]:
        """Return by piece first index and size along each axis; FormatError unless they tile the shape."""
        table, rank, pieces = self._table, len(shape), self._table.pieces(number)
        if len(pieces) < 2 or table.origin is None:
            return super().boxes(number, shape, bits)
        origin = table.origin[pieces.start : pieces.stop].astype(np.int64)
        extent = table.extent[pieces.start : pieces.stop].astype(np.int64)
        if (key := (shape, bits, origin.tobytes(), extent.tobytes())) not in self._tiled:
            if bits % 8 or not bits or not tiles(origin, extent, shape):
                raise FormatError("its pieces in the shards do not tile it", path=self.path)
            self._tiled.add(key)
        return origin[:, :rank], extent[:, :rank]

    def stored_nbytes(self, numbers: Array | None = None) -> int:
        table, total = self._table if numbers is None else self._table.chosen(numbers), 0
        for file in table.files():
            in_file = self.numbers_in_file(file, np.unique(table.payload[table.in_file(file)]))
            total += distinct_nbytes(self.file_archive(file).index.payloads[in_file])
        return total

    def opened_nbytes(self) -> int:
        shards = sum(shard.source.opened_nbytes() for shard in list(self.shards.opened.values()))
        return len(self.shards.catalogue.buffer) + shards

    def _piece(self, position: int) -> Piece:
        """Return the piece at a position in the table; opens its file."""
        file, number = int(self._table.file[position]), int(self._table.payload[position])
        source: Any = self.file_archive(file).source  # that of one file
        return Piece(source, self.shards.blob(number) if file == NONE else number)

    def _only_piece(self, number: int) -> Piece:
        """Return the only piece of a payload; FormatError unless it has the payload's size."""
        piece = self._piece(self._table.pieces(number)[0])
        if piece.nbytes != self.nbytes(number):
            raise FormatError(f"payload {number} has another size than its piece", path=self.path)
        return piece

    @property
    def is_mapped(self) -> bool:
        return self.mode == "r" and self.shards.catalogue.source.is_mapped

    @property
    def is_remote(self) -> bool:
        return self.shards.catalogue.source.is_remote

    @property
    def gone(self) -> bool:
        return any(shard.source.gone for shard in list(self.shards.opened.values()))

    @property
    def file_names(self) -> list[str]:
        return self.shards.names

    def piece_table(self) -> PieceTable | None:
        return self._table

    def file_size(self, file: int) -> int:
        return self.shards.catalogue.header.archive_size if file == NONE else self.shards.size(file)

    def file_archive(self, file: int) -> Archive:
        """Return a shard, opened if need be, its payloads compared with this index; for NONE the catalogue."""
        if file == NONE:
            return self.shards.catalogue
        shard = self.shards[file]
        if file not in self._compared and not self.shards.from_tables:
            self._check_shard(file, shard)
            self._compared.add(file)
        return shard

    def numbers_in_file(self, file: int, numbers: Array) -> Array:
        """Return the numbers themselves; in the catalogue, file NONE, they are positions in its list of blobs."""
        if file != NONE:
            return numbers
        return np.array([self.shards.blob(number) for number in numbers.tolist()], np.int64)

    def open_files(self, files: Iterable[int]) -> None:
        for file in files:
            self.file_archive(file)

    def _check_shard(self, file: int, shard: Archive) -> None:
        """Raise FormatError unless an opened shard has the pieces in the table, of the outline's sizes and digests."""
        pieces = self._table.in_file(file)
        in_shard, in_outline = self._table.payload[pieces], self._table.payloads_of(pieces)
        # Each once: a payload that is a piece of many tensors would take memory as many times.
        matches = bool((in_shard < len(shard.index.payloads)).all()) and len(np.unique(in_shard)) == len(in_shard)
        if matches:
            actual, expected = shard.index.payloads[in_shard], self._index.payloads[in_outline]
            differs = actual["nbytes"] != expected["nbytes"]
            if self._index.digest_kind:
                differs |= (actual["digest"] != expected["digest"]) | (shard.index.digest_kind == 0)
            matches = not (differs & (self._table.whole()[in_outline] == file)).any()  # split ones are not compared
        if not matches:
            fault = f"the catalogue {self.path} names payloads that this shard does not have, or one twice"
            raise FormatError(f"{fault}; {COPY_AGAIN}", path=shard.path)

    def mappings(self) -> list[weakref.ref[Any]]:
        archives = [self.shards.catalogue, *list(self.shards.opened.values())]
        own = [mapping for archive in archives for mapping in archive.source.mappings()]
        return own if self._original is None else [*own, *self._original.mappings()]

    def seal(self) -> bytes:
        """Return the SHA-256 of the catalogue, which identifies its shards; the outline's header does not."""
        return hashlib.sha256(bytes(self.shards.catalogue.buffer)).digest()

    def pins(self) -> dict[Any, Any]:
        """Return the pins of each shard that has any, by its name, and the seal as that of ""; empty without any."""
        pins = self.shards.all_pins()
        return {**pins, "": self.seal()} if pins else {}

    def pin(self, pins: Mapping[Any, Any]) -> None:
        """Compare payloads with the pins when they are fetched; IntegrityError if this is another catalogue."""
        if pins and pins.get("") != self.seal():
            raise IntegrityError("is not the catalogue that was checked; it was replaced since", path=self.path)
        self.shards.pin(pins)

    def expected_sha256(self, number: int) -> list[bytes | None]:
        """Return each piece's expected SHA-256, computed here for a piece in the catalogue, which the seal covers."""
        digests = super().expected_sha256(number)
        for i, piece in enumerate(self.pieces(number)):
            if piece.source is self.shards.catalogue.source:
                digests[i] = hashlib.sha256(piece.source.payload(piece.number)).digest()
        return digests
