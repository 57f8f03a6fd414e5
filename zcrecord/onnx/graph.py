"""From an archive back to the bytes of a ModelProto: the skeleton, each stub replaced by values or by a reference.

Rewrites on the wire, with the scan of `convert`, without `onnx`. The skeleton is as untrusted as any model: skeleton
and archive must agree on every tensor's type and shape. A stub's number is the tensor's position when the archive was
written; the tensor's name decides, since a record that is saved again may have another order.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.private_copy import check_apart
from zcrecord.codec.entries import PayloadId
from zcrecord.dtypes import DType
from zcrecord.errors import Advice, FormatError, LimitError, TensorNotFoundError, UnsupportedError, printable
from zcrecord.onnx.protobuf.reader import LEN, MAX_LENGTH, ProtobufReader, Skeleton, encode_field, encode_varint
from zcrecord.onnx.protobuf.rewriting import encode_entries
from zcrecord.onnx.protobuf.scanner import STUB_KEY, Scanner, TensorSink
from zcrecord.onnx.protobuf.tensors import RAW_DATA, STRING_DATA, TensorMessage, TensorReader
from zcrecord.record.load import record_of
from zcrecord.record.record import Record
from zcrecord.storage.sink import Sink
from zcrecord.tensors.packed import PackedTensor, StringTensor

from .names import GRAPH, GRAPH_ATTRIBUTE, NamedTensor, full_names, graph_around

MOST_MAPPED = 20_000  # weights in files, each a mapping of its own, of which Linux allows 65,530
INLINE = 127  # bytes; up to here shape inference reads values, and it cannot read external data
_COPIED = 1 << 12  # bytes; smaller values are copied into the message, larger ones become parts of their own
_SMALL = 1 << 8  # bytes; larger values are read while the model is written; fields of smaller ones take as much memory
_JOINED = 1 << 18  # bytes that are written together
_KEY, _MOST_DIGITS = STUB_KEY.decode(), 11  # of the number in a stub
STAY_OUT = Advice("save the record again with np.ascontiguousarray of its arrays, so that they can stay out")
_OWN_VALUES = "a tensor has values of its own; convert the model again"
# ONNX Runtime takes these only from the model itself.
_INSIDE = {kind for kind in dtypes.DTYPES if kind is dtypes.STRING or kind.name.startswith("complex")}


class OpenedModel(NamedTuple):
    """A model in an archive: the whole record, the name of the model's module, that module as a record."""

    record: Record
    module: str
    part: Record


def opened_model(source: Any, module: str | None, trusted_keys: Sequence[Any] | None = None) -> OpenedModel:
    """Open a model in an archive: a path, that of a folder with one archive, a bytes-like or a Record.

    `module` is the name of the model's module; None stands for the record itself. `trusted_keys` are those of
    `load_record`. The caller closes the record, unless it is `source`.

    Raises:
        UnsupportedError: there is no model, or several and no `module`. TensorNotFoundError: there is no such module.
    """
    if isinstance(source, str | os.PathLike) and os.path.isdir(source):
        from zcrecord.storage.folders import archive_in  # here, because most sources are files

        source = archive_in(source)
    record = record_of(source, trusted_keys)
    modules = models_of(record.archive)
    path = record.archive.path

    def choice() -> str:
        return f"its models are in modules: {', '.join(map(printable, modules))}"

    if not module and modules and "" not in modules:
        raise UnsupportedError(choice(), path=path, advice=Advice("name one by {}", "module"))
    try:
        model = OpenedModel(record, module or "", record.module(module) if module else record)
    except TensorNotFoundError as error:
        if not any(modules):
            raise
        raise TensorNotFoundError(module or "", path=path, why=f"no module has this name; {choice()}") from error
    skeleton_of(model.part)
    return model


def models_of(archive: Archive) -> list[str]:
    """Return the names of the modules that an archive has ONNX models in, "" for the record itself."""
    archive.ensure_all()
    ix = archive.index
    attributes = unflatten.attribute_entries(ix, ix.attributes, PayloadId)
    graphs = [a for a in attributes if a.key == GRAPH_ATTRIBUTE and isinstance(a.value, PayloadId)]
    return [ix.text_of(ix.modules[a.parent]) for a in graphs]


class Initializer(NamedTuple):
    """A tensor of the skeleton: its number in the archive, its name in its graph.

    `graph` is "main" for an initializer of the model's graph, "inner" for one of a graph in a node of that, "apart" for
    one in a function or in training_info; likewise for the value of a Constant node, of which ONNX Runtime makes an
    initializer. It is "" for a tensor in another attribute or a sparse one.
    """

    number: int
    name: str
    in_graph: bool  # False for a tensor in an attribute or a sparse one, whose `name` does not identify it
    graph: str
    dtype: DType
    value: Any  # ndarray, PackedTensor or StringTensor

    @property
    def inside(self) -> bool:
        """True if its values must be in the model: ONNX Runtime does not take them from external data."""
        return not self.graph or self.dtype in _INSIDE or self.value.nbytes <= INLINE

    @property
    def outside(self) -> bool:
        """True if every reader takes its values from external data; `onnx.load` looks for none in functions."""
        return not self.inside and self.graph != "apart"


@dataclass(frozen=True, slots=True)
class DeferredValues:
    """Part of a model that is read while it is written: its size, and a function that yields its pieces."""

    nbytes: int
    pieces: Callable[[], Iterable[Any]]

    def __len__(self) -> int:
        return self.nbytes


def skeleton_of(record: Record) -> memoryview:
    """Return the skeleton of the model in a record, uncopied.

    Raises:
        UnsupportedError: the record was not made from an ONNX model.
    """
    skeleton = record.attributes.get(GRAPH_ATTRIBUTE)
    if not isinstance(skeleton, bytes | memoryview):
        fault = f"no attribute '{GRAPH_ATTRIBUTE}': the archive holds tensors but no ONNX model; make one with onnx2zc"
        raise UnsupportedError(fault, path=record.archive.path)
    return memoryview(skeleton)


def restore(
    record: Record, place: Callable[[Initializer], Any] | None = None, *, skeleton: Any = None
) -> _RestoringSink:
    """Return a record's model, as the attributes `parts` and `tensors`; large values are views, not copies.

    Args:
        place: called with each tensor, returns the replacement of its values: None to keep them, bytes for fields as
            `encode_reference` makes them, or an object with a length, which becomes a part: raw_data's bytes, or the
            string_data fields of strings. May be called again for a tensor; then the last answer counts.
        skeleton: used in the place of the record's own, such as one without some of its metadata_props.

    Raises:
        UnsupportedError: the record holds no model. OnnxError: its skeleton is malformed. FormatError: skeleton and
            archive disagree about a tensor. LimitError: copies of strided tensors and strings would take far more than
            the bytes that they share.
    """
    data: Any = skeleton_of(record) if skeleton is None else skeleton
    values, path = [(_dtype(value), value) for value in record.values()], record.archive.path
    if copied := sum(value.nbytes for _, value in values if not in_c_order(value)):
        check_apart(copied, record.archive.stored_nbytes(), path)
    model = _restore(data, _RestoringSink(values, path, place))
    record_names = record.names
    names = full_names(model.named, sum(map(len, record_names)))
    if names != [record_names[tensor.number] for tensor in model.tensors]:  # saved again in another order
        model = _restore(data, _RestoringSink(values, path, place, _numbers(names, record_names, path)))
    model.check()
    return model


def filled(skeleton: Any, tensors: Sequence[tuple[DType, Any]], place: Callable[[Initializer], Any]) -> list[Any]:
    """Return the parts of a ModelProto: a skeleton whose stubs number these tensors, each replaced by `place`.

    `tensors` are types and values, any objects with a shape and a size. `place` is that of `restore`, and never returns
    None.
    """
    return _restore(skeleton, _RestoringSink(tensors, None, place)).parts


def size_of(parts: Sequence[Any], advice: Advice, path: str | None = None) -> int:
    """Return the bytes of a model; LimitError, with this advice, if it is larger than protobuf allows."""
    nbytes = sum(map(len, parts))
    if nbytes > MAX_LENGTH:
        fault = f"{nbytes} bytes in one model, and protobuf holds at most {MAX_LENGTH}"
        raise LimitError(fault, path=path, advice=advice)
    return nbytes


def _numbers(names: list[str], record_names: Sequence[str], path: str | None) -> list[int]:
    """Return the numbers of the model's tensors in the record; FormatError if one is missing."""
    numbers = {name: number for number, name in enumerate(record_names)}
    for name in names:
        if name not in numbers:
            fault = "the model has a tensor of this name, the archive does not; save the record with all it had"
            raise FormatError(f"attribute '{GRAPH_ATTRIBUTE}': {fault}", path=path, tensor=name)
    return [numbers[name] for name in names]


def _restore(data: Any, sink: _RestoringSink) -> _RestoringSink:
    skeleton = Skeleton()
    Scanner(ProtobufReader(io.BytesIO(data), skeleton), sink).scan()
    sink.parts = skeleton.finish()
    return sink


def values_or_deferred(nbytes: int, pieces: Callable[[], Iterable[Any]]) -> bytes | DeferredValues:
    """Return raw_data for the `place` of `restore`: small values encoded now, larger ones read by `write_parts`."""
    if nbytes > _SMALL:
        return DeferredValues(nbytes, pieces)
    return encode_field(RAW_DATA, b"".join(map(bytes, pieces())))


def write_parts(parts: Sequence[Any], sink: Sink, report: Callable[[int], None] = lambda _: None) -> None:
    """Write a model, small pieces joined; calls `report` with the bytes written so far."""
    sink.reserve(sum(map(len, parts)))
    start, pending = sink.position, bytearray()

    def write(data: Any) -> None:
        sink.write(data)
        report(sink.position - start)

    for part in parts:
        for piece in part.pieces() if isinstance(part, DeferredValues) else (part,):
            is_large = len(piece) >= _JOINED
            if not is_large:
                pending.extend(piece)  # not +=, which an ndarray takes for arithmetic
            if is_large or len(pending) >= _JOINED:
                write(pending)
                pending = bytearray()
            if is_large:
                write(piece)
    write(pending)


def encode_reference(location: str, offset: int, nbytes: int) -> bytes:
    """Encode external_data of a tensor: a file's path relative to the model's folder, offset and size there."""
    return encode_entries({"location": location, "offset": str(offset), "length": str(nbytes)})


class _RestoringSink(TensorSink):
    """Replaces stubs by values, or by the replacement that `place` returns.

    A stub has the number of its tensor, unless `numbers` has those of all tensors, in the model's order.

    Attributes:
        parts: the ModelProto, bytes-like parts in order.
        tensors: its tensors, in the model's order.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[DType, Any]],
        path: str | None,
        place: Callable[[Initializer], Any] | None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.parts: list[Any] = []
        self.tensors: list[Initializer] = []
        self._values, self._path, self._place, self._numbers = tensors, path, place, numbers
        self._has_number = bytearray(len(tensors))  # 1 for each number that a stub had

    def add_whole(self, *_: Any) -> bytes:
        raise self._error(None, _OWN_VALUES)

    def begin(self, t: TensorMessage, _: int) -> None:
        raise self._error(t.label, _OWN_VALUES)

    def locate(self, t: TensorMessage, *_: int) -> bool:
        raise self._error(t.label, _OWN_VALUES)

    def stub(self, t: TensorMessage, skeleton: Skeleton) -> None:
        """Put a tensor's values, or their replacement, in the place of its stub."""
        number = self._numbers[t.index] if self._numbers is not None else self._number(t)
        kind, value = self._values[number]
        tensor = Initializer(number, t.label, t.scope.kind is GRAPH, graph_around(t.scope), kind, value)
        self.tensors.append(tensor)
        replacement = None if self._place is None else self._place(tensor)
        if isinstance(replacement, bytes):
            skeleton.tail += replacement
        elif kind is not dtypes.STRING:
            data = raw_bytes(value).data if replacement is None else replacement
            skeleton.tail += encode_varint(RAW_DATA << 3 | LEN) + encode_varint(len(data))
            if isinstance(data, memoryview) and len(data) < _COPIED:
                skeleton.tail += data
            else:
                skeleton.insert(data)
        elif replacement is not None:
            skeleton.insert(replacement)
        else:
            for text in value.strings():
                skeleton.tail += encode_field(STRING_DATA, text)

    def _number(self, t: TensorMessage) -> int:
        """Return the number in a stub; FormatError if it is none of a tensor, or was in another stub."""
        text = (t.entries or {}).get(_KEY, "")
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else -1
        if not 0 <= number < len(self._values) or self._has_number[number]:
            fault = f"its stub says '{text}', not the number of one of {len(self._values)} tensors"
            raise self._error(t.label, fault)
        self._has_number[number] = 1
        return number

    def finish(self, t: TensorMessage, _tensors: TensorReader) -> None:
        kind = t.dtype
        if kind is None:
            raise self._error(t.label, f"its data_type {t.data_type} is not known here; upgrade zcrecord")
        self.named[t.index] = NamedTensor(t.scope, t.field, t.place, t.name, t.offset, kind, tuple(t.dims), 0)

    def check(self) -> None:
        """Raise FormatError unless skeleton and archive agree on every tensor's type and shape."""
        for stored, tensor in zip(self.tensors, self.named, strict=True):
            if tensor.dtype is not stored.dtype or tensor.shape != stored.value.shape:
                fault = f"the skeleton has data_type {tensor.dtype.onnx} and shape {list(tensor.shape)}"
                fault += f", the archive {stored.dtype.name} and {list(stored.value.shape)}"
                raise self._error(stored.name, fault)

    def _error(self, label: str | None, fault: str) -> FormatError:
        return FormatError(f"attribute '{GRAPH_ATTRIBUTE}': {fault}", path=self._path, tensor=label)


def _dtype(value: Any) -> DType:
    if isinstance(value, StringTensor):
        return dtypes.STRING
    return value.kind if isinstance(value, PackedTensor) else dtypes.from_numpy(value.dtype)


def in_c_order(value: Any) -> bool:
    """Return True for packed tensors, and arrays in C order: their bytes are those of raw_data."""
    return isinstance(value, PackedTensor) or (isinstance(value, np.ndarray) and value.flags.c_contiguous)


def raw_bytes(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a tensor's values as raw_data has them: a view if the tensor lies in C order."""
    if isinstance(value, PackedTensor):
        return value.packed
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
