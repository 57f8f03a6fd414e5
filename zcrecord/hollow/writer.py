"""The bytes of one constant on their way: checked, counted, passed on, and whoever hands them over.

Where they go is `constants`'s, whether anything may be filled, and what becomes of it, is left to `hollow`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
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

from .targets import Constant, Destination, Place

__all__ = ["ConstantWriter", "Filler"]

_AS_STRINGS = "StringTensor.from_strings(...).data has such bytes"


class Filler:
    """The bytes of one constant on their way: checked, counted, and passed on; nothing is kept."""

    def __init__(self, constant: Constant, destination: Destination) -> None:
        self.constant = constant
        self._destination = destination
        info = constant.info
        self._plain = constant.native is not None and not info.dtype.packed
        pieces = self._plain or (info.dtype.packed and info.bits == info.dtype.bits)
        self._due: Pieces | _Bytes
        if pieces:
            self._due = Pieces(info.dtype, info.shape)
        else:
            strings = info.dtype is dtypes.STRING and constant.nbytes > 0
            self._due = _Strings(constant.nbytes, prod(info.shape)) if strings else _Bytes(constant.nbytes)

    def whole(self, data: Any) -> None:
        """Take all of it at once: an array of any library, a PackedTensor, a StringTensor, or bytes in C order.

        Raises:
            ProducerError: another shape or element type, too few or too many bytes, or strings that are none.
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
        if isinstance(data, np.ndarray | np.generic) and data.dtype.kind in "UT":  # numpy's texts
            data = flatten.as_tensor(data, self.constant.name)
        if not isinstance(data, PackedTensor | StringTensor):
            data = interop.as_array(data)
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


class _Strings(_Bytes):
    """The bytes of strings: counted, and right (R71), in whatever chunks they come."""

    def __init__(self, due: int, count: int) -> None:
        super().__init__(due)
        self._table = due - 8 * (count + 1)  # where the ends begin, behind the padding
        self._done = 0
        self._before = b""  # the last bytes before the ends, which may be padding
        self._rest = b""  # of an end that is cut in two
        self._end = -1  # the last that was seen

    def take(self, piece: Any) -> memoryview:
        """Return a piece's bytes.

        Raises:
            ProducerError: it is no bytes, more than is due, or has ends that are none.
        """
        data = super().take(piece)
        text = data[: max(0, self._table - self._done)]
        self._before = (self._before + bytes(text[-8:]))[-8:]
        self._done += len(data)
        ends = self._rest + bytes(data[len(text) :])
        count = len(ends) // 8
        self._rest = ends[8 * count :]
        if count:
            self._see(np.frombuffer(ends, "<u8", count))
        return data

    def _see(self, found: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        first = self._end < 0
        if (first and found[0]) or int(found[0]) < self._end or (found[1:] < found[:-1]).any():
            raise ProducerError(f"its strings' ends do not ascend from 0; {_AS_STRINGS}")
        self._end = int(found[-1])

    def finish(self) -> None:
        """Raise ProducerError unless all has come, and the last end is where the strings end."""
        super().finish()
        behind = self._table - self._end
        if not 0 <= behind < 8 or any(self._before[len(self._before) - behind :]):
            what = f"its strings do not end where their {self._table} bytes do, but for zeros to a multiple of 8"
            raise ProducerError(f"{what}; {_AS_STRINGS}")


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

    def __init__(
        self,
        filler: Filler,
        name: str,
        check: Callable[[], None],
        done: Callable[[Any], None],
        gone: Callable[[], None],
    ) -> None:
        """For this package's own use: `HollowRecord.open` makes them."""
        self._open, self._whole, self._lost = True, False, False
        self._busy = threading.RLock()  # by the thread that fills; another may give up the record meanwhile
        self._filler, self._name, self._check, self._done, self._gone = filler, name, check, done, gone

    @property
    def constant(self) -> Constant:
        """What is filled; for this package's own use."""
        return self._filler.constant

    def write(self, chunk: Any) -> None:
        """Pass on the next chunk.

        Raises:
            ProducerError: it is of another element type, or more than is due. FillError: the record was given up.
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
        with self._busy:
            if not self._open and not self._lost:
                return
            if not self._whole:
                self._do(self._filler.finish)
            result = self._do(self._filler.close)
            self._open = False
            self._done(result)

    def abort(self) -> None:
        """Have the constant count as not begun; never raises."""
        with self._busy:
            if self._open:
                self._open = False
                with contextlib.suppress(Exception):
                    self._filler.abort()
                self._gone()

    def give_up(self) -> None:
        """Abort, for the record is given up; a thread that is at it finds out by itself. For this package's own use."""
        if self._busy.acquire(blocking=False):
            self._lost = self._open
            self.abort()
            self._busy.release()

    def _do(self, step: Callable[..., Any], *arguments: Any) -> Any:
        with self._busy:
            try:
                self._check()
                if not self._open:
                    raise FillError("its writer was closed, or something failed; open it again")
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

    def __del__(self) -> None:
        # Who forgets a writer, or lost it with an exception, may fill the constant again.
        if getattr(self, "_gone", None) is not None:
            self.abort()
