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
from zcrecord.archive.unflatten import attribute_entries, check_full_names, key_of, plain, unflatten
from zcrecord.codec.entries import ModuleKind
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import DType
from zcrecord.errors import FormatError, LimitError, UnsupportedError
from zcrecord.record.load import load_record

from .folder import catalogue_of
from .join import OBJECTS, PATHS, PLANNER_DATA
from .values import PICKLED, Path, PickledValue, path_from_text

_UNNAMED = 1 << 16  # keys that lead to items of lists without a name, such as empty dicts
_SHARED = 64  # names that each piece may have, on average
_MOST_KEYS = 500  # of a path; planners go through the lists that they make of it by recursion


class StoredBox(NamedTuple):
    """A piece of a tensor that lies in one archive: the tensor's number, the piece's, and the box of its elements."""

    tensor: int
    piece: int
    origin: tuple[int, ...]
    extent: tuple[int, ...]


class Checkpoint:
    """A checkpoint that was opened: a folder, a catalogue or archive, or a URL of either."""

    def __init__(self, path: Any, storage_options: Mapping[str, Any] | None = None) -> None:
        self._given, self._options = path, storage_options
        record = load_record(catalogue_of(path), storage_options=storage_options)
        self.archive: Archive = record.archive
        self.path = record.path
        names = self.archive.names()
        self.tensors: dict[str, int] = dict(zip(names, range(len(names)), strict=True))
        self.metadata: dict[str, Any] = record.metadata
        self._pieces: dict[int, list[StoredBox]] = {}
        table = self.archive.source.piece_table()
        self._room = _UNNAMED + len(names) + (0 if table is None else _SHARED * len(table.file))
        self._boxes: dict[Any, list[Any]] = {}
        self.row, self.place = cache(self.archive.row), cache(self._place)
        self._types: dict[int, tuple[DType, int, tuple[int, ...]]] = {}
        self._paths: dict[int, Path] = {0: ()}
        self._verified: set[tuple[int, int]] = set()

    def newer(self) -> Checkpoint | None:
        """Return the checkpoint that a save has put in the place of this one; None if it is still there."""
        current = Checkpoint(self._given, self._options)
        return None if current.identity == self.identity else current

    @property
    def identity(self) -> str:
        """The same for no two checkpoints: each save has file names of its own."""
        names = "\n".join(self.archive.source.file_names)
        return hashlib.sha256(names.encode() + self.archive.header.encode()).hexdigest()

    # Tensors.

    def type_of(self, i: int) -> tuple[DType, int, tuple[int, ...]]:
        """Return element type, stored bits and shape of a tensor, in elements."""
        if i not in self._types:
            row = self.row(i)
            if (kind := dtypes.by_code.get(row.dtype)) is None:
                reason = f"dtype code {row.dtype} is not known; upgrade zcrecord, or leave the tensor out of the load"
                raise UnsupportedError(reason, path=self.path, tensor=self.archive.index.name(i))
            self._types[i] = kind, row.bits, self.archive.shape(row)
        return self._types[i]

    def pieces(self, i: int) -> list[StoredBox]:
        """Return the pieces of a tensor; none if it has no elements. FormatError unless they tile it.

        DCP makes lists of them for each name: a LimitError if tied tensors would have far more than there are pieces.
        """
        if i not in self._pieces:
            key: Any = i
            row, table = self.row(i), self.archive.source.piece_table()
            if table is not None and table.origin is not None and row.payload != NONE:
                at = table.pieces(row.payload)
                corners = (column[at.start : at.stop].tobytes() for column in (table.origin, table.extent))
                key = (self.archive.shape(row), row.bits, *corners)
            if key not in self._boxes:  # a model has few layouts, and whether boxes tile a tensor takes long to check
                self._boxes[key] = [tuple(map(tuple, corners.tolist())) for corners in self.archive.boxes(i)]
            self._room -= len(self._boxes[key][0])
            if self._room < 0:
                what = f"its tensors, most of them tied, have over {_SHARED} times the pieces that there are"
                raise LimitError(f"{what}; load fewer of them at a time", path=self.path)
            self._pieces[i] = [StoredBox(i, k, *box) for k, box in enumerate(zip(*self._boxes[key], strict=True))]
        return self._pieces[i]

    def _place(self, box: StoredBox) -> tuple[int, int]:
        """Return the file of a piece, by number, and its payload's number there: in this order they are read."""
        number, table = self.row(box.tensor).payload, self.archive.source.piece_table()
        if table is None:
            return 0, number
        piece = table.pieces(number)[box.piece]
        return int(table.file[piece]), int(table.payload[piece])

    def open_files(self, boxes: Iterable[StoredBox]) -> None:
        """Open the archives that pieces lie in, and fetch the pieces of remote ones; they may be removed afterwards."""
        by_file: dict[int, list[int]] = {}
        for file, number in sorted({self.place(box) for box in boxes}):
            by_file.setdefault(file, []).append(number)
        source = self.archive.source
        source.open_files(by_file)
        for file, numbers in by_file.items():
            if file != NONE:
                (source.file_archive(file) if source.file_names else self.archive).fetch(numbers)

    def locate(self, box: StoredBox, archive: Archive | None = None, *, verify: bool = False) -> tuple[Any, int]:
        """Return memory with a piece's bytes in C order, and their offset: the mapping, or that of a private `archive`.

        Bytes of a tensor with strides are copied. `verify` compares the piece with its digest, the first time.
        """
        archive = archive or self.archive
        row = self.row(box.tensor)
        if verify and self.place(box) not in self._verified:
            check_digest(self.archive.source.pieces(row.payload, [box.piece]), self.archive.index.name(box.tensor))
            self._verified.add(self.place(box))
        if len(self.pieces(box.tensor)) > 1:
            [piece] = archive.source.pieces(row.payload, [box.piece])
            if piece.nbytes != prod(box.extent) * (row.bits >> 3):
                fault = "a piece of it has another size than its box"
                raise FormatError(fault, path=piece.source.path, tensor=archive.index.name(box.tensor))
            return piece.source.locate(piece.number)
        if row.strides != NONE:
            return np.ascontiguousarray(archive.elements(box.tensor)).view(np.uint8).reshape(-1).data, 0
        octets, start = archive.source.locate(row.payload)
        return octets, start + row.byte_offset

    # Values that are no tensors.

    @cached_property
    def values(self) -> Mapping[str, tuple[int, int]]:
        """The names of values; of each its attribute's row, or -1 and its module's number."""
        ix = self.archive.index
        check_full_names(ix, self.archive.header.index_size)
        check_blobs(self.archive)
        names = list(map(ix.text_of, ix.modules))
        objects = self.metadata.get(OBJECTS, [])
        modules = dict(zip(names, range(len(names)), strict=True))
        inside = np.zeros(len(names), bool)
        values: dict[str, tuple[int, int]] = {}
        for name in dict.fromkeys(objects) if isinstance(objects, list) else ():  # once: a module may hold millions
            if m := modules.get(name):  # 0 is the record itself
                inside[m : int(ix.modules["end"][m])] = True
                values[name] = -1, m
        parents = ix.attributes["parent"].tolist()
        for i, (parent, row) in enumerate(zip(parents, ix.attributes, strict=True)):
            if not inside[parent]:
                key = ix.text_of(row)
                values[f"{names[parent]}.{key}" if parent else key] = i, parent
        return values

    def value(self, name: str) -> Any:
        """Return a value; an object that was pickled as a PickledValue."""
        ix, payload = self.archive.index, lambda number: bytes(self.archive.payload(number))
        i, module = self.values[name]
        if i >= 0:
            [entry] = attribute_entries(ix, ix.attributes[i : i + 1], payload)
            return entry.value
        return unflatten(ix, module, self.archive.view, payload, _value_of_module)

    # Paths.

    @property
    def planner_bytes(self) -> bytes | None:
        """The data of the planner, pickled, where they are not the paths of names."""
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
        """Raise UnsupportedError if a planner's unpickled data would make planners build lists out of all proportion.

        They take the path of each name for one without looking: a place may be any number, such as a float or a tensor.
        """
        known = data if isinstance(data, dict) else {}
        paths = [known[name] for name in (*self.tensors, *self.values) if name in known]
        listed = all(type(path) in (tuple, list) for path in paths)
        fault = ""
        if listed and sum(map(len, paths)) > self._most_keys:  # a pickle may have one path for all names
            fault = "paths that are together longer than the checkpoint"
        elif not listed or not all(type(key) in (int, str) for path in paths for key in path):
            fault = "paths that are not of texts and integers"
        elif len(list(self._bounded_paths(map(tuple, paths)))) < len(paths):
            fault = "paths with places in lists that are longer than the checkpoint"
        if fault:
            advice = "if you trust where it comes from, allow_pickle=True"
            raise UnsupportedError(f"metadata '{PLANNER_DATA}' has {fault}; {advice}", path=self.path)

    @property
    def _most_keys(self) -> int:
        """Number of keys in all paths together, and in the lists that they make: in proportion to the index."""
        return self.archive.header.index_size + _UNNAMED

    def _bounded_paths(self, paths: Iterable[Path]) -> Iterator[Path]:
        """Yield the paths of which planners make lists of bounded length: a list is as long as the places in it say.

        An item of a list, named or not, counts as often as keys lead to it, which is the cost of going through it.
        Paths that bring the sum out of proportion to the index are left out.
        """
        left = most = self._most_keys
        root: dict[Any, Any] = {}  # by key; the length of a list under None
        for path in paths:
            # No list becomes longer than `most`; sums with integers of a million digits take long.
            if len(path) > _MOST_KEYS or any(type(key) is int and not 0 <= key < most for key in path):
                continue
            node, more = root, 0
            lists: list[tuple[dict[Any, Any], int]] = []
            for depth, key in enumerate(path, 1):
                if isinstance(key, int) and key >= node.get(None, 0):
                    more += depth * (key + 1 - node.get(None, 0))
                    lists.append((node, key + 1))
                node = node.setdefault(key, {})
            if more <= left:
                left -= more
                for node, length in lists:
                    node[None] = length
                yield path

    def path_in_tree(self, name: str) -> Path:
        """Return the path of a name as the module tree has it."""
        ix = self.archive.index
        if (i := self.tensors.get(name)) is not None:
            return self._child_path(ix.tensors[i], key_of(ix, ix.tensors[i]))
        i, module = self.values[name]
        return self._module_path(module) if i < 0 else self._child_path(ix.attributes[i], ix.text_of(ix.attributes[i]))

    def _child_path(self, row: Any, key: str) -> Path:
        """Return the path of a child by its row and key; in a list it is an integer, its place."""
        module = int(row["parent"])
        listed = self.archive.index.modules["kind"][module] == ModuleKind.LIST and key == str(row["place"])
        return (*self._module_path(module), int(key) if listed else key)

    def _module_path(self, module: int) -> Path:
        if module not in self._paths:
            row = self.archive.index.modules[module]
            self._paths[module] = self._child_path(row, key_of(self.archive.index, row))
        return self._paths[module]


def _value_of_module(kind: int, type_name: str, items: list[tuple[str, Any]]) -> Any:
    """Return a module as `plain` does, but that of a pickled object as a PickledValue."""
    if kind == ModuleKind.OBJECT and type_name == PICKLED and [key for key, _ in items] == ["value"]:
        data = items[0][1]
        if isinstance(data, bytes):
            return PickledValue(data)
    return plain(kind, type_name, items)


class ByName(Mapping[str, Any]):
    """Base class of mappings from each name of a checkpoint to a value that is made when it is asked for."""

    def __init__(self, opened: Checkpoint) -> None:
        self._opened = opened

    def __contains__(self, name: object) -> bool:
        return name in self._opened.tensors or name in self._opened.values

    def __iter__(self) -> Iterator[str]:
        yield from self._opened.tensors
        yield from self._opened.values

    def __len__(self) -> int:
        return len(self._opened.tensors) + len(self._opened.values)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class PathsByName(ByName):
    """The path of each name: DCP's planners unflatten names by it."""

    def __init__(self, opened: Checkpoint) -> None:
        super().__init__(opened)
        self._others = opened.other_paths()

    def __getitem__(self, name: str) -> Path:
        if name not in self:
            raise KeyError(name)
        return self._others.get(name) or self._opened.path_in_tree(name)
