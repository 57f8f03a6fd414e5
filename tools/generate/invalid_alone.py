"""Invalid archives that break one rule and no other, for rules of which each case of the tests breaks several.

A reader that lacks the check for such a rule, or has it one too far, accepts these. They were found by taking the
checks of readers away one by one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from attacks import broken, tricks
from forge import NONE, Forge, build_index
from malformed import Case, saved, sequence
from malformed_header import both
from malformed_index import count, number

from zcrecord import StringTensor

TABLE, TABLE_SIZE, VTABLE = 40, 52, 8  # where `build_index` lays them


def one() -> Forge:
    """Return a record of one number, without payloads."""
    return Forge(saved({"n": 1}, alignment=16))


def values(*sizes: int) -> Callable[[], Forge]:
    """Return a function that makes a record of values of bytes, w0, w1, ... of these sizes."""
    return lambda: Forge(saved({f"w{i}": bytes([i]) * size for i, size in enumerate(sizes)}, alignment=16))


def tensor(value: Any) -> Callable[[], Forge]:
    """Return a function that makes a record of one tensor, w."""
    return lambda: Forge(saved({"w": value}, alignment=16))


def three(**options: Any) -> Callable[[], Forge]:
    """Return a function that makes a record of three tensors, a, b and c, whose payloads of 16 bytes have no gaps."""
    return lambda: Forge(saved({name: np.full(16, ord(name), np.uint8) for name in "abc"}, alignment=16), **options)


floats = tensor(np.arange(6, dtype=np.float32).reshape(2, 3))


def aligned_to_8(f: Forge) -> None:
    f.alignment_log2 = f.base_log2 = 3
    f.payload = f.payload[:24]


def base_below(f: Forge) -> None:
    """Let the alignment be 32 and the base alignment 16, the payloads behind the index on a multiple of 32."""
    index = build_index(f.columns, f.digest_kind)
    f.alignment_log2, f.index = 5, index + bytes(-len(index) % 32)


def longer_index(f: Forge) -> None:
    f.index = build_index(f.columns, f.digest_kind) + bytes(4)


def unaligned_payloads(f: Forge) -> None:
    """Let the payloads start on a multiple of 8 that is none of 16."""
    index = build_index(f.columns, f.digest_kind)
    f.index = index + bytes(8 if len(index) % 16 == 0 else 0)
    f.base_log2 = 3
    f.ends["base_alignment_log2"] = 4


def gap_of_the_base_alignment(f: Forge) -> None:
    """Put 16 zeros between an index that ends on a multiple of 16 and the payloads."""
    index = build_index(f.columns, f.digest_kind)
    f.index, f.widen = index + bytes(-len(index) % 16), 16


def wrapping(offset: int, nbytes: int, region: int) -> Callable[[Forge], None]:
    """Return a change that gives the only payload another place, and the region of payloads another size."""

    def change(f: Forge) -> None:
        f.set("payloads", 0, offset=offset, nbytes=nbytes)
        del f.payload[region:]

    return change


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


def unaligned_field(by: int) -> Callable[[Forge], None]:
    """Return a change that makes the root table 8 bytes longer, and puts the field of metadata there, `by` bytes in."""

    def change(f: Forge) -> None:
        index = build_index(f.columns, f.digest_kind)
        old = np.frombuffer(bytes(index), "<u4", 11, TABLE + 8)
        distances = np.where(old, old + 8, 0)
        distances[-1] = 0
        more = bytes(by) + np.uint32(old[-1] + 4 - by).tobytes()
        index[TABLE + TABLE_SIZE : TABLE + TABLE_SIZE] = more + bytes(8 - len(more))
        index[TABLE + 8 : TABLE + TABLE_SIZE] = distances.astype("<u4").tobytes()
        index[VTABLE + 2 : VTABLE + 4] = np.uint16(TABLE_SIZE + 8).tobytes()
        index[VTABLE + 4 + 22 : VTABLE + 4 + 24] = np.uint16(TABLE_SIZE + by).tobytes()
        f.index = index

    return change


def unaligned_count(by: int) -> Callable[[Forge], None]:
    """Return a change that lets the text pool lie behind all else, its count `by` from a multiple of 8."""

    def change(f: Forge) -> None:
        index = build_index(f.columns, f.digest_kind)
        pool, field = f.columns["text"].tobytes(), TABLE + 4 + 4
        index += bytes(by)
        index[field : field + 4] = np.uint32(len(index) - field).tobytes()
        index += np.uint32(len(pool)).tobytes() + pool
        f.index = index + bytes(-len(index) % 8)

    return change


def unaligned_field_and_count(by: int) -> Callable[[Forge], None]:
    """Return a change that puts field and count of the text pool `by` bytes behind a multiple of 4."""

    def change(f: Forge) -> None:
        index = build_index(f.columns, f.digest_kind)
        pool, at = f.columns["text"].tobytes(), TABLE + TABLE_SIZE + by
        old = np.frombuffer(bytes(index), "<u4", 11, TABLE + 8)
        index[TABLE + 8 : TABLE + TABLE_SIZE] = np.where(old, old + 8, 0).astype("<u4").tobytes()
        index[TABLE + TABLE_SIZE : TABLE + TABLE_SIZE] = bytes(8)
        index[VTABLE + 2 : VTABLE + 4] = np.uint16(TABLE_SIZE + 8).tobytes()
        index[VTABLE + 4 + 2 : VTABLE + 4 + 4] = np.uint16(at - TABLE).tobytes()
        index += bytes(by)
        index[at : at + 4] = np.uint32(len(index) - at).tobytes()
        index += np.uint32(len(pool)).tobytes() + pool
        f.index = index + bytes(-len(index) % 8)

    return change


def count_at_the_end(f: Forge) -> None:
    """Let the count of metadata be the four zeros behind the index."""
    index = build_index(f.columns, f.digest_kind)
    index += bytes(8 if len(index) % 16 == 0 else 0)
    field = TABLE + 4 + 4 * 11
    index[field : field + 4] = np.uint32(len(index) - field).tobytes()
    f.index = index


def vtable_behind(size: int = 28, zeros: int = 4) -> Callable[[Forge], None]:
    """Return a change that moves the vtable of 28 bytes behind zeros at the end of the index, and says its size."""

    def change(f: Forge) -> None:
        index = build_index(f.columns, f.digest_kind)
        vtable = np.uint16(size).tobytes() + index[VTABLE + 2 : VTABLE + 28]
        index += bytes(zeros)
        index[TABLE : TABLE + 4] = np.int32(TABLE - len(index)).tobytes()
        index += vtable
        f.index = index + bytes(-len(index) % 8)

    return change


def table_to_the_end(over: int = 0) -> Callable[[Forge], None]:
    """Return a change that lets the root table end where the index does, or so many bytes behind it."""

    def change(f: Forge) -> None:
        index = build_index(f.columns, f.digest_kind)
        index[VTABLE + 2 : VTABLE + 4] = np.uint16(len(index) - TABLE + over).tobytes()
        f.index = index

    return change


def two_outside(first: int) -> Callable[[Forge], None]:
    """Return a change that moves the payloads of a and b, side by side, and leaves that of c alone in the region.

    R58 and R59 compare payloads with each other: of b, nothing but R56 is broken.
    """

    def change(f: Forge) -> None:
        f.columns["payloads"]["offset"] = (first, first + 16, 0)
        f.payload = f.payload[32:]

    return change


def a_byte_outside(f: Forge) -> None:
    """Let the payload of b begin where that of c does, and end a byte behind the region."""
    f.columns["payloads"]["offset"][2] = 16
    f.set("payloads", 1, nbytes=17).set("tensors", "b", dims=f.add("dims", [17]))
    del f.payload[32:]


def beyond_the_tensors(f: Forge) -> None:
    """Let by_name have the number of a tensor that lies, as it should be, behind those that count."""
    f.add("tensors", f.columns["tensors"])
    f.columns["by_name"][0] = 1
    count("tensors", 1)(f)


def beyond_the_payloads(f: Forge) -> None:
    """Let w name a payload that lies, as it should be, behind those that count."""
    f.add("payloads", f.columns["payloads"])
    f.set("tensors", "w", payload=1)
    count("payloads", 1)(f)


def beyond_in_by_module(f: Forge) -> None:
    """Let by_module have the number of a tensor that lies, as it should be, behind those that count."""
    f.add("tensors", f.columns["tensors"])
    f.columns["by_module"] = np.array([1])
    count("tensors", 1)(f)


def value_beyond_the_payloads(f: Forge) -> None:
    """Let the second value name a payload that lies, as it should be, behind those that count."""
    f.set("payloads", 1, offset=0, digest=f.get("payloads", 0, "digest"))
    del f.payload[16:]
    count("payloads", 1)(f)


def typed(dtype: int, bits: int, *dims: int) -> Callable[[Forge], None]:
    """Return a change of the type of w, and of its shape."""

    def change(f: Forge) -> None:
        f.set("tensors", "w", dtype=dtype, bits=bits, rank=len(dims), dims=f.add("dims", dims))

    return change


def twenty_bytes(f: Forge) -> None:
    """Let the payload of an empty string be 20 zeros, of which its table is the last 16."""
    f.set("payloads", 0, nbytes=20)
    f.payload += bytes(-len(f.payload) % 32)
    f.digest()


def eight_short(f: Forge) -> None:
    """Let eight zeros before the table be no string's."""
    f.payload[16] = 0
    f.digest()


def begins_with_nul(vector: str, key: str, field: str = "name") -> Callable[[Forge], None]:
    """Return a change that gives a row a name of a NUL and a letter."""

    def change(f: Forge) -> None:
        row = f.row(vector, key)
        f.rename(vector, row, b"\0x", field)
        if vector in ("tensors", "modules") and field == "name":
            f.set(vector, row, key_size=2)

    return change


def rank_of_65(f: Forge) -> None:
    f.set("tensors", "w", rank=65, dims=f.add("dims", [1] * 63 + [2, 3]))


def empty_payload(f: Forge) -> None:
    f.set("payloads", 0, nbytes=0)
    f.payload = bytearray()
    f.digest()


def empty_before_another(f: Forge) -> None:
    """Let the first of two payloads have no bytes."""
    f.set("payloads", 0, nbytes=0).set("payloads", 1, offset=0)
    del f.payload[:16]
    f.digest()


def empty_behind_another(f: Forge) -> None:
    """Let the second of two payloads have no bytes."""
    f.set("payloads", 1, nbytes=0)
    del f.payload[16:]
    f.digest()


def overlapping(f: Forge) -> None:
    """Let the second payload start amid the first."""
    f.set("payloads", 1, offset=16)
    f.payload = f.payload[:48]
    f.digest()


def reaching_over_a_sibling(f: Forge) -> None:
    """Let the range of a module take in the next one, which says another parent."""
    f.set("modules", "a", end=4)


def reaching_over_an_uncle(f: Forge) -> None:
    """Let the ranges of a module and of its parent take in the parent's next sibling."""
    f.set("modules", "p", end=5).set("modules", "p.a", end=5)


def beyond_the_modules(f: Forge) -> None:
    """Let the last attribute be in a module that lies, as it should be, behind those that count."""
    f.add("modules", f.columns["modules"][1:])
    f.set("attributes", "k", parent=2)
    count("modules", 2)(f)


def type_of_the_record(start: int | None) -> Callable[[Forge], None]:
    """Return a change that gives module 0 a type name as long as a catalogue's, at `start`, or that without its NUL.

    A reader that knows catalogues compares the name on opening, at level `touch` before any rule of it is checked.
    """

    def change(f: Forge) -> None:
        at = f.text(b"zcr:catalogues")[0] if start is None else start
        f.set("modules", 0, type_name=at, type_name_size=len("zcr:catalogue"))

    return change


def key_that_wraps(f: Forge) -> None:
    """Let the key be so long that it, a dot and the parent's name take the bytes of the name, modulo 2^32."""
    f.rename("modules", "abc.x", b"x").set("modules", "x", key_size=2**32 - 3)


# Those of "alone" are refused on opening.
GROUPS = (
    broken.Group(one, [
        Case("R1", "both magics", both(magic=b"\x89ZCR\r\n\x1a\r"), ""),
        Case("R5", "base below alignment", base_below, ""),
        Case("R10", "index of 4 bytes more", longer_index, ""),
        Case("R11", "payloads on a multiple of 8", unaligned_payloads, ""),
        Case("R12", "gap of the base alignment", gap_of_the_base_alignment, ""),
        Case("R12", "bytes between index and trailer", apart_from_the_trailer, ""),
    ], "alone"),
    broken.Group(lambda: Forge(saved({}, alignment=16, metadata={"k": 1})), [
        Case("R19", "table on a multiple of 2", unaligned_table, ""),
        Case("R20", "vtable at an odd place", vtable_behind(zeros=1), ""),
        Case("R20", "vtable of odd size", vtable_behind(29), ""),
        Case("R20", "vtable 2 bytes past the end", vtable_behind(30), ""),
        Case("R20", "table a byte past the end", table_to_the_end(1), ""),
        Case("R21", "digest_kind inside the table's head", number(VTABLE + 4, 3, "<u2"), ""),
        Case("R21", "field behind the table", shorter_table, ""),
        Case("R22", "field on a multiple of 2", unaligned_field(2), ""),
        Case("R22", "field at an odd place", unaligned_field(1), ""),
        Case("R22", "count on a multiple of 2", unaligned_count(2), ""),
        Case("R22", "count at an odd place", unaligned_count(1), ""),
        Case("R22", "field and count on a multiple of 2", unaligned_field_and_count(2), ""),
        Case("R22", "field and count at an odd place", unaligned_field_and_count(1), ""),
        Case("R22", "count behind the index", count_at_the_end, ""),
    ], "alone"),
    broken.Group(floats, [
        Case("R4", "everything on multiples of 8", aligned_to_8, ""),
        Case("R13", "end that wraps", wrapping(2**64 - 16, 40, 32), ""),
        Case("R13", "end that wraps when it is rounded up", wrapping(2**64 - 16, 8, 0), ""),
    ], "alone"),
    broken.Group(values(20), [
        Case("R13", "region no multiple of the alignment", lambda f: setattr(f, "payload", f.payload[:24]), ""),
    ], "alone"),
    broken.Group(floats, [
        Case("R32", "by_name one beyond the tensors", beyond_the_tensors, ""),
        Case("R42", "by_module one beyond the tensors", beyond_in_by_module, ""),
        Case("R46", "float32 of 64 bits that are there", typed(18, 64, 3), ""),
        Case("R46", "float32 of 8 bits that are there", typed(18, 8, 24), ""),
        Case("R28", "pool that ends inside a character", lambda f: f.text(b"\xc3", nul=False), ""),
        Case("R50", "payload one beyond the payloads", beyond_the_payloads, ""),
        Case("R47", "rank 65 with all its dims", rank_of_65, ""),
    ], "entry"),
    broken.Group(tensor(np.ones(17, np.uint8)), [
        Case("R46", "unknown dtype of 129 bits that are there", typed(99, 129, 1), ""),
        Case("R46", "unknown dtype of 136 bits", typed(99, 136, 1), ""),
        Case("R46", "uint8 of 4 bits that are there", typed(2, 4, 34), ""),
    ], "entry"),
    broken.Group(tensor(np.ones(0, np.uint8)), [
        Case("R46", "unknown dtype of 0 bits and no elements", typed(99, 0, 0), ""),
        Case("R51", "byte_offset of an empty tensor", lambda f: f.set("tensors", "w", byte_offset=8), ""),
    ], "entry"),
    broken.Group(tensor(StringTensor.from_strings([""])), [
        Case("R71", "strings in 20 bytes", twenty_bytes, ""),
    ], "entry"),
    broken.Group(tensor(StringTensor.from_strings(["\0" * 8])), [
        Case("R71", "last end 8 short over zeros", eight_short, ""),
    ], "contents"),
    broken.Group(three(), [
        Case("R56", "two past the archive", two_outside(2**20), "", tensor="b"),
        Case("R56", "two in the trailer", two_outside(16), "", tensor="b"),
        Case("R56", "two at 2^64", two_outside(2**64 - 32), "", tensor="b"),
        Case("R56", "a byte past the region", a_byte_outside, "", tensor="b"),
    ], "outside"),
    broken.Group(three(front=False), [
        Case("R56", "two in the index", two_outside(16), "", tensor="b"),
        Case("R56", "a byte of the index", a_byte_outside, "", tensor="b"),
    ], "outside"),
    broken.Group(lambda: Forge(saved({"w": np.ones(1, np.uint8), "m": {}, "n": 1}, metadata={"k": 1}, alignment=16)), [
        Case("R29", "tensor", begins_with_nul("tensors", "w"), ""),
        Case("R29", "module", begins_with_nul("modules", "m"), ""),
        Case("R29", "attribute", begins_with_nul("attributes", "n"), ""),
        Case("R29", "metadata", begins_with_nul("metadata", "k"), ""),
        Case("R29", "type name", begins_with_nul("modules", "m", "type_name"), ""),
    ], "begins_with_nul"),
    broken.Group(values(1), [Case("R56", "empty value", empty_payload, "")], "value"),
    broken.Group(lambda: Forge(saved({"a.b": np.ones(1, np.uint8), "a": {"c": np.zeros(1, np.uint8)}}, alignment=16)), [
        Case("R32", "one name in two modules", lambda f: f.rename("tensors", "a.c", b"a.b"), "", tensor="a.b"),
    ], "nested"),
    broken.Group(values(16, 16), [
        Case("R68", "payload one beyond the payloads", value_beyond_the_payloads, ""),
        Case("R56", "empty value before another", empty_before_another, ""),
        Case("R56", "empty value behind another", empty_behind_another, ""),
    ], "value"),
    broken.Group(values(32, 32), [Case("R58", "values that overlap", overlapping, "")], "value"),
    broken.Group(lambda: Forge(saved({"a": {}}, alignment=16)), [
        Case("R33", "key of a byte more", lambda f: f.set("modules", "a", key_size=2), ""),
        Case("R38", "leaf ends at itself", lambda f: f.set("modules", "a", end=1), ""),
    ], "nested"),
    broken.Group(lambda: Forge(saved({"abc": {"x": {}}}, alignment=16)), [
        Case("R33", "key that wraps", key_that_wraps, ""),
    ], "nested"),
    broken.Group(lambda: Forge(saved({"p": {"a": {"b": {}}}, "c": {}}, alignment=16)), [
        Case("R39", "range over an uncle", reaching_over_an_uncle, ""),
    ], "nested"),
    broken.Group(lambda: Forge(saved({"a": {"b": {}}, "c": {}})), [
        Case("R39", "range over a sibling", reaching_over_a_sibling, ""),
    ], "nested"),
    broken.Group(lambda: Forge(saved({"w": np.ones(1, np.uint8), "m": {"k": 1}}, alignment=16)), [
        Case("R64", "last parent one beyond the modules", lambda f: f.set("attributes", "k", parent=2), ""),
        Case("R64", "last parent NONE", lambda f: f.set("attributes", "k", parent=NONE), ""),
        Case("R64", "last parent behind those that count", beyond_the_modules, ""),
    ], "attribute"),
    broken.Group(floats, [
        Case("R27", "type of the record past the pool", type_of_the_record(10**6), ""),
        Case("R27", "type of the record wraps", type_of_the_record(2**32 - 8), ""),
        Case("R27", "type of the record without its NUL", type_of_the_record(None), ""),
    ], "module"),
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
