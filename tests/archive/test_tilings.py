"""Boxes tile a tensor or do not; the blocks of a split tensor are its elements in C order, whatever its boxes are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zcrecord.archive import tilings
from zcrecord.archive.boxes import BLOCK, Box, blocks_of
from zcrecord.archive.tilings import tiles

Array = np.ndarray[Any, np.dtype[Any]]


def covered_once(origin: Array, extent: Array, shape: tuple[int, ...]) -> bool:
    count = np.zeros(shape, int)
    for start, size in zip(origin, extent, strict=True):
        if (start < 0).any() or (size < 1).any() or (start + size > np.array(shape)).any():
            return False
        count[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    return bool((count == 1).all())


def cut(rng: Any, origin: Array, extent: Array, times: int) -> list[tuple[Array, Array]]:
    axes = np.flatnonzero(extent > 1)
    if not times or not len(axes):
        return [(origin, extent)]
    axis = rng.choice(axes)
    at = rng.integers(1, extent[axis])
    step = np.arange(len(extent)) == axis
    low, high = np.where(step, at, extent), np.where(step, extent[axis] - at, extent)
    return cut(rng, origin, low, times - 1) + cut(
        rng, origin + step * at, high, times - 1 - int(rng.integers(2) % times)
    )


def changed(rng: Any, origin: Array, extent: Array) -> tuple[Array, Array]:
    k, axis = rng.integers(len(origin)), rng.integers(origin.shape[1])
    match rng.integers(4):
        case 0:
            origin[k, axis] += rng.integers(-1, 2)
        case 1:
            extent[k, axis] += rng.integers(-1, 2)
        case 2:
            return np.concatenate((origin, origin[k : k + 1])), np.concatenate((extent, extent[k : k + 1]))
        case _:
            return np.delete(origin, k, 0), np.delete(extent, k, 0)
    return origin, extent


@pytest.mark.parametrize("few", [0, 64])
def test_boxes_are_a_tiling_if_every_element_is_covered_once(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are compared: one by one, or as columns."""
    monkeypatch.setattr(tilings, "_FEW", few)
    rng, found = np.random.default_rng(few), {True: 0, False: 0}
    for _ in range(600):
        shape = tuple(rng.integers(1, 6, rng.integers(1, 5)).tolist())
        boxes = cut(rng, np.zeros(len(shape), np.int64), np.array(shape), int(rng.integers(0, 4)))
        origin, extent = (np.array([box[i] for box in boxes]) for i in (0, 1))
        order = rng.permutation(len(boxes))
        origin, extent = origin[order], extent[order]
        if rng.integers(2):
            origin, extent = changed(rng, origin, extent)
        answer = tiles(origin, extent, shape)
        assert answer == covered_once(origin, extent, shape), (origin, extent, shape)
        found[answer] += 1
    assert min(found.values()) > 100


def test_a_pinwheel_tiles_and_not_with_its_middle_twice() -> None:
    origin = np.array([[0, 0], [0, 2], [1, 0], [2, 1], [1, 1]])
    extent = np.array([[1, 2], [2, 1], [2, 1], [1, 2], [1, 1]])
    assert tiles(origin, extent, (3, 3))
    assert not tiles(np.concatenate((origin, [[1, 1]])), np.concatenate((extent, [[1, 1]])), (3, 3))


def test_a_scalar_is_one_box_and_no_boxes_are_none() -> None:
    one = np.zeros((1, 0), np.int64)
    assert tiles(one, one, ()) and not tiles(np.repeat(one, 2, 0), np.repeat(one, 2, 0), ())
    assert not tiles(one[:0], one[:0], ()) and not tiles(np.zeros((0, 2), int), np.zeros((0, 2), int), (2, 3))


def test_ninety_thousand_boxes_are_checked_without_comparing_pairs() -> None:
    side = 300
    origin = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2) * 3
    extent = np.full_like(origin, 3)
    assert tiles(origin, extent, (3 * side, 3 * side))
    origin[[7, 9]] = origin[[9, 9]]
    assert not tiles(origin, extent, (3 * side, 3 * side))


def test_boxes_with_more_corners_than_are_looked_at_are_refused() -> None:
    """Two boxes each along 26 axes: 2^26 boxes would be a file of gigabytes; one alone differs along none."""
    shape = (2,) * 26
    assert tiles(np.zeros((1, 26), int), np.full((1, 26), 2), shape)
    assert not tiles(np.zeros((2, 26), int), np.ones((2, 26), int), shape)


@pytest.mark.parametrize("shape", [(1000,), (1, 900), (7, 11, 13), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("most", [1, 100, 4096, BLOCK])
@pytest.mark.parametrize("pieces", [1, 6])
def test_blocks_are_the_elements_in_c_order(shape: tuple[int, ...], most: int, pieces: int) -> None:
    rng = np.random.default_rng(pieces)
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    for _ in range(5):
        places = cut(rng, np.zeros(len(shape), np.int64), np.array(shape), pieces)
        boxes = [Box(tuple(a.tolist()), whole[tuple(map(slice, a, a + n))].copy()) for a, n in places]
        rng.shuffle(boxes)
        done = 0
        for block in blocks_of(shape, boxes, most):
            flat = block.reshape(-1)
            assert block.flags.c_contiguous and 0 < block.nbytes <= max(most, 4)
            assert np.array_equal(flat, whole.reshape(-1)[done : done + flat.size])
            done += flat.size
        assert done == whole.size


def test_rows_are_passed_on_without_a_copy() -> None:
    whole = np.arange(1 << 20, dtype=np.float32).reshape(-1, 64)
    boxes = [Box((at, 0), whole[at : at + 4096]) for at in range(0, len(whole), 4096)]
    blocks = list(blocks_of(whole.shape, boxes, 300_000))
    assert all(np.shares_memory(block, whole) for block in blocks)
    assert sum(block.nbytes for block in blocks) == whole.nbytes and max(block.nbytes for block in blocks) <= 300_000
