"""Addresses, extents and orders of strided arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zcrecord.dtypes import Array, Octets


def address(data: Any) -> int:
    """Return the address of an array's first element, or of a contiguous buffer's first byte."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    return int(array.__array_interface__["data"][0])


def addresses(arrays: Sequence[Any]) -> list[int]:
    """Return the addresses of arrays in C order; by ctypes if all are writable, in a fifth of numpy's time."""
    try:
        return list(map(ctypes.addressof, map(ctypes.c_char.from_buffer, arrays)))
    except (TypeError, ValueError, BufferError):
        return list(map(address, arrays))


def reach(shape: Iterable[int], strides: Iterable[int]) -> tuple[int, int]:
    """Return the distances from the first element to the lowest and the highest one, in the unit of the strides."""
    steps = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)


def extent(array: Array) -> tuple[int, int]:
    """Return the lowest address that an array with elements reaches, and the one behind its highest."""
    start, (low, high) = address(array), reach(array.shape, array.strides)
    return start + low, start + high + array.itemsize


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of C order, in elements."""
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def is_c_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if strides, in elements, are those of C order; the stride of an axis of length 1 does not matter."""
    return all(dim == 1 or s == c for dim, s, c in zip(shape, strides, c_strides(shape), strict=True))


def is_dense(shape: Iterable[int], strides: Iterable[int], item: int = 1) -> bool:
    """Return True if elements of `item` bytes fill their extent in some order of the axes, none of them reversed."""
    step = item
    for stride, dim in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != step:
            return False
        step *= dim
    return True


def memory_order(array: Array) -> Octets:
    """Return a view of a dense array's bytes in the order in which they lie."""
    if not array.flags.c_contiguous:
        array = array.transpose(sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], array.shape[axis])))
    return array.reshape(-1).view(np.uint8)


def as_bytes(array: Array) -> Octets:
    """Return the array's C-order bytes, little-endian: a view where it is contiguous, a new array otherwise."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("<"))
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8)


def in_blocks(values: Any, max_nbytes: int) -> Iterator[Any]:
    """Yield an array or torch tensor as views, in C order, each of at most `max_nbytes` or one larger element."""
    if values.nbytes <= max_nbytes or not values.ndim:
        yield values
        return
    rows = max_nbytes // (values.nbytes // len(values))
    if not rows:
        for row in values:
            yield from in_blocks(row, max_nbytes)
        return
    for start in range(0, len(values), rows):
        yield values[start : start + rows]
