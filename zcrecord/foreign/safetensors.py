"""Reads safetensors: single files, and shards with their index.

Tensors come in the order of their bytes, names are split at their dots, and the file's metadata is the archive's. What
an archive had besides (types of metadata, attributes, kinds of modules, ties) is kept in one entry of the metadata, so
that it comes back; see `structure`. The rules of the header are `safetensors_header`'s.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.payload_source import Closed
from zcrecord.errors import FormatError, RecordError, UnsupportedError, located
from zcrecord.storage.stream_reader import PIECE

from . import safetensors_index as shards
from .readers import MemoryReader, Reader
from .receiver import Form, Outline, Receiver
from .safetensors_header import MAX_HEADER, HeaderEntry, SafetensorsHeader, check_length, decode_header
from .structure import KEY, Structure, decode_structure

_FEW = 32  # tensors that are given before the archive is made, from which on a whole archive is faster
FORMAT = "format"  # metadata without it is refused by transformers


class _TensorPlace(NamedTuple):
    """A tensor and where its bytes are."""

    entry: HeaderEntry
    reader: Any
    offset: int

    @property
    def nbytes(self) -> int:
        return self.entry.end - self.entry.start


class _File(NamedTuple):
    """A file's header, its reader, and where the tensors' bytes start."""

    header: SafetensorsHeader
    reader: Any
    start: int

    def places(self) -> Iterator[_TensorPlace]:
        """Yield the tensors one by one."""
        return (_TensorPlace(entry, self.reader, self.start + entry.start) for entry in self.header.entries())


class Folder:
    """An index of shards and its files, all of them open. A file's header is read, and checked, when it is needed."""

    def __init__(self, reader: Any, data: bytes | memoryview) -> None:
        """Decode an index, in `data`, and open its files; FormatError, SourceError."""
        if len(data) > MAX_HEADER:
            raise FormatError(f"an index of more than {MAX_HEADER} bytes")
        self.index, self.nbytes = shards.decode_index(data), len(data)
        self.readers = {file: reader.beside(file) for file in self.index.files}
        self._files: dict[str, _File] = {}

    def file(self, name: str) -> _File:
        """Return a file with its header; FormatError, naming it, if a rule is broken or the index says otherwise."""
        if name not in self._files:
            reader = self.readers[name]
            reader.seek(0)  # it may have failed before
            with located(path=reader.path):
                file = _scan_file(reader)
                shards.check_shard(self.index, name, file.header.names)
            self._files[name] = file
        return self._files[name]


class DeferredArchive(Folder):
    """The archive of an index of shards, as a record has it until more is asked for than a few tensors.

    Its files are mapped when it is opened: it stays the same if they are replaced. Threads may share it.
    """

    mode = "r"

    def __init__(self, memory: Any, recipe: Callable[[Any], tuple[Any, ...]]) -> None:
        """Read the index in `memory`, and map its files; errors are those of `open_foreign`. `recipe` is for pickle."""
        self.path, self.absolute, self._memory, self._recipe = memory.path, memory.absolute, memory, recipe
        self._lock, self._left = threading.Lock(), _FEW
        self._archive: Any = None
        super().__init__(MemoryReader(memory), memory.octets[: MAX_HEADER + 1])
        files = [memory, *(reader.memory for reader in self.readers.values())]
        self._mappings = [weakref.ref(file.mapping) for file in files if file.mapping is not None]

    def early(self, name: str) -> Any:
        """Return a view of a tensor by its name; None if the archive is to be made, and asked."""
        with self._lock:
            self._left -= 1
            file = self.index.weight_map.get(name) if self._left >= 0 and isinstance(name, str) else None
            if file is None or KEY in self.index.metadata:
                return None
            (header, reader, start), out = self.file(file), Outline()
            number = header.names.index(name)
            first, end = header.bounds[number : number + 2]
            out.put_range((name,), *header.forms[header.form_ids[number]], reader, start + first, end - first)
            return out.archive(reader.memory).view(0)

    def made(self) -> Any:
        """Return the archive, made now or before; errors are those of `open_foreign`."""
        with self._lock, located(path=self.path):
            if self._archive is None:
                out: Any = Outline()
                read(MemoryReader(self._memory), out, self)
                self._archive = out.archive(self._memory)
                self._archive.source.recipe = self._recipe
            return self._archive

    def close(self) -> bool:
        """End all use of it, as `Archive.close`."""
        with self._lock:
            self._left, self._memory, self._archive, self.readers, self._files = 0, Closed(self.path), None, {}, {}
        return all(mapping() is None for mapping in self._mappings)


def read(reader: Reader, out: Receiver, folder: Folder | None = None) -> int:
    """Give a safetensors file, or the shards of an index, to `out`; returns the bytes of input.

    Read once, forward; only a file written from an archive whose tensors had to change their order is read in the
    archive's order, and so not from a pipe. Tensors that the archive had tied are tied again if `out` reads bytes, and
    theirs are still the same. Of shards `folder` may be given, with what it has read before.

    Raises:
        FormatError: a rule is broken. UnsupportedError: a stream, where a file is needed. SourceError: it cannot be
        read.
    """
    files, metadata, nbytes = _scan(reader, folder)
    structure = decode_structure(metadata.pop(KEY, None))
    if structure.marked:
        metadata.pop(FORMAT, None)
    out.metadata.update(metadata)
    out.metadata.update(structure.metadata)
    metadata.clear()
    if structure.order and not reader.seekable:
        raise UnsupportedError("its tensors were saved in another order; read it from a file, not from a pipe")
    plain = not (out.reads or structure.items or structure.paths or structure.order)
    if not (plain and _put_state(out, files)):
        _give(out, [place for file in files for place in file.places()], structure)
    structure.write_items(out)
    if not reader.seekable and reader.read(1):
        raise FormatError("bytes behind the last tensor belong to none", offset=reader.position - 1)
    return nbytes


def _scan(reader: Reader, folder: Folder | None) -> tuple[list[_File], dict[str, Any], int]:
    """Return the files, tensors in the order of their bytes, the metadata, and how many bytes of input there are."""
    if reader.path is None or not reader.path.endswith(".json"):
        single = _scan_file(reader)
        return [single], single.header.metadata, single.start + single.header.bounds[-1]
    folder = folder or Folder(reader, reader.read(MAX_HEADER + 1))
    files, merged = [folder.file(name) for name in folder.readers], dict[str, Any]()
    nbytes = folder.nbytes + sum(shard.nbytes or 0 for shard in folder.readers.values())
    for name, file in zip(folder.readers, files, strict=True):
        file.header.metadata.pop(KEY, None)  # that of a single file from elsewhere; that of shards is in their index
        shards.merge(merged, file.header.metadata, name)
    shards.merge(merged, folder.index.metadata, "index")
    folder.index.weight_map.clear()  # which was compared: the archive's index takes as much again
    if KEY in merged and not isinstance(merged[KEY], str):
        raise FormatError(f"the index's '{KEY}' entry is no text")
    return files, merged, nbytes


def _scan_file(reader: Any) -> _File:
    """Return one file's header, with the tensors in the order of their bytes."""
    head = reader.read(8)
    if len(head) == 8 and int.from_bytes(head, "little") > MAX_HEADER:
        head += reader.read(64)
    length = check_length(head, reader.nbytes)
    header = reader.read(length)
    if len(header) < length:
        raise FormatError(f"ends inside its header of {length} bytes; it is truncated", offset=8 + len(header))
    reader.described = 0, 8 + length
    return _File(
        decode_header(header, None if reader.nbytes is None else reader.nbytes - 8 - length), reader, 8 + length
    )


def _put_state(out: Receiver, files: Sequence[_File]) -> bool:
    """Give the tensors of all files at once, if `out` takes them so; returns whether it did."""
    numbers: dict[Form, int] = {}
    form_ids, ranges = [np.zeros(0, np.intp)], []
    for header, reader, start in files:
        ids = [numbers.setdefault(form, len(numbers)) for form in header.forms]
        form_ids.append(np.array(ids, np.intp)[header.form_ids])
        bounds = np.array(header.bounds, np.uint64)
        ranges.append((reader, bounds[:-1] + np.uint64(start), np.diff(bounds)))
    names = [name for file in files for name in file.header.names]
    return out.put_state(names, list(numbers), np.concatenate(form_ids), ranges)


def _give(out: Receiver, places: Sequence[_TensorPlace], structure: Structure) -> None:
    """Give every tensor to `out`, in saved order."""
    known = {p.entry.name: p for p in places}
    names = structure.in_order(known) if structure.order else known
    for number, name in enumerate(names):
        structure.write_items(out, number)
        place, path = known[name], structure.path(name, known)
        twin = structure.twin(name)
        if twin in known and out.reads and _same(place, known[twin]):
            out.tie(path, structure.path(twin, known))
            continue
        try:
            out.put_range(path, place.entry.kind, place.entry.shape, place.reader, place.offset, place.nbytes)
        except RecordError as error:
            raise error.located(path=place.reader.path, tensor=name) from error.__cause__


def _same(a: _TensorPlace, b: _TensorPlace) -> bool:
    """Return True if two tensors have the same type, shape and bytes; False for a stream, which is read once."""
    if a.entry[1:3] != b.entry[1:3] or not (a.reader.seekable and b.reader.seekable):
        return False
    for at in range(0, a.nbytes, PIECE):
        size = min(PIECE, a.nbytes - at)
        a.reader.seek(a.offset + at)
        one = a.reader.read(size)
        b.reader.seek(b.offset + at)
        if one != b.reader.read(size):
            return False
    return True
