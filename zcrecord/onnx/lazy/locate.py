"""What a scan notes of each tensor: what it is, and where its values lie; and the way back to them.

Values are given out as an archive would have them: bools are 0 or 1, bits after the last packed element zero. Which
of them lie like that in a file, aligned, so that they need no copy, is decided here; names and the mapping that a
caller sees are `listing`'s, files `files`'s.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.layout import align_up
from zcrecord.dtypes import STRING, DType, by_onnx
from zcrecord.errors import RecordError, SourceError
from zcrecord.onnx.external_data import Reference, reference_of
from zcrecord.onnx.names import NamedTensor
from zcrecord.onnx.protobuf.scanner import Scanner, check_start
from zcrecord.onnx.protobuf.schema import MODEL, Scope, Tensor, Tensors
from zcrecord.onnx.protobuf.values import BOOL, FIELDS, RAW_DATA, Values
from zcrecord.storage.memory import aligned_empty

from .files import Bytes, Files, OpenFile
from .placed import PlacedWindow
from .places import Places

__all__ = ["Entry", "find_tensors", "is_aligned", "read"]

_NO_FIELD = ""
_EXTERNAL_DATA = "external_data"
_RAW_DATA = FIELDS[RAW_DATA]


class Entry(NamedTuple):
    """A tensor: what it is, and the field its values are in; where they lie as they are, or what they are made of."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    field: str
    offset: int = -1
    reference: Reference | None = None
    parts: tuple[tuple[int, int], ...] = ()  # of the model, from offset to offset; read again to decode them


def find_tensors(file: OpenFile) -> tuple[list[NamedTensor], list[Entry]]:
    """Return the tensors of a model, in order of appearance, as they are named and as they are read.

    Raises:
        OnnxError: not a valid model, or one that uses what is not supported. ExternalDataError, LimitError: the same
            of a tensor. SourceError: the file cannot be read.
    """
    window = PlacedWindow(file.read_at, file.nbytes)
    check_start(window)
    listed = _List(window)
    Scanner(window, listed.places, listed).scan()
    return listed.found, listed.entries


def read(files: Files, e: Entry, *, mmap: bool) -> Bytes:
    """Return the bytes of a tensor: a read-only view of its file where it can be and `mmap` allows, else a copy.

    Raises:
        OnnxError: they are not what shape and type say. ExternalDataError: their file may not be used, is not there,
            or is too short. SourceError: they cannot be read.
    """
    if not e.nbytes:
        return aligned_empty(0)
    return _stored(files, e, mmap) if e.offset >= 0 else _decoded(files, e)


def is_aligned(e: Entry) -> bool:
    """Whether a view of the file would lie at a multiple of the item size: a mapping starts at one of any."""
    return e.offset >= 0 and not e.offset % max(1, e.dtype.bits // 8)


def _unused(e: Entry) -> int:
    """Return how many bits of the last byte are no element's."""
    return -prod(e.shape) * e.dtype.bits % 8 if e.dtype.packed else 0


def _is_canonical(e: Entry, data: Bytes) -> bool:
    if e.dtype.onnx == BOOL:
        return int(data.max()) <= 1
    return not int(data[-1]) >> (8 - _unused(e))


def _stored(files: Files, e: Entry, mmap: bool) -> Bytes:
    """Return the bytes of a tensor that lie together in a file: a view of them, or a copy."""
    if mmap and is_aligned(e):
        data = files.mapped(e.reference, e.offset, e.nbytes)
        if data is not None and _is_canonical(e, data):
            return data
    data = files.read(e.reference, e.offset, e.nbytes)
    if e.dtype.onnx == BOOL:
        np.minimum(data, 1, out=data)
    elif unused := _unused(e):
        data[-1] &= 0xFF >> unused
    return data


class _List(Tensors):
    """Notes the tensors of a scan in order of appearance, as `convert` numbers them."""

    def __init__(self, window: PlacedWindow) -> None:
        self.places = Places(window)
        self.found: list[Any] = []
        self.entries: list[Any] = []
        self._window = window

    def whole(self, scope: Scope, field: int, place: int, offset: int, name: bytes, code: int, dims: list[int],
              data: memoryview) -> bytes:  # fmt: skip
        self.places.close_open()
        kind, shape, window = by_onnx[code], tuple(dims), self._window
        self.found.append(NamedTensor(scope, field, place, name, offset, kind, shape, 0))
        self.entries.append(Entry(kind, shape, len(data), _RAW_DATA, window.base + window.pos))
        return b""

    def start(self, t: Tensor) -> None:
        t.index = len(self.found)
        self.found.append(None)
        self.entries.append(None)

    def finish(self, t: Tensor) -> None:
        try:
            reference = reference_of(t) if t.external else None
            if reference is not None:
                self.places.note(t, reference.length)
            shape = self.places.finish(t)
        except RecordError as error:
            raise error.located(tensor=t.label or None, offset=t.offset) from error.__cause__
        kind = by_onnx[t.data_type]
        self.found[t.index] = NamedTensor(t.scope, t.field, t.place, t.name, t.offset, kind, shape, 0)
        self.entries[t.index] = _entry(t, kind, shape, reference)


def _entry(t: Tensor, kind: DType, shape: tuple[int, ...], reference: Reference | None) -> Entry:
    if reference is not None:
        return Entry(kind, shape, reference.length, _EXTERNAL_DATA, reference.offset, reference)
    field = FIELDS.get(t.source, _NO_FIELD)
    nbytes = t.expected()  # of strings, what the table of their ends takes
    if not nbytes:
        return Entry(kind, shape, 0, field)
    if kind is STRING:
        nbytes += align_up(t.nbytes, 8)
    offset, passed = t.run
    if passed == t.nbytes and not t.uncounted and kind is not STRING:  # empty strings have nothing that was passed
        return Entry(kind, shape, nbytes, field, offset)
    return Entry(kind, shape, nbytes, field, parts=tuple(t.parts))


class _Room:
    """Memory of a known size that decoded values go to; what does not fit is counted by who writes it."""

    def __init__(self, nbytes: int) -> None:
        self.octets = aligned_empty(nbytes)
        self.filled = 0

    def begin(self, _: int, /) -> None:
        pass

    def write(self, data: Any, /) -> None:
        new = np.frombuffer(data, np.uint8)[: len(self.octets) - self.filled]
        self.octets[self.filled : self.filled + len(new)] = new
        self.filled += len(new)

    def end(self) -> int:
        return 0


def _decoded(files: Files, e: Entry) -> Bytes:
    """Return the bytes of a tensor whose values have to be decoded: its message is read again."""
    window = PlacedWindow(files.read_model, max(end for _, end in e.parts))
    room = _Room(e.nbytes)
    values = Values(window, room)
    scanner = Scanner(window, values, Tensors())
    t = Tensor(Scope(MODEL, None, 0, 0), 0, 0, e.parts[0][0])
    for start, end in e.parts:
        window.move(start)
        window.keep()
        scanner.fields(t, end)
        values.settle(t)
    shape = values.finish(t)
    if (t.dtype, shape, room.filled) != (e.dtype, e.shape, e.nbytes):
        raise SourceError("was changed since it was scanned; scan it again", path=files.path)
    return room.octets
