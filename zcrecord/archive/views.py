"""What an opened archive gives out: names, entries, and views of payloads. Copies no payload byte in mode "r".

Here is where a view's address comes from and what keeps it alive; opening and letting go are `reader`'s, rules
`verify`'s.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Literal

import numpy as np

from zcrecord import dtypes
from zcrecord.codec import verify
from zcrecord.codec.index import FORM, Index, TensorEntry
from zcrecord.codec.layout import NONE, Header
from zcrecord.errors import FormatError, IntegrityError, RecordError, SourceError, UnsupportedError
from zcrecord.storage.memory import Memory, Mode, aligned_empty, private_copy
from zcrecord.tensors.packed import PackedTensor, StringTensor

__all__ = ["Verify", "Views", "closed"]

Verify = Literal["touch", "index", "full"]  # of these `full` is left to `digest`

_MAPPED = 1 << 20  # bytes from which a private mapping is cheaper than a copy
_MAPPINGS = 32  # of one file at the most: each takes addresses for all of it, and on some systems a descriptor
_ndarray = np.ndarray  # found sooner than an attribute of numpy: a tenth of the time of a view
_FORM = struct.Struct("<IIBBB")  # dims, strides, dtype, bits, rank

_Layout = tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...] | None]  # shape, dtype, strides in bytes


def closed(path: str | None) -> UnsupportedError:
    """Return what is raised for a record that was closed before, or by another thread meanwhile."""
    return UnsupportedError("the record is closed; views taken before stay valid", path=path)


class Views:
    """The bytes and the index of an opened archive, as values."""

    __slots__ = (
        "_again", "_checked", "_mappings", "_memory", "_octets", "_own", "_pool", "_prepared", "_region", "_strings",
        "absolute", "buffer", "embedded", "header", "index", "mode", "offset", "original", "parent", "path", "recipe",
        "remote", "tied", "verified", "whole",
    )  # fmt: skip

    absolute: str | None
    buffer: memoryview
    embedded: Any
    header: Header
    index: Index
    mode: Mode
    offset: int
    original: Any
    parent: tuple[Any, list[int]] | None
    path: str | None
    recipe: Callable[[Any], tuple[Any, ...]] | None
    remote: Any
    tied: dict[int, tuple[str, ...]]
    verified: Verify
    whole: bool
    _again: dict[int, Any]
    _checked: set[int]
    _prepared: tuple[memoryview, list[_Layout | None], list[int]] | None
    _mappings: list[weakref.ref[Any]]
    _memory: Memory | None
    _octets: Any
    _own: dict[int, memoryview]
    _pool: Any
    _region: memoryview
    _strings: set[tuple[int, int]]

    def check_crc(self) -> None:
        """Raise IntegrityError unless the index is what was written."""
        h = self.header
        if zlib.crc32(self.buffer[h.index_offset : h.index_offset + h.index_size]) != h.index_crc:
            raise IntegrityError("index: its CRC does not match; the file is damaged, copy it again")

    def ensure(self, i: int) -> None:
        """Check tensor i unless that was done, at open or when it was touched before."""
        if self.verified != "touch" or i in self._checked:
            return
        try:
            verify.check_touched(self.index, self.header, i, self._pool)
        except RecordError as error:
            raise error.located(path=self.path) from None
        self._checked.add(i)

    def ensure_all(self) -> None:
        """Check the whole index, where only what was touched had been: modules, attributes and order included."""
        if self.verified != "touch":
            return
        try:
            self.check_crc()
            verify.check_index(self.index, self.header)
        except RecordError as error:
            raise error.located(path=self.path) from None
        self.verified = "index"

    def find(self, name: str) -> int:
        """Return the tensor with that full name, -1 if there is none; about log2(n) comparisons."""
        try:
            wanted = name.encode()
        except UnicodeEncodeError:
            return -1
        ix = self.index
        text, count = ix.text, len(ix.tensors)
        by_name, words = _integers(ix.by_name), _integers(ix.tensors)
        lo, hi = 0, count
        while lo < hi:
            mid = (lo + hi) >> 1
            i = by_name[mid]
            if i >= count:
                raise FormatError(f"by_name[{mid}] is {i}, of {count} tensors", path=self.path)
            start = words[12 * i]
            found = text[start : start + words[12 * i + 1]].tobytes()
            if found == wanted:
                self.ensure(i)
                return i
            if found < wanted:
                lo = mid + 1
            else:
                hi = mid
        return -1

    def row(self, i: int) -> TensorEntry:
        """Return the entry of tensor i, checked."""
        self.ensure(i)
        return self.index.tensor(i)

    def shape(self, row: TensorEntry) -> tuple[int, ...]:
        """Return the shape a row names."""
        start = row.dims
        return tuple(self.index.dims[start : start + row.rank].tolist())

    def strides(self, row: TensorEntry) -> tuple[int, ...] | None:
        """Return the strides a row names, in elements; None for C order."""
        start = row.strides
        return None if start == NONE else tuple(self.index.strides[start : start + row.rank].tolist())

    def payload(self, number: int) -> memoryview:
        """Return a payload's bytes; a read-only view. NONE gives an empty one."""
        if number == NONE:
            return self._region[:0]
        if self.remote is not None:
            self.bring([number])
        offset, nbytes, _ = self.index.payloads[number].item()
        if self.mode == "c":
            octets, at = self.home(number)
            return octets[at : at + nbytes].toreadonly()
        return self._region[offset : offset + nbytes]

    def bring(self, numbers: list[int] | None = None) -> None:
        """Have payloads (all by default) fetched, whose digests are checked; where they are local, they are there.

        Raises:
            SourceError: they cannot be had. IntegrityError: a digest does not match.
        """
        remote = self.remote
        if remote is None:
            return
        if numbers is None:
            self.ensure_all()
        ix = self.index
        rows = (ix.payloads if numbers is None else ix.payloads[numbers]).tolist()
        base, known = self.header.payload_offset, bool(ix.digest_kind)
        try:
            remote.bring([(base + offset, nbytes, digest if known else None) for offset, nbytes, digest in rows])
        except RecordError as error:
            at = None if error.offset is None else error.offset - base
            used = ix.payloads["offset"][np.minimum(ix.tensors["payload"], max(len(ix.payloads) - 1, 0))]
            user = [] if at is None else np.flatnonzero((used == at) & (ix.tensors["payload"] != NONE)).tolist()
            name = ix.name(user[0]) if user else None
            raise error.located(path=self.path, tensor=name) from error.__cause__

    def view(self, i: int) -> Any:
        """Return tensor i as an ndarray, PackedTensor or StringTensor over the archive's own bytes."""
        prepared = self._prepared
        if prepared is not None:
            octets, layouts, offsets = prepared
            if (layout := layouts[i]) is not None:
                shape, kind, strides = layout
                return _ndarray(shape, kind, octets, offsets[i], strides)
        row = self.row(i)
        number = row.payload
        layout = self._layout(row.dims, row.strides, row.dtype, row.bits, row.rank)
        if layout is None:
            return self._special(i, dtypes.by_code.get(row.dtype), number, self.shape(row))
        shape, kind, strides = layout
        if number == NONE:
            return np.frombuffer(b"" if self.mode == "r" else bytearray(), kind).reshape(shape)
        octets, start = self.home(number)
        return np.ndarray(shape, kind, octets, start + row.byte_offset, strides)

    def _layout(self, dims: int, strides: int, code: int, bits: int, rank: int) -> _Layout | None:
        """Return what numpy is to be told of a tensor with these entries in its row; None if it is no ndarray."""
        found = dtypes.by_code.get(code)
        kind = None if found is None else found.numpy  # of strings None
        if kind is None or bits < 8:
            return None
        ix = self.index
        shape = tuple(ix.dims[dims : dims + rank].tolist())
        if strides == NONE:
            return shape, kind, None
        return shape, kind, tuple((ix.strides[strides : strides + rank] * (bits >> 3)).tolist())

    def prepare_views(self) -> None:
        """Prepare for views of all tensors, each of which then takes a fraction of the time; 48 bytes for each.

        Does nothing where only what is touched is to be checked. Of a remote archive all payloads must be there.
        """
        if self._prepared is not None or self.verified == "touch":
            return
        octets, ix = self._octets, self.index
        rows = ix.tensors
        near = rows["payload"] != NONE
        if self.mode == "c":
            near &= self._at_home(rows["payload"])
        layouts = list(map(_Layouts(self._layout).__getitem__, rows.view(FORM)["form"].tolist()))
        for i in np.flatnonzero(~near).tolist():
            layouts[i] = None
        offsets = rows["byte_offset"].copy()
        offsets[near] += ix.payloads["offset"][rows["payload"][near]]
        self._prepared = octets, layouts, offsets.tolist()
        if self._memory is None:
            self._prepared = None  # another thread released the archive meanwhile

    def elements(self, i: int) -> np.ndarray[Any, Any]:
        """Return a strided tensor as opaque elements of its width; unlike a view, whatever its type."""
        row = self.row(i)
        item = row.bits >> 3
        strides = tuple(s * item for s in self.strides(row) or ())
        octets, start = self.home(row.payload)
        return np.ndarray(self.shape(row), np.dtype((np.void, item)), octets, start + row.byte_offset, strides)

    def _special(self, i: int, kind: dtypes.DType | None, number: int, shape: tuple[int, ...]) -> Any:
        name = self.index.name(i)
        data = np.frombuffer(self.payload(number), np.uint8)
        if kind is None:
            code = self.row(i).dtype
            raise UnsupportedError(
                f"dtype code {code} is not known; .raw(name) gives its bytes", path=self.path, tensor=name
            )
        start = 0 if number == NONE else int(self.index.payloads["offset"][number])
        if kind is dtypes.STRING and (start, prod(shape)) in self._strings:
            return StringTensor(data, shape, checked=True)
        try:
            if kind is not dtypes.STRING:
                if self.mode == "c" and number != NONE:
                    octets, at = self.home(number)
                    data = np.frombuffer(octets, np.uint8)[at : at + len(data)]
                return PackedTensor(data, kind, shape)
            checked = StringTensor(data, shape)
            self._strings.add((start, prod(shape)))
            return checked
        except FormatError as error:
            raise error.located(path=self.path, tensor=name) from None

    def views(self) -> Iterator[Any]:
        """Yield every tensor in saved order, at a fraction of the cost of a first lookup each."""
        self.ensure_all()
        self.bring()
        self.prepare_views()
        return map(self.view, range(len(self.index.tensors)))

    def names(self) -> list[str]:
        """Return every full name in saved order."""
        self.ensure_all()
        ix, count = self.index, len(self.index.tensors)
        if not count:
            return []
        starts = ix.tensors["name"]
        ends = starts.astype(np.int64) + ix.tensors["name_size"]
        order = ix.by_name
        if (starts[order[1:]] == ends[order[:-1]] + 1).all():  # as our writer lays them: one decode for all
            joined = str(ix.text[int(starts[order[0]]) : int(ends[order[-1]])], "utf-8").split("\0")
            out = [""] * count
            for i, name in zip(order.tolist(), joined, strict=True):
                out[i] = name
            return out
        text = ix.text
        return [str(text[a:b], "utf-8") for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def home(self, number: int) -> tuple[memoryview, int]:
        """Return the bytes in which a payload lies, and its offset in them.

        In mode "c" payloads of equal bytes, stored once, have each its memory: their tensors are not tied.
        """
        octets = self._octets  # first: after another thread's release the index says so
        if self.remote is not None:
            self.bring([number])
        offset, nbytes, _ = self.index.payloads[number].item()
        if self.mode == "c" and self.parent is not None:
            whole: Views = self.parent[0]
            return whole.home(self.parent[1][number])
        if self.mode == "r" or not self._is_twin(number):
            return octets, offset
        own = self._own.get(number)
        if own is None:
            own = self._own.setdefault(number, self._twin(number, offset, nbytes))
        return own, 0

    def _twin(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return memory of its own for a payload, as it was before any edit."""
        original = self.original
        if original is not None and nbytes >= _MAPPED and original.mapped:
            first = int(np.searchsorted(self.index.payloads["offset"], np.uint64(offset)))
            rank = number - first  # among its equals
            if rank not in self._again and 0 < rank <= _MAPPINGS:
                with contextlib.suppress(SourceError):  # replaced since: a copy, then
                    again = original.private()
                    self._again.setdefault(rank, again)
                    self._mappings += again._mappings
            if rank in self._again:
                octets: memoryview = self._again[rank]._octets
                return octets[offset : offset + nbytes]
        source: memoryview = self._region if original is None else original._region
        if nbytes >= _MAPPED:
            return private_copy(source[offset : offset + nbytes]).octets
        room = aligned_empty(nbytes)
        room[:] = source[offset : offset + nbytes]
        return room.data

    def _at_home(self, numbers: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which payloads lie where the index says, in mode "c"."""
        if self.parent is not None:
            return np.zeros(len(numbers), bool)
        offsets = self.index.payloads["offset"]
        first = np.ones(len(offsets) + 1, bool)
        first[1:-1] = offsets[1:] != offsets[:-1]
        at_home: np.ndarray[Any, np.dtype[np.bool_]] = first[np.minimum(numbers, len(offsets))]
        return at_home

    def _is_twin(self, number: int) -> bool:
        offsets = self.index.payloads["offset"]
        return bool(number and offsets[number - 1] == offsets[number])


class _Layouts(dict[bytes, Any]):
    """Layouts by the bytes of a row that tell them, each made once: many tensors have the same."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __missing__(self, form: bytes) -> Any:
        made = self[form] = self._make(*_FORM.unpack_from(form))
        return made


def _integers(column: np.ndarray[Any, Any]) -> memoryview:
    """Return a column's 32-bit numbers as plain integers, at any address; 5 times faster than rows of an array."""
    return memoryview(column.view(np.uint8).data).cast("I")
