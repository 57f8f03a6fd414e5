"""Destinations of a record: paths of every kind, file objects, pipes; the bytes are the same in all of them."""

from __future__ import annotations

import io
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord import SourceError

TREE = {"a": np.arange(300_000, dtype=np.int32), "m": {"b": np.ones((3, 5)), "c": "text"}, "d": np.arange(7)}
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX file systems")


def check(data: bytes) -> None:
    """Fail unless `data` is the archive of TREE, to the byte."""
    assert data == r.saved(TREE)
    r.assert_same(zcrecord.load_record(data, verify="full").tree(), TREE)


class Drain(threading.Thread):
    """Reads a file descriptor to its end, a little at a time."""

    def __init__(self, open_fd: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._open = open_fd
        self.data = b""
        self.start()

    def run(self) -> None:
        fd = self._open()
        while part := os.read(fd, 10_000):
            self.data += part
        os.close(fd)

    def result(self) -> bytes:
        self.join(30)
        assert not self.is_alive()
        return self.data


@pytest.mark.parametrize("kind", [str, Path])
def test_saves_to_a_path_of_any_class(kind: Any, tmp_path: Path) -> None:
    report = zcrecord.save_record(TREE, kind(tmp_path / "m.zcr"))
    check((tmp_path / "m.zcr").read_bytes())
    assert report.archive_bytes == (tmp_path / "m.zcr").stat().st_size
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.parametrize("save", [zcrecord.save_record, lambda tree, path: zcrecord.RecordWriter(path).__enter__()])
def test_a_path_as_bytes_is_refused_since_loading_would_take_it_for_an_archive(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = "a path as bytes, which load_record would take for an archive's own; pass it as text, by os.fsdecode"
    with pytest.raises(zcrecord.UnsupportedError, match=message):
        save(TREE, b"m.zcr")
    assert os.listdir(tmp_path) == []


def test_saves_to_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    zcrecord.save_record(TREE, "m.zcr")
    check((tmp_path / "m.zcr").read_bytes())


@pytest.mark.parametrize("name", ["ä" * 120, "a" * 255, " ", "名前.zcr", ".hidden", "-", "a\nb"], ids=ascii)
def test_saves_under_any_name_that_a_file_may_have(name: str, tmp_path: Path) -> None:
    zcrecord.save_record(TREE, tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    r.assert_same(zcrecord.load_record(tmp_path / name).tree(), TREE)


def test_saves_to_bytesio() -> None:
    file = io.BytesIO()
    zcrecord.save_record(TREE, file)
    check(file.getvalue())


@pytest.mark.parametrize("mode", ["wb", "w+b", "r+b", "ab", "xb"])
@pytest.mark.parametrize("buffering", [0, -1, 100])
def test_saves_to_a_file_object_of_any_mode(mode: str, buffering: int, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    if mode == "r+b":
        path.touch()
    with open(path, mode, buffering=buffering) as file:
        zcrecord.save_record(TREE, file)
        check(path.read_bytes())  # flushed, though still open


@pytest.mark.parametrize("mode", ["wb", "w+b"])
def test_saves_from_where_a_file_object_stands(mode: str, tmp_path: Path) -> None:
    with open(tmp_path / "m", mode) as file:
        file.write(b"before")
        zcrecord.save_record(TREE, file)
        file.write(b"after")
    data = (tmp_path / "m").read_bytes()
    assert data.startswith(b"before")
    assert data.endswith(b"after")
    check(data[6:-5])


def test_saves_after_what_bytesio_holds_and_leaves_what_lies_behind() -> None:
    file = io.BytesIO(b"before" + b"x" * 3_000_000)
    file.seek(6)
    report = zcrecord.save_record(TREE, file)
    data = file.getvalue()
    assert file.tell() == 6 + report.archive_bytes
    assert data[:6] + data[file.tell() :] == b"before" + b"x" * (3_000_000 - report.archive_bytes)
    check(data[6 : file.tell()])


class WriteOnly:
    """A file object with `write` alone, that takes at most `most` bytes a call, or says nothing of how many."""

    def __init__(self, most: int | None) -> None:
        self.data = bytearray()
        self._most = most

    def write(self, data: Any) -> int | None:
        part = bytes(data if self._most is None else data[: self._most])
        self.data += part
        return None if self._most is None else len(part)


@pytest.mark.parametrize("most", [None, 1 << 30, 1000, 4096, 65_537])
def test_saves_to_an_object_that_can_only_write(most: int | None) -> None:
    file = WriteOnly(most)
    zcrecord.save_record(TREE, file)
    check(bytes(file.data))


class Unseekable(io.BytesIO):
    """A stream, as `sys.stdout.buffer` to a pipe."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("seek")

    def tell(self) -> int:
        raise io.UnsupportedOperation("tell")


def test_saves_to_an_object_that_cannot_seek() -> None:
    file = Unseekable()
    zcrecord.save_record(TREE, file)
    check(file.getvalue())


@pytest.mark.parametrize("buffering", [0, -1])
def test_saves_to_a_pipe_and_loads_what_came_through(buffering: int) -> None:
    read, write = os.pipe()
    drain = Drain(lambda: read)
    with os.fdopen(write, "wb", buffering=buffering) as file:
        zcrecord.save_record(TREE, file)
    check(drain.result())


@POSIX
def test_saves_to_a_socket() -> None:
    ours, theirs = socket.socketpair()
    drain = Drain(theirs.detach)
    with ours, ours.makefile("wb", buffering=0) as file:
        zcrecord.save_record(TREE, file)
        ours.shutdown(socket.SHUT_WR)
    check(drain.result())


@POSIX
def test_saves_to_a_named_pipe_and_leaves_it_one(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    drain = Drain(lambda: os.open(path, os.O_RDONLY))
    zcrecord.save_record(TREE, path)
    check(drain.result())
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="platform: no /dev/fd")
def test_saves_to_a_pipe_by_the_name_of_its_descriptor() -> None:
    """As a shell's >(command), and /dev/stdout."""
    read, write = os.pipe()
    drain = Drain(lambda: read)
    zcrecord.save_record(TREE, f"/dev/fd/{write}")
    os.close(write)
    check(drain.result())


@POSIX
def test_saves_to_the_null_device_and_leaves_it_one() -> None:
    zcrecord.save_record(TREE, os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@POSIX
def test_symbolic_link_stays_a_link_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "target.zcr"
    target.write_bytes(b"old")
    (tmp_path / "link.zcr").symlink_to(target)
    zcrecord.save_record(TREE, tmp_path / "link.zcr")
    assert (tmp_path / "link.zcr").readlink() == target
    assert not target.is_symlink()
    check(target.read_bytes())
    assert os.listdir(tmp_path / "real") == ["target.zcr"]


@POSIX
def test_dangling_link_stays_a_link_and_gets_its_target(tmp_path: Path) -> None:
    (tmp_path / "link.zcr").symlink_to("target.zcr")
    zcrecord.save_record(TREE, tmp_path / "link.zcr")
    assert (tmp_path / "link.zcr").is_symlink()
    check((tmp_path / "target.zcr").read_bytes())


@POSIX
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o444])
def test_replaced_file_keeps_its_permission_bits(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(b"old")
    path.chmod(mode)
    zcrecord.save_record(TREE, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    check(path.read_bytes())


@POSIX
def test_nobody_can_open_the_scratch_file_who_could_not_open_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(b"old")
    path.chmod(0o600)
    modes = []
    opened = os.open

    def seen(name: Any, flags: int, *args: Any) -> int:
        fd = opened(name, flags, *args)
        if flags & os.O_CREAT:
            modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return fd

    monkeypatch.setattr(os, "open", seen)
    zcrecord.save_record(TREE, path, durable=False)
    assert set(modes) == {0o600}


@POSIX
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_new_file_gets_the_permission_bits_that_open_would_give(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        zcrecord.save_record(TREE, tmp_path / "m.zcr")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("m.zcr", "plain")}
    assert modes == {0o666 & ~umask}


@POSIX
def test_views_of_the_old_file_stay_as_they_were_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"w": np.arange(1000)}, path)
    old = zcrecord.load_record(path)
    view = old["w"]
    for i in range(3):
        zcrecord.save_record({"w": np.full(1000, i)}, path)
    assert view.tolist() == old["w"].tolist() == list(range(1000))
    assert (zcrecord.load_record(path)["w"] == 2).all()


@POSIX
def test_record_may_be_saved_over_the_file_it_was_loaded_from(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record(TREE, path)
    before = path.read_bytes()
    zcrecord.save_record(zcrecord.load_record(path).tree(), path)
    assert path.read_bytes() == before


def test_two_threads_may_save_to_one_path(tmp_path: Path) -> None:
    trees = [{"w": np.full(10_000, i)} for i in range(4)]
    threads = [threading.Thread(target=zcrecord.save_record, args=(t, tmp_path / "m.zcr")) for t in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = zcrecord.load_record(tmp_path / "m.zcr", verify="full")["w"]
    assert found.tolist() in [t["w"].tolist() for t in trees]
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.parametrize("dest", ["", ".", "folder", "folder/", "missing/"])
def test_refuses_a_folder(dest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SourceError, match="is a directory; name a file in it"):
        zcrecord.save_record(TREE, dest)
    assert os.listdir(tmp_path) == ["folder"]


def test_refuses_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"missing.m\.zcr: cannot write: No such file or directory") as caught:
        zcrecord.save_record(TREE, tmp_path / "missing" / "m.zcr")
    assert caught.value.errno == 2
    assert caught.value.path == str(tmp_path / "missing" / "m.zcr")
    assert os.listdir(tmp_path) == []


def test_refuses_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(SourceError, match="cannot write: Not a directory"):
        zcrecord.save_record(TREE, tmp_path / "file" / "m.zcr")
    assert (tmp_path / "file").read_bytes() == b"old"
