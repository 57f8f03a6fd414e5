"""The index read: its columns as views of its bytes, and comparisons of many names at once. `verify` has the rules."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord._schema import ValueForm
from zcrecord.dtypes import Array as Array
from zcrecord.errors import FormatError

from .layout import NONE, u16_at

PAYLOAD = np.dtype([("offset", "<u8"), ("nbytes", "<u8"), ("digest", "<u8")])
TENSOR = np.dtype(
    [("name", "<u4"), ("name_size", "<u4"), ("key_size", "<u4"), ("parent", "<u4"), ("place", "<u4"),
     ("payload", "<u4"), ("byte_offset", "<u8"), ("dims", "<u4"), ("strides", "<u4"), ("dtype", "u1"), ("bits", "u1"),
     ("rank", "u1"), ("reserved0", "u1"), ("reserved1", "<u4")]
)  # fmt: skip
# Type, shape and strides of a tensor's row, as opaque bytes.
FORM = np.dtype({"names": ["form"], "formats": ["V16"], "offsets": [32], "itemsize": TENSOR.itemsize})
_ROW_FORM = struct.Struct("<IIBBB")  # the same, read: dims, strides, dtype, bits, rank
Layout = tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...] | None]  # of a view: shape, dtype, strides in bytes
MODULE = np.dtype(
    [("name", "<u4"), ("name_size", "<u4"), ("type_name", "<u4"), ("type_name_size", "<u4"), ("key_size", "<u4"),
     ("parent", "<u4"), ("end", "<u4"), ("place", "<u4"), ("first_tensor", "<u4"), ("first_attribute", "<u4"),
     ("kind", "u1"), ("reserved0", "u1"), ("reserved1", "<u2"), ("reserved2", "<u4")]
)  # fmt: skip
ATTRIBUTE = np.dtype(
    [("name", "<u4"), ("name_size", "<u4"), ("value", "<u8"), ("parent", "<u4"), ("place", "<u4"), ("type", "u1"),
     ("form", "u1"), ("reserved0", "<u2"), ("reserved1", "<u4")]
)  # fmt: skip

# Field of Record -> (id, dtype of an item, alignment of its data in the index). id 0 is the scalar digest_kind.
VECTORS: dict[str, tuple[int, Any, int]] = {
    "text": (1, np.dtype("u1"), 1),
    "dims": (2, np.dtype("<u8"), 8),
    "strides": (3, np.dtype("<i8"), 8),
    "words": (4, np.dtype("<u8"), 8),
    "payloads": (5, PAYLOAD, 8),
    "tensors": (6, TENSOR, 8),
    "by_name": (7, np.dtype("<u4"), 4),
    "by_module": (8, np.dtype("<u4"), 4),
    "modules": (9, MODULE, 4),
    "attributes": (10, ATTRIBUTE, 8),
    "metadata": (11, ATTRIBUTE, 8),
}
IDENTIFIER = b"ZCR1"

_WIDTH = 32  # bytes; most names, or the parts in which they differ, fit
_FEW = 64  # spans; below this a Python loop over bytes is as fast as numpy's fixed costs
_CHUNK = 2048  # spans compared together; their rows stay in the cache
_LONG = 256  # bytes; longer names are rare and hashed one by one
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, Knuth's multiplicative hash
_WORDS = _WIDTH // 8
_ROW = np.dtype(f"V{_WIDTH}")
_MASKS = (np.tri(_WIDTH + 1, _WIDTH, -1, np.uint8) * np.uint8(255)).view(_ROW).reshape(-1)  # row n keeps n bytes


class TensorEntry(NamedTuple):
    """One entry of `tensors` as plain integers; the fields are those of the struct."""

    name: int
    name_size: int
    key_size: int
    parent: int
    place: int
    payload: int
    byte_offset: int
    dims: int
    strides: int
    dtype: int
    bits: int
    rank: int
    reserved0: int
    reserved1: int


class Index(NamedTuple):
    """The columns of an index, as views of its bytes. `memory` starts with `text`, and goes on behind them."""

    memory: memoryview
    digest_kind: int
    text: memoryview
    dims: Array
    strides: Array
    words: Array
    payloads: Array
    tensors: Array
    by_name: Array
    by_module: Array | None
    modules: Array
    attributes: Array
    metadata: Array

    def string(self, start: int, size: int) -> str:
        """Return bytes [start, start + size) of the text pool as a str; FormatError if outside or not UTF-8."""
        if start + size >= len(self.text):
            raise FormatError(f"text [{start}, {start + size}) is past the end of the pool ({len(self.text)})")
        try:
            return str(self.text[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"text [{start}, {start + size}) is not UTF-8: {error.reason}") from None

    def text_of(self, row: Any, field: str = "name") -> str:
        """Return the text of an entry's `field` and `field`_size: its name, or its type_name."""
        return self.string(int(row[field]), int(row[field + "_size"]))

    def values(self, rows: Array, kind: int) -> Array:
        """Return all words of one ValueType in rows of attributes: scalars first, then the items of lists."""
        rows = rows[rows["type"] == kind]
        is_scalar = rows["form"] == ValueForm.SCALAR
        starts, counts = list_bounds(rows[~is_scalar])
        lists = [self.words[bounds] for bounds in map(slice, starts.tolist(), (starts + counts).tolist())]
        return np.concatenate([rows["value"][is_scalar], *lists])

    def tensor(self, i: int) -> TensorEntry:
        """Return the entry of tensor i."""
        return TensorEntry._make(self.tensors[i].item())

    def name(self, i: int) -> str:
        """Return the full name of tensor i."""
        return self.text_of(self.tensors[i])


def list_bounds(rows: Array) -> tuple[Array, Array]:
    """Return start and length, in the pool of words, of each of these attributes, which are lists."""
    return (rows["value"] & np.uint64(NONE)).astype(np.int64), (rows["value"] >> np.uint64(32)).astype(np.int64)


def decode(memory: memoryview, size: int) -> Index:
    """Return the index in the first `size` bytes of `memory`, as views that keep it alive; checks bounds alone."""
    buffer = memory[:size]
    words = buffer[: size & -4].cast("I")  # read at any address, and three times faster than by `struct`
    table, fields = _root_table(buffer, words)
    octets = np.frombuffer(buffer, np.uint8)  # unlike ndarray(buffer=...), it holds the buffer's export
    kind = buffer[table + fields[0]] if 0 in fields else 0
    columns: dict[str, Any] = {}
    for name, (number, dtype, _) in VECTORS.items():
        field = fields.get(number)
        start, count = (0, 0) if field is None else _vector_bounds(words, size, table + field, name)
        if name == "text":
            columns[name] = buffer[start : start + count]
            columns["memory"] = memory[start:]
        elif name == "by_module" and field is None:
            columns[name] = None
        else:
            columns[name] = np.ndarray(count, dtype, octets, start)
    return Index(digest_kind=kind, **columns)


def _root_table(buffer: memoryview, words: memoryview) -> tuple[int, dict[int, int]]:
    """Return the offset of the FlatBuffers root table, and each known field's offset in it, by the field's id."""
    size = len(buffer)
    if size < 12 or bytes(buffer[4:8]) != IDENTIFIER:
        raise FormatError("index: its identifier is not 'ZCR1'")
    table = words[0]
    if table % 4 or table + 4 > size:
        raise FormatError(f"index: the root table at {table:#x} is unaligned or past its end ({size:#x})")
    distance = words[table >> 2]
    vtable = table - (distance - (1 << 32) if distance >> 31 else distance)  # a signed number of 32 bits
    if vtable < 0 or vtable % 2 or vtable + 4 > size:
        raise FormatError(f"index: the vtable at {vtable:#x} is unaligned or outside the index")
    vtable_size, table_size = u16_at(buffer, vtable), u16_at(buffer, vtable + 2)
    if vtable_size < 4 or vtable_size % 2 or vtable + vtable_size > size or table_size < 4 or table + table_size > size:
        sizes = f"vtable ({vtable_size} bytes) or table ({table_size} bytes)"
        raise FormatError(f"index: {sizes} has an invalid size, or ends past the index")
    fields = {}
    known = buffer[vtable + 4 : vtable + min(vtable_size, 4 + 2 * (len(VECTORS) + 1))].cast("H").tolist()
    for number, offset in enumerate(known):
        if not offset:  # the field is missing
            continue
        width = 4 if number else 1  # a vector's distance; field 0, `digest_kind`, is one byte
        if offset < 4 or offset + width > table_size:
            raise FormatError(f"index: field {number} lies at {offset}, outside the table of {table_size} bytes")
        fields[number] = offset
    return table, fields


def _vector_bounds(words: memoryview, size: int, offset: int, name: str) -> tuple[int, int]:
    """Return start and item count of a vector, by the offset of its field in an index of `size` bytes."""
    _, dtype, alignment = VECTORS[name]
    start = offset + words[offset >> 2] if offset % 4 == 0 else -1
    if start < 0 or start % 4 or start + 4 > size:
        raise FormatError(f"index: vector '{name}' is unaligned or starts past the end ({size:#x})")
    count = words[start >> 2]
    start += 4
    end = start + count * dtype.itemsize
    if start % alignment or end > size:
        raise FormatError(f"index: vector '{name}' [{start:#x}, {end:#x}) is unaligned or past the end ({size:#x})")
    return start, count


class BadName(NamedTuple):
    """The position of the first span among several that cannot be a name, and the reason in words."""

    number: int
    reason: str


class TextPool:
    """The text pool, for comparisons of many spans at once, 32 bytes at a time.

    Each pass goes on with the undecided spans alone, and compares the last few as bytes: so it costs no more than the
    bytes it looks at. `memory` starts with the text, and is copied once unless it goes on for 32 bytes behind it.
    """

    def __init__(self, text: memoryview, memory: memoryview) -> None:
        self.text = text
        self._ascii = False
        self._memory = memory
        self._rows_at: Array | None = None
        self._nuls: Array | None = None

    @cached_property
    def octets(self) -> Array:
        """The pool as an array."""
        return np.frombuffer(self.text, np.uint8)

    def check_text(self) -> None:
        """Decode the whole pool once (R28); spans are UTF-8 then if they start and end between characters."""
        try:
            self._ascii = str(self.text, "utf-8").isascii()
        except UnicodeDecodeError as error:
            raise FormatError(f"index: text at {error.start} is not UTF-8: {error.reason}") from None

    def bad_names(self, starts: Array, sizes: Array, *, empty: bool = False, nul: bool = False) -> BadName | None:
        """Return the first span that cannot be a name, None if all can; `empty` and `nul` allow these."""
        if len(starts) == 1:  # the record itself, mostly
            reason = self.bad_name(int(starts[0]), int(sizes[0]), empty=empty, nul=nul)
            return None if reason is None else BadName(0, reason)
        ends = starts.astype(np.int64) + sizes
        if np.count_nonzero(outside := ends >= len(self.text)):
            return BadName(int(outside.argmax()), f"is past the end of the text pool ({len(self.text)} bytes)")
        if not empty and np.count_nonzero(sizes) < len(sizes):
            return BadName(int((sizes == 0).argmax()), "is empty")
        if np.count_nonzero(last := self.octets[ends]):
            return BadName(int((last != 0).argmax()), "is not followed by NUL")
        if not self._ascii and np.count_nonzero(cut := (self.octets[starts] & 0xC0) == 0x80):
            return BadName(int(cut.argmax()), "is not UTF-8: it starts inside a character")
        if not nul and np.count_nonzero(inside := self._holds_nul(starts, ends)):
            return BadName(int(inside.argmax()), "contains NUL")
        return None

    def bad_name(self, start: int, size: int, *, empty: bool = False, nul: bool = False) -> str | None:
        """Return the reason why one span cannot be a name, None if it can; `empty` and `nul` allow these."""
        end = start + size
        if end >= len(self.text):
            return f"is past the end of the text pool ({len(self.text)} bytes)"
        if not size and not empty:
            return "is empty"
        if self.text[end]:
            return "is not followed by NUL"
        try:
            text = str(self.text[start:end], "utf-8")
        except UnicodeDecodeError as error:
            return f"is not UTF-8: {error.reason}"
        return "contains NUL" if "\0" in text and not nul else None

    def _holds_nul(self, starts: Array, ends: Array) -> Array:
        """Return True for each span, all followed by NUL, that has another NUL inside."""
        if len(starts) > 1 and np.array_equal(starts[1:], ends[:-1] + 1):  # side by side: counting is enough
            lo, hi = int(starts[0]), int(ends[-1])
            if hi - lo - int(np.count_nonzero(self.octets[lo:hi])) == len(starts) - 1:
                return np.zeros(len(starts), bool)
        if self._nuls is None:
            self._nuls = np.flatnonzero(self.octets == 0)
        first: Array = self._nuls[np.searchsorted(self._nuls, starts)]
        return first < ends

    def _words(self, starts: Array, sizes: Array, skip: int) -> Array:
        """Return bytes [skip, skip + 32) of each span as 4 rows of numbers, which order as the bytes do, row by row."""
        return np.ascontiguousarray(self._pieces(starts, sizes, skip).T).byteswap(inplace=True)

    def _pieces(self, starts: Array, sizes: Array, skip: int) -> Array:
        """Return bytes [skip, skip + 32) of each span, zeros past its end, as 4 columns. Spans must lie inside."""
        if self._rows_at is None:
            if len(self._memory) < len(self.text) + _WIDTH:
                self._memory = memoryview(self.text.tobytes() + b"\0" * _WIDTH)
            octets = np.frombuffer(self._memory, np.uint8)
            self._rows_at = np.ndarray(len(self.text) + 1, _ROW, octets, 0, (1,))  # the 32 bytes at every offset
        starts = starts.astype(np.int64)
        if skip:  # a span that ends before keeps no byte, wherever it would be
            starts = np.minimum(starts + skip, len(self.text))
            sizes = np.maximum(sizes.astype(np.int64) - skip, 0)  # a negative size would choose a mask from the end
        rows = self._rows_at[starts].view(np.uint64)
        pieces = rows.reshape(-1, _WORDS)  # the same memory
        if len(sizes) and (shortest := sizes.min()) < _WIDTH:
            if shortest == sizes.max():  # one mask for all: names of one module are often of one size
                pieces &= _MASKS[shortest : shortest + 1].view(np.uint64)
            else:
                rows &= _MASKS[np.minimum(sizes, _WIDTH)].view(np.uint64)
        return pieces

    def _slice(self, start: int, size: int) -> bytes:
        return self.text[start : start + size].tobytes()

    def first_not_ascending(self, starts: Array, sizes: Array) -> int | None:
        """Return the first i such that span i is not strictly less, bytewise, than span i + 1; None if all ascend."""
        if len(starts) <= _FEW:
            names = map(self._slice, starts.tolist(), sizes.tolist())
            return next((i for i, (a, b) in enumerate(itertools.pairwise(names)) if a >= b), None)
        for begin in range(0, len(starts) - 1, _CHUNK):
            chunk = slice(begin, begin + _CHUNK + 1)  # the last span of one is the first of the next
            if (i := self._first_not_ascending(starts[chunk], sizes[chunk])) is not None:
                return begin + i
        return None

    def _first_not_ascending(self, starts: Array, sizes: Array) -> int | None:
        """Return the same as `first_not_ascending`, for so few spans that their rows stay in the cache."""
        words = self._words(starts, sizes, 0)
        left, right = words[:, :-1], words[:, 1:]
        active = np.flatnonzero(~_is_less(left, right))
        left, right = left[:, active], right[:, active]
        first, skip = len(starts), 0  # `first` is past the end while all ascend
        while len(active):
            skip += _WIDTH
            tied = (left == right).all(axis=0) & ((sizes[active] > skip) | (sizes[active + 1] > skip))
            first = min([first, *active[~tied][:1].tolist()])
            active = active[tied]
            if len(active) <= _FEW:
                break
            left = self._words(starts[active], sizes[active], skip)
            right = self._words(starts[active + 1], sizes[active + 1], skip)
            undecided = ~_is_less(left, right)
            active, left, right = active[undecided], left[:, undecided], right[:, undecided]
        for i in active.tolist():
            a, b = (self._slice(int(starts[j]), int(sizes[j])) for j in (i, i + 1))
            if a >= b:
                first = min(first, i)
                break
        return first if first < len(starts) else None

    def equal(self, starts: Array, others: Array, sizes: Array) -> Array:
        """Return True for each pair of spans of the same size that holds the same bytes."""
        chunks = [slice(lo, lo + _CHUNK) for lo in range(0, len(starts), _CHUNK)]
        parts = [self._equal(starts[chunk], others[chunk], sizes[chunk]) for chunk in chunks]
        return np.concatenate([np.ones(0, bool), *parts])

    def _equal(self, starts: Array, others: Array, sizes: Array) -> Array:
        """Return the same as `equal`, for so few spans that their rows stay in the cache."""
        same = np.ones(len(starts), bool)
        active: Array = np.flatnonzero(sizes)
        skip = 0
        while len(active) > _FEW:
            left = self._pieces(starts[active], sizes[active], skip)
            right = self._pieces(others[active], sizes[active], skip)
            equal = left[:, 0] == right[:, 0]
            for column in range(1, _WORDS):
                equal &= left[:, column] == right[:, column]
            same[active[~equal]] = False
            skip += _WIDTH
            active = active[equal & (sizes[active] > skip)]
        for i in active.tolist():
            size = int(sizes[i])
            same[i] = self._slice(int(starts[i]), size) == self._slice(int(others[i]), size)
        return same

    def first_repeated(self, starts: Array, sizes: Array, groups: Array) -> int | None:
        """Return the number of a span that repeats an earlier one of its group, else None; hashes tell most apart."""
        seen: set[tuple[int, bytes]] = set()
        few = len(starts) <= _FEW and sizes.max(initial=0) <= _LONG
        for i in range(len(starts)) if few else self._same_hashes(starts, sizes, groups):
            key = (int(groups[i]), self._slice(int(starts[i]), int(sizes[i])))
            if key in seen:
                return i
            seen.add(key)
        return None

    def _same_hashes(self, starts: Array, sizes: Array, groups: Array) -> list[int]:
        """Return the numbers of the spans whose hash, of group and bytes, another span has, too; ascending."""
        hashes = groups.astype(np.uint64) * _MIX ^ sizes
        active: Array = np.flatnonzero(sizes <= _LONG)
        skip = 0
        while len(active):
            for words in self._words(starts[active], sizes[active], skip):
                mixed = (hashes[active] ^ words) * _MIX
                hashes[active] = mixed ^ (mixed >> np.uint64(29))
            skip += _WIDTH
            active = active[sizes[active] > skip]
        for i in np.flatnonzero(sizes > _LONG).tolist():
            key = (int(groups[i]), self._slice(int(starts[i]), int(sizes[i])))
            hashes[i] = np.uint64(hash(key) & 0xFFFFFFFFFFFFFFFF)
        ordered = np.sort(hashes)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        numbers: list[int] = np.flatnonzero(np.isin(hashes, repeated, kind="sort")).tolist() if len(repeated) else []
        return numbers


def _is_less(left: Array, right: Array) -> Array:
    """Return True for each column of 4 numbers in `left` that is less than `right`'s; the first number counts most."""
    out: Array = left[-1] < right[-1]
    for a, b in zip(left[-2::-1], right[-2::-1], strict=True):
        out = (a < b) | ((a == b) & out)
    return out


@cache
def numpy_type(code: int) -> Any:
    """Return numpy's dtype of an element type, None for strings and unknown types; imports ml_dtypes if it must."""
    kind = dtypes.by_code.get(code)
    return None if kind is None else kind.numpy


class Layouts(dict[bytes, Any]):
    """Results of `make` for dims, strides, dtype, bits and rank of a row, by its FORM bytes; each is made once."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __missing__(self, form: bytes) -> Any:
        return self.setdefault(form, self._make(*_ROW_FORM.unpack_from(form)))
