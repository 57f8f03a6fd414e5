"""A model's own key-value pairs, the metadata_props of its ModelProto: read without anything else, taken out, encoded.

Which pairs say what is left to others. A tensor's external_data are pairs of the same kind.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any

from zcrecord.errors import OnnxError

from .reader import LEN, MAX_TEXT, OPEN_END, VARINT, Binary, ProtobufReader, Skeleton, encode_field, encode_varint

__all__ = ["encode_properties", "read_pair", "read_properties", "without_properties"]

_METADATA_PROPS = 14  # of ModelProto; a StringStringEntryProto has its key in field 1, its value in field 2


def read_properties(stream: Binary) -> dict[str, str]:
    """Return a model's metadata_props but for those of 64 KiB and more; reads it once, forward, and holds none of it.

    Example:
        >>> read_properties(io.BytesIO(encode_properties({"author": "me"})))
        {'author': 'me'}

    Raises:
        OnnxError: it is malformed. SourceError: it cannot be read.
    """
    window = ProtobufReader(stream, Skeleton())
    window.drop(0)
    return dict(_pass(window, None))


def without_properties(data: Any, keys: Collection[str]) -> tuple[bytes, list[tuple[str, str]]]:
    """Return a ModelProto without the metadata_props of these keys, and those pairs; copies all else byte for byte.

    A pair that is malformed in itself has none of the keys, and stays: what `convert` took is given back.

    Raises:
        OnnxError: the model is malformed around its pairs.
    """
    kept = Skeleton()
    window = ProtobufReader(io.BytesIO(data), kept)
    taken = _pass(window, keys)
    window.finish()
    return b"".join(kept.finish()), taken


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return metadata_props as fields of a ModelProto; they may be appended to one."""
    pairs = ((key.encode(), value.encode()) for key, value in properties.items())
    return b"".join(encode_field(_METADATA_PROPS, encode_field(1, k) + encode_field(2, v)) for k, v in pairs)


def _pass(window: ProtobufReader, drop: Collection[str] | None) -> list[tuple[str, str]]:
    """Pass a whole model and return its pairs; with `drop` those alone, which do not get into the window's skeleton."""
    found: list[tuple[str, str]] = []
    while not window.at_end():
        start, tag, value = window.header(OPEN_END)
        if tag != _METADATA_PROPS << 3 | LEN or value > MAX_TEXT:
            if tag & 7 != VARINT:
                window.skip(tag, value, OPEN_END)
            continue
        if drop is not None:
            window.drop(start)
        if not window.hold(value):
            raise window.fail("the stream ends inside metadata_props")
        if drop is None:
            found.append(read_pair(window, window.base + window.pos + value))
            continue
        raw = bytes(window.view[window.pos : window.pos + value])
        pair = _pass_pair(window, value)
        if pair is not None and pair[0] in drop:
            found.append(pair)
        else:
            window.skeleton.tail += encode_varint(tag) + encode_varint(value) + raw
        window.keep()
    return found


def _pass_pair(window: ProtobufReader, nbytes: int) -> tuple[str, str] | None:
    """Pass a pair that the window holds and return it, None if it is malformed."""
    end = window.pos + nbytes
    try:
        pair = read_pair(window, window.base + end)
    except OnnxError:
        pair = None
    window.pos = end
    return pair


def read_pair(window: ProtobufReader, end: int) -> tuple[str, str]:
    """Pass a StringStringEntryProto that ends at this offset of the stream, and return its key and its value."""
    texts = {1: b"", 2: b""}
    while window.base + window.pos < end:
        _, tag, value = window.header(end)
        if tag in (0x0A, 0x12):
            texts[tag >> 3] = window.text(value)
        elif tag & 7 != VARINT:
            window.skip(tag, value, end)
    return texts[1].decode("utf-8", "surrogateescape"), texts[2].decode("utf-8", "surrogateescape")
