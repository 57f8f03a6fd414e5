"""A save that fails or is cut off leaves the old file byte for byte, and nothing beside it."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
        zcrecord.save_record({"old": np.arange(10)}, tmp_path / "m.zcr")
        before = (tmp_path / "m.zcr").read_bytes()
    yield tmp_path / "m.zcr"
    if request.param == "old":
        assert os.listdir(tmp_path) == ["m.zcr"]
        assert (tmp_path / "m.zcr").read_bytes() == before
    else:
        assert os.listdir(tmp_path) == []


def failing(call: Any, after: int, error: BaseException) -> Any:
    """Return a system call that works `after` times and raises then."""
    left = [after]

    def replacement(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return call(*args, **kwargs)

    return replacement


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota"), OSError(errno.EIO, "io")]
)
def test_disk_that_fills_up_leaves_the_old_file(
    after: int, error: OSError, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", failing(os.write, after, error))
    assert error.errno is not None
    with pytest.raises(SourceError, match=rf"m\.zcr: cannot write: {os.strerror(error.errno)}") as caught:
        zcrecord.save_record(TREE, path)
    assert (caught.value.errno, caught.value.path) == (error.errno, str(path))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), MemoryError(), RuntimeError("unforeseen")])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_interrupt_leaves_the_old_file(
    after: int, error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", failing(os.write, after, error))
    with pytest.raises(type(error)):
        zcrecord.save_record(TREE, path)


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "io"), KeyboardInterrupt()])
def test_failure_before_the_rename_leaves_the_old_file(
    call: str, error: BaseException, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, failing(getattr(os, call), 0, error))
    with pytest.raises(SourceError if isinstance(error, OSError) else KeyboardInterrupt):
        zcrecord.save_record(TREE, path)


@pytest.mark.slow
@POSIX
def test_limit_on_file_size_leaves_the_old_file(path: Path) -> None:
    code = """
import numpy as np, resource, sys, zcrecord
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    zcrecord.save_record({'a': np.arange(300_000)}, sys.argv[1])
except zcrecord.SourceError as error:
    print(error)
"""
    done = r.run_python(code, path)
    assert "m.zcr: cannot write: File too large" in done.stdout


@pytest.mark.slow
@POSIX
def test_folder_without_write_permission_is_refused_in_one_line() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        code = """
import numpy as np, os, sys, zcrecord
zcrecord.save_record  # imported when it is first named, and root's packages may be nobody else's to read
if os.getuid() == 0:
    os.setuid(65534)  # root may write anywhere
try:
    zcrecord.save_record({'a': np.arange(3)}, sys.argv[1])
except zcrecord.SourceError as error:
    print(error)
"""
        done = r.run_python(code, os.path.join(folder, "m.zcr"))
        assert "m.zcr: cannot write: Permission denied" in done.stdout
        assert len(done.stdout.splitlines()) == 1
        assert os.listdir(folder) == []


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

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._most:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("most", [0, 63, 64, 1000, SIZE // 2, SIZE - 1])
def test_error_of_a_file_object_comes_out_as_an_os_error(most: int) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        zcrecord.save_record(TREE, Failing(most))
    assert caught.value.errno == errno.ENOSPC
    zcrecord.save_record(TREE, Failing(SIZE))


def test_file_object_that_takes_nothing_is_an_error_and_no_endless_loop() -> None:
    class Nothing:
        calls = 0

        def write(self, _: Any) -> int:
            self.calls += 1
            assert self.calls < 100, "save_record would go on for ever"
            return 0

    with pytest.raises(OSError, match=r"the file object took no.* of \d+"):
        zcrecord.save_record(TREE, Nothing())


KILLED = """
import os, signal, sys
import numpy as np, zcrecord
write, left = os.write, [int(sys.argv[2])]
def killing(fd, data):
    left[0] -= 1
    if left[0] < 0:
        write(fd, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, data)
os.write = killing
zcrecord.save_record({'a': np.arange(300_000), 'b': np.ones(5)}, sys.argv[1])
"""


@pytest.mark.exhaustive(keep=1)
@POSIX
@pytest.mark.parametrize("after", [0, 1, 2])
def test_kill_in_the_middle_leaves_the_old_file_and_at_most_a_scratch_file_beside_it(
    after: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"old": np.arange(10)}, path)
    before = path.read_bytes()
    done = r.run_python(KILLED, path, after, ok=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert path.read_bytes() == before
    left = [name for name in os.listdir(tmp_path) if name != "m.zcr"]  # nobody is left to remove it
    assert all(name.startswith(".m.zcr.") and name.endswith(".zcr-scratch") for name in left)
    zcrecord.save_record(TREE, path)  # and it is in nobody's way
    r.assert_same(zcrecord.load_record(path, verify="full").tree(), TREE)


@pytest.mark.slow
@POSIX
def test_control_c_in_the_middle_leaves_the_old_file(path: Path) -> None:
    code = KILLED.replace("SIGKILL", "SIGINT")
    done = r.run_python(code, path, 1, ok=False)
    assert done.returncode in (-signal.SIGINT, 1)
    assert "KeyboardInterrupt" in done.stderr


class Calls:
    """Counts what a save asks of the file system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for name in ("fsync", "replace"):
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.made.append(name)
            return call(*args, **kwargs)

        return counted


@POSIX
def test_durable_save_syncs_the_file_then_renames_it_then_syncs_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert calls.made == ["fsync", "replace", "fsync"]


def test_without_durable_nothing_is_synced_but_the_rename_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    zcrecord.save_record(TREE, tmp_path / "m.zcr", durable=False)
    assert calls.made == ["replace"]
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

    def control(_: int, what: int) -> int:
        asked.append(what)
        if not known:
            raise OSError(errno.ENOTSUP, "a file system without it")
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(sys, "platform", "darwin")
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    monkeypatch.undo()
    assert asked == [51, 51]  # file and folder
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


def test_short_writes_of_the_system_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:4001]))
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == r.saved(TREE)


HALFWAY = """
import sys
import numpy as np, zcrecord
print('ready', flush=True)
sys.stdin.readline()
zcrecord.save_record({'new': np.arange(2_000_000)}, sys.argv[1])
"""


@pytest.mark.slow
@POSIX
def test_reader_finds_the_old_file_or_the_new_one_and_never_half(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"old": np.arange(10)}, path)
    command = [sys.executable, "-c", HALFWAY, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=r.ROOT, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.stdin.write("\n")
        writer.stdin.flush()
        found = {"old"}
        while writer.poll() is None:
            found.add(next(iter(zcrecord.load_record(path))))
    assert writer.returncode == 0
    assert found <= {"old", "new"}
    assert list(zcrecord.load_record(path)) == ["new"]
