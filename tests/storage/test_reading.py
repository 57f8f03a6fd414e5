"""`mmap=False` reads every byte or raises one typed error; `prefetch` advises what is chosen.

Several readers work at a time, so what fails in one ends them all.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
from exhaustive import rounds
from hypothesis import strategies as st

import zcrecord
from zcrecord import Record, SourceError, UnsupportedError, load_record
from zcrecord.storage import memory as reading
from zcrecord.storage.threads import Going, map_ordered, run_threads

MIB = 1 << 20
TREE: dict[str, Any] = {
    "a": np.ones(64), "b": np.ones(64), "deep": [np.arange(40.0), np.arange(24).reshape(4, 6)[:, 1:3]],
    "big": np.zeros(MIB // 8), "twin": np.zeros(MIB // 8), "s": np.array(["x", "yz"]), "blob": b"blob", "n": 5,
}  # fmt: skip
ARCHIVE = r.saved(TREE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "m.zcr").write_bytes(ARCHIVE)
    return tmp_path / "m.zcr"


def sized(path: Path, nbytes: int) -> bytes:
    """Write an archive with one payload of `nbytes` random bytes; return the file's."""
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    zcrecord.save_record({"w": data}, path, durable=False)
    return path.read_bytes()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 65536, 8 * MIB - 500, 8 * MIB, 20 * MIB + 12345])
def test_plain_read_has_every_byte_at_an_aligned_address(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    data = sized(path, nbytes)
    for mode in ("r", "c"):
        rec = load_record(path, mode=mode, mmap=False, verify="full")
        octets = np.frombuffer(rec.archive.buffer, np.uint8)
        assert octets.tobytes() == data
        assert r.address(octets) % 65536 == 0
        assert nbytes == 0 or r.address(rec["w"]) == r.address(octets) + rec.info("w").offset


@hypothesis.given(nbytes=st.integers(0, 5000), piece=st.integers(1, 999), most=st.integers(1, 1500))
@hypothesis.settings(max_examples=rounds(50), deadline=None)
def test_plain_read_of_any_size_is_put_together_from_pieces_of_any_size(nbytes: int, piece: int, most: int) -> None:
    read = os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        return read(fd, [buffers[0][:most]], offset)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.zcr"
        data = sized(path, nbytes)
        patch.setattr(reading, "READ_PIECE", piece)
        patch.setattr(os, "preadv", short)
        assert bytes(load_record(path, mmap=False, verify="full").archive.buffer) == data
        patch.delattr(os, "preadv")  # as on Windows
        assert bytes(load_record(path, mmap=False, verify="full").archive.buffer) == data


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[int]:
    """Have files read in pieces of 64 KiB; returns the offsets at which reads were asked for."""
    monkeypatch.setattr(reading, "READ_PIECE", 65536)
    read, offsets = os.preadv, []

    def noted(fd: int, buffers: Any, offset: int) -> int:
        offsets.append(offset)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return offsets


@pytest.mark.parametrize("preadv", [True, False])
def test_file_that_shrinks_is_an_error(preadv: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "READ_PIECE", 65536)
    opened = reading._open_archive_file

    def shrinking(path: str, *more: Any) -> Any:
        result = opened(path, *more)
        os.truncate(path, 100_000)
        return result

    monkeypatch.setattr(reading, "_open_archive_file", shrinking)
    if not preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    files = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    message = r"m\.zcr: became shorter while it was read: it ends at byte \d+; is it still being written\?"
    with pytest.raises(SourceError, match=message):
        load_record(path, mmap=False)
    assert not files or len(os.listdir("/proc/self/fd")) == len(files)


def test_file_that_shrinks_after_a_plain_read_harms_nobody(path: Path) -> None:
    rec = load_record(path, mmap=False)
    os.truncate(path, 0)
    r.assert_same(rec.tree(), TREE)


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.EIO, "io"), SourceError, r"m\.zcr: cannot be read: Input/output error"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (MemoryError("none left"), MemoryError, "none left"),
    ],
    ids=["io", "interrupt", "memory"],
)
@pytest.mark.parametrize("after", [0, 5])
def test_error_of_any_reader_ends_the_read(
    after: int, error: BaseException, raised: type[BaseException], message: str, path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(reading, "READ_PIECE", 65536)
    read, left, lock = os.preadv, [after], threading.Lock()

    def failing(fd: int, buffers: Any, offset: int) -> int:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise error
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    threads = threading.active_count()
    with pytest.raises(raised, match=message):
        load_record(path, mmap=False)
    assert threading.active_count() == threads, "nobody reads on"


@pytest.mark.parametrize("most", [0, 1, 3])
def test_plain_read_does_with_the_threads_that_are_to_be_had(
    most: int, pieces: list[int], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, [most]

    def refusing(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    r.assert_same(load_record(path, mmap=False, verify="full").tree(), TREE)
    assert len(pieces) == len(set(pieces)) == math.ceil(path.stat().st_size / 65536)


def test_plain_read_refuses_what_mapping_refuses(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(50))
    (tmp_path / "folder").mkdir()
    for name in ("short", "folder", "missing"):
        errors = []
        for mapped in (True, False):
            with pytest.raises(zcrecord.RecordError) as caught:
                load_record(tmp_path / name, mmap=mapped)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges of mappings, start and end, that the system was advised about from now on."""
    ranges = []

    class Noting(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
            super().madvise(option, start, length or 0)
            if option == mmap.MADV_WILLNEED:
                ranges.append((start, start + (length or 0)))

    if hasattr(mmap.mmap, "madvise"):
        monkeypatch.setattr(mmap, "mmap", Noting)
    return ranges


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="platform: nothing to advise")
@pytest.mark.parametrize("embedded", [None, "suffix"])
@pytest.mark.parametrize("mode", ["r", "c"])
def test_prefetch_advises_little(mode: Any, embedded: Any, advised: list[tuple[int, int]], tmp_path: Path) -> None:
    tree = {"m": {f"w{i}": np.full(40_000 * (i + 1), i) for i in range(8)}, "small": [np.arange(i) for i in range(9)]}
    data = r.saved(tree)
    (tmp_path / "m.zcr").write_bytes(bytes(4096) + data if embedded else data)
    rec = load_record(tmp_path / "m.zcr", mode=mode, embedded=embedded)
    parts: list[tuple[Record, Any]] = [
        (rec, None), (rec, "m.w3"), (rec, ["m.w1", "m.w5", "small"]), (rec.module("m"), None),
        (rec.module("m"), "w3"), (rec.select("m").module("m"), ["w0", "w7"]),
    ]  # fmt: skip
    for part, names in parts:
        advised.clear()
        part.prefetch(names)
        chosen = part if names is None else part.select(names)
        wanted = [(info.offset, info.offset + info.nbytes) for info in chosen.infos() if info.nbytes]
        assert advised, names
        for start, end in wanted:
            assert any(lo <= start and end <= hi for lo, hi in advised), names
        spare = sum(hi - lo for lo, hi in advised) - sum(end - start for start, end in wanted)
        assert spare < len(wanted) * 2 * mmap.PAGESIZE + 65536 * len(advised), names
        assert all(0 <= lo < hi <= len(data) + 4096 for lo, hi in advised)


def test_prefetch_of_what_is_in_memory_does_nothing(advised: list[tuple[int, int]], path: Path) -> None:
    for rec in (load_record(ARCHIVE), load_record(path, mmap=False), load_record(ARCHIVE, mode="c")):
        rec.prefetch()
        rec.module("deep").prefetch()
    assert not advised
    load_record(path, verify="touch").prefetch(["a", "deep"])
    r.round_trip({}).prefetch()


def test_prefetch_refuses_names_that_are_not_there(path: Path) -> None:
    rec = load_record(path)
    with pytest.raises(zcrecord.TensorNotFoundError, match="'twin3': not in this record; close names: 'twin'"):
        rec.prefetch(["a", "twin3"])
    rec.close()
    with pytest.raises(UnsupportedError, match="the record is closed"):
        rec.prefetch()


# Work that threads share.


def test_no_further_item_is_begun_after_an_error() -> None:
    begun: list[int] = []

    def work(item: int, _: Going) -> None:
        begun.append(item)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        run_threads(work, range(1000), 1)
    assert begun == [0]


def test_few_items_are_taken_ahead_of_those_that_are_used() -> None:
    accepted: list[int] = []
    items = (accepted.append(i) or i for i in range(100))  # type: ignore[func-returns-value]
    answers = map_ordered(lambda: lambda item: item, items, 2)
    assert next(answers) == 0 and len(accepted) <= 5
    answers.close()
