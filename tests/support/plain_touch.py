"""Look-ups at level `touch` by FORMAT.md's words alone: slow, simple, and of nothing in the package under test.

`Plain(data).look_up(name)` takes an archive whose [open] rules hold, and gives the same lines as `readers.looked_up`.
A rule that is broken is an AssertionError with its number.
"""

from __future__ import annotations

import zlib
from math import prod
from typing import Any

import numpy as np
import specification
from forge import END, NONE, read_index

WIDTHS = {int(row["code"]): int(row["bits"]) for row in specification.table("Element types")}
STRING = 64
LIMIT = 1 << 56


class Plain:
    """An archive, alone in its bytes."""

    def __init__(self, data: bytes) -> None:
        end = {name: int(np.frombuffer(data[-64:], END)[0][name]) for name in END.names or () if name != "magic"}
        self.data, self.start = data, end["payload_offset"]
        self.alignment, self.base_alignment = 1 << end["alignment_log2"], 1 << end["base_alignment_log2"]
        front = end["index_offset"] < self.start
        self.room_end = end["archive_size"] - 64 if front else end["index_offset"]
        index = data[end["index_offset"] : end["index_offset"] + end["index_size"]]
        self.digest_kind, columns = read_index(index)
        self.text = columns.pop("text", np.zeros(0, np.uint8)).tobytes()
        self.vectors: dict[str, Any] = columns

    def count(self, vector: str) -> int:
        """Return the number of a vector's items, 0 of a missing one."""
        return len(self.vectors.get(vector, ()))

    def row(self, vector: str, i: int) -> dict[str, int]:
        """Return one entry as plain integers."""
        column = self.vectors[vector]
        return {name: int(column[i][name]) for name in column.dtype.names}

    def items(self, vector: str, start: int, count: int) -> list[int]:
        """Return a range of a pool."""
        return [int(item) for item in self.vectors.get(vector, ())[start : start + count]]

    def names(self) -> list[bytes]:
        """Return the names of tensors that are names (R27 to R29): those that can be looked up, by their numbers."""
        found = []
        for i in range(self.count("tensors")):
            t = self.row("tensors", i)
            name = self.text[t["name"] :][: t["name_size"]]
            if name and name == name.decode(errors="ignore").encode() and 0 not in name:
                found.append(name)
        return found

    def look_up(self, name: bytes) -> str:
        """Return the tensor's line, `-` for none, `refused` for an error."""
        try:
            i = self.search(name)
            return "-" if i is None else self.tensor(name, i)
        except AssertionError:
            return "refused"

    def answer(self, name: bytes) -> str | None:
        """Return "accepted" for a tensor, None for none, and for an error the rule, such as "R46"."""
        try:
            i = self.search(name)
            return None if i is None else "accepted" if self.tensor(name, i) else None
        except AssertionError as error:
            return str(error).partition("\n")[0]

    def search(self, name: bytes) -> int | None:
        """Step 1."""
        low, high = 0, self.count("by_name")
        while low < high:
            middle = (low + high) // 2
            i = int(self.vectors["by_name"][middle])
            assert i < self.count("tensors"), "R32"
            t = self.row("tensors", i)
            end = t["name"] + t["name_size"]
            assert end < len(self.text) and self.text[end] == 0, "R27"
            found = self.text[t["name"] : end]
            if found == name:
                return i
            low, high = (middle + 1, high) if found < name else (low, middle)
        return None

    def tensor(self, name: bytes, i: int) -> str:
        """Step 2."""
        t = self.row("tensors", i)
        dtype, bits, rank = t["dtype"], t["bits"], t["rank"]
        assert not t["reserved0"] and not t["reserved1"], "R26"
        assert 1 <= t["key_size"] <= len(name), "R33"
        assert t["parent"] < self.count("modules"), "R45"
        natural = WIDTHS.get(dtype)
        assert dtype, "R46"
        assert 1 <= bits <= 128 if natural is None else bits == natural or (0 < natural < 8 and bits == 8), "R46"
        assert rank <= 64, "R47"
        assert t["dims"] + rank <= self.count("dims"), "R48"
        dims = self.items("dims", t["dims"], rank)
        assert prod(dim for dim in dims if dim) * (64 if dtype == STRING else bits) <= 1 << 59, "R49"
        k = t["payload"]
        assert k == NONE or k < self.count("payloads"), "R50"
        assert (k == NONE) == (0 in dims), "R50"
        strides = None if t["strides"] == NONE else self.strides(t)
        assert strides is None or k != NONE, "R50"
        nbytes = 0 if k == NONE else self.payload(k)
        if strides is not None:
            self.reach(t, dims, strides, nbytes)
        else:
            assert t["byte_offset"] == 0, "R51"
            if k != NONE and dtype == STRING:
                assert nbytes % 8 == 0 and nbytes >= 8 * (prod(dims) + 1), "R71"
            elif k != NONE:
                assert nbytes == -(-prod(dims) * bits // 8), "R51"
        at, crc = "-", 0
        if k != NONE:
            start = self.start + self.row("payloads", k)["offset"]
            at, crc = str(start + t["byte_offset"]), zlib.crc32(self.data[start : start + nbytes])
        shown = [",".join(map(str, numbers)) or "-" for numbers in (dims, strides or [])]
        kept = "c" if strides is None else shown[1]
        what = f"{name.hex()} {dtype} {bits} {shown[0]} {kept} {at} {nbytes} {crc:08x}"
        return f"tensor {what} {t['parent']} {t['place']} {t['key_size']}"

    def strides(self, t: dict[str, int]) -> list[int]:
        """R52."""
        assert t["dtype"] != STRING and t["bits"] % 8 == 0, "R52"
        assert t["strides"] + t["rank"] <= self.count("strides"), "R52"
        return self.items("strides", t["strides"], t["rank"])

    def reach(self, t: dict[str, int], dims: list[int], strides: list[int], nbytes: int) -> None:
        """R53 to R55."""
        item, offset = t["bits"] // 8, t["byte_offset"]
        steps = [(dim - 1) * stride for dim, stride in zip(dims, strides, strict=True)]
        assert all(-LIMIT <= stride <= LIMIT for stride in strides), "R53"
        assert offset + sum(step for step in steps if step < 0) * item >= 0, "R53"
        assert offset + (sum(step for step in steps if step > 0) + 1) * item <= nbytes, "R53"
        assert offset % item == 0, "R54"
        assert prod(dims) * item <= nbytes, "R55"

    def payload(self, k: int) -> int:
        """Step 3; returns the payload's size."""
        p = self.row("payloads", k)
        offset, nbytes = p["offset"], p["nbytes"]
        assert 1 <= nbytes <= LIMIT, "R56"
        assert self.start + offset + nbytes <= self.room_end, "R56"
        assert (self.start + offset) % self.alignment == 0, "R57"
        before = self.row("payloads", k - 1) if k else {"offset": 0, "nbytes": 0, "digest": 0}
        if (before["offset"], before["nbytes"]) == (offset, nbytes):
            assert before["digest"] == p["digest"], "R60"
        else:
            end = before["offset"] + before["nbytes"]
            assert offset >= end, "R58"
            assert offset - end < self.base_alignment, "R59"
        assert self.digest_kind or p["digest"] == 0, "R60"
        return nbytes
