"""Safetensors in and out: single files and shards with their index, streamed, one piece in memory.

Tensors come in the order of their bytes, names are split at their dots, and the file's metadata is the archive's.
What an archive says besides (types of metadata, attributes, kinds of modules, ties) is kept in one entry of the
metadata, so that it comes back; see `structure`. Rules are `safetensors_header`'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from zcrecord import dtypes
from zcrecord.archive.info import TensorInfo
from zcrecord.archive.payloads import Payloads
from zcrecord.errors import FormatError, RecordError, UnsupportedError
from zcrecord.formats.structure import KEY, Structure, decode_structure, structure_of
from zcrecord.record.record import Record
from zcrecord.record.record_writer import RecordWriter
from zcrecord.storage.files import (
    Binary,
    Progress,
    check_destination,
    is_url,
    open_sink,
    path_or_none,
    place_beside_shards,
)
from zcrecord.storage.new_files import FileGroup, Placement, put_in_place, refusals, version_of
from zcrecord.storage.scratch import folder_locks
from zcrecord.storage.sink import Sink
from zcrecord.storage.stream_reader import PIECE, StreamReader

from . import shards
from .header import MAX_HEADER, METADATA, HeaderEntry, check_length, decode_header, encode_header

_FORMAT = "format"  # metadata without it is refused by transformers


class _TensorPlace(NamedTuple):
    """A tensor and where its bytes are."""

    entry: HeaderEntry
    reader: StreamReader
    offset: int


def read(source: str | Binary, out: RecordWriter, progress: Progress) -> int:
    """Write a safetensors file, or the shards of an index, to `out`; returns the bytes of input.

    Read once, forward, from a path or a stream; only a file written from an archive whose tensors had to change their
    order is read in the archive's order, and so not from a pipe. Tensors that the archive had tied are tied again if
    their bytes are still the same.

    Example:
        >>> import io
        >>> header = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
        >>> file = io.BytesIO(len(header).to_bytes(8, "little") + header + b"ab")
        >>> with RecordWriter("model.zcr") as out: read(file, out, lambda done, total: None)
        63

    Raises:
        FormatError: a rule is broken. UnsupportedError: a stream, where a file is needed. SourceError: it cannot be
        read.
    """
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(StreamReader(source))
        places, metadata, nbytes = _scan(reader, stack)
        structure = decode_structure(metadata.pop(KEY, None))
        if structure.marked:
            metadata.pop(_FORMAT, None)
        out.metadata.update(metadata | structure.metadata)
        if structure.order and not reader.seekable:
            raise UnsupportedError("its tensors were saved in another order; read it from a file, not from a pipe")
        done = nbytes - sum(p.entry.end - p.entry.start for p in places)
        total = nbytes if reader.seekable else None
        for read_bytes in _write_tensors(out, places, structure):
            done += read_bytes
            progress(done, total)
        structure.write_items(out)
        if not reader.seekable and reader.read(1):
            raise FormatError("bytes behind the last tensor belong to none", offset=reader.position - 1)
        progress(nbytes, nbytes)
        return nbytes


def _scan(reader: StreamReader, stack: contextlib.ExitStack) -> tuple[list[_TensorPlace], dict[str, Any], int]:
    """Return all tensors in the order of their bytes, the metadata, and how many bytes of input there are."""
    if reader.path is None or not reader.path.endswith(".json"):
        places, metadata = _scan_file(reader)
        end = places[-1].offset + places[-1].entry.end - places[-1].entry.start if places else reader.position
        return places, dict(metadata), end
    data = reader.read(MAX_HEADER + 1)
    if len(data) > MAX_HEADER:
        raise FormatError(f"an index of more than {MAX_HEADER} bytes")
    index = shards.decode_index(data)
    tensors: list[_TensorPlace] = []
    merged: dict[str, Any] = {}
    nbytes = len(data)
    for file in index.files:
        path = os.path.join(os.path.dirname(reader.path), file)
        shard = stack.enter_context(StreamReader(path, regular=True))
        try:
            places, metadata = _scan_file(shard)
            shards.check_shard(index, file, (p.entry.name for p in places))
        except RecordError as error:
            raise error.located(path=shard.path) from error.__cause__
        metadata.pop(KEY, None)  # a single file's, who knows where from; that of shards is in their index
        shards.merge(merged, metadata, file)
        tensors += places
        nbytes += shard.nbytes or 0
    shards.merge(merged, index.metadata, "index")
    if KEY in merged and not isinstance(merged[KEY], str):
        raise FormatError(f"the index's '{KEY}' entry is no text")
    return tensors, merged, nbytes


def _scan_file(reader: StreamReader) -> tuple[list[_TensorPlace], dict[str, str]]:
    """Return one file's tensors in the order of their bytes, and its metadata."""
    head = reader.read(8)
    if len(head) == 8 and int.from_bytes(head, "little") > MAX_HEADER:
        head += reader.read(64)
    length = check_length(head, reader.nbytes)
    header = reader.read(length)
    if len(header) < length:
        raise FormatError(f"ends inside its header of {length} bytes; it is truncated", offset=8 + len(header))
    decoded = decode_header(header, None if reader.nbytes is None else reader.nbytes - 8 - length)
    return [_TensorPlace(entry, reader, 8 + length + entry.start) for entry in decoded.entries()], decoded.metadata


def _write_tensors(out: RecordWriter, places: list[_TensorPlace], structure: Structure) -> Iterable[int]:
    """Write every tensor in saved order; yields the bytes passed."""
    known = {p.entry.name: p for p in places}
    names = structure.in_order(known) if structure.order else known
    for number, name in enumerate(names):
        structure.write_items(out, number)
        place, path = known[name], structure.path(name, known)
        twin = structure.twin(name)
        if twin in known and _same(place, known[twin]):
            out.tie(path, structure.path(twin, known))
            yield place.entry.end - place.entry.start
            continue
        try:
            place.reader.seek(place.offset)
            with out.tensor(path, place.entry.kind, place.entry.shape) as tensor:
                for piece in place.reader.pieces(place.entry.end - place.entry.start):
                    tensor.write(piece)
                    yield len(piece)
        except RecordError as error:
            raise error.located(path=place.reader.path, tensor=name) from error.__cause__


def _same(a: _TensorPlace, b: _TensorPlace) -> bool:
    """Return True if two tensors have the same type, shape and bytes; False for a stream, which is read once."""
    if a.entry[1:3] != b.entry[1:3] or not (a.reader.seekable and b.reader.seekable):
        return False
    for at in range(0, a.entry.end - a.entry.start, PIECE):
        size = min(PIECE, a.entry.end - a.entry.start - at)
        a.reader.seek(a.offset + at)
        one = a.reader.read(size)
        b.reader.seek(b.offset + at)
        if one != b.reader.read(size):
            return False
    return True


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
        try:
            _check(info)
        except RecordError as error:
            raise error.located(path=record.archive.path, tensor=info.name) from None
    structure = structure_of(record, infos, texts=True)
    plan = _plan(infos, max_shard_size)
    if not all(map(_aligned, plan)):
        structure.order = [info.name for info in infos]
        plan = _plan(sorted(infos, key=lambda info: -info.bits), max_shard_size)
    metadata = {name: value for name, value in record.metadata.items() if name not in structure.metadata}
    out = _Output(payloads, durable, progress)
    path = path_or_none(dest)
    if path is not None and (len(plan) > 1 or path.endswith(shards.INDEX)):
        if is_url(path):
            raise UnsupportedError("safetensors in shards are for paths; write one file", path=path)
        return out.shards(path, plan, metadata, structure, force)
    if structure.encode() is not None:
        structure.marked = _FORMAT not in metadata
        metadata |= {_FORMAT: "pt"} if structure.marked else {}
        metadata[KEY] = structure.encode()
    header = encode_header(_entries(plan[0]), metadata)
    with open_sink(dest, durable=durable, options=storage_options) as sink:
        return out.file(sink, header, plan[0])


def _check(info: TensorInfo) -> None:
    """Raise UnsupportedError unless safetensors has a place for this tensor."""
    kind, count = info.dtype, info.nbytes * 8
    if kind.code not in dtypes.by_code:
        raise UnsupportedError(f"its element type ({kind.name}) is not known here; upgrade zcrecord")
    if info.name == METADATA:
        raise UnsupportedError("safetensors keeps this name for itself; rename it")
    if kind is dtypes.STRING:
        raise UnsupportedError("safetensors has no strings; save them as an attribute of the record")
    if kind.safetensors is None:
        what = "record[name].unpack() as int8 or uint8" if kind.packed else "two tensors, real and imaginary"
        raise UnsupportedError(f"safetensors has no {kind.name}; save it as {what}")
    if info.bits != kind.bits:
        raise UnsupportedError(f"safetensors has {kind.name} in {kind.bits} bits, not in {info.bits}; save it packed")
    if kind.packed and prod(info.shape) * info.bits != count:
        raise UnsupportedError(f"its {kind.name} elements do not fill whole bytes, as safetensors demands; pad it")


def _plan(infos: Sequence[TensorInfo], most: int | None) -> list[list[TensorInfo]]:
    return [[infos[i] for i in shard] for shard in shards.fill([info.nbytes for info in infos], most)]


def _aligned(infos: Iterable[TensorInfo]) -> bool:
    """Return True if each tensor starts at a multiple of its element size, as readers like torch need it."""
    offset = 0
    for info in infos:
        if offset % max(info.bits >> 3, 1):
            return False
        offset += info.nbytes
    return True


def _entries(infos: Iterable[TensorInfo]) -> Iterable[HeaderEntry]:
    offset = 0
    for info in infos:
        yield HeaderEntry(info.name, info.dtype, info.shape, offset, offset + info.nbytes)
        offset += info.nbytes


class _Output:
    """A record on its way out: one file, or several."""

    def __init__(self, payloads: Payloads, durable: bool, progress: Progress | None) -> None:
        self._payloads, self._durable, self._progress = payloads, durable, progress
        self._done = 0

    def file(self, sink: Sink, header: bytes, infos: Sequence[TensorInfo]) -> int:
        """Write one file; returns its bytes."""
        sink.reserve(len(header) + sum(info.nbytes for info in infos))
        sink.write(header)
        for info in infos:
            for piece in self._payloads.pieces(info):
                sink.write(piece)
                self._done += len(piece)
                if self._progress is not None:
                    self._progress(self._done, self._payloads.nbytes)
        self._payloads.let_go()
        return sink.position

    def shards(
        self, dest: str, plan: list[list[TensorInfo]], metadata: dict[str, str], structure: Structure, force: bool
    ) -> int:
        """Write files and their index; none appears before all are written, and the index appears last."""
        place_beside_shards(dest)
        index_path, paths = shards.shard_paths(dest, len(plan))
        versions = [check_destination(None, path, force) for path in (index_path, *paths)]
        reals = [*map(place_beside_shards, (*paths, index_path))]
        places = zip(reals, (*versions[1:], versions[0]), strict=True)
        weight_map = {i.name: os.path.basename(p) for p, part in zip(paths, plan, strict=True) for i in part}
        text = structure.encode()
        index = shards.encode_index(weight_map, {} if text is None else {KEY: text}, self._payloads.nbytes)
        headers = [encode_header(_entries(part), metadata) for part in plan]
        old = version_of(dest) if os.path.isfile(dest) else ()
        with FileGroup(reals[-1], durable=self._durable) as group:
            written = sum(self.file(group.add(), header, part) for header, part in zip(headers, plan, strict=True))
            group.add().write(index)
            files = [Placement(scratch, *place) for scratch, place in zip(group.finish(), places, strict=True)]
            with refusals(dest), folder_locks(map(os.path.dirname, reals)):
                put_in_place(files, durable=self._durable)
                if old and version_of(dest) == old:
                    os.unlink(dest)  # what was to be replaced; readers would prefer it to the index
        return written + len(index)
