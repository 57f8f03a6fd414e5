"""Archives whose index breaks one rule of FORMAT.md before its columns are read, or as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from forge import NONE, VECTORS, Forge, build_index
from malformed import Case, saved

from zcrecord import LimitError

Change = Callable[[Forge], Any]
VTABLE, TABLE = 8, 40  # where `build_index` lays them


def number(at: int, value: int, kind: str = "<u4") -> Change:
    def change(f: Forge) -> None:
        index = bytearray(f.index or build_index(f.columns, f.digest_kind))
        data = np.array(value, kind).tobytes()
        index[at : at + len(data)] = data
        f.index = index

    return change


def place(name: str, value: int) -> Change:
    """Write where the table keeps one field."""
    return number(VTABLE + 4 + 2 * VECTORS[name][0], value, "<u2")


def distance(name: str, value: int) -> Change:
    """Write how far behind its field a vector's count lies."""
    return number(TABLE + 4 + 4 * VECTORS[name][0], value)


def shift(name: str, by: int) -> Change:
    def change(f: Forge) -> None:
        at = TABLE + 4 + 4 * VECTORS[name][0]
        old = int(np.frombuffer(build_index(f.columns, f.digest_kind), "<u4", 1, at)[0])
        number(at, old + by)(f)

    return change


def count(name: str, value: int) -> Change:
    def change(f: Forge) -> None:
        f.index = build_index(f.columns, f.digest_kind)
        at = TABLE + 4 + 4 * VECTORS[name][0]
        number(at + int(np.frombuffer(f.index, "<u4", 1, at)[0]), value)(f)

    return change


def whole(data: bytes) -> Change:
    return lambda f: setattr(f, "index", data)


# fmt: off
OPEN = [
    Case("R19", "8 bytes", whole(bytes(4) + b"ZCR1"), "^index: its identifier is not 'ZCR1'"),
    Case("R19", "another identifier", number(4, 0x32524F5A), "^index: its identifier is not 'ZCR1'"),
    Case("R19", "root table unaligned", number(0, 42), "^index: the root table at 0x2a is unaligned or past its end"),
    Case("R19", "root table past the end", number(0, 2**20), "^index: the root table at 0x100000 is unaligned or past"),
    Case("R19", "root table at 2^32-4", number(0, 2**32 - 4), "^index: the root table at 0xfffffffc is unaligned or"),
    Case("R20", "vtable before the index", number(TABLE, 48), "^index: the vtable at -0x8 is unaligned or outside"),
    Case("R20", "vtable at an odd place", number(TABLE, 31), "^index: the vtable at 0x9 is unaligned or outside"),
    Case("R20", "vtable past the end", number(TABLE, -(2**20), "<i4"), "^index: the vtable at 0x100028 is unaligned"),
    Case("R20", "vtable 2^31 away", number(TABLE, -(2**31), "<i4"), "^index: the vtable at 0x80000028 is unaligned or"),
    Case("R20", "vtable of 2 bytes", number(VTABLE, 2, "<u2"), r"^index: vtable \(2 bytes\) or table \(52 bytes\)"),
    Case("R20", "vtable of odd size", number(VTABLE, 27, "<u2"), r"^index: vtable \(27 bytes\) or table .* has an inv"),
    Case("R20", "vtable of 64 KiB", number(VTABLE, 65534, "<u2"), r"^index: vtable \(65534 bytes\) or table .* has"),
    Case("R20", "table of 3 bytes", number(VTABLE + 2, 3, "<u2"), r"^index: vtable .* or table \(3 bytes\) has"),
    Case("R20", "table of 64 KiB", number(VTABLE + 2, 65532, "<u2"), r"^index: vtable .* or table \(65532 bytes\)"),
    Case("R21", "field inside the table's head", place("dims", 3), "^index: field 2 lies at 3, outside the table of"),
    Case("R21", "field half outside", place("metadata", 49), "^index: field 11 lies at 49, outside the table of 52"),
    Case("R21", "field far outside", place("text", 65532), "^index: field 1 lies at 65532, outside the table of 52"),
    Case("R21", "digest_kind behind the table", number(VTABLE + 4, 52, "<u2"), "^index: field 0 lies at 52, outside"),
    Case("R22", "field unaligned", place("dims", 10), "^index: vector 'dims' is unaligned or starts past the end"),
    Case("R22", "count unaligned", shift("dims", 2), "^index: vector 'dims' is unaligned or starts past the end"),
    Case("R22", "count past the end", distance("tensors", 2**20), "^index: vector 'tensors' is unaligned or starts"),
    Case("R22", "count at 4 GiB", distance("tensors", 2**32 - 4), "^index: vector 'tensors' is unaligned or starts"),
    Case("R22", "items of 8 on a multiple of 4", shift("dims", 4), r"^index: vector 'dims' \[0x[0-9a-f]+, .* is"),
    Case("R22", "one item too many", lambda f: count("metadata", len(f.columns["metadata"]) + 1)(f),
         "^index: vector 'metadata' .* past the end"),
    *(Case("R22", f"2^32-1 items of {name}", count(name, 2**32 - 1), rf"^index: vector '{name}' \[0x.* past the end")
      for name in VECTORS if name != "by_module"),
    Case("R24", "by_name too short", lambda f: f.cut("by_name", 1), "^index: vector 'by_name' has 1 items for 13"),
    Case("R24", "by_name missing", lambda f: f.drop("by_name"), "^index: vector 'by_name' has 0 items for 13 tensors"),
    Case("R24", "by_module too long", lambda f: f.add("by_module", range(14)), "^index: vector 'by_module' has 14"),
    Case("R24", "by_module empty", lambda f: f.add("by_module", []), "^index: vector 'by_module' has 0 items for 13"),
    Case("R25", "digest_kind 2", lambda f: setattr(f, "digest_kind", 2), "^index: digest kind 2 is not known"),
    Case("R25", "digest_kind 255", lambda f: setattr(f, "digest_kind", 255), "^index: digest kind 255 is not known"),
    Case("R37", "no modules", lambda f: f.drop("modules"), "^index: it has no modules; module 0, the record itself"),
    Case("R37", "no vector at all", lambda f: f.columns.clear(), "^index: it has no modules"),
]


def long_text(f: Forge) -> dict[str, int]:
    """Put a long name into the pool, and return the span."""
    start, size = f.text(b"x" * 5000)
    return {"start": start, "size": size}


def many(f: Forge, vector: str, field: str, rows: int = 100) -> None:
    """Give one long span to many rows of a vector, those appended to it included."""
    long = long_text(f)
    f.add(vector, np.repeat(f.columns[vector][-1:], rows))
    f.columns[vector][field], f.columns[vector][f"{field}_size"] = long["start"], long["size"]


def many_tensors(f: Forge) -> None:
    many(f, "tensors", "name")
    f.columns["by_name"] = np.arange(len(f.columns["tensors"]), dtype="<u4")


def many_words(f: Forge, vector: str, rows: int = 100) -> None:
    """Let many lists share one of 5,000 words."""
    start = f.add("words", np.zeros(5000, "<u8"))
    f.add(vector, np.repeat(f.columns[vector][-1:], rows))
    f.columns[vector]["value"], f.columns[vector]["type"], f.columns[vector]["form"] = start | 5000 << 32, 0, 1


def many_texts(f: Forge, vector: str, *, listed: bool) -> None:
    """Let many text values share one of 5,000 bytes."""
    long = long_text(f)
    word = long["start"] | long["size"] << 32
    f.add(vector, np.repeat(f.columns[vector][-1:], 100))
    f.columns[vector]["type"], f.columns[vector]["form"], f.columns[vector]["value"] = 5, 0, word
    if listed:
        start = f.add("words", np.full(1, word, "<u8"))
        f.columns[vector]["form"], f.columns[vector]["value"] = 1, start | 1 << 32


TAKES = "^index: its names, texts and lists take [0-9]+ bytes of their pools, at most [0-9]+$"
INDEX = [
    Case("R28", "text is no UTF-8", lambda f: f.text(b"\xff"), "^index: text at [0-9]+ is not UTF-8: invalid start"),
    Case("R30", "names of tensors", many_tensors, TAKES, LimitError),
    Case("R30", "names of modules", lambda f: many(f, "modules", "name"), TAKES, LimitError),
    Case("R30", "type names", lambda f: many(f, "modules", "type_name"), TAKES, LimitError),
    Case("R30", "names of attributes", lambda f: many(f, "attributes", "name"), TAKES, LimitError),
    Case("R30", "names of metadata", lambda f: many(f, "metadata", "name"), TAKES, LimitError),
    Case("R30", "texts of attributes", lambda f: many_texts(f, "attributes", listed=False), TAKES, LimitError),
    Case("R30", "texts of metadata", lambda f: many_texts(f, "metadata", listed=False), TAKES, LimitError),
    Case("R31", "texts in lists", lambda f: many_texts(f, "attributes", listed=True), TAKES, LimitError),
    Case("R31", "lists of attributes", lambda f: many_words(f, "attributes"), TAKES, LimitError),
    Case("R31", "lists of metadata", lambda f: many_words(f, "metadata"), TAKES, LimitError),
    Case("R30", "a text of 4 GiB", lambda f: f.set("attributes", "note", value=2**64 - 2**32), TAKES, LimitError),
    Case("R32", "by_name beyond the tensors", lambda f: f.columns["by_name"].__setitem__(0, 13),
         "^by_name: an item is not one of the 13 tensors"),
    Case("R32", "by_name NONE", lambda f: f.columns["by_name"].__setitem__(-1, NONE), "^by_name: an item is not one"),
]
# fmt: on


def at_the_budget(over: int) -> list[bytes]:
    """Return archives with names, texts and lists of every kind that take all that R30 allows, and `over` bytes."""
    inner = {"a": "b", "w": np.ones(1, np.uint8), "texts": ["c", "d"], "numbers": (1, 2), "m": {}}
    base = saved([inner for _ in range(20)], metadata={f"k{i:02}": "v" for i in range(20)})
    fields = [("modules", "type_name"), ("metadata", "value")]
    data = [Forge(base).use_up(vector, field, over).seal() for vector, field in fields]
    shared = Forge(base)
    start, size = shared.text(b"y" * 100)
    rows = shared.columns["attributes"]
    listed = (rows["type"] == 5) & (rows["form"] != 0)
    rows["value"][listed] = shared.add("words", np.full(10, start | size << 32)) | 10 << 32
    return [*data, shared.use_up("metadata", "value", over).seal()]
