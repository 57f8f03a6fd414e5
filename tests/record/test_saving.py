"""Destinations of a record: paths of every kind, file objects, pipes; the bytes are the same in all of them."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import itertools
import os
import random
import re
import socket
import stat
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import records as r
from records import ONE, nested

import zcrecord
from zcrecord import LimitError, NameCollisionError, RecordError, SourceError, UnsupportedError

TREE = {"a": np.arange(300_000, dtype=np.int32), "m": {"b": np.ones((3, 5)), "c": "text"}, "d": np.arange(7)}
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX file systems")


def check(data: bytes) -> None:
    """Fail unless `data` is the archive of TREE, to the byte."""
    assert data == r.saved(TREE)
    r.assert_same(zcrecord.load_record(data, verify="full").tree(), TREE)


class Drain(threading.Thread):
    """Reads a file descriptor to its end, a little at a time."""

    data = b""

    def __init__(self, open_fd: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._open = open_fd
        self.start()

    def run(self) -> None:
        with open(self._open(), "rb", buffering=0) as file:
            while part := file.read(10_000):
                self.data += part

    def check(self) -> None:
        self.join(30)
        assert not self.is_alive()
        check(self.data)


@pytest.mark.parametrize("kind", [str, Path])
def test_saves_to_a_path_of_any_class(kind: Any, tmp_path: Path) -> None:
    report = zcrecord.save_record(TREE, kind(tmp_path / "m.zcr"))
    check((tmp_path / "m.zcr").read_bytes())
    assert report.archive_bytes == (tmp_path / "m.zcr").stat().st_size
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.parametrize("save", [zcrecord.save_record, lambda tree, path: zcrecord.RecordWriter(path).__enter__()])
def test_a_path_as_bytes_is_refused(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = "a path as bytes, which load_record would take for an archive's bytes; pass it as text, by os.fsdecode"
    with pytest.raises(zcrecord.UnsupportedError, match=message):
        save(TREE, b"m.zcr")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["ä" * 120, "a" * 255, " ", "名前.zcr", ".hidden", "-", "a\nb"], ids=ascii)
def test_saves_under_any_name_that_a_file_may_have(name: str, tmp_path: Path) -> None:
    zcrecord.save_record(TREE, tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    r.assert_same(zcrecord.load_record(tmp_path / name).tree(), TREE)


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
    assert data.startswith(b"before") and data.endswith(b"after")
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
    """A file object with `write` alone, that takes at most `most` bytes a call, or does not tell how many."""

    def __init__(self, most: int | None) -> None:
        self.data = bytearray()
        self._most = most

    def write(self, data: Any) -> int | None:
        part = bytes(data[: self._most])
        self.data += part
        return None if self._most is None else len(part)


@pytest.mark.parametrize("most", [None, 1 << 30, 1000])
def test_saves_to_an_object_that_can_only_write(most: int | None) -> None:
    file = WriteOnly(most)
    zcrecord.save_record(TREE, file)
    check(bytes(file.data))


@POSIX
@pytest.mark.parametrize("kind", ["buffered", "raw", "socket"])
def test_saves_to_a_pipe_or_socket(kind: str) -> None:
    if kind == "socket":
        ours, theirs = socket.socketpair()
        read, write = theirs.detach(), ours.detach()
    else:
        read, write = os.pipe()
    drain = Drain(lambda: read)
    with os.fdopen(write, "wb", buffering=-1 if kind == "buffered" else 0) as file:
        zcrecord.save_record(TREE, file)
    drain.check()


@POSIX
def test_saves_to_a_named_pipe_and_leaves_it_one(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    drain = Drain(lambda: os.open(path, os.O_RDONLY))
    zcrecord.save_record(TREE, path)
    drain.check()
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


@POSIX
@pytest.mark.parametrize("dangling", [False, True])
def test_symbolic_link_stays_a_link_and_its_target_is_replaced(dangling: bool, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "target.zcr"
    if not dangling:
        target.write_bytes(b"old")
    (tmp_path / "link.zcr").symlink_to(target)
    zcrecord.save_record(TREE, tmp_path / "link.zcr")
    assert (tmp_path / "link.zcr").readlink() == target and not target.is_symlink()
    check(target.read_bytes())
    assert os.listdir(tmp_path / "real") == ["target.zcr"]


@POSIX
def test_the_scratch_file_is_as_private_as_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes, opened = tmp_path / "m.zcr", set(), os.open
    path.write_bytes(b"old")
    path.chmod(0o600)

    def noted(name: Any, flags: int, *args: Any) -> int:
        fd = opened(name, flags, *args)
        if flags & os.O_CREAT:
            modes.add(stat.S_IMODE(os.fstat(fd).st_mode))
        return fd

    monkeypatch.setattr(os, "open", noted)
    zcrecord.save_record(TREE, path, durable=False)
    assert modes == {0o600}


@POSIX
def test_a_new_file_does_not_run_as_its_saver_though_the_old_one_did_as_its_owner(tmp_path: Path) -> None:
    (tmp_path / "m.zcr").write_bytes(b"somebody's")
    (tmp_path / "m.zcr").chmod(0o6755)
    zcrecord.save_record(TREE, tmp_path / "m.zcr", durable=False)
    assert stat.S_IMODE((tmp_path / "m.zcr").stat().st_mode) == 0o755


@POSIX
def test_the_old_mode_is_given_to_no_file_by_a_link_in_place_of_the_scratch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, private, opened = tmp_path / "m.zcr", tmp_path / "private", os.open
    path.write_bytes(b"old")
    path.chmod(0o666)
    private.write_bytes(b"key")
    private.chmod(0o600)

    def swapped(name: Any, flags: int, *args: Any) -> int:
        fd = opened(name, flags, *args)
        if flags & os.O_CREAT:
            (tmp_path / "link").symlink_to(private)
            os.replace(tmp_path / "link", name)
        return fd

    monkeypatch.setattr(os, "open", swapped)
    with contextlib.suppress(SourceError):  # no file of ours is left
        zcrecord.save_record(TREE, path, durable=False)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


@POSIX
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_new_file_gets_the_permission_bits_that_open_would_give(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        zcrecord.save_record(TREE, tmp_path / "m.zcr")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("m.zcr", "plain")}
    assert modes == {0o666 & ~umask}


# Failures.


LITTLE = {"a": np.arange(300_000), "f": np.arange(200_000).reshape(2, -1)[:, ::2], "b": np.ones(5), "c": "text"}


def failing(call: Any, after: int, error: BaseException) -> Any:
    """Return a system call that works `after` times and raises then."""
    calls = itertools.count()

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= after:
            raise error
        return call(*args, **kwargs)

    return replacement


@POSIX
def test_pipe_that_would_block_is_an_error_and_no_truncated_success() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(read, "rb"), open(write, "wb", buffering=0) as file, pytest.raises(OSError, match="block"):
        zcrecord.save_record(LITTLE, file)


def test_file_object_that_takes_nothing_is_an_error_and_no_endless_loop() -> None:
    class Nothing:
        calls = 0

        def write(self, _: Any) -> int:
            self.calls += 1
            assert self.calls < 100, "save_record would go on for ever"
            return 0

    with pytest.raises(OSError, match=r"the file object accepted 0 of \d+ bytes"):
        zcrecord.save_record(LITTLE, Nothing())


@POSIX
@pytest.mark.parametrize(("durable", "calls"), [(True, ["fsync", "replace", "fsync"]), (False, ["replace"])])
def test_durable_save_syncs_the_file_then_renames_it_then_syncs_the_folder(
    durable: bool, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noted(name: str, call: Callable[..., Any], *args: Any) -> None:
        made.append(name)
        call(*args)

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, partial(noted, name, getattr(os, name)))
    zcrecord.save_record(LITTLE, tmp_path / "m.zcr", durable=durable)
    assert made == calls
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(LITTLE)


def test_folder_without_sync_undoes_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(os.fsync, 1, OSError(errno.EINVAL, "no fsync of folders here")))
    zcrecord.save_record(LITTLE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(LITTLE)


@POSIX
def test_folder_that_nobody_lists_undoes_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may have the right to put files into a folder, but not to list it."""
    (tmp_path / "m.zcr").write_bytes(b"old")
    monkeypatch.setattr(os, "open", failing(os.open, 1, PermissionError(errno.EACCES, "may not be listed")))
    zcrecord.save_record(LITTLE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(LITTLE)


@POSIX
@pytest.mark.parametrize("known", [True, False])
def test_macos_writes_the_drive_s_cache(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl  # not on Windows

    asked: list[int] = []

    def control(_: int, request: int) -> int:
        asked.append(request)
        if not known:
            raise OSError(errno.ENOTSUP, "a file system without it")
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
        patch.setattr(fcntl, "fcntl", control)
        patch.setattr(sys, "platform", "darwin")
        zcrecord.save_record(LITTLE, tmp_path / "m.zcr")
    assert asked == [51, 51]  # file and folder
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(LITTLE)


def test_short_writes_of_the_system_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4001]))
    zcrecord.save_record(LITTLE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(LITTLE)


# Refusals.


LONE = "a\ud800b"


CYCLIC_DICT: dict[str, Any] = {"w": ONE}
CYCLIC_DICT["m"] = {"self": CYCLIC_DICT}
CYCLIC_LIST: list[Any] = [ONE]
CYCLIC_LIST.append(CYCLIC_LIST)


UNSUPPORTED: list[tuple[Any, str]] = [
    ({"m": {"x": np.array([None])}}, r"tensor 'm\.x': dtype object has no place"),
    ({"x": np.zeros(2, "M8[s]")}, r"tensor 'x': dtype datetime64\[s\]"),
    ({"x": np.array([b"ab"])}, r"tensor 'x': dtype \|S2"),
    ({"x": np.ma.masked_less(ONE, 5)}, r"tensor 'x': a masked array; save \.filled"),
    ({"x": np.array(["a", LONE])}, r"tensor 'x': .*lone surrogates"),
    ({"m": {"x": {b"a"}}}, r"tensor 'm\.x': a bytes as a key, or in a set, has no equal"),
    ({"m": {0: datetime.datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC"))}}, r"tensor 'm\.0': a datetime with a named time"),
    ({"x": r.Layer}, r"tensor 'x': a type is neither .*; leave it out, or save its name"),
    ({"x": [1, range(2)]}, r"tensor 'x\.1': a range is neither .*; save a dict of what it holds"),
    ({"x": iter([1])}, r"tensor 'x': a list_iterator is neither .*; save a list of its items"),
    ({"x": io.BytesIO()}, r"tensor 'x': a BytesIO is neither .*; save the file's path"),
    ({"x": np.random.default_rng()}, r"tensor 'x': a Generator is neither .*; save its \.bit_generator\.state"),
    ({"x": np.random.RandomState(1)}, r"tensor 'x': a RandomState is neither .*; save its \.get_state\(\)$"),
    ({"x": random.Random(1)}, r"tensor 'x': a Random is neither .*; save its \.getstate\(\)$"),
    ({"x": np.dtype("f4")}, r"tensor 'x': a Float32DType is neither .*; leave it out, or save its name$"),
    ({"x": bytearray(b"a")}, r"tensor 'x': a mutable buffer; pass bytes"),
    ({"x": memoryview(b"abcd")[::2]}, r"tensor 'x': "),
    ({"m": [{"x": 2**4096}]}, r"'m\.0\.x': an integer of 4097 bits, 4096"),
    ({"m": {"x": LONE}}, r"'m\.x': .*lone surrogates"),
    ({"x": ["a", LONE]}, r"'x': .*lone surrogates"),
    (ONE, "a record is a mapping, list, tuple or dataclass, not .*ndarray"),
    (None, "a record is a mapping.*, not .*None"),
    (r.Layer, "a record is a mapping.*, not .*Layer"),
    (r.Owner([ONE]), r"state_dict\(\).* mapping from names to tensors"),
    ({"m": {10**5000: ONE}}, r"'m\.keys\.0': an integer of 16610 bits"),
    ({b"k": ONE}, r"a bytes as a key, or in a set, has no equal when it is loaded; make it a text"),
    ({"m": {"a\0b": ONE}}, r"tensor 'm\.a\\x00b': its name contains NUL"),
    ({"m": {"a\0b": 1}}, r"tensor 'm\.a\\x00b': its name contains NUL"),
    ({LONE: ONE}, r"tensor 'a\\ud800b': its name has lone surrogates"),
    ({"m": {LONE: 1}}, r"tensor 'm\.a\\ud800b': .*lone surrogates"),
    (r.Owner({1: ONE}), r"state_dict\(\) of Owner is not a mapping from"),
]
COLLIDING: list[tuple[Any, str]] = [
    ({"a.b": ONE, "a": {"b": ONE}}, r"tensor 'a\.b': two tensors get this name, as dots separate"),
    ({"a.b": {"x": 1}, "a": {"b": {}}}, r"'a\.b': two modules get this name"),
    ({"a.b": 1, "a": {"b": 2}}, r"'a\.b': two attributes get this name"),
    ({"a": [ONE], "a.0": ONE}, r"tensor 'a\.0': two .* this name"),
]
TOO_DEEP: list[tuple[Any, str]] = [
    (nested(101), "nested more than 100 deep"),
    (nested(5000), "nested more than 100 deep"),
    (CYCLIC_DICT, "nested more than 100 deep; does the record contain itself"),
    ({"l": CYCLIC_LIST}, "does the record contain itself"),
]
REFUSALS = [
    (error, *refusal)
    for error, table in ((UnsupportedError, UNSUPPORTED), (NameCollisionError, COLLIDING), (LimitError, TOO_DEEP))
    for refusal in table
]


def check_refused(folder: Path, error: type[RecordError], message: str, record: Any, **options: Any) -> None:
    """Saving fails in the same way into a file object, to a new path and over an old file; nothing is written."""
    file = io.BytesIO()
    with pytest.raises(error, match=message):
        zcrecord.save_record(record, file, **options)
    assert file.getvalue() == b""
    old = folder / "old.zcr"
    old.write_bytes(b"what was there before")
    for path in (folder / "new.zcr", old):
        with pytest.raises(error, match=message):
            zcrecord.save_record(record, path, **options)
    assert os.listdir(folder) == ["old.zcr"]
    assert old.read_bytes() == b"what was there before"


@pytest.mark.parametrize(("error", "record", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_refuses(error: type[RecordError], record: Any, message: str, tmp_path: Path) -> None:
    check_refused(tmp_path, error, message, record)


def test_refuses_long_double(tmp_path: Path) -> None:
    if np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("platform: long double is double here")
    for kind in (np.longdouble, np.clongdouble):
        check_refused(tmp_path, UnsupportedError, f"tensor 'x': dtype {np.dtype(kind)}", {"x": ONE.astype(kind)})


@pytest.mark.parametrize("digest", ["", "XXH3", "sha256", 1, b"xxh3"])
def test_refuses_digest(digest: Any, tmp_path: Path) -> None:
    message = f"digest {digest!r} is not known; 'xxh3' or 'none'"
    check_refused(tmp_path, LimitError, message, {"w": ONE}, digest=digest)


METADATA: dict[str, tuple[Any, str]] = {
    "text": ("text", "metadata"),
    "int key": ({1: 1}, "metadata 1: names are non-empty strings"),
    "empty key": ({"": 1}, "metadata '': names are non-empty strings"),
    "NUL in key": ({"a\0": 1}, r"metadata 'a\\x00'"),
    "surrogate in key": ({LONE: 1}, r"metadata 'a\\ud800b'"),
    "surrogate in value": ({"k": LONE}, "metadata 'k'"),
    "mapping": ({"k": {}}, "metadata 'k': .*values .* lists of one"),
    "mixed list": ({"k": [1, "a"]}, "metadata 'k': .*values .* lists of one"),
    "nested list": ({"k": [[1]]}, "metadata 'k': .*values .* lists of one"),
    "65-bit integer": ({"k": 2**64}, "metadata 'k'"),
    "namedtuple of two types": ({"k": r.Pair(1, b"a")}, "metadata 'k': .*values .* lists of one"),
}


@pytest.mark.parametrize("name", METADATA)
def test_refuses_metadata(name: str, tmp_path: Path) -> None:
    metadata, message = METADATA[name]
    check_refused(tmp_path, UnsupportedError, message, {"w": ONE}, metadata=metadata)


@pytest.mark.parametrize("dest", [None, 5, 1.5, object(), ["m.zcr"]], ids=lambda d: type(d).__name__)
def test_refuses_a_destination_that_is_no_path_and_no_file(dest: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{type(dest).__name__}.*neither a path nor a binary file"):
        zcrecord.save_record({}, dest)


@pytest.mark.parametrize("unit", ["M8[ns]", "M8[D]", "m8[s]"])
def test_dates_are_saved_and_loaded_as_their_refusal_says(unit: str, tmp_path: Path) -> None:
    dates = np.arange(5).astype(unit).reshape(5, 1)
    with pytest.raises(UnsupportedError, match=re.escape(f"save .view('int64'), and load that with .view('{unit}')")):
        r.saved({"x": dates})
    zcrecord.save_record({"x": dates.view("int64")}, tmp_path / "m.zcr")
    np.testing.assert_array_equal(zcrecord.load_record(tmp_path / "m.zcr")["x"].view(unit), dates)


def test_structured_arrays_are_saved_as_their_refusal_says(tmp_path: Path) -> None:
    array = np.array([(1, 2.5), (3, 4.5)], [("a", "<i4"), ("b", "<f8")])
    with pytest.raises(UnsupportedError, match=r"save its fields one by one, as array\[field\]"):
        r.saved({"x": array})
    zcrecord.save_record({"x": {field: array[field] for field in array.dtype.names or ()}}, tmp_path / "m.zcr")
    assert zcrecord.load_record(tmp_path / "m.zcr")["x.b"].tolist() == [2.5, 4.5]


def test_a_rename_that_succeeds_and_is_reported_as_failed_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As network file systems may do; the new file is there, and no error says that the old one is."""
    zcrecord.save_record({"w": ONE}, tmp_path / "m.zcr")
    replace = os.replace

    def late(source: Any, dest: Any, **options: Any) -> None:
        replace(source, dest, **options)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("zcrecord.storage.new_files.os.replace", late)
    with pytest.raises(
        SourceError, match=r"m\.zcr: is written, but the system reported an error \(Input/output error\)"
    ):
        zcrecord.save_record({"v": ONE}, tmp_path / "m.zcr")
    assert list(zcrecord.load_record(tmp_path / "m.zcr")) == ["v"]
