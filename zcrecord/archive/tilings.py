"""Tilings: boxes that cover every element of a tensor once. Arithmetic alone."""

from __future__ import annotations

from math import prod

import numpy as np

from zcrecord.codec.index import Array

_FEW = 64  # boxes that are compared one by one, which takes less than a pass over columns
_CORNERS, _CORNERS_FREE = 16, 1 << 16  # corners that are compared: for each piece, and for each tensor besides
_PAIRS = 1 << 12  # pieces that are compared in pairs, if they have more corners than that


def _tile_one_axis(origin: list[list[int]], extent: list[list[int]], shape: tuple[int, ...]) -> bool | None:
    """Return True if boxes that differ along one axis alone tile a shape, None if they differ along several."""
    axis = -1
    for starts, sizes in zip(origin, extent, strict=True):
        for at, (start, size, limit) in enumerate(zip(starts, sizes, shape, strict=True)):
            if (start or size != limit) and at != axis:
                if axis >= 0:
                    return None
                axis = at
    if axis < 0:
        return len(origin) == 1
    end = 0
    for start, size in sorted((starts[axis], sizes[axis]) for starts, sizes in zip(origin, extent, strict=True)):
        if start != end or size < 1:
            return False
        end += size
    return end == shape[axis]


def _are_apart(origin: Array, extent: Array) -> bool:
    ends = origin + extent
    overlaps = (((origin[i] < ends[i + 1 :]) & (origin[i + 1 :] < ends[i])).all(axis=1) for i in range(len(origin)))
    return not any(map(np.any, overlaps))


def tiles(origin: Array, extent: Array, shape: tuple[int, ...]) -> bool:
    """Return True if boxes tile a shape; also False for over 4,096 boxes that differ along over four axes."""
    rank = len(shape)
    if origin.shape[1] < rank or (origin.shape[1] > rank and (origin[:, rank:].any() or extent[:, rank:].any())):
        return False
    origin, extent = origin[:, :rank], extent[:, :rank]
    if len(origin) <= _FEW and (answer := _tile_one_axis(origin.tolist(), extent.tolist(), shape)) is not None:
        return answer
    limit = np.array(shape, np.int64)
    if (origin < 0).any() or (extent < 1).any() or (extent > limit).any() or (origin > limit - extent).any():
        return False
    moving = [axis for axis in range(rank) if (extent[:, axis] != limit[axis]).any()]
    if len(origin) < 1 << len(moving) or len(origin) << len(moving) > _CORNERS * len(origin) + _CORNERS_FREE:
        if len(origin) > _PAIRS:
            return False
        return _are_apart(origin[:, moving], extent[:, moving]) and sum(map(prod, extent.tolist())) == prod(shape)
    # How often an element is covered changes along every axis only at corners. If those of all boxes, each with its
    # sign, add up to the corners of the shape, then the boxes cover what the shape does, as often.
    keys, signs = np.zeros(len(origin) + 1, np.int64), np.ones(len(origin) + 1, np.int64)
    signs[-1] = -1
    at = np.arange(len(keys))
    for axis in moving:
        low, high = np.append(origin[:, axis], 0), np.append(origin[:, axis] + extent[:, axis], limit[axis])
        values, code = np.unique(np.concatenate((low, high)), return_inverse=True)
        code = code.reshape(-1)
        keys = np.unique(keys, return_inverse=True)[1].reshape(-1) * len(values)  # no more of them than corners
        keys = np.concatenate((keys + code[: len(low)][at], keys + code[len(low) :][at]))
        signs, at = np.concatenate((signs, -signs)), np.concatenate((at, at))
    keys = np.unique(keys, return_inverse=True)[1].reshape(-1)
    return not np.bincount(keys, signs).any()
