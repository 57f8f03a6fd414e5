"""Folders of torch.distributed.checkpoint (DCP): `.metadata`, a pickle, and beside it files of chunks.

Each chunk of a tensor, and each value, is a file of `torch.save` within one of those files, which `torch` reads. Here
is which of them make up a tensor. The pickle makes plain values and nothing else, whatever names it has.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.13.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.boxes import blocks_of, box_of
from zcrecord.archive.tilings import tiles
from zcrecord.codec.layout import MAX_DEPTH, MAX_RANK
from zcrecord.errors import FormatError, LimitError, UnsupportedError, located, printable
from zcrecord.storage.folders import is_plain_name
from zcrecord.tensors.strides import c_strides

from .pickled import Function, expect_type, unpickle
from .readers import MemoryReader
from .receiver import Receiver
from .torch_types import Namespace, TorchNames, TorchStorage, TorchTensor, TorchValue, itemsize

METADATA = ".metadata"
_ALIKE = 100  # limit of chunks with one hash
_EXPANDED, _TIMES, _NODE_COST = 64 << 20, 64, 900  # limit of all modules: so many bytes, and so many times `.metadata`


class Chunk(NamedTuple):
    """A part of a tensor: the index of its first element, its elements, and where its own file lies in which file."""

    origin: tuple[int, ...]
    tensor: TorchTensor
    reader: MemoryReader
    offset: int


class Checkpoint(NamedTuple):
    """The value of a checkpoint; of a folder also the chunks of tensors, by the `id` of each, and the files read."""

    value: Any
    chunks: dict[int, list[Chunk]]
    readers: list[MemoryReader]


class _Node(dict[Any, Any]):
    """A dict or a list of the state dict; other dicts are values."""

    def to_tree(self) -> Any:
        """Return it, and all nodes in it, as a dict, or as a list if its keys are the places of one."""
        items = {key: item.to_tree() if type(item) is _Node else item for key, item in self.items()}
        is_list = {int}.issuperset(map(type, items)) and sorted(items) == list(range(len(items)))
        return [items[i] for i in range(len(items))] if is_list and items else items


def read_folder(reader: MemoryReader, load: Callable[[memoryview, TorchNames], Any]) -> Checkpoint:
    """Return a folder's state dict, whose tensors are in chunks; `load` reads a file of torch.save.

    Raises:
        FormatError: chunks do not make up a tensor. SourceError: a file is missing. LimitError: a few bytes of the
        pickle stand for very many items. Any other: the pickle is damaged.
    """
    folder = _DcpFolder(reader, load)
    metadata = folder.metadata
    state, chunks, paths = _Node(), dict[int, list[Chunk]](), metadata.get("planner_data")
    boxes_left = reader.nbytes  # the pickle can refer to one list of boxes, or to one path, many times
    nodes_left = (_EXPANDED + _TIMES * reader.nbytes) // _NODE_COST
    for name, described in expect_type(dict, metadata["state_dict_metadata"]).items():
        with located(tensor=expect_type(str, name)):
            if expect_type(Namespace, described).type_name == "BytesStorageMetadata":
                value = folder.load_part(name, None)[0]
            else:
                fields = _fields(described, "TensorStorageMetadata")
                boxes_left -= len(fields["chunks"])
                if boxes_left < 0:
                    raise LimitError("its chunks are there millions of times; the folder is malicious")
                value, tensor_chunks = _tensor(fields, partial(folder.load_part, name))
                chunks[id(value)] = tensor_chunks
        nodes_left -= _put(state, paths.get(name) if isinstance(paths, dict) else None, name, value)
        if nodes_left < 0:
            raise LimitError("its paths make far more modules than it has tensors; the folder is malicious")
    return Checkpoint(state.to_tree(), chunks, list(folder.readers.values()))


class _DcpFolder:
    """The content of `.metadata`, and the files beside it, which are opened when a part of them is loaded."""

    def __init__(self, reader: MemoryReader, load: Callable[[memoryview, TorchNames], Any]) -> None:
        self._reader, self._load = reader, load
        self._names = TorchNames(reader.nbytes, lambda *_: None)
        octets = bytes(reader.memory.octets)
        root, _ = unpickle(octets, 0, self._find_class, self._names.persistent_load, modern=True)
        self.metadata = _fields(root, "Metadata")
        self.readers: dict[str, MemoryReader] = {}
        self._unread: dict[str, int] = {}  # bytes of each file that no part has had yet
        self._places: dict[Any, dict[str, Any]] = {}  # of parts, by name and origin
        hash_counts = Counter[int]()
        for index, place in expect_type(dict, self.metadata["storage_data"]).items():
            fields = _fields(index, "MetadataIndex")
            origin = None if fields.get("offset") is None else _sizes(fields["offset"])
            key = expect_type(str, fields["fqn"]), origin
            hash_counts[hash(key)] += 1
            if hash_counts[hash(key)] > _ALIKE:
                raise LimitError("a hundred chunks have the same hash; the folder is malicious")
            self._places[key] = _fields(place, "_StorageInfo")

    def _find_class(self, module: str, name: str) -> Any:
        """Return DCP's own classes as makers of a Namespace, whatever their arguments; other names as TorchNames."""
        is_own = module.startswith("torch.distributed.")
        return Function(lambda *_: Namespace(name)) if is_own else self._names.find_class(module, name)

    def load_part(self, name: str, origin: Any) -> tuple[Any, MemoryReader, int]:
        """Return a value or chunk, its file's reader, and its offset there; RecordError if it is not in the file."""
        place = self._places[name, origin]
        path, start, nbytes = place["relative_path"], expect_type(int, place["offset"]), place["length"]
        if expect_type(str, path) not in self.readers:
            if not is_plain_name(path, ".distcp"):
                raise FormatError(f"its file {printable(repr(path))} is not the plain name of a .distcp file")
            self.readers[path] = self._reader.beside(path)
            self._unread[path] = self.readers[path].nbytes
        file = self.readers[path]
        if min(start, nbytes) < 0 or start + nbytes > file.nbytes:
            raise FormatError("ends past the end of its file; it is truncated, copy it again", path=file.path)
        self._unread[path] -= nbytes
        if self._unread[path] < 0:
            raise LimitError("parts of its file overlap; the folder is malicious", path=file.path)
        return self._load(file.memory.octets[start : start + nbytes].toreadonly(), self._names), file, start


def _fields(entry: Any, kind: str) -> dict[str, Any]:
    """Return the fields of an object of DCP; ValueError unless its class has this name."""
    if expect_type(Namespace, entry).type_name != kind:
        raise ValueError(f"a {printable(entry.type_name)} where a {kind} is due")
    return expect_type(dict, entry.state)  # type: ignore[no-any-return]


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the sizes or the origin of a box; ValueError unless they are integers, one for each axis of a tensor."""
    if len(expect_type(tuple, value)) > MAX_RANK or not {int}.issuperset(map(type, value)):
        raise ValueError("sizes of a tensor that are no numbers, or too many")
    return value  # type: ignore[no-any-return]


def _tensor(described: dict[str, Any], load_part: Callable[[Any], Any]) -> tuple[TorchTensor, list[Chunk]]:
    """Return a tensor without bytes that stands for the whole, and its chunks; FormatError unless they tile it."""
    dtype, shape, chunks = described["properties"].state[0].text, _sizes(described["size"]), list[Chunk]()
    for box in described["chunks"]:
        origin, extent = (_sizes(_fields(box, "ChunkStorageMetadata")[key]) for key in ("offsets", "sizes"))
        if prod(extent):
            part, file, offset = load_part(origin)
            if type(part) is TorchValue:
                raise UnsupportedError(part.text)
            if type(part) is not TorchTensor or (part.dtype, part.shape) != (dtype, extent):
                raise FormatError("a chunk of it is another one than .metadata says; copy the folder again")
            chunks.append(Chunk(origin, part, file, offset))
    storage = TorchStorage(dtype, prod(shape) * itemsize(dtype))
    tensor = TorchTensor(storage, dtype, 0, shape, c_strides(shape), {})
    boxes = [(chunk.origin, chunk.tensor.shape) for chunk in chunks]
    corners = np.array(boxes, np.int64).reshape(len(boxes), 2, len(shape))
    is_whole = tiles(corners[:, 0], corners[:, 1], shape) if tensor.nbytes else not chunks
    if not is_whole:
        raise FormatError("its chunks do not make it up; save it again, from every rank that has a part of it")
    if tensor.kind.packed and len(chunks) > 1:
        raise UnsupportedError(f"is {tensor.kind.name} in chunks, which are not put together; save it whole")
    return tensor, chunks


def _put(state: _Node, path: Any, name: str, value: Any) -> int:
    """Put a value at its path in a state dict, or at its name without a legal one; return how many nodes it made."""
    has_keys = type(path) is tuple and {str, int}.issuperset(map(type, path[: MAX_DEPTH + 1]))
    if not has_keys or not 0 < len(path) <= MAX_DEPTH or any(type(key) is int and key >> 31 for key in path):
        path = (name,)
    new_nodes = 0
    for key in path[:-1]:
        new_nodes += key not in state
        state = expect_type(_Node, state.setdefault(key, _Node()))
    if state.setdefault(path[-1], value) is not value:
        raise ValueError("two of its values have one path")
    return new_nodes


def put_chunks(path: Sequence[str], tensor: TorchTensor, chunks: list[Chunk], out: Receiver) -> None:
    """Give a tensor to a receiver: as a range of its file if it is one there, and `out` reads nothing; else decoded."""
    whole = chunks[0].tensor if len(chunks) == 1 else tensor
    if whole.is_plain and not out.reads:
        start = chunks[0].offset + whole.start
        out.put_range(path, whole.kind, whole.shape, chunks[0].reader, start, whole.nbytes)
    elif tensor.kind.packed or not chunks:
        out.add(path, whole.array())
    else:
        out.put_decoded(path, tensor.kind, tensor.shape, partial(_pieces, tensor, chunks), "it was saved in chunks")


def _pieces(tensor: TorchTensor, chunks: list[Chunk]) -> Iterator[memoryview]:
    """Yield the bytes of a tensor that is put together from its chunks, a block at a time, in C order."""
    boxes = []
    for origin, part, reader, _ in chunks:
        mapping = reader.memory.mapping if part.storage.in_file and not part.metadata else None
        mapped: Any = SimpleNamespace(mode="r", mapping=mapping, path=reader.path)  # what box_of asks a source
        boxes.append(box_of(origin or (0,), part.array().reshape(part.shape or (1,)), mapped))  # of rank 0 as of 1
    for block in blocks_of(tensor.shape or (1,), boxes):
        octets = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        yield ((octets != 0).view(np.uint8) if tensor.dtype == "bool" else octets).data
