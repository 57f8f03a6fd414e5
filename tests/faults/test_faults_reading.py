"""Files that are replaced, shortened or out of reach while they are read: one generation, whole, or one typed error."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from tools.faults.kills import written
from tools.faults.replacing import WAYS, replace_under_readers
from zcrecord import SourceError, load_record
from zcrecord.loaders import load

POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: files that others have open are replaced on POSIX")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: Linux's signals, limits and reads by position")
TREE = {"a": np.arange(600_000), "b": np.ones(5)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    zcrecord.save_record(TREE, tmp_path / "m.zcr", durable=False)
    return tmp_path / "m.zcr"


@pytest.mark.slow
@pytest.mark.exhaustive(keep=("True",))
@POSIX
@pytest.mark.parametrize(("times", "durable"), [(80, False), (15, True)])
def test_readers_of_a_file_that_is_replaced_see_one_generation_whole(times: int, durable: bool, tmp_path: Path) -> None:
    results = replace_under_readers(tmp_path / "m.zcr", times, processes=2, threads=2, durable=durable)
    assert results["errors"] == []
    assert results["generations"] >= 2, "nothing was replaced while it was read"
    assert all(results["reads"].values()), results
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.parametrize("way", WAYS)
def test_readers_would_notice_a_file_of_two_generations(way: str, tmp_path: Path) -> None:
    read, _ = WAYS[way]
    zcrecord.save_record(written(1), tmp_path / "m.zcr")
    assert read(str(tmp_path / "m.zcr")) == 1
    zcrecord.save_record(written(1) | {"last": written(2)["last"]}, tmp_path / "m.zcr")
    with pytest.raises(ValueError, match="several generations"):
        read(str(tmp_path / "m.zcr"))


@LINUX
@pytest.mark.parametrize("way", ["removed", "a folder", "another file"])
def test_a_mapped_file_that_is_gone_is_loaded_and_what_is_at_its_path_is_left_alone(
    way: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_cached(_page: int, _nbytes: int, state: int) -> None:
        ctypes.memset(state, 0, 1)

    advised: list[Any] = []
    monkeypatch.setattr(load, "c_function", lambda *_: not_cached)
    monkeypatch.setattr(load, "_DROP_STEP", 1 << 20)
    monkeypatch.setattr(load, "_DROP_LAG", 1 << 20)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advised.append(arguments))
    record = load_record(path)
    record.load_into("host")
    assert advised, "this test would not notice"
    advised.clear()
    path.unlink()
    if way == "a folder":
        path.mkdir()
    elif way == "another file":
        path.write_bytes(b"another")
    r.assert_same(record.load_into("host"), TREE)
    assert not advised


SHRUNK = """
import os, sys
import zcrecord
rec = zcrecord.load_record(sys.argv[1])
os.truncate(sys.argv[1], 4096)
print('loaded', flush=True)
print(int(rec['a'][-1]))
"""


@pytest.mark.slow
@LINUX
def test_file_that_is_shortened_ends_the_process_that_has_it_mapped_and_no_other(path: Path) -> None:
    """As load_record's documentation says; the reason for mmap=False, which `storage/test_reading.py` tests."""
    done = r.run_python(SHRUNK, path, ok=False)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "loaded\n")


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_file_that_is_shortened_between_looking_and_mapping_is_refused(
    size: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat

    def shrinking(fd: int) -> os.stat_result:
        status = real(fd)
        os.truncate(path, size)
        return status

    monkeypatch.setattr(os, "fstat", shrinking)
    with pytest.raises(SourceError, match=r"m\.zcr: .*became shorter while it was opened; is it still being written"):
        load_record(path)


READS: dict[str, Any] = {
    "mapped": lambda path: load_record(path, verify="full"),
    "read": lambda path: load_record(path, mmap=False),
    "private": lambda path: load_record(path, mode="c"),
}


@LINUX
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOMEM])
@pytest.mark.parametrize(("way", "call"), [("mapped", "open"), ("mapped", "fstat"), ("mapped", "mmap"),
                                           ("private", "mmap"), ("read", "open"), ("read", "preadv")])  # fmt: skip
def test_what_the_system_refuses_is_told_with_path_and_number(
    way: str, call: str, number: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ESTALE: a network file system has the file no more."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mmap if call == "mmap" else os, call, refuse)
    with pytest.raises(SourceError, match=rf"m\.zcr: cannot be read: {os.strerror(number)}") as caught:
        READS[way](path)
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.path) == (number, str(path))
    READS[way](path)
