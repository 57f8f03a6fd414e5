"""Tensors with values that are made when they are written: records larger than memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK
from zcrecord.dtypes import DType
from zcrecord.errors import LimitError, ProducerError, RecordError, UnsupportedError

from . import interop
from .packed import PackedTensor
from .strides import as_bytes

_BOOL = dtypes.by_name["bool"]
_SPENT = object()


class LazyTensor:
    """A tensor of declared dtype and shape, with values that are produced, piece by piece, when it is saved.

    Nothing is called before, and no piece is kept after it was written: saving holds one at a time. The same object in
    two places of a record is one tied tensor, produced once.

    Args:
        dtype: an element type of the format by its name, a numpy or torch dtype.
        shape: its dimensions.
        produce: a callable without arguments, called once, or an iterable used up once. Either gives pieces in C order,
            each bytes-like or an array of that dtype; a callable may also return one array of that very shape.

    Raises:
        UnsupportedError: no such element type. LimitError: a shape that no archive holds.

    Example:
        >>> import zcrecord
        >>> rows = (np.full((1, 4), i, np.float32) for i in range(3))
        >>> _ = zcrecord.save_record({"w": LazyTensor("float32", (3, 4), rows)}, "model.zcr")
        >>> zcrecord.load_record("model.zcr")["w"][:, 0].tolist()
        [0.0, 1.0, 2.0]
    """

    __slots__ = ("_produce", "key", "kind", "shape")

    def __init__(
        self,
        dtype: Any,
        shape: Sequence[int],
        produce: Callable[[], Any] | Iterable[Any],
        *,
        key: Hashable | None = None,
    ) -> None:
        """Declare a tensor; lazy tensors with equal `key` are tied, without a key none is tied to another object."""
        self.kind: DType = dtypes.as_dtype(dtype)
        if self.kind is dtypes.STRING:
            raise UnsupportedError("strings cannot be produced lazily; their bytes are not known from a shape")
        try:
            self.shape = tuple(int(operator.index(dim)) for dim in shape)
        except TypeError:
            raise UnsupportedError(f"a shape is a sequence of integers, not {shape!r}") from None
        if any(dim < 0 for dim in self.shape):
            raise LimitError(f"shape {self.shape} has a negative dimension")
        if len(self.shape) > MAX_RANK or prod(dim or 1 for dim in self.shape) * self.kind.bits > 8 * MAX_ARCHIVE_SIZE:
            raise LimitError(f"shape {self.shape} is of more than {MAX_RANK} dimensions or claims more than 2^56 bytes")
        self._produce: Any = produce
        self.key: Hashable = id(self) if key is None else key

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes, elements narrower than a byte packed."""
        return dtypes.nbytes(prod(self.shape), self.kind.bits)

    def pieces(self) -> Iterator[Any]:
        """Yield the values, once, as memoryviews of `nbytes` in all; ProducerError if they are not as declared."""
        produce, self._produce = self._produce, _SPENT
        if produce is _SPENT:
            raise ProducerError("its values were produced already; make a new LazyTensor for each save")
        product = produce() if callable(produce) else produce
        is_bytes = _bytes_view(product) is not None
        is_single = is_bytes or hasattr(product, "shape")
        if is_single and not is_bytes and tuple(product.shape) != self.shape:
            raise ProducerError(f"declared with shape {self.shape}, produced with {tuple(product.shape)}")
        if not is_single and not hasattr(product, "__iter__") and not hasattr(product, "__getitem__"):
            raise ProducerError(f"a {type(product).__name__} is neither bytes, nor an array, nor an iterable of them")
        pieces = Pieces(self.kind, self.shape)
        try:
            for piece in [product] if is_single else product:
                yield pieces.take(piece)
        finally:
            if hasattr(product, "close") and not is_single:  # a generator, maybe with a file that it closes
                product.close()
        pieces.finish()

    def __repr__(self) -> str:
        return f"LazyTensor({self.kind.name}, shape={self.shape})"


class Pieces:
    """Checks the pieces of one tensor: counts their bytes, and makes them legal for its element type."""

    def __init__(self, kind: DType, shape: Sequence[int]) -> None:
        self._kind = kind
        self._due = dtypes.nbytes(prod(shape), kind.bits)
        self._done = 0
        self._last_bits = prod(shape) * kind.bits % 8  # bits of the last byte that hold elements; 0: all

    def take(self, piece: Any) -> memoryview:
        """Return a piece's bytes, uncopied if they lie in C order already; ProducerError if they do not fit."""
        data, ends_in_byte = self._bytes_of(piece)
        done = self._done + len(data)
        if done > self._due:
            raise ProducerError(f"{self._due} bytes were declared, at least {done} produced")
        if ends_in_byte and done < self._due:
            raise ProducerError(f"a piece of {self._kind.name} ends within a byte; have all but the last fill theirs")
        self._done = done  # not before: a refused piece does not count, even if the caller ignores the error
        if self._kind is _BOOL and len(data) and np.frombuffer(data, np.uint8).max() > 1:
            data = memoryview((np.frombuffer(data, np.uint8) != 0).view(np.uint8))
        if self._last_bits and self._done == self._due and len(data) and data[-1] >> self._last_bits:
            last_byte = data[-1] & ((1 << self._last_bits) - 1)  # the bits after the last element are zeros
            data = memoryview(bytes(data[:-1]) + bytes([last_byte]))
        return data

    def finish(self) -> None:
        """Raise ProducerError if bytes are missing."""
        if self._done < self._due:
            raise ProducerError(f"{self._due} bytes were declared, {self._done} produced")

    def _bytes_of(self, piece: Any) -> tuple[memoryview, bool]:
        """Return a piece's bytes, and True if elements fill the last only in part; ProducerError for another type."""
        octets = _bytes_view(piece)
        if octets is not None:
            if not octets.c_contiguous:
                raise ProducerError("a piece is not contiguous; hand over its .tobytes()")
            return octets.cast("B") if octets.nbytes else memoryview(b""), False
        try:
            array = piece if isinstance(piece, PackedTensor) else interop.as_array(piece)
            if not isinstance(array, PackedTensor) and (kind := dtypes.from_numpy(array.dtype)).packed:
                array = PackedTensor.pack(array)
        except RecordError as error:
            raise ProducerError(f"a piece cannot be stored: {error.message}") from error
        if isinstance(array, PackedTensor):
            kind = array.kind
        if kind is not self._kind:
            raise ProducerError(f"declared as {self._kind.name}, a piece is {kind.name}; convert it with .astype(...)")
        if isinstance(array, PackedTensor):
            return array.packed.data, prod(array.shape) * kind.bits % 8 != 0
        return as_bytes(array).data, False


def _bytes_view(value: Any) -> memoryview | None:
    """Return a view of a value that has bytes and no shape, or of a memoryview; None for all others."""
    if hasattr(value, "shape") and not isinstance(value, memoryview):
        return None
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
