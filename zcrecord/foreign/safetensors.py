"""Reads safetensors: single files, and shards with their index.

Tensors come in the order of their bytes, names are split at their dots, and the file's metadata is the archive's. What
an archive had besides (types of metadata, attributes, kinds of modules, ties) is kept in one entry of the metadata, so
that it comes back; see `structure`. The rules of the header are `safetensors_header`'s.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.memory_source import source_in as default_source_in
from zcrecord.archive.payload_source import Closed, PayloadTable
from zcrecord.archive.private_copy import PrivateSource
from zcrecord.codec.file_types import HEAD
from zcrecord.codec.index import PAYLOAD
from zcrecord.dtypes import DType
from zcrecord.errors import FormatError, RecordError, SourceError, SourceNotFoundError, UnsupportedError, located
from zcrecord.storage.memory import Memory, Mode, read_on_demand
from zcrecord.storage.stream_reader import PIECE

from . import safetensors_index as shards
from .readers import MemoryReader, Reader
from .receiver import FileRanges, Form, Outline, Receiver, aligned
from .safetensors_header import MAX_HEADER, SafetensorsHeader, check_length, decode_header
from .structure import KEY, Structure, decode_structure

_FEW = 32  # tensors that are given before the archive is made, from which on a whole archive is faster
_map_local = partial(read_on_demand, unless_local=True)
_NO_PAYLOADS = PayloadTable(np.zeros(0, PAYLOAD), False, 0)
FORMAT = "format"  # metadata without it is refused by transformers


@contextlib.contextmanager
def _explain_missing_shard() -> Iterator[None]:
    """Add to the error for a missing file that the index of shards names it."""
    try:
        yield
    except SourceNotFoundError as error:
        fault = f"{error.message}; the index of the shards names it: copy it, too"
        raise SourceNotFoundError(fault, path=error.path, errno=error.errno) from error


class _TensorPlace(NamedTuple):
    """A tensor and where its bytes are in the file of a reader."""

    name: str
    kind: DType
    shape: tuple[int, ...]
    reader: Any
    offset: int
    nbytes: int


class _File(NamedTuple):
    """A file's header, its reader, and the offset of the tensors' bytes in it."""

    header: SafetensorsHeader
    reader: Any
    start: int

    def places(self) -> Iterator[_TensorPlace]:
        """Yield the tensors one by one."""
        names, form_ids, forms, bounds, _ = self.header
        for name, form, (start, end) in zip(names, form_ids, pairwise(bounds), strict=True):
            yield _TensorPlace(name, *forms[form], self.reader, self.start + start, end - start)

    def ranges(self) -> FileRanges:
        """Return the reader, and two columns: the tensors' offsets in the file, and their sizes in bytes."""
        bounds = np.array(self.header.bounds, np.uint64)
        return self.reader, bounds[:-1] + np.uint64(self.start), np.diff(bounds)


class _Files:
    """A file, named "", or an index of shards and its files, each opened and checked when it is needed."""

    def __init__(self, reader: Any) -> None:
        """Read the file's header, or the index; FormatError if it breaks a rule."""
        self._reader, self._files = reader, dict[str, _File]()
        self.names, self.index = [""], None
        if reader.path is None or not reader.path.endswith(".json"):
            self._files[""] = _scan_file(reader)
            return
        data = reader.read(MAX_HEADER + 1)
        if len(data) > MAX_HEADER:
            raise FormatError(f"an index of more than {MAX_HEADER} bytes")
        self.index, self.nbytes = shards.decode_index(data), len(data)
        self.names = self.index.files

    def file(self, name: str) -> _File:
        """Return the file of a name, opened at the first call; FormatError for its header, or if the index differs."""
        if name not in self._files:
            reader = self._open(name)
            with located(path=reader.path):
                file = _scan_file(reader)
                assert self.index is not None, "a single file was scanned"
                shards.check_shard(self.index, name, file.header.names)
            self._files[name] = file
        return self._files[name]

    def _open(self, name: str) -> Any:
        """Return the reader of a shard; SourceError if it is missing."""
        with _explain_missing_shard():
            return self._reader.beside(name)


class DeferredArchive(_Files):
    """The archive of a file, or of an index of shards, as a record has it until more than a few tensors are asked for.

    Shards are mapped when they are needed; one that was replaced since is refused. Threads may share it.
    """

    def __init__(self, memory: Memory, recipe: Callable[[Any], tuple[Any, ...]], mode: Mode) -> None:
        """Read the header, or the index, in `memory`; errors are those of `open_foreign`. `recipe` is for pickle.

        In mode "c" `memory` has no index, and all tensors are views of one private copy; it is made at once if one of
        them is not aligned.
        """
        self.path, self.absolute, self.mode = memory.path, memory.absolute, mode
        self._memory: Any = memory
        self._recipe, self._lock, self._left = recipe, threading.Lock(), _FEW
        self._archive: Any = None
        self._source_in: Any = None  # None for that of the file itself
        self._copy: Any = Memory(memoryview(b""))
        self._mappings: list[weakref.ref[Any]] | None = None
        with located(path=self.path):
            super().__init__(MemoryReader(memory, read=_map_local))
            with _explain_missing_shard():
                self._known = {name: self._reader.identity_beside(name) for name in self.names if name}
        if self.index is not None:
            return
        header, (_, starts, sizes) = self.file("").header, self.file("").ranges()
        is_plain = KEY not in header.metadata
        if mode == "c" and is_plain and aligned(header.forms, header.form_ids, starts, sizes):
            self._copy = copy = default_source_in(memory, memory.octets, _NO_PAYLOADS).private_memory()
            self._source_in = lambda *file: PrivateSource(copy, copy.octets, file[2], 0, default_source_in(*file))
        elif mode == "c" or not is_plain:
            self.with_index()

    def _open(self, name: str) -> Any:
        reader = super()._open(name)
        if reader.memory.identity != self._known[name]:
            raise SourceError("was replaced or changed since its index was opened; load it again", path=reader.path)
        return reader

    def early_view(self, name: str) -> Any:
        """Return a view of a tensor by its name, before there is an archive; None if that has to be made, and asked."""
        with self._lock:
            self._left -= 1
            if self._left < 0 or self._archive is not None or not isinstance(name, str):
                return None
            shard: str | None = ""
            if self.index is not None:  # with KEY the name in the archive may be another one
                shard = None if KEY in self.index.metadata else self.index.find(name)
            if shard is None or name not in self.file(shard).header.names:
                return None
            (header, reader, data_start), out = self.file(shard), Outline()
            number = header.names.index(name)
            start, end = header.bounds[number : number + 2]
            out.put_range((name,), *header.forms[header.form_ids[number]], reader, data_start + start, end - start)
            return out.archive(reader.memory, self._source_in).view(0)

    def with_index(self) -> Any:
        """Return the archive, made now or before; errors are those of `open_foreign`."""
        with self._lock, located(path=self.path):
            if self._archive is None:
                out: Any = Outline()
                read(MemoryReader(self._memory, read=_map_local), out, self)
                archive = out.archive(self._memory, self._source_in)
                archive.source.recipe = self._recipe
                self._archive = archive.private() if self.mode != archive.mode else archive
            return self._archive

    def close(self) -> bool:
        """End all use of it, as `Archive.close`; return True if nothing uses its mappings any more."""
        with self._lock:
            if self._mappings is None:
                memories = [self._memory, self._copy, *(file.reader.memory for file in self._files.values())]
                self._mappings = [weakref.ref(memory.mapping) for memory in memories if memory.mapping is not None]
                self._left, self._memory, self._archive, self._files = 0, Closed(self.path), None, {}
                self._source_in = self._copy = self._reader = None
        return all(mapping() is None for mapping in self._mappings)


def read(reader: Reader, out: Receiver, scanned: _Files | None = None) -> int:
    """Give a safetensors file, or the shards of an index, to `out`; returns the bytes of input.

    Read once, forward; only a file written from an archive whose tensors had to change their order is read in the
    archive's order, and so not from a pipe. Tensors that the archive had tied are tied again if `out` reads bytes, and
    theirs are still the same. `scanned` has what was read of it before.

    Raises:
        FormatError: a rule is broken. UnsupportedError: a stream, where a file is needed. SourceError: it cannot be
        read.
    """
    files, metadata, nbytes = _scan(scanned or _Files(reader))
    structure = decode_structure(metadata.pop(KEY, None))
    if structure.marked:
        metadata.pop(FORMAT, None)
    out.metadata.update(metadata)
    out.metadata.update(structure.metadata)
    metadata.clear()
    if structure.order and not reader.seekable:
        raise UnsupportedError("its tensors were saved in another order; read it from a file, not from a pipe")
    is_plain = not (out.reads or structure.items or structure.paths or structure.order)
    if not (is_plain and _put_state(out, files)):
        _put_tensors(out, [place for file in files for place in file.places()], structure)
    structure.write_items(out)
    if not reader.seekable and reader.read(1):
        raise FormatError("bytes behind the last tensor belong to none", offset=reader.position - 1)
    return nbytes


def _scan(scanned: _Files) -> tuple[list[_File], dict[str, Any], int]:
    """Return the files, their metadata, which may be changed, and the bytes of input; FormatError as `read`."""
    files, merged = [scanned.file(name) for name in scanned.names], dict[str, Any]()
    if scanned.index is None:
        return files, files[0].header.metadata, files[0].start + files[0].header.bounds[-1]
    for name, file in zip(scanned.names, files, strict=True):
        file.header.metadata.pop(KEY, None)  # that of a single file from elsewhere; that of shards is in their index
        shards.merge_metadata(merged, file.header.metadata, name)
    shards.merge_metadata(merged, scanned.index.metadata, "index")
    if KEY in merged and not isinstance(merged[KEY], str):
        raise FormatError(f"the index's '{KEY}' entry is no text")
    return files, merged, scanned.nbytes + sum(file.reader.nbytes for file in files)


def _scan_file(reader: Any) -> _File:
    """Read and check one file's header; FormatError if a rule is broken."""
    head = reader.read(8)
    if len(head) == 8 and int.from_bytes(head, "little") > MAX_HEADER:
        head += reader.read(HEAD)  # by which `check_length` names the type of another file
    length = check_length(head, reader.nbytes)
    header = reader.read(length)
    if len(header) < length:
        raise FormatError(f"ends inside its header of {length} bytes; it is truncated", offset=8 + len(header))
    reader.described = 0, 8 + length
    data_nbytes = None if reader.nbytes is None else reader.nbytes - 8 - length
    return _File(decode_header(header, data_nbytes), reader, 8 + length)


def _put_state(out: Receiver, files: Sequence[_File]) -> bool:
    """Give `out` the columns of all files' tensors at once; return False if it takes tensors one by one."""
    forms: dict[Form, int] = {}
    form_ids = [np.zeros(0, np.intp)]
    for header, _, _ in files:
        ids = [forms.setdefault(form, len(forms)) for form in header.forms]
        form_ids.append(np.array(ids, np.intp)[header.form_ids])
    ranges = [file.ranges() for file in files]
    names = [name for file in files for name in file.header.names]
    return out.put_state(names, list(forms), np.concatenate(form_ids), ranges)


def _put_tensors(out: Receiver, places: Sequence[_TensorPlace], structure: Structure) -> None:
    """Give every tensor to `out`, in saved order, with modules and attributes between them; errors name the tensor."""
    places_by_name = {place.name: place for place in places}
    names = structure.in_order(places_by_name) if structure.order else places_by_name
    for number, name in enumerate(names):
        structure.write_items(out, number)
        place, path = places_by_name[name], structure.path(name, places_by_name)
        twin = structure.twin(name)
        if twin in places_by_name and out.reads and _have_same_bytes(place, places_by_name[twin]):
            out.tie(path, structure.path(twin, places_by_name))
            continue
        try:
            out.put_range(path, place.kind, place.shape, place.reader, place.offset, place.nbytes)
        except RecordError as error:
            raise error.located(path=place.reader.path, tensor=name) from error.__cause__


def _have_same_bytes(tensor: _TensorPlace, twin: _TensorPlace) -> bool:
    """Return True if two tensors have the same type, shape and bytes; False for a stream, which is read once."""
    if (tensor.kind, tensor.shape) != (twin.kind, twin.shape) or not (tensor.reader.seekable and twin.reader.seekable):
        return False
    for start in range(0, tensor.nbytes, PIECE):
        size = min(PIECE, tensor.nbytes - start)
        if bytes(tensor.reader.read_at(tensor.offset + start, size)) != twin.reader.read_at(twin.offset + start, size):
            return False
    return True
