"""Addresses, extents and orders of strided arrays are those that numpy's own elements have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zcrecord.tensors import strides

BASE = np.arange(5 * 4 * 3, dtype=np.int32).reshape(5, 4, 3)
VIEWS: dict[str, Any] = {
    "whole": BASE,
    "rows": BASE[1:3],
    "every second": BASE[::2],
    "backwards": BASE[::-1, :, ::-1],
    "transposed": BASE.transpose(2, 0, 1),
    "one element": BASE[2:3, 1:2, :1],
    "a column": BASE[:, 1],
    "rank 0": BASE[1, 2, 0, ...],
}


@pytest.mark.parametrize("name", VIEWS)
def test_extent_is_from_the_lowest_byte_to_behind_the_highest(name: str) -> None:
    view = VIEWS[name]
    found = [view[(*index, ...)].ctypes.data for index in np.ndindex(view.shape)]
    assert strides.extent(view) == (min(found), max(found) + view.itemsize)


@pytest.mark.parametrize("name", VIEWS)
def test_dense_arrays_fill_their_extent_and_are_not_reversed(name: str) -> None:
    view = VIEWS[name]
    lo, hi = strides.extent(view)
    upright = all(s > 0 for s, n in zip(view.strides, view.shape, strict=True) if n > 1)
    assert strides.is_dense(view.shape, view.strides, view.itemsize) == (hi - lo == view.nbytes and upright)
    elements = [s // view.itemsize for s in view.strides]
    assert strides.is_c_order(view.shape, elements) == view.flags.c_contiguous


def test_bytes_of_a_dense_array_come_as_they_lie_uncopied() -> None:
    view = BASE.transpose(2, 0, 1)
    octets = strides.memory_order(view)
    assert octets.tobytes() == BASE.tobytes() and strides.address(octets) == strides.address(BASE)
    assert strides.as_bytes(view).tobytes() == view.tobytes()


def test_addresses_are_the_same_of_arrays_that_cannot_be_written() -> None:
    fixed = BASE.copy()
    fixed.flags.writeable = False
    for arrays in ([BASE], [fixed], [BASE, fixed]):
        assert strides.addresses(arrays) == list(map(strides.address, arrays))
    assert strides.address(memoryview(b"abc")) + 1 == strides.address(memoryview(b"abc")[1:])
