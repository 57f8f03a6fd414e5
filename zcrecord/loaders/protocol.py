"""Protocol of loaders, which bring tensors to a device, and the plan of payloads that a loader is given.

`plan` makes plans, `load` calls loaders, `host` has the loader to copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from zcrecord.archive.damage import BlockCheck
from zcrecord.dtypes import DType
from zcrecord.errors import UnsupportedError

_MAPPED_AT_ONCE = 2 << 20  # bytes that one page fault may map, earlier pages that were unmapped included


class RangeSource(Protocol):
    """Source of bytes that are not contiguous in memory or in a file: a remote archive, a box of a tensor."""

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the source's bytes from `offset` on, or raise a RecordError."""


def unmap_pages(octets: memoryview, start: int, stop: int) -> None:
    """Unmap the pages of bytes [start, stop) of a shared mapping, and up to 2 MiB before; views stay valid."""
    mapping = octets.obj
    if not isinstance(mapping, mmap.mmap) or not hasattr(mapping, "madvise"):
        return
    first = start // _MAPPED_AT_ONCE * _MAPPED_AT_ONCE
    last = stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, slots=True, eq=False)
class PayloadRef:
    """A payload, or a part of one, to be loaded to a device. Equal only to itself.

    Its bytes are in at least one of three places: `buffer`, `path` and `source`. Those of a box that are not one range
    of a payload have a `source` alone, which gives them in C order.

    Attributes:
        name: the full name of the first tensor that uses it.
        path: the absolute path of the file; None for bytes in memory or remote.
        buffer: the bytes themselves, in memory or in the read-only mapping, flat and read-only. Make arrays of it by
            `np.frombuffer`, which keeps the mapping open; `np.ndarray` over it does not.
        source: reads the bytes if they are neither in memory nor in a file, or not contiguous there.
        offset: of the first byte, in the file at `path`; without a path in the archive, buffer or source.
        nbytes: the number of bytes.
        dtype: the element type.
        bits: the size of an element; less than 8 for packed ones.
        shape: of the tensor.
        strides: in elements, as stored; None for C order.
        payload: its number in the record: equal for tensors that share it; -1 for a tensor without any bytes.
        byte_offset: of element [0, ..., 0] from the first byte; 0 except for some strided tensors.
        checked: True if the bytes are compared with checksums on their way: of an archive with checksums of blocks all
            that are read, but for views; of another one, whole payloads of a remote archive that has digests.
            `read_into` compares them; who reads them from `path` calls `check`.
        check: compares the blocks of the payload that its bytes [lo, hi) meet; None for those that are not checked so.
        inside: offset of the first byte in its payload.
    """

    name: str
    path: str | None
    buffer: memoryview | None = field(repr=False)
    source: RangeSource | None = field(repr=False)
    offset: int
    nbytes: int
    dtype: DType
    bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    payload: int
    byte_offset: int = 0
    checked: bool = False
    check: BlockCheck | None = field(default=None, repr=False)
    inside: int = 0

    def read_into(self, target: memoryview, start: int = 0) -> None:
        """Fill `target` with the bytes from `start` on, out of the mapping, memory or remote archive; checks blocks."""
        if self.buffer is not None:
            out, octets = np.frombuffer(target, np.uint8), np.frombuffer(self.buffer, np.uint8, len(target), start)
            step = max(len(out), 1) if self.check is None else self.check.blocks.size  # hashed while it is in a cache
            for lo in range(0, len(out), step):
                piece = out[lo : lo + step]
                np.copyto(piece, octets[lo : lo + step])  # a memoryview's copy would keep the GIL
                if self.check is not None:
                    first = self.inside + start + lo
                    self.check(first, first + len(piece), piece.data)
        elif self.source is not None:
            self.source.readinto_at(self.offset + start, target)
            if self.check is not None:
                self.check(self.inside + start, self.inside + start + len(target), target)
        else:
            raise UnsupportedError("its bytes are in a file alone; load it into 'read'", tensor=self.name)

    def let_go(self, start: int, stop: int) -> None:
        """Unmap the pages of copied bytes [start, stop), and up to 2 MiB before them; views stay valid."""
        if self.buffer is not None and self.path is not None:
            unmap_pages(self.buffer, self.offset + start, self.offset + stop)


def sources_of(ref: PayloadRef) -> list[RangeSource]:
    """Return the source of a ref, or those that a box's source reads; none for bytes in memory or in a file."""
    sources: list[RangeSource] = getattr(ref.source, "sources", [] if ref.source is None else [ref.source])
    return sources


class Target(NamedTuple):
    """Relation of a tensor to the payload that is loaded for it.

    `ref` is loaded once, and shared by all tensors of that payload. With `view` None the loader's result is the tensor;
    else `ref` is loaded as bytes, and `view` describes the tensor in them.
    """

    ref: PayloadRef
    view: PayloadRef | None


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Plan of a load, given to `begin`.

    Attributes:
        refs: the payloads to load, in the order of the file, each once; empty tensors have none.
        targets: every tensor by its full name, in saved order.
        max_in_flight: the most bytes that may be in flight at a time.
        path: the file of all refs with a path.
        identity: of that file when it was opened: device, inode, size, time of change.
        advance: a loader calls it with the number of bytes that arrived since the last call; it raises if the user
            cancelled. If a loader never calls it, a ref counts as arrived when `load` returns; `advance(0)` in `begin`
            announces calls for all bytes.
    """

    refs: tuple[PayloadRef, ...]
    targets: dict[str, Target]
    max_in_flight: int
    path: str | None = None
    identity: tuple[int, ...] | None = None
    advance: Callable[[int], None] = field(default=lambda _: None, repr=False)

    @cached_property
    def nbytes(self) -> int:
        """Total number of bytes."""
        return sum(ref.nbytes for ref in self.refs)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Names of the tensors with bytes that the load compares with no digest; see `PayloadRef.checked`.

        None of an archive with checksums of blocks. Of another local archive all; of a remote one boxes, since a digest
        covers a whole payload, and all if there are no digests. Loading them whole, and cutting them here, checks them.
        """
        return tuple(name for name, (ref, _) in self.targets.items() if ref.nbytes and not ref.checked)

    @cached_property
    def largest(self) -> int:
        """Size of the largest ref in bytes."""
        return max((ref.nbytes for ref in self.refs), default=0)


class Loader(Protocol):
    """Loader of payloads to a device, one plan at a time, from one thread.

    The calls are `begin`, then `load` for each ref in the order of the plan, then `finish`; if anything fails or the
    user cancels, `abort` instead of the rest. A loader may be used again afterwards.

    `device` is the device's name. A loader may have one more method, `view(loaded, ref)`, for tensors that are
    different views of one payload: the payload is loaded as raw bytes, uint8 of shape [nbytes], and each tensor is
    `view(loaded, ref)`, where `ref` has dtype, shape, strides and `byte_offset` in `loaded`. Without it such tensors
    are refused. It is called after `load` of those bytes, maybe before `finish`.
    """

    device: str

    def can_load(self, device: str, dtype: DType) -> bool:
        """Return True if tensors of that element type can be loaded to that device."""

    def begin(self, plan: LoadPlan) -> None:
        """Prepare for a plan: it has all refs, their total and largest size, and the most bytes in flight."""

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the device's tensor, of the ref's dtype, shape and strides; the bytes may arrive later.

        With `dst` they go there, and the tensor is a view of it. Load large refs in pieces, with `plan.advance(nbytes)`
        after each, which raises if the user cancelled. A ref of 0 bytes, for a tensor without elements, is not among
        the plan's refs, and is loaded after them.
        """

    def finish(self) -> None:
        """Return once all bytes are there."""

    def abort(self) -> None:
        """Release everything that was begun. Never raises; may be called again, and before `begin`."""
