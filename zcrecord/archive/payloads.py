"""The tensors of a loaded record as bytes in C order, piece by piece, in bounded memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from zcrecord.codec.digests import RunningDigest
from zcrecord.codec.entries import ValueType
from zcrecord.codec.layout import NONE
from zcrecord.errors import IntegrityError
from zcrecord.storage.stream_reader import KEPT, SequentialMapping
from zcrecord.tensors.strides import address, extent, in_blocks

from .archive import Archive
from .damage import check_digest
from .info import TensorInfo, infos
from .payload_source import Array
from .private_copy import check_apart

_SPAN = 2 << 20  # bytes of a record prepared at a time, in a thread of their own
_GATHERED = 16 << 20  # bytes of a strided tensor put together at a time: each touches many pages


def check_copies(archive: Archive, tensors: Iterable[TensorInfo]) -> None:
    """Raise LimitError if copies of these tensors would take far more bytes than the archive stores."""
    check_apart(sum(tensor.nbytes for tensor in tensors), archive.stored_nbytes(), archive.path)


def check_views(archive: Archive) -> None:
    """Raise LimitError if copies of all tensors, equal views once, would take far more bytes than is stored."""
    numbers = archive.index.tensors["payload"]
    sizes = archive.index.payloads["nbytes"][numbers[numbers != NONE]]
    if sizes.sum(dtype=np.float64) > archive.stored_nbytes():  # else no payload is shared, and nothing is to compute
        views = {(t.payload, t.offset, t.dtype, t.bits, t.shape, t.strides): t for t in infos(archive)}
        check_copies(archive, views.values())


def check_blobs(archive: Archive) -> None:
    """Raise LimitError if copies of the bytes in attributes and metadata would take far more bytes than the file."""
    ix, nbytes = archive.index, 0.0
    sizes = np.append(ix.payloads["nbytes"], np.uint64(0)).astype(np.float64)  # the last for NONE
    for rows in (ix.attributes, ix.metadata):
        numbers = np.minimum(ix.values(rows, ValueType.PAYLOAD), np.uint64(len(ix.payloads)))
        nbytes += sizes[numbers].sum()
    check_apart(int(nbytes), archive.source.opened_nbytes(), archive.path)


class Payloads:
    """The tensors of an archive as bytes in C order, in pieces; each payload is compared with its digest once."""

    def __init__(self, archive: Archive) -> None:
        self.infos = list(infos(archive))  # in saved order
        self.nbytes = sum(info.nbytes for info in self.infos)  # ties each time
        check_copies(archive, self.infos)
        self._archive = archive
        self._verified: set[int] = set()  # payloads
        self._memory: Any = None  # of the last payload
        self._mapped: SequentialMapping | None = None  # of that memory, if its pages are released
        self._base = 0  # address of `_mapped`

    def pieces(self, info: TensorInfo) -> Iterator[Any]:
        """Yield a tensor's bytes in C order, each piece valid until the next; at the end IntegrityError for damage."""
        if info.strides is None:
            yield from self.stored(info)
        elif info.payload is not None:
            if info.payload not in self._verified:
                for _ in self.stored(info):  # compares the digest
                    pass
            self._enter_mapping(self._archive.payload(info.payload))
            buffer = np.empty(min(info.nbytes, _GATHERED), np.uint8)
            for block in in_blocks(self._archive.view(self._archive.find(info.name)), _GATHERED):
                octets = buffer[: block.nbytes]
                self._gather(octets.view(block.dtype).reshape(block.shape), block)
                yield octets

    def stored(self, info: TensorInfo) -> Iterator[memoryview]:
        """Yield the bytes of a tensor's whole payload, whatever the tensor's strides; errors are those of `pieces`."""
        if info.payload is None:
            return
        pieces = self._archive.source.pieces(info.payload)
        if len(pieces) > 1:
            if self._archive.mode == "r":
                check_digest(pieces, info.name)
            yield from self._archive.source.blocks(info.payload)
            return
        octets = self._archive.payload(info.payload)
        start = self._enter_mapping(octets)
        # Of a catalogue the shard may have digests that the outline lacks. A private copy may have been edited.
        skip = info.payload in self._verified or self._archive.mode != "r"
        digest = None if skip else pieces[0].source.digest(pieces[0].number)
        running = RunningDigest()

        def prepare(offset: int) -> memoryview:
            piece = octets[offset : offset + _SPAN]
            if self._mapped is not None:
                self._mapped.populate(start + offset, start + offset + len(piece), _SPAN)
            if digest is not None:
                running.update(piece)
            return piece

        yield from _prepare_ahead(prepare, range(0, len(octets), _SPAN))
        if digest is not None and running.intdigest() != digest:
            fault = "its payload's digest does not match; the file is damaged, copy it again"
            raise IntegrityError(fault, path=self._archive.path, tensor=info.name, offset=info.offset)
        self._verified.add(info.payload)

    def release(self) -> None:
        """Release the pages of the payload that was read last."""
        if self._mapped is not None:
            self._mapped.release()

    def _enter_mapping(self, octets: memoryview) -> int:
        """Return the offset of a payload's bytes in their mapping, after releasing the mapping used before it.

        Returns 0 for memory that is not a read-only mapping of a file: its pages are not released.
        """
        memory = octets.obj
        if memory is not self._memory and hasattr(mmap, "MADV_DONTNEED"):
            self.release()
            self._memory, self._mapped = memory, None
            # A private copy is never released: that would undo what was written to it.
            if isinstance(memory, mmap.mmap) and memoryview(memory).readonly:
                self._mapped = SequentialMapping(memory)
                self._base = address(self._mapped.view)
        return 0 if self._mapped is None else address(octets) - self._base

    def _gather(self, out: Array, block: Array) -> None:
        """Copy a strided block to `out`, split along its widest stride until a part touches few enough pages."""
        start, end = extent(block)
        if end - start <= KEPT or block.size == 1:
            if self._mapped is not None:
                self._mapped.populate(start - self._base, end - self._base)
            out[...] = block
            return
        axis = max(range(block.ndim), key=lambda a: abs(block.strides[a]) if block.shape[a] > 1 else -1)
        step = max(1, KEPT // abs(block.strides[axis]))
        for first in range(0, block.shape[axis], step):
            part = (*(slice(None),) * axis, slice(first, first + step))
            self._gather(out[part], block[part])


def _prepare_ahead(prepare: Callable[[int], memoryview], offsets: range) -> Iterator[memoryview]:
    """Yield the result of `prepare` for each offset, in order; a thread computes the next while one is used."""
    if len(offsets) < 2:
        yield from map(prepare, offsets)
        return
    from concurrent.futures import ThreadPoolExecutor  # here, because only what is large is worth a thread

    with ThreadPoolExecutor(1) as pool:
        next_piece = pool.submit(prepare, offsets[0])
        for offset in offsets[1:]:
            piece = next_piece.result()
            next_piece = pool.submit(prepare, offset)
            yield piece
        yield next_piece.result()
