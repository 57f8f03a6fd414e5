"""Positioned reads bring every byte straight to its place, neighbours together, and fail with one typed error."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from exhaustive import rounds

import zcrecord
from zcrecord import Record, SourceError, load_record
from zcrecord.loaders import load_into, plan_load
from zcrecord.loaders import pread as loader
from zcrecord.loaders.pread import ReadingLoader
from zcrecord.storage import files
from zcrecord.storage.memory import Piece, read_at

SMALL = {f"s{i:03}": np.full(40, i, np.int16) for i in range(300)}
BIG = np.arange(3 << 18, dtype=np.uint32)
POSIX = pytest.mark.skipif(not hasattr(os, "preadv"), reason="platform: only POSIX reads several buffers by position")


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    zcrecord.save_record({**SMALL, "big": BIG, "z": np.ones(3)}, tmp_path / "m.zcr", durable=False)
    return tmp_path / "m.zcr"


@pytest.fixture()
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The offset and size of every read."""
    found: list[tuple[int, int]] = []
    real = os.preadv

    def noted(fd: int, buffers: Any, offset: int) -> int:
        found.append((offset, sum(map(len, buffers))))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return found


def assert_same(found: dict[str, Any], record: Record) -> None:
    assert list(found) == list(record)
    assert all(found[name].tobytes() == record[name].tobytes() for name in record)


@POSIX
def test_neighbours_come_with_one_read_and_large_ones_in_several(path: Path, reads: list[tuple[int, int]]) -> None:
    record = load_record(path)
    small = load_into(record, "read", "s*")
    assert len(reads) == 1, "300 tensors side by side"
    reads.clear()
    big = load_into(record, "read", "big")
    assert sorted(size for _, size in reads) == [1 << 20] * 3
    assert_same({**small, **big}, record.select(["s*", "big"]))


@POSIX
def test_only_what_is_asked_for_is_read(path: Path, reads: list[tuple[int, int]]) -> None:
    record = load_record(path)
    load_into(record, "read", "big", slices={"big": slice(1000, 2000)})
    assert reads == [(record.info("big").offset + 4000, 4000)]
    reads.clear()
    load_into(record, "read", ["s000", "z"])
    assert sorted(size for _, size in reads) == [24, 80], "what is far apart is not read along"


@POSIX
def test_bytes_are_read_straight_into_the_callers_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = np.zeros(3 << 18, np.uint32)
    first, real = room.__array_interface__["data"][0], os.preadv
    strange: list[int] = []

    def noted(fd: int, buffers: Any, offset: int) -> int:
        addresses = [np.frombuffer(b, np.uint8).__array_interface__["data"][0] for b in buffers]
        strange.extend(a for a in addresses if not first <= a < first + room.nbytes)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    load_into(load_record(path), "read", "big", dst={"big": room})
    assert not strange
    assert room.tobytes() == BIG.tobytes()
    load_into(load_record(path), "read", "big")
    assert strange, "this test would not notice"


def test_mapping_is_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: Any) -> None:
        raise AssertionError("copied out of the mapping")

    monkeypatch.setattr("zcrecord.loaders.protocol.PayloadRef.read_into", touched)
    record = load_record(path)
    assert_same(load_into(record, "read"), record)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    chosen=st.sets(st.integers(0, 11)),
    most=st.integers(1, 900),
    gap=st.integers(0, 400),
    step=st.integers(1, 500),
)
@hypothesis.settings(max_examples=rounds(60), deadline=None)
def test_whatever_the_pieces_every_byte_arrives(
    sizes: list[int], chosen: set[int], most: int, gap: int, step: int
) -> None:
    tree = {f"t{i}": np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)}
    names = [name for i, name in enumerate(tree) if i in chosen]
    real: Any = getattr(os, "preadv", None)

    def short(fd: int, buffers: Any, offset: int) -> Any:
        return real(fd, [*buffers[:1], *buffers[1:3]] if len(buffers[0]) < step else [buffers[0][:step]], offset)

    with pytest.MonkeyPatch.context() as patch:
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"zcr-{os.getpid()}-pieces"
        zcrecord.save_record(tree, folder, durable=False)
        patch.setattr(loader, "_READ", most)
        patch.setattr(loader, "_GAP", gap)
        patch.setattr(loader, "_BUFFERS", 5)
        try:
            record = load_record(folder)
            if real is not None:
                patch.setattr(os, "preadv", short)
                assert_same(load_into(record, "read", names), record.select(names))
                patch.delattr(os, "preadv")
            assert_same(load_into(record, "read", names), record.select(names))
        finally:
            folder.unlink()


# What goes wrong.


def failing(path: Path, message: str, error: type[Exception] = SourceError, **options: Any) -> None:
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    threads = threading.active_count()
    with pytest.raises(error, match=message):
        load_into(options.pop("record"), "read", **options)
    assert threading.active_count() == threads, "nobody reads on"
    assert not files or len(os.listdir("/proc/self/fd")) <= files


def test_file_that_was_replaced_is_refused(path: Path) -> None:
    record = load_record(path)
    (path.parent / "new").write_bytes(path.read_bytes())
    os.replace(path.parent / "new", path)
    failing(path, r"m\.zcr: was replaced or changed since it was opened; load it again", record=record)


def test_file_that_was_edited_or_is_gone_is_refused(path: Path) -> None:
    record = load_record(path)
    os.utime(path, ns=(1, 1))
    failing(path, r"m\.zcr: was replaced or changed since it was opened", record=record)
    path.unlink()
    failing(path, r"m\.zcr: no such file", zcrecord.SourceNotFoundError, record=record)


@pytest.mark.parametrize("preadv", [True, False])
def test_file_that_shrinks_while_it_is_read_is_refused(
    preadv: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = load_record(path)
    opened = files.open_regular

    def shrinking(*arguments: Any) -> Any:
        found = opened(*arguments)
        os.truncate(path, 1 << 20)
        return found

    monkeypatch.setattr("zcrecord.storage.memory.open_regular", shrinking)
    if not preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    failing(path, r"m\.zcr: became shorter while it was read: it ends at byte 1048576; is it still", record=record)


def test_file_that_changes_while_it_is_read_is_refused(path: Path) -> None:
    record = load_record(path)

    def change(*_: Any) -> None:
        os.utime(path, ns=(1, 1))

    failing(path, r"m\.zcr: was changed while it was read; load it again", record=record, progress=change)


@POSIX
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.EIO, "io"), SourceError, r"m\.zcr: cannot be read: Input/output error"),
        (OSError(errno.ESTALE, "stale"), SourceError, r"m\.zcr: cannot be read: Stale file handle"),
        (MemoryError("none left"), MemoryError, "none left"),
    ],
    ids=["io", "stale", "memory"],
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
    failing(path, message, raised, record=record)


def test_everything_is_read_where_no_thread_is_to_be_had(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refusing)
    record, told = load_record(path), []
    assert_same(load_into(record, "read", progress=lambda done, _: told.append(done)), record)
    assert told[-1] == plan_load(record).nbytes


def test_finish_without_begin_is_an_error() -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=r"begin\(plan\) comes first"):
        ReadingLoader().finish()


# The one reader by position that everything uses.


@pytest.mark.parametrize("preadv", [True, False])
def test_read_at_brings_all_of_it_or_says_where_the_file_ends(
    preadv: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    data = os.urandom(1000)
    (tmp_path / "f").write_bytes(data)
    with open(tmp_path / "f", "rb", buffering=0) as file:
        room = bytearray(500)
        read_at(file.fileno(), memoryview(room), 300)
        assert room == data[300:800]
        with pytest.raises(SourceError, match="became shorter while it was read: it ends at byte 1000") as caught:
            read_at(file.fileno(), memoryview(room), 700)
        assert caught.value.offset == 1000


def test_piece_of_a_remote_archive_is_one_request_however_many_places_it_goes_to(path: Path) -> None:
    data, asked = path.read_bytes(), []

    class Far:
        def readinto_at(self, offset: int, target: memoryview) -> None:
            asked.append((offset, len(target)))
            target[:] = data[offset : offset + len(target)]

    rooms = [bytearray(10), bytearray(20)]
    loader._fetch((Far(), Piece(64, [memoryview(room) for room in rooms])))
    loader._fetch((Far(), Piece(0, [memoryview(rooms[0])])))
    assert asked == [(64, 30), (0, 10)]
    assert [bytes(room) for room in rooms] == [data[:10], data[74:94]]
