"""The key-value pairs of a model, metadata_props of its ModelProto: read alone, removed, encoded."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Mapping
from typing import Any

from zcrecord.errors import OnnxError

from .reader import LEN, MAX_TEXT, ProtobufReader, encode_field, read_pair

_METADATA_PROPS = 14  # of ModelProto; a StringStringEntryProto has its key in field 1, its value in field 2


def read_properties(stream: io.RawIOBase | io.BufferedIOBase) -> dict[str, str]:
    """Return a model's metadata_props of less than 64 KiB; reads it once, forward, and holds none of it."""
    reader = ProtobufReader(stream)
    return dict(
        read_pair(reader, reader.offset + nbytes) for _, tag, nbytes in reader.fields() if _is_pair(tag, nbytes)
    )


def without_properties(data: Any, keys: Collection[str]) -> tuple[bytes, list[tuple[str, str]]]:
    """Return a ModelProto without the metadata_props of these keys, and these pairs; copies all else byte for byte.

    A malformed pair stays, as `convert` took it.
    """
    pairs: list[tuple[str, str]] = []
    parts, done = [], 0
    reader = ProtobufReader(data)
    for start, tag, nbytes in reader.fields(reader.limit):
        if _is_pair(tag, nbytes):
            end = reader.pos + nbytes
            with contextlib.suppress(OnnxError):
                pair = read_pair(reader, end)
                if pair[0] in keys:
                    pairs.append(pair)
                    parts.append(reader.view[done:start])
                    done = end
            reader.pos = end
    return b"".join([*parts, reader.view[done : reader.limit]]), pairs


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Encode metadata_props as fields that can be appended to a ModelProto."""
    pairs = ((key.encode(), value.encode()) for key, value in properties.items())
    return b"".join(encode_field(_METADATA_PROPS, encode_field(1, k) + encode_field(2, v)) for k, v in pairs)


def _is_pair(tag: int, nbytes: int) -> bool:
    return tag == _METADATA_PROPS << 3 | LEN and nbytes <= MAX_TEXT
