"""The reports of all ranks joined: one record whose tensors are split over the ranks' archives. Arithmetic, no I/O.

There may be a million chunks, so that all work on them is done on whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from zcrecord.archive.tilings import tiles
from zcrecord.codec.entries import AttributeEntry, TensorLayout, digest_kind
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import Array
from zcrecord.errors import MismatchError
from zcrecord.writing.catalogue import PieceColumns, WholeRecord, catalogue_tree

from .rank_archive import RankReport, WholeTensor
from .values import StateTree, path_to_text, paths_of

# Names in the metadata of a checkpoint, as CONVENTIONS.md has them.
VERSION = "zcrecord.checkpoint"
FLAT, OBJECTS, PATHS, PLANNER_DATA = (f"{VERSION}.{name}" for name in ("flat", "objects", "paths", "planner_data"))
SAVE_ID = f"{VERSION}.save_id"


class _ChunkTable:
    """The chunks of all ranks as columns, a row for each, sorted by tensor and box; equal boxes of a tensor occur once.

    A chunk is payload `number` of archive `file`, and a box of `tensor`; `first[i]` is the first row of tensor i.
    """

    def __init__(self, reports: Sequence[RankReport], tensor_numbers: Mapping[str, int]) -> None:
        dims = max((report.origin.shape[1] for report in reports), default=0)
        with_file = [report for report in reports if report.shard is not None]
        names = chain.from_iterable(report.names for report in with_file)
        tensor = np.fromiter(map(tensor_numbers.__getitem__, names), np.int64)
        file = np.repeat(np.arange(len(with_file)), [len(report.names) for report in with_file])
        empty = np.zeros(0, np.int64)  # `concatenate` needs at least one array
        number = np.concatenate([empty, *(report.number for report in with_file)])
        tied_to = np.concatenate([empty, *(report.tied_to for report in with_file)])
        origin = np.concatenate([empty.reshape(0, dims), *(_padded(report.origin, dims) for report in with_file)])
        extent = np.concatenate([empty.reshape(0, dims), *(_padded(report.extent, dims) for report in with_file)])
        by_box = np.lexsort((*origin.T[::-1], tensor))
        boxes = np.column_stack((tensor, origin, extent))[by_box]
        rows = by_box[np.append(True, (boxes[1:] != boxes[:-1]).any(axis=1))[: len(by_box)]]
        self.tensor, self.file, self.number = tensor[rows], file[rows], number[rows]
        self.tied_to, self.origin, self.extent = tied_to[rows], origin[rows], extent[rows]
        self.first = np.searchsorted(self.tensor, np.arange(len(tensor_numbers) + 1))


def _padded(boxes: Array, dims: int) -> Array:
    return np.pad(boxes, ((0, 0), (0, dims - boxes.shape[1])))


def join_reports(
    reports: Sequence[RankReport],
    planner_data: Any,
    planner_bytes: bytes | None,
    *,
    alignment: int,
    digest: str | None,
    save_id: str = "",
) -> dict[str, Any]:
    """Return the tables of a checkpoint's catalogue, joined from the reports of all ranks, as the tree of a record.

    Args:
        planner_data: DCP's: a dict from names to paths, None for a flat state dict, or anything of another planner.
        planner_bytes: `planner_data`, pickled, if it is of another planner; else None.
        save_id: an identifier of the save.

    Raises:
        MismatchError: chunks of a tensor do not agree, or do not cover it.
    """
    tensors = _whole_tensors(reports)
    values = {name: value for report in reversed(reports) for name, value in report.values.items()}
    known_paths = paths_of(planner_data) or {}
    names = [name for name in known_paths if name in tensors or name in values]
    names += [name for name in (*tensors, *values) if name not in known_paths]
    paths = {name: known_paths.get(name, (name,)) for name in names}
    ordered = {name: tensors[name] for name in names if name in tensors}
    chunks = _ChunkTable(reports, {name: i for i, name in enumerate(ordered)})
    payloads, pieces = _payloads(chunks, list(ordered.values()))
    _check_cover(ordered, chunks)
    state = StateTree(paths.values())
    payload_by_name = dict(zip(ordered, payloads.tolist(), strict=True))
    for name, path in paths.items():
        if name in tensors:
            state.tensor(path, TensorLayout(*tensors[name]), payload_by_name[name])
        else:
            state.value(path, values[name])
    entries = state.entries()
    entries.metadata = _metadata(state, planner_data, planner_bytes, save_id)
    shards = [report.shard for report in reports if report.shard is not None]
    whole = WholeRecord(entries, shards, alignment=alignment, kind=digest_kind(digest), pieces=pieces)
    return catalogue_tree(whole, shards)


def _metadata(state: StateTree, planner_data: Any, planner_bytes: bytes | None, save_id: str) -> list[AttributeEntry]:
    """Return the metadata of a checkpoint's catalogue; CONVENTIONS.md describes each entry."""
    metadata: dict[str, Any] = {VERSION: 1, SAVE_ID: save_id}
    if planner_data is None:
        metadata[FLAT] = True
    if state.objects:
        metadata[OBJECTS] = state.objects
    if state.others:
        metadata[PATHS] = list(map(path_to_text, state.others))
    if planner_bytes is not None:
        metadata[PLANNER_DATA] = planner_bytes
    return [AttributeEntry(name, NONE, 0, value) for name, value in metadata.items()]


def _whole_tensors(reports: Sequence[RankReport]) -> dict[str, WholeTensor]:
    """Return all tensors by name; MismatchError if two ranks give one another type or shape."""
    out: dict[str, WholeTensor] = {}
    for rank, report in enumerate(reports):
        for name, tensor in report.tensors.items():
            if (earlier := out.setdefault(name, tensor)) != tensor:
                message = f"rank {rank} has it as {tensor.words()}, a rank before as {earlier.words()}; make them alike"
                raise MismatchError(message, tensor=name)
    return out


def _check_cover(tensors: Mapping[str, WholeTensor], chunks: _ChunkTable) -> None:
    """Raise MismatchError unless the chunks of each tensor are boxes that cover each of its elements once."""
    for i, (name, tensor) in enumerate(tensors.items()):
        start, stop = chunks.first[i : i + 2].tolist()
        if prod(tensor.shape) and not tiles(chunks.origin[start:stop], chunks.extent[start:stop], tensor.shape):
            fault = f"the {stop - start} chunks that all ranks together saved of it do not cover its shape"
            raise MismatchError(f"{fault} {tensor.shape} once; save from every rank that has a part of it", tensor=name)


def _payloads(chunks: _ChunkTable, tensors: Sequence[WholeTensor]) -> tuple[Array, PieceColumns]:
    """Return the payload number of each tensor, NONE for one without elements, and the pieces of all payloads.

    Tensors are tied, and have one payload, if all of their chunks are tied. Payloads of one piece come first, file by
    file, so that those of equal bytes lie side by side.
    """
    first, counts = chunks.first[:-1], np.diff(chunks.first)
    first_tied = np.arange(len(counts))  # of each tensor the first that it is tied to, or the tensor itself
    for tensor, earlier in _ties(chunks, tensors):
        first_tied[tensor] = earlier
    untied = np.flatnonzero((first_tied == np.arange(len(counts))) & (counts > 0))
    chunk = first[untied]
    order = untied[np.lexsort((chunks.number[chunk], chunks.file[chunk], counts[untied] > 1))]
    payloads = np.full(len(counts), NONE, np.int64)
    payloads[order] = np.arange(len(order))
    payloads = payloads[first_tied]
    ends = np.cumsum(counts[order])  # of each payload's pieces
    rows = np.repeat(first[order] - (ends - counts[order]), counts[order]) + np.arange(ends[-1:].sum())
    file, number = chunks.file[rows], chunks.number[rows]
    if (counts <= 1).all():
        return payloads, PieceColumns(file, number)
    return payloads, PieceColumns(file, number, np.concatenate(([0], ends)), chunks.origin[rows], chunks.extent[rows])


def _ties(chunks: _ChunkTable, tensors: Sequence[WholeTensor]) -> Iterator[tuple[int, int]]:
    """Yield the number of each tensor whose chunks are all tied to those of an earlier one, and the earlier number."""
    memory = chunks.file.astype(np.int64) << 32 | chunks.tied_to  # one number for each distinct memory
    _, inverse, uses = np.unique(memory, return_inverse=True, return_counts=True)
    shared_before = np.append(0, np.cumsum(uses[inverse.reshape(-1)] > 1))
    earliest: dict[Any, int] = {}
    for i in np.flatnonzero(np.diff(chunks.first)).tolist():
        start, stop = chunks.first[i : i + 2].tolist()
        if shared_before[stop] - shared_before[start] != stop - start:
            continue  # a chunk shares its memory with no other, so that no key has to be made
        columns = memory, chunks.origin, chunks.extent
        key = tensors[i], *(column[start:stop].tobytes() for column in columns)
        if (earlier := earliest.setdefault(key, i)) != i:
            yield i, earlier
