"""Loading copies nothing: every view lies in the source it was loaded from, at the offset that the index says."""

from __future__ import annotations

import array
import ctypes
import io
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
    """Return a file that holds the data."""
    (folder / "written").write_bytes(data)
    return folder / "written"


def mapped(data: bytes, folder: Path) -> mmap.mmap:
    """Return a mapping of a file that holds the data."""
    with open(written(data, folder), "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


SOURCES: dict[str, Callable[[bytes, Path], Any]] = {
    "bytes": lambda data, _: data,
    "bytearray": lambda data, _: bytearray(data),
    "memoryview": lambda data, _: memoryview(data),
    "slice of a memoryview": lambda data, _: memoryview(bytearray(b"x" * 64 + data + b"y"))[64:-1],
    "odd slice of a memoryview": lambda data, _: memoryview(b"xyz" + data)[3:],
    "two-dimensional memoryview": lambda data, _: memoryview(data).cast("B", (len(data) // 64, 64)),
    "mmap": mapped,
    "memoryview of a mmap": lambda data, folder: memoryview(mapped(data, folder)),
    "numpy uint8": lambda data, _: np.frombuffer(data, np.uint8).copy(),
    "numpy float64": lambda data, _: np.frombuffer(data, np.float64).reshape(-1, 4),
    "numpy bfloat16": lambda data, _: np.frombuffer(data, r.WHOLE[10].numpy),
    "numpy memmap": lambda data, folder: np.memmap(written(data, folder), np.uint8),
    "array": lambda data, _: array.array("Q", data),
    "ctypes": lambda data, _: ctypes.create_string_buffer(data, len(data)),
    "BytesIO": lambda data, _: io.BytesIO(data).getbuffer(),
}


def held_bytes(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the array that a loaded tensor or bytes attribute is a view through."""
    if isinstance(value, PackedTensor):
        return value.packed
    if isinstance(value, StringTensor):
        return value.data
    return np.frombuffer(value, np.uint8) if isinstance(value, memoryview) else value


def start_of(source: Any) -> int:
    """Return the address at which a source's bytes start."""
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


@pytest.mark.parametrize("kind", [str, Path])
def test_every_view_lies_in_the_mapping_of_its_file(kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record(TREE, path)
    rec = zcrecord.load_record(kind(path))
    starts = {r.address(held_bytes(v)) - rec.info(n).offset for n, v in rec.items() if n != "nothing"}
    assert len(starts) == 1, "views lie in one piece of memory, each at its own offset"
    start = starts.pop()
    assert ctypes.string_at(start, rec.archive_nbytes) == path.read_bytes()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("platform: only Linux lists what is mapped")
    lines = [line.split()[0] for line in maps.read_text(encoding="utf-8").splitlines() if line.endswith(str(path))]
    assert len(lines) == 1
    lo, hi = (int(end, 16) for end in lines[0].split("-"))
    assert lo <= start
    assert start + rec.archive_nbytes <= hi


@pytest.mark.parametrize("alignment", r.ALIGNMENTS)
def test_every_payload_lies_on_the_recorded_alignment_and_large_ones_on_a_page(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    tree = TREE | {"just below": np.zeros(LARGE - 1, np.uint8), "exactly": np.ones(LARGE, np.uint8)}
    zcrecord.save_record(tree, path, alignment=alignment)
    assert 1 << path.read_bytes()[9] == alignment
    rec = zcrecord.load_record(path)
    for name in rec:
        info = rec.info(name)
        if info.nbytes:
            want = max(alignment, 16384) if name in ("large", "exactly") else alignment
            assert info.offset % want == 0, name
            assert info.alignment >= want, name
            assert info.alignment == min(info.offset & -info.offset, 65536), name
            assert r.address(held_bytes(rec[name])) % min(want, mmap.PAGESIZE) == 0, name


@pytest.mark.parametrize("name", SOURCES)
def test_views_are_read_only_whatever_the_source(name: str, tmp_path: Path) -> None:
    rec = zcrecord.load_record(SOURCES[name](r.saved(TREE), tmp_path))
    for view in [held_bytes(v) for v in (*rec.values(), *map(rec.get, rec))]:
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
    assert rec.raw("float32").readonly
    assert rec.attributes["blob"].readonly


def test_a_change_of_the_source_shows_because_nothing_was_copied() -> None:
    data = bytearray(r.saved({"x": np.zeros(4, np.uint8)}))
    rec = zcrecord.load_record(data)
    view = rec["x"]
    data[rec.info("x").offset] = 7
    assert view.tolist() == [7, 0, 0, 0]


@pytest.mark.parametrize(("before", "after"), [(b"", b"behind" * 99), (b"", b"x"), (b"", b"")])
def test_prefix_is_loaded_from_a_base_address_alone(before: bytes, after: bytes) -> None:
    source = memoryview(r.saved(TREE) + after)
    rec = zcrecord.load_record(source, embedded="prefix")
    assert r.address(rec["int32"]) == start_of(source) + rec.info("int32").offset
    r.assert_same(rec.tree(), TREE)


@pytest.mark.parametrize("before", [b"", b"x", b"executable" * 999, bytes(4096)], ids=len)
@pytest.mark.parametrize("from_path", [True, False])
def test_suffix_is_loaded_from_the_end_of_a_file(before: bytes, from_path: bool, tmp_path: Path) -> None:
    data = before + r.saved(TREE)
    (tmp_path / "program").write_bytes(data)
    rec = zcrecord.load_record(tmp_path / "program" if from_path else data, embedded="suffix")
    r.assert_same(rec.tree(), TREE)
    for name in ("int32", "large"):
        offset = rec.info(name).offset
        assert data[offset : offset + rec.info(name).nbytes] == rec[name].tobytes()


@pytest.mark.parametrize("embedded", ["prefix", "suffix"])
def test_archive_inside_a_memoryview_slice_needs_no_copy(embedded: Any) -> None:
    data = r.saved(TREE)
    memory = memoryview(b"head" * 16 + data + b"tail" * 16)
    source = memory[64:] if embedded == "prefix" else memory[:-64]
    rec = zcrecord.load_record(source, embedded=embedded)
    view = rec["float64"]
    assert start_of(memory) + 64 <= r.address(view) <= start_of(memory) + 64 + len(data)
    r.assert_same(view, TREE["float64"])
