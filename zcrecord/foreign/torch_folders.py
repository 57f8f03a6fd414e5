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
from typing import Any

import numpy as np

from zcrecord.archive.boxes import blocks_of, box_of
from zcrecord.archive.tilings import tiles
from zcrecord.codec.layout import MAX_DEPTH, MAX_RANK
from zcrecord.errors import FormatError, LimitError, UnsupportedError, located, printable
from zcrecord.storage.folders import is_plain_name
from zcrecord.tensors.strides import c_strides

from .pickled import Function, exactly, unpickle
from .readers import MemoryReader
from .receiver import Receiver
from .torch_types import Fields, TorchNames, TorchStorage, TorchTensor, TorchValue, itemsize

METADATA = ".metadata"
_ALIKE = 100  # limit of chunks with one hash
_EXPANDED, _TIMES, _NODE_COST = 64 << 20, 64, 900  # limit of all modules: so many bytes, and so many times `.metadata`

Chunk = tuple[tuple[int, ...], TorchTensor, MemoryReader, int]  # first index, elements, and the file, from where on
Found = tuple[Any, dict[int, list[Chunk]], list[MemoryReader]]  # the value, each tensor's chunks by its `id`, the files


class _Node(dict[Any, Any]):
    """A dict or a list of the state dict; other dicts are values."""

    def made(self) -> Any:
        """Return it as a list if its keys are the places of one."""
        items = {key: item.made() if type(item) is _Node else item for key, item in self.items()}
        places = {int}.issuperset(map(type, items)) and sorted(items) == list(range(len(items)))
        return [items[i] for i in range(len(items))] if places and items else items


def read_folder(reader: MemoryReader, load: Callable[[memoryview, TorchNames], Any]) -> Found:
    """Return a folder's state dict, whose tensors are in chunks; `load` reads a file of torch.save.

    What the pickle shares, by its memo, is not gone through again and again: parts of files and boxes are counted.

    Raises:
        FormatError: chunks do not make up a tensor. SourceError: a file is missing. Any other: the pickle is damaged.
    """
    names, files, state = TorchNames(reader.nbytes, lambda *_: None), dict[str, MemoryReader](), _Node()
    left, alike, boxes = dict[str, int](), Counter[int](), reader.nbytes  # bytes of each file, boxes
    nodes = (_EXPANDED + _TIMES * reader.nbytes) // _NODE_COST

    def named(module: str, name: str) -> Any:
        own = module.startswith("torch.distributed.")
        return Function(lambda *_: Fields(name)) if own else names.named(module, name)

    def loaded(name: str, origin: Any) -> tuple[Any, MemoryReader, int]:
        place = places[name, origin]
        path, start, nbytes = exactly(str, place["relative_path"]), exactly(int, place["offset"]), place["length"]
        if path not in files:
            if not is_plain_name(path, ".distcp"):
                raise FormatError(f"its file {printable(repr(path))} is not the plain name of a .distcp file")
            files[path] = reader.beside(path)
            left[path] = files[path].nbytes
        if min(start, nbytes) < 0 or start + nbytes > files[path].nbytes:
            raise FormatError("ends past the end of its file; it is truncated, copy it again", path=files[path].path)
        left[path] -= nbytes
        if left[path] < 0:
            raise LimitError("parts of its file overlap; the folder is malicious", path=files[path].path)
        return load(files[path].memory.octets[start : start + nbytes].toreadonly(), names), files[path], start

    metadata = _fields(unpickle(bytes(reader.memory.octets), 0, named, names.persistent, modern=True)[0], "Metadata")
    places, chunks, paths = dict[Any, dict[str, Any]](), dict[int, list[Chunk]](), metadata.get("planner_data")
    for index, place in exactly(dict, metadata["storage_data"]).items():
        at = _fields(index, "MetadataIndex")
        key = exactly(str, at["fqn"]), None if at.get("offset") is None else _sizes(at["offset"])
        alike[hash(key)] += 1
        if alike[hash(key)] > _ALIKE:
            raise LimitError("a hundred chunks have the same hash; the folder is malicious")
        places[key] = _fields(place, "_StorageInfo")
    for name, described in exactly(dict, metadata["state_dict_metadata"]).items():
        with located(tensor=exactly(str, name)):
            if exactly(Fields, described).type_name == "BytesStorageMetadata":
                value = loaded(name, None)[0]
            else:
                fields = _fields(described, "TensorStorageMetadata")
                if (boxes := boxes - len(fields["chunks"])) < 0:
                    raise LimitError("its chunks are there millions of times; the folder is malicious")
                value, found = _tensor(fields, partial(loaded, name))
                chunks[id(value)] = found
        nodes -= _put(state, paths.get(name) if isinstance(paths, dict) else None, name, value)
        if nodes < 0:
            raise LimitError("its paths make far more modules than it has tensors; the folder is malicious")
    return state.made(), chunks, list(files.values())


def _fields(entry: Any, kind: str) -> dict[str, Any]:
    """Return the fields of an object of DCP, of the class of this name."""
    if exactly(Fields, entry).type_name != kind:
        raise ValueError(f"a {printable(entry.type_name)} where a {kind} is due")
    return exactly(dict, entry.state)  # type: ignore[no-any-return]


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the sizes or the first index of a box; ValueError unless they are as many numbers as a tensor may have."""
    if len(exactly(tuple, value)) > MAX_RANK or not {int}.issuperset(map(type, value)):
        raise ValueError("sizes of a tensor that are no numbers, or too many")
    return value  # type: ignore[no-any-return]


def _tensor(described: dict[str, Any], loaded: Callable[[Any], Any]) -> tuple[TorchTensor, list[Chunk]]:
    """Return a tensor that stands for the whole, without bytes, and its chunks."""
    dtype, shape, chunks = described["properties"].state[0].text, _sizes(described["size"]), list[Chunk]()
    for box in described["chunks"]:
        origin, extent = (_sizes(_fields(box, "ChunkStorageMetadata")[key]) for key in ("offsets", "sizes"))
        if prod(extent):
            chunk, file, start = loaded(origin)
            if type(chunk) is TorchValue:
                raise UnsupportedError(chunk.text)
            if type(chunk) is not TorchTensor or (chunk.dtype, chunk.shape) != (dtype, extent):
                raise FormatError("a chunk of it is another one than .metadata says; copy the folder again")
            chunks.append((origin, chunk, file, start))
    storage = TorchStorage(dtype, prod(shape) * itemsize(dtype))
    tensor = TorchTensor(storage, dtype, 0, shape, c_strides(shape), {})
    boxes = [(origin, chunk.shape) for origin, chunk, _, _ in chunks]
    corners = np.array(boxes, np.int64).reshape(len(boxes), 2, len(shape))
    if not tiles(corners[:, 0], corners[:, 1], shape) if tensor.nbytes else chunks:
        raise FormatError("its chunks do not make it up; save it again, from every rank that has a part of it")
    if tensor.kind.packed and len(chunks) > 1:
        raise UnsupportedError(f"is {tensor.kind.name} in chunks, which are not put together; save it whole")
    return tensor, chunks


def _put(state: _Node, path: Any, name: str, value: Any) -> int:
    """Put a value at its path, or at its name; returns how many nodes were made for it."""
    listed = type(path) is tuple and {str, int}.issuperset(map(type, path[: MAX_DEPTH + 1]))
    if not listed or not 0 < len(path) <= MAX_DEPTH or any(type(key) is int and key >> 31 for key in path):
        path = (name,)
    made = 0
    for key in path[:-1]:
        made += key not in state
        state = exactly(_Node, state.setdefault(key, _Node()))
    if state.setdefault(path[-1], value) is not value:
        raise ValueError("two of its values have one path")
    return made


def put_chunks(path: Sequence[str], tensor: TorchTensor, chunks: list[Chunk], out: Receiver) -> None:
    """Give a tensor to a receiver: as a range of its file, if that is wanted and possible, else put together."""
    whole = chunks[0][1] if len(chunks) == 1 else tensor
    if whole.is_plain and not out.reads:
        _, _, file, start = chunks[0]
        out.put_range(path, whole.kind, whole.shape, file, start + whole.start, whole.nbytes)
    elif tensor.kind.packed or not chunks:
        out.add(path, whole.array())
    else:
        out.put_decoded(path, tensor.kind, tensor.shape, partial(_pieces, tensor, chunks), "it was saved in chunks")


def _pieces(tensor: TorchTensor, chunks: list[Chunk]) -> Iterator[memoryview]:
    boxes = []
    for origin, part, file, _ in chunks:
        mapping = file.memory.mapping if part.storage.in_file and not part.metadata else None
        mapped: Any = SimpleNamespace(mode="r", mapping=mapping, path=file.path)
        boxes.append(box_of(origin or (0,), part.array().reshape(part.shape or (1,)), mapped))
    for block in blocks_of(tensor.shape or (1,), boxes):
        octets = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        yield ((octets != 0).view(np.uint8) if tensor.dtype == "bool" else octets).data
