"""Several savers of one folder at once: a save that returned is undone by no edit of the file from before.

Each other saver comes at the worst moment: as the file is synced, after everything was looked at, or as it is moved to
its place. `python -m tools.faults` has them come at any.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import records as r
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import zcrecord
from tools.faults import saves
from zcrecord import embed, formats, integrity, onnx, transport
from zcrecord.embed import write_files
from zcrecord.errors import DestinationExistsError, SourceError
from zcrecord.report import report
from zcrecord.storage import scratch
from zcrecord.storage.files import open_sink

POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: locks of POSIX")
DIGITS = r.ROOT / "tests" / "data" / "digits.onnx"
KEY = Ed25519PrivateKey.generate()


def archive(path: Path) -> None:
    zcrecord.save_record({"w": np.arange(3000), "b": np.ones(5)}, path, durable=False)


def catalogue(path: Path) -> None:
    zcrecord.save_record({"w": np.arange(3000), "b": np.ones(5)}, path, durable=False, max_shard_size=100)


def model(path: Path) -> None:
    onnx.convert(DIGITS, path, durable=False, force=True)


def tuned(path: Path) -> None:
    model(path)
    onnx.tune(path, durable=False)


def program(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(range(256)) * 40)


def attached(path: Path) -> None:
    program(path)
    archive(path.with_name("weights.zcr"))
    embed.attach(path, path.with_name("weights.zcr"), durable=False)


def edit(path: Path) -> None:
    with zcrecord.edit(path) as edited:
        edited.metadata["by"] = "editor"


def attach(path: Path) -> None:
    archive(path.with_name("weights.zcr"))
    embed.attach(path, path.with_name("weights.zcr"))


EDITS: list[Any] = [
    pytest.param(archive, edit, id="edit"),
    pytest.param(archive, lambda path: integrity.sign(path, KEY), id="sign"),
    pytest.param(catalogue, lambda path: integrity.sign(path, KEY), id="sign a catalogue"),
    pytest.param(model, onnx.tune, id="tune"),
    pytest.param(tuned, onnx.untune, id="untune"),
    pytest.param(program, attach, id="attach"),
    pytest.param(attached, lambda path: embed.detach(path, path.with_name("off.zcr")), id="detach"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.zcr"


class Another:
    """Another saver, who replaces the file once."""

    def __init__(self, path: Path) -> None:
        self.octets = r.saved({"by": np.full(10, 7)})
        self.path, self.done = path, False

    def save(self) -> None:
        with open_sink(self.path, durable=False) as sink:
            sink.write(self.octets)
        self.done = True


def saved_at_the_first_fsync(path: Path, monkeypatch: pytest.MonkeyPatch) -> Another:
    """Return another saver, which comes as soon as the next one has synced its file."""
    another, sync = Another(path), os.fsync

    def synced(fd: int) -> None:
        sync(fd)
        if not another.done:
            another.save()

    monkeypatch.setattr(os, "fsync", synced)
    return another


@pytest.mark.parametrize("make, change", EDITS)
def test_a_save_that_returned_is_not_undone_by_an_edit_of_the_file_before(
    make: Callable[[Path], None], change: Callable[[Path], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(path)
    another = saved_at_the_first_fsync(path, monkeypatch)
    with pytest.raises(SourceError, match="was replaced meanwhile, and that stays; start again") as caught:
        change(path)
    assert another.done
    assert caught.value.path == str(path)
    assert path.read_bytes() == another.octets
    assert not [name for name in os.listdir(path.parent) if name.endswith("scratch")]


@POSIX
def test_no_save_comes_between_the_look_at_the_file_and_its_replacement(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive(path)
    another, replace = Another(path), os.replace
    saver = threading.Thread(target=another.save)

    def replaced(source: str, dest: str) -> None:
        if threading.current_thread() is not saver:
            saver.start()
            saver.join(0.5)  # all that it takes, unless it waits
        replace(source, dest)

    monkeypatch.setattr(os, "replace", replaced)
    edit(path)
    saver.join()
    assert another.done
    assert path.read_bytes() == another.octets, "the edit undid the save"


def test_of_two_editors_the_second_is_told_and_the_work_of_the_first_stays(path: Path) -> None:
    archive(path)
    with pytest.raises(SourceError, match="was replaced meanwhile"), zcrecord.edit(path) as second:
        second.metadata["by"] = "the second"
        with zcrecord.edit(path) as first:
            first.metadata["by"] = "the first"
    assert zcrecord.load_record(path).metadata == {"by": "the first"}
    assert os.listdir(path.parent) == [path.name]


def test_an_archive_that_was_removed_meanwhile_is_not_made_again(path: Path) -> None:
    archive(path)
    with pytest.raises(SourceError, match=r"No such file|was replaced meanwhile"), zcrecord.edit(path) as edited:
        edited.metadata["by"] = "editor"
        path.unlink()
    assert os.listdir(path.parent) == []


def sign_to(make: Callable[[Path], None]) -> Callable[[Path], object]:
    def sign(path: Path) -> None:
        make(path.with_name("old.zcr"))
        integrity.sign(path.with_name("old.zcr"), KEY, path)

    return sign


def of_an_archive(save: Callable[[Path, Path], object]) -> Callable[[Path], object]:
    """Return a save of `old.zcr`, which is beside its destination."""

    def run(path: Path) -> None:
        model(path.with_name("old.zcr"))
        save(path.with_name("old.zcr"), path)

    return run


TO_NEW: list[Any] = [
    pytest.param(sign_to(archive), id="sign"),
    pytest.param(sign_to(catalogue), id="sign a catalogue"),
    pytest.param(of_an_archive(onnx.tune), id="tune"),
    pytest.param(of_an_archive(lambda old, path: transport.pack(old, path.as_uri())), id="pack to a file's URL"),
    pytest.param(of_an_archive(lambda old, path: integrity.sign(old, KEY, path.as_uri())), id="sign to a file's URL"),
    pytest.param(of_an_archive(lambda old, path: formats.convert(old, path.as_uri())), id="convert to a file's URL"),
    pytest.param(of_an_archive(lambda old, path: formats.convert(old, path, max_shard_size=8)), id="convert to shards"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    saves.prepare(folder)
    return folder


def assert_stays(save: Callable[[], object], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a file which comes to a path while a save is under way is not replaced."""
    another = saved_at_the_first_fsync(path, monkeypatch)
    with pytest.raises(DestinationExistsError, match="was made by another saver meanwhile, and stays"):
        save()
    assert another.done
    assert path.read_bytes() == another.octets


@pytest.mark.parametrize("save", TO_NEW)
def test_what_came_to_a_free_place_meanwhile_is_replaced_only_by_force(
    save: Callable[[Path], object], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_stays(lambda: save(path), path, monkeypatch)


@pytest.mark.parametrize("name", [name for name, save in saves.SAVES.items() if save.asks])
def test_what_came_to_the_free_place_of_any_save_meanwhile_stays(
    name: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = saves.SAVES[name]
    path = tmp_path / save.name
    assert_stays(lambda: save.run(sources, path, False), path, monkeypatch)


URLS: dict[str, Callable[..., Any]] = {
    "convert": lambda url, **options: formats.convert("m.zcr", url, **options),
    "pack": lambda url, **options: transport.pack("m.zcr", url, **options),
    "unpack": lambda url, **options: transport.unpack("m.zst", url, **options),
    "onnx.convert": lambda url, **options: onnx.convert(DIGITS, url, **options),
    "to_onnx": lambda url, **options: onnx.to_onnx("m.zcr", url, **options),
    "tune": lambda url, **options: onnx.tune("m.zcr", url, threads=1, **options),
    "report": lambda url, **options: report("m.zcr", url, digest=True, **options),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("save", URLS)
def test_what_came_to_a_free_url_meanwhile_is_replaced_only_by_force(
    save: str, force: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    model(path)
    transport.pack("m.zcr", "m.zst", durable=False)
    store, offset = fsspec.filesystem("memory"), "/at_once/m.zcr"

    def another(*_: Any) -> None:
        if not store.exists(offset):
            store.pipe_file(offset, b"another's")

    try:
        with contextlib.nullcontext() if force else pytest.raises(SourceError, match="was written by another"):
            URLS[save](f"memory:/{offset}", force=force, progress=another)
        assert (store.cat_file(offset) == b"another's") != force
    finally:
        store.rm_file(offset)


def test_an_edit_ends_where_it_began_though_the_working_folder_is_another(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive(path)
    (path.parent / "other").mkdir()
    other = path.parent / "other" / "new.zcr"
    other.write_bytes(b"another's")
    for dest in (None, "new.zcr"):
        monkeypatch.chdir(path.parent)
        with zcrecord.edit(path.name, dest, force=True) as edited:
            edited["added"] = np.arange(2)
            monkeypatch.chdir("other")
        assert "added" in zcrecord.load_record(path.with_name(dest or path.name))
    assert other.read_bytes() == b"another's"


def test_companions_go_where_the_conversion_began_though_the_working_folder_is_another(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    for folder, text in {"from": "new", "to": "old", "other/to": "another's"}.items():
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").write_text(text, encoding="utf-8")
    archive(Path("from/model.zcr"))
    formats.convert("from", "to", force=True, progress=lambda *_: os.chdir(path.parent / "other"))
    assert (path.parent / "to" / "config.json").read_text(encoding="utf-8") == "new"
    assert (path.parent / "other" / "to" / "config.json").read_text(encoding="utf-8") == "another's"


def test_a_linked_model_that_was_edited_while_its_archive_was_tuned_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(path)
    linked = path.with_name("linked.onnx")
    onnx.to_onnx(path, linked, external=True)
    another = saved_at_the_first_fsync(linked, monkeypatch)
    with pytest.raises(SourceError, match="was replaced meanwhile, and that stays") as caught:
        onnx.tune(path)
    assert another.done
    assert caught.value.path == str(linked)
    assert linked.read_bytes() == another.octets


def test_an_archive_that_was_replaced_as_soon_as_it_was_tuned_is_told_as_that(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as a disk that fails."""
    model(path)
    another, replace = Another(path.with_name("another.zcr")), os.replace
    another.save()

    def replaced(source: str, dest: str) -> None:
        replace(source, dest)
        if dest == str(path):
            replace(path.with_name("another.zcr"), path)

    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises(SourceError, match="was replaced by another saver as soon as it was written"):
        onnx.tune(path, threads=1)
    assert path.read_bytes() == another.octets


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="platform: /dev/fd")
@pytest.mark.parametrize("strangers", [False, True])
@pytest.mark.parametrize("save", ["one", "shards", "tune"])
def test_a_descriptor_of_a_removed_file_is_no_destination(save: str, strangers: bool, path: Path) -> None:
    """Its path has " (deleted)" behind it, and a file of that name is not meant."""
    old, other = path.with_name("old.zcr"), path.with_name(f"{path.name} (deleted)")
    model(old)
    with path.open("w+b") as file:
        path.unlink()
        if strangers:
            other.write_bytes(b"stranger's")
        dest = f"/dev/fd/{file.fileno()}"
        with pytest.raises(SourceError, match="is an open file that was removed; name a path, or pass the file object"):
            if save == "tune":
                onnx.tune(old, dest, force=True)
            else:
                arrays = {"a": np.arange(3), "b": np.arange(4)}
                zcrecord.save_record(arrays, dest, max_shard_size=8 if save == "shards" else None)
    assert sorted(path.parent.iterdir()) == [*[other] * strangers, old]
    assert not strangers or other.read_bytes() == b"stranger's"


def test_a_file_that_is_to_be_new_replaces_none(path: Path) -> None:
    refused = pytest.raises(DestinationExistsError, match="was made by another saver meanwhile, and stays")
    with refused, open_sink(path, replaces=()) as sink:
        sink.write(b"mine")
        path.write_bytes(b"another's")
    assert path.read_bytes() == b"another's"


# Several files at once.


def sharded_safetensors(path: Path, number: int) -> None:
    zcrecord.save_record({"a": np.full(100, number), "b": np.full(100, number)}, path.with_name(f"{number}.zcr"))
    formats.convert(
        path.with_name(f"{number}.zcr"), path.with_name("m.safetensors"), max_shard_size=800, force=True, durable=False
    )


def generated(path: Path, number: int) -> None:
    mark = b"/* SPDX-License-Identifier: 0BSD, generated by zcrecord */ "
    write_files.write({name: [mark, b"%d" % number] for name in ("m.h", "m.c")}, path.parent)


def safetensors_now(path: Path) -> set[int]:
    formats.convert(path.with_name("m.safetensors.index.json"), path, force=True)
    return {int(value[0]) for value in zcrecord.load_record(path).values()}


def generated_now(path: Path) -> set[int]:
    return {int(path.with_name(name).read_bytes().split()[-1]) for name in ("m.h", "m.c")}


@POSIX
@pytest.mark.parametrize(
    "save, now", [(sharded_safetensors, safetensors_now), (generated, generated_now)], ids=["safetensors", "generated"]
)
def test_of_two_savers_of_several_files_one_wins_whole(
    save: Callable[[Path, int], None], now: Callable[[Path], set[int]], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes as soon as the folder's lock is off, after a file of the first has its place."""
    import fcntl

    save(path, 1)
    replace, lock = os.replace, fcntl.flock
    placed: list[str] = []
    saved: list[bool] = []

    def replaced(source: str, dest: str) -> None:
        replace(source, dest)
        placed.append(dest)

    def unlocked(fd: int, kind: int) -> None:
        lock(fd, kind)
        if kind == fcntl.LOCK_UN and not saved and any(name.endswith((".safetensors", ".h", ".c")) for name in placed):
            saved.append(True)
            save(path, 2)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replaced)
        patch.setattr(fcntl, "flock", unlocked)
        save(path, 3)
    assert saved
    assert len(now(path)) == 1


@POSIX
@pytest.mark.parametrize("save", [sharded_safetensors, generated])
def test_savers_of_files_that_are_links_into_each_others_folders_lock_these_in_one_order(
    save: Callable[[Path, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would wait for the other."""
    import fcntl

    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        save(folder / "m.zcr", 1)
    for folder, other in (folders, folders[::-1]):
        for file in {*folder.glob("m*.safetensors"), *folder.glob("m.[hc]")}:
            file.rename(other / f"of-{folder.name}-{file.name}")
            file.symlink_to(other / f"of-{folder.name}-{file.name}")
    numbers, lock = {folder.stat().st_ino: folder.name for folder in folders}, fcntl.flock
    locked: list[str] = []

    def noted(fd: int, operation: int) -> None:
        lock(fd, operation)
        if operation & fcntl.LOCK_EX and (name := numbers.get(os.fstat(fd).st_ino)):
            locked.append(name)

    orders = []
    monkeypatch.setattr(fcntl, "flock", noted)
    for folder in folders:
        locked.clear()
        save(folder / "m.zcr", 2)
        orders.append(locked[-2:])  # those of the last step
    assert sorted(orders[0]) == ["a", "b"]
    assert orders[0] == orders[1]


# The lock.


@POSIX
def test_a_lock_inside_a_lock_goes_on_and_another_thread_waits_for_the_outer_one(tmp_path: Path) -> None:
    reports: list[str] = []

    def other() -> None:
        with scratch.folder_lock(str(tmp_path)):
            reports.append("other")

    waiting = threading.Thread(target=other)
    with scratch.folder_lock(str(tmp_path)):
        waiting.start()
        with scratch.folder_lock(f"{tmp_path}/."):
            waiting.join(0.2)
        waiting.join(0.2)
        reports.append("first")
    waiting.join()
    assert reports == ["first", "other"]
    assert os.listdir(tmp_path) == []


def plain(path: Path) -> Any:
    return open_sink(path, durable=False)


def writer(path: Path) -> Any:
    return zcrecord.RecordWriter(path, durable=False)


def sharded(path: Path) -> Any:
    return zcrecord.RecordWriter(path, durable=False, max_shard_size=8)


FORKS = pytest.mark.filterwarnings("ignore")  # of forks beside threads


@FORKS
@POSIX
@pytest.mark.parametrize("begin", [plain, writer, sharded])
def test_a_child_that_was_forked_meanwhile_finishes_no_file_of_its_parent(
    begin: Callable[[Path], Any], path: Path
) -> None:
    def put(out: Any, number: int) -> None:
        out.write(bytes([number]) * 10) if begin is plain else out.add(f"t{number}", np.arange(number))

    catalogue(path)
    before = {name: (path.parent / name).read_bytes() for name in os.listdir(path.parent)}
    answer, reports = os.pipe()
    with begin(path) as out, open(answer, "rb", buffering=0), open(reports, "wb", buffering=0):
        put(out, 2)
        child = os.fork()
        if not child:
            try:
                put(out, 3)
                out.flush() if begin is plain else out.__exit__(None, None, None)
                os.write(reports, b"finished")
            except BaseException as error:
                os.write(reports, repr(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(answer, 1000)
        assert b"SourceError" in said and b"is being written by the process that forked this one" in said
        assert {name: (path.parent / name).read_bytes() for name in before} == before
        put(out, 4)
    if begin is plain:
        assert path.read_bytes() == b"\2" * 10 + b"\4" * 10
    else:
        record = zcrecord.load_record(path, verify="full")
        assert {name: value.tolist() for name, value in record.items()} == {"t2": [0, 1], "t4": [0, 1, 2, 3]}


@FORKS
@POSIX
@pytest.mark.parametrize("saver_dies", [False, True])
def test_a_child_that_was_forked_meanwhile_keeps_no_lock(
    saver_dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, end = os.pipe()
    saver = os.fork() if saver_dies else 0
    if not saver:
        with scratch.folder_lock(str(tmp_path)):
            child = os.fork()
            if not child:
                os.close(end)
                os.read(wait, 1)
            if not child or saver_dies:
                os._exit(0)
    if saver_dies:
        os.waitpid(saver, 0)
    monkeypatch.setattr(scratch, "_PATIENCE", 0)
    try:
        archive(tmp_path / "m.zcr")
    finally:
        os.close(end)
        os.close(wait)
        if not saver_dies:
            os.waitpid(child, 0)


@POSIX
@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_folder_whose_lock_cannot_be_asked_for_now_is_an_error(
    call: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may open no more files is not one whose file system has no locks."""
    import fcntl

    archive(path)
    before, opened, lock = path.read_bytes(), os.open, fcntl.flock

    def exhausted(name: Any, flags: int, *more: Any) -> int:
        if os.path.isdir(name):
            raise OSError(24, "Too many open files")
        return opened(name, flags, *more)

    def lost(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(5, "Input/output error")
        lock(fd, operation)

    if call == "open":
        monkeypatch.setattr(os, "open", exhausted)
    else:
        monkeypatch.setattr(fcntl, "flock", lost)
    with pytest.raises(SourceError, match=r"cannot write: the folder cannot be locked: (Too many|Input)"):
        edit(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


FORKING = """
import os, sys
import numpy as np, zcrecord
from zcrecord.storage.files import scratch_folder
with scratch_folder(sys.argv[1]) as folder, zcrecord.RecordWriter(sys.argv[1]) as out:
    out.add("w", np.arange(3))
    for leaves in True, False:  # the blocks, by an exception; or the interpreter alone, which then ends
        if not (child := os.fork()):
            if leaves:
                sys.exit()
            __import__("atexit")._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        assert os.path.isdir(folder)
"""


@pytest.mark.slow
@POSIX
def test_a_child_that_ends_in_the_middle_of_a_save_leaves_it_alone(path: Path) -> None:
    r.run_python(FORKING, path)
    assert list(zcrecord.load_record(path)) == ["w"]
    assert os.listdir(path.parent) == [path.name]


@POSIX
def test_a_folder_that_stays_locked_is_an_error_and_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    archive(path)
    before = path.read_bytes()
    monkeypatch.setattr(scratch, "_PATIENCE", 0)
    held = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(SourceError, match="another program has kept this folder locked for 0 seconds"):
            zcrecord.save_record({"w": np.arange(3)}, path)
    finally:
        os.close(held)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@POSIX
@pytest.mark.parametrize("kind", ["no locks", "folders cannot be opened"])
def test_where_folders_cannot_be_locked_saves_go_on_and_edits_still_look(
    kind: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    opened = os.open

    def refuse(*_: Any) -> None:
        raise OSError(95, "no locks here")

    def unreadable(name: Any, flags: int, *more: Any) -> int:
        if os.path.isdir(name):
            raise PermissionError(13, "may be written, and not read")
        return opened(name, flags, *more)

    if kind == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    else:
        monkeypatch.setattr(os, "open", unreadable)
    archive(path)
    edit(path)
    catalogue(path)
    catalogue(path)
    shutil.copy(path, path.with_name("copy.zcr"))
    archive(path)
    with pytest.raises(SourceError, match="was replaced meanwhile"), zcrecord.edit(path) as edited:
        edited.metadata["by"] = "editor"
        archive(path)
