"""The archive of one rank: chunks of tensors, written forward, and the report of them to the rank that joins all.

A chunk is written from the tensor's own memory where that is the host's and in C order, else a few MiB at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.entries import TensorLayout
from zcrecord.dtypes import Array, DType
from zcrecord.errors import MismatchError, UnsupportedError, located
from zcrecord.storage.sink import Sink
from zcrecord.tensors import interop
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.tensors.packed import PackedTensor
from zcrecord.tensors.strides import in_blocks
from zcrecord.writing.catalogue import WrittenShard
from zcrecord.writing.module_tree import ModuleTreeBuilder, state_path
from zcrecord.writing.writers import StreamWriter

_BLOCK = 4 << 20  # bytes that are copied at a time, of a device's memory or of a tensor that is not in C order


class WholeTensor(NamedTuple):
    """A tensor as a whole, of which ranks have chunks: element type's code, bits of an element, shape in elements."""

    dtype: int
    bits: int
    shape: tuple[int, ...]

    def words(self) -> str:
        """Return element type and shape in words, for messages."""
        return f"{dtypes.by_code[self.dtype].name} of shape {self.shape}"


class Chunk(NamedTuple):
    """A box of a tensor: the tensor's name and shape, the box's first index and its size, as torch counts elements."""

    name: str
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    extent: tuple[int, ...]


class RankReport(NamedTuple):
    """The report of one rank: its archive, and its chunks as columns. Can be pickled."""

    shard: WrittenShard | None  # None if the rank had no element to write
    names: list[str]  # of each chunk's tensor
    number: Array  # of its payload, in the index of the archive
    tied_to: Array  # the number of the first payload that is the same memory, so that the chunks are tied; or its own
    origin: Array  # of the boxes, zeros past the tensor's rank
    extent: Array
    tensors: dict[str, WholeTensor]  # all that the rank has chunks of, empty ones among them
    values: dict[str, Any]  # all other objects, by name
    scratch: str = ""  # the name of the archive until the commit; empty if it has its own


class RankWriter:
    """Writes chunks into the archive of a rank, those that are the same view of the same memory once.

    `names` are those of all its tensors; `sink`, which the caller closes, is None if no chunk has elements.
    """

    def __init__(self, torch: Any, sink: Sink | None, names: set[str], *, alignment: int, digest: str | None) -> None:
        self._torch, self._sink, self._names = torch, sink, names
        self._out = None if sink is None else StreamWriter(sink, alignment=alignment, digest=digest)
        self._tree = ModuleTreeBuilder()
        self._first_views: dict[Any, tuple[Any, int]] = {}  # by view of memory: its storage, its first chunk's number
        self._tied_to: list[int] = []  # the number of the chunk that each is tied to, or its own
        self._chunks: list[Chunk] = []  # of payload i of the archive
        self._host: _HostBlocks | None = None
        self._tensors: dict[str, WholeTensor] = {}
        self._next_numbers: dict[str, int] = {}  # by tensor's name, the number of its next chunk, from 1

    def add(self, chunk: Chunk, tensor: Any) -> None:
        """Write one chunk, unless it has no elements.

        Raises:
            MismatchError: the tensor has another shape than the chunk, or another type than an earlier chunk of it.
            UnsupportedError: an element type that the format does not have, or one that cannot be split.
        """
        with located(tensor=chunk.name):
            self._add(chunk, tensor)

    def _add(self, chunk: Chunk, tensor: Any) -> None:
        """Check one chunk and write it, or repeat the payload that it is tied to; errors do not name the tensor."""
        if tuple(tensor.shape) != chunk.extent:
            message = f"has the shape {tuple(tensor.shape)}, and was planned with {chunk.extent}"
            raise MismatchError(f"{message}; save it again, with a new planner")
        viewed = interop.as_view(tensor)
        kind = dtypes.from_numpy(viewed.dtype) if isinstance(viewed, np.ndarray) else viewed.kind
        chunk = _in_elements(chunk, kind)
        whole = WholeTensor(kind.code, kind.bits, chunk.shape)
        if (earlier := self._tensors.setdefault(chunk.name, whole)) != whole:
            raise MismatchError(f"one chunk of it is {whole.words()}, another {earlier.words()}; make them alike")
        if not prod(chunk.extent):
            return
        assert self._out is not None, "a chunk has elements"
        number = len(self._chunks)
        tied_to = self._first_equal_view(tensor, number)
        self._chunks.append(chunk)
        self._tied_to.append(tied_to)
        if tied_to == number:
            payload = self._out.store(self._source(tensor, viewed, kind, chunk))
        else:
            payload = self._out.repeat(tied_to)
        layout = TensorLayout(kind.code, kind.bits, chunk.extent)
        self._tree.tensor(self._new_path(chunk.name), layout, payload)

    def _first_equal_view(self, tensor: Any, number: int) -> int:
        """Return the number of the first chunk that is the same view of the same memory: `number` if this one is."""
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = StorageWeakRef(tensor.untyped_storage())  # weak: keeps no memory, but `cdata` is not used again
        view = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        key = storage.cdata, view, tensor.is_conj(), tensor.is_neg()
        first_storage, first_number = self._first_views.get(key, (None, -1))
        if first_storage is None or first_storage.expired():
            self._first_views[key] = storage, number
            return number
        return first_number

    def _new_path(self, name: str) -> tuple[str, ...]:
        """Return a free path in this archive for a chunk of a tensor; its second chunk gets `~2`, and so on."""
        path, number = state_path(name, self._names), self._next_numbers.get(name, 1)
        while number > 1 and f"{name}~{number}" in self._names:
            number += 1
        self._next_numbers[name] = number + 1
        return path if number == 1 else (*path[:-1], f"{path[-1]}~{number}")

    def _source(self, tensor: Any, viewed: Any, kind: DType, chunk: Chunk) -> LazyTensor:
        """Return a chunk's elements, to be written piece by piece; `viewed` is the tensor by `interop.as_view`."""
        if isinstance(viewed, PackedTensor):
            return LazyTensor(kind, chunk.extent, [viewed])
        if isinstance(viewed, np.ndarray):
            in_c_order = viewed.flags.c_contiguous or not viewed.ndim
            return LazyTensor(kind, chunk.extent, [viewed] if in_c_order else in_blocks(viewed, _BLOCK))
        if self._host is None:
            self._host = _HostBlocks(self._torch, tensor.device)
        return LazyTensor(kind, chunk.extent, self._host.blocks(tensor))

    def finish(self, name: str, values: dict[str, Any]) -> RankReport:
        """Write the index, and return the report; `name` is the file's, `values` are the rank's other objects."""
        shard = None
        numbers = np.zeros(0, np.int64)  # of payloads, by chunk
        if self._out is not None and self._sink is not None:
            entries = self._tree.entries()
            self._out.finish(entries)
            numbers = np.array(entries.payloads, np.int64)
            sha256 = hashlib.sha256(self._out.index).digest()
            shard = WrittenShard(name, self._sink.position, self._out.trailer, sha256, entries.payload_rows)
        dims = max((len(chunk.shape) for chunk in self._chunks), default=0)
        origin, extent = np.zeros((2, len(self._chunks), dims), np.int64)
        for i, chunk in enumerate(self._chunks):
            origin[i, : len(chunk.origin)], extent[i, : len(chunk.extent)] = chunk.origin, chunk.extent
        names = [chunk.name for chunk in self._chunks]
        tied_to = numbers[self._tied_to] if self._chunks else numbers
        return RankReport(shard, names, numbers, tied_to, origin, extent, self._tensors, values)


def _in_elements(chunk: Chunk, kind: DType) -> Chunk:
    """Return a chunk counted in elements, where torch counts two packed as one; UnsupportedError if it is a part."""
    if not kind.packed:
        return chunk
    if chunk.extent != chunk.shape:
        reason = f"{kind.name} elements do not fill whole bytes, and such a tensor is not split"
        raise UnsupportedError(f"{reason}; replicate it, or save it as bytes, .view(torch.uint8)")
    shape = (*chunk.shape[:-1], 2 * chunk.shape[-1])
    return chunk._replace(shape=shape, extent=shape)


class _HostBlocks:
    """Copies a device's tensors into host memory, a block at a time; while one block is used the next is copied."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._cuda = torch, device.type == "cuda"
        self._ring = [torch.empty(_BLOCK, dtype=torch.uint8, device="cpu", pin_memory=self._cuda) for _ in range(2)]

    def blocks(self, tensor: Any) -> Iterator[memoryview]:
        """Yield a device tensor's bytes in C order, in blocks in host memory, each valid until the second after it."""
        torch = self._torch
        plain = tensor.detach().resolve_conj().resolve_neg()
        pending: tuple[Any, Any] | None = None
        for i, block in enumerate(in_blocks(plain, _BLOCK)):
            octets = block.contiguous().reshape(-1).view(torch.uint8)
            host = self._ring[i % 2][: octets.numel()]
            event = self._start_copy(host, octets)
            if pending is not None:
                yield self._memory_after(*pending)
            pending = host, event
        if pending is not None:
            yield self._memory_after(*pending)

    def _start_copy(self, host: Any, octets: Any) -> Any:
        """Start to copy bytes of the device into `host`; return CUDA's event of the end, None if it has ended."""
        if not self._cuda:
            host.copy_(octets)
            return None
        cuda = self._torch.cuda
        stream, event = cuda.current_stream(octets.device), cuda.Event(blocking=True)
        with cuda.stream(stream):
            host.copy_(octets, non_blocking=True)
            event.record(stream)
        return event

    def _memory_after(self, host: Any, event: Any) -> memoryview:
        """Wait for the end of a copy, and return the host's memory as a view."""
        if event is not None:
            event.synchronize()
        return memoryview(host.numpy())
