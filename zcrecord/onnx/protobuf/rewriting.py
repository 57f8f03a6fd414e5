"""Tensors of a small model in memory, taken out of it or given other external data; all else stays byte for byte.

For models whose weights are elsewhere already. Models of any size are read by `scanner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from zcrecord.errors import OnnxError
from zcrecord.onnx.names import ATTRIBUTE, FUNCTION, GRAPH, MODEL, NODE, TENSOR, TRAINING

from .reader import DAMAGED, FIXED32, FIXED64, LEN, MAX_LENGTH, MAX_NESTING, MOST_TAG, VARINT, encode_field
from .scanner import CHILDREN

__all__ = ["ExternalTensor", "domains_of", "encode_entries", "rewrite", "tensors_of"]

_NAME, _EXTERNAL_DATA, _DATA_LOCATION, _INITIALIZER = 8, 13, 14, 5  # of TensorProto, the last of GraphProto
_DOMAIN = 7 << 3 | LEN  # of NodeProto
_EXTERNAL = b"\x70\x01"  # data_location = EXTERNAL
MOST_ENTRIES = 256  # of one tensor's external_data: where, and one for each operator that packs it
_SIZES = {FIXED32: 4, FIXED64: 8}


class ExternalTensor(NamedTuple):
    """A TensorProto with external data: its other fields, and its external_data as pairs."""

    rest: bytes
    entries: dict[str, str]

    def encode(self, entries: dict[str, str]) -> bytes:
        """Return the TensorProto with other external_data."""
        return self.rest + encode_entries(entries)


# Given "main" or "inner" for the initializer of the main graph or of one in a node of it, "" for any other tensor.
Change = Callable[[ExternalTensor, str], bytes | None]


def encode_entries(entries: dict[str, str]) -> bytes:
    """Return the fields of a TensorProto that say its values are external data."""
    pairs = (encode_field(1, key.encode()) + encode_field(2, value.encode()) for key, value in entries.items())
    return _EXTERNAL + b"".join(encode_field(_EXTERNAL_DATA, pair) for pair in pairs)


def rewrite(model: memoryview, change: Change) -> bytes:
    """Return a ModelProto with each TensorProto that has external data replaced by what `change` returns.

    `change` is also given the place of the tensor; it leaves the tensor out by returning None. What protobuf's own
    parsers might read in another way is refused, so they find no other tensors with external data.

    Raises:
        OnnxError: it is malformed.
    """
    out = _rewritten(model, MODEL, change, 0, "main")
    return bytes(model) if out is None else out


def tensors_of(graph: memoryview) -> Iterator[ExternalTensor]:
    """Yield the initializers of a GraphProto that holds nothing but initializers with external data.

    Raises:
        OnnxError: it is malformed, or holds something else.
    """
    for tag, _, body, end in _fields(graph):
        found = _external(graph[body:end]) if tag == _INITIALIZER << 3 | LEN else None
        if found is None:
            raise OnnxError("a graph of initializers alone holds something else")
        yield found


def domains_of(model: memoryview) -> set[str]:
    """Return the domains of all operators that a ModelProto uses, at any depth.

    Raises:
        OnnxError: it is malformed.
    """
    found: set[str] = set()
    _add_domains(model, MODEL, found, 0)
    return found


def _add_domains(data: memoryview, kind: str, found: set[str], depth: int) -> None:
    if depth > MAX_NESTING:
        raise OnnxError(f"more than {MAX_NESTING} nested messages")
    children = CHILDREN[kind]
    domain = b""
    for tag, _, body, end in _fields(data):
        child = children.get(tag)
        if kind == NODE and tag == _DOMAIN:
            domain = bytes(data[body:end])
        elif child is not None and child.kind in CHILDREN:
            _add_domains(data[body:end], child.kind, found, depth + 1)
    if kind == NODE:
        found.add(domain.decode("utf-8", "replace"))


def _rewritten(data: memoryview, kind: str, change: Change, depth: int, place: str) -> bytes | None:
    """Return a message with its tensors changed; None if nothing in it is. `place` is that of a graph in it."""
    if kind in (FUNCTION, TRAINING):
        place = ""
    elif kind == ATTRIBUTE and place:
        place = "inner"
    if depth > MAX_NESTING:
        raise OnnxError(f"more than {MAX_NESTING} nested messages")
    children = CHILDREN[kind]
    parts: list[Any] = []
    done = 0
    for tag, start, body, end in _fields(data):
        child = children.get(tag)
        if child is None:
            continue
        if child.kind == TENSOR:
            found = _external(data[body:end])
            if found is None:
                continue
            new = change(found, place if kind == GRAPH else "")
        elif (new := _rewritten(data[body:end], child.kind, change, depth + 1, place)) is None:
            continue
        parts.append(data[done:start])
        if new is not None:
            parts.append(encode_field(tag >> 3, new))
        done = end
    return b"".join([*parts, data[done:]]) if done else None


def _external(tensor: memoryview) -> ExternalTensor | None:
    """Return a TensorProto taken apart; None if it has no external data."""
    rest: list[Any] = []
    entries: dict[str, str] = {}
    for tag, start, body, end in _fields(tensor):
        if tag == _EXTERNAL_DATA << 3 | LEN:
            if len(entries) >= MOST_ENTRIES:
                raise OnnxError(f"a tensor has more than {MOST_ENTRIES} external_data keys; {DAMAGED}")
            pair = {t >> 3: bytes(tensor[body:end][b:e]) for t, _, b, e in _fields(tensor[body:end])}
            entries[pair.get(1, b"").decode("utf-8", "replace")] = pair.get(2, b"").decode("utf-8", "replace")
        elif tag >> 3 != _DATA_LOCATION:
            rest.append(tensor[start:end])
    return ExternalTensor(b"".join(rest), entries) if entries else None


def _fields(data: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Yield tag, start, start of the value and end of each field of a message."""
    at, size = 0, len(data)
    while at < size:
        start = at
        tag, at = _varint(data, at)
        wire, long = tag & 7, at - start > MOST_TAG or tag >> 32  # protobuf cuts off what exceeds 32 bits
        body = at
        if wire == VARINT:
            _, at = _varint(data, at)
        elif wire == LEN:
            nbytes, body = _varint(data, at)
            long = long or body - at > MOST_TAG or nbytes > MAX_LENGTH
            at = body + nbytes
        else:
            at += _SIZES.get(wire, size + 1)
        if at > size or long or not tag >> 3:
            raise OnnxError(f"byte {start} of a message: no field that ends inside it; {DAMAGED}")
        yield tag, start, body, at


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise OnnxError(f"byte {at} of a message: a varint that does not end; {DAMAGED}")
