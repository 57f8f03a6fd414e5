"""The tables of a catalogue, and its shards: files that are opened when needed, and known by their seals."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zcrecord.codec.entries import PayloadId
from zcrecord.codec.layout import HEADER_SIZE, NONE, decode_header
from zcrecord.codec.verify import PayloadColumns, check_payload
from zcrecord.errors import FormatError, IntegrityError, SourceError, located, printable
from zcrecord.storage.folders import is_plain_name
from zcrecord.tensors.packed import StringTensor
from zcrecord.writing.catalogue import BLOBS

from .archive import Archive
from .payload_source import Array
from .piece_table import PieceTable
from .private_copy import check_apart, twins_nbytes
from .unflatten import attribute_entries

COPY_AGAIN = "copy the catalogue and all its shards again, from one place"


def table_of(archive: Archive, name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
    """Return a tensor of a catalogue by its name; FormatError unless it has this dtype and shape (-1: any length)."""
    number = archive.find(name)
    table = None if number < 0 else archive.view(number)
    if not isinstance(table, np.ndarray) or table.dtype != dtype or not table.flags.c_contiguous:
        raise FormatError(f"its table is missing, or not of {np.dtype(dtype).name}", tensor=name)
    sizes = zip(shape, table.shape, strict=False)
    if table.ndim != len(shape) or any(size not in (-1, actual) for size, actual in sizes):
        raise FormatError(f"its table has the shape {table.shape}, which does not fit the others", tensor=name)
    return table


def file_names(archive: Archive, suffix: str, kind: str) -> list[str]:
    """Return the names in a catalogue's table of files; FormatError, which says `kind`, unless all are plain names."""
    number = archive.find("files.name")
    table = None if number < 0 else archive.view(number)
    if not isinstance(table, StringTensor) or len(table.shape) != 1:
        raise FormatError("its table is missing, or not of strings", tensor="files.name")
    names = [str(name) for name in table.unpack().tolist()]
    if len(set(names)) < len(names):
        raise FormatError("names a file twice", tensor="files.name")
    for name in names:
        if not is_plain_name(name, suffix):
            raise FormatError(f"{printable(repr(name))} is not the plain name of {kind}", tensor="files.name")
    return names


def piece_table(archive: Archive, payloads: int, files: int) -> PieceTable:
    """Return the pieces in a catalogue's tables, for so many payloads and files; FormatError if they do not fit."""
    file = table_of(archive, "file", np.uint32, (-1,))
    payload = table_of(archive, "payload", np.uint32, (len(file),))
    if np.count_nonzero(bad := (file >= files) & (file != NONE)):
        raise FormatError(f"piece {int(bad.argmax())} is in file {file[bad.argmax()]}, of {files}", tensor="file")
    if archive.find("first") < 0:
        if len(file) != payloads:
            raise FormatError(f"{len(file)} pieces for {payloads} payloads", tensor="file")
        return PieceTable(file, payload, None, None, None)
    first = table_of(archive, "first", np.uint64, (payloads + 1,))
    if first[0] or first[-1] != len(file) or (first[1:] <= first[:-1]).any():
        raise FormatError(f"does not ascend from 0 to {len(file)}, the number of pieces", tensor="first")
    origin = table_of(archive, "origin", np.uint64, (len(file), -1))
    return PieceTable(file, payload, first, origin, table_of(archive, "extent", np.uint64, origin.shape))


class Shards:
    """The files of a catalogue, each opened when first needed, and checked by its trailer and its index's SHA-256."""

    from_tables = False  # True if the files' indexes are made of the catalogue's own tables, and so need no comparison

    def __init__(self, catalogue: Archive, open_shard: Callable[[str], Archive], payloads: int) -> None:
        """Read the tables of files and of pieces, for so many payloads; `open_shard` opens a shard by its name."""
        self.set_files(catalogue, file_names(catalogue, ".zcr", "a .zcr file; shards lie beside their catalogue"))
        count = len(self.names)
        self._trailers = table_of(catalogue, "files.trailer", np.uint8, (count, HEADER_SIZE))
        self._digests = table_of(catalogue, "files.index_sha256", np.uint8, (count, 32))
        self._open = open_shard
        self.table = piece_table(catalogue, payloads, count)

    def set_files(self, catalogue: Archive, names: list[str]) -> None:
        """Start with a catalogue and the names of its files, none of which is open."""
        self.catalogue, self.names, self._lock = catalogue, names, threading.Lock()
        self.opened: dict[int, Archive] = {}  # by number
        self.pins: Mapping[Any, Any] = {}  # by file name, for payloads of shards that will be opened
        self._blobs: Sequence[Any] | None = None  # decoded once: each may be looked up
        self._open_private: Callable[[int], Archive] | None = None  # opens a private copy; None for read-only shards

    def private(self, used: Callable[[int], Array | None]) -> Shards:
        """Return private copies of the shards, each made on first use; `used` returns the payloads it will need."""
        twins = stored = 0

        def open_private(file: int) -> Archive:
            nonlocal twins, stored
            shard = self[file]
            nbytes = shard.stored_nbytes()
            twins, stored = twins + twins_nbytes(shard.index.payloads, nbytes), stored + nbytes
            check_apart(twins, stored, self.catalogue.path)
            return shard.private(used(file))

        copies = copy.copy(self)
        copies.catalogue, copies.opened, copies._lock = self.catalogue.private(), {}, threading.Lock()
        copies._open_private = open_private
        return copies

    def size(self, file: int) -> int:
        """Return the size of a shard in bytes, by its trailer in the catalogue; does not open it."""
        header = decode_header(self._trailers[file].tobytes(), "trailer")
        return 0 if header is None else header.archive_size

    def __getitem__(self, file: int) -> Archive:
        """Return a shard, opened now or before; IntegrityError if it is another than the catalogue names."""
        if (shard := self.opened.get(file)) is None:
            with self._lock:
                if (shard := self.opened.get(file)) is None:
                    shard = self.opened[file] = (self._open_private or self._open_checked)(file)
        return shard

    def open_named(self, file: int, open_file: Callable[[str], Archive]) -> Archive:
        """Open a file by its name, by a function; a SourceError names this archive, too."""
        try:
            return open_file(self.names[file])
        except SourceError as error:
            fault = f"{error.message}; {self._context(file)}"
            raise type(error)(fault, path=error.path, errno=error.errno) from error

    def _open_checked(self, file: int) -> Archive:
        """Return a shard; IntegrityError unless its trailer and its index's digest are those in the catalogue."""
        shard = self.open_named(file, self._open)
        header = shard.header
        index = shard.buffer[header.index_offset :][: header.index_size]
        if header.encode() != self._trailers[file].tobytes():
            fault = "is another archive than the one that the catalogue names"
        elif hashlib.sha256(index).digest() != self._digests[file].tobytes():
            fault = "its index is not the one that the catalogue names"
        else:
            with located(path=shard.path):
                check_payload(PayloadColumns(shard.index, header))  # of all: places are compared by their starts
            shard.source.pin(self.pins.get(self.names[file], {}))
            return shard
        path = shard.path
        shard.close()
        raise IntegrityError(f"{fault}: {self._context(file)}", path=path)

    def _context(self, file: int) -> str:
        """Return the end of an error about a file: the archive that names it, and advice."""
        replaced = self.catalogue.source.gone
        advice = ", which was replaced since it was opened; load it again" if replaced else f"; {COPY_AGAIN}"
        return f"it is shard {file + 1} of {len(self.names)} of {self.catalogue.path}{advice}"

    def blob(self, number: int) -> int:
        """Return the payload in the catalogue of blob `number`, an item of its attribute BLOBS; FormatError without."""
        if self._blobs is None:
            ix = self.catalogue.index
            entries = attribute_entries(ix, ix.attributes, PayloadId)
            values = [entry.value for entry in entries if entry.key == BLOBS and not entry.parent]
            self._blobs = values[0] if values and isinstance(values[0], list | tuple) else ()
        if number >= len(self._blobs) or not isinstance(self._blobs[number], PayloadId) or self._blobs[number] == NONE:
            raise FormatError(f"the catalogue has no blob {number}", path=self.catalogue.path)
        return int(self._blobs[number])

    def all_pins(self) -> dict[Any, Any]:
        """Return the pins of each shard that has any, by its name; of those not open yet as `pin` got them."""
        opened = {self.names[file]: shard.source.pins() for file, shard in list(self.opened.items())}
        return {**self.pins, **{name: pins for name, pins in opened.items() if pins}}

    def pin(self, pins: Mapping[Any, Any]) -> None:
        """Pin payloads of shards, by the shards' names: of open ones now, of others when they are opened."""
        with self._lock:
            self.pins = pins
            for file, shard in self.opened.items():
                shard.source.pin(pins.get(self.names[file], {}))
