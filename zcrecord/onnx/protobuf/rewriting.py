"""Small models in memory, whose tensors or metadata_props are changed or removed; all else stays byte for byte.

Models of any size are read by `scanner`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from zcrecord.errors import OnnxError
from zcrecord.onnx.names import ATTRIBUTE, FUNCTION, GRAPH, MODEL, NODE, TENSOR, TRAINING

from .reader import LEN, MAX_TEXT, VARINT, ProtobufReader, encode_field, read_pair
from .scanner import CHILDREN
from .tensors import RAW_DATA

_EXTERNAL_DATA, _DATA_LOCATION = 13 << 3 | LEN, 14 << 3 | VARINT  # of TensorProto
_INITIALIZER = 5 << 3 | LEN  # of GraphProto
_DOMAIN = 7 << 3 | LEN  # of NodeProto
_METADATA_PROPS = 14  # of ModelProto; a StringStringEntryProto has its key in field 1, its value in field 2
_EXTERNAL = b"\x70\x01"  # data_location = EXTERNAL
MOST_ENTRIES = 256  # of one tensor's external_data: where, and one for each operator that packs it


class ExternalTensor(NamedTuple):
    """A TensorProto with external data: its other fields, and its external_data as pairs."""

    rest: bytes
    entries: dict[str, str]

    def encode(self, entries: dict[str, str]) -> bytes:
        """Encode the TensorProto with other external_data."""
        return self.rest + encode_entries(entries)


# Returns the new TensorProto; None removes it. The second argument is "main" for an initializer of the main graph,
# "inner" for one of a graph in its nodes, "" for any other tensor.
Replacement = Callable[[ExternalTensor, str], bytes | None]


def encode_entries(entries: dict[str, str]) -> bytes:
    """Encode external_data as fields of a TensorProto."""
    pairs = (encode_field(1, key.encode()) + encode_field(2, value.encode()) for key, value in entries.items())
    return _EXTERNAL + b"".join(encode_field(_EXTERNAL_DATA >> 3, pair) for pair in pairs)


def rewrite_tensors(model: memoryview | ProtobufReader, replace: Replacement, *, inline: int | None = None) -> bytes:
    """Return a ModelProto whose tensors with external data are replaced by what `replace` returns.

    The model is bytes, or a reader of all of them; OnnxError if it is malformed. With `inline`, initializers that hold
    more bytes than that are passed to `replace`, too: their offset and length are those in `model`.
    """
    reader = model if isinstance(model, ProtobufReader) else ProtobufReader(model)
    rewritten = _rewritten(reader, reader.limit, MODEL, replace, 0, "main", inline)
    return bytes(reader.view[: reader.limit]) if rewritten is None else rewritten


def tensors_of(graph: memoryview) -> Iterator[ExternalTensor]:
    """Yield the initializers of a GraphProto; OnnxError unless it has only initializers with external data."""
    reader = ProtobufReader(graph)
    for _, tag, nbytes in reader.fields(reader.limit):
        tensor = _external(reader, reader.pos + nbytes) if tag == _INITIALIZER else None
        if tensor is None:
            raise OnnxError("a graph of initializers alone holds something else")
        yield tensor


def domains_of(model: memoryview) -> set[str]:
    """Return the domains of all operators in a ModelProto, at any depth."""
    domains: set[str] = set()
    reader = ProtobufReader(model)
    _add_domains(reader, reader.limit, MODEL, domains, 0)
    return domains


def _add_domains(reader: ProtobufReader, end: int, kind: str, domains: set[str], depth: int) -> None:
    domain = b""
    for _, tag, nbytes in reader.fields(end, depth):
        child = CHILDREN[kind].get(tag)
        if kind == NODE and tag == _DOMAIN:
            domain = reader.text(nbytes)
        elif child is not None and child.kind in CHILDREN:
            _add_domains(reader, reader.pos + nbytes, child.kind, domains, depth + 1)
    if kind == NODE:
        domains.add(domain.decode("utf-8", "replace"))


def _rewritten(
    reader: ProtobufReader, end: int, kind: str, replace: Replacement, depth: int, place: str, inline: int | None
) -> bytes | None:
    """Return the message of a `kind` that ends at an offset, with its tensors changed; None without a change."""
    if kind in (FUNCTION, TRAINING):
        place = ""
    elif kind == ATTRIBUTE and place:
        place = "inner"
    parts: list[Any] = []
    begin = copied_to = reader.pos
    for start, tag, nbytes in reader.fields(end, depth):
        if (child := CHILDREN[kind].get(tag)) is None:
            continue
        field_end = reader.pos + nbytes
        if child.kind == TENSOR:
            tensor_place = place if kind == GRAPH else ""
            tensor = _external(reader, field_end, inline if tensor_place else None)
            if tensor is None:
                continue
            changed = replace(tensor, tensor_place)
        elif (changed := _rewritten(reader, field_end, child.kind, replace, depth + 1, place, inline)) is None:
            continue
        parts.append(reader.view[copied_to:start])
        if changed is not None:
            parts.append(encode_field(tag >> 3, changed))
        copied_to = field_end
    return b"".join([*parts, reader.view[copied_to:end]]) if copied_to != begin else None


def _external(reader: ProtobufReader, end: int, inline: int | None = None) -> ExternalTensor | None:
    """Return a tensor whose values are external, or more than `inline` bytes in the message; None for any other."""
    others: list[Any] = []  # its other fields
    entries: dict[str, str] = {}
    copied_to = reader.pos
    for start, tag, nbytes in reader.fields(end):
        if inline is not None and tag == RAW_DATA << 3 | LEN and nbytes > inline:
            entries |= {"offset": str(reader.pos), "length": str(nbytes)}
            reader.pos += nbytes
        elif tag == _EXTERNAL_DATA:
            if len(entries) >= MOST_ENTRIES:
                raise reader.fail(f"a tensor has more than {MOST_ENTRIES} external_data keys")
            key, value = read_pair(reader, reader.pos + nbytes)
            entries[key] = value
        elif tag != _DATA_LOCATION:
            continue
        others.append(reader.view[copied_to:start])
        copied_to = reader.pos
    return ExternalTensor(b"".join([*others, reader.view[copied_to:end]]), entries) if entries else None


def read_properties(stream: io.RawIOBase | io.BufferedIOBase) -> dict[str, str]:
    """Return a model's metadata_props, each of 64 KiB at most; reads the model once, forward, and holds none of it."""
    reader = ProtobufReader(stream)
    sizes = (nbytes for _, tag, nbytes in reader.fields() if _is_pair(tag, nbytes))
    return dict(read_pair(reader, reader.offset + nbytes) for nbytes in sizes)


def without_properties(data: Any, keys: Collection[str]) -> tuple[bytes, list[tuple[str, str]]]:
    """Return a ModelProto without the metadata_props of these keys, and these pairs; copies all else byte for byte.

    A malformed pair stays, as `convert` took it.
    """
    removed: list[tuple[str, str]] = []
    parts, copied_to = [], 0
    reader = ProtobufReader(data)
    for start, tag, nbytes in reader.fields(reader.limit):
        if _is_pair(tag, nbytes):
            end = reader.pos + nbytes
            with contextlib.suppress(OnnxError):
                key, value = read_pair(reader, end)
                if key in keys:
                    removed.append((key, value))
                    parts.append(reader.view[copied_to:start])
                    copied_to = end
            reader.pos = end
    return b"".join([*parts, reader.view[copied_to : reader.limit]]), removed


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Encode metadata_props as fields that can be appended to a ModelProto."""
    pairs = ((key.encode(), value.encode()) for key, value in properties.items())
    return b"".join(encode_field(_METADATA_PROPS, encode_field(1, k) + encode_field(2, v)) for k, v in pairs)


def _is_pair(tag: int, nbytes: int) -> bool:
    return tag == _METADATA_PROPS << 3 | LEN and nbytes <= MAX_TEXT
