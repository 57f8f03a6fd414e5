"""Finds where a model's tensors lie in its files, by a scan that skips their values, and reads those values.

Values are those that an archive would have: bools are 0 or 1, bits after the last packed element zero. Values that lie
like that in a file, aligned, need no copy. The number of varints in a run, and their range, are checked when they are
read. Names are left to `mapping`.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.layout import align_up
from zcrecord.dtypes import STRING, DType, by_onnx
from zcrecord.errors import SourceError
from zcrecord.onnx.external_data import Bytes, ExternalReference, ModelFolder, OpenFile, check_inside, reference_of
from zcrecord.onnx.names import MODEL, NamedTensor, Scope
from zcrecord.onnx.protobuf.reader import WINDOW, ProtobufReader, Skeleton
from zcrecord.onnx.protobuf.scanner import Scanner, TensorSink, check_start, stub
from zcrecord.onnx.protobuf.tensors import BOOL, FIELDS, TensorMessage, TensorReader, ValueSink
from zcrecord.storage.files import open_source, read_error
from zcrecord.storage.memory import aligned_empty

_MAPPED = 256  # files of external data that views may keep mapped: in Python each takes a descriptor
STEP = 1 << 12  # bytes; read first after a move, and passed by reading rather than by moving


def open_model(path: str) -> OpenFile:
    """Open a model's file; SourceError if it is missing, not a regular file, or unreadable."""
    fault = "not a regular file, and only values in one can be read on demand; convert it instead"
    mode = stat.S_IFREG
    with contextlib.suppress(OSError):  # `open_source` raises it with its reason, as for a folder
        mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # before it is opened: a pipe would wait for its writer
        raise SourceError(fault, path=path)
    stream, nbytes = open_source(path)
    with stream:
        if nbytes is None:
            raise SourceError(fault, path=path)
        try:
            file = OpenFile(os.dup(stream.fileno()), os.path.realpath(path))
        except OSError as error:
            raise read_error(error, path) from error
        if hasattr(os, "posix_fadvise"):  # not to be read from end to end
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_NORMAL)
    return file


class ModelFiles:
    """A model's own file and those of its external data, opened and checked when they are first needed.

    A reference of None stands for the model's own file. Threads share it without a lock.

    Attributes:
        mappings: the mappings of files that are alive.
    """

    def __init__(self, model: OpenFile, folder: ModelFolder) -> None:
        self._model = model
        self._folder = folder
        self._located: dict[str, str] = {}
        self.mappings: weakref.WeakSet[Any] = weakref.WeakSet()
        self._mapped: weakref.WeakValueDictionary[str, Bytes] = weakref.WeakValueDictionary()

    def path_of(self, reference: ExternalReference | None) -> str:
        """Return the path of a reference's file, links followed; does not open it."""
        if reference is None:
            return self._model.path
        path = self._located.get(reference.location)
        if path is None:
            path = self._located[reference.location] = self._folder.path_of(reference.location)
        return path

    def mapped(self, reference: ExternalReference | None, offset: int, nbytes: int) -> Bytes | None:
        """Return a read-only view of a range of a reference's file; None if views keep too many files mapped."""
        if reference is None:
            return self._model.octets(self.mappings)[offset : offset + nbytes]
        octets = self._mapped.get(reference.location)
        if octets is None:
            if len(self.mappings) >= _MAPPED:
                return None
            octets = self._folder.file_of(reference).octets(self.mappings)
            self._mapped[reference.location] = octets
        check_inside(reference, len(octets))
        return octets[offset : offset + nbytes]

    def file_of(self, reference: ExternalReference | None) -> OpenFile:
        """Return the open file of a reference."""
        return self._model if reference is None else self._folder.file_of(reference)

    def forget(self) -> None:
        """Release all mappings: views alone keep them."""
        self._model.forget()
        self._folder.forget()


def release(mappings: weakref.WeakSet[Any]) -> bool:
    """Unmap each mapping that no view uses; return True if no mapping is left."""
    are_closed = True
    for mapping in list(mappings):
        try:
            mapping.close()
        except BufferError:  # a view lives
            are_closed = False
    return are_closed


class LocatedTensor(NamedTuple):
    """A tensor's type and shape, and the place of its values: of their bytes in a file, or of messages to decode."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    field: str
    offset: int = -1
    reference: ExternalReference | None = None
    parts: tuple[tuple[int, int], ...] = ()  # of the model, from offset to offset; read again to decode them


def find_tensors(file: OpenFile, skeleton: Skeleton | None = None) -> tuple[list[NamedTensor], list[LocatedTensor]]:
    """Return the tensors of a model, in order of appearance, as they are named and as they are read.

    With a `skeleton` everything but their values goes there, each tensor with a stub that has its number.
    """
    reader = _RandomAccessReader(file.read_at, file.nbytes, skeleton)
    check_start(reader)
    sink = _LocatingSink(reader)
    Scanner(reader, sink).scan()
    return sink.named, sink.located


def read(files: ModelFiles, tensor: LocatedTensor, *, mmap: bool) -> Bytes:
    """Return a tensor's bytes: a read-only view of its file if possible and `mmap` allows it, else a copy."""
    if not tensor.nbytes:
        return aligned_empty(0)
    return _read_stored(files, tensor, mmap) if tensor.offset >= 0 else _decode(files, tensor)


def is_aligned(tensor: LocatedTensor) -> bool:
    """Return True if the tensor lies in a file at a multiple of its item size."""
    return tensor.offset >= 0 and not tensor.offset % max(1, tensor.dtype.bits // 8)


def is_as_stored(files: ModelFiles, tensor: LocatedTensor) -> bool:
    """Return True if the tensor's bytes lie together in a file and are canonical; reads no more than it must."""
    if tensor.offset < 0:
        return False
    checked = tensor.nbytes if tensor.dtype.onnx == BOOL else 1 if _padding_bits(tensor) else 0  # bytes at the end
    if not checked:
        return True
    data = files.file_of(tensor.reference).read(tensor.offset + tensor.nbytes - checked, checked)
    return _is_canonical(tensor, data)


def _padding_bits(tensor: LocatedTensor) -> int:
    """Return the number of bits after the last element of a packed tensor."""
    return -prod(tensor.shape) * tensor.dtype.bits % 8 if tensor.dtype.packed else 0


def _is_canonical(tensor: LocatedTensor, data: Bytes) -> bool:
    """Return True if bools are 0 or 1, or padding bits 0; `data` are all bytes of bools, the last one at least."""
    if tensor.dtype.onnx == BOOL:
        return int(data.max()) <= 1
    return not int(data[-1]) >> (8 - _padding_bits(tensor))


def _read_stored(files: ModelFiles, tensor: LocatedTensor, mmap: bool) -> Bytes:
    if mmap and is_aligned(tensor):
        data = files.mapped(tensor.reference, tensor.offset, tensor.nbytes)
        if data is not None and _is_canonical(tensor, data):
            return data
    data = files.file_of(tensor.reference).read(tensor.offset, tensor.nbytes)
    if tensor.dtype.onnx == BOOL:
        np.minimum(data, 1, out=data)
    elif unused := _padding_bits(tensor):
        data[-1] &= 0xFF >> unused
    return data


class _RandomAccessReader(ProtobufReader):
    """A reader of the first `nbytes` of a file by position, which does not read large fields that it passes.

    After a move it reads STEP bytes, then twice as much each time: so headers between large values cost a page each,
    and a graph takes few reads.
    """

    __slots__ = ("_nbytes", "_read_at", "_step")

    def __init__(
        self, read_at: Callable[[memoryview, int], int], nbytes: int, skeleton: Skeleton | None = None
    ) -> None:
        super().__init__(io.BytesIO(), skeleton)  # never read: `read` is overridden
        self._read_at = read_at
        self._nbytes = nbytes
        self._step = STEP

    def read(self, buffer: memoryview) -> int:
        offset = self.base + self.limit
        step, self._step = self._step, min(2 * self._step, WINDOW)
        return self._read_at(buffer[: min(step, self._nbytes - offset)], offset) if offset < self._nbytes else 0

    def advance(self, nbytes: int) -> None:
        """Pass bytes; reads none of them if they end more than STEP after the buffer, and no skeleton keeps them."""
        if nbytes - (self.limit - self.pos) <= STEP or self.mark >= 0:
            super().advance(nbytes)
            return
        end = self.base + self.pos + nbytes
        if end > self._nbytes:
            raise self.fail(f"the file ends {end - self._nbytes} bytes early")
        self.move(end)

    def move(self, offset: int) -> None:
        """Go to an offset of the file."""
        self.base, self.pos, self.limit, self._eof = offset, 0, 0, False
        self._step = STEP


class _LocatingSink(TensorSink):
    """Records tensors and the places of their values, in the order in which `convert` has them."""

    def __init__(self, reader: ProtobufReader) -> None:
        super().__init__()
        self.located: list[Any] = []
        self._reader = reader
        self._runs: dict[int, tuple[int, int]] = {}  # number of a tensor -> offset and bytes of its last run

    def add_whole(self, scope: Scope, field: int, place: int, offset: int, name: bytes, code: int, dims: list[int],
                  data: memoryview) -> bytes:  # fmt: skip
        kind, shape, reader = by_onnx[code], tuple(dims), self._reader
        self.named.append(NamedTensor(scope, field, place, name, offset, kind, shape, 0))
        self.located.append(LocatedTensor(kind, shape, len(data), "raw_data", reader.base + reader.pos))
        return b"" if reader.skeleton is None else stub(len(self.located) - 1)

    def locate(self, t: TensorMessage, offset: int, nbytes: int) -> bool:
        if t.data_type:  # without one they may turn out to be bools, which have to be looked at
            self._runs[t.index] = offset, nbytes
        return True

    def start(self, t: TensorMessage) -> None:
        super().start(t)
        self.located.append(None)

    def finish(self, t: TensorMessage, tensors: TensorReader) -> None:
        reference = reference_of(t) if t.external else None
        if reference is not None:
            tensors.count(t, reference.length)
        shape = tensors.finish(t)
        kind = by_onnx[t.data_type]
        self.named[t.index] = NamedTensor(t.scope, t.field, t.place, t.name, t.offset, kind, shape, 0)
        self.located[t.index] = _located(t, kind, shape, reference, self._runs.pop(t.index, (0, 0)))


def _located(
    t: TensorMessage, kind: DType, shape: tuple[int, ...], reference: ExternalReference | None, run: tuple[int, int]
) -> LocatedTensor:
    """Return the place of a finished tensor's values; `run` is the offset and size of the last run of them."""
    if reference is not None:
        return LocatedTensor(kind, shape, reference.length, "external_data", reference.offset, reference)
    values, field = t.values, FIELDS.get(t.values.field, "")
    nbytes = t.expected()  # of strings, those of the table of their ends
    if not nbytes:
        return LocatedTensor(kind, shape, 0, field)
    run_offset, run_nbytes = run
    if kind is STRING:
        nbytes += align_up(values.nbytes, 8)
    elif run_nbytes == values.nbytes and not values.unread:  # the run is all, stored bytes
        return LocatedTensor(kind, shape, nbytes, field, run_offset)
    return LocatedTensor(kind, shape, nbytes, field, parts=tuple(t.parts))


@dataclass(slots=True)
class _MemorySink(ValueSink):
    """Memory of a known size for decoded values; the reader counts those that do not fit."""

    octets: Bytes
    filled: int = 0

    def write(self, data: Any) -> None:
        fitting = np.frombuffer(data, np.uint8)[: len(self.octets) - self.filled]
        self.octets[self.filled : self.filled + len(fitting)] = fitting
        self.filled += len(fitting)


def _decode(files: ModelFiles, tensor: LocatedTensor) -> Bytes:
    """Read a tensor's messages again, and return its decoded values; SourceError if the model was changed since."""
    model = files.file_of(None)
    reader = _RandomAccessReader(model.read_at, max(end for _, end in tensor.parts))
    memory = _MemorySink(aligned_empty(tensor.nbytes))
    tensors = TensorReader(reader, memory)
    message = TensorMessage(Scope(MODEL, None, 0, 0), 0, 0, tensor.parts[0][0])
    for start, end in tensor.parts:
        reader.move(start)
        tensors.read(message, end)
    shape = tensors.finish(message)
    if (message.dtype, shape, memory.filled) != (tensor.dtype, tensor.shape, tensor.nbytes):
        raise SourceError("was changed since it was scanned; scan it again", path=model.path)
    return memory.octets
