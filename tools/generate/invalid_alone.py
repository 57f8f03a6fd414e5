"""Invalid archives that break one rule and no other, for rules of which each case of the tests breaks several.

A reader that lacks the check for such a rule accepts these. They were found by taking the checks of zcrecord.h and
zcrecord.rs away one by one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from attacks import broken, tricks
from forge import Forge, build_index
from malformed import Case, saved, sequence
from test_malformed_header import both

__all__ = ["GROUPS", "changed_bytes"]

TABLE, TABLE_SIZE, VTABLE = 40, 52, 8  # where `build_index` lays them


def number() -> Forge:
    """Return a record of one number, without payloads."""
    return Forge(saved({"n": 1}, alignment=16))


def values(*sizes: int) -> Callable[[], Forge]:
    """Return a function that makes a record of values of bytes, w0, w1, ... of these sizes."""
    return lambda: Forge(saved({f"w{i}": bytes([i]) * size for i, size in enumerate(sizes)}, alignment=16))


def floats() -> Forge:
    """Return a record of one tensor, w."""
    return Forge(saved({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, alignment=16))


def aligned_to_8(f: Forge) -> None:
    f.alignment_log2 = f.base_log2 = 3
    f.payload = f.payload[:24]


def longer_index(f: Forge) -> None:
    f.index = build_index(f.columns, f.digest_kind) + bytes(4)


def unaligned_payloads(f: Forge) -> None:
    """Let the payloads start on a multiple of 8 that is none of 16."""
    index = build_index(f.columns, f.digest_kind)
    f.index = index + bytes(8 if len(index) % 16 == 0 else 0)
    f.base_log2 = 3
    f.ends["base_alignment_log2"] = 4


def apart_from_the_trailer(f: Forge) -> None:
    """Put 8 zeros between an index at the back and the trailer."""
    index = build_index(f.columns, f.digest_kind)
    f.front, f.index = False, index + bytes(8)
    f.ends.update(index_size=len(index), index_crc=zlib.crc32(index))


def unaligned_table(f: Forge) -> None:
    """Let the root table start at 42, all of its fields on multiples of 4."""
    index = build_index(f.columns, f.digest_kind)
    places = np.frombuffer(bytes(index), "<u2", 13, VTABLE + 2)
    index[VTABLE + 2 : VTABLE + 28] = np.where(places, places + 6, 0).astype("<u2").tobytes()
    index[TABLE:TABLE] = bytes(2) + np.int32(TABLE + 2 - VTABLE).tobytes() + bytes(2)
    index[:4] = np.uint32(TABLE + 2).tobytes()
    f.index = index


def shorter_table(f: Forge) -> None:
    """Let the root table end before its last field, metadata."""
    index = build_index(f.columns, f.digest_kind)
    index[VTABLE + 2 : VTABLE + 4] = np.uint16(TABLE_SIZE - 4).tobytes()
    f.index = index


def unaligned_field(f: Forge) -> None:
    """Give the root table 8 bytes more, and let the field of metadata lie there, at an odd multiple of 2."""
    index = build_index(f.columns, f.digest_kind)
    old = np.frombuffer(bytes(index), "<u4", 11, TABLE + 8)
    distances = np.where(old, old + 8, 0)
    distances[-1] = 0
    at = TABLE + TABLE_SIZE + 2
    index[TABLE + TABLE_SIZE : TABLE + TABLE_SIZE] = bytes(2) + np.uint32(old[-1] + 2).tobytes() + bytes(2)
    index[TABLE + 8 : TABLE + TABLE_SIZE] = distances.astype("<u4").tobytes()
    index[VTABLE + 2 : VTABLE + 4] = np.uint16(TABLE_SIZE + 8).tobytes()
    index[VTABLE + 4 + 22 : VTABLE + 4 + 24] = np.uint16(at - TABLE).tobytes()
    f.index = index


def unaligned_count(f: Forge) -> None:
    """Let the text pool lie behind all else, its count on an odd multiple of 2."""
    index = build_index(f.columns, f.digest_kind)
    pool, field = f.columns["text"].tobytes(), TABLE + 4 + 4
    index += bytes(2)
    index[field : field + 4] = np.uint32(len(index) - field).tobytes()
    index += np.uint32(len(pool)).tobytes() + pool
    f.index = index + bytes(-len(index) % 8)


def rank_of_65(f: Forge) -> None:
    f.set("tensors", "w", rank=65, dims=f.add("dims", [1] * 63 + [2, 3]))


def empty_payload(f: Forge) -> None:
    f.set("payloads", 0, nbytes=0)
    f.payload = bytearray()
    f.digest()


def overlapping(f: Forge) -> None:
    """Let the second payload start amid the first."""
    f.set("payloads", 1, offset=16)
    f.payload = f.payload[:48]
    f.digest()


def reaching_over_a_sibling(f: Forge) -> None:
    """Let the range of a module take in the next one, which says another parent."""
    f.set("modules", "a", end=4)


# Those of "alone" are refused on opening.
GROUPS = (
    broken.Group(number, [
        Case("R1", "both magics", both(magic=b"\x89ZCR\r\n\x1a\r"), ""),
        Case("R10", "index of 4 bytes more", longer_index, ""),
        Case("R11", "payloads on a multiple of 8", unaligned_payloads, ""),
        Case("R12", "bytes between index and trailer", apart_from_the_trailer, ""),
    ], "alone"),
    broken.Group(lambda: Forge(saved({}, alignment=16, metadata={"k": 1})), [
        Case("R19", "table on a multiple of 2", unaligned_table, ""),
        Case("R21", "field behind the table", shorter_table, ""),
        Case("R22", "field on a multiple of 2", unaligned_field, ""),
        Case("R22", "count on a multiple of 2", unaligned_count, ""),
    ], "alone"),
    broken.Group(floats, [Case("R4", "everything on multiples of 8", aligned_to_8, "")], "alone"),
    broken.Group(values(20), [
        Case("R13", "region no multiple of the alignment", lambda f: setattr(f, "payload", f.payload[:24]), ""),
    ], "alone"),
    broken.Group(floats, [Case("R47", "rank 65 with all its dims", rank_of_65, "")], "entry"),
    broken.Group(values(1), [Case("R56", "empty value", empty_payload, "")], "value"),
    broken.Group(values(32, 32), [Case("R58", "values that overlap", overlapping, "")], "value"),
    broken.Group(lambda: Forge(saved({"a": {"b": {}}, "c": {}})), [
        Case("R39", "range over a sibling", reaching_over_a_sibling, ""),
    ], "nested"),
    broken.Group(lambda: tricks.modules(40), [
        Case("R30", "type names by a byte", lambda f: f.use_up("modules", "type_name", 1), ""),
    ], "budget"),
)  # fmt: skip


def changed_bytes() -> Iterator[tuple[str, bytes]]:
    """Yield archives with a byte that is not zero in each kind of gap (R74), and the gap."""

    def changed(archive: Forge, at: int) -> bytes:
        data = bytearray(archive.seal())
        assert data[at] == 0
        data[at] = 1
        return bytes(data)

    def made(**options: Any) -> Forge:
        return Forge(saved({"w": np.ones(3, np.uint8)}, alignment=128), **options)

    index = len(build_index(made().columns, 1))
    yield "behind the index", changed(made(), 64 + index)
    yield "behind the payloads", changed(sequence(1), len(sequence(1).seal()) - 65)
    yield "behind the header", changed(made(front=False), 64)
    yield "before the index", changed(made(front=False), 255)
