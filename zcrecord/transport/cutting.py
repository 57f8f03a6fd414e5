"""Where an archive is cut into the frames of its packed form (R82). Pure arithmetic, no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zcrecord.codec.layout import HEADER_SIZE, Header

__all__ = ["FRAME", "cuts"]

FRAME = 4 << 20  # bytes of a frame of what is larger; its last may have half as much again
_GATHERED = 1 << 20  # bytes up to which neighbouring payloads share a frame


def cuts(h: Header, offsets: Any | None) -> list[int]:
    """Return where frames begin, and the archive's end (R82): header and index, payloads, index and trailer apart."""
    end = h.archive_size - HEADER_SIZE if h.front else h.index_offset
    if offsets is None:
        first, middle = h.payload_offset, iter(range(h.payload_offset, end, FRAME))
    else:
        marks = np.append(np.unique(offsets.astype(np.int64) + h.payload_offset), end)
        first, middle = int(marks[0]), _gathered(marks)
    return [*_split(0, first), *middle, *_split(end, h.archive_size), h.archive_size]


def _split(start: int, end: int) -> range:
    """Return where frames of one thing begin; the last may have half as much again."""
    return range(start, max(end - FRAME // 2, start + 1), FRAME)


def _gathered(marks: Any) -> Iterator[int]:
    """Yield where frames of payloads begin that begin at these marks, the last of which is their end."""
    i, last = 0, len(marks) - 1
    while i < last:
        start, following = marks[i : i + 2].tolist()
        if following - start >= _GATHERED:
            yield from _split(start, following)
            i += 1
        else:
            yield start
            i = int(np.searchsorted(marks, start + _GATHERED, "right")) - 1
