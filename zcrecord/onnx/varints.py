"""Varints to integers and to the element types ONNX squeezes into them, many at a time.

Knows how protobuf writes integers and which ranges the narrow types have; where the bytes come from is left to
`values`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["SLACK", "STORED", "Decoder", "narrow", "pack6"]

Array = npt.NDArray[Any]
SLACK = 10  # readable bytes wanted behind the last varint

# What squeezes the 7-bit groups of a word together, two neighbours at a time: bits that move, by how many, and how long
# a varint is that has any. To move bits down by n is to take 2^n - 1 times where they come to lie off the word.
_STEPS = [(0x7F007F007F007F00, 1, 1), (0x3FFF00003FFF0000, 2, 2), (0x0FFFFFFF00000000, 4, 4)]


class Stored(NamedTuple):
    """How elements of one ONNX type lie in a varint field: as which numpy type, in which range."""

    numpy: str
    low: int
    high: int


# ONNX data_type -> its form in int32_data; one entry per element, or per byte of packed elements of 2 and 4 bits.
STORED: dict[int, Stored] = {
    6: Stored("<i4", -(2**31), 2**31 - 1),
    3: Stored("i1", -128, 127),
    5: Stored("<i2", -32768, 32767),
    9: Stored("?", -(2**31), 2**31 - 1),
    **{code: Stored("u1", 0, 255) for code in (2, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26)},
    **{code: Stored("<u2", 0, 65535) for code in (4, 10, 16)},
    **{code: Stored("u1", 0, 63) for code in (27, 28)},  # elements of 6 bits, to be packed
}


# What of a word belongs to a varint, by bytes after its first.
_MASKS = np.array([int.from_bytes(b"\x7f" * min(n + 1, 8), "little") for n in range(10)], np.uint64)
_ONE, _SEVEN, _63 = np.uint64(1), np.uint64(7), np.uint64(63)


class Decoder:
    """Varints to integers. Works in memory that it keeps: what is fresh costs more than the arithmetic does."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def _room(self, name: str, count: int, kind: Any) -> Array:
        kept = self._kept.get(name)
        if kept is None or len(kept) < count:
            self._kept[name] = kept = np.empty(count + (count >> 2), kind)
        return kept[:count]

    def decode(self, data: Array, nbytes: int) -> Array:
        """Return the varints that fill the first `nbytes` bytes of `data` as unsigned integers, some maybe views of it.

        At least SLACK bytes must follow them, and the last must be whole. A varint of more than 10 bytes gives
        ValueError with its position.
        """
        last = np.less(data[:nbytes], 128, out=self._room("last", nbytes, np.bool_))
        if last.all():
            return data[:nbytes]
        return self._decoded(data, *self._bounds(np.flatnonzero(last)))

    def pairs(self, data: Array, nbytes: int, tag: int) -> tuple[Array, int]:
        """Return the values of the (tag, varint) pairs at the start of `data`, and how many bytes they take.

        Stops at the first thing that is no whole pair with this one-byte tag, which may be at once.
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
        words = self._words(data, starts)
        other = self._room("other", len(words), np.uint64)
        words &= np.take(_MASKS, longer, out=other, mode="clip")
        for moves, shift, since in _STEPS:
            if longest >= since:
                np.bitwise_and(words, np.uint64(moves), out=other)
                other >>= np.uint64(shift)
                if shift > 1:
                    other *= np.uint64((1 << shift) - 1)
                words -= other
        if longest > 7:
            which = np.flatnonzero(longer > 7)
            at = starts.take(which) + 8
            high = (data.take(at) & 127).astype(np.uint64) << np.uint64(56)
            high |= np.where(longer.take(which) > 8, data.take(at + 1), 0).astype(np.uint64) << _63
            words[which] |= high
        return words

    def _words(self, data: Array, starts: Array) -> Array:
        """Return the 8 bytes at each place as a number, the first byte lowest: of two aligned words, what belongs."""
        count = len(starts)
        copy = self._room("copy", (len(data) >> 3) + 2, np.uint64)
        copy.view(np.uint8)[: len(data)] = data
        index, shift = self._room("index", count, np.int64), self._room("shift", count, np.uint64)
        np.right_shift(starts, 3, out=index)
        np.bitwise_and(starts.view(np.uint64), _SEVEN, out=shift)
        shift <<= np.uint64(3)
        words = np.empty(count, np.uint64)
        np.take(copy, index, out=words, mode="clip")
        words >>= shift
        index += 1
        other = np.take(copy, index, out=self._room("other", count, np.uint64), mode="clip")
        np.subtract(_63, shift, out=shift)
        other <<= _ONE  # in two steps, since a shift by 64 is none
        other <<= shift
        words |= other
        return words


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


def pack6(elements: Array) -> Array:
    """Return 6-bit elements, one to a byte, packed four to three bytes, least significant bits first.

    A last group that is not full takes as many bytes as it needs, its other bits zero.
    """
    padded = np.zeros((-(-len(elements) // 4), 4), np.uint32)
    padded.reshape(-1)[: len(elements)] = elements
    words = padded[:, 0] | padded[:, 1] << 6 | padded[:, 2] << 12 | padded[:, 3] << 18
    packed: Array = words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)[: -(-len(elements) * 6 // 8)]
    return packed
