"""One constant of a hollow record: which tensors it is, what bytes are due, and where they go.

Bytes come as whole arrays or in chunks and go to a place in memory, or to what the user gave for them. Which constants
there are, and when each may be filled, is left to `hollow`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from . import dtypes, foreign
from .describe import TensorInfo
from .dtypes import DType
from .errors import FillError, ProducerError, RecordError
from .lazy import Pieces
from .tensors import PackedTensor, StringTensor, as_bytes

__all__ = ["Constant", "ConstantWriter", "Destination", "Filler", "Given", "Place"]

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
            what = f"sink= gave a buffer that is {form}; {constant.nbytes} contiguous, writable bytes are needed"
            raise ProducerError(what, tensor=constant.name)
        self._room = room.cast("B") if room.nbytes else memoryview(bytearray())

    def write(self, data: memoryview) -> None:
        """Pass the next bytes on; the object must be done with them when its `write` returns."""
        if self._room is None:
            self._made.write(data)
        else:
            self._room[self._done : self._done + len(data)] = data
            self._done += len(data)

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


class Filler:
    """The bytes of one constant on their way: checked, counted, and passed on; nothing is kept."""

    def __init__(self, constant: Constant, destination: Destination) -> None:
        self.constant = constant
        self._destination = destination
        info = constant.info
        self._plain = constant.native is not None and not info.dtype.packed
        pieces = self._plain or (info.dtype.packed and info.bits == info.dtype.bits)
        self._due: Pieces | _Bytes = Pieces(info.dtype, info.shape) if pieces else _Bytes(constant.nbytes)

    def whole(self, data: Any) -> None:
        """Take all of it at once: an array of any library, a PackedTensor, a StringTensor, or bytes in C order.

        Raises:
            ProducerError: another shape or element type, or too few or too many bytes.
        """
        array = self._array(data)
        if isinstance(array, np.ndarray) and isinstance(self._destination, Place) and self._destination.scattered:
            self._destination.put(array)
            return
        self.write(array)
        self._due.finish()

    def _array(self, data: Any) -> Any:
        """Return what has a shape as an array of the right shape and element type; bytes as they are."""
        info = self.constant.info
        if isinstance(data, bytes | bytearray | memoryview) or not hasattr(data, "shape"):
            return data
        if not isinstance(data, PackedTensor | StringTensor):
            data = foreign.as_array(data)
        if tuple(data.shape) != info.shape:
            raise ProducerError(f"declared with shape {info.shape}, got {tuple(data.shape)}")
        if (kind := _kind(data)) is not info.dtype:
            raise ProducerError(f"declared as {info.dtype.name}, got {kind.name}; convert it with .astype(...)")
        if isinstance(data, StringTensor):
            return data.data
        if isinstance(data, PackedTensor) and info.bits == 8:  # stored one to a byte
            data = data.unpack()
        if isinstance(data, np.ndarray) and not self._plain and info.bits == 8:
            return as_bytes(data)
        return data

    def write(self, chunk: Any) -> None:
        """Take the next chunk: bytes, or an array of the element type, whatever its shape; not kept.

        Raises:
            ProducerError: it is of another element type, or more than is due.
        """
        data = self._due.take(chunk)
        if len(data):
            self._destination.write(data)

    def finish(self) -> None:
        """Raise ProducerError unless all has come."""
        self._due.finish()

    def close(self) -> Any:
        """Be done with the destination; returns what stands for the constant."""
        return self._destination.close()

    def abort(self) -> None:
        """Let go of the destination."""
        self._destination.abort()


class _Bytes:
    """The bytes of strings, and of elements that are known by their width alone: counted, and nothing else."""

    def __init__(self, due: int) -> None:
        self._left = self._all = due

    def take(self, piece: Any) -> memoryview:
        """Return a piece's bytes.

        Raises:
            ProducerError: it is no bytes, or more than is due.
        """
        try:
            data = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        except (TypeError, ValueError):
            raise ProducerError(f"{self._all} contiguous bytes are due, got a {type(piece).__name__}") from None
        if len(data) > self._left:
            raise ProducerError(f"{self._all} bytes were declared, at least {self._all - self._left + len(data)} came")
        self._left -= len(data)
        return data

    def finish(self) -> None:
        """Raise ProducerError unless all has come."""
        if self._left:
            raise ProducerError(f"{self._all} bytes were declared, {self._all - self._left} produced")


def _kind(data: Any) -> DType:
    if isinstance(data, StringTensor):
        return dtypes.STRING
    if isinstance(data, PackedTensor):
        return data.kind
    try:
        return dtypes.from_numpy(data.dtype)
    except RecordError as error:
        raise ProducerError(error.message) from error


class ConstantWriter:
    """Fills one constant chunk by chunk: `write(chunk)` until all has come, then `close()`, or leave the `with` block.

    A chunk is bytes in C order, or an array of the constant's element type, whatever its shape; it is passed on, and
    not kept. Where anything fails, or an exception leaves the block, the constant counts as not begun, and can be
    filled again.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones(4, np.uint8)}, "model.zcr")
        >>> from zcrecord.hollow import hollow_of
        >>> hollow = hollow_of("model.zcr")
        >>> with hollow.open("w") as writer:
        ...     writer.write(b"ab"), writer.write(b"cd")
        (None, None)
        >>> bytes(hollow.seal()["w"])
        b'abcd'
    """

    def __init__(self, filler: Filler, name: str, done: Callable[[Any], None], gone: Callable[[], None]) -> None:
        """For this package's own use: `HollowRecord.open` makes them."""
        self._filler, self._name, self._done, self._gone = filler, name, done, gone
        self._open, self._whole = True, False

    @property
    def constant(self) -> Constant:
        """What is filled; for this package's own use."""
        return self._filler.constant

    def write(self, chunk: Any) -> None:
        """Pass on the next chunk.

        Raises:
            ProducerError: it is of another element type, or more than is due.
        """
        self._do(self._filler.write, chunk)

    def take(self, data: Any) -> None:
        """Pass on all of it, as `HollowRecord.set` takes it."""
        self._do(self._filler.whole, data)
        self._whole = True

    def skip(self) -> None:
        """Say that all bytes are where they belong; for this package's own use."""
        self._whole = True

    def close(self) -> None:
        """Have the constant count as filled.

        Raises:
            ProducerError: too few bytes have come. FillError: the record was given up meanwhile.
        """
        if not self._open:
            return
        if not self._whole:
            self._do(self._filler.finish)
        result = self._do(self._filler.close)
        self._open = False
        self._done(result)

    def abort(self) -> None:
        """Have the constant count as not begun; never raises."""
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):
                self._filler.abort()
            self._gone()

    def _do(self, step: Callable[..., Any], *arguments: Any) -> Any:
        if not self._open:
            raise FillError("its writer was closed, or something failed; open it again", tensor=self._name)
        try:
            return step(*arguments)
        except BaseException as error:
            self.abort()
            if isinstance(error, RecordError):
                raise error.located(tensor=self._name) from error.__cause__
            raise

    def __enter__(self) -> ConstantWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
