"""Catalogues with tensors that are split into boxes over shards, as the ranks of a job save them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from zcrecord.codec.index import decode
from zcrecord.codec.layout import HEADER_SIZE, NONE, align_up, front_header
from zcrecord.storage.files import open_sink
from zcrecord.writing.catalogue import write_catalogue

Box = tuple[slice, ...]
_Piece = tuple[int, Any, list[int], list[int]]  # its shard, its values, origin and extent
_Shard = tuple[str, bytes, bytes, list[int]]  # its name, trailer, index's SHA-256, and the number of each payload


def boxes_along(axis: int, parts: int, shape: Sequence[int]) -> list[Box]:
    """Return the boxes that cut a shape into so many parts along an axis, as even as can be."""
    cuts = np.linspace(0, shape[axis], parts + 1).astype(int).tolist()
    return [(*(slice(None),) * axis, slice(a, b)) for a, b in itertools.pairwise(cuts)]


def save_split(
    path: Path, tree: Any, splits: Mapping[str, Sequence[Box]], *, forged: Mapping[str, Any] | None = None, **saved: Any
) -> None:
    """Save a record as a catalogue, and in each shard one box of those tensors that are split.

    The others lie in a shard of their own, bytes of attributes in the catalogue. `forged` replaces tables.
    """
    zcrecord.save_record(tree, path, digest="none", durable=False, **saved)
    whole = zcrecord.load_record(path).archive
    users = {whole.row(i).payload: (name, whole.shape(whole.row(i))) for i, name in enumerate(whole.names())}
    count = max(map(len, splits.values()), default=0)
    rank = max((len(shape) for _, shape in users.values()), default=0)
    boxes = {whole.row(whole.find(name)).payload: found for name, found in splits.items()}
    blobs: list[bytes] = []
    pieces: list[list[_Piece]] = []
    for number in range(len(whole.index.payloads)):
        if number in boxes:
            pieces.append(_split(whole.view(whole.find(users[number][0])), boxes[number], rank))
        elif number in users:
            pieces.append([(count, np.frombuffer(whole.payload(number), np.uint8), [0] * rank, [0] * rank)])
        else:
            pieces.append([(NONE, len(blobs), [0] * rank, [0] * rank)])
            blobs.append(bytes(whole.payload(number)))
    flat = [piece for found in pieces for piece in found]
    shards = [_save_shard(path, flat, file, count + 1, saved.get("metadata")) for file in range(count + 1)]
    payload = [value if file == NONE else shards[file][3].pop(0) for file, value, _, _ in flat]
    tables = {
        "files.name": np.array([shard[0] for shard in shards]),
        "files.trailer": np.array([list(shard[1]) for shard in shards], np.uint8),
        "files.index_sha256": np.array([list(shard[2]) for shard in shards], np.uint8),
        "file": np.array([piece[0] for piece in flat], np.uint32),
        "payload": np.array(payload, np.uint32),
        "first": np.cumsum([0, *map(len, pieces)]).astype(np.uint64),
        "origin": np.array([piece[2] for piece in flat], np.uint64).reshape(-1, rank),
        "extent": np.array([piece[3] for piece in flat], np.uint64).reshape(-1, rank),
        "outline": outline_of(path),
    } | dict(forged or {})
    files = {name.split(".")[1]: tables.pop(name) for name in list(tables) if name.startswith("files.")}
    tree = {"files": files, **tables, **({"blobs": blobs} if blobs else {})}
    with open_sink(path, durable=False) as sink:
        write_catalogue(tree, sink, kind=1)


def outline_of(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the table of header, index and trailer of an archive that was saved with the index in front."""
    found = zcrecord.load_record(path).archive
    front = bytes(found.buffer[: HEADER_SIZE + found.header.index_size])
    return np.frombuffer(front + found.header.encode(), np.uint8)


def _split(value: Any, boxes: Sequence[Box], rank: int) -> list[_Piece]:
    out: list[_Piece] = []
    for number, box in enumerate(boxes):
        part = value[box]
        origin = [s.indices(n)[0] for s, n in zip(box, value.shape, strict=False)]
        pads = [0] * (rank - value.ndim)
        origin += [0] * (value.ndim - len(origin)) + pads
        out.append((number, np.ascontiguousarray(part), origin, [*part.shape, *pads]))
    return out


def _save_shard(path: Path, pieces: list[_Piece], file: int, count: int, metadata: Any) -> _Shard:
    mine = {f"piece{i}": value for i, (at, value, _, _) in enumerate(pieces) if at == file}
    name = f"{path.stem}-{file + 1:05}-of-{count:05}.zcr"
    zcrecord.save_record(mine, path.with_name(name), durable=False, metadata=metadata)
    found = zcrecord.load_record(path.with_name(name)).archive
    index = found.buffer[found.header.index_offset :][: found.header.index_size]
    numbers = [found.row(found.find(piece)).payload for piece in mine]
    return name, found.header.encode(), hashlib.sha256(index).digest(), numbers


def forge_catalogue(
    path: Path,
    outline: Any,
    shards: Mapping[str, Any],
    pieces: Sequence[tuple[int, int]],
    *,
    offsets: Any = None,
    sizes: Any = None,
    metadata: Any = None,
    **tables: Any,
) -> Path:
    """Write a catalogue whose author says what he likes: an outline, shards by name, and the place of each payload.

    Args:
        outline: the tree of a record, or the bytes of its archive; `offsets` and `sizes` replace those of its payloads.
        shards: trees, or bytes of archives, by file name.
        pieces: by payload of the outline, file and number there.
        tables: further ones, and `blobs`.
    """
    for name, shard in shards.items():
        if isinstance(shard, bytes):
            path.with_name(name).write_bytes(shard)
        else:
            zcrecord.save_record(shard, path.with_name(name), digest="none", durable=False)
    if isinstance(outline, bytes):
        path.write_bytes(outline)
    else:
        zcrecord.save_record(outline, path, digest="none", metadata=metadata, durable=False)
    index, header = changed_index(zcrecord.load_record(path).archive, offsets, sizes)
    found = [zcrecord.load_record(path.with_name(name), verify="touch").archive for name in shards]
    seals = [hashlib.sha256(a.buffer[a.header.index_offset :][: a.header.index_size]).digest() for a in found]
    files = {
        "name": zcrecord.StringTensor.from_strings(list(shards)),
        "trailer": np.frombuffer(b"".join(a.header.encode() for a in found), np.uint8).reshape(-1, HEADER_SIZE),
        "index_sha256": np.frombuffer(b"".join(seals), np.uint8).reshape(-1, 32),
    }
    file, payload = (np.array(column, np.uint32) for column in zip(*pieces, strict=True))
    made = {"files": files, "file": file, "payload": payload, **tables}
    made["outline"] = np.frombuffer(header + index + header, np.uint8)
    with open_sink(path, durable=False) as sink:
        write_catalogue(made, sink, kind=1)
    return path


def changed_index(archive: Any, offsets: Any, sizes: Any) -> tuple[bytes, bytes]:
    """Return the index of an archive with other offsets and sizes of payloads, and a header for it, index in front."""
    index = bytearray(archive.buffer[archive.header.index_offset :][: archive.header.index_size])
    rows = decode(memoryview(index), len(index)).payloads
    if offsets is not None:
        rows["offset"] = offsets
    if sizes is not None:
        rows["nbytes"] = sizes
    end = int((rows["offset"] + rows["nbytes"]).max()) if len(rows) else 0
    alignment, base = archive.header.alignment, archive.header.base_alignment
    return bytes(index), front_header(bytes(index), alignment, base, align_up(end, alignment)).encode()
