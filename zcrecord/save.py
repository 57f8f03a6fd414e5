"""`save_record`: a nested record to one archive. What goes where is decided by `tree`, `sharing` and `writer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import tree
from .entries import AttributeEntry, Entries, PayloadId, list_type, value_type
from .errors import UnsupportedError
from .layout import ALIGNMENT, NONE
from .sharing import analyse
from .sink import open_sink
from .writer import SaveReport, digest_kind, write_front

__all__ = ["save_record"]


def save_record(
    record: Any,
    dest: Any,
    *,
    alignment: int = ALIGNMENT,
    digest: str | None = "xxh3",
    durable: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Write a record as one archive, whole or not at all; tensors in C order are written from their own memory.

    Args:
        record: nested dicts, lists, tuples and dataclasses of arrays and plain values; a flat `{name: array}`; or an
            object with `state_dict()`. Tied arrays are stored once and stay tied; a view stores only its own rows.
        dest: a path, or a binary file object; a pipe will do.
        alignment: of every payload in bytes, a power of two from 16 to 65536. Those of 1 MiB and more lie on 16384.
        digest: 'xxh3' for a checksum of each payload, and equal payloads stored once; 'none' for neither.
        durable: fsync file and folder, so that the archive survives power loss.
        metadata: of the file: names to None, bool, int, float, str, bytes, or lists of one of these.

    Raises:
        UnsupportedError: a value the format cannot hold. NameCollisionError: two tensors would share a name.
        LimitError: alignment, depth, rank or size out of bounds. SourceError: the file system refused.

    Example:
        >>> report = save_record({"w": np.ones((2, 3), np.float32), "steps": 5}, "model.zcr")
        >>> report.tensors, report.payload_bytes
        (1, 24)
    """
    kind = digest_kind(digest)
    flat = tree.flatten(record)
    placement = analyse(flat.values)
    flat.form_ids, flat.forms = placement.form_ids, placement.forms
    blobs = _Blobs(len(placement.sources))
    flat.attributes = [a._replace(value=blobs.take(a.value)) for a in flat.attributes]
    flat.metadata = _metadata(metadata or {}, blobs)

    def number(payloads: Any) -> Entries:
        flat.payloads = payloads[placement.source_ids] if flat.names else []
        for rows in (flat.attributes, flat.metadata):
            rows[:] = [a._replace(value=blobs.numbered(a.value, payloads)) for a in rows]
        return flat

    with open_sink(dest, durable=durable) as sink:
        sources = [*placement.sources, *blobs.sources]
        return write_front(sink, number, sources, alignment=alignment, kind=kind)


def _metadata(metadata: Mapping[str, Any], blobs: _Blobs) -> list[AttributeEntry]:
    out = []
    for key, value in metadata.items():
        known = list_type(value) if isinstance(value, list | tuple) else value_type(value)
        if not isinstance(key, str) or not key or "\0" in key or known is None:
            raise UnsupportedError(
                f"metadata {key!r}: names are non-empty strings, values plain ones or lists of one type"
            )
        out.append(AttributeEntry(key, NONE, 0, blobs.take(value)))
    return out


class _Blobs:
    """Bytes among attributes, as further sources behind the tensors'; equal objects are one."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._known: dict[bytes, int] = {}
        self.sources: list[Any] = []

    def take(self, value: Any) -> Any:
        """Return the value with bytes replaced by the number of their source (-1: empty)."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.take, value)) if any(isinstance(v, bytes) for v in value) else value
        if not isinstance(value, bytes):
            return value
        if not value:
            return PayloadId(-1)
        number = self._known.setdefault(value, self._first + len(self.sources))
        if number == self._first + len(self.sources):
            self.sources.append(np.frombuffer(value, np.uint8))
        return PayloadId(number)

    def numbered(self, value: Any, payloads: Any) -> Any:
        """Return the value with sources' numbers replaced by their payloads'."""
        if isinstance(value, list | tuple) and any(isinstance(v, PayloadId) for v in value):
            return type(value)(self.numbered(v, payloads) for v in value)
        return PayloadId(payloads[value]) if isinstance(value, PayloadId) else value
