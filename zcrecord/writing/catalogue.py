"""The tables of a catalogue, which describes one record over many archives; see CONVENTIONS.md.

The outline is header, index and trailer of the record as one archive, index in front. The tables of pieces give the
file of each payload and, where tensors are split, the box of each piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.conventions import CATALOGUE_TYPE
from zcrecord.codec.digests import digest_of
from zcrecord.codec.entries import Entries, ModuleKind, PayloadId, encode
from zcrecord.codec.index import PAYLOAD, Array
from zcrecord.codec.layout import ALIGNMENT, HEADER_SIZE, NONE, front_header, plan_payloads
from zcrecord.storage.sink import Sink
from zcrecord.tensors.packed import StringTensor

from . import flatten
from .sharing import plan_sharing
from .writers import SaveReport, report_of, write_plan

BLOBS = "blobs"  # the attribute with the payloads that lie in the catalogue itself


class WrittenShard(NamedTuple):
    """A shard that was written: its file's name and size, its trailer, its index's SHA-256, its payloads' rows."""

    name: str
    nbytes: int
    trailer: bytes
    index_sha256: bytes
    payloads: Array


def select_tensors(entries: Entries, chosen: Sequence[int]) -> Entries:
    """Return the entries of chosen tensors, by number, in their modules, which become mappings; without attributes."""
    ancestors = {0}
    for i in chosen:
        module = entries.parents[i]
        while module not in ancestors:
            ancestors.add(module)
            module = entries.modules[module].parent
    modules = {number: entries.modules[number] for number in sorted(ancestors)}
    module_ids = {old: new for new, old in enumerate(modules)} | {NONE: NONE}
    places = _places_among(entries, modules, chosen)
    layouts = {old: new for new, old in enumerate(dict.fromkeys(entries.layout_ids[i] for i in chosen))}
    mapping: dict[str, Any] = {"kind": ModuleKind.MAPPING, "type_name": ""}
    return Entries(
        names=[entries.names[i] for i in chosen],
        key_sizes=[entries.key_sizes[i] for i in chosen],
        parents=[module_ids[entries.parents[i]] for i in chosen],
        places=[places[True, i] for i in chosen],
        payloads=[entries.payloads[i] for i in chosen],
        layout_ids=[layouts[entries.layout_ids[i]] for i in chosen],
        layouts=[entries.layouts[old] for old in layouts],
        modules=[
            row._replace(parent=module_ids[row.parent], place=places[False, number], **mapping)
            for number, row in modules.items()
        ],
    )


def _places_among(entries: Entries, modules: Iterable[int], chosen: Sequence[int]) -> dict[tuple[bool, int], int]:
    """Return places without gaps, in the old order, by True for a tensor, False for a module, and the old number."""
    children: dict[int, list[tuple[int, bool, int]]] = {}  # by parent: old place, and the key of the result
    for number in modules:
        row = entries.modules[number]
        children.setdefault(row.parent, []).append((row.place, False, number))
    for i in chosen:
        children.setdefault(entries.parents[i], []).append((entries.places[i], True, i))
    places: dict[tuple[bool, int], int] = {}
    for siblings in children.values():
        places |= {(is_tensor, number): place for place, (_, is_tensor, number) in enumerate(sorted(siblings))}
    return places


class PieceColumns(NamedTuple):
    """The places of payloads in shards, as columns: by piece the file and its payload, and in a split tensor its box.

    `first` has by payload its first piece, and at the end their number; it and the boxes are None if nothing is split.
    """

    file: Array
    payload: Array
    first: Array | None = None
    origin: Array | None = None
    extent: Array | None = None


class WholeRecord:
    """The record of all shards: its `outline`, the columns of its `pieces`, and `blobs`, bytes that lie in no shard.

    Args:
        entries: of the record, payloads numbered as in `pieces`; bytes among attributes and metadata become blobs.
        shards: the files, in the order of their numbers.
        kind: of the payloads' digests in all shards; the outline has none where a tensor is split.
        pieces: None for every payload of all shards, numbered shard by shard.
    """

    def __init__(
        self,
        entries: Entries,
        shards: Sequence[WrittenShard],
        *,
        alignment: int,
        kind: int,
        pieces: PieceColumns | None = None,
    ) -> None:
        if pieces is None:
            sizes = [len(shard.payloads) for shard in shards]
            numbers = np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)])
            pieces = PieceColumns(np.repeat(np.arange(len(shards)), sizes), numbers)
        self._first_blob = len(pieces.file) if pieces.first is None else len(pieces.first) - 1
        self._blob_numbers: dict[bytes, int] = {}
        entries.change_values(self._blob_number)
        self.blobs = list(self._blob_numbers)
        self.pieces = self._with_blobs(pieces)
        kind = kind if pieces.first is None else 0
        rows, is_new_range = self._rows(pieces, shards, kind)
        offsets, end, base = plan_payloads(rows["nbytes"][is_new_range], alignment)
        rows["offset"] = offsets[np.cumsum(is_new_range) - 1]
        entries.payload_rows, entries.digest_kind = rows, kind
        self.outline, size = outline_of(entries, alignment, base, end)
        self.report: SaveReport = report_of(entries, size)

    def _blob_number(self, value: Any) -> Any:
        """Return the payload number of bytes, NONE of empty ones; any other value as it is."""
        if not isinstance(value, bytes | memoryview):
            return value
        octets = bytes(value)
        new = self._first_blob + len(self._blob_numbers)
        return PayloadId(self._blob_numbers.setdefault(octets, new) if octets else NONE)

    def _with_blobs(self, pieces: PieceColumns) -> PieceColumns:
        """Return the pieces, then one piece for each blob: a payload of the catalogue, without a box."""
        count = len(self.blobs)
        file = np.append(pieces.file, np.full(count, NONE)).astype(np.uint32)
        payload = np.append(pieces.payload, np.arange(count)).astype(np.uint32)
        if pieces.first is None or pieces.origin is None or pieces.extent is None:
            return PieceColumns(file, payload)
        first = np.append(pieces.first, pieces.first[-1] + np.arange(1, count + 1)).astype(np.uint64)
        zero = np.zeros((count, pieces.origin.shape[1]), np.uint64)
        origin, extent = (np.concatenate((column, zero)).astype(np.uint64) for column in (pieces.origin, pieces.extent))
        return PieceColumns(file, payload, first, origin, extent)

    def _rows(self, pieces: PieceColumns, shards: Sequence[WrittenShard], kind: int) -> tuple[Array, Array]:
        """Return the rows of all payloads, without offsets, and False for each that repeats the range before it."""
        starts = np.cumsum([0, *(len(shard.payloads) for shard in shards)])
        shard_rows = np.concatenate([np.zeros(0, PAYLOAD), *(shard.payloads for shard in shards)])
        piece_rows = shard_rows[starts[pieces.file.astype(np.int64)] + pieces.payload.astype(np.int64)]
        first = np.arange(len(piece_rows)) if pieces.first is None else pieces.first[:-1].astype(np.int64)
        rows = np.zeros(len(first) + len(self.blobs), PAYLOAD)
        is_new_range = np.ones(len(rows), bool)
        if len(first):
            ends = np.append(first[1:], len(piece_rows))
            rows["nbytes"][: len(first)] = np.add.reduceat(piece_rows["nbytes"], first)
            rows["digest"][: len(first)] = piece_rows["digest"][first] if kind else 0
            file, offset, is_whole = pieces.file[first], piece_rows["offset"][first], ends - first == 1
            repeats = (file[1:] == file[:-1]) & (offset[1:] == offset[:-1]) & is_whole[1:] & is_whole[:-1]
            is_new_range[1 : len(first)] = ~repeats
        rows["nbytes"][len(first) :] = [len(blob) for blob in self.blobs]
        rows["digest"][len(first) :] = [digest_of(blob) if kind else 0 for blob in self.blobs]
        return rows, is_new_range


def outline_of(entries: Entries, alignment: int, base: int, end: int) -> tuple[bytes, int]:
    """Return the outline of a record as one archive, and its size; `end` is that of payloads, from the first one."""
    index = bytes(encode(entries))
    header = front_header(index, alignment, base, end)
    return header.encode() + index + header.encode(), header.archive_size


def catalogue_tree(whole: WholeRecord, shards: Sequence[WrittenShard]) -> dict[str, Any]:
    """Return the tables of a catalogue as the tree of a record, which CONVENTIONS.md describes."""
    tree: dict[str, Any] = {
        "files": {
            "name": StringTensor.from_strings([shard.name for shard in shards]),
            "trailer": np.frombuffer(b"".join(shard.trailer for shard in shards), np.uint8).reshape(-1, HEADER_SIZE),
            "index_sha256": np.frombuffer(b"".join(shard.index_sha256 for shard in shards), np.uint8).reshape(-1, 32),
        },
        "file": whole.pieces.file,
        "payload": whole.pieces.payload,
        "outline": np.frombuffer(whole.outline, np.uint8),
    }
    if whole.pieces.first is not None:
        tree |= {"first": whole.pieces.first, "origin": whole.pieces.origin, "extent": whole.pieces.extent}
    if whole.blobs:
        tree[BLOBS] = whole.blobs
    return tree


def write_catalogue(tree: dict[str, Any], sink: Sink, *, kind: int, type_name: str = CATALOGUE_TYPE) -> SaveReport:
    """Write a catalogue, or an archive of references, from the tree of its tables, with digests of this kind."""
    flat = flatten.flatten(tree)
    flat.modules[0] = flat.modules[0]._replace(type_name=type_name)
    return write_plan(sink, flat, plan_sharing(flat.values), alignment=ALIGNMENT, kind=kind)
