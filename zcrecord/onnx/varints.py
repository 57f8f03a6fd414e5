"""Varints to integers and to the element types ONNX squeezes into them, many at a time.

Knows how protobuf writes integers and which ranges the narrow types have; where the bytes come from is left to
`values`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["SLACK", "STORED", "Piece", "decode", "decode_piece", "narrow", "pack6", "pairs"]

Array = npt.NDArray[Any]
SLACK = 10  # readable bytes wanted behind the last varint

# What squeezes the 7-bit groups of a word together: bits that stay, bits that move, by how many.
_STEPS: dict[int, list[tuple[int, int, int]]] = {
    2: [(0x7F, 0x7F00, 1)],
    4: [(0x7F007F, 0x7F007F00, 1), (0x3FFF, 0x3FFF0000, 2)],
    8: [
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x0FFFFFFF, 0x0FFFFFFF00000000, 4),
    ],
}


class Stored(NamedTuple):
    """How elements of one ONNX type lie in a varint field: as which numpy type, in which range."""

    numpy: str
    low: int
    high: int


class Piece(NamedTuple):
    """Whole varints and SLACK bytes behind them, and the offset at which they begin in their stream."""

    data: Array
    nbytes: int
    offset: int


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


# What of a word belongs to a varint, by bytes after its first; of a longer one all.
_MASKS = {
    size: np.array([int.from_bytes(b"\x7f" * min(n + 1, size), "little") for n in range(10)], f"u{size}")
    for size in (2, 4, 8)
}
_TAIL_MASKS = np.array([0] * 8 + [0xFF, 0xFFFF], np.uint16)  # of bytes 9 and 10, by bytes after the first


def _words(data: Array, size: int, starts: Array) -> Array:
    """Return the little-endian words of `size` bytes that start at these positions, aligned or not."""
    every = np.ndarray((len(data) - size + 1,), f"<u{size}", data, strides=(1,))
    words: Array = every.take(starts)
    return words


def decode(data: Array, nbytes: int) -> Array:
    """Return the varints that fill the first `nbytes` bytes of `data` as unsigned integers of some width.

    At least SLACK bytes must follow them, and the last must be whole. A varint of more than 10 bytes gives ValueError
    with its position.
    """
    last = data[:nbytes] < 128
    if last.all():
        return data[:nbytes]
    ends = np.flatnonzero(last)
    starts = np.empty_like(ends)
    starts[0] = 0
    np.add(ends[:-1], 1, out=starts[1:])
    return _decode(data, starts, ends)


def decode_piece(piece: Piece) -> Array:
    """Return the varints of a piece; one of more than 10 bytes gives ValueError with its offset in the stream."""
    try:
        return decode(piece.data, piece.nbytes)
    except ValueError as error:
        raise ValueError(piece.offset + int(error.args[0])) from None


def _decode(data: Array, starts: Array, ends: Array) -> Array:
    longer = ends - starts  # bytes after the first
    longest = int(longer.max()) + 1
    if longest > 10:
        raise ValueError(int(starts[longer.argmax()]))
    size = 2 if longest <= 2 else 4 if longest <= 4 else 8
    kind = np.dtype(f"u{size}").type
    words = _words(data, size, starts)
    words &= _MASKS[size].take(longer)
    moved = np.empty_like(words)
    for stays, moves, shift in _STEPS[size]:
        np.bitwise_and(words, kind(moves), out=moved)
        moved >>= kind(shift)
        words &= kind(stays)
        words |= moved
    if longest > 8:
        _add_tails(words, data, starts, longer)
    return words


def _add_tails(words: Array, data: Array, starts: Array, longer: Array) -> None:
    """Put in what the ninth and tenth byte hold."""
    which = np.flatnonzero(longer > 7)
    tails = _words(data, 2, starts.take(which) + 8) & _TAIL_MASKS.take(longer.take(which))
    high = tails.astype(np.uint64)
    words[which] |= (high & np.uint64(127)) << np.uint64(56) | (high >> np.uint64(8)) << np.uint64(63)


def pairs(data: Array, nbytes: int, tag: int) -> tuple[Array, int]:
    """Return the values of the (tag, varint) pairs at the start of `data`, and how many bytes they take.

    Stops at the first thing that is no whole pair with this one-byte tag, which may be at once.
    """
    ends = np.flatnonzero(data[:nbytes] < 128)
    ends = ends[: len(ends) & -2]
    starts = np.empty_like(ends)
    if len(ends):
        starts[0] = 0
        np.add(ends[:-1], 1, out=starts[1:])
    good = (data.take(ends[0::2]) == tag) & (starts[0::2] == ends[0::2]) & (ends[1::2] - starts[1::2] < 10)
    count = len(good) if good.all() else int(good.argmin())
    if not count:
        return np.zeros(0, np.uint64), 0
    return _decode(data, starts[1 : 2 * count : 2], ends[1 : 2 * count : 2]), int(ends[2 * count - 1]) + 1


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
