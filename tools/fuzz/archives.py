"""Changes of archives that get past the checksums: index, payloads and ends are changed, then the CRCs made right.

Knows where an archive has what, by means of its own (`forge`, numbers at offsets), and nothing of what is allowed.
The same is done in C by tests/programs/c/fuzz.c; here vectors may grow and shrink, too.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import xxhash
from forge import STRUCTS, VECTORS, Forge

Raw = Callable[[bytes], bytes]  # a change that knows nothing of archives; the size may be another one
END = 64
ITEMS = {number: dtype.itemsize for number, dtype in VECTORS.values()}
PAYLOADS = VECTORS["payloads"][0]
FIELDS = (16, 24, 24, 32, 32, 40, 40, 48)  # of header and trailer, 8 bytes each


class Parts(NamedTuple):
    """Place of an archive in an input, and of its parts."""

    start: int
    end: int
    columns: tuple[int, int]
    payloads: tuple[int, int]
    sealed: bool


def _number(data: bytes | bytearray, at: int, width: int = 4) -> int:
    return int.from_bytes(data[at : at + width], "little")


def _put(data: bytearray, at: int, value: int, width: int) -> None:
    data[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def take_apart(data: bytes | bytearray) -> Parts | None:
    """Find the parts of an input; None if they cannot be told."""
    if len(data) < 2 * END:
        return None
    size = _number(data, 48, 8)
    last = (size if 2 * END <= size <= len(data) else len(data)) - END
    size = _number(data, last + 48, 8)
    start = last + END - size
    index, nbytes, payloads = (_number(data, last + at, 8) for at in (24, 32, 40))
    inside = size - END
    if size < 2 * END or start < 0 or nbytes < 16 or index + nbytes > inside or payloads > inside:
        return None
    end = index if index > payloads else inside
    where = (start + index, start + index + nbytes), (start + payloads, start + end)
    return Parts(start, last + END, *where, _number(data, start + 48, 8) != 0)


def vectors(data: bytes | bytearray, parts: Parts) -> dict[int, tuple[int, int]]:
    """Return start and length of each vector, as far as its items lie in the index."""
    lo, hi = parts.columns
    found: dict[int, tuple[int, int]] = {}
    table = lo + _number(data, lo)
    vtable = table - _number(data, table)
    if not lo <= vtable <= hi - 4:
        return found
    for number, item in ITEMS.items():
        place = _number(data, vtable + 4 + 2 * number, 2) if 4 + 2 * number < _number(data, vtable, 2) else 0
        at = table + place + _number(data, table + place)
        if place and lo <= at <= hi - 4:
            found[number] = (at + 4, min(_number(data, at), (hi - at - 4) // item))
    return found


def repair(data: bytearray, parts: Parts, digests: bool) -> None:
    """Make the CRCs right, and the payloads' digests if asked for."""
    first, last = parts.start, parts.end - END
    lo, hi = parts.payloads
    if digests:
        at, count = vectors(data, parts).get(PAYLOADS, (0, 0))
        for row in range(at, at + 24 * count, 24):
            start, nbytes = _number(data, row, 8), _number(data, row + 8, 8)
            if start + nbytes <= hi - lo:
                _put(data, row + 16, xxhash.xxh3_64_intdigest(data[lo + start : lo + start + nbytes]), 8)
    _put(data, last + 56, zlib.crc32(data[slice(*parts.columns)]), 4)
    if parts.sealed:
        data[first + 56 : first + 60] = data[last + 56 : last + 60]
    for end in (last, first):
        _put(data, end + 60, zlib.crc32(data[end : end + 60]), 4)


def telling(rng: random.Random, old: int, size: int) -> int:
    """Return a number that rules are about: small, near a power of two, near the old one, or near the input's size."""
    return (
        rng.randrange(8),
        (1 << rng.randrange(64)) - rng.randrange(3),
        old + 1,
        old - 1,
        -rng.randrange(4),
        rng.randrange(size) & -8,
        old ^ 1 << rng.randrange(64),
        rng.randrange(256),
    )[rng.randrange(8)]


def _change_number(data: bytearray, parts: Parts, rng: random.Random) -> None:
    """Change one number of a vector that is picked first, so that short ones have their share."""
    found = vectors(data, parts)
    number = rng.choice([*found, 0])
    start, count = found.get(number, (parts.columns[0], (parts.columns[1] - parts.columns[0]) // 4))
    item = ITEMS.get(number, 4)
    if not count:
        return
    width = min(item, rng.choice((1, 2, 4, 4, 8)))
    inner = rng.randrange(item) // width * width
    at = start + rng.randrange(count) * item + inner
    other = start + rng.randrange(count) * item + inner
    value = _number(data, other, width) if rng.randrange(4) == 0 else telling(rng, _number(data, at, width), len(data))
    _put(data, at, value, width)


def _move_rows(data: bytearray, parts: Parts, rng: random.Random) -> None:
    found = [(number, *where) for number, where in vectors(data, parts).items() if where[1] > 1]
    if found:
        number, start, count = rng.choice(found)
        size = ITEMS[number]
        a, b = (start + rng.randrange(count) * size for _ in "ab")
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def _change_count(data: bytearray, parts: Parts, rng: random.Random) -> None:
    found = vectors(data, parts)
    if found:
        start, count = rng.choice(list(found.values()))
        _put(data, start - 4, rng.choice((count + 1, count - 1, telling(rng, count, len(data)))), 4)


def _change_ends(data: bytearray, parts: Parts, rng: random.Random) -> None:
    first, last = parts.start, parts.end - END
    at, width, value = 8 + rng.randrange(8), 1, rng.randrange(20)
    if rng.randrange(3):
        at, width = rng.choice(FIELDS), 8
        old = _number(data, last + at, 8)
        value = old + 8 * rng.randrange(-4, 5) if rng.randrange(4) else telling(rng, old, len(data))
    _put(data, last + at, value, width)
    if parts.sealed and rng.randrange(8):
        data[first + at : first + at + width] = data[last + at : last + at + width]


def _change_payload(data: bytearray, parts: Parts, rng: random.Random) -> None:
    lo, hi = parts.payloads
    if lo < hi:
        at = rng.randrange(lo, hi)
        width = rng.choice((1, 1, 8))
        at -= (at - lo) % width
        _put(data, at, telling(rng, _number(data, at, width), len(data)), width)


_IN_PLACE: tuple[Callable[[bytearray, Parts, random.Random], None], ...] = (
    *[_change_number] * 9, _move_rows, _move_rows, _change_count, _change_ends, _change_payload, _change_payload,
)  # fmt: skip


def _reshaped(data: bytes, parts: Parts, rng: random.Random, raw: Raw) -> bytes:
    """Return an archive with a vector of another length, with other names or another payload region."""
    forged = Forge(data[parts.start : parts.end])
    if not 4 <= forged.alignment_log2 <= forged.base_log2 <= 10:
        return raw(data)  # its padding would be all there is
    for _ in range(rng.randrange(1, 3)):
        name = rng.choice(list(forged.columns))
        column: Any = forged.columns[name]
        count = len(column)
        match rng.randrange(7):
            case 0:
                rows = column[[rng.randrange(count) for _ in range(rng.randrange(1, 4))]] if count else column
                forged.columns[name] = np.insert(column, rng.randrange(count + 1), rows)
            case 1 if count:
                forged.columns[name] = np.delete(column, rng.randrange(count))
            case 2:
                forged.columns[name] = column[: rng.randrange(count + 1)]
            case 3:
                forged.payload = bytearray(raw(bytes(forged.payload)))
                forged.payload += bytes(-len(forged.payload) % (1 << forged.alignment_log2))
            case 4 if column.dtype in (STRUCTS["Tensor"], STRUCTS["Module"], STRUCTS["Attribute"]) and count:
                row = rng.randrange(count)
                forged.rename(name, row, raw(forged.name(column[row]).encode())[:300])
            case 5:
                text = raw(forged.columns["text"].tobytes())
                forged.columns["text"] = np.frombuffer(text, np.uint8).copy()
            case _:
                forged.front = bool(rng.randrange(2))
                forged.sealed = bool(rng.randrange(2))
    return (forged.digest() if rng.randrange(2) else forged).seal()


def mutated(data: bytes, rng: random.Random, raw: Raw) -> bytes:
    """Return another archive, or what looks like one; the same for the same state of `rng`."""
    kind = rng.randrange(64)
    parts = take_apart(data)
    if kind < 2 or parts is None:
        return raw(data)
    if kind == 2:
        return bytes(rng.randrange(1, 65)) + data if rng.randrange(2) else data + bytes(rng.randrange(1, 65))
    if kind < 9:
        try:
            return _reshaped(data, parts, rng, raw)
        except (LookupError, ValueError, OverflowError):  # what was there before was no longer taken apart
            return raw(data)
    out = bytearray(data)
    for _ in range(1 + rng.randrange(2) * rng.randrange(4)):
        if kind == 9:
            lo, hi = rng.choice((parts.columns, parts.payloads))
            out[lo:hi] = raw(bytes(out[lo:hi])).ljust(hi - lo, b"\0")[: hi - lo]
        else:
            rng.choice(_IN_PLACE)(out, parts, rng)
    repair(out, parts, rng.randrange(4) > 0)
    return bytes(out)
