"""Every limit of FORMAT.md's table, from both sides: what lies on it is written and read, one more is refused by both.

A limit of the writer's is shown by `save_record`, a reader's by an archive that another program could have written.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pytest
import records as r
import specification
import zstandard
from forge import Forge, build_index
from malformed import LEVELS
from records import nested

import zcrecord
from zcrecord import FormatError, LimitError, PackedTensor, Record, RecordError
from zcrecord.archive.archive import Verify
from zcrecord.codec import entries

ONE = np.ones(4, np.uint8)


def changed(field: str, value: int) -> bytes:
    f = Forge(r.saved({"w": ONE}))
    f.ends[field] = value
    return f.seal()


def shaped(*dims: int, **fields: int) -> bytes:
    f = Forge(r.saved({"w": np.zeros((0,), np.uint8)}))
    f.set("tensors", 0, dims=f.add("dims", dims), rank=len(dims), **fields)
    return f.seal()


def strided(stride: int) -> bytes:
    f = Forge(r.saved({"w": ONE[:1]}))
    f.set("tensors", 0, strides=f.add("strides", [stride]))
    return f.seal()


def deep(depth: int) -> bytes:
    """Return an archive of modules each in the one before it."""
    f = Forge(r.saved({"m": {"n": 1}}))
    rows = np.repeat(f.columns["modules"][1:], depth)
    rows["parent"][1:] = np.arange(depth - 1)
    rows["end"], rows["place"], rows["first_attribute"] = depth, 0, 0
    rows[0] = f.columns["modules"][0]
    rows["end"][0] = depth
    for i in range(1, depth):
        rows["name"][i], rows["name_size"][i] = f.text(".".join("m" * i).encode())
    f.columns["modules"] = rows
    f.columns["attributes"]["parent"] = depth - 1
    return f.seal()


def texts(over: int) -> bytes:
    """Return an archive whose names, texts and lists take 16 times the index of their pools, and `over` bytes."""
    return Forge(r.saved({f"k{i:02}": "x" for i in range(50)})).use_up("attributes", "value", over).seal()


def lists(over: int) -> bytes:
    """Return the same of lists, and `over` items."""
    f = Forge(r.saved({f"k{i:02}": [1] for i in range(50)}))
    rows, start = f.columns["attributes"], f.add("words", [1] * 2000)
    rows["value"] = start
    each, rest = divmod(f.budget_left() // 16 + over, len(rows))
    rows["value"] |= (each + (np.arange(len(rows)) < rest)).astype("<u8") << np.uint64(32)
    return f.seal()


def views(size: int, count: int = 80, payload: int = 1 << 16) -> bytes:
    """Return an archive whose different views take `size` bytes more than 64 times its index and payload."""
    f = Forge(r.saved({f"t{i:02}": np.zeros(payload, np.uint8) for i in range(count)}))
    f.columns["payloads"] = f.columns["payloads"][:1]
    rows = f.columns["tensors"]
    rows["payload"], rows["byte_offset"], rows["strides"] = 0, np.arange(count), f.add("strides", [1])
    rows["dims"] = f.add("dims", [0] * count) + np.arange(count)
    left = 64 * (len(build_index(f.columns, f.digest_kind)) + payload) + size
    rooms = payload - np.arange(count)
    last = int(np.searchsorted(np.cumsum(rooms), left))
    f.columns["dims"][-count:] = rooms
    f.columns["dims"][rows["dims"][last]] = left - rooms[:last].sum()
    rows["dims"][last:], rows["byte_offset"][last:] = rows["dims"][last], last  # those left are the last one again
    return f.seal()


def digested(data: bytes) -> None:
    zcrecord.load_record(data).content_digest()


class Limit(NamedTuple):
    """A limit of the table, and what lies on it and beyond."""

    constant: str
    message: str
    writes: Callable[[], Any] | None = None
    refuses: Callable[[], Any] | None = None
    reads: Callable[[], Any] | None = None
    denies: Callable[[], Any] | None = None
    error: type[RecordError] = LimitError


def saving(record: Any, **options: Any) -> Callable[[], Any]:
    return lambda: zcrecord.load_record(r.saved(record, **options), verify="full")


def loading(
    make: Callable[..., bytes], *arguments: Any, by: Callable[[bytes], Any] = zcrecord.load_record
) -> Callable[[], Any]:
    return lambda: by(make(*arguments))


FAR = 1 << 56
TAKES = "names, texts and lists take [0-9]+ bytes of their pools, at most"
CLAIMS = r"claims more than 2\^56 bytes"
EMPTY = np.zeros((FAR, 0), np.uint8), np.zeros((FAR + 1, 0), np.uint8)
RANK = PackedTensor(np.zeros(1, np.uint8), "uint4", (1,) * 64), PackedTensor(np.zeros(1, np.uint8), "uint4", (1,) * 65)
LIMITS = [
    Limit("MAX_RANK", "rank 65 is more than 64", saving({"w": RANK[0]}), saving({"w": RANK[1]}),
          loading(shaped, *[0] * 64), loading(shaped, *[0] * 65)),
    Limit("MAX_DEPTH", "nested more than 100 deep", saving(nested(100)), saving(nested(101)),
          loading(deep, 100), loading(deep, 101)),
    Limit("MAX_ARCHIVE_SIZE", CLAIMS, saving({"w": EMPTY[0]}), saving({"w": EMPTY[1]}),
          loading(shaped, FAR, 0), loading(shaped, FAR + 1, 0)),
    Limit("MAX_ARCHIVE_SIZE", "strides reach outside its payload", None, None,
          loading(strided, FAR), loading(strided, FAR + 1), FormatError),
    Limit("MAX_ARCHIVE_SIZE", "strides reach outside its payload", None, None,
          loading(strided, -FAR), loading(strided, -FAR - 1), FormatError),
    Limit("MIN_ALIGNMENT", "alignment", saving({"w": ONE}, alignment=16), saving({"w": ONE}, alignment=8),
          loading(lambda: r.saved({"w": ONE}, alignment=16)), loading(changed, "alignment_log2", 3), RecordError),
    Limit("MAX_ALIGNMENT", "alignment", saving({"w": ONE}, alignment=65536), saving({"w": ONE}, alignment=131072),
          loading(lambda: r.saved({"w": ONE}, alignment=65536)), loading(changed, "base_alignment_log2", 17),
          RecordError),
    Limit("INDEX_ALLOWANCE", TAKES, saving({f"k{i}": "x" * 999 for i in range(999)}), None,
          loading(texts, 0), loading(texts, 1)),
    Limit("INDEX_ALLOWANCE", TAKES, saving({f"k{i}": [7] * 64 for i in range(999)}), None,
          loading(lists, 0), loading(lists, 1)),
    Limit("DIGEST_ALLOWANCE", "add up to more than 64 times index and payloads", None, None,
          loading(views, 0, by=digested), loading(views, 1, by=digested)),
]  # fmt: skip

# Constants of the table that are no limits, or whose edges no file of a test's size reaches, and what holds them.
ELSEWHERE = {
    "HEADER_SIZE": "test_malformed_index",
    "MAX_INDEX_SIZE": "test_an_index_ends_at_2_gib_for_writer_and_reader",
    **dict.fromkeys(("ALIGNMENT", "LARGE_PAYLOAD", "LARGE_ALIGNMENT"), "test_writers"),
    **dict.fromkeys(("ATTACHED_SIZE", "ATTACHED_ALIGNMENT"), "test_attach"),
    "NONE": "test_malformed_tensors",
}


def test_every_limit_of_the_table_is_shown_from_both_sides() -> None:
    constants = {row["constant"] for row in specification.table("Limits")}
    assert constants == {limit.constant for limit in LIMITS} | set(ELSEWHERE)
    for name in {limit.constant for limit in LIMITS}:
        shown = [limit for limit in LIMITS if limit.constant == name]
        assert any(limit.reads for limit in shown) and any(limit.denies for limit in shown), name
    files = {path.stem for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert not [name for name in ELSEWHERE.values() if name not in files and name not in globals()]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.constant)
def test_what_lies_on_a_limit_is_written_and_read(limit: Limit) -> None:
    for call in (limit.writes, limit.reads):
        if call:
            call()


@pytest.mark.parametrize("limit", [x for x in LIMITS if x.refuses or x.denies], ids=lambda limit: limit.constant)
def test_what_lies_beyond_a_limit_is_refused_by_both_sides(limit: Limit) -> None:
    for call in (limit.refuses, limit.denies):
        if call:
            with pytest.raises(limit.error, match=limit.message):
                call()


# What load_record's documentation names, and messages.
DOCUMENTED: dict[str, tuple[bytes, str]] = {
    "R9": (changed("archive_size", FAR + 1), r"archive_size 72057594037927937 is more than 2\^56"),
    "R30": (texts(1), TAKES),
    "R31": (lists(1), TAKES),
    "R40": (deep(101), "nested more than 100 deep"),
    "R47": (shaped(*[0] * 65), "'w': rank 65 is more than 64"),
    "R49": (shaped(FAR + 1, 0), f"'w': its shape {CLAIMS}"),
}


def door(wrap: Callable[[bytes], Any] = bytes, **options: Any) -> Callable[[Path, Verify], Record]:
    return lambda path, level: zcrecord.load_record(wrap(path.read_bytes()), verify=level, **options)


def by_url(path: Path, level: Verify) -> Record:
    with fsspec.open("memory://limits.zcr", "wb") as file:
        file.write(path.read_bytes())
    return zcrecord.load_record("memory://limits.zcr", verify=level, cache=False)


DOORS: dict[str, Callable[[Path, Verify], Record]] = {
    "path": lambda path, level: zcrecord.load_record(path, verify=level),
    "file object": door(io.BytesIO),
    "private copy": door(mode="c"),
    "behind other bytes": door(lambda data: bytes(64) + data, embedded="suffix"),
    "packed": door(zstandard.compress),
    "URL": by_url,
}


@pytest.mark.parametrize("rule", DOCUMENTED)
@pytest.mark.parametrize("level", LEVELS)
def test_limits_that_load_record_documents_are_limit_errors_at_every_level_and_door(
    rule: str, level: Verify, tmp_path: Path
) -> None:
    """R9, R30, R31, R40, R47, R49."""
    data, message = DOCUMENTED[rule]
    assert rule == "R31" or re.search(rf"LimitError: [^:]*\b{rule}\b", zcrecord.load_record.__doc__ or "")
    path = tmp_path / "m.zcr"
    path.write_bytes(data)
    for load in DOORS.values():
        with pytest.raises(LimitError, match=message):
            record = load(path, level)  # at level "touch" it may open
            _ = record["w"] if rule in ("R47", "R49") else record.modules


def test_an_index_ends_at_2_gib_for_writer_and_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match=r"index_size 2147483648"):
        zcrecord.load_record(changed("index_size", 1 << 31))
    with pytest.raises(FormatError, match=r"^(?!.*index_size)"):
        zcrecord.load_record(changed("index_size", (1 << 31) - 8))
    monkeypatch.setattr(entries, "MAX_INDEX_SIZE", 1 << 16)
    with pytest.raises(LimitError, match="split the record"):
        zcrecord.save_record({"t": "x" * (1 << 16)}, io.BytesIO())
    zcrecord.save_record({"t": "x" * (1 << 15)}, io.BytesIO())
