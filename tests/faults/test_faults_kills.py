"""A save that dies leaves the old file or the new one, and a scratch file that the next save of that path removes.

The figures of SECURITY.md are those of `python -m tools.faults`, which does the same 1,000 times.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from exhaustive import rounds

import zcrecord
from tools.faults.kills import generation, kill_saves, written
from zcrecord import RecordWriter, SourceError, formats
from zcrecord.storage.scratch import ListedFile, note_of, scratch_file

POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: fork, signals and locks of POSIX")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: Linux lists open files")


def beside(path: Path) -> list[str]:
    """Return the other files in a file's folder."""
    return [name for name in os.listdir(path.parent) if name != path.name]


def dead(path: Path, *, folder: Path | None = None) -> Path:
    """Leave what a killed save of a path leaves."""
    with scratch_file(str(path)) as (file, name):
        os.write(file.fileno(), b"half of an archive")
        file.close()
        left = (folder or path.parent) / os.path.basename(name)
        os.rename(name, f"{name}.kept")
    os.rename(f"{name}.kept", left)
    return left


@pytest.mark.exhaustive(keep=1)
@pytest.mark.filterwarnings("ignore")  # jax, where another test has brought it, warns of forks
@POSIX
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("max_shard_size", [None, pytest.param(300_000, marks=pytest.mark.slow)])
def test_save_killed_at_any_moment_leaves_one_generation_whole(
    durable: bool, max_shard_size: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "m.zcr"
    kills = kill_saves(path, 10 if durable else rounds(50), durable=durable, seed=1, max_shard_size=max_shard_size)
    assert (kills.times, kills.whole) == (kills.times, kills.times)
    assert kills.left == 0
    assert kills.scratches, "no save was killed in the middle, so nothing was tried"
    assert bool(zcrecord.load_record(path).archive.source.file_names) == (max_shard_size is not None)


DIES = """
import os, signal, sys
import zcrecord
from tools.faults.kills import written
from zcrecord.storage import new_files
replace = os.replace
os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL) if a[1] == sys.argv[1] else replace(*a)
zcrecord.save_record(written(3), sys.argv[1], max_shard_size=300_000)
"""


@pytest.mark.slow
@POSIX
def test_next_save_removes_shards_that_appeared_before_their_writer_died(tmp_path: Path) -> None:
    """Between the shards and the catalogue that names them; whoever else has such a name keeps his file."""
    path = tmp_path / "m.zcr"
    for number in (1, 2):
        zcrecord.save_record(written(number), path, max_shard_size=300_000)
    (tmp_path / "m-00007-of-00009.zcr").write_bytes(b"somebody's")
    before = {*os.listdir(tmp_path)}
    assert r.run_python(DIES, path, ok=False).returncode == -signal.SIGKILL
    more = {*os.listdir(tmp_path)} - before
    assert {"m-00001-of-00002.zcr", "m-00002-of-00002.zcr"} <= more, "it was to die after the shards had appeared"
    assert generation(zcrecord.load_record(path, verify="full")) == 2
    zcrecord.save_record(written(4), path, durable=False)  # of any kind
    assert not more & {*os.listdir(tmp_path)}
    assert (tmp_path / "m-00007-of-00009.zcr").read_bytes() == b"somebody's"


DIES_LATER = DIES.replace("os.replace = lambda *a:", "new_files.remove_orphans = lambda *a:").replace(
    "if a[1] == sys.argv[1] else replace(*a)", ""
)


@pytest.mark.slow
@POSIX
@pytest.mark.parametrize("moved", [False, True])
def test_next_save_removes_shards_that_were_replaced_before_their_writer_died(moved: bool, tmp_path: Path) -> None:
    """Those of the old catalogue; but none of the new one, wherever in the folder that is by then."""
    path = tmp_path / "m.zcr"
    zcrecord.save_record(written(2), path, max_shard_size=300_000)
    old = {*os.listdir(tmp_path)} - {path.name}
    assert r.run_python(DIES_LATER, path, ok=False).returncode == -signal.SIGKILL
    assert old < {*os.listdir(tmp_path)}, "it was to die before the old shards were removed"
    stored = path.rename(tmp_path / "kept.zcr") if moved else path
    if not moved:
        assert generation(zcrecord.load_record(path, verify="full")) == 3
    zcrecord.save_record(written(4), path, max_shard_size=300_000)
    assert not [name for name in os.listdir(tmp_path) if name.endswith("scratch")]
    assert generation(zcrecord.load_record(path, verify="full")) == 4
    if moved:
        assert generation(zcrecord.load_record(stored, verify="full")) == 3
    named = {name for file in {path, stored} for name in zcrecord.load_record(file).archive.source.file_names}
    assert {*os.listdir(tmp_path)} == named | {path.name, stored.name}


@POSIX
def test_replaced_shards_of_a_saver_that_died_before_it_replaced_their_catalogue_stay(tmp_path: Path) -> None:
    """Wherever that is by then."""
    path, aside = tmp_path / "m.zcr", tmp_path / "m.zcr.bak"
    zcrecord.save_record(written(2), path, max_shard_size=300_000)
    assert r.run_python(DIES, path, ok=False).returncode == -signal.SIGKILL
    path.rename(aside)
    zcrecord.save_record(written(4), path, durable=False)
    assert not [name for name in os.listdir(tmp_path) if name.endswith("scratch")]
    aside.rename(path)
    assert generation(zcrecord.load_record(path, verify="full")) == 2


@POSIX
def test_note_of_another_user_stays_and_nothing_is_removed_on_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = tmp_path / "m.zcr", tmp_path / "m-00001-of-00002.zcr"
    left.write_bytes(b"a shard")
    note = dead(path)
    note.write_bytes(note_of([ListedFile.from_path(str(left), left.name)]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4242)
        zcrecord.save_record(written(1), path, durable=False)
    assert note.exists()
    assert left.exists()
    zcrecord.save_record(written(1), path, durable=False)
    assert not note.exists()
    assert not left.exists()


@POSIX
def test_note_of_shards_that_a_catalogue_names_by_now_removes_none(tmp_path: Path) -> None:
    """Its writer died after the catalogue had appeared, before the note was gone."""
    path = tmp_path / "m.zcr"
    zcrecord.save_record(written(1), path, max_shard_size=300_000)
    note = dead(path)
    names = [*zcrecord.load_record(path).archive.source.file_names, "../elsewhere.zcr", "m.zcr"]
    (tmp_path.parent / "elsewhere.zcr").write_bytes(b"somebody's")
    note.write_bytes(note_of([ListedFile.from_path(str(tmp_path / name), name) for name in names]))
    with scratch_file(str(path)):
        pass
    assert (tmp_path.parent / "elsewhere.zcr").exists()
    assert generation(zcrecord.load_record(path, verify="full")) == 1
    assert not note.exists()


def test_next_save_removes_what_dead_ones_left_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    left = [dead(path), tmp_path / ".m.zcr.0123456789ab.zcr-scratch"]
    left[1].write_bytes(b"")
    others = {dead(tmp_path / "m.zcr.zcr"), dead(tmp_path / "zcr"), tmp_path / ".m.zcr.0123456789ab.zcr-scratch.old"}
    (tmp_path / ".m.zcr.0123456789ab.zcr-scratch.old").write_bytes(b"somebody's")
    assert all(file.exists() for file in left)
    zcrecord.save_record({"w": np.arange(3)}, path)
    assert {tmp_path / name for name in beside(path)} == others


@POSIX
def test_save_of_a_symbolic_link_removes_what_lies_beside_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = tmp_path / "real" / "m.zcr"
    (tmp_path / "link.zcr").symlink_to(path)
    dead(path)
    zcrecord.save_record({"w": np.arange(3)}, tmp_path / "link.zcr")
    assert os.listdir(tmp_path / "real") == ["m.zcr"]
    assert (tmp_path / "link.zcr").is_symlink()


@POSIX
@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "unreadable"])
def test_what_only_has_the_name_of_a_scratch_file_is_in_nobody_s_way(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    name = dead(path)
    name.unlink()
    (tmp_path / "valuable").write_bytes(b"value")
    if kind == "folder":
        name.mkdir()
    elif kind == "pipe":
        os.mkfifo(name)
    elif kind == "link":
        name.symlink_to(tmp_path / "valuable")
    else:
        name.write_bytes(b"")
        name.chmod(0)
    zcrecord.save_record({"w": np.arange(3)}, path)
    assert (tmp_path / "valuable").read_bytes() == b"value"
    assert name.exists() or kind == "unreadable"
    assert list(zcrecord.load_record(path)) == ["w"]


ONE_AT_A_TIME = """
import sys
import numpy as np, zcrecord
from zcrecord import RecordWriter
with RecordWriter(sys.argv[1]) as out:
    out.add("slow", np.arange(1000))
    print("begun", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
@POSIX
def test_scratch_file_of_a_save_that_lives_in_another_process_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    command = [sys.executable, "-c", ONE_AT_A_TIME, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=r.ROOT, text=True) as slow:
        assert slow.stdin is not None
        assert slow.stdout is not None
        slow.stdout.readline()
        (living,) = beside(path)
        zcrecord.save_record({"fast": np.arange(3)}, path)
        assert beside(path) == [living]
        assert list(zcrecord.load_record(path)) == ["fast"]
        slow.communicate("\n", timeout=60)
    assert slow.returncode == 0
    assert list(zcrecord.load_record(path)) == ["slow"]
    assert beside(path) == []


@pytest.mark.parametrize("max_shard_size", [None, pytest.param(300_000, marks=pytest.mark.slow)])
def test_saves_of_one_path_by_many_threads_leave_one_of_them_whole(max_shard_size: int | None, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    records = [written(number) for number in range(1, 5)] * 10
    save = partial(zcrecord.save_record, durable=False, max_shard_size=max_shard_size)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, records, [path] * 40))
    record = zcrecord.load_record(path, verify="full")
    assert generation(record) in range(1, 5)
    assert {*beside(path)} == {*record.archive.source.file_names}


@POSIX
def test_file_that_is_taken_for_dead_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save may look between making and locking."""
    import fcntl

    lock = fcntl.flock
    removed: list[str] = []

    def late(fd: int, operation: int) -> None:
        if not removed:
            removed.extend(beside(tmp_path / "m.zcr"))
            os.unlink(tmp_path / removed[0])
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    zcrecord.save_record({"w": np.arange(3)}, tmp_path / "m.zcr")
    assert len(removed) == 1
    assert os.listdir(tmp_path) == ["m.zcr"]


@POSIX
@pytest.mark.parametrize("number", ["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EBADF"])
def test_where_there_are_no_locks_saves_work_and_nothing_is_taken_for_dead(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(getattr(errno, number), "no locks here")

    left = dead(tmp_path / "m.zcr")
    monkeypatch.setattr(fcntl, "flock", refuse)
    zcrecord.save_record({"w": np.arange(3)}, tmp_path / "m.zcr")
    assert beside(tmp_path / "m.zcr") == [left.name]
    monkeypatch.undo()
    zcrecord.save_record({"w": np.arange(3)}, tmp_path / "m.zcr")
    assert beside(tmp_path / "m.zcr") == []


@LINUX
def test_saves_leave_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    dead(tmp_path / "m.zcr")
    zcrecord.save_record({"w": np.arange(3)}, tmp_path / "m.zcr")
    with pytest.raises(RuntimeError, match="unforeseen"), RecordWriter(tmp_path / "m.zcr") as out:
        out.add("w", np.arange(3))
        raise RuntimeError("unforeseen")
    with pytest.raises(SourceError, match="No such file"):
        zcrecord.save_record({"w": np.arange(3)}, tmp_path / "no folder" / "m.zcr")
    assert len(os.listdir("/proc/self/fd")) == before
    assert beside(tmp_path / "m.zcr") == []


def test_conversion_by_way_of_an_archive_removes_what_a_dead_one_left(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", w=np.arange(5))
    left = dead(tmp_path / "m.safetensors-between")
    formats.convert(tmp_path / "m.npz", tmp_path / "m.safetensors")
    assert not left.exists()
    assert sorted(os.listdir(tmp_path)) == ["m.npz", "m.safetensors"]


@POSIX
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_keeps_its_mode_and_one_whose_mode_cannot_be_learnt_is_not_replaced(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a file for its owner's eyes became one for all, wherever a network file system did not answer once."""
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"w": np.arange(3)}, path)
    path.chmod(mode)
    before, stat = path.read_bytes(), os.stat

    def refuse(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name == str(path):
            raise OSError(5, "Input/output error")
        return stat(name, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(SourceError, match="cannot write: Input/output error"):
        zcrecord.save_record({"new": np.arange(3)}, path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    zcrecord.save_record({"new": np.arange(3)}, path)
    assert path.stat().st_mode & 0o777 == mode


def test_scratch_of_a_long_name_is_named_in_whole_characters(tmp_path: Path) -> None:
    """Some file systems, and Windows, know no part of one."""
    for name in ("\u6a21" * 80, "a" + "\u6a21" * 80, "\U0001f984" * 60, "x" * 250):
        left = dead(tmp_path / name)
        assert os.fsencode(left.name).decode("utf-8", "strict").startswith(f".{name[:40]}")
        assert len(os.fsencode(left.name)) <= 255
        zcrecord.save_record({"w": np.ones(1)}, tmp_path / name)
        assert not left.exists()


@POSIX
def test_scratch_of_a_long_name_is_not_that_of_another_with_the_same_start(tmp_path: Path) -> None:
    left = dead(tmp_path / ("x" * 220 + "A"))
    zcrecord.save_record({"w": np.ones(1)}, tmp_path / ("x" * 220 + "B"))
    assert left.exists()
    zcrecord.save_record({"w": np.ones(1)}, tmp_path / ("x" * 220 + "A"))
    assert not left.exists()
