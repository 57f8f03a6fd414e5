"""By how much two tensors of one type and shape differ: how many elements, and by how much at most.

Both are read forward, a piece at a time; nothing larger is held. Which tensors to compare is left to `comparing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.index import TensorEntry
from zcrecord.dtypes import DType
from zcrecord.tensors.packed import PackedTensor

if TYPE_CHECKING:
    from zcrecord.archive.archive import Archive

__all__ = ["differing", "same"]

Array = np.ndarray[Any, np.dtype[Any]]

_PIECE = 3 * 5 * 7 << 13  # bytes of each compared at a time: they stay in the cache; whole elements of any width


def differing(a: Archive, i: int, b: Archive, j: int) -> tuple[int | None, float | int | None] | None:
    """Return how many elements differ, and the largest absolute difference; None if all bits are the same.

    Elements differ if their bits do: 0.0 and -0.0 do, and so may two NaNs. The largest difference leaves out those of
    which one is NaN, unless all are; integers' is exact. Of strings, and of types that this reader or numpy does not
    know, neither is known: (None, None).
    """
    row = a.row(i)
    kind = dtypes.by_code.get(row.dtype)
    if kind is None or kind.numpy is None:
        return (None, None) if any(not _same(x, y) for x, y in _pieces(a, i, b, j)) else None
    count, largest = 0, None
    left = prod(a.shape(row))
    for x, y in _pieces(a, i, b, j):
        elements = min(left, 8 * len(x) // row.bits)
        left -= elements
        if not _same(x, y):
            u, v = (_values(piece, kind, row.bits, elements) for piece in (x, y))
            other = _bits(u) != _bits(v)
            other = other.any(axis=-1) if other.ndim > 1 else other
            count += int(np.count_nonzero(other))
            largest = _larger(largest, _largest(u[other], v[other]))
    return (count, largest) if count else None


def _pieces(a: Archive, i: int, b: Archive, j: int) -> Iterator[tuple[Array, Array]]:
    """Yield the bytes of both, in C order, a piece of each at a time."""
    mine, other = a.row(i), b.row(j)
    if a.strides(mine) is None and b.strides(other) is None:
        x, y = (np.frombuffer(archive.payload(row.payload), np.uint8) for archive, row in ((a, mine), (b, other)))
        for at in range(0, max(len(x), len(y)), _PIECE):
            yield x[at : at + _PIECE], y[at : at + _PIECE]
        return
    item = mine.bits >> 3
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    both: Any = [_elements(a, i, mine), _elements(b, j, other)]
    each = np.nditer(both, flags=flags, order="C", buffersize=_PIECE // item // 8 * 8)
    for u, v in each:
        yield np.ascontiguousarray(u).view(np.uint8), np.ascontiguousarray(v).view(np.uint8)


def same(x: bytes | memoryview, y: bytes | memoryview) -> bool:
    """Return whether bytes are the same, a piece at a time."""
    if len(x) != len(y):
        return False
    u, v = np.frombuffer(x, np.uint8), np.frombuffer(y, np.uint8)
    return all(_same(u[at : at + _PIECE], v[at : at + _PIECE]) for at in range(0, len(u), _PIECE))


def _elements(archive: Archive, i: int, row: TensorEntry) -> Array:
    """Return a tensor as opaque elements of its width, however it lies."""
    if archive.strides(row) is not None:
        return archive.elements(i)
    item = np.dtype((np.void, row.bits >> 3))
    return np.frombuffer(archive.payload(row.payload), item).reshape(archive.shape(row))


def _same(x: Array, y: Array) -> bool:
    """Return whether bytes are the same; eight at a time, as far as there are eight."""
    if len(x) != len(y):
        return False
    whole = len(x) // 8 * 8
    words = x[:whole].view(np.uint64), y[:whole].view(np.uint64)
    return bool((words[0] == words[1]).all() and (x[whole:] == y[whole:]).all())


def _values(piece: Array, kind: DType, bits: int, elements: int) -> Array:
    """Return bytes as elements, one to a byte those that are narrower."""
    if bits < 8:
        return PackedTensor(piece, kind, (elements,)).unpack()
    assert kind.numpy is not None
    return piece.view(kind.numpy)


def _bits(values: Array) -> Array:
    """Return elements as unsigned integers, those of 16 bytes as two each."""
    item = values.dtype.itemsize
    return values.view(np.uint64).reshape(-1, 2) if item == 16 else values.view(f"u{item}")


def _largest(u: Array, v: Array) -> float | int:
    """Return the largest absolute difference; NaN only if nothing else is there."""
    name = u.dtype.name
    if name == "bool":
        return 1
    if name.startswith(("int", "uint")):
        wide: Any = np.uint64 if name == "uint64" else np.int64
        u, v = u.astype(wide), v.astype(wide)
        return int((np.maximum(u, v).view(np.uint64) - np.minimum(u, v).view(np.uint64)).max())
    with np.errstate(all="ignore"):
        wide = np.complex128 if name.startswith("complex") else np.float64
        apart = np.abs(u.astype(wide) - v.astype(wide))
        known = apart[~np.isnan(apart)]
        return float(known.max()) if len(known) else float("nan")


def _larger(a: float | int | None, b: float | int) -> float | int:
    return b if a is None or a != a or b > a else a
