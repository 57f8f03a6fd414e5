"""Tilings: boxes that cover every element of a tensor once. Arithmetic alone."""

from __future__ import annotations

from math import prod

import numpy as np

from zcrecord.codec.index import Array

_FEW = 64  # boxes that are compared one by one, which takes less than a pass over columns
_CORNERS, _CORNERS_FREE = 16, 1 << 16  # corners that are compared: for each piece, and for each tensor besides
_PAIRS = 1 << 12  # pieces that are compared in pairs, if they have more corners than that


def _tile_one_axis(origin: list[list[int]], extent: list[list[int]], shape: tuple[int, ...]) -> bool | None:
    """Return True if boxes that split a shape along one axis alone tile it, False if not; None for several axes."""
    axis = -1  # the one along which boxes are smaller than the shape; -1 if there is none
    for starts, sizes in zip(origin, extent, strict=True):
        for i, (start, size, limit) in enumerate(zip(starts, sizes, shape, strict=True)):
            if (start or size != limit) and i != axis:
                if axis >= 0:
                    return None
                axis = i
    if axis < 0:
        return len(origin) == 1
    end = 0
    for start, size in sorted((starts[axis], sizes[axis]) for starts, sizes in zip(origin, extent, strict=True)):
        if start != end or size < 1:
            return False
        end += size
    return end == shape[axis]


def _are_apart(origin: Array, ends: Array) -> bool:
    """Return True if no two boxes have an element in common; compares all pairs."""
    overlaps = (((origin[i] < ends[i + 1 :]) & (origin[i + 1 :] < ends[i])).all(axis=1) for i in range(len(origin)))
    return not any(map(np.any, overlaps))


def tiles(origin: Array, extent: Array, shape: tuple[int, ...]) -> bool:
    """Return True if boxes cover each element of a shape once; False for over 4,096 that differ along five axes."""
    rank = len(shape)
    if origin.shape[1] < rank or (origin.shape[1] > rank and (origin[:, rank:].any() or extent[:, rank:].any())):
        return False
    origin, extent = origin[:, :rank], extent[:, :rank]
    if len(origin) <= _FEW and (answer := _tile_one_axis(origin.tolist(), extent.tolist(), shape)) is not None:
        return answer
    limit = np.array(shape, np.int64)
    if (origin < 0).any() or (extent < 1).any() or (extent > limit).any() or (origin > limit - extent).any():
        return False
    axes = np.flatnonzero((extent != limit).any(axis=0))  # along which the shape is split
    origin, ends, limit = origin[:, axes], (origin + extent)[:, axes], limit[axes]
    if len(origin) < 1 << len(axes) or len(origin) << len(axes) > _CORNERS * len(origin) + _CORNERS_FREE:
        return len(origin) <= _PAIRS and _are_apart(origin, ends) and sum(map(prod, extent.tolist())) == prod(shape)
    return _cancel_corners(np.vstack((origin, 0 * limit)), np.vstack((ends, limit)))


def _cancel_corners(lows: Array, highs: Array) -> bool:
    """Return True if the signed corners of all boxes but the last add up to those of the last, which is the shape.

    Along every axis the number of boxes over an element changes only at corners, so equal sums mean equal covers.
    """
    boxes = np.arange(len(lows))  # by corner, its box
    corners, signs = np.zeros(len(lows), np.int64), np.where(boxes == boxes[-1], -1, 1)
    for low, high in zip(lows.T, highs.T, strict=True):
        values, codes = np.unique(np.concatenate((low, high)), return_inverse=True)
        corners = np.unique(corners, return_inverse=True)[1] * len(values)  # numbered anew, so that it fits an int64
        corners = np.concatenate((corners + codes[: len(low)][boxes], corners + codes[len(low) :][boxes]))
        signs, boxes = np.concatenate((signs, -signs)), np.concatenate((boxes, boxes))
    return not np.bincount(np.unique(corners, return_inverse=True)[1], signs).any()
