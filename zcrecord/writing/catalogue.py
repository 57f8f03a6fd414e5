"""The tables of a catalogue: one record over many archives. FORMAT.md has the convention.

The outline is header, index and trailer that the whole would have as one archive, index in front. The tables of pieces
say in which file each payload of that index lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.conventions import CATALOGUE_TYPE
from zcrecord.codec.digests import digest_of
from zcrecord.codec.entries import Entries, ModuleKind, PayloadId, change_values, encode
from zcrecord.codec.index import PAYLOAD, Array
from zcrecord.codec.layout import ALIGNMENT, HEADER_SIZE, NONE, front_header, plan_payloads
from zcrecord.storage.files import open_sink
from zcrecord.tensors.packed import StringTensor

from . import flatten
from .sharing import plan_sharing
from .writers import SaveReport, report_of, write_plan

__all__ = ["BLOBS", "WholeRecord", "WrittenShard", "catalogue_tree", "outline_of", "some_of", "write_catalogue"]

BLOBS = "blobs"  # the attribute whose items are the payloads that lie in the catalogue itself


class WrittenShard(NamedTuple):
    """A shard that was written: its file's name and size, its trailer, its index's SHA-256, its payloads' rows."""

    name: str
    nbytes: int
    trailer: bytes
    index_sha256: bytes
    payloads: Array


def some_of(entries: Entries, chosen: Sequence[int]) -> Entries:
    """Return the entries of some tensors, in the modules that they are in, which are mappings; without attributes."""
    kept = {0}
    for i in chosen:
        m = entries.parents[i]
        while m not in kept:
            kept.add(m)
            m = entries.modules[m].parent
    order = sorted(kept)
    new = {old: number for number, old in enumerate(order)} | {NONE: NONE}
    children: dict[int, list[tuple[int, int, int]]] = {}
    for m in order[1:]:
        children.setdefault(entries.modules[m].parent, []).append((entries.modules[m].place, 0, m))
    for i in chosen:
        children.setdefault(entries.parents[i], []).append((entries.places[i], 1, i))
    place = {(0, 0): 0}
    for found in children.values():
        place |= {(kind, number): at for at, (_, kind, number) in enumerate(sorted(found))}
    layouts = {number: at for at, number in enumerate(dict.fromkeys(entries.layout_ids[i] for i in chosen))}
    return Entries(
        names=[entries.names[i] for i in chosen],
        key_sizes=[entries.key_sizes[i] for i in chosen],
        parents=[new[entries.parents[i]] for i in chosen],
        places=[place[1, i] for i in chosen],
        payloads=[entries.payloads[i] for i in chosen],
        layout_ids=[layouts[entries.layout_ids[i]] for i in chosen],
        layouts=[entries.layouts[number] for number in layouts],
        modules=[
            entries.modules[m]._replace(
                parent=new[entries.modules[m].parent], place=place[0, m], kind=ModuleKind.MAPPING, type_name=""
            )
            for m in order
        ],
    )


class WholeRecord:
    """The whole that shards make up: its outline, the tables of pieces, and bytes that lie in no shard.

    Args:
        entries: of the whole, its payloads numbered shard by shard as each index numbers them; those of bytes among
            attributes and metadata, which may be bytes still, become blobs.
        shards: in that order.

    Attributes:
        outline: header, index and trailer.
        blobs: the bytes that lie in the catalogue.
        file, payload: the tables of pieces.
        report: of the whole, as if it were one archive.
    """

    def __init__(self, entries: Entries, shards: Sequence[WrittenShard], *, alignment: int, kind: int) -> None:
        self.blobs: list[bytes] = []
        sizes = [len(shard.payloads) for shard in shards]
        first = self._first_blob = sum(sizes)
        self._known: dict[bytes, PayloadId] = {}
        change_values(entries.attributes, self._blob)
        change_values(entries.metadata, self._blob)
        self.file = np.append(np.repeat(np.arange(len(shards)), sizes), np.full(len(self.blobs), NONE)).astype(
            np.uint32
        )
        numbers = [np.arange(n) for n in (*sizes, len(self.blobs))]
        self.payload = np.concatenate(numbers).astype(np.uint32)
        rows = np.concatenate([*(shard.payloads for shard in shards), np.zeros(len(self.blobs), PAYLOAD)])
        rows["nbytes"][first:] = [len(blob) for blob in self.blobs]
        rows["digest"][first:] = [digest_of(blob) if kind else 0 for blob in self.blobs]
        new = np.ones(len(rows), bool)  # not the very range of the payload before it
        new[1:] = (self.file[1:] != self.file[:-1]) | (rows["offset"][1:] != rows["offset"][:-1])
        new[first:] = True
        offsets, end, base = plan_payloads(rows["nbytes"][new], alignment)
        rows["offset"] = offsets[np.cumsum(new) - 1]
        entries.payload_rows, entries.digest_kind = rows, kind
        self.outline, size = outline_of(entries, alignment, base, end)
        self.report: SaveReport = report_of(entries, size)

    def _blob(self, value: Any) -> Any:
        if not isinstance(value, bytes | memoryview):
            return value
        data = bytes(value)
        if not data:
            return PayloadId(NONE)
        if data not in self._known:
            self._known[data] = PayloadId(self._first_blob + len(self.blobs))
            self.blobs.append(data)
        return self._known[data]


def outline_of(entries: Entries, alignment: int, base: int, end: int) -> tuple[bytes, int]:
    """Return the outline of a whole whose payloads take `end` bytes in one archive, and the size of that archive."""
    index = bytes(encode(entries))
    header = front_header(index, alignment, base, end)
    return header.encode() + index + header.encode(), header.archive_size


def catalogue_tree(whole: WholeRecord, shards: Sequence[WrittenShard]) -> dict[str, Any]:
    """Return the tables of a catalogue, as the tree of a record."""
    tree: dict[str, Any] = {
        "files": {
            "name": StringTensor.from_strings([shard.name for shard in shards]),
            "trailer": np.frombuffer(b"".join(shard.trailer for shard in shards), np.uint8).reshape(-1, HEADER_SIZE),
            "index_sha256": np.frombuffer(b"".join(shard.index_sha256 for shard in shards), np.uint8).reshape(-1, 32),
        },
        "file": whole.file,
        "payload": whole.payload,
        "outline": np.frombuffer(whole.outline, np.uint8),
    }
    if whole.blobs:
        tree[BLOBS] = whole.blobs
    return tree


def write_catalogue(tree: dict[str, Any], path: str, *, kind: int, durable: bool) -> SaveReport:
    """Write a catalogue, given as the tree of its tables, to a path; whole or not at all.

    Raises:
        SourceError: the file system reports an error.
    """
    flat = flatten.flatten(tree)
    flat.modules[0] = flat.modules[0]._replace(type_name=CATALOGUE_TYPE)
    with open_sink(path, durable=durable) as sink:
        return write_plan(sink, flat, plan_sharing(flat.values), alignment=ALIGNMENT, kind=kind)
