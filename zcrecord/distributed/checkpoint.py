"""An opened checkpoint: its names, the boxes of its tensors, its values. Opens no rank's archive before it is read.

`load_record` opens it, so that it may be a catalogue or one archive, in a folder or behind a URL. Imports neither torch
nor DCP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.archive.archive import Archive
from zcrecord.archive.damage import check_digest
from zcrecord.archive.payloads import check_blobs
from zcrecord.archive.shards import COPY_AGAIN
from zcrecord.archive.unflatten import attribute_entries, check_full_names, key_of, plain, unflatten
from zcrecord.codec.entries import ModuleKind
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import DType
from zcrecord.errors import FormatError, LimitError, UnsupportedError
from zcrecord.record.load import load_record

from .folder import catalogue_of
from .join import OBJECTS, PATHS, PLANNER_DATA
from .values import PICKLED, Path, PickledValue, path_from_text

_EXTRA_KEYS = 1 << 16  # in a small checkpoint: keys of paths to items of lists without a name, such as empty dicts
_NAMES_PER_PIECE = 64  # on average, at most: tied tensors share their pieces
_MOST_PATH_KEYS = 500  # planners go through the lists that they make of a path by recursion


class StoredBox(NamedTuple):
    """A piece of a tensor in one archive: numbers of the tensor and of the piece; first index and size of its box."""

    tensor: int
    piece: int
    origin: tuple[int, ...]
    extent: tuple[int, ...]


class Checkpoint:
    """An opened checkpoint: a folder, a catalogue or archive, or a URL of one of these.

    `tensors` has the number of each tensor by name. Mappings live as long as this object or a view of them.
    """

    def __init__(self, path: Any, storage_options: Mapping[str, Any] | None = None) -> None:
        self._location, self._options = path, storage_options
        record = load_record(catalogue_of(path), storage_options=storage_options)
        self.archive: Archive = record.archive
        self.path = record.path
        names = self.archive.names()
        self.tensors: dict[str, int] = {name: i for i, name in enumerate(names)}
        self.metadata: dict[str, Any] = record.metadata
        self._pieces: dict[int, list[StoredBox]] = {}
        table = self.archive.source.piece_table()
        stored_pieces = 0 if table is None else len(table.file)
        self._piece_budget = _EXTRA_KEYS + len(names) + _NAMES_PER_PIECE * stored_pieces  # of the lists in _pieces
        self._most_keys = self.archive.header.index_size + _EXTRA_KEYS  # of all paths, and of lists made of them
        self._corners: dict[Any, list[Any]] = {}  # first indices and sizes of boxes, by layout
        self.row, self.place = cache(self.archive.row), cache(self._place)
        self._types: dict[int, tuple[DType, int, tuple[int, ...]]] = {}
        self._paths: dict[int, Path] = {0: ()}
        self._verified: set[tuple[int, int]] = set()

    def newer(self) -> Checkpoint | None:
        """Return the checkpoint that a save has put in the place of this one; None if it is still there."""
        current = Checkpoint(self._location, self._options)
        return None if current.identity == self.identity else current

    @property
    def identity(self) -> str:
        """A hash that differs between any two saves, since each save gives its files new names."""
        names = "\n".join(self.archive.source.file_names)
        return hashlib.sha256(names.encode() + self.archive.header.encode()).hexdigest()

    def type_of(self, i: int) -> tuple[DType, int, tuple[int, ...]]:
        """Return element type, bits of an element and shape of a tensor; UnsupportedError for an unknown type."""
        if i not in self._types:
            row = self.row(i)
            if (kind := dtypes.by_code.get(row.dtype)) is None:
                reason = f"dtype code {row.dtype} is not known; upgrade zcrecord, or leave the tensor out of the load"
                raise UnsupportedError(reason, path=self.path, tensor=self.archive.index.name(i))
            self._types[i] = kind, row.bits, self.archive.shape(row)
        return self._types[i]

    def pieces(self, i: int) -> list[StoredBox]:
        """Return the pieces of a tensor, none if it has no elements; FormatError unless they tile it.

        LimitError if tied tensors have far more pieces in all than are stored: DCP makes a list of them for each name.
        """
        if i not in self._pieces:
            layout = self._piece_layout(i)
            if layout not in self._corners:  # a model has few layouts, and the check that boxes tile a tensor is slow
                self._corners[layout] = [tuple(map(tuple, corners.tolist())) for corners in self.archive.boxes(i)]
            origins, extents = self._corners[layout]
            self._piece_budget -= len(origins)
            if self._piece_budget < 0:
                fault = f"its tensors, most of them tied, have over {_NAMES_PER_PIECE} times the pieces that there are"
                raise LimitError(f"{fault}; load fewer of them at a time", path=self.path)
            boxes = zip(origins, extents, strict=True)
            self._pieces[i] = [StoredBox(i, number, *box) for number, box in enumerate(boxes)]
        return self._pieces[i]

    def _piece_layout(self, i: int) -> Any:
        """Return a key that is equal for tensors of one shape that are split in the same way."""
        row, table = self.row(i), self.archive.source.piece_table()
        if table is None or table.origin is None or row.payload == NONE:
            return i
        pieces = table.pieces(row.payload)
        corners = (column[pieces.start : pieces.stop].tobytes() for column in (table.origin, table.extent))
        return self.archive.shape(row), row.bits, *corners

    def _place(self, box: StoredBox) -> tuple[int, int]:
        """Return the number of a piece's file, and its payload's number there; in ascending order they are read."""
        payload, table = self.row(box.tensor).payload, self.archive.source.piece_table()
        if table is None:
            return 0, payload
        piece = table.pieces(payload)[box.piece]
        return int(table.file[piece]), int(table.payload[piece])

    def open_files(self, boxes: Iterable[StoredBox]) -> None:
        """Open the archives that pieces lie in, and fetch the pieces of remote ones; they may be removed afterwards."""
        by_file: dict[int, list[int]] = {}
        for file, payload in sorted({self.place(box) for box in boxes}):
            by_file.setdefault(file, []).append(payload)
        source = self.archive.source
        source.open_files(by_file)
        for file, payloads in by_file.items():
            if file != NONE:  # NONE: the catalogue itself, which is open
                archive = source.file_archive(file) if source.file_names else self.archive
                archive.fetch(payloads)

    def locate(self, box: StoredBox, archive: Archive | None = None, *, verify: bool = False) -> tuple[Any, int]:
        """Return memory with a piece's bytes in C order, and the offset of the first one there.

        The memory is the mapping, or that of `archive`, a private view of this checkpoint's; a tensor with strides is
        copied, at each call. With `verify` the checkpoint's own piece is compared with its digest, the first time.

        Raises:
            FormatError: the piece has another size than its box. IntegrityError: the digests differ.
        """
        archive = archive if archive is not None else self.archive
        row = self.row(box.tensor)
        if verify and self.place(box) not in self._verified:
            check_digest(self.archive.source.pieces(row.payload, [box.piece]), self.archive.index.name(box.tensor))
            self._verified.add(self.place(box))
        if len(self.pieces(box.tensor)) > 1:
            [piece] = archive.source.pieces(row.payload, [box.piece])
            if piece.nbytes != (nbytes := prod(box.extent) * (row.bits >> 3)):
                fault = f"a piece of it has {piece.nbytes} bytes, its box {nbytes}; {COPY_AGAIN}"
                raise FormatError(fault, path=piece.source.path, tensor=archive.index.name(box.tensor))
            return piece.source.locate(piece.number)
        if row.strides != NONE:
            return np.ascontiguousarray(archive.elements(box.tensor)).view(np.uint8).reshape(-1).data, 0
        octets, start = archive.source.locate(row.payload)
        return octets, start + row.byte_offset

    @cached_property
    def values(self) -> Mapping[str, tuple[int, int]]:
        """Values by name: the number of an attribute and of its module, or -1 and the number of an object's module."""
        ix = self.archive.index
        check_full_names(ix, self.archive.header.index_size)
        check_blobs(self.archive)
        module_names = list(map(ix.text_of, ix.modules))
        modules = {name: number for number, name in enumerate(module_names)}
        objects = self.metadata.get(OBJECTS, [])
        is_in_object = np.zeros(len(module_names), bool)
        values: dict[str, tuple[int, int]] = {}
        for name in dict.fromkeys(objects) if isinstance(objects, list) else ():  # once: a module may hold millions
            if module := modules.get(name):  # 0 is the record itself
                is_in_object[module : int(ix.modules["end"][module])] = True
                values[name] = -1, module
        parents = ix.attributes["parent"].tolist()
        for i, (parent, row) in enumerate(zip(parents, ix.attributes, strict=True)):
            if not is_in_object[parent]:
                key = ix.text_of(row)
                values[f"{module_names[parent]}.{key}" if parent else key] = i, parent
        return values

    def value(self, name: str) -> Any:
        """Return the value of a name, copied out of the mapping; a pickled object as a PickledValue."""
        ix = self.archive.index
        attribute, module = self.values[name]
        if attribute >= 0:
            [entry] = attribute_entries(ix, ix.attributes[attribute : attribute + 1], self._payload_bytes)
            return entry.value
        return unflatten(ix, module, self.archive.view, self._payload_bytes, _value_of_module)

    def _payload_bytes(self, number: int) -> bytes:
        return bytes(self.archive.payload(number))

    @property
    def planner_bytes(self) -> bytes | None:
        """The planner's data, pickled; None if they are paths of names. FormatError if they are not bytes."""
        data = self.metadata.get(PLANNER_DATA)
        if not isinstance(data, bytes | memoryview | None):
            message = f"metadata '{PLANNER_DATA}' is a {type(data).__name__}, not bytes"
            advice = "the checkpoint is damaged, or of another writer: save it again"
            raise FormatError(f"{message}; {advice}", path=self.path)
        return None if data is None else bytes(data)

    def other_paths(self) -> dict[str, Path]:
        """Return the paths, by name, that do not follow from the module tree."""
        texts = self.metadata.get(PATHS, [])
        paths = map(path_from_text, texts if isinstance(texts, list) else [])
        return {".".join(map(str, path)): path for path in self._bounded_paths(path for path in paths if path)}

    def check_planner_data(self, data: Any) -> None:
        """Raise UnsupportedError if a planner's unpickled data would make planners build lists of any length."""
        path_by_name = data if isinstance(data, dict) else {}
        paths = [path_by_name[name] for name in (*self.tensors, *self.values) if name in path_by_name]
        are_sequences = all(type(path) in (tuple, list) for path in paths)
        fault = ""
        if are_sequences and sum(map(len, paths)) > self._most_keys:  # a pickle may have one path for all names
            fault = "paths that are together longer than the checkpoint"
        elif not are_sequences or not all(type(key) in (int, str) for path in paths for key in path):
            fault = "paths that are not of texts and integers"
        elif len(list(self._bounded_paths(map(tuple, paths)))) < len(paths):
            fault = "paths with places in lists that are longer than the checkpoint"
        if fault:
            advice = "if you trust where it comes from, allow_pickle=True"
            raise UnsupportedError(f"metadata '{PLANNER_DATA}' has {fault}; {advice}", path=self.path)

    def _bounded_paths(self, paths: Iterable[Path]) -> Iterator[Path]:
        """Yield the paths of which planners make lists of bounded length; a list is as long as its largest place says.

        Each item of a list costs as many keys as lead to it, for that is the work of going through it. A path is left
        out if it brings the sum over `_most_keys`, or is longer than planners can go through.
        """
        budget = longest_list = self._most_keys
        root: dict[Any, Any] = {}  # nested dicts by key; a node that is a list has its length under None
        for path in paths:
            # Not left to the sum below: sums with integers of a million digits take long.
            if len(path) > _MOST_PATH_KEYS or any(type(key) is int and not 0 <= key < longest_list for key in path):
                continue
            node, cost = root, 0
            grown_lists: list[tuple[dict[Any, Any], int]] = []
            for depth, key in enumerate(path, 1):
                if isinstance(key, int) and key >= node.get(None, 0):
                    cost += depth * (key + 1 - node.get(None, 0))
                    grown_lists.append((node, key + 1))
                node = node.setdefault(key, {})
            if cost <= budget:
                budget -= cost
                for grown, length in grown_lists:
                    grown[None] = length
                yield path

    def path_in_tree(self, name: str) -> Path:
        """Return the path of a tensor or a value by its modules in the archive; KeyError for any other name."""
        ix = self.archive.index
        if (tensor := self.tensors.get(name)) is not None:
            return self._child_path(ix.tensors[tensor], key_of(ix, ix.tensors[tensor]))
        attribute, module = self.values[name]
        if attribute < 0:
            return self._module_path(module)
        row = ix.attributes[attribute]
        return self._child_path(row, ix.text_of(row))

    def _child_path(self, row: Any, key: str) -> Path:
        """Return the path of a child by its row and key; in a list it is an integer, its place."""
        module = int(row["parent"])
        in_list = self.archive.index.modules["kind"][module] == ModuleKind.LIST and key == str(row["place"])
        return (*self._module_path(module), int(key) if in_list else key)

    def _module_path(self, module: int) -> Path:
        if module not in self._paths:
            row = self.archive.index.modules[module]
            self._paths[module] = self._child_path(row, key_of(self.archive.index, row))
        return self._paths[module]


def _value_of_module(kind: int, type_name: str, items: list[tuple[str, Any]]) -> Any:
    """Return the value of a module, as `unflatten.plain` does, but of a pickled object a PickledValue."""
    if kind == ModuleKind.OBJECT and type_name == PICKLED and [key for key, _ in items] == ["value"]:
        data = items[0][1]
        if isinstance(data, bytes):
            return PickledValue(data)
    return plain(kind, type_name, items)


class ByName(Mapping[str, Any]):
    """Base class of mappings from each name of a checkpoint to a value that is made when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint.tensors or name in self._checkpoint.values

    def __iter__(self) -> Iterator[str]:
        yield from self._checkpoint.tensors
        yield from self._checkpoint.values

    def __len__(self) -> int:
        return len(self._checkpoint.tensors) + len(self._checkpoint.values)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class PathsByName(ByName):
    """The path of each name, by which DCP's planners unflatten a state dict; of most, that in the module tree."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._other_paths = checkpoint.other_paths()

    def __getitem__(self, name: str) -> Path:
        if name not in self:
            raise KeyError(name)
        return self._other_paths.get(name) or self._checkpoint.path_in_tree(name)
