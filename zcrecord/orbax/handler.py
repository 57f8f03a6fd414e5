"""The checkpoint handler that orbax is given, and the arguments of its saves and restores.

A state is one archive, `state.zcr`. If it has arrays in parts, the first process writes an archive of all else, each
process one of its parts, and, when all have, the first one a catalogue, `state.zcr`. The step appears after that.

Source: `AsyncCheckpointHandler` and `StandardCheckpointHandler` in orbax-checkpoint 0.12.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import unflatten
from zcrecord.archive.tilings import tiles
from zcrecord.codec.conventions import is_jax_key
from zcrecord.codec.entries import TensorLayout, digest_kind
from zcrecord.codec.layout import ALIGNMENT
from zcrecord.errors import MismatchError
from zcrecord.frameworks.jax import import_jax, like_template
from zcrecord.loaders.boxes import bounds_of
from zcrecord.record.load import load_record
from zcrecord.record.save import save_record, stored_entries
from zcrecord.storage.files import open_sink
from zcrecord.tensors import interop
from zcrecord.writing.catalogue import PieceColumns, WholeRecord, WrittenShard, catalogue_tree, write_catalogue
from zcrecord.writing.flatten import flatten

STATE = "state.zcr"
AsyncCheckpointHandler: Any = object  # orbax's come after them, in the package
CheckpointArgs: Any = object


@dataclass
class ZcrSave(CheckpointArgs):  # type: ignore[misc]
    """Arguments of a save: a pytree of jax's arrays, sharded or not, numpy's, and values that `save_record` takes."""

    item: Any


@dataclass
class ZcrRestore(CheckpointArgs):  # type: ignore[misc]
    """Arguments of a restore: a pytree whose structure and shardings the result has, as `like=` of `Record.tree`.

    Where it has numpy's arrays, so has the result. None: nested as saved, with numpy's views of the file.
    """

    item: Any = None


class ZcrCheckpointHandler(AsyncCheckpointHandler):  # type: ignore[misc]
    """Saves and restores an item of a step; orbax makes one itself for `ZcrSave` and `ZcrRestore`.

    When a save returns the state may change: a thread writes and syncs copies, or arrays of the CPU that jax keeps.
    """

    async def async_save(self, directory: Any, args: Any) -> Any:
        """Copy the state of an item, and return futures of its files; UnsupportedError names all values refused."""
        from orbax.checkpoint import future

        records = _records_to_write(import_jax(), args.item)

        async def write() -> None:
            for name, record in records.items():
                save_record(record, str(directory / name))

        return [future.CommitFutureAwaitingContractedSignals(write(), name="zcrecord_save")]

    def save(self, directory: Any, args: Any) -> None:
        """Save an item, and wait for it."""
        for written in asyncio.run(self.async_save(directory, args)):
            written.result()

    def finalize(self, directory: Any) -> None:
        """Write the catalogue, if there are several archives; MismatchError if parts of an array are missing."""
        if not (directory / STATE).exists():
            count = import_jax().process_count()
            names = [_file_name(i, count) for i in range(count + 1)]
            _write_catalogue(str(directory / STATE), names, [load_record(str(directory / name)) for name in names])

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Return an item, on the CPU over the mapped files; MismatchError if it has other leaves than `args`."""
        record, like = load_record(str(directory / STATE)), None if args is None else args.item
        return record.tree() if like is None else like_template(record, like, keep_numpy=True)

    def metadata(self, directory: Any) -> Any:
        """Return an item with ShapeDtypeStructs for its tensors."""
        jax, record = import_jax(), load_record(str(directory / STATE))
        leaves = [jax.ShapeDtypeStruct(info.shape, info.dtype.numpy or np.dtype("O")) for info in record.infos()]
        return unflatten.unflatten(record.archive.index, 0, leaves.__getitem__, record.archive.payload)


def _records_to_write(jax: Any, item: Any) -> dict[str, Any]:
    """Return the records that this process writes of a state as it is now, by file name; raises what flatten does."""
    snapshots: dict[int, Any] = {}  # one for each leaf, so that what is tied stays tied
    split: dict[int, list[dict[str, Any]]] = {}  # the parts of arrays, by the id of what stands for each

    def snapshot(leaf: Any) -> Any:
        if id(leaf) not in snapshots:
            snapshots[id(leaf)] = _snapshot(jax, leaf, split)
        return snapshots[id(leaf)]

    tree = jax.tree_util.tree_map(snapshot, item)
    flat = flatten(tree)
    process, count = jax.process_index(), jax.process_count()
    if count == 1 and not split:
        return {STATE: tree}
    values = zip(flat.names, flat.values, strict=True)
    parts = [{"name": name, **part} for name, value in values for part in split.get(id(value), ())]
    return ({} if process else {_file_name(0, count): tree}) | {_file_name(1 + process, count): {"parts": parts}}


def _file_name(number: int, processes: int) -> str:
    return f"state-{number + 1:05}-of-{processes + 1:05}.zcr"


def _snapshot(jax: Any, leaf: Any, split: dict[int, list[dict[str, Any]]]) -> Any:
    """Return a leaf as it is now; of an array in parts an empty stand-in, by whose `id` `split` has this process's."""
    if isinstance(leaf, np.ndarray) or is_jax_key(leaf):
        return leaf.copy()
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    if leaf.is_fully_replicated and leaf.addressable_shards:
        return interop.as_array(leaf.addressable_shards[0].data)
    if dtypes.from_numpy(np.dtype(leaf.dtype)).packed or not leaf.size:  # parts of packed ones end within a byte
        return interop.as_array(leaf)
    stand_in = np.zeros(0, leaf.dtype)
    split[id(stand_in)] = parts = []
    for shard in (shard for shard in leaf.addressable_shards if shard.replica_id == 0):
        origin = [start for start, _ in bounds_of(shard.index, leaf.shape)]
        parts.append({"shape": list(leaf.shape), "origin": origin, "data": interop.as_array(shard.data)})
    return stand_in


class _Part(NamedTuple):
    """A part of an array of this shape: where it lies there, and its payload by the numbers of file and payload."""

    array_shape: tuple[int, ...]
    origin: list[int]
    shape: tuple[int, ...]
    payload: tuple[int, int]


def _parts_by_array(records: list[Any]) -> dict[str, list[_Part]]:
    """Return the parts that processes wrote, by the names of arrays; `records[0]`, file 0, has none."""
    arrays: dict[str, list[_Part]] = {}
    for file, record in enumerate(records[1:], 1):
        numbers = record.archive.index.tensors["payload"].tolist()
        for part, number in zip(record.tree()["parts"], numbers, strict=True):
            described = _Part(tuple(part["shape"]), part["origin"], part["data"].shape, (file, number))
            arrays.setdefault(part["name"], []).append(described)
    return arrays


def _write_catalogue(path: str, names: list[str], records: list[Any]) -> None:
    """Write a catalogue of the first archive's payloads, and of arrays in parts; MismatchError if one is missing."""
    entries, whole = stored_entries(records[0].archive), len(records[0].archive.index.payloads)
    arrays = _parts_by_array(records)
    rank = max((len(parts[0].array_shape) for parts in arrays.values()), default=0)
    boxes, numbers = [np.zeros((whole, 2, rank), np.int64)], dict[Any, int]()  # of payloads in parts, by their pieces
    for i, name in enumerate(entries.names):
        if name in arrays:
            parts = arrays[name]
            shape, pieces = parts[0].array_shape, tuple(part.payload for part in parts)
            box = np.zeros((len(parts), 2, rank), np.int64)
            box[:, :, : len(shape)] = [(part.origin, part.shape) for part in parts]
            if not tiles(box[:, 0], box[:, 1], shape):
                raise MismatchError("the parts of all processes do not cover it; save global arrays", tensor=name)
            if pieces not in numbers:  # else it is tied to another
                numbers[pieces] = whole + len(numbers)
                boxes.append(box)
            old = entries.layouts[entries.layout_ids[i]]
            entries.layout_ids[i], entries.payloads[i] = len(entries.layouts), numbers[pieces]
            entries.layouts.append(TensorLayout(old.dtype, old.bits, shape))
    own_pieces = [(0, number) for number in range(whole)]
    files, payloads = np.array([*own_pieces, *(piece for pieces in numbers for piece in pieces)]).T
    ends, table = np.cumsum([0, *[1] * whole, *map(len, numbers)]), np.concatenate(boxes)
    columns = PieceColumns(files, payloads, ends, table[:, 0], table[:, 1])
    shards, kind = list(map(_written_shard, records, names)), digest_kind("xxh3")
    outline = WholeRecord(entries, shards, alignment=ALIGNMENT, kind=kind, pieces=columns)
    with open_sink(path) as sink:
        write_catalogue(catalogue_tree(outline, shards), sink, kind=kind)


def _written_shard(record: Any, name: str) -> WrittenShard:
    """Return the entry of an archive in a catalogue."""
    header, octets = record.archive.header, record.archive.buffer
    digest = hashlib.sha256(octets[header.index_offset :][: header.index_size]).digest()
    return WrittenShard(name, header.archive_size, header.encode(), digest, record.archive.index.payloads)
