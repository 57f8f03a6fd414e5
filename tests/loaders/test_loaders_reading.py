"""Positioned reads bring every byte straight to its place, neighbours together, and fail with one typed error."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import records as r
from exhaustive import rounds

import zcrecord
from zcrecord import SourceError, load_record
from zcrecord.loaders import load_into
from zcrecord.loaders import pread as loader
from zcrecord.loaders.pread import ReadingLoader
from zcrecord.storage import files

SMALL = {f"s{i:03}": np.full(40, i, np.int16) for i in range(300)}
BIG = np.arange(5 << 18, dtype=np.uint32)
POSIX = pytest.mark.skipif(not hasattr(os, "preadv"), reason="platform: only POSIX reads several buffers by position")
Read = tuple[int, list[Any]]  # offset and buffers


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    zcrecord.save_record({**SMALL, "big": BIG, "z": np.ones(3)}, tmp_path / "m.zcr", durable=False)
    return tmp_path / "m.zcr"


@pytest.fixture()
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Every read."""
    found: list[Read] = []
    real = os.preadv

    def noted(fd: int, buffers: Any, offset: int) -> int:
        found.append((offset, [*buffers]))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return found


@POSIX
def test_neighbours_come_with_one_read_large_ones_in_several_and_no_others(path: Path, reads: list[Read]) -> None:
    def sizes() -> list[int]:
        found = sorted(sum(map(len, buffers)) for _, buffers in reads)
        reads.clear()
        return found

    record = load_record(path)
    small = load_into(record, "read", "s*")
    assert len(sizes()) == 1, "300 tensors side by side"
    big = load_into(record, "read", "big")
    assert sizes() == [1 << 20, 2 << 20, 2 << 20]
    r.assert_same({**small, **big}, dict(record.select(["s*", "big"])))
    load_into(record, "read", "big", slices={"big": slice(1000, 2000)})
    assert reads[0][0] == record.info("big").offset + 4000
    assert sizes() == [4000]
    load_into(record, "read", ["s000", "z"])
    assert sizes() == [24, 80], "bytes far apart are not read along"


@POSIX
@pytest.mark.parametrize("load", [
    lambda path: load_record(path, mmap=False),
    lambda path: load_into(load_record(path), "read"),
    lambda path: load_into(load_record(path), "read", slices={"w": slice(300, 700)}),
], ids=["mmap=False", "whole", "box"])  # fmt: skip
def test_no_two_reads_fill_one_huge_page(load: Callable[[Path], object], reads: list[Read], tmp_path: Path) -> None:
    """Each would clear all of it. A box may begin anywhere in a block: then reads meet within 64 bytes of a page."""
    zcrecord.save_record({"v": np.ones(10), "w": np.ones((800, 16448), np.uint8)}, tmp_path / "m.zcr", durable=False)
    load(tmp_path / "m.zcr")
    ranges = [(r.address(np.frombuffer(buffer, np.uint8)), len(buffer)) for _, (buffer,) in reads if len(buffer) > 128]
    pages = [page for at, n in ranges for page in range(at + 63 >> 21, (at + n - 64 >> 21) + 1)]
    assert len(pages) == len(set(pages)) > 2


@POSIX
def test_bytes_are_read_straight_into_the_callers_memory(path: Path, reads: list[Read]) -> None:
    room = np.zeros(5 << 18, np.uint32)

    def elsewhere() -> bool:
        return not all(np.shares_memory(np.frombuffer(b, np.uint8), room) for _, buffers in reads for b in buffers)

    load_into(load_record(path), "read", "big", dst={"big": room})
    assert reads and not elsewhere()
    assert room.tobytes() == BIG.tobytes()
    load_into(load_record(path), "read", "big")
    assert elsewhere(), "this test would not notice"


def test_mapping_is_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("zcrecord.loaders.protocol.PayloadRef.read_into")
    record = load_record(path)
    r.assert_same(load_into(record, "read"), dict(record))


@hypothesis.given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    chosen=st.sets(st.integers(0, 11)),
    most=st.integers(1, 900),
    gap=st.integers(0, 400),
    step=st.integers(1, 500),
)
@hypothesis.settings(max_examples=rounds(60), deadline=None)
def test_whatever_the_pieces_every_byte_arrives(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chosen: set[int], most: int, gap: int, step: int
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "m.zcr"
    tree = {f"t{i}": np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)}
    zcrecord.save_record(tree, path, durable=False)
    part = load_record(path).select([name for i, name in enumerate(tree) if i in chosen])
    real: Any = getattr(os, "preadv", None)

    def short(fd: int, buffers: Any, offset: int) -> Any:
        return real(fd, [buffers[0][:step]], offset)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"READ_PIECE": most, "_GAP": gap}.items():
            patch.setattr(loader, name, value)
        if real is not None:
            patch.setattr(os, "preadv", short)
            r.assert_same(load_into(part, "read"), dict(part))
            patch.delattr(os, "preadv")
        r.assert_same(load_into(part, "read"), dict(part))


# Failures.


def failing(record: Any, message: str, error: type[Exception] = SourceError, **options: Any) -> None:
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    threads = threading.active_count()
    with pytest.raises(error, match=message):
        load_into(record, "read", **options)
    assert threading.active_count() == threads, "nobody reads on"
    assert not files or len(os.listdir("/proc/self/fd")) <= files


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize(
    "harm, kind, message",
    [
        (replaced, SourceError, "was replaced or changed since it was opened; load it again"),
        (lambda path: (path.unlink(), path.touch()), SourceError, "was replaced or changed since it was opened"),
        (lambda path: os.utime(path, ns=(1, 1)), SourceError, "was replaced or changed since it was opened"),
        (Path.unlink, zcrecord.SourceNotFoundError, "no such file"),
    ],
    ids=["replaced", "replaced by nothing", "edited", "gone"],
)
def test_file_that_is_another_one_or_gone_is_refused(
    harm: Callable[[Path], None], kind: type[Exception], message: str, path: Path
) -> None:
    record = load_record(path)
    harm(path)
    failing(record, rf"m\.zcr: {message}", kind)


@pytest.mark.parametrize("preadv", [True, False])
def test_file_that_shrinks_while_it_is_read_is_refused(
    preadv: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = load_record(path)
    opened = files.open_regular

    def shrinking(*arguments: Any) -> Any:
        file = opened(*arguments)
        os.truncate(path, 10_000)
        return file

    monkeypatch.setattr("zcrecord.storage.memory.open_regular", shrinking)
    if not preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    failing(record, r"m\.zcr: became shorter while it was read: it ends at byte 10000; is it still")


def test_file_that_changes_while_it_is_read_is_refused(path: Path) -> None:
    def change(*_: Any) -> None:
        os.utime(path, ns=(1, 1))

    failing(load_record(path), r"m\.zcr: was changed while it was read; load it again", progress=change)


@POSIX
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.EIO, "io"), SourceError, r"m\.zcr: cannot be read: Input/output error"),
        (MemoryError("none left"), MemoryError, "none left"),
    ],
    ids=["io", "memory"],
)
def test_error_of_any_read_ends_them_all(
    error: Exception, raised: type[Exception], message: str, after: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, real, left, lock = load_record(path), os.preadv, [after], threading.Lock()

    def broken(fd: int, buffers: Any, offset: int) -> int:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise error
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    failing(record, message, raised)


def test_finish_without_begin_is_an_error() -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=r"begin\(plan\) comes first"):
        ReadingLoader().finish()
