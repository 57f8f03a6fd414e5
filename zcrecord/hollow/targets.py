"""One constant of a hollow record: which tensors it is, what bytes are due, and where they go.

They go to a place in memory, or to what the user gave for them. What bytes are right is `fillers`'s, which constants
there are, and when each may be filled, `hollow`'s.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zcrecord import dtypes
from zcrecord.archive.info import TensorInfo
from zcrecord.errors import ProducerError

__all__ = ["Constant", "Destination", "Given", "Place"]

_PIECE = 1 << 20  # bytes that are put where strides scatter them at a time


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """What is filled once: all tensors that are the very same elements.

    `info` is that of the first, `names` are all of them, `byte_offset` is where element [0, ..., 0] lies in its
    payload, and `whole` says that the payload has no byte besides.
    """

    info: TensorInfo
    names: tuple[str, ...]
    byte_offset: int
    whole: bool

    @property
    def name(self) -> str:
        """The full name of the first tensor."""
        return self.info.name

    @property
    def nbytes(self) -> int:
        """How many bytes are due, in C order."""
        return self.info.nbytes

    @property
    def typed(self) -> bool:
        """Whether its elements are known: they are, but for strings' and types of later versions."""
        return self.info.dtype.bits > 0 and self.info.dtype.name in dtypes.by_name

    @property
    def native(self) -> np.dtype[Any] | None:
        """The dtype of an array over its bytes; None where there is none: strings, packed and unknown elements."""
        kind = self.info.dtype
        return kind.numpy if self.info.bits >= 8 and kind.name in dtypes.by_name else None

    def view(self, payload: Any) -> np.ndarray[Any, Any]:
        """Return its elements in a payload's bytes, where strides say where they are."""
        native = self.native or np.dtype((np.void, self.info.bits // 8))
        strides = tuple(s * native.itemsize for s in self.info.strides or ())
        return np.ndarray(self.info.shape, native, payload, self.byte_offset, strides)


class Destination(Protocol):
    """Where the bytes of one constant go, in C order."""

    def write(self, data: memoryview) -> None:
        """Take the next bytes."""

    def close(self) -> Any:
        """Be done with it; returns what stands for the constant."""

    def abort(self) -> None:
        """Let go of what is not whole."""


class Place:
    """The memory in which one tensor lies, strided or not."""

    def __init__(self, constant: Constant, octets: memoryview) -> None:
        """`octets` is the payload's memory."""
        self._done = 0
        self._rest = b""
        info = constant.info
        if info.strides is None:
            self._target: np.ndarray[Any, Any] = np.frombuffer(octets, np.uint8)
        else:
            self._target = constant.view(octets)
        self._scattered = info.strides is not None and not self._target.flags.c_contiguous
        if not self._scattered:
            self._target = self._target.reshape(-1).view(np.uint8)

    def put(self, array: np.ndarray[Any, Any]) -> None:
        """Copy a whole array to where strides scatter its elements; nothing is made on the way."""
        self._target[...] = array

    @property
    def scattered(self) -> bool:
        """Whether the elements do not lie in C order."""
        return self._scattered

    def write(self, data: memoryview) -> None:
        """Take the next bytes; of an element that is cut in two, the rest is awaited."""
        if not self._scattered:
            self._target[self._done : self._done + len(data)] = np.frombuffer(data, np.uint8)
            self._done += len(data)
            return
        size = self._target.itemsize
        for start in range(0, len(data), _PIECE):
            piece = self._rest + bytes(data[start : start + _PIECE])
            count = len(piece) // size
            elements = np.frombuffer(piece, self._target.dtype, count)
            self._target.flat[self._done : self._done + count] = elements
            self._done, self._rest = self._done + count, piece[count * size :]

    def close(self) -> None:
        """Nothing is to be done: the record's views show it."""

    def abort(self) -> None:
        """Nothing is to be done: the record will not show it."""


class Given:
    """What a user's `sink` returned for a constant: a writable buffer, or an object with `write(chunk)`."""

    def __init__(self, constant: Constant, made: Any) -> None:
        self._made = made
        self._done = 0
        self._room: memoryview | None = None
        try:
            room = memoryview(made)
        except TypeError:
            if not callable(getattr(made, "write", None)):
                what = f"sink= gave a {type(made).__name__}, neither a writable buffer nor an object with write(chunk)"
                raise ProducerError(what, tensor=constant.name) from None
            return
        if room.readonly or not room.c_contiguous or room.nbytes != constant.nbytes:
            form = "read-only" if room.readonly else f"of {room.nbytes} bytes"
            if not room.readonly and not room.c_contiguous:
                form = "not in C order"
            what = f"sink= gave a buffer that is {form}; {constant.nbytes} contiguous, writable bytes are needed"
            raise ProducerError(what, tensor=constant.name)
        self._room = room.cast("B") if room.nbytes else memoryview(bytearray())

    def write(self, data: memoryview) -> None:
        """Pass the next bytes on; the object must be done with them when its `write` returns.

        Raises:
            ProducerError: it says, as files do, how many it took, and that is none, or more than it was given.
        """
        if self._room is not None:
            self._room[self._done : self._done + len(data)] = data
            self._done += len(data)
            return
        while len(data):
            taken = self._made.write(data)
            if taken is None and not isinstance(self._made, io.RawIOBase):  # a raw file says None when it would block
                return
            if not isinstance(taken, int) or not 0 < taken <= len(data):
                what = f"sink= took {taken} of {len(data)} bytes"
                raise ProducerError(f"{what}; its write returns how many it took, or None for all of them")
            data = data[taken:]

    def close(self) -> Any:
        """Return what was given, or what its own `close` returned instead."""
        if self._room is not None or not callable(getattr(self._made, "close", None)):
            return self._made
        found = self._made.close()
        return self._made if found is None else found

    def abort(self) -> None:
        """Tell the object, if it wants to know, that no more will come."""
        if self._room is None and callable(getattr(self._made, "abort", None)):
            self._made.abort()
