"""Varints to integers and to the element types ONNX squeezes into them, many at a time.

Knows how protobuf writes integers and which ranges the narrow types have; where the bytes come from is left to
`values`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zcrecord import dtypes
from zcrecord.dtypes import DType

__all__ = ["SLACK", "STORED", "Decoder", "narrow"]

Array = npt.NDArray[Any]
_LARGEST = 3 << 19  # bytes; more than most arrays that a piece of varints takes
SLACK = 10  # readable bytes wanted behind the last varint

# What squeezes the 7-bit groups of a word together, two neighbours at a time: bits that move, by how many, and how long
# a varint is that has any. To move bits down by n is to take 2^n - 1 times where they come to lie off the word.
_STEPS = [(0x7F007F007F007F00, 1, 1), (0x3FFF00003FFF0000, 2, 2), (0x0FFFFFFF00000000, 4, 4)]


class Stored(NamedTuple):
    """How elements of one ONNX type lie in a varint field: as which numpy type, in which range."""

    numpy: str
    low: int
    high: int


def _stored(kind: DType) -> Stored:
    """Return how elements lie in int32_data: one to an entry, but packed ones that fill bytes by the byte."""
    bits, whole = kind.bits, 8 % kind.bits == 0
    if kind.name == "bool":
        return Stored("?", -(2**31), 2**31 - 1)
    if kind.name.startswith("int") and not kind.packed:
        return Stored(f"<i{bits // 8}", -(1 << bits - 1), (1 << bits - 1) - 1)
    return Stored(f"<u{-(-bits // 8)}", 0, 255 if kind.packed and whole else (1 << bits) - 1)


# ONNX data_type -> its form in int32_data, for the types that have no other field.
STORED: dict[int, Stored] = {
    code: _stored(kind)
    for code, kind in dtypes.by_onnx.items()
    if 0 < kind.bits <= 32 and kind.c not in ("uint32_t", "float")
}


# What of a word belongs to a varint, by bytes after its first.
_MASKS = {
    size: np.array([int.from_bytes(b"\x7f" * min(n + 1, size), "little") for n in range(10)], f"u{size}")
    for size in (2, 4, 8)
}
_TAIL_MASKS = np.array([0x7F, 0x17F], np.uint64)  # of a ninth byte, of a ninth and the one bit of a tenth


class Decoder:
    """Varints to integers. Works in memory that it keeps: what is fresh costs more than the arithmetic does."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}
        # The C library of Linux maps what is larger than the largest block it has seen freed, and unmaps it again: a
        # page fault for every 4 KiB each time. It learns from one block, of which nothing is touched.
        np.empty(_LARGEST, np.uint8)

    def _room(self, name: str, count: int, kind: Any) -> Array:
        kept = self._kept.get(name)
        if kept is None or len(kept) < count:
            self._kept[name] = kept = np.empty(count + (count >> 2), kind)
        return kept[:count]

    def decode(self, data: Array, nbytes: int) -> Array:
        """Return the varints that fill the first `nbytes` bytes of `data`, unsigned, valid until the next call.

        At least SLACK bytes must follow them, and the last must be whole. A varint of more than 10 bytes gives
        ValueError with its position.
        """
        last = np.less(data[:nbytes], 128, out=self._room("last", nbytes, np.bool_))
        if last.all():
            return data[:nbytes]
        return self._decoded(data, *self._bounds(np.flatnonzero(last)))

    def pairs(self, data: Array, nbytes: int, tag: int) -> tuple[Array, int]:
        """Return the values of the (tag, varint) pairs at the start of `data`, and how many bytes they take.

        They are valid until the next call. Stops at the first thing that is no whole pair with this one-byte tag,
        which may be at once.
        """
        ends = np.flatnonzero(data[:nbytes] < 128)
        starts, ends = self._bounds(ends[: len(ends) & -2])
        good = (data.take(ends[0::2]) == tag) & (starts[0::2] == ends[0::2]) & (ends[1::2] - starts[1::2] < 10)
        count = len(good) if good.all() else int(good.argmin())
        if not count:
            return np.zeros(0, np.uint64), 0
        values = self._decoded(data, starts[1 : 2 * count : 2], ends[1 : 2 * count : 2])
        return values, int(ends[2 * count - 1]) + 1

    def _bounds(self, ends: Array) -> tuple[Array, Array]:
        """Return where varints start that lie side by side from 0 on, and where they end."""
        starts = self._room("starts", len(ends), np.int64)
        starts[:1] = 0
        np.add(ends[:-1], 1, out=starts[1:])
        return starts, ends

    def _decoded(self, data: Array, starts: Array, ends: Array) -> Array:
        longer = np.subtract(ends, starts, out=self._room("longer", len(ends), np.int64))  # bytes after the first
        longest = int(longer.max())
        if longest > 9:
            raise ValueError(int(starts[longer.argmax()]))
        size = 2 if longest < 2 else 4 if longest < 4 else 8
        kind = np.dtype(f"u{size}").type
        every = self._every(data, size)
        words = np.take(every, starts, out=self._room(f"words{size}", len(starts), kind), mode="clip")
        other = self._room(f"other{size}", len(words), kind)
        words &= np.take(_MASKS[size], longer, out=other, mode="clip")
        full = (1 << 8 * size) - 1
        for moves, shift, since in _STEPS:
            if longest >= since:
                np.bitwise_and(words, kind(moves & full), out=other)
                other >>= kind(shift)
                if shift > 1:
                    other *= kind((1 << shift) - 1)
                words -= other
        if longest > 7:
            _add_tails(words, every, starts, longer)
        return words

    def _every(self, data: Array, size: int) -> Array:
        """Return the `size` bytes from each byte on as numbers, in aligned memory, which is what numpy takes from."""
        count = len(data) - size + 1
        every = self._room(f"every{size}", count, f"u{size}")
        every[:] = np.ndarray((count,), f"<u{size}", data, strides=(1,))
        return every


def _add_tails(words: Array, every: Array, starts: Array, longer: Array) -> None:
    """Put in what the ninth and the tenth byte hold."""
    which = np.flatnonzero(longer > 7)
    tails = every.take(starts.take(which) + 8)
    tails &= _TAIL_MASKS.take(longer.take(which) - 8)
    top = tails >> np.uint64(8) << np.uint64(63)
    tails <<= np.uint64(56)
    words[which] |= tails | top


def narrow(values: Array, form: Stored) -> Array:
    """Return the values of int32_data as the type they stand for.

    They are first cut to 32 bits, as every protobuf parser does. One outside the type's range gives ValueError with
    its index and its value.
    """
    if values.dtype.itemsize > 4:
        values = values.astype(np.uint32)
    values = values.astype(np.int32) if values.dtype.itemsize < 4 else values.view(np.int32)
    if form.numpy == "?":
        values = values != 0
    if form.numpy != "<i4":
        wrong = (values < form.low) | (values > form.high)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(i, int(values[i]))
    stored: Array = values.astype(form.numpy)
    return stored
