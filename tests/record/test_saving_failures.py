"""A save that fails leaves the old file byte for byte, and nothing beside it."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord

TREE = {"a": np.arange(300_000), "f": np.arange(200_000).reshape(2, -1)[:, ::2], "b": np.ones(5), "c": "text"}
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX file systems")


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
        zcrecord.save_record(TREE, file)


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


def test_folder_without_sync_undoes_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(os.fsync, 1, OSError(errno.EINVAL, "no fsync of folders here")))
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


@POSIX
def test_folder_that_nobody_lists_undoes_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One may have the right to put files into a folder, but not to list it."""
    (tmp_path / "m.zcr").write_bytes(b"old")
    monkeypatch.setattr(os, "open", failing(os.open, 1, PermissionError(errno.EACCES, "may not be listed")))
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


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
        zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert asked == [51, 51]  # file and folder
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


def test_short_writes_of_the_system_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4001]))
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)
