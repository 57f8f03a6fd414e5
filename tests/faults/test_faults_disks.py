"""Disks that are full, folders that refuse or vanish, limits that are reached: one typed error, the old file stays."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from tools.faults.filling import fill_disks, mounting, run_on_disk
from zcrecord import RecordWriter, SourceError, formats, onnx, transport

resource = pytest.importorskip("resource", reason="platform: limits and mounts of POSIX")
TREE = {"a": np.arange(40_000), "b": np.ones(5)}
DIGITS = Path(__file__).parents[1] / "data" / "digits.onnx"


@pytest.fixture(scope="session")
def mounts() -> list[str]:
    """The command that gives a process mounts of its own."""
    command = mounting()
    if command is None:
        pytest.skip("platform: this container may not mount a disk of its own")
    return command


@pytest.mark.needs("unshare", "mount")
def test_every_save_on_a_full_disk_is_refused_and_leaves_the_old_file_and_as_much_room(
    mounts: list[str], tmp_path: Path
) -> None:
    results = fill_disks(mounts, tmp_path)
    assert not results["wrong"], "\n".join(results["wrong"][:20])
    assert results["refused"] == results["saves"] >= 100


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
    stored = [int(number) for number in run_on_disk(mounts, tmp_path, "-c", CACHED, str(tmp_path)).split()]
    assert stored[0] < stored[2] < stored[3] >= 9


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
    for where, message in ((folder / "none", "No such file or directory"), (folder / "file", "Not a directory")):
        with pytest.raises(SourceError, match=message):
            zcrecord.save_record(TREE, where / "m.zcr")


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


CASES = """
import os, resource, sys
import numpy as np, zcrecord
from zcrecord import onnx, formats, transport
from tools.faults.saves import SAVES, prepare
from tools.faults.cases import Case
from pathlib import Path
folder = Path(sys.argv[1])
sources = folder / "sources"
sources.mkdir()
prepare(sources)
cases = [
    Case.after_one_save(name, sources, folder / f"work {number}", save.before(sources))
    for number, (name, save) in enumerate(SAVES.items())
]

def problems(case, error):
    return [f"{case.name}: {problem}" for problem in [*case.wrong(error, ""), *([] if error else ["no error"])]]
"""
LIMITED = (
    CASES
    + """
for case in cases:
    before = resource.getrlimit(LIMIT)
    resource.setrlimit(LIMIT, (VALUE, before[1]))
    error = case.attempt()
    resource.setrlimit(LIMIT, before)
    print(*problems(case, error), sep="\\n", end="")
"""
)


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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    errors: list[int | None] = []
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        held: list[int] = []
        stack.callback(lambda: [*map(os.close, held)])
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.dup(0))
        for _ in range(4):
            try:
                zcrecord.save_record({"new": np.arange(3)}, path)
                errors.append(None)
            except SourceError as error:
                errors.append(error.errno)
            os.close(held.pop())
    assert errors[0] == errno.EMFILE and errors[-1] is None and {*errors} == {errno.EMFILE, None}
    assert os.listdir(tmp_path) == ["m.zcr"]


@pytest.mark.slow
def test_no_memory_is_no_half_file(tmp_path: Path) -> None:
    code = """
import os, resource, sys
import numpy as np, zcrecord
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
    first, *reports = r.run_python(code, tmp_path / "m.zcr", tmp_path / "s.zcr").stdout.splitlines()
    why = "this process may not have as much address space as the file has bytes; raise its limit"
    message = f"cannot be read: Cannot allocate memory: {why}"
    assert reports[0].startswith(message)
    whole = "too little memory for the whole file; map it instead"
    assert reports[1] == f"cannot be read: Cannot allocate memory: {whole}"
    assert reports[2:] == [f"zcrecord: error: {tmp_path / 'm.zcr'}: {reports[0]}", first, "7"]


READ_ONLY = (
    CASES
    + """
for case in cases:
    case.dest.chmod(0o644)
    case.folder.chmod(0o555)
folder.chmod(0o755)
for file in folder.rglob("*"):
    if os.path.isfile(file):
        file.chmod(0o644)
sources.chmod(0o755)
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)  # root may write anywhere
for case in cases:
    found = [problem for problem in problems(case, case.attempt()) if "its mode became 644" not in problem]
    print(*found, sep="\\n", end="")
"""
)


@pytest.mark.slow
def test_read_only_folder_is_one_typed_error_of_every_save() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:  # others may enter it, which they may not those of pytest
        assert r.run_python(READ_ONLY, folder).stdout == ""


class Little(io.FileIO):
    """A raw file that reads and writes at most 41 bytes at a time, as sockets may."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(41 if size is None or size < 0 else min(size, 41)) or b""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:41]) or 0

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:41])


def test_streams_that_give_and_take_little_at_a_time_make_the_same_archive(tmp_path: Path) -> None:
    """The output can be rewound, and has its header filled in at the end, which may be cut short as any write."""
    with Little(DIGITS) as source, Little(tmp_path / "m.zcr", "w+b") as out:
        onnx.convert(source, out)
    onnx.convert(DIGITS, tmp_path / "whole.zcr")
    assert (tmp_path / "m.zcr").read_bytes() == (tmp_path / "whole.zcr").read_bytes()


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
