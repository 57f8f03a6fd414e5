"""Writers of one constant: check and count its bytes, and copy them to memory or pass them to a sink.

Deciding if a constant may be filled is left to `state`.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.dtypes import DType
from zcrecord.errors import FillError, FormatError, ProducerError, RecordError
from zcrecord.tensors import interop
from zcrecord.tensors.lazy import Pieces
from zcrecord.tensors.packed import PackedTensor, StringTensor
from zcrecord.tensors.strides import as_bytes
from zcrecord.writing import flatten

from .state import FillState, HollowConstant

_PIECE = 1 << 20  # bytes that are copied to a strided tensor at a time


class MemoryTarget:
    """Memory to which one tensor's bytes are copied in C order, whatever its strides."""

    def __init__(self, elements: np.ndarray[Any, Any], result: Any = None) -> None:
        """Fill `elements`, an array over the memory; `close` returns `result`."""
        self._position, self._cut_element, self._result = 0, b"", result
        self.scattered = not elements.flags.c_contiguous
        self._elements = elements if self.scattered else elements.reshape(-1).view(np.uint8)

    def put(self, array: np.ndarray[Any, Any]) -> None:
        """Copy a whole array to scattered elements, without a temporary array."""
        self._elements[...] = array

    def write(self, data: memoryview) -> None:
        """Copy the next bytes; the start of an element that is cut in two waits for the rest."""
        if not self.scattered:
            self._elements[self._position : self._position + len(data)] = np.frombuffer(data, np.uint8)
            self._position += len(data)
            return
        itemsize = self._elements.itemsize
        for start in range(0, len(data), _PIECE):
            piece = self._cut_element + bytes(data[start : start + _PIECE])
            count = len(piece) // itemsize
            elements = np.frombuffer(piece, self._elements.dtype, count)
            self._elements.flat[self._position : self._position + count] = elements
            self._position, self._cut_element = self._position + count, piece[count * itemsize :]

    def close(self) -> Any:
        """Return the result."""
        return self._result

    def abort(self) -> None:
        """Do nothing: memory that is not filled is not shown."""


class SinkTarget(NamedTuple):
    """A sink's object with `write(chunk)`, and maybe `close()` and `abort()`."""

    upload: Any

    def write(self, data: memoryview) -> None:
        """Pass on the next bytes; the object must not use them after its `write` returns."""
        while len(data):
            count = self.upload.write(data)
            if count is None and not isinstance(self.upload, io.RawIOBase):  # a raw file says None if it would block
                return
            if not isinstance(count, int) or not 0 < count <= len(data):
                message = f"sink= wrote {count} of {len(data)} bytes"
                raise ProducerError(f"{message}; its write returns how many it wrote, or None for all of them")
            data = data[count:]

    def close(self) -> Any:
        """Close the object, if it has a `close`; returns the result of that, or the object itself if that is None."""
        result = self.upload.close() if callable(getattr(self.upload, "close", None)) else None
        return self.upload if result is None else result

    def abort(self) -> None:
        """Call the object's `abort`, if it has one."""
        if callable(getattr(self.upload, "abort", None)):
            self.upload.abort()


def sink_target(constant: HollowConstant, result: Any) -> MemoryTarget | SinkTarget:
    """Return the target for a sink's result; ProducerError unless that is a fitting buffer, or has `write(chunk)`."""
    try:
        buffer = memoryview(result)
    except TypeError:
        if callable(getattr(result, "write", None)):
            return SinkTarget(result)
        fault = f"sink= gave a {type(result).__name__}, neither a writable buffer nor an object with write(chunk)"
        raise ProducerError(fault, tensor=constant.name) from None
    fault = ""
    if buffer.readonly:
        fault = "read-only"
    elif not buffer.c_contiguous:
        fault = "not in C order"
    elif buffer.nbytes != constant.nbytes:
        fault = f"of {buffer.nbytes} bytes"
    if fault:
        need = f"{constant.nbytes} contiguous, writable bytes are needed"
        raise ProducerError(f"sink= gave a buffer that is {fault}; {need}", tensor=constant.name)
    return MemoryTarget(np.frombuffer(buffer.cast("B"), np.uint8), result)


class ConstantWriter:
    """Fills one constant chunk by chunk: `write(chunk)` until all is there, then `close()`, or leave the `with` block.

    A chunk is bytes in C order, or an array of the constant's element type, of any shape; no reference to it stays.
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
        """Write to `target`, whose constant is reserved in `state` by `name`; users call `HollowRecord.open`."""
        self.constant = constant
        self._state, self._name, self._target = state, name, target
        self._is_open, self._is_complete, self._is_abandoned = True, False, False
        self._lock = threading.RLock()  # held by the thread that fills; another may abort the record meanwhile
        self._has_numpy_form = constant.native is not None and not constant.info.dtype.packed

    @cached_property
    def _counter(self) -> Pieces:
        """The checker of chunks: by element type where numpy or PackedTensor has the elements, else by bytes alone."""
        info = self.constant.info
        if self._has_numpy_form or (info.dtype.packed and info.bits == info.dtype.bits):
            return Pieces(info.dtype, info.shape)
        if info.dtype is dtypes.STRING and self.constant.nbytes:
            return _StringCounter(self.constant.nbytes, info.shape)
        return _ByteCounter(self.constant.nbytes)

    def write(self, chunk: Any) -> None:
        """Write the next chunk.

        Raises:
            ProducerError: it has another element type, or more bytes than are missing; or the sink wrote a wrong
            number of bytes. FillError: the writer is closed, or an earlier step failed; or the record is sealed or was
            aborted. A sink's own errors are raised as they are.
        """
        self._run_step(self._pass_on, chunk)

    def take(self, data: Any) -> None:
        """Pass on the whole tensor, as `HollowRecord.set` takes it, and with the same errors."""
        self._run_step(self._pass_on_all, data)
        self._is_complete = True

    def mark_complete(self) -> None:
        """Count all bytes as written: the caller has filled the constant's memory without this writer."""
        self._is_complete = True

    def close(self) -> None:
        """Count the constant as filled, once; ProducerError if bytes are missing, FillError after an abort."""
        with self._lock:
            if not self._is_open and not self._is_abandoned:
                return
            if not self._is_complete:
                self._run_step(self._counter.finish)
            result = self._run_step(self._target.close)
            self._is_open = False
            self._state.finish(self.constant, self._name, result)

    def abort(self) -> None:
        """Count the constant as not begun; never raises."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                with contextlib.suppress(Exception):
                    self._target.abort()
                self._state.release(self.constant)

    def abandon(self) -> None:
        """Abort because the record is aborted, without waiting: a thread that writes gets FillError next."""
        if self._lock.acquire(blocking=False):
            self._is_abandoned = self._is_open  # so that `close` raises FillError, too
            self.abort()
            self._lock.release()

    def _run_step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of one step of an open writer; aborts if it fails, and names the tensor in the error."""
        with self._lock:
            try:
                self._state.check_open()
                if not self._is_open:
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
        chunk = self._as_chunk(data)
        if isinstance(chunk, np.ndarray) and isinstance(self._target, MemoryTarget) and self._target.scattered:
            self._target.put(chunk)
            return
        self._pass_on(chunk)
        self._counter.finish()

    def _as_chunk(self, data: Any) -> Any:
        """Return a whole tensor as one chunk; ProducerError for another shape or element type; bytes go unchecked."""
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
        if info.dtype.packed and info.bits == 8:  # narrow elements that the archive has one to a byte
            return as_bytes(data.unpack() if isinstance(data, PackedTensor) else data)
        return data

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
    """Return the element type of a tensor; ProducerError if the format has none for its numpy dtype."""
    if isinstance(data, StringTensor):
        return dtypes.STRING
    if isinstance(data, PackedTensor):
        return data.kind
    try:
        return dtypes.from_numpy(data.dtype)
    except RecordError as error:
        raise ProducerError(error.message) from error


class _ByteCounter(Pieces):
    """Counts the bytes of strings, and of elements of which only the width is known."""

    def __init__(self, due: int) -> None:
        super().__init__(dtypes.by_name["uint8"], (due,))

    def take(self, piece: Any) -> memoryview:
        """Return a piece's bytes, uncopied; ProducerError if they are not contiguous, or more than are due."""
        try:
            data = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        except (TypeError, ValueError):
            raise ProducerError(f"contiguous bytes are due, got a {type(piece).__name__}") from None
        return super().take(data)


class _StringCounter(_ByteCounter):
    """Counts the bytes of a tensor of strings, keeps them, and checks them when all have come (R71)."""

    def __init__(self, due: int, shape: tuple[int, ...]) -> None:
        super().__init__(due)
        self._shape, self._octets = shape, bytearray()

    def take(self, piece: Any) -> memoryview:
        data = super().take(piece)
        self._octets += data
        return data

    def finish(self) -> None:
        """Raise ProducerError if bytes are missing, or if all together are not valid strings."""
        super().finish()
        try:
            StringTensor(np.frombuffer(self._octets, np.uint8), self._shape)
        except FormatError as error:
            raise ProducerError(f"{error.message}; StringTensor.from_strings(...).data has such bytes") from error
