"""Catalogues: one archive over many files, its shards. A shard is opened when something in it is first needed.

A catalogue is a plain archive whose tensors are tables, as CONVENTIONS.md has them. `open_catalogue` makes of it a
`ShardedArchive`: its index is that of the whole, its payloads lie in the shards, and what reads an archive by
`view`, `payload` and `home` reads it, too. Copies nothing but tensors that are split over shards.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from zcrecord.codec.digests import digest_of
from zcrecord.codec.index import Index, Layout, decode
from zcrecord.codec.layout import HEADER_SIZE, NONE, Header, decode_header
from zcrecord.codec.verify import PayloadColumns, check_header, check_payload
from zcrecord.errors import FormatError, IntegrityError, RecordError, UnsupportedError
from zcrecord.storage.memory import Memory

from .archive import Archive, Place, check_crc
from .boxes import Box, blocks_of, box_of, put_together
from .private_copy import check_apart
from .shards import COPY_AGAIN, PieceTable, Shards, table_of, tiles

__all__ = ["ShardedArchive", "SplitPiece", "open_catalogue"]

Array = np.ndarray[Any, np.dtype[Any]]
_ndarray = np.ndarray
_SPLIT = -2  # in the place of a payload, for a file: the pieces of a split payload lie in several


def open_catalogue(archive: Archive, open_shard: Callable[[str], Archive]) -> ShardedArchive:
    """Return the whole that a catalogue tells of; opens no shard. The tables must be in memory or mapped.

    The checksum of the whole's index is checked, and its tensors on use, as at level "touch".

    Args:
        archive: the catalogue.
        open_shard: opens a shard, read-only, by its plain file name.

    Raises:
        FormatError: a table is missing or not of its form. IntegrityError: the index of the whole is damaged.
    """
    try:
        archive.ensure_all()
        header, index, outline = _outline(archive)
        shards = Shards(archive, open_shard)
        table = PieceTable.read(archive, len(index.payloads), len(shards.names))
        memory = Memory(outline, archive.path, absolute=archive.absolute)
        return ShardedArchive(memory, header, index, shards, table)
    except RecordError as error:
        raise error.located(path=archive.path) from error.__cause__


def _outline(archive: Archive) -> tuple[Header, Index, memoryview]:
    """Return header and index of the whole, and their bytes; by the digest, which is faster, or by the index's CRC."""
    outline = table_of(archive, "outline", np.uint8, (-1,)).data.toreadonly()
    header = decode_header(bytes(outline[:HEADER_SIZE]), "outline") if len(outline) >= 2 * HEADER_SIZE else None
    if header is None or not header.front or header.index_size + 2 * HEADER_SIZE != len(outline):
        raise FormatError("is not a sealed header, the index behind it, and a trailer", tensor="outline")
    if outline[:HEADER_SIZE] != outline[-HEADER_SIZE:]:
        raise FormatError("header and trailer differ", tensor="outline")
    if archive.index.digest_kind:
        payload = archive.row(archive.find("outline")).payload
        if digest_of(outline) != archive.index.payloads["digest"][payload]:
            raise IntegrityError("its digest does not match; the file is damaged, copy it again", tensor="outline")
    else:
        check_crc(outline, header)
    index = decode(outline[HEADER_SIZE:], header.index_size)
    check_header(index, header)
    return header, index, outline


class SplitPiece(NamedTuple):
    """A box of a split tensor: its archive and payload there, its first index and its size along each axis."""

    archive: Archive
    payload: int
    origin: tuple[int, ...]
    extent: tuple[int, ...]


class ShardedArchive(Archive):
    """An archive whose payloads lie in several files; `buffer` has its index alone, and no payload.

    Payload offsets of its index are those that the whole would have in one file.
    """

    __slots__ = ("_assembled", "_filled", "_put_together", "_ready", "_table", "_tiled", "_users", "complete", "shards")

    def __init__(self, memory: Memory, header: Header, index: Index, shards: Shards, table: PieceTable) -> None:
        super().__init__(memory, memory.octets, header, index, verified="touch")
        self.shards, self._table = shards, table
        self.complete = True  # and no part
        self._filled: set[int] = set()  # files whose payloads were compared with this index
        self._tiled: set[tuple[int, tuple[int, ...]]] = set()  # split payloads whose boxes tile a shape
        self._put_together: dict[int, int] = {}  # bytes of the split payloads that were in memory: pieces may repeat
        self._assembled: Any = weakref.WeakValueDictionary()  # split payloads in memory, while someone holds them
        self._ready: tuple[list[Layout | None], list[memoryview], list[int]] | None = None
        self._users: Array | None = None  # by payload, the first tensor that uses it

    # The same archive again, or a part of it.

    def _again(self, index: Index, table: PieceTable, shards: Shards) -> ShardedArchive:
        memory = Memory(self.held().octets, self.path, absolute=self.absolute)
        out = ShardedArchive(memory, self.header, index, shards, table)
        out.verified, out._checked, out._pool, out._strings = self.verified, self._checked, self._pool, self._strings
        out.complete, out.recipe = self.complete, self.recipe
        return out

    def kept(self) -> ShardedArchive:
        """Return this archive once more, to be released by itself."""
        out = self._again(self.index, self._table, self.shards.kept())
        out.mode, out.original = self.mode, self.original and self.original.kept()
        out._assembled = self._assembled
        return out

    def part(self, index: Index, numbers: list[int]) -> ShardedArchive:
        """Return an archive with another index, whose payloads are those of this one that have these numbers."""
        out = self._again(index, self._table.chosen(numbers), self.shards.kept())
        out.verified, out.complete, out._checked, out._pool, out._strings = "index", False, set(), None, set()
        out.mode, out.original = self.mode, self.original
        if self.mode == "c":
            out.parent = self, numbers  # it has the edits of split tensors
        return out

    def private(self) -> ShardedArchive:
        """Return the same archive over private copies of its shards, each made when it is first needed."""
        out = self._again(self.index, self._table, self.shards.private())
        out.mode, out.original, out._assembled = "c", self, {}
        return out

    def parts_by_file(self) -> list[Archive]:
        """Return parts of one shard each, with these names and no tree, and one of what lies in none or in several."""
        self.ensure_all()
        at = self._files_of_tensors()
        parts: list[Archive] = [self._part_of(file, at == file) for file in np.unique(at[at != NONE]).tolist()]
        if np.count_nonzero(at == NONE):
            parts.append(self.part(self._index_of(at == NONE), list(range(len(self.index.payloads)))))
        return parts

    def files(self) -> list[tuple[int, Callable[[], Archive]]]:
        """Return size and opener of the archives that verification reads: the catalogue and its shards.

        Of a part of it they are parts of those that it lies in.
        """
        self.ensure_all()
        catalogue, sizes = self.shards.catalogue, self.shards.sizes()
        if self.complete:
            shards = [(size, partial(self._shard, f)) for f, size in enumerate(sizes)]
            return [(catalogue.header.archive_size, lambda: catalogue), *shards]
        at = self._files_of_tensors()
        return [
            (
                catalogue.header.archive_size if file == NONE else sizes[file],
                partial(self._part_of, file, (at == file) & (at != NONE)),
            )
            for file in np.unique(self._table.file).tolist()
        ]

    @property
    def shard_names(self) -> list[str]:
        """The file names of the shards."""
        return self.shards.names

    def _part_of(self, file: int, mine: Array) -> Archive:
        """Return the part of one file that has some tensors, all that lie in it whole, and every piece in it."""
        shard, used, rows = self._stored_in(file)
        index = self._index_of(mine)
        numbers = self._numbers()[index.tensors["payload"]]
        index.tensors["payload"] = np.searchsorted(used, numbers)
        return shard.part(index._replace(payloads=rows, digest_kind=shard.index.digest_kind), used.tolist())

    def _index_of(self, mine: Array) -> Index:
        """Return an index of some tensors, without attributes, and with the modules of the whole."""
        ix = self.index
        by_name = (np.cumsum(mine) - 1)[ix.by_name[mine[ix.by_name]]].astype(np.uint32)
        none = ix.attributes[:0]
        return ix._replace(tensors=ix.tensors[mine], by_name=by_name, attributes=none, metadata=none)

    def _files_of_tensors(self) -> Array:
        """Return for each tensor the file that it lies in, whole; NONE for others."""
        payloads = self.index.tensors["payload"]
        at: Array = np.append(self._table.whole(), np.uint32(NONE))[np.minimum(payloads, len(self.index.payloads))]
        return at

    def file_of(self, number: int) -> str | None:
        """Return the name of the shard that a payload lies in; None if it is split, or in the catalogue."""
        pieces = self._table.pieces(number)
        file = int(self._table.file[pieces[0]])
        return None if len(pieces) > 1 or file == NONE else self.shards.names[file]

    def split_payloads(self) -> frozenset[int]:
        """Return the numbers of the payloads that are split."""
        first = self._table.first
        return frozenset() if first is None else frozenset(np.flatnonzero(first[1:] - first[:-1] > 1).tolist())

    def split_pieces(self, i: int, bounds: Sequence[tuple[int, int]]) -> list[SplitPiece]:
        """Return the pieces of a split tensor i that a box meets; opens their shards alone, and reads no payload.

        Args:
            i: the tensor.
            bounds: of the box, first index and the one after the last along each axis.

        Raises:
            FormatError: its pieces do not tile it, or one has another size than its box.
        """
        origin, extent = self.boxes(i)
        row = self.row(i)
        pieces = self._table.pieces(row.payload)
        low, high = np.array(bounds, np.int64).reshape(-1, 2).T
        found = []
        for k in np.flatnonzero(((low < origin + extent) & (origin < high)).all(axis=1)).tolist():
            size = tuple(extent[k].tolist())
            archive, there = self._payload_of_box(i, pieces[k], prod(size) * (row.bits >> 3))
            found.append(SplitPiece(archive, there, tuple(origin[k].tolist()), size))
        return found

    # Bytes.

    def place_of(self, number: int) -> Place:
        """Return the file of a payload and its range there; opens that file. A split payload is nobody else's.

        Raises:
            SourceError, FormatError, IntegrityError: the shard cannot be had, or is another.
        """
        if number == NONE or self.mode == "c":
            return super().place_of(number)
        pieces = self._table.pieces(number)
        if len(pieces) > 1:
            return _SPLIT, number, int(self.index.payloads["nbytes"][number])
        archive, there = self._only_piece(number, pieces[0])
        return int(self._table.file[pieces[0]]), *archive.place_of(there)[1:]

    def stored_nbytes(self) -> int:
        """Return the bytes of the index, and of the ranges that its payloads take in the shards, each once."""
        return self.header.index_size + sum(
            int(rows["nbytes"][np.unique(rows["offset"], return_index=True)[1]].sum(dtype=np.uint64))
            for rows in (self._stored_in(file)[2] for file in np.unique(self._table.file).tolist())
        )

    def seal(self) -> bytes:
        """Return the SHA-256 of the catalogue: the header of the outline says nothing of the shards."""
        return hashlib.sha256(self.shards.catalogue.buffer).digest()

    def pins(self) -> dict[Any, Any]:
        """Return the seal, as "", and the pins of each shard that has any, by its name."""
        found = self.shards.pins()
        return {**found, "": self.seal()} if found else {}

    def pin(self, pins: dict[Any, Any]) -> None:
        """Compare payloads with what they were, as of one archive; shards are not opened for that.

        Raises:
            IntegrityError: the pins are those of another archive.
        """
        if pins and pins.get("") != self.seal():
            raise IntegrityError("is not the catalogue that was checked; it was replaced since", path=self.path)
        self.shards.pin(pins)

    def opened_nbytes(self) -> int:
        """Return the bytes of the shards that are open."""
        return sum(len(shard.buffer) for shard in self.shards.opened())

    def _stored_in(self, file: int) -> tuple[Archive, Array, Array]:
        """Return a file of the record, the numbers there of the payloads that are pieces of it, and their rows."""
        numbers = np.unique(self._table.payload[self._table.in_file(file)])
        archive = self.shards.catalogue if file == NONE else self._shard(file)
        if file == NONE:
            numbers = np.unique([self.shards.blob(number) for number in numbers.tolist()]).astype(np.int64)
        return archive, numbers, archive.index.payloads[numbers]

    def _numbers(self) -> Array:
        """Return the number of each payload in its shard; of a split one that of its first piece."""
        first = self._table.first
        return self._table.payload if first is None else self._table.payload[first[:-1].astype(np.int64)]

    def _shard(self, file: int) -> Archive:
        """Return a shard, its payloads compared with what this index says of them.

        Raises:
            FormatError: they differ.
        """
        shard = self.shards[file]
        if file not in self._filled:
            self._compare(file, shard)
            self._filled.add(file)
        return shard

    def _compare(self, file: int, shard: Archive) -> None:
        theirs, table = shard.index.payloads, self._table
        try:
            check_payload(PayloadColumns(shard.index, shard.header))  # all: one range is known by where it starts
        except FormatError as error:
            raise error.located(path=shard.path) from None
        pieces = table.in_file(file)
        named = table.payload[pieces]
        # Each once: a payload that is a piece of many tensors would be as many times the memory.
        if np.count_nonzero(named < len(theirs)) == len(named) == len(np.unique(named)):
            numbers = table.payloads_of(pieces)
            rows, mine = theirs[named], self.index.payloads[numbers]
            whole = table.whole()[numbers] == file
            wrong = whole & (rows["nbytes"] != mine["nbytes"])
            if self.index.digest_kind:
                wrong |= whole & ((rows["digest"] != mine["digest"]) | (shard.index.digest_kind == 0))
            if not np.count_nonzero(wrong):
                return
        what = f"the catalogue {self.path} names payloads that this shard does not have, or one twice; {COPY_AGAIN}"
        raise FormatError(what, path=shard.path)

    def pieces_of(self, number: int) -> list[tuple[Archive, int]]:
        """Return the archives in which a payload is stored, piece by piece, and its numbers there; opens them."""
        return [self._piece(piece) for piece in self._table.pieces(number)]

    def _piece(self, piece: int) -> tuple[Archive, int]:
        """Return the archive that a piece lies in, and its payload's number there."""
        file, number = int(self._table.file[piece]), int(self._table.payload[piece])
        if file != NONE:
            return self._shard(file), number
        return self.shards.catalogue, self.shards.blob(number)

    def _only_piece(self, number: int, piece: int) -> tuple[Archive, int]:
        """Return the archive that a payload lies in, whole, and its number there, of the same size."""
        archive, there = self._piece(piece)
        if archive.index.payloads["nbytes"][there] != self.index.payloads["nbytes"][number]:
            raise FormatError(f"payload {number} has another size than its piece", path=self.path)
        return archive, there

    def home(self, number: int) -> tuple[memoryview, int]:
        """Return the bytes in which a payload lies, and its offset in them."""
        self.held()
        pieces = self._table.pieces(number)
        if len(pieces) > 1:
            if self.parent is not None:
                whole, numbers = self.parent
                return whole.home(numbers[number])
            octets = self._assembly(number, pieces).data
            return (octets.toreadonly() if self.mode == "r" else octets), 0
        archive, there = self._only_piece(number, pieces[0])
        return archive.home(there)

    def payload(self, number: int) -> memoryview:
        """Return a payload's bytes; a read-only view, of a split tensor a copy. NONE gives an empty one."""
        if number == NONE:
            return self.buffer[:0]
        pieces = self._table.pieces(number)
        if len(pieces) == 1 and self.mode == "r":
            archive, there = self._only_piece(number, pieces[0])
            return archive.payload(there)
        octets, at = self.home(number)
        return octets[at : at + int(self.index.payloads["nbytes"][number])].toreadonly()

    def split(self, number: int) -> Iterator[memoryview] | None:
        """Return a split tensor's bytes in C order, in blocks that are valid until the next; None for other payloads.

        It is not assembled, but for a private copy that was: there are its edits.
        """
        if self.parent is not None and number != NONE:
            whole, numbers = self.parent
            return whole.split(numbers[number])
        if number == NONE or len(pieces := self._table.pieces(number)) < 2 or number in self._assembled:
            return None
        return self._blocks(number, pieces)

    def _blocks(self, number: int, pieces: range) -> Iterator[memoryview]:
        self.held()
        for block in blocks_of(*self._boxes(number, pieces)):
            yield block.reshape(-1).view(np.uint8).data

    def bring(self, numbers: list[int] | None = None) -> None:
        """Fetch payloads of remote shards (all by default) and check their digests; does nothing for local ones."""
        if numbers is None:
            self.ensure_all()
        chosen = range(len(self.index.payloads)) if numbers is None else [n for n in numbers if n != NONE]
        if numbers is None and self._table.first is None:
            pieces = np.arange(len(self._table.file))
        else:
            pieces = np.array([piece for number in chosen for piece in self._table.pieces(number)], np.int64)
        file = self._table.file[pieces]
        for f in np.unique(file[file != NONE]).tolist():
            self._shard(f).bring(self._table.payload[pieces[file == f]].tolist())

    def _assembly(self, number: int, pieces: range) -> Array:
        """Return the bytes of a split tensor, put together; kept while a view of them lives, with edits for good.

        Raises:
            FormatError: its pieces do not tile it.
        """
        found: Array | None = self._assembled.get(number)
        return self._assembled.setdefault(number, self._assemble(number, pieces)) if found is None else found

    def _assemble(self, number: int, pieces: range) -> Array:
        shape, boxes = self._boxes(number, pieces)
        dtype = boxes[0].values.dtype
        self._put_together[number] = prod(shape) * dtype.itemsize
        check_apart(sum(self._put_together.values()), self.opened_nbytes(), self.path)
        out = np.empty(prod(shape) * dtype.itemsize, np.uint8)  # the owner of the memory, as which it is looked up
        put_together(out.view(dtype).reshape(shape), boxes)
        return out

    def _boxes(self, number: int, pieces: range) -> tuple[tuple[int, ...], list[Box]]:
        """Return the shape of a split tensor, and its boxes of opaque elements."""
        first = self._first_tensor(number)
        origin, extent = self.boxes(first)
        row = self.row(first)
        shape, item = self.shape(row), row.bits >> 3
        dtype, boxes = np.dtype((np.void, item)), []
        for piece, start, size in zip(pieces, origin.tolist(), extent.tolist(), strict=True):
            octets = self._octets_of_box(first, piece, prod(size) * item)
            boxes.append(box_of(start, np.frombuffer(octets, dtype).reshape(size), self._piece(piece)[0]))
        return shape, boxes

    def _first_tensor(self, number: int) -> int:
        """Return the number of the first tensor that uses a payload.

        Raises:
            FormatError: none does.
        """
        if self._users is None:
            payloads = self.index.tensors["payload"]
            # At level "touch" any number may be there.
            order = np.flatnonzero(payloads < len(self.index.payloads))[::-1]
            self._users = np.full(len(self.index.payloads), NONE, np.uint32)
            self._users[payloads[order]] = order  # of several the last one stays here, which is the first tensor
        if self._users[number] == NONE:
            raise FormatError(f"payload {number} is in pieces, and no tensor's", path=self.path)
        return int(self._users[number])

    # Pieces of split tensors.

    def boxes(self, i: int) -> tuple[Array, Array]:
        """Return first index and size of each piece of tensor i, a row each: of one that is not split, the whole.

        Raises:
            FormatError: they do not tile the tensor.
        """
        row = self.row(i)
        shape, table, rank = self.shape(row), self._table, row.rank
        pieces = range(0) if row.payload == NONE else table.pieces(row.payload)
        if len(pieces) < 2 or table.origin is None:
            sizes = np.array([shape] * len(pieces), np.int64).reshape(len(pieces), rank)
            return np.zeros_like(sizes), sizes
        origin = table.origin[pieces.start : pieces.stop].astype(np.int64)
        extent = table.extent[pieces.start : pieces.stop].astype(np.int64)
        if (row.payload, shape) not in self._tiled:
            if row.bits % 8 or not row.bits or row.strides != NONE or not tiles(origin, extent, shape):
                what = "its pieces in the shards do not tile it"
                raise FormatError(what, path=self.path, tensor=self.index.name(i))
            self._tiled.add((row.payload, shape))
        return origin[:, :rank], extent[:, :rank]

    def open_shards(self, files: Iterable[int]) -> None:
        """Open shards, by their numbers, so that they can be read even if they are removed.

        Raises:
            SourceError: one is not there, or cannot be read. IntegrityError: it is not the one that is named.
        """
        for file in files:
            if file != NONE:
                self._shard(file)

    def box_place(self, i: int, k: int) -> tuple[int, int]:
        """Return the file of piece k of tensor i, and its number there: in this order pieces are read; opens none."""
        piece = self._piece_of(i, k)
        return int(self._table.file[piece]), int(self._table.payload[piece])

    def box_payload(self, i: int, k: int) -> tuple[Archive, int]:
        """Return the archive that piece k of tensor i lies in, and its payload's number there."""
        return self._piece(self._piece_of(i, k))

    def box_octets(self, i: int, k: int, nbytes: int) -> memoryview:
        """Return the bytes of piece k of a split tensor i, in C order, over its shard's own; writable in mode "c".

        Args:
            nbytes: of the piece's box, one of those that `boxes` has checked.

        Raises:
            FormatError: they are not as many.
        """
        return self._octets_of_box(i, self._piece_of(i, k), nbytes)

    def _piece_of(self, i: int, k: int) -> int:
        self.ensure(i)
        return self._table.pieces(int(self.index.tensors["payload"][i]))[k]

    def _octets_of_box(self, i: int, piece: int, nbytes: int) -> memoryview:
        archive, there = self._payload_of_box(i, piece, nbytes)
        octets, at = archive.home(there)
        return octets[at : at + nbytes]

    def _payload_of_box(self, i: int, piece: int, nbytes: int) -> tuple[Archive, int]:
        """Return the archive that a piece of tensor i lies in, and its payload's number there, of so many bytes."""
        archive, there = self._piece(piece)
        if archive.index.payloads["nbytes"][there] != nbytes:
            what = "a piece of it has another size than its box"
            raise FormatError(what, path=archive.path, tensor=self.index.name(i))
        return archive, there

    # Views of all tensors, prepared shard by shard.

    def prepare_views(self) -> None:
        """Prepare for views of all tensors, each of which then takes a fraction of the time; opens no shard."""
        if self._ready is None and self.verified != "touch":
            layouts = self.layouts()
            self._ready = layouts, [self.buffer] * len(layouts), [-1] * len(layouts)

    def view(self, i: int) -> Any:
        """Return tensor i as an ndarray, PackedTensor or StringTensor over its shard's own bytes."""
        ready = self._ready
        if ready is not None:
            layouts, octets, starts = ready
            if (start := starts[i]) >= 0:
                shape, kind, strides = layouts[i]  # type: ignore[misc]  # it has a start
                return _ndarray(shape, kind, octets[i], start, strides)
        found = super().view(i)
        if ready is not None:
            self._fill(i, ready)
        return found

    def _fill(self, i: int, ready: tuple[list[Layout | None], list[memoryview], list[int]]) -> None:
        """Fill in the places of all tensors in the shard of tensor i, if its bytes are in memory or mapped."""
        layouts, octets, starts = ready
        payloads, at = self.index.tensors["payload"], self._files_of_tensors()
        if at[i] == NONE or (shard := self._shard(int(at[i]))).remote is not None:
            return
        offsets = shard.index.payloads["offset"]
        numbers = self._numbers()[payloads[at == at[i]]]
        # Of payloads of one range, in a private copy only the first lies where its offset says.
        home = np.append(True, offsets[1:] != offsets[:-1])[numbers]
        chosen, numbers = np.flatnonzero(at == at[i])[home], numbers[home]
        if not len(numbers):
            return
        memory, _ = shard.home(int(numbers[0]))  # that of all payloads, which lie in it by their offsets
        there = offsets[numbers] + self.index.tensors["byte_offset"][chosen]
        for number, start in zip(chosen.tolist(), there.tolist(), strict=True):
            if layouts[number] is not None:
                octets[number] = memory
                starts[number] = start  # last: another thread may read it now

    # Memory.

    @property
    def mapped(self) -> bool:
        """True if the catalogue is mapped, as its shards are."""
        return self.mode == "r" and self.shards.catalogue.mapped

    @property
    def file(self) -> None:
        """None: the payloads are in more than one file."""
        return

    @property
    def mapping(self) -> None:
        """None: the payloads are in more than one mapping."""
        return

    @property
    def gone(self) -> bool:
        """True if a shard that is open was replaced or removed at its path."""
        return any(shard.gone for shard in self.shards.opened())

    def private_memory(self) -> Memory:
        """Raise UnsupportedError: there is no one memory."""
        what = "a catalogue's tensors lie in several files; zcrecord convert makes one archive of it"
        raise UnsupportedError(what, path=self.path)

    def release(self) -> bool:
        """Let go of the catalogue and all shards; returns whether that released every mapping."""
        shards, self._ready, self._assembled = self.shards, None, {}
        super().release()
        self._table = cast(Any, self.index)  # released, too: a view of the catalogue's tables holds its mapping
        return shards.release() if isinstance(shards, Shards) else True
