"""The index: entries to FlatBuffer bytes and back to columns, with no loop over tensors on either way.

Knows the structs of `schema/zcrecord.fbs` and where the vectors lie; whether what they say makes sense is left to
`verify`, where payloads go to `layout`. The only module, with the generated `_schema`, that touches `flatbuffers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord.errors import FormatError, LimitError, UnsupportedError

from . import text_pool
from .entries import AttributeEntry, Entries, TensorLayout, ValueForm, ValueType, list_type, value_type
from .layout import MAX_ARCHIVE_SIZE, MAX_INDEX_SIZE, MAX_RANK, NONE, SPAN_ALLOWANCE, WORDS_ALLOWANCE, u16_at

__all__ = ["FORM", "Index", "TensorEntry", "decode", "encode", "first_children", "in_memory"]

Array = np.ndarray[Any, np.dtype[Any]]

PAYLOAD = np.dtype([("offset", "<u8"), ("nbytes", "<u8"), ("digest", "<u8")])
TENSOR = np.dtype(
    [("name", "<u4"), ("name_size", "<u4"), ("key_size", "<u4"), ("parent", "<u4"), ("place", "<u4"),
     ("payload", "<u4"), ("byte_offset", "<u8"), ("dims", "<u4"), ("strides", "<u4"), ("dtype", "u1"), ("bits", "u1"),
     ("rank", "u1"), ("reserved0", "u1"), ("reserved1", "<u4")]
)  # fmt: skip
# What of a tensor's row says its type, shape and strides, as opaque bytes.
FORM = np.dtype({"names": ["form"], "formats": ["V16"], "offsets": [32], "itemsize": TENSOR.itemsize})
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
_ROOM = 4096  # bytes of a FlatBuffer that are no vector's
_SLACK = bytes(64)  # names are compared 32 bytes at a time, and may be read past their pool's end


class _Pool:
    """The text pool under construction: equal strings share a span, if short enough for any number to (R30)."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.starts: dict[str, int] = {}

    def add(self, text: str) -> tuple[int, int]:
        data = text.encode() + b"\0"
        if (start := self.starts.get(text)) is None:
            start = self.size
            self.parts.append(data)
            self.size += len(data)
            if len(data) <= SPAN_ALLOWANCE:
                self.starts[text] = start
        return start, len(data) - 1

    def add_all(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Add texts, no two of them equal and none added before; return where they start, and their sizes."""
        data = [text.encode() for text in texts]
        sizes = np.fromiter(map(len, data), np.int64, len(data))
        ends = np.cumsum(sizes + 1) + self.size
        starts = ends - sizes - 1
        self.parts += [b"\0".join(data), b"\0"]
        self.size = int(ends[-1]) if len(ends) else self.size
        for text, start, size in zip(texts, starts.tolist(), sizes.tolist(), strict=True):
            if size < SPAN_ALLOWANCE:
                self.starts[text] = start
        return starts, sizes

    def add_names(self, names: list[str], order: Array) -> tuple[Array, Array]:
        """Lay names down in the order of `by_name`; lying side by side in it, they are verified fastest."""
        data = ("\0".join([names[i] for i in order.tolist()]) + "\0").encode()
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 0)
        starts, sizes = np.empty((2, len(names)), np.uint32)
        first = np.concatenate(([0], ends[:-1] + 1))[: len(order)]
        starts[order] = first
        sizes[order] = ends - first
        self.parts.append(data)
        self.size += len(data)
        return starts, sizes


class _Ranges:
    """A pool of numbers (dims, strides, words); equal tuples share a range, up to `most` items each."""

    def __init__(self, most: int = MAX_RANK) -> None:
        self.most = most
        self.items: list[int] = []
        self.starts: dict[tuple[int, ...], int] = {}

    def add(self, items: tuple[int, ...]) -> int:
        start = self.starts.get(items)
        if start is None:
            start = len(self.items)
            self.items.extend(items)
            if len(items) <= self.most:
                self.starts[items] = start
        return start


def encode(entries: Entries) -> bytearray:
    """Return the index as a FlatBuffer whose size is a multiple of 8; the same entries give the same bytes.

    Payloads must ascend by offset and modules be in pre-order; names must be unique (`tree` sees to both).

    Raises:
        LimitError: the index would reach 2 GiB, or a value does not fit its field.
    """
    return _assemble(_vectors(entries), entries.digest_kind)


def in_memory(entries: Entries) -> Index:
    """Return the columns of an index that is written nowhere; entries and errors are those of `encode`."""
    vectors = _vectors(entries)
    columns: dict[str, Any] = {n: np.asarray(vectors.get(n, ()), dtype) for n, (_, dtype, _) in VECTORS.items()}
    memory = memoryview(columns["text"].tobytes() + _SLACK)
    columns |= {"text": memory[: -len(_SLACK)], "by_module": vectors.get("by_module")}
    return Index(memory=memory, digest_kind=entries.digest_kind, **columns)


def _vectors(entries: Entries) -> dict[str, Array]:
    pool = _Pool()
    vectors: dict[str, Array] = {}
    _encode_tensors(entries, pool, vectors)
    _encode_modules(entries, pool, vectors)
    words = _Ranges(WORDS_ALLOWANCE)
    by_place = sorted(entries.attributes, key=lambda a: (a.parent, a.place))
    vectors["attributes"] = _encode_attributes(by_place, pool, words)
    vectors["metadata"] = _encode_attributes(sorted(entries.metadata, key=lambda a: a.key), pool, words)
    vectors["words"] = np.array(words.items, np.uint64)
    vectors["payloads"] = entries.payload_rows
    vectors["text"] = np.frombuffer(b"".join(pool.parts), np.uint8)
    total = sum(v.nbytes for v in vectors.values())
    if total + _ROOM > MAX_INDEX_SIZE:
        raise LimitError(f"the index would take {total} bytes, FlatBuffers end at 2 GiB; split the record")
    return vectors


def _rows(dtype: Any, rows: Iterable[Sequence[Any]]) -> Array:
    """Return rows of numbers as one structured array, column by column: that is 5 times faster than row by row."""
    columns = list(zip(*rows, strict=True))
    out = np.zeros(len(columns[0]) if columns else 0, dtype)
    for name, column in zip(dtype.names, columns, strict=False):
        out[name] = column
    return out


def _encode_tensors(entries: Entries, pool: _Pool, vectors: dict[str, Array]) -> None:
    names = entries.names
    out = vectors["tensors"] = np.zeros(len(names), TENSOR)
    dims, strides = _Ranges(), _Ranges()
    if names:
        order = np.array(sorted(range(len(names)), key=names.__getitem__), np.uint32)
        out["name"], out["name_size"] = pool.add_names(names, order)
        out["key_size"], out["parent"], out["place"] = entries.key_sizes, entries.parents, entries.places
        out["payload"] = entries.payloads
        layouts = np.zeros(len(entries.layouts), TENSOR)
        for i, f in enumerate(entries.layouts):
            _check_layout(f, entries, i)
            layouts["dtype"][i], layouts["bits"][i], layouts["rank"][i] = f.dtype, f.bits, len(f.shape)
            layouts["dims"][i], layouts["byte_offset"][i] = dims.add(f.shape), f.byte_offset
            layouts["strides"][i] = NONE if f.strides is None else strides.add(f.strides)
        layout_ids = np.array(entries.layout_ids, np.intp)
        for column in ("dtype", "bits", "rank", "dims", "byte_offset", "strides"):
            out[column] = layouts[column][layout_ids]
        vectors["by_name"] = order
        if (np.diff(out["parent"].astype(np.int64)) < 0).any():
            vectors["by_module"] = np.argsort(out["parent"], kind="stable").astype(np.uint32)
    vectors["dims"] = np.array(dims.items, np.uint64)
    vectors["strides"] = np.array(strides.items, np.int64)


def _check_layout(layout: TensorLayout, entries: Entries, number: int) -> None:
    """Raise LimitError, naming a tensor, for a rank or an empty shape that no reader takes (R47, R49)."""
    if len(layout.shape) > MAX_RANK:
        what = f"rank {len(layout.shape)} is more than {MAX_RANK}"
    elif prod(d or 1 for d in layout.shape) * (layout.bits or 64) > 8 * MAX_ARCHIVE_SIZE:
        what = f"shape {layout.shape} claims more than 2^56 bytes"
    else:
        return
    raise LimitError(what, tensor=entries.names[list(entries.layout_ids).index(number)])


def _encode_modules(entries: Entries, pool: _Pool, vectors: dict[str, Array]) -> None:
    modules = entries.modules
    out = np.zeros(len(modules), MODULE)
    vectors["modules"] = out
    names, key_sizes, parents, places, kinds, type_names = zip(*modules, strict=True)
    ends = list(range(1, len(modules) + 1))
    for i in range(len(modules) - 1, 0, -1):
        if ends[i] > ends[parents[i]]:
            ends[parents[i]] = ends[i]
    out["name"], out["name_size"] = pool.add_all(names)
    out["type_name"], out["type_name_size"] = zip(*map(pool.add, type_names), strict=True)
    out["end"], out["key_size"], out["parent"], out["place"], out["kind"] = ends, key_sizes, parents, places, kinds
    out["first_tensor"] = first_children(vectors["tensors"]["parent"], len(modules))
    out["first_attribute"] = first_children(np.array([a.parent for a in entries.attributes], np.uint32), len(modules))


def first_children(parents: Array, modules: int) -> Array:
    """Return, for each module, how many of the given children belong to an earlier module."""
    counts = np.bincount(parents, minlength=modules) if len(parents) else np.zeros(modules, np.int64)
    return np.cumsum(counts) - counts


def _encode_attributes(attributes: list[AttributeEntry], pool: _Pool, words: _Ranges) -> Array:
    rows = []
    for a in attributes:
        value_type, form, word = _encode_value(a.value, pool, words)
        rows.append((*pool.add(a.key), word, a.parent, a.place, value_type, form))
    return _rows(ATTRIBUTE, rows)


def _encode_value(value: Any, pool: _Pool, words: _Ranges) -> tuple[int, int, int]:
    if isinstance(value, list | tuple):
        kind = list_type(value)
        if kind is None:
            raise UnsupportedError("a list attribute holds items of one type")
        start = words.add(tuple(_word(kind, v, pool) for v in value))
        form = ValueForm.LIST if isinstance(value, list) else ValueForm.TUPLE
        return kind, form, start | len(value) << 32
    kind = value_type(value)
    if kind is None:
        raise UnsupportedError(f"a {type(value).__name__} is no attribute value")
    return kind, ValueForm.SCALAR, _word(kind, value, pool)


def _word(kind: int, value: Any, pool: _Pool) -> int:
    if kind == ValueType.FLOAT:
        return int(np.float64(value).view(np.uint64))
    if kind == ValueType.TEXT:
        start, size = pool.add(value)
        return start | size << 32
    return 0 if kind == ValueType.NIL else int(value) & 0xFFFFFFFFFFFFFFFF


def _assemble(vectors: dict[str, Array], digest_kind: int) -> bytearray:
    """Lay the vectors down as bytes, with a handful of builder calls whatever the number of tensors."""
    import flatbuffers  # here, because only who saves needs it

    from zcrecord._schema import tables

    schema: Any = tables  # generated without types
    builder = flatbuffers.Builder(sum(v.nbytes for v in vectors.values()) + _ROOM)
    builder.Prep(8, 0)  # so that the finished size is a multiple of 8
    places = {}
    for name, (_, dtype, alignment) in reversed(VECTORS.items()):
        data = vectors.get(name)
        if data is None or not len(data):
            continue  # an empty vector of 8-byte items may come out misaligned in other languages
        builder.StartVector(dtype.itemsize, len(data), alignment)
        raw = data.view(np.uint8)
        builder.head -= len(raw)
        builder.Bytes[builder.head : builder.head + len(raw)] = raw.data
        places[name] = builder.EndVector()
    schema.RecordStart(builder)
    schema.RecordAddDigestKind(builder, digest_kind)
    for name, place in places.items():
        getattr(schema, "RecordAdd" + name.title().replace("_", ""))(builder, place)
    builder.Finish(schema.RecordEnd(builder), file_identifier=IDENTIFIER)
    return builder.Output()  # type: ignore[no-any-return]


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
    """The columns of an index, as views of its bytes. Lengths and bounds of the vectors are checked, nothing else.

    `memory` starts where `text` does and goes on to the archive's end.
    """

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

    def pool(self) -> text_pool.Pool:
        """Return the text pool, ready to compare names in."""
        return text_pool.Pool(self.text, self.memory)

    def string(self, start: int, size: int) -> str:
        """Return text[start, start + size) decoded; raises FormatError if it lies outside or is not UTF-8."""
        if start + size >= len(self.text):
            raise FormatError(f"text [{start}, {start + size}) is past the end of the pool ({len(self.text)})")
        try:
            return str(self.text[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"text [{start}, {start + size}) is not UTF-8: {error.reason}") from None

    def text_of(self, row: Any, field: str = "name") -> str:
        """Return the text that one field of an entry, a span, stands for."""
        return self.string(int(row[field]), int(row[field + "_size"]))

    def tensor(self, i: int) -> TensorEntry:
        """Return the entry of tensor i."""
        return TensorEntry._make(self.tensors[i].item())

    def name(self, i: int) -> str:
        """Return the full name of tensor i."""
        return self.text_of(self.tensors[i])


def decode(memory: memoryview, size: int) -> Index:
    """Return the columns of the index in the first `size` bytes of `memory`, which may go on behind it.

    Checks the root table and the bounds of every vector. Copies nothing; the columns keep `memory` alive.

    Raises:
        FormatError: no FlatBuffer of ours, or a vector that leaves it.
    """
    buffer = memory[:size]
    words = buffer[: size & -4].cast("I")  # read at any address, and three times faster than by `struct`
    table, fields = _root(buffer, words)
    octets = np.frombuffer(buffer, np.uint8)  # unlike ndarray(buffer=...), it holds the buffer's export
    kind = buffer[table + fields[0]] if 0 in fields else 0
    columns: dict[str, Any] = {}
    for name, (number, dtype, alignment) in VECTORS.items():
        place = fields.get(number)
        start, count = (0, 0) if place is None else _vector(words, size, table + place, dtype.itemsize, alignment, name)
        if name == "text":
            columns[name] = buffer[start : start + count]
            columns["memory"] = memory[start:]
        elif name == "by_module" and place is None:
            columns[name] = None
        else:
            columns[name] = np.ndarray(count, dtype, octets, start)
    return Index(digest_kind=kind, **columns)


def _root(buffer: memoryview, words: memoryview) -> tuple[int, dict[int, int]]:
    """Return where the root table lies, and of its known fields those that are there, as offsets into it."""
    size = len(buffer)
    if size < 12 or bytes(buffer[4:8]) != IDENTIFIER:
        raise FormatError("index: its identifier is not 'ZCR1'")
    table = words[0]
    if table % 4 or table + 4 > size:
        raise FormatError(f"index: the root table at {table:#x} is unaligned or past its end ({size:#x})")
    distance = words[table >> 2]
    vtable = table - (distance - (1 << 32) if distance >> 31 else distance)
    if vtable < 0 or vtable % 2 or vtable + 4 > size:
        raise FormatError(f"index: the vtable at {vtable:#x} is unaligned or outside it")
    vtable_size, table_size = u16_at(buffer, vtable), u16_at(buffer, vtable + 2)
    if vtable_size < 4 or vtable_size % 2 or vtable + vtable_size > size or table_size < 4 or table + table_size > size:
        raise FormatError(f"index: vtable ({vtable_size} bytes) or table ({table_size} bytes) leaves it")
    fields = {}
    known = buffer[vtable + 4 : vtable + min(vtable_size, 4 + 2 * (len(VECTORS) + 1))].cast("H").tolist()
    for number, place in enumerate(known):
        width = 4 if number else 1
        if place and (place < 4 or place + width > table_size):
            raise FormatError(f"index: field {number} lies at {place}, outside the table of {table_size} bytes")
        if place:
            fields[number] = place
    return table, fields


def _vector(words: memoryview, size: int, at: int, item: int, alignment: int, name: str) -> tuple[int, int]:
    """Return where a vector's items start and how many there are."""
    start = at + words[at >> 2] if at % 4 == 0 else -1
    if start < 0 or start % 4 or start + 4 > size:
        raise FormatError(f"index: vector '{name}' is unaligned or starts past the end ({size:#x})")
    count = words[start >> 2]
    start += 4
    if start % alignment or start + count * item > size:
        raise FormatError(
            f"index: vector '{name}' [{start:#x}, {start + count * item:#x}) is unaligned or past the end ({size:#x})"
        )
    return start, count
