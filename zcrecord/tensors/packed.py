"""Tensors without a numpy array: elements narrower than a byte, and strings. Views of bytes; `unpack` copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from math import gcd, prod
from typing import Any, NoReturn

import numpy as np

from zcrecord import dtypes
from zcrecord.dtypes import Array, DType, Octets
from zcrecord.errors import FormatError, UnsupportedError


def pack_bits(elements: Octets, bits: int) -> Octets:
    """Return elements of 1 to 7 bits, one to a byte, as a stream of bits, least significant first, then zeros."""
    count, size, word = _word_layout(bits)
    padded = np.zeros((-(-len(elements) // count), count), word)
    padded.reshape(-1)[: len(elements)] = elements
    words = np.zeros(len(padded), word)
    for i in range(count):
        words |= padded[:, i] << word.type(i * bits)
    octets = words.view(np.uint8).reshape(-1, word.itemsize)[:, :size].reshape(-1)
    return octets[: dtypes.nbytes(len(elements), bits)]


def unpack_bits(octets: Octets, bits: int, count: int) -> Octets:
    """Return the first `count` elements of a stream made by `pack_bits`, one to a byte."""
    word_count, size, word = _word_layout(bits)
    words: Array = octets
    if size > 1:
        padded = np.zeros((-(-len(octets) // size), word.itemsize), np.uint8)
        whole = len(octets) // size
        padded[:whole, :size] = octets[: whole * size].reshape(whole, size)
        padded[whole:, : len(octets) - whole * size] = octets[whole * size :]
        words = padded.view(word).reshape(-1)
    elements = np.empty(len(words) * word_count, np.uint8)
    for i in range(word_count):
        elements[i::word_count] = (words >> word.type(i * bits)) & word.type((1 << bits) - 1)
    return elements[:count]


def _word_layout(bits: int) -> tuple[int, int, np.dtype[Any]]:
    """Return the least number of elements that fill whole bytes, the number of those bytes, and a word for them."""
    count = 8 // gcd(bits, 8)
    size = count * bits // 8
    return count, size, np.dtype(f"<u{1 if size == 1 else 4 if size <= 4 else 8}")


class PackedTensor:
    """A tensor of elements narrower than a byte as a view of its packed bytes; unpacked only by :meth:`unpack`.

    Element i is bits [i * bits, (i + 1) * bits) of the bytes read as one least-significant-bit-first stream, as ONNX
    packs its 2- and 4-bit types.

    Example:
        >>> import ml_dtypes  # numpy knows "int4" from it
        >>> t = PackedTensor.pack(np.array([[1, -2], [3, -4]]).astype("int4"))
        >>> t.nbytes, t.packed.tolist(), t.unpack().astype(int).tolist()
        (2, [225, 195], [[1, -2], [3, -4]])
    """

    __slots__ = ("kind", "packed", "shape")

    def __init__(self, packed: Octets, kind: DType | str, shape: tuple[int, ...]) -> None:
        """Wrap `packed`, a one-dimensional uint8 array of exactly ceil(prod(shape) * bits / 8) bytes; copies nothing.

        Raises:
            UnsupportedError: `kind` is not a type narrower than a byte. FormatError: too few or too many bytes.
        """
        self.kind = dtypes.by_name[kind] if isinstance(kind, str) else kind
        if not self.kind.packed:
            raise UnsupportedError(f"{self.kind.name} is not packed; use a numpy array")
        self.shape = tuple(shape)
        need = dtypes.nbytes(prod(self.shape), self.kind.bits)
        if packed.dtype != np.uint8 or packed.ndim != 1 or len(packed) != need:
            raise FormatError(f"shape {self.shape} of {self.kind.name} takes {need} packed bytes, got {packed.shape}")
        self.packed = packed

    @classmethod
    def pack(cls, array: Array) -> PackedTensor:
        """Return an array of ml_dtypes, which has one element to a byte, packed into new bytes."""
        kind = dtypes.from_numpy(array.dtype)
        if not kind.packed:
            raise UnsupportedError(f"{kind.name} is not narrower than a byte; use the array as it is")
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & np.uint8((1 << kind.bits) - 1)
        return cls(pack_bits(raw, kind.bits), kind, array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype that :meth:`unpack` gives, one element to a byte."""
        if self.kind.numpy is None:
            fault = f"neither numpy nor this ml_dtypes has {self.kind.name}; upgrade ml_dtypes, or use .packed"
            raise UnsupportedError(fault)
        return self.kind.numpy

    @property
    def nbytes(self) -> int:
        """Octets of the packed form."""
        return len(self.packed)

    def unpack(self) -> Array:
        """Return a new array with one element to a byte; UnsupportedError if ml_dtypes does not have the type."""
        dtype, bits = self.dtype, self.kind.bits
        raw = unpack_bits(self.packed, bits, prod(self.shape))
        if self.kind.name.startswith("int"):  # ml_dtypes keeps signed elements sign-extended to a byte
            sign = np.uint8(1 << (bits - 1))
            raw = (raw ^ sign) - sign
        return raw.view(dtype).reshape(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of rank 0 has no length")
        return self.shape[0]

    def __getitem__(self, rows: int | slice) -> PackedTensor:
        """Return rows of the first axis: a view if they start on a byte, otherwise repacked into new bytes."""
        start, stop, shape = _rows(self.shape, rows)
        row_bits = prod(self.shape[1:]) * self.kind.bits
        first, end = start * row_bits, stop * row_bits
        octets = self.packed[first // 8 : (end + 7) // 8]
        if first % 8 == 0 and (end % 8 == 0 or stop == self.shape[0]):  # the bits after the last row are zeros
            return PackedTensor(octets, self.kind, shape)
        bits = np.unpackbits(octets, bitorder="little")[first % 8 : first % 8 + end - first]
        return PackedTensor(np.packbits(bits, bitorder="little"), self.kind, shape)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"a packed {self.kind.name} tensor is no array; .unpack() copies it into one")

    def __repr__(self) -> str:
        return f"PackedTensor({self.kind.name}, shape={self.shape}, nbytes={self.nbytes})"


class StringTensor:
    """A tensor of byte strings as a view of one buffer: the bytes, zeros to a multiple of 8, then n + 1 u64 ends.

    Example:
        >>> t = StringTensor.from_strings(["a", "bc"])
        >>> t[1], t.shape, t.unpack().tolist()
        (b'bc', (2,), ['a', 'bc'])
    """

    __slots__ = ("_ends", "data", "shape")

    def __init__(self, data: Octets, shape: tuple[int, ...], *, checked: bool = False) -> None:
        """Wrap `data`; copies nothing, and raises FormatError for wrong ends or padding, unless it was `checked`."""
        self.data, self.shape = data, tuple(shape)
        count = prod(self.shape)
        self._ends = np.zeros(1, np.uint64)
        if not count:
            return
        text_nbytes = len(data) - 8 * (count + 1)  # with padding, before the table of ends
        if len(data) % 8 or text_nbytes < 0:
            raise FormatError(f"{count} strings cannot lie in {len(data)} bytes")
        self._ends = data[text_nbytes:].view("<u8")
        if checked:
            return
        end = int(self._ends[-1])
        if self._ends[0] or (self._ends[1:] < self._ends[:-1]).any() or not 0 <= text_nbytes - end < 8:
            raise FormatError("the ends of its strings do not ascend from 0 to the end of their bytes")
        if data[end:text_nbytes].any():
            raise FormatError("the padding after its strings is not zero")

    @classmethod
    def from_strings(cls, strings: Iterable[str | bytes], shape: tuple[int, ...] | None = None) -> StringTensor:
        """Return strings as a tensor over one new buffer; `str` is encoded as UTF-8. FormatError for another shape."""
        raw = [s.encode() if isinstance(s, str) else bytes(s) for s in strings]
        shape = (len(raw),) if shape is None else shape
        if prod(shape) != len(raw):
            raise FormatError(f"shape {shape} does not hold {len(raw)} strings")
        if not raw:
            return cls(np.zeros(0, np.uint8), shape)
        text = b"".join(raw)
        ends = np.zeros(len(raw) + 1, "<u8")
        np.cumsum([len(r) for r in raw], out=ends[1:])
        return cls(np.frombuffer(text + bytes(-len(text) % 8) + ends.tobytes(), np.uint8), shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype that :meth:`unpack` gives: object."""
        return np.dtype(object)

    @property
    def nbytes(self) -> int:
        """Octets of strings, padding and ends together."""
        return len(self.data)

    def strings(self) -> Iterator[bytes]:
        """Yield every string in C order; copies one at a time."""
        ends = self._ends.tolist()
        return (self.data[a:b].tobytes() for a, b in itertools.pairwise(ends))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of rank 0 has no length")
        return self.shape[0]

    def __getitem__(self, rows: int | slice) -> Any:
        """Return rows of the first axis: one string of a vector as bytes, otherwise a StringTensor of new bytes."""
        start, stop, shape = _rows(self.shape, rows)
        row_size = prod(self.shape[1:])
        ends = self._ends[start * row_size : stop * row_size + 1].tolist()
        parts = [self.data[a:b].tobytes() for a, b in itertools.pairwise(ends)]
        return StringTensor.from_strings(parts, shape) if shape or not parts else parts[0]

    def unpack(self, encoding: str | None = "utf-8") -> Array:
        """Return a new object array of `str`, or of `bytes` with `encoding=None`.

        Raises:
            UnsupportedError: a string is not valid in that encoding. LookupError: there is no such encoding.
        """
        out = np.empty(prod(self.shape), object)
        try:
            for i, string in enumerate(self.strings()):
                out[i] = string if encoding is None else string.decode(encoding)
        except UnicodeError as error:
            fault = f"string {i} of {len(out)} is not {encoding}: {getattr(error, 'reason', error)}"
            raise UnsupportedError(f"{fault}; unpack(encoding=None) gives bytes") from error
        return out.reshape(self.shape)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError("a string tensor is no array; .unpack() copies it into one of objects")

    def __repr__(self) -> str:
        return f"StringTensor(shape={self.shape}, nbytes={self.nbytes})"


def _rows(shape: tuple[int, ...], rows: int | slice) -> tuple[int, int, tuple[int, ...]]:
    """Return the bounds [start, stop) of an index or slice of the first axis, and the shape of the result."""
    if not shape:
        raise IndexError("a tensor of rank 0 has no rows")
    if not isinstance(rows, slice):
        start = range(shape[0])[rows]
        return start, start + 1, shape[1:]
    start, stop, step = rows.indices(shape[0])
    if step != 1:
        raise UnsupportedError("rows are taken with step 1; unpack() it for others")
    stop = max(start, stop)
    return start, stop, (stop - start, *shape[1:])
