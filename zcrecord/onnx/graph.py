"""From an archive back to the bytes of a ModelProto: the skeleton, each stub replaced by values or by where they lie.

Pure rewriting on the wire, with the scan that `convert` uses; `onnx` is not needed. The skeleton is taken for as
untrusted as any model: what it says of a tensor must be what the archive says.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.dtypes import DType
from zcrecord.errors import FormatError, UnsupportedError
from zcrecord.record import Record
from zcrecord.tensors import PackedTensor, StringTensor

from .convert import STUB_KEY
from .names import GRAPH_ATTRIBUTE
from .scanner import Scanner
from .schema import GRAPH, MODEL, Scope, Tensor, Tensors
from .values import RAW_DATA, STRING_DATA, Values
from .wire import LEN, Skeleton, Window, encode_field, encode_varint

__all__ = ["Initializer", "encode_reference", "model_parts", "skeleton_of"]

_COPIED = 1 << 12  # bytes; smaller values are copied into the message, larger ones become parts of their own
_KEY = STUB_KEY.decode()


class Initializer(NamedTuple):
    """A tensor met while the skeleton is rewritten: its number in the archive, its name in its graph.

    `graph` is "main" or "inner" for the initializer of a graph, "" for a tensor in an attribute or a sparse one.
    """

    number: int
    name: str
    graph: str
    dtype: DType
    value: Any  # ndarray, PackedTensor or StringTensor


def skeleton_of(record: Record) -> memoryview:
    """Return the skeleton of the model in a record, uncopied.

    Raises:
        UnsupportedError: the record was not made from an ONNX model.
    """
    found = record.attributes.get(GRAPH_ATTRIBUTE)
    if not isinstance(found, bytes | memoryview):
        raise UnsupportedError(
            f"no attribute '{GRAPH_ATTRIBUTE}': the archive holds tensors but no ONNX model; make one with onnx2zc",
            path=record.path,
        )
    return memoryview(found)


def model_parts(record: Record, refer: Callable[[Initializer], bytes | None] | None = None) -> list[Any]:
    """Return a ModelProto as bytes-like parts in order; large values are views of the record, not copies.

    `refer` may give the fields that stand for a tensor's values, as `encode_reference` does; None puts the values in.

    Example:
        >>> from pathlib import Path
        >>> from zcrecord import load_record
        >>> from zcrecord.onnx import convert
        >>> report = convert("model.onnx", "model.zcr")
        >>> b"".join(model_parts(load_record("model.zcr"))) == Path("model.onnx").read_bytes()
        True

    Raises:
        UnsupportedError: the record holds no model. OnnxError: its skeleton is malformed. FormatError: the skeleton
            and the archive disagree about a tensor.
    """
    skeleton = Skeleton()
    window = Window(io.BytesIO(skeleton_of(record)), skeleton)
    restore = _Restore(record, refer)
    Scanner(window, Values(window, _Refuse()), restore).scan()
    return skeleton.finish()


def encode_reference(location: str, offset: int, nbytes: int) -> bytes:
    """Return the fields that say a tensor's values lie in a file; `location` is relative to the model's folder."""
    pairs = (b"location", location.encode()), (b"offset", b"%d" % offset), (b"length", b"%d" % nbytes)
    entries = (encode_field(13, encode_field(1, key) + encode_field(2, value)) for key, value in pairs)
    return b"\x70\x01" + b"".join(entries)


class _Refuse:
    """Where values of a skeleton's tensors would go: it must have none."""

    def begin(self, _: int, /) -> None:
        raise FormatError(f"attribute '{GRAPH_ATTRIBUTE}': a tensor has values of its own; convert the model again")

    def write(self, _: Any, /) -> None:
        raise AssertionError

    def end(self) -> int:
        raise AssertionError


class _Restore(Tensors):
    """Puts values, or references to them, where the stubs are."""

    def __init__(self, record: Record, refer: Callable[[Initializer], bytes | None] | None) -> None:
        self._refer = refer
        self._path = record.path
        self._names = record.names
        self._tensors = _values(record)
        self._seen = bytearray(len(self._names))

    def whole(self, *_: Any, **__: Any) -> bytes:
        _Refuse().begin(0)
        return b""

    def stub(self, t: Tensor, skeleton: Skeleton) -> None:
        text = (t.entries or {}).get(_KEY, "")
        index = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1
        if not 0 <= index < len(self._names) or self._seen[index]:
            raise self._disagree(t, f"its stub says '{text}', not the number of one of {len(self._names)} tensors")
        self._seen[index] = 1
        t.index = index
        kind, value = self._tensors[index]
        where = ("main" if _is_main(t.scope) else "inner") if t.scope.kind is GRAPH else ""
        fields = None if self._refer is None else self._refer(Initializer(index, t.label, where, kind, value))
        if fields is not None:
            skeleton.tail += fields
        elif isinstance(value, StringTensor):
            for text_bytes in value.strings():
                skeleton.tail += encode_field(STRING_DATA, text_bytes)
        else:
            _put_raw(skeleton, raw_bytes(value))

    def finish(self, t: Tensor) -> None:
        kind, value = self._tensors[t.index]
        if t.data_type != kind.onnx or tuple(t.dims) != value.shape:
            what = f"data_type {t.data_type} and shape {t.dims}, the archive {kind.name} and {list(value.shape)}"
            raise self._disagree(t, f"the skeleton has {what}")

    def _disagree(self, t: Tensor, what: str) -> FormatError:
        return FormatError(f"attribute '{GRAPH_ATTRIBUTE}': {what}", path=self._path, tensor=t.label)


def _is_main(scope: Scope) -> bool:
    return scope.parent is not None and scope.parent.kind is MODEL


def _values(record: Record) -> list[tuple[DType, Any]]:
    return [(_kind(value), value) for value in record.values()]


def _kind(value: Any) -> DType:
    if isinstance(value, StringTensor):
        return dtypes.STRING
    return value.kind if isinstance(value, PackedTensor) else dtypes.from_numpy(value.dtype)


def raw_bytes(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a tensor's values as raw_data has them: a view where the tensor lies in C order."""
    if isinstance(value, PackedTensor):
        return value.packed
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _put_raw(skeleton: Skeleton, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    skeleton.tail += encode_varint(RAW_DATA << 3 | LEN) + encode_varint(len(data))
    if len(data) < _COPIED:
        skeleton.tail += data.data
    else:
        skeleton.insert(data.data)
