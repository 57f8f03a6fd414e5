"""The blocks of a split tensor are its elements in C order, whatever its boxes are, each of a limited size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zcrecord.archive import tilings
from zcrecord.archive.boxes import BLOCK, Box, blocks_of

Array = np.ndarray[Any, np.dtype[Any]]


def cut(rng: np.random.Generator, whole: Array, origin: tuple[int, ...], pieces: int) -> list[Box]:
    """Return boxes that tile an array: it is cut in two at random, and so are its parts."""
    axes = [axis for axis, size in enumerate(whole.shape) if size > 1]
    if pieces < 2 or not axes:
        return [Box(origin, whole.copy())]
    axis = int(rng.choice(axes))
    at, first = int(rng.integers(1, whole.shape[axis])), int(rng.integers(1, pieces))
    before = (slice(None),) * axis
    moved = (*origin[:axis], origin[axis] + at, *origin[axis + 1 :])
    return cut(rng, whole[*before, :at], origin, first) + cut(rng, whole[*before, at:], moved, pieces - first)


@pytest.mark.parametrize("shape", [(1000,), (40, 30), (1, 900), (7, 11, 13), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("most", [1, 8, 100, 4096, BLOCK])
@pytest.mark.parametrize("pieces", [2, 5, 40])
def test_blocks_are_the_elements_in_c_order(shape: tuple[int, ...], most: int, pieces: int) -> None:
    rng = np.random.default_rng(pieces)
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    for _ in range(5):
        boxes = cut(rng, whole, (0,) * len(shape), pieces)
        rng.shuffle(boxes)
        done = 0
        for block in blocks_of(shape, boxes, most):
            flat = block.reshape(-1)
            assert block.flags.c_contiguous and 0 < block.nbytes <= max(most, 4)
            assert np.array_equal(flat, whole.reshape(-1)[done : done + flat.size])
            done += flat.size
        assert done == whole.size


def test_every_element_may_be_a_box_of_its_own() -> None:
    whole = np.arange(60, dtype=np.float64).reshape(3, 4, 5)
    boxes = [Box(at, np.full((1, 1, 1), whole[at])) for at in np.ndindex(3, 4, 5)]
    assert b"".join(block.tobytes() for block in blocks_of((3, 4, 5), boxes, 64)) == whole.tobytes()


def test_rows_are_passed_on_without_a_copy() -> None:
    whole = np.arange(1 << 20, dtype=np.float32).reshape(-1, 64)
    boxes = [Box((at, 0), whole[at : at + 4096]) for at in range(0, len(whole), 4096)]
    blocks = list(blocks_of(whole.shape, boxes, 300_000))
    assert all(np.shares_memory(block, whole) for block in blocks)
    assert sum(block.nbytes for block in blocks) == whole.nbytes and max(block.nbytes for block in blocks) <= 300_000


@pytest.mark.parametrize("few", [0, 64])
def test_boxes_tile_a_shape_if_each_element_is_in_one_of_them(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are compared: one by one, or as columns."""
    monkeypatch.setattr(tilings, "_FEW", few)
    rng, told = np.random.default_rng(few), []
    for _ in range(1500):
        shape = tuple(rng.integers(1, 5, rng.integers(0, 4)).tolist())
        boxes = cut(rng, np.zeros(shape), (0,) * len(shape), int(rng.integers(1, 5)))
        origin = np.array([box.origin for box in boxes], np.int64).reshape(len(boxes), len(shape))
        extent = np.array([box.values.shape for box in boxes], np.int64).reshape(origin.shape)
        if shape and rng.random() < 0.5:
            changed = origin if rng.random() < 0.5 else extent
            changed[rng.integers(len(boxes)), rng.integers(len(shape))] += rng.choice([-1, 1])
        told.append(tilings.tiles(origin, extent, shape))
        assert told[-1] == covered_once(origin.tolist(), extent.tolist(), shape)
    assert set(told) == {True, False}


def covered_once(origin: list[list[int]], extent: list[list[int]], shape: tuple[int, ...]) -> bool:
    counts = np.zeros(shape, np.int64)
    for starts, sizes in zip(origin, extent, strict=True):
        if any(a < 0 or n < 1 or a + n > limit for a, n, limit in zip(starts, sizes, shape, strict=True)):
            return False
        counts[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] += 1
    return bool((counts == 1).all())
