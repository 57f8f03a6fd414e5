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
from zcrecord.errors import MismatchError
from zcrecord.writing.catalogue import PieceColumns, WholeRecord, catalogue_tree

from .rank_archive import RankReport, WholeTensor
from .values import StateTree, path_to_text, paths_of

Array = np.ndarray[Any, np.dtype[Any]]

# Names in the metadata of a checkpoint, as CONVENTIONS.md has them.
VERSION = "zcrecord.checkpoint"
FLAT, OBJECTS, PATHS, PLANNER_DATA = (f"{VERSION}.{name}" for name in ("flat", "objects", "paths", "planner_data"))
SAVE_ID = f"{VERSION}.save_id"


class _Columns:
    """The chunks of all tensors, as columns, ordered by tensor and box; `first` is the first chunk of each tensor."""

    def __init__(self, reports: Sequence[RankReport], numbers: Mapping[str, int]) -> None:
        rank = max((report.origin.shape[1] for report in reports), default=0)
        with_file = [report for report in reports if report.shard is not None]
        self.owner = np.fromiter(map(numbers.__getitem__, chain.from_iterable(r.names for r in with_file)), np.int64)
        self.file = np.repeat(np.arange(len(with_file)), [len(r.names) for r in with_file])
        none = np.zeros(0, np.int64)
        self.number, self.tied_to = (
            np.concatenate([none, *(getattr(r, column) for r in with_file)]) for column in ("number", "tied_to")
        )
        self.origin, self.extent = (
            np.concatenate([none.reshape(0, rank), *(_pad(getattr(r, column), rank) for r in with_file)])
            for column in ("origin", "extent")
        )
        order = np.lexsort((*self.origin.T[::-1], self.owner))
        boxes = np.column_stack((self.owner, self.origin, self.extent))[order]
        order = order[np.append(True, (boxes[1:] != boxes[:-1]).any(axis=1))[: len(order)]]  # of equal ones the first
        for column in ("owner", "file", "number", "tied_to", "origin", "extent"):
            setattr(self, column, getattr(self, column)[order])
        self.first = np.searchsorted(self.owner, np.arange(len(numbers) + 1))


def _pad(boxes: Array, rank: int) -> Array:
    return np.pad(boxes, ((0, 0), (0, rank - boxes.shape[1])))


def join_reports(
    reports: Sequence[RankReport], planner_data: Any, planner_bytes: Any, *, alignment: int, digest: Any, save: str = ""
) -> dict[str, Any]:
    """Return the tables of the catalogue of a checkpoint by the reports of all ranks, as the tree of a record.

    Args:
        planner_data: of DCP's metadata: the path of each name, None if names were not made of paths, or anything.
        planner_bytes: the same, pickled, where it is neither.
        save: an identifier of the save.

    Raises:
        MismatchError: chunks of a tensor do not agree, or do not cover it.
    """
    tensors = _tensors(reports)
    values = {name: value for report in reversed(reports) for name, value in report.values.items()}
    paths = paths_of(planner_data) or {}
    names = [name for name in paths if name in tensors or name in values]
    names += [name for name in (*tensors, *values) if name not in paths]
    known = {name: paths.get(name, (name,)) for name in names}
    ordered = {name: tensors[name] for name in names if name in tensors}
    columns = _Columns(reports, {name: i for i, name in enumerate(ordered)})
    payloads, pieces = _payloads(columns, list(ordered.values()))
    _check_cover(ordered, columns)
    state = StateTree(known.values())
    ids = iter(payloads.tolist())
    for name, path in known.items():
        if name in tensors:
            state.tensor(path, TensorLayout(*tensors[name]), next(ids))
        else:
            state.value(path, values[name])
    entries = state.entries()
    entries.metadata = _metadata(state, planner_data, planner_bytes, save)
    shards = [report.shard for report in reports if report.shard is not None]
    whole = WholeRecord(entries, shards, alignment=alignment, kind=digest_kind(digest), pieces=pieces)
    return catalogue_tree(whole, shards)


def _metadata(state: StateTree, planner_data: Any, planner_bytes: Any, save_id: str) -> list[AttributeEntry]:
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


def _tensors(reports: Sequence[RankReport]) -> dict[str, WholeTensor]:
    """Return all tensors by name; MismatchError if ranks do not agree on one."""
    out: dict[str, WholeTensor] = {}
    for rank, report in enumerate(reports):
        for name, tensor in report.tensors.items():
            if (known := out.setdefault(name, tensor)) != tensor:
                message = f"rank {rank} has it as {tensor.words()}, a rank before as {known.words()}; make them alike"
                raise MismatchError(message, tensor=name)
    return out


def _check_cover(tensors: Mapping[str, WholeTensor], columns: _Columns) -> None:
    """Raise MismatchError unless the chunks of each tensor are boxes that cover it once."""
    for i, (name, tensor) in enumerate(tensors.items()):
        lo, hi = columns.first[i : i + 2].tolist()
        if prod(tensor.shape) and not tiles(columns.origin[lo:hi], columns.extent[lo:hi], tensor.shape):
            message = f"the {hi - lo} chunks that all ranks together saved of it do not cover its shape {tensor.shape}"
            raise MismatchError(f"{message} once; save from every rank that has a part of it", tensor=name)


def _payloads(columns: _Columns, tensors: Sequence[WholeTensor]) -> tuple[Array, PieceColumns]:
    """Return for each tensor the number of its payload, NONE without elements, and the pieces of all payloads.

    Tensors are tied if all of their chunks are. Payloads of one piece come first, file by file, so that those of equal
    bytes lie side by side.
    """
    first, counts = columns.first[:-1], np.diff(columns.first)
    leader = np.arange(len(counts))
    for i, j in _ties(columns, tensors):
        leader[i] = j
    own = np.flatnonzero((leader == np.arange(len(counts))) & (counts > 0))
    start = first[own]
    order = own[np.lexsort((columns.number[start], columns.file[start], counts[own] > 1))]
    payloads = np.full(len(counts), NONE, np.int64)
    payloads[order] = np.arange(len(order))
    payloads = payloads[leader]
    ends = np.cumsum(counts[order])
    rows = np.repeat(first[order] - (ends - counts[order]), counts[order]) + np.arange(ends[-1:].sum())
    file, number = columns.file[rows], columns.number[rows]
    if (counts <= 1).all():
        return payloads, PieceColumns(file, number)
    return payloads, PieceColumns(file, number, np.concatenate(([0], ends)), columns.origin[rows], columns.extent[rows])


def _ties(columns: _Columns, tensors: Sequence[WholeTensor]) -> Iterator[tuple[int, int]]:
    """Yield pairs of tensors that are the same in every rank: each with the first of them."""
    memory = columns.file.astype(np.int64) << 32 | columns.tied_to
    _, inverse, uses = np.unique(memory, return_inverse=True, return_counts=True)
    shared = np.append(0, np.cumsum(uses[inverse.reshape(-1)] > 1))
    firsts: dict[Any, int] = {}
    for i in np.flatnonzero(np.diff(columns.first)).tolist():
        lo, hi = columns.first[i : i + 2].tolist()
        if shared[hi] - shared[lo] != hi - lo:
            continue
        key = tensors[i], memory[lo:hi].tobytes(), columns.origin[lo:hi].tobytes(), columns.extent[lo:hi].tobytes()
        if (j := firsts.setdefault(key, i)) != i:
            yield i, j
