"""Ranges of a file elsewhere: which are there, which are missing, and which are fetched together. Pure arithmetic.

A request costs a round trip, in whose time a network brings some 10 KiB to 1 MiB: neighbours with less between them
are one request, what is long is several at a time.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

__all__ = ["NEAR", "PIECE", "Held", "cut", "merged"]

Range = tuple[int, int]

NEAR = 64 << 10  # bytes between two ranges that are fetched along with them rather than left out by a second request
PIECE = 8 << 20  # bytes of one request at the most: one that fails costs no more, and several share the bandwidth


def merged(ranges: Iterable[Range], near: int = NEAR) -> list[Range]:
    """Return the same ranges ascending and disjoint, those with at most `near` bytes between them as one.

    Example:
        >>> merged([(100, 200), (0, 10), (205, 300)], near=8)
        [(0, 10), (100, 300)]
    """
    out: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if out and start <= out[-1][1] + near:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def cut(ranges: Iterable[Range], piece: int = PIECE) -> list[Range]:
    """Return the same ranges in pieces of nearly equal size, each of at most `piece` bytes.

    Example:
        >>> cut([(0, 10), (20, 22)], piece=6)
        [(0, 5), (5, 10), (20, 22)]
    """
    out: list[Range] = []
    for start, end in ranges:
        count = -(-(end - start) // piece)
        bounds = [start + (end - start) * i // count for i in range(count + 1)] if count else []
        out += itertools.pairwise(bounds)
    return out


class Held:
    """Which bytes of a file are there, as a list of disjoint ranges that ascend.

    `ranges` stays the same list: who has it sees what is added.
    """

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    def add(self, start: int, end: int) -> None:
        """Note that [start, end) is there."""
        if start >= end:
            return
        first = bisect.bisect_left(self.ranges, start, key=lambda r: r[1])
        last = bisect.bisect_right(self.ranges, end, key=lambda r: r[0])
        touched = self.ranges[first:last]
        if touched:
            start, end = min(start, touched[0][0]), max(end, touched[-1][1])
        self.ranges[first:last] = [(start, end)]

    def missing(self, start: int, end: int) -> list[Range]:
        """Return the parts of [start, end) that are not there."""
        out = []
        first = bisect.bisect_right(self.ranges, start, key=lambda r: r[1])
        for there, until in self.ranges[first:]:
            if there >= end:
                break
            if start < there:
                out.append((start, there))
            start = max(start, until)
        if start < end:
            out.append((start, end))
        return out
