"""Archives with one byte changed, and sealed again: in every region, with every interesting value."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
from exhaustive import some


def regions(data: bytes) -> tuple[range, range, range]:
    words = np.frombuffer(data[-64:], "<u8")
    start = int(words[3])
    return range(64), range(start, start + int(words[4])), range(len(data) - 64, len(data))


def variants(data: bytes, places: range, values: str = "^1 ^80 =0 =ff") -> Iterator[bytes]:
    """Yield the archive with one byte changed, for every place and value."""
    for at in some(places, 50):
        old = data[at]
        known = {"^1": old ^ 1, "^80": old ^ 0x80, "=0": 0, "=ff": 255, "+1": (old + 1) & 255}
        for new in {known[value] for value in values.split()} - {old}:
            yield data[:at] + bytes([new]) + data[at + 1 :]


def resealed(data: bytes) -> bytes:
    """Return the archive with the CRC of the index, and those of both ends, made right again."""
    _, index, _ = regions(data)
    crc = np.uint32(zlib.crc32(data[index.start : index.stop])).tobytes()
    end = with_crc(data[-64:-8] + crc)
    start = end if data[16:60] != bytes(44) else with_crc(data[:60])
    return start + data[64:-64] + end


def with_crc(end: bytes) -> bytes:
    return end + np.uint32(zlib.crc32(end)).tobytes()
