"""A model's own key-value pairs, the metadata_props of its ModelProto: read without anything else, taken out, encoded.

The meaning of keys is left to others.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any

from zcrecord.errors import OnnxError

from .reader import LEN, MAX_TEXT, OPEN_END, VARINT, ProtobufReader, Skeleton, encode_field, encode_varint, read_pair

__all__ = ["encode_properties", "read_properties", "without_properties"]

_METADATA_PROPS = 14  # of ModelProto; a StringStringEntryProto has its key in field 1, its value in field 2


def read_properties(stream: io.RawIOBase | io.BufferedIOBase) -> dict[str, str]:
    """Return a model's metadata_props but for those of 64 KiB and more; reads it once, forward, and holds none of it.

    Example:
        >>> read_properties(io.BytesIO(encode_properties({"author": "me"})))
        {'author': 'me'}

    Raises:
        OnnxError: it is malformed. SourceError: it cannot be read.
    """
    return dict(_pass(ProtobufReader(stream)))


def without_properties(data: Any, keys: Collection[str]) -> tuple[bytes, list[tuple[str, str]]]:
    """Return a ModelProto without the metadata_props of these keys, and those pairs; copies all else byte for byte.

    A pair that is malformed in itself has none of the keys, and stays, as `convert` took it.

    Raises:
        OnnxError: the model is malformed around its pairs.
    """
    kept = Skeleton()
    reader = ProtobufReader(io.BytesIO(data), kept)
    taken = _pass(reader, keys)
    reader.finish()
    return b"".join(kept.finish()), taken


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return metadata_props as fields of a ModelProto; they may be appended to one."""
    pairs = ((key.encode(), value.encode()) for key, value in properties.items())
    return b"".join(encode_field(_METADATA_PROPS, encode_field(1, k) + encode_field(2, v)) for k, v in pairs)


def _pass(reader: ProtobufReader, keys: Collection[str] = ()) -> list[tuple[str, str]]:
    """Pass a whole model and return its pairs; if the reader keeps it, only those of these keys, which are left out."""
    found: list[tuple[str, str]] = []
    while not reader.at_end():
        start, tag, value = reader.header(OPEN_END)
        if tag != _METADATA_PROPS << 3 | LEN or value > MAX_TEXT:
            if tag & 7 != VARINT:
                reader.skip(tag, value, OPEN_END)
            continue
        reader.drop(start)
        if not reader.hold(value):
            raise reader.fail("the stream ends inside metadata_props")
        if reader.skeleton is None:
            found.append(read_pair(reader, reader.base + reader.pos + value))
            continue
        raw = bytes(reader.view[reader.pos : reader.pos + value])
        pair = _pass_pair(reader, value)
        if pair is not None and pair[0] in keys:
            found.append(pair)
        else:
            reader.skeleton.tail += encode_varint(tag) + encode_varint(value) + raw
        reader.keep()
    return found


def _pass_pair(reader: ProtobufReader, nbytes: int) -> tuple[str, str] | None:
    """Pass a pair that the reader holds and return it, None if it is malformed."""
    end = reader.pos + nbytes
    try:
        pair = read_pair(reader, reader.base + end)
    except OnnxError:
        pair = None
    reader.pos = end
    return pair
