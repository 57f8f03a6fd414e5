"""Receivers of a format's tensors and values: `Outline` makes an archive over the files.

Another one, in `formats`, copies them to a `RecordWriter`. So each format has one reader, for opening and converting.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.foreign_source import Decoded, ForeignSource
from zcrecord.archive.memory_source import source_in as default_source_in
from zcrecord.archive.payload_source import Array, FileSource, PayloadTable
from zcrecord.codec.entries import (
    KIND_NAMES,
    AttributeEntry,
    Entries,
    Order,
    PayloadId,
    TensorLayout,
    TypedModules,
    WordList,
    dense_layout,
    index_in_memory,
)
from zcrecord.codec.index import PAYLOAD
from zcrecord.codec.layout import NONE, Header, align_up
from zcrecord.dtypes import DType
from zcrecord.errors import UnsupportedError
from zcrecord.storage.memory import Memory
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.tensors.strides import address
from zcrecord.writing.flatten import as_tensor, metadata_entries
from zcrecord.writing.module_tree import ModuleTreeBuilder, state_entries
from zcrecord.writing.sharing import chunks, plan_sharing
from zcrecord.writing.writers import renumber_payloads

from .readers import MemoryReader

__all__ = ["Outline", "Receiver"]

Path = Sequence[str]
Shape = Sequence[int]
Pieces = Callable[[], Iterable[Any]]  # yields bytes from the first on each time it is called
Form = tuple[DType, tuple[int, ...]]  # element type and shape
Wrapper = tuple[str, dict[str, Any]]  # class name and attributes of the module that holds a tensor alone
FileRanges = tuple[Any, Array, Array]  # a file's reader, and where its tensors start there, and their bytes

_KINDS = {name: kind for kind, name in KIND_NAMES.items()}
_layout = functools.lru_cache(4096)(dense_layout)
_PAGE = 1 << 16  # files and decoded payloads begin at multiples of it in the row of offsets


class Receiver(Protocol):
    """Takes the tensors and values of a file, in the record's saved order.

    Attributes:
        metadata: the archive's; may be changed at any time. If not `reads`, values may be WordLists.
        reads: whether payload bytes are read now, so that ties and checksums can be checked by them.
    """

    metadata: dict[str, Any]
    reads: bool

    def module(self, name: Any, kind: str = "mapping", type_name: str = "") -> None:
        """Add a module, as `RecordWriter.module` does."""

    def attribute(self, name: Any, value: Any) -> None:
        """Add an attribute."""

    def tie(self, name: Any, to: Any) -> None:  # noqa: ARG002  # an Outline reads nothing, and so ties nothing
        """Add a tensor that is the same memory as one that was added before; only called if `reads`."""
        return

    def put_range(
        self, path: Path, kind: DType, shape: Sequence[int], reader: Any, offset: int, nbytes: int, order: Order = "C"
    ) -> None:
        """Add a tensor whose bytes lie in the file of a reader as an archive has them."""

    def put_state(
        self, names: Sequence[str], forms: Sequence[Form], form_ids: Any, files: Sequence[FileRanges],
        wrappers: Sequence[Wrapper | None] = (),
    ) -> bool:  # fmt: skip
        """Add all tensors, which lie in files as `put_range` has them, under their `state_path`.

        Only called if not `reads`, for a record of nothing else but metadata. Returns False, having added nothing, if
        they have to be added one by one. Each has one of `forms`; the files hold them in this order; equal ranges tie.
        Tensors of a form with an item in `wrappers` are alone in their modules, which are typed so.
        """

    def put_decoded(
        self, path: Path, kind: DType, shape: Shape, pieces: Pieces, reason: str, order: Order = "C"
    ) -> None:
        """Add a tensor whose bytes `pieces` yields; `reason` says why they are not those of the file."""

    def parts(self, values: Iterable[Any], reader: Any = None) -> list[Any]:
        """Return tensors in memory that may share it, to be added one by one; some may lie in a reader's file."""

    def add(self, path: Any, value: Any) -> None:
        """Add one tensor in memory, perhaps one of `parts`."""


class _Part(tuple[TensorLayout, int]):
    """Layout and payload of one of the tensors that were planned together."""


class Outline(Receiver):
    """Makes the archive of a file while its reader runs. Payload bytes stay where they are.

    Attributes:
        nbytes: size of all files that were read, by which memory for decoded payloads is limited; 0 if not known.

    Example:
        >>> from zcrecord import dtypes
        >>> outline, reader = Outline(), MemoryReader(Memory(memoryview(b"abcdefgh")))
        >>> outline.put_range(("m", "w"), dtypes.by_name["uint8"], (4,), reader, 2, 4)
        >>> outline.archive(reader.memory).view(0).tobytes()
        b'cdef'
    """

    reads = False  # so no reader ties anything here

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.nbytes = 0
        self._tree = ModuleTreeBuilder()
        self._files: list[Memory | Decoded] = []
        self._bases: list[int] = []
        self._end = 0
        self._readers: dict[int, tuple[int, MemoryReader]] = {}  # the base of each reader's file; readers are kept
        self._entries: Entries | None = None  # all, if they were put at once, and their payloads, before `_rows`
        self._state = np.zeros(0, PAYLOAD)
        self._rows: list[tuple[int, int]] = []

    def module(self, name: Any, kind: str = "mapping", type_name: str = "") -> None:
        self._tree.module(tuple(name), _KINDS[kind], type_name)

    def attribute(self, name: Any, value: Any) -> None:
        self._tree.attribute(tuple(name), value)

    def put_range(
        self, path: Path, kind: DType, shape: Sequence[int], reader: Any, offset: int, nbytes: int, order: Order = "C"
    ) -> None:
        """Add a tensor whose bytes lie in the file of a reader; they are copied at first use if they are not aligned.

        The caller has checked that they lie inside the file, and are as many as the shape takes.
        """
        payload = self._range_payload(reader, offset, nbytes, _unit(kind))
        self._tree.tensor(path, _layout(kind, tuple(shape), order), payload)

    def put_state(
        self, names: Sequence[str], forms: Sequence[Form], form_ids: Any, files: Sequence[FileRanges],
        wrappers: Sequence[Wrapper | None] = (),
    ) -> bool:  # fmt: skip
        """Add all tensors by columns; return False, having added none, if one is not aligned or a name is unusual.

        Ranges that start alike must be equal: they become one payload.
        """
        if not names:
            return False
        readers, starts_by_file, sizes_by_file = zip(*files, strict=True)
        starts, sizes = np.concatenate(starts_by_file), np.concatenate(sizes_by_file)
        has_bytes = sizes > 0
        entries = state_entries(names) if aligned(forms, form_ids, starts, sizes) else None
        if entries is None or (any(wrappers) and not _set_wrapper_types(entries, wrappers, form_ids)):
            return False
        entries.layouts, entries.layout_ids = [_layout(kind, shape, "C") for kind, shape in forms], form_ids
        counts = list(map(len, starts_by_file))
        bases = [self._base_of(reader) if count else 0 for reader, count in zip(readers, counts, strict=True)]
        starts += np.repeat(np.array(bases, np.uint64), counts)
        offsets, first, numbers = np.unique(starts[has_bytes], return_index=True, return_inverse=True)
        entries.payloads = np.full(len(names), NONE)
        entries.payloads[has_bytes] = numbers
        self._entries, self._state = entries, np.zeros(len(first), PAYLOAD)
        self._state["offset"], self._state["nbytes"] = offsets, sizes[has_bytes][first]
        return True

    def put_decoded(
        self, path: Path, kind: DType, shape: Shape, pieces: Pieces, reason: str, order: Order = "C"
    ) -> None:
        """Add a tensor whose bytes are decoded when they are first used."""
        nbytes = LazyTensor(kind, shape, ()).nbytes
        payload = self._own_payload(Decoded(nbytes, pieces, reason), nbytes)
        self._tree.tensor(path, _layout(kind, tuple(shape), order), payload)

    def parts(self, values: Iterable[Any], reader: Any = None) -> list[Any]:
        """Return tensors in memory that may share it, to be added one by one; copies nothing in C order.

        What lies in the file of a reader, aligned, is a range of that file.
        """
        plan = plan_sharing([as_tensor(value, f"values[{i}]") for i, value in enumerate(values)])
        ids = list(zip(plan.layout_ids, plan.source_ids, strict=True))
        units = [1] * len(plan.sources)  # the alignment that each needs
        for layout_id, source_id in ids:
            if source_id >= 0:
                units[source_id] = max(units[source_id], plan.layouts[layout_id].bits // 8)
        start = 0 if reader is None else address(reader.memory.octets)
        payloads = [
            self._in_memory(source) if reader is None else self._in_file(source, unit, reader, start)
            for source, unit in zip(plan.sources, units, strict=True)
        ]
        payloads.append(NONE)  # of tensors without bytes, whose source has the number -1
        return [_Part((plan.layouts[layout_id], payloads[source_id])) for layout_id, source_id in ids]

    def add(self, path: Any, value: Any) -> None:
        part = value if isinstance(value, _Part) else self.parts([value])[0]
        self._tree.tensor(path, *part)

    def _in_file(self, source: Any, unit: int, reader: MemoryReader, start: int) -> int:
        """Return the payload of bytes: a range of a reader's file, at address `start`, if they lie in it; or a copy."""
        parts = [] if isinstance(source, LazyTensor) else getattr(source, "parts", [source])
        begin = end = address(parts[0]) - start if parts else -1
        for part in parts:
            if address(part) - start != end or not part.flags.c_contiguous or not part.dtype.isnative:
                return self._in_memory(source)
            end += part.nbytes
        if begin < 0 or end > reader.nbytes:
            return self._in_memory(source)
        return self._range_payload(reader, begin, end - begin, unit)

    def _range_payload(self, reader: MemoryReader, offset: int, nbytes: int, unit: int) -> int:
        """Return the payload of a range of a reader's file, which is copied at first use if it is not aligned."""
        base = self._base_of(reader)
        if not nbytes or not offset % unit or reader.memory.on_demand:  # what is read on demand is aligned
            return self._payload(base + offset, nbytes)
        piece = (reader.memory.octets[offset : offset + nbytes],)
        return self._own_payload(Decoded(nbytes, lambda: piece, "not aligned in its file"), nbytes)

    def _in_memory(self, source: Any) -> int:
        """Return the payload of bytes that are in memory, or read when they are used."""
        if isinstance(source, LazyTensor):
            return self._own_payload(Decoded(source.nbytes, source.pieces, "read when it is used"), source.nbytes)
        parts = list(chunks(source))
        octets = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self._own_payload(Memory(octets.data.toreadonly()), octets.nbytes)

    def _base_of(self, reader: MemoryReader) -> int:
        """Return the base of a reader's file in the row of offsets; adds the file at the first call."""
        if id(reader) not in self._readers:
            self._readers[id(reader)] = self._add_file(reader.memory, reader.nbytes), reader
        return self._readers[id(reader)][0]

    def _add_file(self, file: Memory | Decoded, nbytes: int) -> int:
        """Add a file, or a decoded payload, to the row of offsets; return where it begins there."""
        base = self._end
        self._files.append(file)
        self._bases.append(base)
        self._end = align_up(base + nbytes, _PAGE)
        return base

    def _own_payload(self, file: Memory | Decoded, nbytes: int) -> int:
        """Add a file that is one payload; return its number, or NONE if it has no bytes."""
        return self._payload(self._add_file(file, nbytes), nbytes) if nbytes else NONE

    def _payload(self, offset: int, nbytes: int) -> int:
        """Add a payload by its range in the row of offsets; return its number, or NONE if it has no bytes."""
        if not nbytes:
            return NONE
        self._rows.append((offset, nbytes))
        return len(self._state) + len(self._rows) - 1

    @property
    def readers(self) -> dict[int, MemoryReader]:
        """The readers of the files, by the base of each in the row of offsets."""
        return dict(self._readers.values())

    def archive(self, first: Memory, source_in: Any = None) -> Archive:
        """Return the archive over the files, of which `first` is named in errors. Its index has no digests.

        Args:
            source_in: makes the payload source of one file, which may be remote; by default that of its memory.

        Raises:
            LimitError, UnsupportedError: no archive could have this index; or a tensor is not aligned in a remote file.
        """
        index = index_in_memory(self._finished_entries())
        sizes = [len(file.octets) if isinstance(file, Memory) else file.nbytes for file in self._files]
        described = repr(sizes).encode()
        crc = zlib.crc32(described, zlib.crc32(index.memory))
        for column in (index.tensors, index.payloads, index.modules, index.dims):
            crc = zlib.crc32(column.tobytes(), crc)
        source = self._payload_source(first, PayloadTable(index.payloads, False, 0), source_in)
        readers = [reader for _, reader in self._readers.values()]
        own = [f.octets for f in self._files if isinstance(f, Memory) and f.identity is None and f is not first]
        columns = [column for column in index if isinstance(column, np.ndarray | memoryview)]
        source.sealed = functools.partial(_sha256_of, [described, *columns, *own])
        source.member_sums = lambda: (member for reader in readers for member in reader.sums())
        return Archive(Header(1, 1, 0, 0, 0, source.opened_nbytes(), crc), index, source)

    def _finished_entries(self) -> Entries:
        """Return the entries of all that was added, with metadata and payloads; takes WordLists out of `metadata`."""
        entries = self._entries or self._tree.entries()
        lists = [(name, value) for name, value in self.metadata.items() if isinstance(value, WordList)]
        for name, _ in lists:
            del self.metadata[name]
        entries.metadata = metadata_entries(self.metadata)
        entries.metadata += [AttributeEntry(name, NONE, 0, value) for name, value in lists]
        entries.change_values(self._blob)
        rows = np.concatenate([self._state, np.zeros(len(self._rows), PAYLOAD)])
        if self._rows:
            rows["offset"][len(self._state) :], rows["nbytes"][len(self._state) :] = np.array(self._rows, np.uint64).T
        renumber_payloads(entries, rows)
        return entries

    def _payload_source(self, first: Memory, table: PayloadTable, source_in: Any) -> FileSource:
        """Return the source of payloads in the files; UnsupportedError if one has to be decoded of a remote file."""
        octets = first.octets.toreadonly()
        if self._files in ([], [first]):
            return (source_in or default_source_in)(first, octets, table)  # bytes that were read stay writable there
        # Of a remote file only what is fetched is in memory; bytes of attributes lie behind it in the row.
        is_remote = source_in is not None and self._files[0] is first
        remote = source_in(first._replace(octets=octets), octets, table) if is_remote else None
        if source_in is not None and any(isinstance(file, Decoded) for file in self._files):
            fault = "has a tensor that is not aligned in it, and is not read by URL; download it, or convert it"
            raise UnsupportedError(f"{fault}: zcrecord convert {first.path} model.zcr")
        nbytes = self.nbytes if source_in is None else 0  # what a server says is not known
        return ForeignSource(first, self._files, np.array(self._bases, np.uint64), table, None, remote, nbytes)

    def _blob(self, value: Any) -> Any:
        """Return an attribute's value with bytes as a payload of their own, by its number; any other as it is."""
        if not isinstance(value, bytes | memoryview):
            return value
        return PayloadId(self._in_memory(np.frombuffer(value, np.uint8)) if len(value) else NONE)


def _sha256_of(parts: Sequence[Any]) -> bytes:
    """Return the SHA-256 of arrays and bytes, each after its length."""
    import hashlib  # here, because it takes 3 ms

    running = hashlib.sha256()
    for part in parts:
        octets = part.tobytes() if isinstance(part, np.ndarray) else part
        running.update(b"%d " % len(octets))
        running.update(octets)
    return running.digest()


def _set_wrapper_types(entries: Entries, wrappers: Sequence[Wrapper | None], form_ids: Any) -> bool:
    """Set the types of modules that wrap a tensor, by its form; False, and no change, if one has another child."""
    modules, parents = entries.module_columns, entries.parents
    assert modules is not None, "they were made by columns"
    count = len(modules.ends)
    has_one_child = (np.bincount(parents, minlength=count) == 1) & (modules.ends == np.arange(1, count + 1))
    order = np.argsort(form_ids, kind="stable")
    groups = np.split(order, np.searchsorted(form_ids[order], np.arange(1, len(wrappers))))
    wrapped = [(tensors, *wrapper) for tensors, wrapper in zip(groups, wrappers, strict=True) if wrapper is not None]
    if not all(has_one_child[parents[tensors]].all() for tensors, *_ in wrapped):
        return False
    for tensors, _, attributes in wrapped:
        entries.places[tensors] = len(attributes)  # attributes come first
    typed_modules = [TypedModules(parents[tensors], type_name, values) for tensors, type_name, values in wrapped]
    entries.module_columns = modules._replace(typed=typed_modules)
    return True


def aligned(forms: Sequence[Form], form_ids: Any, starts: Array, sizes: Array) -> bool:
    """Return True if tensors of these forms start at multiples of the alignment that their elements need."""
    units = np.array([_unit(kind) for kind, _ in forms], np.uint64)[form_ids]
    return not np.count_nonzero((starts % units)[sizes > 0])


@functools.lru_cache(4096)
def _unit(kind: DType) -> int:
    """Return the alignment in bytes that elements of a type need."""
    return 1 if kind.numpy is None or kind.packed else max(kind.bits // 8, 1)
