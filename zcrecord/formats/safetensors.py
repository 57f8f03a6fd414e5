"""Writes safetensors: single files and shards with their index, one piece in memory.

What an archive has besides tensors and texts is kept in one entry of the metadata, from which `foreign.safetensors`
reads it back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from zcrecord import dtypes
from zcrecord.archive.info import TensorInfo
from zcrecord.archive.payloads import Payloads
from zcrecord.errors import UnsupportedError, located
from zcrecord.foreign import safetensors_index as shards
from zcrecord.foreign.safetensors import FORMAT
from zcrecord.foreign.safetensors_header import METADATA, HeaderEntry, encode_header
from zcrecord.foreign.structure import KEY, Structure
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress, check_destination, is_url, open_sink, path_or_none, place_beside_shards
from zcrecord.storage.new_files import FileGroup, Placement, put_in_place, refusals, version_of
from zcrecord.storage.scratch import folder_locks
from zcrecord.storage.sink import Sink

from .structure_of import structure_of


def write(
    record: Record,
    dest: Any,
    *,
    durable: bool = True,
    max_shard_size: int | None = None,
    force: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write a record as safetensors, whole or not at all; returns the bytes written.

    Tensors are written from the record's own memory, in saved order unless that would leave one unaligned; what is
    strided is packed, some of it at a time. Safetensors has no ties: a tied tensor is written under each of its names.

    With `max_shard_size`, or where `dest` ends in '.safetensors.index.json', files of at most that many bytes of
    tensors (but at least one tensor) are written, and their index, which appears last. What fits into one file is
    written as one.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32), "steps": 5}, "model.zcr")
        >>> write(zcrecord.load_record("model.zcr"), "model.safetensors") == os.path.getsize("model.safetensors")
        True

    Raises:
        UnsupportedError: a type that safetensors does not have; names the tensor. LimitError: too many names for a
        header. IntegrityError: a payload is damaged. DestinationExistsError: without `force`, a shard is there.
        SourceError: the file system reports an error.
    """
    payloads = Payloads(record.archive)
    infos = payloads.infos
    for info in infos:
        with located(path=record.archive.path, tensor=info.name):
            _check(info)
    structure = structure_of(record, infos, texts=True)
    plan = _plan(infos, max_shard_size)
    if not all(map(_all_aligned, plan)):
        structure.order = [info.name for info in infos]
        plan = _plan(sorted(infos, key=lambda info: -info.bits), max_shard_size)
    metadata = {name: value for name, value in record.metadata.items() if name not in structure.metadata}
    out = _SafetensorsOutput(payloads, durable, progress)
    path = path_or_none(dest)
    if path is not None and (len(plan) > 1 or path.endswith(shards.INDEX)):
        if is_url(path):
            raise UnsupportedError("safetensors in shards are for paths; write one file", path=path)
        return out.write_shards(path, plan, metadata, structure, force)
    if structure.encode() is not None:
        structure.marked = FORMAT not in metadata
        metadata |= {FORMAT: "pt"} if structure.marked else {}
        metadata[KEY] = structure.encode()
    header = encode_header(_entries(plan[0]), metadata)
    with open_sink(dest, durable=durable, options=storage_options) as sink:
        return out.write_file(sink, header, plan[0])


def _check(info: TensorInfo) -> None:
    """Raise UnsupportedError unless safetensors has a place for this tensor."""
    kind = info.dtype
    if kind.code not in dtypes.by_code:
        raise UnsupportedError(f"its element type ({kind.name}) is not known here; upgrade zcrecord")
    if info.name == METADATA:
        raise UnsupportedError("safetensors keeps this name for itself; rename it")
    if kind is dtypes.STRING:
        raise UnsupportedError("safetensors has no strings; save them as an attribute of the record")
    if kind.safetensors is None:
        form = "record[name].unpack() as int8 or uint8" if kind.packed else "two tensors, real and imaginary"
        raise UnsupportedError(f"safetensors has no {kind.name}; save it as {form}")
    if info.bits != kind.bits:
        raise UnsupportedError(f"safetensors has {kind.name} in {kind.bits} bits, not in {info.bits}; save it packed")
    if kind.packed and prod(info.shape) * info.bits != 8 * info.nbytes:
        raise UnsupportedError(f"its {kind.name} elements do not fill whole bytes, as safetensors demands; pad it")


def _plan(infos: Sequence[TensorInfo], max_nbytes: int | None) -> list[list[TensorInfo]]:
    """Return the tensors of each shard, as `group_by_size`."""
    return [[infos[i] for i in shard] for shard in shards.group_by_size([info.nbytes for info in infos], max_nbytes)]


def _all_aligned(infos: Sequence[TensorInfo]) -> bool:
    """Return True if each tensor starts at a multiple of its element size, as readers like torch need it."""
    units = [max(info.bits >> 3, 1) for info in infos]
    return not any(entry.start % unit for entry, unit in zip(_entries(infos), units, strict=True))


def _entries(infos: Iterable[TensorInfo]) -> Iterable[HeaderEntry]:
    """Yield the header's entries of tensors that lie one after the other."""
    offset = 0
    for info in infos:
        yield HeaderEntry(info.name, info.dtype, info.shape, offset, offset + info.nbytes)
        offset += info.nbytes


class _SafetensorsOutput:
    """A record on its way out: one file, or several."""

    def __init__(self, payloads: Payloads, durable: bool, progress: Progress | None) -> None:
        self._payloads, self._durable, self._progress = payloads, durable, progress
        self._done = 0

    def write_file(self, sink: Sink, header: bytes, infos: Sequence[TensorInfo]) -> int:
        """Write the header and the tensors of one file to a sink; return the file's size in bytes."""
        sink.reserve(len(header) + sum(info.nbytes for info in infos))
        sink.write(header)
        for info in infos:
            for piece in self._payloads.pieces(info):
                sink.write(piece)
                self._done += len(piece)
                if self._progress is not None:
                    self._progress(self._done, self._payloads.nbytes)
        self._payloads.release()
        return sink.position

    def write_shards(
        self, dest: str, plan: list[list[TensorInfo]], metadata: dict[str, str], structure: Structure, force: bool
    ) -> int:
        """Write shards and their index; none appears before all are written, the index last. Return their bytes."""
        place_beside_shards(dest)
        index_path, paths = shards.shard_paths(dest, len(plan))
        versions = [check_destination(None, path, force) for path in (index_path, *paths)]
        real_paths = [*map(place_beside_shards, (*paths, index_path))]
        places = zip(real_paths, (*versions[1:], versions[0]), strict=True)
        weight_map = {
            info.name: os.path.basename(path) for path, infos in zip(paths, plan, strict=True) for info in infos
        }
        text = structure.encode()
        index = shards.encode_index(weight_map, {} if text is None else {KEY: text}, self._payloads.nbytes)
        headers = [encode_header(_entries(infos), metadata) for infos in plan]
        old_version = version_of(dest) if os.path.isfile(dest) else ()
        with FileGroup(real_paths[-1], durable=self._durable) as group:
            written = sum(
                self.write_file(group.add(), header, infos) for header, infos in zip(headers, plan, strict=True)
            )
            group.add().write(index)
            files = [Placement(scratch, *place) for scratch, place in zip(group.finish(), places, strict=True)]
            with refusals(dest), folder_locks(map(os.path.dirname, real_paths)):
                put_in_place(files, durable=self._durable)
                if old_version and version_of(dest) == old_version:
                    os.unlink(dest)  # what was to be replaced; readers would prefer it to the index
        return written + len(index)
