"""Private copies of an archive's bytes, which may be written, and memory apart for equal payloads in them.

Equal payloads that are not tied are stored once. In a private copy the first of them, its home, is edited in place; the
others, its twins, get memory of their own when they are first asked for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from zcrecord.codec.index import Index
from zcrecord.errors import LimitError, SourceError
from zcrecord.storage.memory import Memory, aligned_empty, map_file, private_copy

__all__ = ["Twins", "check_apart", "private_memory", "twins_nbytes", "twins_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_APART, _APART_FREE = 64, 1 << 30  # times what an archive holds, and bytes, that payloads may take apart
_MAPPED = 1 << 20  # bytes from which a private mapping is cheaper than a copy
_MAPPINGS = 32  # of one file at the most: each takes addresses for all of it, and on some systems a descriptor


def private_memory(memory: Memory, buffer: memoryview, offset: int, mapped: bool) -> Memory:
    """Return a private copy of `buffer`, an archive's bytes at an offset in memory: its file mapped again, or a copy.

    Raises:
        SourceError: the file was replaced since it was opened.
    """
    if memory.absolute is None or not mapped:
        return private_copy(buffer, memory.filled)._replace(absolute=memory.absolute)
    copy = map_file(memory.absolute, private=True, least=0)
    if copy.identity != memory.identity:
        raise SourceError("was replaced or changed since it was opened; load it again", path=memory.absolute)
    return copy._replace(octets=copy.octets[offset : offset + len(buffer)], absolute=memory.absolute)


def twins_of(index: Index) -> Array:
    """Return the payloads whose bytes are stored once with those of an earlier one."""
    offsets = index.payloads["offset"]
    return np.flatnonzero(offsets[1:] == offsets[:-1]) + 1


def twins_nbytes(index: Index, held: int) -> int:
    """Return the bytes that twins take apart; `held` is the archive's size, which no payload that is in it exceeds."""
    sizes = index.payloads["nbytes"][twins_of(index)]
    return int(np.minimum(sizes, np.uint64(held)).sum(dtype=np.float64))


def check_apart(nbytes: int, held: int, path: str | None) -> None:
    """Raise LimitError if payloads that share their bytes would take out of all proportion to the bytes that hold them.

    Of an archive that is 64 times what it holds, and 1 GiB.
    """
    if nbytes > _APART * held + _APART_FREE:
        what = f"tensors that share their bytes would take {nbytes:.3g} bytes, each by itself"
        raise LimitError(f"{what}; load those that you need, or save what you need as a record of its own", path=path)


class Twins:
    """Memory of the twins among a private copy's payloads.

    `source` is the archive before any edit, with payloads from `base` on. A further mapping of its file, made for large
    twins, is added to `mappings`.
    """

    __slots__ = ("_base", "_mappings", "_offsets", "_own", "_ranks", "_source")

    def __init__(self, index: Index, source: memoryview, base: int, mappings: list[weakref.ref[Any]]) -> None:
        self._offsets, self._source, self._base, self._mappings = index.payloads["offset"], source, base, mappings
        self._own: dict[int, memoryview] = {}  # by the payload's number
        self._ranks: dict[int, memoryview] = {}  # whole mappings, by the twins' number among their equals

    def are_at_home(self, numbers: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each of these payloads True if it lies where the index says."""
        offsets = self._offsets
        first = np.ones(len(offsets) + 1, bool)
        first[1:-1] = offsets[1:] != offsets[:-1]
        at_home: np.ndarray[Any, np.dtype[np.bool_]] = first[np.minimum(numbers, len(offsets))]
        return at_home

    def memory(self, number: int, offset: int, nbytes: int, again: Callable[[], Memory | None]) -> memoryview | None:
        """Return the memory of a twin, made on first use, as it was before any edit; None for any other payload.

        `again` maps the file once more, or gives None if there is none.
        """
        if not number or self._offsets[number - 1] != self._offsets[number]:
            return None
        own = self._own.get(number)
        if own is None:
            own = self._own.setdefault(number, self._made(number, offset, nbytes, again))
        return own

    def _made(self, number: int, offset: int, nbytes: int, again: Callable[[], Memory | None]) -> memoryview:
        source = self._source[self._base + offset : self._base + offset + nbytes]
        if nbytes < _MAPPED:
            room = aligned_empty(nbytes)
            room[:] = source
            return room.data
        rank = number - int(np.searchsorted(self._offsets, np.uint64(offset)))
        if rank <= _MAPPINGS and (mapped := self._mapped(rank, again)) is not None:
            return mapped[offset : offset + nbytes]
        return private_copy(source).octets

    def _mapped(self, rank: int, again: Callable[[], Memory | None]) -> memoryview | None:
        """Return the payloads in one more private mapping; None if there is no file, or it was replaced."""
        if rank not in self._ranks:
            with contextlib.suppress(SourceError):
                memory = again()
                if memory is not None:
                    self._mappings.append(weakref.ref(memory.mapping))
                    self._ranks[rank] = np.frombuffer(memory.octets[self._base :], np.uint8).data
        return self._ranks.get(rank)
