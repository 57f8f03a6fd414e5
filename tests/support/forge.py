"""Archives forged one rule at a time: take a valid one apart, change a field, seal it so that nothing else is wrong.

Structs and vectors come from `schema/zcrecord.fbs`, bytes are laid down by hand, and nothing of the package under test
is used: what it wrote is read here by other means, and what is written here it never wrote.

    archive = Forge(data)
    archive.set("tensors", 0, rank=65)
    zcrecord.load_record(archive.seal())  # LimitError: its CRCs are right, its rank is not
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import specification
import xxhash

Array = npt.NDArray[Any]
NONE = 0xFFFFFFFF
CODES = {"u8": "u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "i64": "<i8"}

# The 64 bytes at both ends.
END = np.dtype(
    [("magic", "S8"), ("version", "u1"), ("alignment_log2", "u1"), ("base_alignment_log2", "u1"), ("zero8", "u1"),
     ("zero32", "<u4"), ("required_features", "<u8"), ("index_offset", "<u8"), ("index_size", "<u8"),
     ("payload_offset", "<u8"), ("archive_size", "<u8"), ("index_crc", "<u4"), ("crc", "<u4")]
)  # fmt: skip
MAGIC = b"\x89ZCR\r\n\x1a\n"
VERSION = 1


def _flat(fields: list[specification.Field]) -> np.dtype[Any]:
    """Return a struct as a numpy dtype; a Span `name` becomes the columns `name` (its start) and `name_size`."""
    columns = [(f.name, CODES.get(f.type, "<u4")) for f in fields]
    for at in reversed([i for i, f in enumerate(fields) if f.type == "Span"]):
        columns.insert(at + 1, (f"{fields[at].name}_size", "<u4"))
    return np.dtype(columns)


STRUCTS = {name: _flat(fields) for name, fields in specification.structs().items()}
# Each vector of the root table: its id there, and what it holds. Id 0 is digest_kind.
VECTORS: dict[str, tuple[int, np.dtype[Any]]] = {
    v.name: (v.number, STRUCTS[v.item] if v.item in STRUCTS else np.dtype(CODES[v.item]))
    for v in specification.vectors()
    if v.number
}


def align_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def read_index(index: bytes) -> tuple[int, dict[str, Array]]:
    """Return digest kind and writable columns of a well-formed index; a missing vector has none."""

    def number(at: int, kind: str) -> int:
        return int(np.frombuffer(index, kind, 1, at)[0])

    table = number(0, "<u4")
    vtable = table - number(table, "<i4")
    columns = {}
    count = (number(vtable, "<u2") - 4) // 2
    places = [number(vtable + 4 + 2 * i, "<u2") for i in range(count)]
    for name, (i, dtype) in VECTORS.items():
        if i < count and places[i]:
            at = table + places[i]
            start = at + number(at, "<u4")
            columns[name] = np.frombuffer(index, dtype, number(start, "<u4"), start + 4).copy()
    return (index[table + places[0]] if places and places[0] else 0), columns


def build_index(columns: Mapping[str, Array], digest_kind: int = 0, identifier: bytes = b"ZCR1") -> bytearray:
    """Lay an index down: root offset, identifier, vtable at 8, table at 40, then each vector's data on 8 bytes."""
    fields = len(VECTORS) + 1
    vtable = np.array([4 + 2 * fields, 8 + 4 * len(VECTORS), 4, *([0] * len(VECTORS))], "<u2")
    table = np.zeros(2 + len(VECTORS), "<u4")
    start = align_up(8 + vtable.nbytes, 8)
    out = bytearray(start + table.nbytes)
    table[0], table[1] = start - 8, digest_kind
    for name, column in columns.items():
        number, dtype = VECTORS[name]
        at = align_up(len(out) + 4, 8) - 4
        table[1 + number] = at - (start + 4 + 4 * number)
        vtable[2 + number] = 4 + 4 * number
        data = np.ascontiguousarray(column, dtype)
        out += bytes(at - len(out)) + np.uint32(len(data)).tobytes() + data.tobytes()
    out[: len(out)] = out + bytes(-len(out) % 8)
    out[0:4], out[4:8] = np.uint32(start).tobytes(), identifier
    out[8 : 8 + vtable.nbytes], out[start : start + table.nbytes] = vtable.tobytes(), table.tobytes()
    return out


def end_bytes(fields: Mapping[str, Any]) -> bytes:
    """Return a header or trailer; its CRC is right unless `crc` is given."""
    row = np.zeros((), END)
    row["version"] = VERSION
    for name, value in fields.items():
        row[name] = value
    data = row.tobytes()
    return data if "crc" in fields else data[:60] + np.uint32(zlib.crc32(data[:60])).tobytes()


class Forge:
    """A valid archive taken apart. Whatever is not changed comes out right: sizes, offsets, order of regions, CRCs.

    Attributes:
        columns: each vector of the index, writable; `text` as bytes of a uint8 array.
        index: bytes to use in place of the index built from `columns`, if not None.
        payload: the payload region.
        widen: zeros between a front index and the payloads, beyond those needed.
        ends: fields to write into both header and trailer; `header` and `trailer` into one of them.
    """

    def __init__(self, data: bytes, *, front: bool | None = None, sealed: bool | None = None) -> None:
        end = np.frombuffer(data[-64:], END)[0]
        self.sealed = data[:64] == data[-64:] if sealed is None else sealed
        index_offset, payload_offset = int(end["index_offset"]), int(end["payload_offset"])
        was_front = index_offset < payload_offset
        self.front = was_front if front is None else front
        self.alignment_log2, self.base_log2 = int(end["alignment_log2"]), int(end["base_alignment_log2"])
        self.digest_kind, self.columns = read_index(data[index_offset : index_offset + int(end["index_size"])])
        self.payload = bytearray(data[payload_offset : len(data) - 64 if was_front else index_offset])
        self.index: bytes | bytearray | None = None
        self.widen = 0
        self.ends: dict[str, Any] = {}
        self.header: dict[str, Any] = {}
        self.trailer: dict[str, Any] = {}

    def seal(self) -> bytes:
        index = bytes(build_index(self.columns, self.digest_kind) if self.index is None else self.index)
        if self.front:
            index_offset = 64
            start = align_up(64 + len(index), 1 << self.base_log2) + self.widen
            body = index + bytes(start - 64 - len(index)) + self.payload
        else:
            start = align_up(64, 1 << self.alignment_log2)
            index_offset = align_up(start + len(self.payload), 1 << self.alignment_log2)
            body = bytes(start - 64) + self.payload + bytes(index_offset - start - len(self.payload)) + index
        fields = {
            "magic": MAGIC, "alignment_log2": self.alignment_log2, "base_alignment_log2": self.base_log2,
            "index_offset": index_offset, "index_size": len(index), "payload_offset": start,
            "archive_size": len(body) + 128, "index_crc": zlib.crc32(index),
        }  # fmt: skip
        unsealed = {name: fields[name] for name in ("magic", "alignment_log2")}
        first = (fields if self.sealed else unsealed) | self.ends | self.header
        return end_bytes(first) + body + end_bytes(fields | self.ends | self.trailer)

    def digest(self) -> Forge:
        for row in self.columns["payloads"]:
            start = int(row["offset"])
            row["digest"] = xxhash.xxh3_64_intdigest(bytes(self.payload[start : start + int(row["nbytes"])]))
        return self

    def bytes_of(self, key: str, vector: str = "tensors") -> slice:
        """Return the range in `payload` of a tensor's bytes (or of an attribute of bytes)."""
        number = self.get(vector, key, "payload" if vector == "tensors" else "value")
        start = self.get("payloads", number, "offset")
        return slice(start, start + self.get("payloads", number, "nbytes"))

    def name(self, row: Any, field: str = "name") -> str:
        start, size = int(row[field]), int(row[f"{field}_size"])
        return bytes(self.columns["text"][start : start + size]).decode()

    def row(self, vector: str, key: str | int) -> int:
        if isinstance(key, int):
            return key
        return next(i for i, row in enumerate(self.columns[vector]) if self.name(row) == key)

    def set(self, vector: str, key: str | int, **fields: Any) -> Forge:
        row = self.row(vector, key)
        for field, value in fields.items():
            self.columns[vector][field][row] = value
        return self

    def get(self, vector: str, key: str | int, field: str) -> int:
        return int(self.columns[vector][field][self.row(vector, key)])

    def add(self, vector: str, items: Iterable[Any]) -> int:
        """Append to a pool or vector, made if it is not there; returns where the new items start."""
        dtype = VECTORS[vector][1]
        old = self.columns.get(vector, np.zeros(0, dtype))
        new = items if isinstance(items, np.ndarray) else np.array(list(items), dtype)
        self.columns[vector] = np.concatenate((old, new.astype(dtype)))
        return len(old)

    def text(self, data: bytes, *, nul: bool = True) -> tuple[int, int]:
        return self.add("text", np.frombuffer(data + b"\0" * nul, np.uint8)), len(data)

    def rename(self, vector: str, key: str | int, data: bytes, field: str = "name") -> Forge:
        """Give one row a new name at the end of the pool."""
        start, size = self.text(data)
        return self.set(vector, key, **{field: start, f"{field}_size": size})

    def budget_left(self) -> int:
        """Return how many bytes more names, texts and lists may take of their pools; less than 0 if too many (R30)."""
        left = 16 * len(build_index(self.columns, self.digest_kind))
        for vector in ("tensors", "modules", "attributes", "metadata"):
            for field in ("name_size", "type_name_size"):
                if vector in self.columns and field in (self.columns[vector].dtype.names or ()):
                    left -= int(self.columns[vector][field].sum(dtype="u8"))
        for vector in ("attributes", "metadata"):
            for row in self.columns.get(vector, ()):
                words = np.array([row["value"]])
                if row["form"]:
                    start, count = int(row["value"]) & NONE, int(row["value"]) >> 32
                    words = self.columns.get("words", words[:0])[start : start + count]
                    left -= 16 * count
                left -= int((words >> np.uint64(32)).sum()) if row["type"] == 5 else 0
        return left

    def use_up(self, vector: str, field: str, over: int = 0, first: int = 0) -> Forge:
        """Let rows from `first` on share a text, and repeat it as often as R30 allows, and `over` bytes more.

        `field` is `name`, `type_name` or, of attributes that are texts, `value`. There must be more than 16 rows.
        """
        rows = self.columns[vector][first:]
        count = len(rows)
        start, size = self.text(b"x" * (17 * len(build_index(self.columns)) // (count - 16) + 64))

        def share(sizes: Array) -> None:
            starts = (start + size - sizes).astype("<u8")
            if field == "value":
                rows[field] = starts | sizes.astype("<u8") << np.uint64(32)
            else:
                rows[field], rows[f"{field}_size"] = starts, sizes

        share(np.zeros(count, "<i8"))
        each, rest = divmod(self.budget_left() + over, count)
        share(each + (np.arange(count) < rest))
        assert self.budget_left() == -over
        return self

    def drop(self, vector: str) -> Forge:
        del self.columns[vector]
        return self

    def cut(self, vector: str, items: int) -> Forge:
        self.columns[vector] = self.columns[vector][:items]
        return self
