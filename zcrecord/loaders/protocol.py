"""What brings tensors to a device: the protocol, and what it is told, a plan of the payloads and their places.

Which payloads are wanted is `planning`'s, when they are loaded `driving`'s. `host` is the loader to copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from zcrecord.dtypes import DType
from zcrecord.errors import UnsupportedError

__all__ = ["LoadPlan", "Loader", "PayloadRef", "RangeSource", "Target"]


class RangeSource(Protocol):
    """Where bytes come from that are neither in memory nor in a file: a remote archive."""

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the archive's bytes from `offset` on, or raise a RecordError."""


@dataclass(frozen=True, slots=True, eq=False)
class PayloadRef:
    """One payload, or the part of one that is asked for, to be brought to a device. Equal only to itself.

    It has its bytes in one of three places at least: `buffer`, `path` and `source`.

    Attributes:
        name: the full name of the first tensor that uses it.
        path: the absolute path of the file; None for bytes in memory or remote.
        buffer: those very bytes where they lie in memory or in the read-only mapping, flat and read-only. Arrays are
            made of it by `np.frombuffer`, which keeps the mapping open; `np.ndarray` over it does not.
        source: what reads them where they are neither in memory nor in a file.
        offset: of the first byte, in the file at `path`, or in the archive or buffer where there is none.
        nbytes: how many bytes they are.
        dtype: of its elements.
        bits: that an element takes; less than 8 for packed ones.
        shape: of the tensor.
        strides: in elements, as they are stored; None for C order.
        payload: its number in the record: equal for tensors that share it; -1 for a tensor without any bytes.
        byte_offset: of element [0, ..., 0] behind the first byte; 0 but for some strided ones.
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

    def read_into(self, target: memoryview, start: int = 0) -> None:
        """Fill `target` with the bytes from `start` on, from the mapping, memory or remote archive they are in."""
        if self.buffer is not None:
            mine = np.frombuffer(self.buffer, np.uint8, len(target), start)
            np.copyto(np.frombuffer(target, np.uint8), mine)  # a memoryview's copy would keep the GIL
        elif self.source is not None:
            self.source.readinto_at(self.offset + start, target)
        else:
            raise UnsupportedError("its bytes are in a file alone; load it into 'read'", tensor=self.name)

    def let_go(self, start: int, stop: int) -> None:
        """Take the mapped pages of bytes [start, stop) from this process; they stay in the system's cache.

        So what was fed to a device does not count as this process's memory. Views of them stay valid: a page is mapped
        again when it is next read. Does nothing to bytes in memory.
        """
        mapping = None if self.buffer is None or self.path is None else self.buffer.obj
        if not isinstance(mapping, mmap.mmap) or not hasattr(mapping, "madvise"):
            return
        first = (self.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE  # so that a page of two payloads goes, too
        last = (self.offset + stop) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


class Target(NamedTuple):
    """How one tensor comes from what is loaded.

    `ref` is what is loaded for it, shared with all tensors of that payload. `view` is None where what the loader
    returns is the tensor; else `ref` is loaded as bytes, and it says how the tensor lies in them.
    """

    ref: PayloadRef
    view: PayloadRef | None


def _nothing(_: int) -> None:
    """Stand in for `LoadPlan.advance` where nobody watches."""


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """What `begin` is told.

    Attributes:
        refs: what to load, in the order of the file; each payload once, empty tensors not at all.
        targets: every tensor by its full name, in saved order.
        max_in_flight: how many bytes may be on their way at a time.
        path: the file that refs with a path are in.
        identity: of that file when it was opened, as `source.identity_of` tells it.
        advance: what a loader calls with the number of bytes that have arrived since; it raises where the user gave up.
            Without a call a ref is taken to be there when `load` returns; `advance(0)` in `begin` says that all will
            be told later.
    """

    refs: tuple[PayloadRef, ...]
    targets: dict[str, Target]
    max_in_flight: int
    path: str | None = None
    identity: tuple[int, ...] | None = None
    advance: Callable[[int], None] = field(default=_nothing, repr=False)

    @cached_property
    def nbytes(self) -> int:
        """How many bytes are loaded in all."""
        return sum(ref.nbytes for ref in self.refs)

    @cached_property
    def largest(self) -> int:
        """How many bytes the largest ref has."""
        return max((ref.nbytes for ref in self.refs), default=0)


class Loader(Protocol):
    """What brings payloads to a device. One loads one plan at a time, from one thread.

    The calls are `begin`, then `load` for each ref in the order of the plan, then `finish`; where anything fails or the
    user gives up, `abort` instead of what is left. A loader may be used again afterwards.

    `device` names where it brings them. A loader may have one method more, `view(loaded, ref)`: where several tensors
    are different views of one payload, that is loaded as raw bytes, uint8 of shape [nbytes], and each tensor is
    `view(loaded, ref)`, `ref` saying dtype, shape, strides and `byte_offset` in `loaded`. Without it such tensors are
    refused. It is called after `load` of those bytes, perhaps before `finish`.
    """

    device: str

    def can_load(self, device: str, dtype: DType) -> bool:
        """Return whether tensors of that element type can be brought to that device."""

    def begin(self, plan: LoadPlan) -> None:
        """Get ready: all refs, their bytes in all, the largest, and how many bytes may be on the way at a time."""

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the device's tensor, of the ref's dtype, shape and strides; the bytes may arrive later.

        With `dst` they are to go there, and what is returned is over it. Large ones go in pieces, with
        `plan.advance(nbytes)` after each, which raises where the user gave up. A ref of 0 bytes, for a tensor without
        elements, is not among the plan's refs and comes after them.
        """

    def finish(self) -> None:
        """Return once all bytes are there."""

    def abort(self) -> None:
        """Let go of everything that was begun. Never raises, and may be called again, before `begin` too."""
