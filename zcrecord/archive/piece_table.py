"""The places of payloads in other files, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from zcrecord.codec.index import Array
from zcrecord.codec.layout import NONE


class PieceTable:
    """The places of payloads in shards, as columns.

    A payload that lies whole in one file is one piece; of a split tensor there are several, each a box of its elements.
    `file` and `payload` have, by piece, its shard's number (NONE: the catalogue's blobs) and its number among payloads
    there; `first`, by payload, its first piece, and at the end the number of pieces (None where each has one); `origin`
    and `extent`, by piece, first index and size of the box along each axis (None where nothing is split).
    """

    __slots__ = ("_by_file", "_whole", "extent", "file", "first", "origin", "payload")

    def __init__(self, file: Array, payload: Array, first: Array | None, origin: Array | None, extent: Any) -> None:
        self.file, self.payload, self.first, self.origin, self.extent = file, payload, first, origin, extent
        self._by_file: tuple[Array, Array] | None = None  # made when needed, as below: there may be a million pieces
        self._whole: Array | None = None

    def chosen(self, numbers: Any) -> PieceTable:
        """Return the table of the payloads of these numbers, in their order."""
        if self.first is None:
            return PieceTable(self.file[numbers], self.payload[numbers], None, None, None)
        counts = (self.first[1:] - self.first[:-1])[numbers].astype(np.int64)
        ends = np.cumsum(counts)
        rows = np.repeat(self.first[numbers].astype(np.int64) - (ends - counts), counts) + np.arange(ends[-1:].sum())
        assert self.origin is not None
        first = np.concatenate(([0], ends)).astype(np.uint64)
        return PieceTable(self.file[rows], self.payload[rows], first, self.origin[rows], self.extent[rows])

    def pieces(self, number: int) -> range:
        """Return the positions of a payload's pieces in the table."""
        first = self.first
        return range(number, number + 1) if first is None else range(int(first[number]), int(first[number + 1]))

    def files(self) -> list[int]:
        """Return the numbers of the files that pieces lie in, ascending."""
        return [int(file) for file in np.unique(self.file)]

    def in_file(self, file: int) -> Array:
        """Return the positions of the pieces that lie in a file, ascending."""
        if self._by_file is None:
            order = np.argsort(self.file, kind="stable")
            self._by_file = order, self.file[order]
        order, files = self._by_file
        start, end = np.searchsorted(files, np.array([file, file + 1], np.int64))
        return order[start:end]

    def payloads_of(self, pieces: Array) -> Array:
        """Return the number of the payload that each of these pieces belongs to."""
        return pieces if self.first is None else np.searchsorted(self.first, pieces.astype(np.uint64), "right") - 1

    def whole(self) -> Array:
        """Return by payload the file that it lies in, whole; NONE for those in the catalogue, or split."""
        if self.first is None:
            return self.file
        if self._whole is None:
            is_whole = self.first[1:] - self.first[:-1] == 1
            self._whole = np.where(is_whole, self.file[self.first[:-1].astype(np.int64)], NONE)
        return self._whole

    def numbers(self) -> Array:
        """Return by payload its number in its file; of a split one that of its first piece."""
        return self.payload if self.first is None else self.payload[self.first[:-1].astype(np.int64)]

    def split(self) -> frozenset[int]:
        """Return the numbers of the payloads that are stored in several pieces."""
        first = self.first
        return frozenset() if first is None else frozenset(np.flatnonzero(first[1:] - first[:-1] > 1).tolist())
