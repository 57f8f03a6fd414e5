"""Arithmetic of byte ranges: merged, cut into requests, and sets of ranges.

A request costs a round trip, in which a network transfers some 10 KiB to 1 MiB: neighbours with less between them are
merged into one request, long ranges are cut into several that run in parallel.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from typing import NamedTuple

Range = tuple[int, int]  # the first offset, and the one after the last

NEAR = 64 << 10  # bytes between two ranges that are fetched with them, which is faster than a second request
PIECE = 8 << 20  # bytes of one request at the most: a failed one costs no more, and several run in parallel


class PayloadRange(NamedTuple):
    """A payload or another range of the file. `digest` is None if it is not checked; `name` is a tensor's."""

    start: int
    nbytes: int
    digest: int | None
    name: str = ""

    @property
    def end(self) -> int:
        """Offset of the byte after it."""
        return self.start + self.nbytes


def merged(ranges: Iterable[Range], near: int = NEAR) -> list[Range]:
    """Return the same ranges ascending and disjoint, those with at most `near` bytes between them as one."""
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
    """Return the same ranges in pieces of nearly equal size, each of at most `piece` bytes."""
    out: list[Range] = []
    for start, end in ranges:
        count = -(-(end - start) // piece)
        bounds = [start + (end - start) * i // count for i in range(count + 1)] if count else []
        out += itertools.pairwise(bounds)
    return out


class RangeSet:
    """A set of bytes as a list of ascending, disjoint ranges; `ranges` stays the same list for its holders."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    def add(self, start: int, end: int) -> None:
        """Add [start, end); ranges that it overlaps or touches become one with it."""
        if start >= end:
            return
        first = bisect.bisect_left(self.ranges, start, key=lambda part: part[1])
        last = bisect.bisect_right(self.ranges, end, key=lambda part: part[0])
        if touching := self.ranges[first:last]:
            start, end = min(start, touching[0][0]), max(end, touching[-1][1])
        self.ranges[first:last] = [(start, end)]

    def missing(self, start: int, end: int) -> list[Range]:
        """Return the parts of [start, end) that are not in the set."""
        out = []
        first = bisect.bisect_right(self.ranges, start, key=lambda part: part[1])
        last = bisect.bisect_left(self.ranges, end, key=lambda part: part[0])
        for lo, hi in self.ranges[first:last]:
            if start < lo:
                out.append((start, lo))
            start = max(start, hi)
        if start < end:
            out.append((start, end))
        return out
