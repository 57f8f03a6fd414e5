"""A plain device: memory of its own on this machine, filled by copying. For tests, and to copy for a device of yours.

What a loader has to do is all here. For a device that is further away, `load` queues a copy in the place of making one,
and `finish` waits for what was queued. That several cores copy is only to be fast.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np

from zcrecord.dtypes import DType
from zcrecord.storage.memory import Piece, aligned_empty
from zcrecord.storage.threads import each_piece

from .mapped import as_tensor, room_of
from .protocol import LoadPlan, PayloadRef

__all__ = ["HostLoader"]

_PIECE = 8 << 20  # bytes copied at a time: few enough that progress and cancelling are prompt, many enough to be fast
_COPIERS = min(4, os.cpu_count() or 1)  # new memory is cleared before it is copied to: what one core does is the limit


class HostLoader:
    """Tensors in memory of their own, one aligned allocation each, which may be written; ties share one.

    At most `max_in_flight` bytes of the mapping are held besides.
    """

    device = "host"

    def __init__(self) -> None:
        self._plan: LoadPlan | None = None

    def can_load(self, device: str, dtype: DType) -> bool:
        """Return whether a tensor of that element type can be made: here all but strings."""
        return device == self.device and dtype.bits > 0

    def begin(self, plan: LoadPlan) -> None:
        """Keep the plan. A device with buffers on the way would make them here, `plan.max_in_flight` bytes in all."""
        self._plan = plan

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        """Return the tensor, copied piece by piece into new memory, or into the caller's."""
        assert self._plan is not None, "begin comes first"
        room = aligned_empty(ref.nbytes) if dst is None else room_of(dst, ref)
        size = max(1, min(_PIECE, self._plan.max_in_flight // _COPIERS))
        pieces = [Piece(start, [room[start : start + size].data]) for start in range(0, ref.nbytes, size)]
        if ref.buffer is not None and 1 < _COPIERS <= len(pieces):
            each_piece(partial(_copy, ref), pieces, done=self._plan.advance, threads=_COPIERS)
        else:
            for piece in pieces:
                self._plan.advance(_copy(ref, piece))  # raises where the user gave up
        return as_tensor(room, ref)

    def view(self, loaded: np.ndarray[Any, np.dtype[np.uint8]], ref: PayloadRef) -> Any:
        """Return one of several tensors of a payload that was loaded as bytes: no further copy."""
        return as_tensor(loaded, ref)

    def finish(self) -> None:
        """Return once everything is there: it is, every copy was made in `load`."""
        self._plan = None

    def abort(self) -> None:
        """Let go of everything, whatever state this is in. What was loaded goes with whoever holds it."""
        self._plan = None


def _copy(ref: PayloadRef, piece: Piece) -> int:
    """Fill a piece's memory; returns how many bytes that is."""
    (target,) = piece.buffers
    ref.read_into(target, piece.offset)
    ref.let_go(piece.offset, piece.offset + len(target))  # or the mapping would count as this process's memory
    return len(target)
