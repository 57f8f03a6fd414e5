"""Loading copies nothing: every view lies in the source it was loaded from, at the offset that the index says."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord import PackedTensor, StringTensor

LARGE = 1 << 20
TREE = {
    **{d.name: r.filled(d, (3, 5)) for d in r.NUMERIC},
    "large": np.arange(LARGE // 8),
    "f_order": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "rank0": np.array(1.5),
    "strings": np.array(["a", "bc"]),
    "nothing": np.zeros((0, 3)),
    "blob": b"attribute",
    "m": {"blobs": [b"x", b"yz"]},
}


def written(data: bytes, folder: Path) -> Path:
    (folder / "written").write_bytes(data)
    return folder / "written"


def mapped(data: bytes, folder: Path) -> mmap.mmap:
    with open(written(data, folder), "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


SOURCES: dict[str, Callable[[bytes, Path], Any]] = {
    "bytes": lambda data, _: data,
    "bytearray": lambda data, _: bytearray(data),
    "memoryview": lambda data, _: memoryview(data),
    "slice of a memoryview": lambda data, _: memoryview(bytearray(b"x" * 64 + data + b"y"))[64:-1],
    "odd slice of a memoryview": lambda data, _: memoryview(b"xyz" + data)[3:],
    "mmap": mapped,
    "numpy uint8": lambda data, _: np.frombuffer(data, np.uint8).copy(),
    "numpy bfloat16": lambda data, _: np.frombuffer(data, r.WHOLE[10].numpy),
    "numpy memmap": lambda data, folder: np.memmap(written(data, folder), np.uint8),
    "array": lambda data, _: array.array("Q", data),
    "ctypes": lambda data, _: ctypes.create_string_buffer(data, len(data)),
}


def held_bytes(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(value, PackedTensor):
        return value.packed
    if isinstance(value, StringTensor):
        return value.data
    return np.frombuffer(value, np.uint8) if isinstance(value, memoryview) else value


def start_of(source: Any) -> int:
    return r.address(source if isinstance(source, np.ndarray) else np.frombuffer(source, np.uint8))


@pytest.mark.parametrize("verify", ["touch", "index", "full"])
@pytest.mark.parametrize("name", SOURCES)
def test_every_view_lies_in_its_source_where_info_says(name: str, verify: Any, tmp_path: Path) -> None:
    data = r.saved(TREE)
    source = SOURCES[name](data, tmp_path)
    start = start_of(source)
    rec = zcrecord.load_record(source, verify=verify)
    for key, value in rec.items():
        info = rec.info(key)
        if not info.nbytes:
            continue
        assert r.address(held_bytes(value)) == start + info.offset, key
        assert held_bytes(rec[key]).nbytes == info.nbytes, key
    for blob in (rec.attributes["blob"], *rec.attributes["m.blobs"]):
        assert 0 < r.address(held_bytes(blob)) - start < len(data) - 64
    r.assert_same(rec.tree(), TREE)


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("mode", ["r", "c"])
def test_views_made_for_many_are_those_made_for_one(mode: Any, part: bool, tmp_path: Path) -> None:
    base, same = np.arange(24.0).reshape(4, 6), np.ones(9)
    tree = TREE | {"base": base, "cols": base[:, 1:3], "back": base[::-1, ::-2].T, "one": same, "equal": same.copy()}
    rec = zcrecord.load_record(written(r.saved(tree), tmp_path), mode=mode, names="*" if part else None)
    ones = [rec.archive.view(i) for i in range(len(rec))]
    for many in ([rec[name] for name in list(rec) * 3][-len(rec) :], list(rec.values())):
        for name, one, other in zip(rec, map(held_bytes, ones), map(held_bytes, many), strict=True):
            assert one is not other, name
            assert (one.shape, one.strides, one.dtype) == (other.shape, other.strides, other.dtype), name
            assert one.flags.writeable == other.flags.writeable, name
            assert r.address(one) == r.address(other) or not one.size, name


def test_every_view_lies_in_the_mapping_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record(TREE, path)
    rec = zcrecord.load_record(path)
    (start,) = {r.address(held_bytes(v)) - rec.info(n).offset for n, v in rec.items() if n != "nothing"}
    assert ctypes.string_at(start, rec.archive_nbytes) == path.read_bytes()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("platform: only Linux lists what is mapped")
    (line,) = (line for line in maps.read_text(encoding="utf-8").splitlines() if line.endswith(str(path)))
    lo, hi = (int(end, 16) for end in line.split()[0].split("-"))
    assert lo <= start and start + rec.archive_nbytes <= hi


@pytest.mark.parametrize("name", SOURCES)
def test_views_are_read_only_whatever_the_source(name: str, tmp_path: Path) -> None:
    rec = zcrecord.load_record(SOURCES[name](r.saved(TREE), tmp_path))
    for view in [held_bytes(v) for v in (*rec.values(), *map(rec.get, rec))]:
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    assert rec.raw("float32").readonly
    assert rec.attributes["blob"].readonly


@pytest.mark.parametrize("others", [b"", b"x", b"executable" * 999, bytes(4096)], ids=len)
@pytest.mark.parametrize("embedded", ["prefix", "suffix"])
def test_archive_among_other_bytes_is_loaded_without_a_copy(others: bytes, embedded: Any, tmp_path: Path) -> None:
    data = r.saved(TREE) + others if embedded == "prefix" else others + r.saved(TREE)
    (tmp_path / "program").write_bytes(data)
    for source in (tmp_path / "program", memoryview(b"head" * 16 + data)[64:]):
        rec = zcrecord.load_record(source, embedded=embedded)
        r.assert_same(rec.tree(), TREE)
        for name in ("int32", "large"):
            info = rec.info(name)
            assert data[info.offset : info.offset + info.nbytes] == rec[name].tobytes()
    assert r.address(rec["int32"]) == start_of(source) + rec.info("int32").offset
