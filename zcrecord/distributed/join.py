"""The reports of all ranks joined: one record whose tensors are split over the ranks' archives. Arithmetic, no I/O.

There may be a million chunks: what is done for each is done on whole columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

__all__ = ["FLAT", "OBJECTS", "PATHS", "PLANNER_DATA", "VERSION", "joined"]

Array = np.ndarray[Any, np.dtype[Any]]

# Names in the metadata of a checkpoint; CONVENTIONS.md tells what they hold.
VERSION = "zcrecord.checkpoint"
FLAT, OBJECTS, PATHS, PLANNER_DATA = (f"{VERSION}.{name}" for name in ("flat", "objects", "paths", "planner_data"))


class _Columns:
    """The chunks of all tensors, as columns, ordered by tensor and box."""

    def __init__(self, reports: Sequence[RankReport], numbers: Mapping[str, int]) -> None:
        rank = max((report.origin.shape[1] for report in reports), default=0)
        with_file = [report for report in reports if report.shard is not None]
        self.owner = np.fromiter(map(numbers.__getitem__, chain.from_iterable(r.names for r in with_file)), np.int64)
        self.file = np.repeat(np.arange(len(with_file)), [len(r.names) for r in with_file])
        self.number, self.home = (
            np.concatenate([np.zeros(0, np.int64), *(getattr(r, column) for r in with_file)])
            for column in ("number", "home")
        )
        self.origin, self.extent = (
            np.concatenate([np.zeros((0, rank), np.int64), *(_padded(getattr(r, c), rank) for r in with_file)])
            for c in ("origin", "extent")
        )
        order = np.lexsort((*self.origin.T[::-1], self.owner))
        for column in ("owner", "file", "number", "home", "origin", "extent"):
            setattr(self, column, getattr(self, column)[order])
        self.first = np.searchsorted(self.owner, np.arange(len(numbers) + 1))


def _padded(boxes: Array, rank: int) -> Array:
    return np.pad(boxes, ((0, 0), (0, rank - boxes.shape[1])))


def joined(
    reports: Sequence[RankReport], planner_data: Any, planner_bytes: bytes | None, *, alignment: int, digest: str | None
) -> dict[str, Any]:
    """Return the tables of the catalogue of a checkpoint, as the tree of a record.

    Args:
        reports: of all ranks.
        planner_data: of DCP's metadata: the path of each name, None if names were not made of paths, or anything.
        planner_bytes: the same, pickled, where it is neither.

    Raises:
        MismatchError: chunks of a tensor do not agree, or do not cover it.
    """
    tensors = _tensors(reports)
    values = {name: value for report in reports for name, value in report.values.items()}
    paths = paths_of(planner_data) or {}
    names = [name for name in paths if name in tensors or name in values]
    names += [name for name in (*tensors, *values) if name not in paths]
    known = {name: paths.get(name, (name,)) for name in names}
    shards = [report.shard for report in reports if report.shard is not None]
    columns = _Columns(reports, {name: i for i, name in enumerate(name for name in names if name in tensors)})
    payloads, pieces = _payloads(columns, [tensors[name] for name in names if name in tensors])
    _check_cover([(name, tensors[name]) for name in names if name in tensors], columns)
    state = StateTree(known.values())
    ids = iter(payloads.tolist())
    for name, path in known.items():
        if name in tensors:
            told = tensors[name]
            state.tensor(path, TensorLayout(told.dtype, told.bits, told.shape), next(ids))
        else:
            state.value(path, values[name])
    entries = state.entries()
    entries.metadata = _metadata(state, planner_data, planner_bytes)
    kind = digest_kind(digest)
    whole = WholeRecord(entries, shards, alignment=alignment, kind=kind, pieces=pieces)
    return catalogue_tree(whole, shards)


def _metadata(state: StateTree, planner_data: Any, planner_bytes: bytes | None) -> list[AttributeEntry]:
    told: dict[str, Any] = {VERSION: 1}
    if planner_data is None:
        told[FLAT] = True
    if state.objects:
        told[OBJECTS] = state.objects
    if state.others:
        told[PATHS] = list(map(path_to_text, state.others))
    if planner_bytes is not None:
        told[PLANNER_DATA] = planner_bytes
    return [AttributeEntry(name, NONE, 0, value) for name, value in told.items()]


def _tensors(reports: Sequence[RankReport]) -> dict[str, WholeTensor]:
    """Return all tensors by name.

    Raises:
        MismatchError: ranks do not agree on one.
    """
    out: dict[str, WholeTensor] = {}
    for rank, report in enumerate(reports):
        for name, told in report.tensors.items():
            if (known := out.setdefault(name, told)) != told:
                what = f"rank {rank} has it as {told.words()}, a rank before as {known.words()}; make them alike"
                raise MismatchError(what, tensor=name)
    return out


def _check_cover(tensors: Sequence[tuple[str, WholeTensor]], columns: _Columns) -> None:
    """Raise MismatchError unless the chunks of each tensor are boxes that cover it once."""
    for i, (name, told) in enumerate(tensors):
        lo, hi = columns.first[i : i + 2].tolist()
        if prod(told.shape) and not tiles(columns.origin[lo:hi], columns.extent[lo:hi], told.shape):
            what = f"the {hi - lo} chunks that all ranks together saved of it do not cover its shape {told.shape} once"
            raise MismatchError(f"{what}; save from every rank that has a part of it", tensor=name)


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


def _ties(columns: _Columns, tensors: Sequence[WholeTensor]) -> list[tuple[int, int]]:
    """Return pairs of tensors that are one and the same in every rank: each with the first that is so."""
    homes = columns.file.astype(np.int64) << 32 | columns.home
    _, inverse, uses = np.unique(homes, return_inverse=True, return_counts=True)
    shared = np.append(0, np.cumsum(uses[inverse.reshape(-1)] > 1))
    found: dict[Any, int] = {}
    out: list[tuple[int, int]] = []
    for i in np.flatnonzero(np.diff(columns.first)).tolist():
        lo, hi = columns.first[i : i + 2].tolist()
        if shared[hi] - shared[lo] != hi - lo:
            continue
        key = tensors[i], homes[lo:hi].tobytes(), columns.origin[lo:hi].tobytes(), columns.extent[lo:hi].tobytes()
        if (j := found.setdefault(key, i)) != i:
            out.append((i, j))
    return out
