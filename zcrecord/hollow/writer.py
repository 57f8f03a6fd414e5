"""Writers of one constant: check and count its bytes, and copy them to memory or pass them to a sink.

Deciding if a constant may be filled is left to `state`.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from functools import cached_property
from math import prod
from types import TracebackType
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.dtypes import DType
from zcrecord.errors import FillError, ProducerError, RecordError
from zcrecord.tensors import interop
from zcrecord.tensors.lazy import Pieces
from zcrecord.tensors.packed import PackedTensor, StringTensor
from zcrecord.tensors.strides import as_bytes
from zcrecord.writing import flatten

from .state import FillState, HollowConstant

__all__ = ["ConstantWriter", "MemoryTarget", "SinkTarget", "sink_target"]

_PIECE = 1 << 20  # bytes that are copied to a strided tensor at a time
_AS_STRINGS = "StringTensor.from_strings(...).data has such bytes"


class MemoryTarget:
    """Memory that one tensor's bytes are copied to, in C order, whatever its strides."""

    def __init__(self, elements: np.ndarray[Any, Any], result: Any = None) -> None:
        """`elements` is an array over the memory; `result` stands for the tensor once it is filled."""
        self._done, self._rest, self._result = 0, b"", result
        self.scattered = not elements.flags.c_contiguous
        self._elements = elements if self.scattered else elements.reshape(-1).view(np.uint8)

    def put(self, array: np.ndarray[Any, Any]) -> None:
        """Copy a whole array to scattered elements, without a temporary array."""
        self._elements[...] = array

    def write(self, data: memoryview) -> None:
        """Copy the next bytes; of an element that is cut in two, the start is kept until the rest comes."""
        if not self.scattered:
            self._elements[self._done : self._done + len(data)] = np.frombuffer(data, np.uint8)
            self._done += len(data)
            return
        size = self._elements.itemsize
        for start in range(0, len(data), _PIECE):
            piece = self._rest + bytes(data[start : start + _PIECE])
            count = len(piece) // size
            elements = np.frombuffer(piece, self._elements.dtype, count)
            self._elements.flat[self._done : self._done + count] = elements
            self._done, self._rest = self._done + count, piece[count * size :]

    def close(self) -> Any:
        """Return the result."""
        return self._result

    def abort(self) -> None:
        """Do nothing: memory that is not filled is not shown."""


class SinkTarget:
    """A sink's object with `write(chunk)`, and maybe `close()` and `abort()`."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def write(self, data: memoryview) -> None:
        """Pass on the next bytes; the object must not use them after its `write` returns.

        Raises:
            ProducerError: it returns, as files do, the number of bytes it took, and that is 0 or more than it was
            given.
        """
        while len(data):
            taken = self._made.write(data)
            if taken is None and not isinstance(self._made, io.RawIOBase):  # a raw file says None when it would block
                return
            if not isinstance(taken, int) or not 0 < taken <= len(data):
                what = f"sink= took {taken} of {len(data)} bytes"
                raise ProducerError(f"{what}; its write returns how many it took, or None for all of them")
            data = data[taken:]

    def close(self) -> Any:
        """Close the object; returns the result of its `close`, or the object itself if that is None."""
        found = self._made.close() if callable(getattr(self._made, "close", None)) else None
        return self._made if found is None else found

    def abort(self) -> None:
        """Call the object's `abort`, if it has one."""
        if callable(getattr(self._made, "abort", None)):
            self._made.abort()


def sink_target(constant: HollowConstant, made: Any) -> MemoryTarget | SinkTarget:
    """Return the target for the result of a sink: a writable buffer, or an object with `write(chunk)`.

    Raises:
        ProducerError: it is neither, or the buffer does not fit.
    """
    try:
        room = memoryview(made)
    except TypeError:
        if not callable(getattr(made, "write", None)):
            what = f"sink= gave a {type(made).__name__}, neither a writable buffer nor an object with write(chunk)"
            raise ProducerError(what, tensor=constant.name) from None
        return SinkTarget(made)
    if room.readonly or not room.c_contiguous or room.nbytes != constant.nbytes:
        form = "read-only" if room.readonly else f"of {room.nbytes} bytes"
        if not room.readonly and not room.c_contiguous:
            form = "not in C order"
        what = f"sink= gave a buffer that is {form}; {constant.nbytes} contiguous, writable bytes are needed"
        raise ProducerError(what, tensor=constant.name)
    return MemoryTarget(np.frombuffer(room.cast("B"), np.uint8), made)


class ConstantWriter:
    """Fills one constant chunk by chunk: `write(chunk)` until all has come, then `close()`, or leave the `with` block.

    A chunk is bytes in C order, or an array of the constant's element type, of any shape; it is passed on, not kept.
    After any failure, or an exception in the block, the constant counts as not begun, and can be filled again.

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

    def __init__(
        self, state: FillState, constant: HollowConstant, name: str, target: MemoryTarget | SinkTarget
    ) -> None:
        """Users get writers from `HollowRecord.open`; `state` has the constant begun by `name`."""
        self.constant = constant
        self._state, self._name, self._target = state, name, target
        self._open, self._complete, self._lost = True, False, False
        self._busy = threading.RLock()  # by the thread that fills; another may abort the record meanwhile

    @cached_property
    def _counter(self) -> Pieces | _CountedBytes:
        info = self.constant.info
        if self._plain or (info.dtype.packed and info.bits == info.dtype.bits):
            return Pieces(info.dtype, info.shape)
        if info.dtype is dtypes.STRING and self.constant.nbytes:
            return _CountedStrings(self.constant.nbytes, prod(info.shape))
        return _CountedBytes(self.constant.nbytes)

    @property
    def _plain(self) -> bool:
        return self.constant.native is not None and not self.constant.info.dtype.packed

    def write(self, chunk: Any) -> None:
        """Pass on the next chunk.

        Raises:
            ProducerError: it has another element type, or more bytes than are due. FillError: the record was aborted.
        """
        self._guarded(self._pass_on, chunk)

    def take(self, data: Any) -> None:
        """Pass on the whole tensor, as `HollowRecord.set` takes it."""
        self._guarded(self._pass_on_all, data)
        self._complete = True

    def mark_complete(self) -> None:
        """Count all bytes as written: they were put into the constant's memory by other means."""
        self._complete = True

    def close(self) -> None:
        """Count the constant as filled.

        Raises:
            ProducerError: too few bytes have come. FillError: the record was aborted meanwhile.
        """
        with self._busy:
            if not self._open and not self._lost:
                return
            if not self._complete:
                self._guarded(self._counter.finish)
            result = self._guarded(self._target.close)
            self._open = False
            self._state.finish(self.constant, self._name, result)

    def abort(self) -> None:
        """Count the constant as not begun; never raises."""
        with self._busy:
            if self._open:
                self._open = False
                with contextlib.suppress(Exception):
                    self._target.abort()
                self._state.release(self.constant)

    def abandon(self) -> None:
        """Abort because the record is aborted; if another thread is writing, its next step raises FillError."""
        if self._busy.acquire(blocking=False):
            self._lost = self._open
            self.abort()
            self._busy.release()

    def _guarded(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Do one step of an open writer; aborts if it fails, and names the tensor in the error."""
        with self._busy:
            try:
                self._state.check_open()
                if not self._open:
                    raise FillError("its writer was closed, or something failed; open it again")
                return step(*arguments)
            except BaseException as error:
                self.abort()
                if isinstance(error, RecordError):
                    raise error.located(tensor=self._name) from error.__cause__
                raise

    def _pass_on(self, chunk: Any) -> None:
        data = self._counter.take(chunk)
        if len(data):
            self._target.write(data)

    def _pass_on_all(self, data: Any) -> None:
        array = self._checked(data)
        if isinstance(array, np.ndarray) and isinstance(self._target, MemoryTarget) and self._target.scattered:
            self._target.put(array)
            return
        self._pass_on(array)
        self._counter.finish()

    def _checked(self, data: Any) -> Any:
        """Return any library's array as one of the right shape and element type; bytes as they are.

        Raises:
            ProducerError: it has another shape or element type.
        """
        info = self.constant.info
        if isinstance(data, bytes | bytearray | memoryview) or not hasattr(data, "shape"):
            return data
        if isinstance(data, np.ndarray | np.generic) and data.dtype.kind in "UT":  # numpy's texts
            data = flatten.as_tensor(data, self.constant.name)
        if not isinstance(data, PackedTensor | StringTensor):
            data = interop.as_array(data)
        if tuple(data.shape) != info.shape:
            raise ProducerError(f"declared with shape {info.shape}, got {tuple(data.shape)}")
        if (kind := _dtype_of(data)) is not info.dtype:
            raise ProducerError(f"declared as {info.dtype.name}, got {kind.name}; convert it with .astype(...)")
        if isinstance(data, StringTensor):
            return data.data
        if isinstance(data, PackedTensor) and info.bits == 8:  # stored one to a byte
            data = data.unpack()
        return as_bytes(data) if isinstance(data, np.ndarray) and not self._plain and info.bits == 8 else data

    def __enter__(self) -> ConstantWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        self.abort()  # a writer that was forgotten, or lost with an exception: its constant may be filled again


def _dtype_of(data: Any) -> DType:
    if isinstance(data, StringTensor):
        return dtypes.STRING
    if isinstance(data, PackedTensor):
        return data.kind
    try:
        return dtypes.from_numpy(data.dtype)
    except RecordError as error:
        raise ProducerError(error.message) from error


class _CountedBytes:
    """Counts the bytes of strings, and of elements of which only the width is known."""

    def __init__(self, due: int) -> None:
        self._left = self._all = due

    def take(self, piece: Any) -> memoryview:
        """Return a piece's bytes.

        Raises:
            ProducerError: it has no contiguous bytes, or more than are due.
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
        """Raise ProducerError unless all bytes have come."""
        if self._left:
            raise ProducerError(f"{self._all} bytes were declared, {self._all - self._left} produced")


class _CountedStrings(_CountedBytes):
    """Counts the bytes of a tensor of strings and checks their ends (R71), in chunks of any size."""

    def __init__(self, due: int, count: int) -> None:
        super().__init__(due)
        self._table = due - 8 * (count + 1)  # the offset of the ends, behind the padding
        self._done = 0
        self._before = b""  # the last bytes before the ends, which may be padding
        self._rest = b""  # of an end that is cut in two
        self._end = -1  # the last that was seen

    def take(self, piece: Any) -> memoryview:
        """Return a piece's bytes.

        Raises:
            ProducerError: it has no contiguous bytes, more than are due, or ends that do not ascend.
        """
        data = super().take(piece)
        text = data[: max(0, self._table - self._done)]
        self._before = (self._before + bytes(text[-8:]))[-8:]
        self._done += len(data)
        ends = self._rest + bytes(data[len(text) :])
        count = len(ends) // 8
        self._rest = ends[8 * count :]
        if count:
            self._check_ends(np.frombuffer(ends, "<u8", count))
        return data

    def _check_ends(self, found: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        first = self._end < 0
        if (first and found[0]) or int(found[0]) < self._end or (found[1:] < found[:-1]).any():
            raise ProducerError(f"its strings' ends do not ascend from 0; {_AS_STRINGS}")
        self._end = int(found[-1])

    def finish(self) -> None:
        """Raise ProducerError unless all bytes have come, and the last end fits the strings' bytes."""
        super().finish()
        behind = self._table - self._end
        if not 0 <= behind < 8 or any(self._before[len(self._before) - behind :]):
            what = f"its strings do not end where their {self._table} bytes do, but for zeros to a multiple of 8"
            raise ProducerError(f"{what}; {_AS_STRINGS}")
