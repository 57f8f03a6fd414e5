"""Loaders to this machine's memory: views of the mapping (`MappedLoader`), and copies (`HostLoader`).

`HostLoader` has all that a loader needs, and is the one to copy for a device of your own: such a loader queues its
copies, and `finish` waits for the queue. Several cores copy only for speed.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any

import numpy as np

from zcrecord.dtypes import DType, Octets, nbytes
from zcrecord.errors import UnsupportedError
from zcrecord.storage.memory import aligned_empty
from zcrecord.storage.threads import each_piece
from zcrecord.tensors.packed import PackedTensor

from .protocol import LoadPlan, PayloadRef, sources_of

_PIECE = 8 << 20  # bytes copied at a time: few enough that progress and cancelling are prompt, many enough to be fast
_COPIERS = min(4, os.cpu_count() or 1)  # the system clears new memory before it is copied to: one core would be slow


def as_tensor(octets: Octets, ref: PayloadRef) -> Any:
    """Return the ndarray or PackedTensor that `ref` describes, a view of its bytes; keeps them alive.

    `octets` has to be an array: one made of a memoryview would not keep a mapping from being closed.
    """
    if ref.bits < 8:
        stop = ref.byte_offset + nbytes(prod(ref.shape), ref.bits)
        return PackedTensor(octets[ref.byte_offset : stop], ref.dtype, ref.shape)
    strides = None if ref.strides is None else tuple(s * ref.bits // 8 for s in ref.strides)
    return np.ndarray(ref.shape, ref.dtype.numpy, octets, ref.byte_offset, strides)


def dst_bytes(dst: Any, ref: PayloadRef) -> Octets:
    """Return the caller's memory (`dst=`) as bytes; UnsupportedError unless it is writable and as large as `ref`."""
    try:
        if isinstance(dst, np.ndarray) and dst.dtype.isbuiltin != 1 and dst.flags.c_contiguous:
            dst = dst.reshape(-1).view(np.uint8)  # numpy exports no buffer of element types that are not its own
        memory = memoryview(dst)
        octets = memory.cast("B") if memory.nbytes else memoryview(bytearray())  # an empty memoryview has no cast
    except (TypeError, ValueError, BufferError) as error:
        kind = type(dst).__name__
        raise UnsupportedError(f"dst= of a {kind} has no contiguous bytes: {error}", tensor=ref.name) from None
    if memory.readonly:
        raise UnsupportedError("dst= is read-only; give memory of your own", tensor=ref.name)
    if len(octets) != ref.nbytes:
        sizes = f"dst= has {len(octets)} bytes, the tensor {ref.nbytes}"
        raise UnsupportedError(f"{sizes}; make it np.empty({ref.nbytes}, np.uint8)", tensor=ref.name)
    return np.frombuffer(octets, np.uint8)


class HostLoader:
    """Writable copies, one aligned allocation per payload, beside `max_in_flight` bytes of the mapping at most."""

    device = "host"

    def __init__(self) -> None:
        self._plan: LoadPlan | None = None

    def can_load(self, device: str, dtype: DType) -> bool:
        """Return True for this device and element types of a fixed size: all but strings."""
        return device == self.device and dtype.bits > 0

    def begin(self, plan: LoadPlan) -> None:
        """Keep the plan. A loader with staging buffers allocates them here, `plan.max_in_flight` bytes in all."""
        self._plan = plan

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor, copied piece by piece into new memory, or into the caller's."""
        assert self._plan is not None, "begin comes first"
        out = aligned_empty(ref.nbytes) if dst is None else dst_bytes(dst, ref)
        size = max(1, min(_PIECE, self._plan.max_in_flight // _COPIERS))

        def copy(start: int) -> int:
            target = out[start : start + size].data
            ref.read_into(target, start)
            ref.let_go(start, start + len(target))  # else mapped pages count as this process's memory
            return len(target)

        starts = range(0, ref.nbytes, size)
        threads = _COPIERS if len(starts) >= _COPIERS and (ref.buffer is not None or not sources_of(ref)) else 1
        each_piece(copy, starts, advance=self._plan.advance, threads=threads)  # it raises on cancelling
        return as_tensor(out, ref)

    def view(self, loaded: Octets, ref: PayloadRef) -> Any:
        """Return one of several tensors of a payload that was loaded as bytes: no further copy."""
        return as_tensor(loaded, ref)

    def finish(self) -> None:
        """Return once all bytes are there: at once, every copy was made in `load`."""
        self._plan = None

    def abort(self) -> None:
        """Drop the plan, in any state. Tensors that were loaded live as long as their users refer to them."""
        self._plan = None


class MappedLoader(HostLoader):
    """Read-only views of the record's own bytes, in mode "c" of the edited ones; copies nothing.

    Each view keeps the mapping alive. Boxes, and parts of payloads, are views, too; but boxes of packed elements, and
    those that lie in several shards, are copies. Of a remote archive `load_into` fetches the bytes first.
    """

    device = "cpu"

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor; UnsupportedError if its bytes are not in memory, or `dst` was given."""
        if dst is not None:
            raise UnsupportedError("a view copies nothing, so it takes no dst=; load it into 'host' or 'read'")
        if ref.buffer is None:
            raise UnsupportedError("its bytes are not in this machine's memory; load it into 'host' or 'read'")
        return as_tensor(np.frombuffer(ref.buffer, np.uint8), ref)
