"""The checkpoint handler that orbax is given, and the arguments of its saves and restores.

orbax makes a step's folder, calls `async_save` in every process, waits for the threads it gets, calls `finalize` in the
first process, and renames the folder. Arrays that lie in parts are stored in parts: each process writes an archive of
the shards that it owns, and `finalize` a catalogue that makes one record of them. All else is the first process'.

Source: `AsyncCheckpointHandler` and `StandardCheckpointHandler` in orbax-checkpoint 0.12.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.codec.conventions import is_jax_key
from zcrecord.codec.entries import TensorLayout, digest_kind
from zcrecord.codec.layout import ALIGNMENT, NONE
from zcrecord.errors import MismatchError
from zcrecord.frameworks.jax import import_jax, like_template
from zcrecord.loaders.boxes import Bounds, bounds_of
from zcrecord.record.load import load_record
from zcrecord.record.save import save_record, stored_entries
from zcrecord.storage.files import open_sink
from zcrecord.tensors import interop
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.writing.catalogue import PieceColumns, WholeRecord, WrittenShard, catalogue_tree, write_catalogue
from zcrecord.writing.flatten import FlatRecord, flatten

if TYPE_CHECKING:
    AsyncCheckpointHandler = CheckpointArgs = Any
else:
    AsyncCheckpointHandler = CheckpointArgs = object  # orbax's come after them, in the package

STATE = "state.zcr"


@dataclass
class ZcrSave(CheckpointArgs):  # type: ignore[misc]  # mypy takes orbax for Any
    """Arguments of a save: `manager.save(step, args=ZcrSave(state))`.

    Attributes:
        item: what `save_record` takes: a pytree of jax's arrays, sharded or not, numpy's, and plain values. What it
            refuses is named in one error, before anything is written.
    """

    item: Any


@dataclass
class ZcrRestore(CheckpointArgs):  # type: ignore[misc]
    """Arguments of a restore: `state = manager.restore(step, args=ZcrRestore(like))`.

    Attributes:
        item: a pytree whose structure and shardings the result has, as `like=` of `Record.tree`: of arrays, or of
            ShapeDtypeStructs; numpy's arrays come where it has numpy's. None: nested as it was saved, with numpy's
            views of the mapped file.
    """

    item: Any = None


class ZcrCheckpointHandler(AsyncCheckpointHandler):  # type: ignore[misc]
    """Saves and restores an item of a step; orbax makes one itself for `ZcrSave` and `ZcrRestore`.

    `async_save` returns when later changes of the state no longer matter: arrays of devices and numpy's are copied,
    jax's on the CPU are kept, and not donated meanwhile. A thread writes the files. A step appears when all processes
    have written theirs, whole; a failed or killed save leaves the steps from before.

    Args:
        durable: fsync files, so that a step that has appeared is whole after power loss.
    """

    def __init__(self, *, durable: bool = True) -> None:
        self._durable = durable
        self._pending: dict[str, _State] = {}  # by folder, from save to finalize

    async def async_save(self, directory: Any, args: Any) -> Any:
        """Take the state of an item, start to write it, and return futures of that.

        Raises:
            UnsupportedError: values that a record does not hold, all of them.
        """
        from orbax.checkpoint import future

        jax = import_jax()
        state = _State(jax, args.item)
        self._pending[str(directory)] = state

        async def write() -> None:
            count, process = jax.process_count(), jax.process_index()
            name = STATE if state.alone else _shard_name(process, count)
            save_record(state.owned(process), os.path.join(str(directory), name), durable=self._durable)

        return [future.CommitFutureAwaitingContractedSignals(write(), name="zcrecord_save")]

    def save(self, directory: Any, args: Any) -> None:
        """Save an item, and wait for it."""
        import asyncio

        for written in asyncio.run(self.async_save(directory, args)):
            written.result()

    def finalize(self, directory: Any) -> None:
        """Write the catalogue, unless there is one archive; orbax calls it in one process, when all have written.

        Raises:
            MismatchError: a process has not written what it owns.
        """
        state = self._pending.pop(str(directory))
        if not state.alone:
            _write_catalogue(state, str(directory), import_jax().process_count(), self._durable)

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Return an item. Each process reads its devices' shards; on the CPU they lie on the mapped files.

        Raises:
            MismatchError: the record has a leaf that the given pytree does not have, or lacks one.
        """
        record = load_record(os.path.join(str(directory), STATE))
        like = None if args is None else args.item
        return record.tree() if like is None else like_template(record, like, keep_numpy=True)

    def metadata(self, directory: Any) -> Any:
        """Return an item with ShapeDtypeStructs for its tensors; reads the index alone."""
        jax, record = import_jax(), load_record(os.path.join(str(directory), STATE))
        leaves = [
            jax.ShapeDtypeStruct(info.shape, info.dtype.numpy or np.dtypes.StringDType()) for info in record.infos()
        ]
        return unflatten.unflatten(record.archive.index, 0, leaves.__getitem__, record.archive.payload)

    def close(self) -> None:
        """Do nothing; orbax calls it at the end."""


class _Split(NamedTuple):
    """An array in parts: the process that owns each box, and the boxes that lie here."""

    owners: dict[Bounds, int]
    local: dict[Bounds, Any]


class _State:
    """A state as it was when its save began.

    Attributes:
        tree: with numpy's arrays for jax's; a LazyTensor stands for each array in parts.
        flat: the same, flattened.
        split: arrays in parts, by the id of what stands for them.
        alone: True if one archive has all of it.
    """

    def __init__(self, jax: Any, item: Any) -> None:
        self.split: dict[int, _Split] = {}
        known: dict[int, Any] = {}  # tied arrays stay tied
        process = jax.process_index()

        def taken(leaf: Any) -> Any:
            if id(leaf) not in known:
                known[id(leaf)] = self._taken(jax, leaf, process)
            return known[id(leaf)]

        self.tree = jax.tree_util.tree_map(taken, item)
        self.flat: FlatRecord = flatten(self.tree)
        self.alone = jax.process_count() == 1 and not self.split

    def _taken(self, jax: Any, leaf: Any, process: int) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            return leaf.copy("K")
        if not isinstance(leaf, jax.Array) or is_jax_key(leaf) or isinstance(leaf, jax.core.Tracer):
            return leaf
        kind = dtypes.from_numpy(np.dtype(leaf.dtype))
        if leaf.is_fully_replicated or kind.packed:  # the latter do not fill whole bytes, and are put together
            return interop.as_array(leaf.addressable_shards[0].data if leaf.is_fully_replicated else leaf)
        owners: dict[Bounds, int] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            owners.setdefault(bounds_of(index, leaf.shape), device.process_index)
        shards = {bounds_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        local = {box: interop.as_array(shards[box]) for box, owner in owners.items() if owner == process}
        stand_in = LazyTensor(kind, leaf.shape, ())
        self.split[id(stand_in)] = _Split(owners, local)
        return stand_in

    def pieces(self) -> list[list[tuple[str, Bounds | None, int]]]:
        """Return the pieces of each tensor: the name in its owner's archive, the box if the tensor is split, owner."""
        out = []
        for i, (name, value) in enumerate(zip(self.flat.names, self.flat.values, strict=True)):
            split = self.split.get(id(value))
            boxes = {None: 0} if split is None else split.owners
            out.append([(f"{name}~{i}.{k}", box, owner) for k, (box, owner) in enumerate(boxes.items())])
        return out

    def owned(self, process: int) -> Any:
        """Return the record that a process writes: the whole, or its pieces by name."""
        if self.alone:
            return self.tree
        values = [self.split.get(id(value)) or value for value in self.flat.values]
        return {
            name: value if box is None else value.local[box]
            for value, pieces in zip(values, self.pieces(), strict=True)
            for name, box, owner in pieces
            if owner == process
        }


def _shard_name(process: int, count: int) -> str:
    return f"{STATE.removesuffix('.zcr')}-{process + 1:05}-of-{count:05}.zcr"


def _write_catalogue(state: _State, directory: str, count: int, durable: bool) -> None:
    """Write the catalogue of the processes' archives in a folder."""
    names = [_shard_name(process, count) for process in range(count)]
    archives = [load_record(os.path.join(directory, name)).archive for name in names]
    stored = [stored_entries(archive) for archive in archives]
    flat, found = state.flat, {}
    for pieces, value, tensor in zip(state.pieces(), flat.values, flat.names, strict=True):
        numbers = [archives[owner].find(name) for name, _, owner in pieces]
        if min(numbers) < 0:
            message = "a process has not written its part of it; save global arrays, from every process"
            raise MismatchError(message, tensor=tensor)
        where = [(owner, stored[owner].payloads[n], box) for n, (_, box, owner) in zip(numbers, pieces, strict=True)]
        if id(value) in state.split:
            layout = TensorLayout(value.kind.code, value.kind.bits, value.shape)
        else:
            [(owner, _, _)], [n] = where, numbers
            layout = stored[owner].layouts[stored[owner].layout_ids[n]]
        found[tensor] = layout, tuple(place for place in where if place[1] != NONE)
    places = dict.fromkeys(places for _, places in found.values() if places)  # equal ones are tied
    order = sorted(places, key=lambda p: (len(p) > 1, p[0][:2]))  # so that payloads of equal bytes lie side by side
    number = {places: i for i, places in enumerate(order)} | {(): NONE}
    layouts = {layout: i for i, layout in enumerate(dict.fromkeys(layout for layout, _ in found.values()))}
    flat.layouts = list(layouts)
    flat.layout_ids = [layouts[layout] for layout, _ in found.values()]
    flat.payloads = [number[places] for _, places in found.values()]
    kind = digest_kind("xxh3")
    shards = [_written(archive, name) for archive, name in zip(archives, names, strict=True)]
    whole = WholeRecord(flat, shards, alignment=ALIGNMENT, kind=kind, pieces=_columns(order))
    with open_sink(os.path.join(directory, STATE), durable=durable) as sink:
        write_catalogue(catalogue_tree(whole, shards), sink, kind=kind)


def _written(archive: Archive, name: str) -> WrittenShard:
    h = archive.header
    digest = hashlib.sha256(archive.buffer[h.index_offset :][: h.index_size]).digest()
    return WrittenShard(name, h.archive_size, h.encode(), digest, archive.index.payloads)


def _columns(order: list[Any]) -> PieceColumns:
    """Return the places of payloads in files as columns; boxes mean nothing where there is one."""
    rows = [piece for places in order for piece in places]
    file, payload = (np.array([piece[i] for piece in rows], np.int64) for i in (0, 1))
    if len(rows) == len(order):
        return PieceColumns(file, payload)
    boxes = np.zeros((2, len(rows), max(len(box or ()) for _, _, box in rows)), np.int64)
    for i, (_, _, box) in enumerate(rows):
        for axis, (start, end) in enumerate(box or ()):
            boxes[:, i, axis] = start, end - start
    first = np.cumsum([0, *map(len, order)])
    return PieceColumns(file, payload, first, boxes[0], boxes[1])
