"""The tables of a catalogue, and its shards: files that are opened when needed, and known again by their seals."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, cast

import numpy as np

from zcrecord.codec.entries import PayloadId
from zcrecord.codec.layout import HEADER_SIZE, NONE, decode_header
from zcrecord.errors import FormatError, IntegrityError, RecordError, SourceError, printable
from zcrecord.storage.folders import is_plain_name
from zcrecord.tensors.packed import StringTensor
from zcrecord.writing.catalogue import BLOBS

from .archive import Archive
from .private_copy import check_apart, twins_nbytes
from .released import Released
from .unflatten import attribute_entries

__all__ = ["COPY_AGAIN", "PieceTable", "Shards", "table_of", "tiles"]

Array = np.ndarray[Any, np.dtype[Any]]
_FEW = 64  # boxes that are compared one by one, which takes less than a pass over columns
_MOST_CORNERS = 1 << 24  # of the pieces of a tensor
COPY_AGAIN = "copy the catalogue and all its shards again, from one place"


def table_of(archive: Archive, name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
    """Return a table of a catalogue; -1 in `shape` is any number.

    Raises:
        FormatError: it is missing, or has another type or shape.
    """
    found = archive.find(name)
    table = None if found < 0 else archive.view(found)
    if not isinstance(table, np.ndarray) or table.dtype != dtype or not table.flags.c_contiguous:
        raise FormatError(f"its table is missing, or not of {np.dtype(dtype).name}", tensor=name)
    if table.ndim != len(shape) or any(n not in (-1, m) for n, m in zip(shape, table.shape, strict=True)):
        raise FormatError(f"its table has the shape {table.shape}, which does not fit the others", tensor=name)
    return table


class PieceTable:
    """The places of payloads in shards, as columns.

    A payload that lies whole in one file is one piece; of a split tensor there are several, each a box of its elements.

    Attributes:
        file: by piece, the number of the shard; NONE for the catalogue itself.
        payload: by piece, its number in that shard's index, or among the catalogue's blobs.
        first: by payload, its first piece, and behind the last one their number; None where each has one.
        origin, extent: by piece, first index and size of the box along each axis; None where nothing is split.
    """

    __slots__ = ("_by_file", "_whole", "extent", "file", "first", "origin", "payload")

    def __init__(self, file: Array, payload: Array, first: Array | None, origin: Array | None, extent: Any) -> None:
        self.file, self.payload, self.first, self.origin, self.extent = file, payload, first, origin, extent
        self._by_file: tuple[Array, Array] | None = None  # made when needed, as below: there may be a million pieces
        self._whole: Array | None = None

    @classmethod
    def read(cls, archive: Archive, payloads: int, files: int) -> PieceTable:
        """Return the tables of a catalogue, their lengths and the numbers of files checked."""
        file = table_of(archive, "file", np.uint32, (-1,))
        payload = table_of(archive, "payload", np.uint32, (len(file),))
        if np.count_nonzero(bad := (file >= files) & (file != NONE)):
            raise FormatError(f"piece {int(bad.argmax())} is in file {file[bad.argmax()]}, of {files}", tensor="file")
        if archive.find("first") < 0:
            if len(file) != payloads:
                raise FormatError(f"{len(file)} pieces for {payloads} payloads", tensor="file")
            return cls(file, payload, None, None, None)
        first = table_of(archive, "first", np.uint64, (payloads + 1,))
        if first[0] or first[-1] != len(file) or (first[1:] <= first[:-1]).any():
            raise FormatError(f"does not ascend from 0 to {len(file)}, the number of pieces", tensor="first")
        origin = table_of(archive, "origin", np.uint64, (len(file), -1))
        return cls(file, payload, first, origin, table_of(archive, "extent", np.uint64, origin.shape))

    def chosen(self, numbers: list[int]) -> PieceTable:
        """Return the table of some payloads."""
        if self.first is None:
            return PieceTable(self.file[numbers], self.payload[numbers], None, None, None)
        counts = (self.first[1:] - self.first[:-1])[numbers].astype(np.int64)
        ends = np.cumsum(counts)
        rows = np.repeat(self.first[numbers].astype(np.int64) - (ends - counts), counts) + np.arange(ends[-1:].sum())
        assert self.origin is not None
        first = np.concatenate(([0], ends)).astype(np.uint64)
        return PieceTable(self.file[rows], self.payload[rows], first, self.origin[rows], self.extent[rows])

    def pieces(self, number: int) -> range:
        """Return the pieces of a payload."""
        first = self.first
        return range(number, number + 1) if first is None else range(int(first[number]), int(first[number + 1]))

    def in_file(self, file: int) -> Array:
        """Return the pieces that lie in a file, ascending."""
        if self._by_file is None:
            order = np.argsort(self.file, kind="stable")
            self._by_file = order, self.file[order]
        order, files = self._by_file
        return order[slice(*np.searchsorted(files, np.array([file, file + 1], np.int64)))]

    def payloads_of(self, pieces: Array) -> Array:
        """Return the payload that each piece is of."""
        return pieces if self.first is None else np.searchsorted(self.first, pieces.astype(np.uint64), "right") - 1

    def whole(self) -> Array:
        """Return for each payload the file that it lies in, whole; NONE for those in the catalogue, or split."""
        if self.first is None:
            return self.file
        if self._whole is None:
            alone = self.first[1:] - self.first[:-1] == 1
            self._whole = np.where(alone, self.file[self.first[:-1].astype(np.int64)], NONE)
        return self._whole


class _Opened:
    """The shards that are open: one table for a record and all its parts. The last of them to be released closes them.

    Attributes:
        archives: those that are open, by number.
        open: opens a shard by its file name.
        pins: what their payloads are compared with, by file name.
        source: of private copies, the shards that they are made of.
        users: the record and its parts, which need not be released: they leave this when nothing holds them.
    """

    __slots__ = ("archives", "lock", "open", "pins", "source", "users")

    def __init__(self, open_shard: Callable[[str], Archive], pins: dict[Any, Any], source: Shards | None) -> None:
        self.open, self.pins, self.source, self.lock = open_shard, pins, source, threading.Lock()
        self.archives: dict[int, Archive] = {}
        self.users: weakref.WeakSet[Shards] = weakref.WeakSet()

    def left(self, user: Shards) -> bool:
        """Release all if no other user is left; returns whether that released every mapping."""
        with self.lock:
            self.users.discard(user)
            if self.users:
                return False
            archives, self.archives = list(self.archives.values()), {}
        if self.source is not None:
            self.source.release()  # first: the copies hold the same mappings, and tell whether these are closed
        return min([True, *[shard.release() for shard in archives]])  # each is released


class Shards:
    """The files of a catalogue, each opened when first needed, and known by its trailer and the SHA-256 of its index.

    Attributes:
        catalogue: the archive that names them.
        names: their file names.
    """

    __slots__ = ("__weakref__", "_blobs", "_opened", "_seals", "catalogue", "names")

    def __init__(self, catalogue: Archive, open_shard: Callable[[str], Archive]) -> None:
        """Read the table of files.

        Raises:
            FormatError: it is not of its form, or a name leads to another folder.
        """
        found = catalogue.find("files.name")
        names = None if found < 0 else catalogue.view(found)
        if not isinstance(names, StringTensor) or len(names.shape) != 1:
            raise FormatError("its table is missing, or not of strings", tensor="files.name")
        self.catalogue, self.names = catalogue, [str(n) for n in names.unpack().tolist()]
        if len(set(self.names)) < len(self.names):
            raise FormatError("names a file twice", tensor="files.name")
        for name in self.names:
            if not is_plain_name(name, ".zcr"):
                what = (
                    f"{printable(repr(name))} is not the plain name of a .zcr file; shards lie beside their catalogue"
                )
                raise FormatError(what, tensor="files.name")
        count = len(self.names)
        self._seals = (
            table_of(catalogue, "files.trailer", np.uint8, (count, HEADER_SIZE)),
            table_of(catalogue, "files.index_sha256", np.uint8, (count, 32)),
        )
        self._opened = _Opened(open_shard, {}, None)
        self._opened.users.add(self)
        self._blobs: Sequence[Any] | None = None  # decoded once: each may be looked up

    def sizes(self) -> list[int]:
        """Return the bytes of each, as the catalogue's trailers of them say.

        Raises:
            FormatError: one is no trailer.
        """
        found = [decode_header(trailer.tobytes(), "trailer") for trailer in self._seals[0]]
        return [0 if header is None else header.archive_size for header in found]

    def kept(self) -> Shards:
        """Return them once more, to be released by themselves; a shard that either opens is open for both."""
        return self._again(self.catalogue.kept(), self._opened)

    def private(self) -> Shards:
        """Return private copies of them, each made when it is first needed."""
        source, apart, held = self.kept(), 0, 0

        def private(name: str) -> Archive:
            nonlocal apart, held
            shard = source[source.names.index(name)].kept()  # which the copy releases
            apart, held = apart + twins_nbytes(shard.index, len(shard.buffer)), held + len(shard.buffer)
            check_apart(apart, held, source.catalogue.path)
            return shard.private()

        return self._again(self.catalogue.private(), _Opened(private, self._opened.pins, source))

    def _again(self, catalogue: Archive, opened: _Opened) -> Shards:
        out = Shards.__new__(Shards)
        out.catalogue, out.names, out._seals, out._blobs = catalogue, self.names, self._seals, self._blobs
        out._opened = opened
        with opened.lock:
            opened.users.add(out)
        return out

    def __getitem__(self, file: int) -> Archive:
        """Return a shard; opens it if that was not done.

        Raises:
            SourceError: it is not there, or cannot be read. IntegrityError: it is not the one that the catalogue names.
        """
        opened = self._opened
        shard = opened.archives.get(file)
        if shard is None:
            with opened.lock:
                shard = opened.archives.get(file)
                if shard is None:
                    shard = opened.archives[file] = self._checked(file)
        return shard

    def _checked(self, file: int) -> Archive:
        trailers, digests = self._seals
        try:
            shard = self._opened.open(self.names[file])
        except SourceError as error:
            what = f"{error.message}; {self._whose(file)}"
            raise type(error)(what, path=error.path, errno=error.errno) from error
        h = shard.header
        if h.encode() != trailers[file].tobytes():
            what = f"is another archive than the one that the catalogue names: {self._whose(file)}"
        elif hashlib.sha256(shard.buffer[h.index_offset :][: h.index_size]).digest() != digests[file].tobytes():
            what = f"its index is not the one that the catalogue names: {self._whose(file)}"
        else:
            shard.pin(self._opened.pins.get(self.names[file], {}))
            return shard
        path = shard.path
        shard.release()
        raise IntegrityError(what, path=path)

    def proved(self) -> Iterator[tuple[str, Archive]]:
        """Yield those files, by name, that are the shards which the catalogue was written for; each is released."""
        for file, name in enumerate(self.names):
            with contextlib.suppress(RecordError):
                shard = self._checked(file)
                yield name, shard
                shard.release()

    def _whose(self, file: int) -> str:
        """Return in words whose shard a file is, and advice."""
        whose = f"it is shard {file + 1} of {len(self.names)} of {self.catalogue.path}"
        if self.catalogue.gone:
            return f"{whose}, which was replaced since it was opened; load it again"
        return f"{whose}; {COPY_AGAIN}"

    def blob(self, number: int) -> int:
        """Return the payload of the catalogue that its list of blobs has at a place.

        Raises:
            FormatError: it has no such item.
        """
        if self._blobs is None:
            ix = self.catalogue.index
            values = [
                a.value for a in attribute_entries(ix, ix.attributes, PayloadId) if a.key == BLOBS and not a.parent
            ]
            self._blobs = values[0] if values and isinstance(values[0], list | tuple) else ()
        if number >= len(self._blobs) or not isinstance(self._blobs[number], PayloadId) or self._blobs[number] == NONE:
            raise FormatError(f"the catalogue has no blob {number}", path=self.catalogue.path)
        return int(self._blobs[number])

    def opened(self) -> list[Archive]:
        """Return those that are open."""
        return list(self._opened.archives.values())

    def opened_by_name(self) -> list[tuple[str, Archive]]:
        """Return those that are open, with their names."""
        return [(self.names[file], shard) for file, shard in list(self._opened.archives.items())]

    def pins(self) -> dict[Any, Any]:
        """Return the pins of each shard that has any, by its name; also of those that are not open yet."""
        return {**self._opened.pins, **{name: pins for name, shard in self.opened_by_name() if (pins := shard.pins())}}

    def pin(self, pins: dict[Any, Any]) -> None:
        """Pin payloads of shards, given by their names, when these are opened."""
        with self._opened.lock:
            self._opened.pins = pins
            for name, shard in self.opened_by_name():
                shard.pin(pins.get(name, {}))

    def release(self) -> bool:
        """Let go of all, and close what no part holds; returns whether that released every mapping."""
        opened, released = self._opened, cast(Any, Released(self.catalogue.path))
        # Views of the catalogue's tables hold its mapping. What parts have open goes with the last, released or not.
        self._opened = self._seals = released
        return min([True if isinstance(opened, Released) else opened.left(self), self.catalogue.release()])


def _tile_one_axis(origin: list[list[int]], extent: list[list[int]], shape: tuple[int, ...]) -> bool | None:
    """Return True if boxes that differ along one axis alone tile a shape, None if they differ along several."""
    axis = -1
    for starts, sizes in zip(origin, extent, strict=True):
        for at, (start, size, limit) in enumerate(zip(starts, sizes, shape, strict=True)):
            if (start or size != limit) and at != axis:
                if axis >= 0:
                    return None
                axis = at
    if axis < 0:
        return len(origin) == 1
    end = 0
    for start, size in sorted((starts[axis], sizes[axis]) for starts, sizes in zip(origin, extent, strict=True)):
        if start != end or size < 1:
            return False
        end += size
    return end == shape[axis]


def _are_apart(origin: Array, extent: Array) -> bool:
    """Return True if no two boxes have an element in common."""
    ends = origin + extent
    return not any(
        ((origin[i] < ends[i + 1 :]) & (origin[i + 1 :] < ends[i])).all(axis=1).any() for i in range(len(origin))
    )


def tiles(origin: Array, extent: Array, shape: tuple[int, ...]) -> bool:
    """Return True if boxes lie inside a shape and cover every element of it once.

    Few boxes of many axes are compared in pairs, others by their corners. False, too, for boxes with more than 2^24
    corners: 2^20 boxes may differ along four axes.
    """
    rank = len(shape)
    if origin.shape[1] < rank or (origin.shape[1] > rank and (origin[:, rank:].any() or extent[:, rank:].any())):
        return False
    origin, extent = origin[:, :rank], extent[:, :rank]
    if len(origin) <= _FEW and (told := _tile_one_axis(origin.tolist(), extent.tolist(), shape)) is not None:
        return told
    limit = np.array(shape, np.int64)
    if (origin < 0).any() or (extent < 1).any() or (extent > limit).any() or (origin > limit - extent).any():
        return False
    moving = [axis for axis in range(rank) if (extent[:, axis] != limit[axis]).any()]
    if len(origin) << len(moving) > _MOST_CORNERS:
        return False
    if len(origin) < 1 << len(moving):
        return _are_apart(origin[:, moving], extent[:, moving]) and sum(map(prod, extent.tolist())) == prod(shape)
    # How often an element is covered changes along every axis only at corners. If those of all boxes, each with its
    # sign, add up to the corners of the shape, then the boxes cover what the shape does, as often.
    keys, signs = np.zeros(len(origin) + 1, np.int64), np.ones(len(origin) + 1, np.int64)
    signs[-1] = -1
    at = np.arange(len(keys))
    for axis in moving:
        low, high = np.append(origin[:, axis], 0), np.append(origin[:, axis] + extent[:, axis], limit[axis])
        known, code = np.unique(np.concatenate((low, high)), return_inverse=True)
        code = code.reshape(-1)
        keys = np.unique(keys, return_inverse=True)[1].reshape(-1) * len(known)  # no more of them than corners
        keys = np.concatenate((keys + code[: len(low)][at], keys + code[len(low) :][at]))
        signs, at = np.concatenate((signs, -signs)), np.concatenate((at, at))
    keys = np.unique(keys, return_inverse=True)[1].reshape(-1)
    return not np.bincount(keys, signs).any()
