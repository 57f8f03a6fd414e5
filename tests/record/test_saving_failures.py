"""A save that fails leaves the old file byte for byte, and nothing beside it."""

from __future__ import annotations

import errno
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord import SourceError

TREE = {"a": np.arange(300_000), "f": np.arange(200_000).reshape(2, -1)[:, ::2], "b": np.ones(5), "c": "text"}
SIZE = len(r.saved(TREE))
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX file systems")


@pytest.fixture(params=["new", "old"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A path with or without a file, which is to be as it was when the test is over, and alone."""
    if request.param == "old":
        (tmp_path / "m.zcr").write_bytes(b"old")
    yield tmp_path / "m.zcr"
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([b"old"] if request.param == "old" else [])


def failing(call: Any, after: int, error: BaseException) -> Any:
    """Return a system call that works `after` times and raises then."""
    calls = itertools.count()

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= after:
            raise error
        return call(*args, **kwargs)

    return replacement


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "io"), KeyboardInterrupt()])
def test_failing_write_leaves_the_old_file(
    after: int, error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", failing(os.write, after, error))
    if not isinstance(error, OSError):
        with pytest.raises(type(error)):
            zcrecord.save_record(TREE, path)
        return
    message = rf"m\.zcr: cannot write: {os.strerror(error.errno or 0)}"
    with pytest.raises(SourceError, match=message) as caught:
        zcrecord.save_record(TREE, path)
    assert (caught.value.errno, caught.value.path) == (error.errno, str(path))


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "io"), KeyboardInterrupt()])
def test_failure_before_the_rename_leaves_the_old_file(
    call: str, error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, failing(getattr(os, call), 0, error))
    with pytest.raises(SourceError if isinstance(error, OSError) else KeyboardInterrupt):
        zcrecord.save_record(TREE, path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="platform: no /dev/full")
@pytest.mark.parametrize("tree", [TREE, {}], ids=["large", "empty"])
def test_full_device_is_refused_in_one_line(tree: Any) -> None:
    with pytest.raises(SourceError, match="/dev/full: cannot write: No space left on device") as caught:
        zcrecord.save_record(tree, "/dev/full")
    assert caught.value.errno == errno.ENOSPC
    assert "\n" not in str(caught.value)


@POSIX
def test_pipe_that_would_block_is_an_error_and_no_truncated_success() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(read, "rb"), open(write, "wb", buffering=0) as file, pytest.raises(OSError, match="block"):
        zcrecord.save_record(TREE, file)


class Failing(io.BytesIO):
    """A file object that takes `most` bytes and fails then, as on a full disk."""

    most = 0

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.most:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("most", [0, 64, 1000, SIZE // 2, SIZE - 1])
def test_error_of_a_file_object_comes_out_as_an_os_error(most: int) -> None:
    file = Failing()
    file.most = most
    with pytest.raises(OSError, match="No space left on device") as caught:
        zcrecord.save_record(TREE, file)
    assert caught.value.errno == errno.ENOSPC


def test_file_object_that_takes_nothing_is_an_error_and_no_endless_loop() -> None:
    class Nothing:
        calls = 0

        def write(self, _: Any) -> int:
            self.calls += 1
            assert self.calls < 100, "save_record would go on for ever"
            return 0

    with pytest.raises(OSError, match=r"the file object accepted 0 of \d+ bytes"):
        zcrecord.save_record(TREE, Nothing())


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
    zcrecord.save_record(TREE, tmp_path / "m.zcr", durable=durable)
    assert made == calls
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


def test_folder_that_cannot_be_synced_does_not_undo_a_finished_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(os.fsync, 1, OSError(errno.EINVAL, "no fsync of folders here")))
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


@POSIX
def test_folder_that_cannot_be_opened_does_not_undo_a_finished_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may have the right to put files into a folder, but not to list it."""
    (tmp_path / "m.zcr").write_bytes(b"old")
    monkeypatch.setattr(os, "open", failing(os.open, 1, PermissionError(errno.EACCES, "may not be listed")))
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


@POSIX
@pytest.mark.parametrize("known", [True, False])
def test_on_macos_the_drive_is_asked_to_write_its_cache(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert asked == [51, 51]  # file and folder
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


def test_short_writes_of_the_system_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4001]))
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)
