"""Disks that are full, folders that refuse or vanish, limits that are reached: one typed error, the old file stays."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from tools.faults.filling import fill_disks, mounting, run_on_disk
from zcrecord import RecordWriter, SourceError, formats, onnx, transport
from zcrecord.cli.dispatch import main, onnx2zc_main

resource = pytest.importorskip("resource", reason="platform: limits and mounts of POSIX")
TREE = {"a": np.arange(40_000), "b": np.ones(5)}
DIGITS = Path(__file__).parents[1] / "data" / "digits.onnx"


@pytest.fixture(scope="session")
def mounts() -> list[str]:
    """The command that gives a process mounts of its own."""
    found = mounting()
    if found is None:
        pytest.skip("platform: this container may not mount a disk of its own")
    return found


@pytest.mark.needs("unshare", "mount")
def test_every_save_on_a_full_disk_is_refused_and_leaves_the_old_file_and_as_much_room(
    mounts: list[str], tmp_path: Path
) -> None:
    told = fill_disks(mounts, tmp_path)
    assert not told["wrong"], "\n".join(told["wrong"][:20])
    assert told["refused"] == told["saves"] >= 100


CACHED = """
import os, sys, tempfile
from pathlib import Path
import numpy as np, zcrecord
from tools.range_server import serving
tree = {f'w{i}': np.full(100_000, i, np.uint8) for i in range(8)}
disk = Path(sys.argv[1])
with tempfile.TemporaryDirectory() as name:
    zcrecord.save_record(tree, Path(name, 'm.zcr'))
    with serving(Path(name)) as server:
        for part, free in enumerate((0, 4096, 150_000, 3 << 20)):
            found = os.statvfs(disk)
            with open(disk / 'ballast', 'wb') as file:
                if found.f_bavail * found.f_frsize > free:
                    os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - free)
            for _ in range(2):
                rec = zcrecord.load_record(f'{server.url}/m.zcr', cache=disk / f'cache {part}')
                assert all(map(np.array_equal, rec.values(), tree.values()))
            kept = [path for path in (disk / f'cache {part}').rglob('*') if path.is_file()]
            assert all(path.stat().st_size for path in kept), kept
            assert not [path for path in kept if path.name.startswith('.')], kept
            print(len(kept))
            os.unlink(disk / 'ballast')
"""


@pytest.mark.needs("unshare", "mount")
def test_cache_on_a_full_disk_keeps_what_fits_and_loading_goes_on(mounts: list[str], tmp_path: Path) -> None:
    kept = [int(number) for number in run_on_disk(mounts, tmp_path, "-c", CACHED, str(tmp_path)).split()]
    assert kept[0] < kept[2] < kept[3] >= 9


SAVES: dict[str, Any] = {
    "save_record": lambda path: zcrecord.save_record(TREE, path),
    "onnx.convert": lambda path: onnx.convert(DIGITS, path, force=True),
    "formats.convert": lambda path: formats.convert(path.parent / "in.npz", path, force=True),
    "pack": lambda path: transport.pack(path.parent / "in.zcr", path, force=True),
}
every_save = pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of sources for all saves, and nothing else."""
    zcrecord.save_record({"w": np.arange(30_000)}, tmp_path / "in.zcr")
    np.savez(tmp_path / "in.npz", w=np.arange(30_000))
    return tmp_path


@every_save
def test_folder_for_a_path_is_refused(save: Any, folder: Path) -> None:
    (folder / "m.zcr").mkdir()
    with pytest.raises(SourceError, match=r"m\.zcr: .*[Ii]s a directory"):
        save(folder / "m.zcr")
    assert sorted(os.listdir(folder)) == ["in.npz", "in.zcr", "m.zcr"]


def test_folder_that_is_not_there_or_a_file_is_refused(folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    for where, what in ((folder / "none", "No such file or directory"), (folder / "file", "Not a directory")):
        with pytest.raises(SourceError, match=what):
            zcrecord.save_record(TREE, where / "m.zcr")


def test_folder_that_vanishes_during_the_save_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "m.zcr"
    path.parent.mkdir()
    with pytest.raises(SourceError, match="cannot write: No such file or directory"), RecordWriter(path) as out:
        out.add("w", np.arange(3))
        shutil.rmtree(path.parent)
    assert os.listdir(tmp_path) == []


def test_folder_that_is_renamed_during_the_save_is_refused_and_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "m.zcr"
    path.parent.mkdir()
    zcrecord.save_record({"old": np.arange(3)}, path)
    with pytest.raises(SourceError, match="cannot write: No such file or directory"), RecordWriter(path) as out:
        out.add("w", np.arange(3))
        path.parent.rename(tmp_path / "moved")
    zcrecord.save_record({"new": np.arange(3)}, tmp_path / "moved" / "m.zcr")
    assert os.listdir(tmp_path / "moved") == ["m.zcr"]


def test_hard_link_keeps_the_old_file(tmp_path: Path) -> None:
    path, other = tmp_path / "m.zcr", tmp_path / "other.zcr"
    zcrecord.save_record({"old": np.arange(3)}, path)
    os.link(path, other)
    zcrecord.save_record({"new": np.arange(3)}, path)
    assert [list(zcrecord.load_record(p)) for p in (path, other)] == [["new"], ["old"]]


def test_symbolic_links_in_a_ring_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zcr").symlink_to(tmp_path / "b.zcr")
    (tmp_path / "b.zcr").symlink_to(tmp_path / "a.zcr")
    with pytest.raises(SourceError, match="cannot write: Too many levels of symbolic links"):
        zcrecord.save_record(TREE, tmp_path / "a.zcr")
    assert (tmp_path / "a.zcr").is_symlink()


def test_device_is_written_to_and_stays_one() -> None:
    zcrecord.save_record(TREE, "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


LIMITED = """
import os, resource, sys
import numpy as np, zcrecord
from zcrecord import onnx, formats, transport
from tools.faults.saves import SAVES, prepare
from tools.faults.cases import Case
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "sources").mkdir()
prepare(folder / "sources")
for name, save in SAVES.items():
    case = Case(name, folder / "sources", folder / "work", save.before(folder / "sources"), {})
    case.reset()
    case.run()
    case = case._replace(new=case.content())
    case.reset()
    before = resource.getrlimit(LIMIT)
    resource.setrlimit(LIMIT, (VALUE, before[1]))
    try:
        error = case.run()
    except Exception as untyped:
        error = f"{type(untyped).__name__}: {untyped}"
    finally:
        resource.setrlimit(LIMIT, before)
    for problem in [*case.wrong(error, ""), *([] if error else ["no error"])]:
        print(f"{name}: {problem}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "value"),
    [("resource.RLIMIT_FSIZE", "500"), ("resource.RLIMIT_FSIZE", "0"), ("resource.RLIMIT_NOFILE", "3"),
     ("resource.RLIMIT_NOFILE", "len(os.listdir('/proc/self/fd'))")],
)  # fmt: skip
def test_limit_of_the_process_is_one_typed_error_of_every_save(limit: str, value: str, tmp_path: Path) -> None:
    code = LIMITED.replace("LIMIT,", f"{limit},").replace("(LIMIT)", f"({limit})").replace("VALUE", value)
    assert r.run_python(code, tmp_path).stdout == ""


def test_every_number_of_free_descriptors_is_enough_or_one_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"old": np.arange(3)}, path)
    held: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    outcomes = []
    try:
        try:
            while True:
                held.append(os.dup(0))
        except OSError as error:
            assert error.errno == errno.EMFILE
        for _ in range(4):
            try:
                zcrecord.save_record({"new": np.arange(3)}, path)
                outcomes.append("saved")
            except SourceError as error:
                outcomes.append(str(error.errno))
                assert error.errno == errno.EMFILE
            os.close(held.pop())
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert outcomes[0] == str(errno.EMFILE)
    assert outcomes[-1] == "saved"
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.slow
def test_no_memory_is_no_half_file(tmp_path: Path) -> None:
    code = """
import os, resource, sys
import numpy as np, zcrecord
with open('/proc/self/statm') as file:
    used = int(file.read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
path = sys.argv[1]
zcrecord.save_record({'old': np.arange(10)}, path)
before = open(path, 'rb').read()
big = np.zeros((4000, 4001))[:, :4000]
with open('/proc/self/statm') as file:
    used = int(file.read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))
try:
    zcrecord.save_record({'big': big}, path)  # packed, in memory: 128 MB
except MemoryError:
    print('out of memory')
assert open(path, 'rb').read() == before and os.listdir(os.path.dirname(path)) == ['m.zcr']
"""
    assert r.run_python(code, tmp_path / "m.zcr").stdout == "out of memory\n"


@pytest.mark.slow
def test_an_archive_larger_than_the_address_space_is_told_and_its_shards_open(tmp_path: Path) -> None:
    big = {f"w{i}": np.full(1 << 20, i) for i in range(8)}
    zcrecord.save_record(big, tmp_path / "m.zcr", durable=False)
    zcrecord.save_record(big, tmp_path / "s.zcr", durable=False, max_shard_size=8 << 20)
    code = """
import os, resource, sys
import numpy as np, zcrecord
from zcrecord.cli.dispatch import main
main(['ls', sys.argv[2], 'w1'])
with open('/proc/self/statm') as file:
    used = int(file.read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))
sys.stderr = sys.stdout
for mmap in (True, False):
    try:
        zcrecord.load_record(sys.argv[1], mmap=mmap)
    except zcrecord.SourceError as error:
        print(error.message)
main(['ls', sys.argv[1]])
main(['ls', sys.argv[2], 'w1'])
print(zcrecord.load_record(sys.argv[2])['w7'][0])
"""
    first, *told = r.run_python(code, tmp_path / "m.zcr", tmp_path / "s.zcr").stdout.splitlines()
    why = "this process may not have as much address space as the file has bytes; raise its limit"
    what = f"cannot be read: Cannot allocate memory: {why}"
    assert told[0] == told[1] and told[0].startswith(what)
    assert told[2:] == [f"zcrecord: error: {tmp_path / 'm.zcr'}: {told[0]}", first, "7"]


READ_ONLY = """
import os, sys
from tools.faults.saves import SAVES, prepare
from tools.faults.cases import Case
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "sources").mkdir()
prepare(folder / "sources")
cases = []
for name, save in SAVES.items():
    work = folder / f"work {len(cases)}"
    case = Case(name, folder / "sources", work, save.before(folder / "sources"), {})
    case.reset()
    case.run()
    case.reset()
    case.dest.chmod(0o644)
    work.chmod(0o555)
    cases.append(case)
folder.chmod(0o755)
for file in folder.rglob("*"):
    if os.path.isfile(file):
        file.chmod(0o644)
(folder / "sources").chmod(0o755)
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)  # root may write anywhere
for case in cases:
    try:
        error = case.run()
    except Exception as untyped:
        error = f"{type(untyped).__name__}: {untyped}"
    for problem in case.wrong(error, ""):
        if "its mode became 644" not in problem:
            print(f"{case.name}: {problem}")
"""


@pytest.mark.slow
def test_read_only_folder_is_one_typed_error_of_every_save() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:  # others may enter it, which they may not those of pytest
        assert r.run_python(READ_ONLY, folder).stdout == ""


def command(*arguments: str, program: str = "zcrecord", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own."""
    entry = "onnx2zc_main" if program == "onnx2zc" else "main"
    code = f"import sys; from zcrecord.cli.dispatch import {entry}; sys.exit({entry}())"
    whole = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(whole, cwd=r.ROOT, stderr=subprocess.PIPE, timeout=60, **options)


STREAMED = {
    "onnx2zc": ("onnx2zc", "{digits}", "-"),
    "convert": ("zcrecord", "convert", "{digits}", "-", "--to", "zcr"),
    "pack": ("zcrecord", "pack", "{archive}", "-"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", STREAMED)
def test_full_device_on_standard_output_is_one_line(what: str, folder: Path) -> None:
    program, *arguments = (a.format(digits=DIGITS, archive=folder / "in.zcr") for a in STREAMED[what])
    with open("/dev/full", "wb") as full:
        done = command(*arguments, program=program, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1, done.stderr
    assert b"No space left on device" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("program", "size"), [("onnx2zc", 0), ("onnx2zc", 20_000), ("zcrecord", 5000)])
def test_standard_input_that_ends_early_is_one_line_and_leaves_the_old_file(
    program: str, size: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"old": np.arange(3)}, path)
    before = path.read_bytes()
    arguments = ["-", str(path), "--force"] if program == "onnx2zc" else ["convert", "-", str(path), "--force"]
    done = command(*arguments, program=program, input=DIGITS.read_bytes()[:size], stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_streams_that_give_and_take_little_at_a_time_make_the_same_archive(most: int, tmp_path: Path) -> None:
    class Slow:
        """A file object that reads and writes at most so much at a time, as sockets do."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def read(self, size: int = -1) -> bytes:
            return bytes(self._file.read(most if size < 0 else min(size, most)))

        def write(self, data: Any) -> int:
            return int(self._file.write(memoryview(data)[:most]))

    with open(DIGITS, "rb") as whole, open(tmp_path / "whole.zcr", "wb") as out:
        onnx.convert(whole, out)
    with open(DIGITS, "rb") as source, open(tmp_path / "slow.zcr", "wb") as out:
        onnx.convert(Slow(source), Slow(out))  # type: ignore[arg-type]
    assert zcrecord.load_record(tmp_path / "slow.zcr", verify="full").names
    expected = zcrecord.load_record(tmp_path / "whole.zcr").content_digest()
    assert zcrecord.load_record(tmp_path / "slow.zcr").content_digest() == expected


def test_raw_file_that_takes_little_at_a_time_gets_a_whole_archive(tmp_path: Path) -> None:
    """One that can be rewound has its header filled in at the end, which may be cut short as any write."""

    class Little(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:41])

    with Little(tmp_path / "m.zcr", "w+b") as file, RecordWriter(file) as out:
        out.add("a", TREE["b"])
        out.add("b", TREE["b"] + 1)
    rec = zcrecord.load_record(tmp_path / "m.zcr", verify="full")
    assert rec["b"].tolist() == [2.0] * 5
    assert rec.layout.sealed


def test_commands_that_read_tell_a_disk_that_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(SourceError, match=r"in\.zcr: cannot be read: Input/output error") as caught:
        zcrecord.load_record(folder / "in.zcr", mmap=False)
    assert caught.value.errno == errno.EIO
    assert main(["pack", str(folder / "in.zcr"), str(folder / "out.zst")]) == 1
    assert "Input/output error" in capsys.readouterr().err
    assert onnx2zc_main([str(folder / "none.onnx"), str(folder / "out.zcr")]) == 1
    assert sorted(os.listdir(folder)) == ["in.npz", "in.zcr"]


@pytest.mark.skipif(os.name != "posix", reason="platform: folders that can be synced")
def test_old_shards_stay_while_the_disk_does_not_take_the_folder_that_names_them_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The power may fail before the new name is on the disk, and then the old catalogue is back, with its shards."""
    path, fsync = folder / "m.zcr", os.fsync
    zcrecord.save_record({"a": np.ones(9), "b": np.zeros(9)}, path, max_shard_size=8)
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        zcrecord.save_record({"c": np.ones(3), "d": np.ones(4)}, path)
        zcrecord.save_record({"c": np.ones(3)}, folder / "new.zcr")
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        f"{file}: is written, but the system refused to flush its folder to the disk"
        for file in (path, folder / "new.zcr")
    ]
    assert {name: (folder / name).read_bytes() for name in before if name != "m.zcr"} == {
        name: octets for name, octets in before.items() if name != "m.zcr"
    }
    zcrecord.save_record({"c": np.ones(3)}, path)
    assert not [name for name in os.listdir(folder) if name.startswith("m-")], "the next save removes them"
