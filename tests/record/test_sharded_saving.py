"""Records saved in shards: sizes and names, saves over older ones, failures that leave the old record."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import zstandard
from costly_archives import write_twins

import zcrecord
from zcrecord import formats, onnx, transport
from zcrecord.codec.layout import NONE
from zcrecord.errors import DestinationExistsError, LimitError, ProducerError, SourceError, UnsupportedError
from zcrecord.record import own_shards
from zcrecord.record.sharded_writer import ShardedWriter
from zcrecord.storage import scratch
from zcrecord.storage.scratch import ListedFile, note_of
from zcrecord.storage.sink import ObjectSink
from zcrecord.writing.catalogue import write_catalogue

MODEL = {f"layer{i}": {"w": np.full(100, i, np.float32)} for i in range(5)}
OTHER = {name: {"w": value["w"] + 1} for name, value in MODEL.items()}


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def numbered(count: int, stem: str = "model") -> list[str]:
    return [f"{stem}-{i:05}-of-{count:05}.zcr" for i in range(1, count + 1)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_are_as_full_as_they_may_be_and_named_by_their_number(tmp_path: Path) -> None:
    report = zcrecord.save_record(MODEL, tmp_path / "model.zcr", max_shard_size=800)
    assert files(tmp_path) == [*numbered(3), "model.zcr"]
    assert [len(zcrecord.load_record(tmp_path / name)) for name in numbered(3)] == [2, 2, 1]
    assert report.tensors == 5 and report.payload_bytes == 2000
    before = contents(tmp_path)
    assert report.archive_bytes == sum(map(len, before.values()))
    (tmp_path / "again").mkdir()
    zcrecord.save_record(MODEL, tmp_path / "again" / "model.zcr", max_shard_size=800)
    assert contents(tmp_path / "again") == before
    zcrecord.save_record(MODEL, tmp_path / "again" / "less.zcr", max_shard_size=799)
    assert set(numbered(5, "less")) < set(files(tmp_path / "again")), "one byte less makes other shards"


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    tree = {"a": np.zeros(10, np.uint8), "big": np.arange(1000), "b": np.ones(10, np.uint8)}
    zcrecord.save_record(tree, tmp_path / "model.zcr", max_shard_size=64)
    assert files(tmp_path) == [*numbered(3), "model.zcr"]
    r.assert_same(zcrecord.load_record(tmp_path / "model.zcr").tree(), tree)
    zcrecord.save_record({"w": np.ones(500)}, tmp_path / "model.zcr", max_shard_size=800)
    assert files(tmp_path) == ["model.zcr"], "one payload needs no catalogue"
    assert zcrecord.load_record(tmp_path / "model.zcr")["w"].sum() == 500


@pytest.mark.parametrize("tree", [MODEL, {}, {"only": "an attribute", "data": b"bytes"}, {"none": np.zeros((0, 3))}])
def test_what_fits_into_one_shard_is_one_archive(tmp_path: Path, tree: Any) -> None:
    zcrecord.save_record(tree, tmp_path / "model.zcr", max_shard_size=2000)
    assert files(tmp_path) == ["model.zcr"]
    assert zcrecord.load_record(tmp_path / "model.zcr").content_digest() == r.round_trip(tree).content_digest()


def test_ties_stay_in_one_shard_and_equal_bytes_are_apart_when_they_are_edited(tmp_path: Path) -> None:
    shared = np.arange(100, dtype=np.float32)
    tree = {"a": shared, "b": np.ones(100, np.float32), "c": shared, "d": shared.copy(), "e": shared[10:20]}
    zcrecord.save_record(tree, tmp_path / "model.zcr", max_shard_size=800)
    record = zcrecord.load_record(tmp_path / "model.zcr", mode="c")
    record["a"][12] = 5
    assert record["c"][12] == 5 and record["e"][2] == 5 and record["d"][12] == 12


@pytest.mark.parametrize("size", [100, 400, 800])
def test_equal_bytes_are_stored_once_whatever_shard_they_would_come_to(tmp_path: Path, size: int) -> None:
    """A shard that has nothing else, as here the last one, is none."""
    names = [f"w{i}" for i in range(50)]
    tree = {name: np.arange(100, dtype=np.float32) for name in names} | {"other": np.ones(100, np.float32)}
    (tmp_path / "once.zcr").write_bytes(r.saved(tree))
    loaded = zcrecord.load_record(tmp_path / "once.zcr")
    for source in (tree, loaded, loaded.select("w*"), {"other": tree["other"], **{n: tree[n] for n in names}}):
        zcrecord.save_record(source, tmp_path / "model.zcr", max_shard_size=size)
        record = zcrecord.load_record(tmp_path / "model.zcr", verify="full")
        r.assert_same(dict(record), dict(source))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 40_000 and record.info("w1").tied == ()
        assert len(record.archive.source.file_names) in ((0, 2) if "other" in record else (0,))


@pytest.mark.parametrize("most", [1, 700, 5000, 3 << 20])
def test_payloads_written_together_make_the_files_of_those_written_alone(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some equal one in this shard, in another or in neither; some are large, big-endian, or have gaps."""
    rng = np.random.default_rng(0)
    tree: dict[str, Any] = {f"t{i:03}": np.full(int(n), i % 70, ["<c8", ">i4", "?"][i % 3])
                            for i, n in enumerate(rng.integers(1, 90, 200))}  # fmt: skip
    tree |= {"large": np.arange(1 << 18), "gaps": np.arange(300)[::3], "again": tree["t000"].copy(), "x": np.ones(1)}
    folders = [tmp_path / way for way in ("together", "alone")]
    for folder in folders:
        folder.mkdir()
        zcrecord.save_record(tree, folder / "model.zcr", max_shard_size=most)
        monkeypatch.delattr(ShardedWriter, "store_next", raising=False)
    assert contents(folders[0]) == contents(folders[1])


def test_equal_bytes_are_not_multiplied_where_there_are_no_digests_to_find_them(tmp_path: Path) -> None:
    write_twins(tmp_path / "twins.zcr", 1200, 1 << 20)
    record = zcrecord.load_record(tmp_path / "twins.zcr")
    for size in (None, 1 << 20):
        with pytest.raises(LimitError, match=r"twins\.zcr: tensors that share their bytes would take 1\.26e\+09 bytes"):
            zcrecord.save_record(record, tmp_path / "model.zcr", digest="none", max_shard_size=size)
    assert files(tmp_path) == ["twins.zcr"]


def test_lazy_tensors_and_pieces_are_written_forward(tmp_path: Path) -> None:
    def pieces(value: int) -> Iterator[Any]:
        return (np.full(25, value, np.float32) for _ in range(4))

    lazy = {name: {"w": zcrecord.LazyTensor(np.float32, (100,), pieces(i))} for i, name in enumerate(MODEL)}
    zcrecord.save_record(lazy, tmp_path / "lazy.zcr", max_shard_size=800)
    r.assert_same(zcrecord.load_record(tmp_path / "lazy.zcr").tree(), MODEL)
    with zcrecord.RecordWriter(tmp_path / "model.zcr", max_shard_size=800, metadata={"of": "pieces"}) as out:
        for i in range(5):
            with out.tensor(f"layer{i}.w", np.float32, (100,)) as tensor:
                for piece in pieces(i):
                    tensor.write(piece)
        out.tie("head", "layer0.w")
        out.attribute("blob", b"data")
        out.module("layer1", "object", "Layer")
    record = zcrecord.load_record(tmp_path / "model.zcr", verify="full")
    assert out.report is not None and out.report.tensors == 6 and out.report.tied == 1
    assert record.modules["layer1"].type_name == "Layer" and record.metadata == {"of": "pieces"}
    r.assert_same(record.tree(), {**MODEL, "head": MODEL["layer0"]["w"], "blob": b"data"})
    assert np.shares_memory(record["head"], record["layer0.w"])


@pytest.mark.parametrize(("digest", "alignment"), [("xxh3", 4096), ("none", 16)])
def test_alignment_and_digest_are_those_asked_for(tmp_path: Path, digest: str, alignment: int) -> None:
    options: dict[str, Any] = {"alignment": alignment, "digest": digest}
    zcrecord.save_record(MODEL, tmp_path / "model.zcr", max_shard_size=800, **options)
    record = zcrecord.load_record(tmp_path / "model.zcr", verify="full")
    assert record.layout.alignment == alignment and record.layout.digest == digest
    assert all(r.address(value) % alignment == 0 for value in record.values())


def test_over_a_catalogue_the_new_shards_get_free_names_and_the_old_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "model.zcr"
    zcrecord.save_record(MODEL, path, max_shard_size=800)
    before = zcrecord.load_record(path)
    zcrecord.save_record(OTHER, path, max_shard_size=800)
    assert files(tmp_path) == sorted([*numbered(3, "model~2"), "model.zcr"])
    r.assert_same(zcrecord.load_record(path, verify="full").tree(), OTHER)
    zcrecord.save_record(MODEL, path, max_shard_size=800)
    assert files(tmp_path) == [*numbered(3), "model.zcr"]
    before.close()
    zcrecord.save_record(zcrecord.load_record(path), path, max_shard_size=1200)  # over itself
    assert files(tmp_path) == [*numbered(2), "model.zcr"]
    zcrecord.save_record(zcrecord.load_record(path), path, max_shard_size=10_000)
    assert files(tmp_path) == ["model.zcr"]
    r.assert_same(zcrecord.load_record(path).tree(), MODEL)


def write(path: Path) -> None:
    with zcrecord.RecordWriter(path) as out:
        for name, value in OTHER.items():
            out.add(f"{name}.w", value["w"])


SAVES: dict[str, Any] = {
    "plain": lambda path: zcrecord.save_record(OTHER, path),
    "writer": write,
    "shards": lambda path: zcrecord.save_record(OTHER, path, max_shard_size=800),
    "one shard": lambda path: zcrecord.save_record(OTHER, path, max_shard_size=10_000),
    "convert": lambda path: formats.convert(io.BytesIO(r.saved(OTHER)), path, force=True),
}
every_save = pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)


@every_save
def test_files_that_a_strangers_catalogue_names_and_that_are_not_its_shards_stay(save: Any, tmp_path: Path) -> None:
    """They have the very names that its shards have; it came without those."""
    path = tmp_path / "model.zcr"
    (tmp_path / "strangers").mkdir()
    zcrecord.save_record(MODEL, tmp_path / "strangers" / "model.zcr", max_shard_size=800)
    os.replace(tmp_path / "strangers" / "model.zcr", path)
    first, second, third = (tmp_path / name for name in numbered(3))
    first.write_bytes(b"somebody's")
    zcrecord.save_record(OTHER, second)
    damaged = bytearray((tmp_path / "strangers" / third.name).read_bytes())
    damaged[-100] ^= 1  # in its index: the trailer is the right one
    third.write_bytes(damaged)
    before = {file: file.read_bytes() for file in (first, second, third)}
    save(path)
    assert {file: file.read_bytes() for file in before} == before
    r.assert_same(zcrecord.load_record(path, verify="full").tree(), OTHER)


@pytest.mark.parametrize("other", ["best.zcr", "rmodel.zcr", "zcrmodel.zcr"])
@every_save
def test_shards_that_another_catalogue_there_names_stay(save: Any, other: str, tmp_path: Path) -> None:
    """Names stand one behind the other: `r` and the next look like one that begins with `rmodel`."""
    path = tmp_path / "model.zcr"
    zcrecord.save_record(MODEL, path, max_shard_size=800)
    shutil.copy(path, tmp_path / other)
    save(path)
    r.assert_same(zcrecord.load_record(tmp_path / other, verify="full").tree(), MODEL)
    r.assert_same(zcrecord.load_record(path, verify="full").tree(), OTHER)


def refused(*_: Any, **__: Any) -> Any:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("kind", ["unreadable", "link", "folder", "shard's name", "packed"])
def test_shards_that_another_may_name_stay(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be read now may name any; one may itself have a name as shards have."""
    path, opened = tmp_path / "model.zcr", os.open
    other = tmp_path / ("model~2-00001-of-00001.zcr" if kind == "shard's name" else "best.zcr")
    zcrecord.save_record(MODEL, path, max_shard_size=800)
    shutil.copy(path, tmp_path / "kept")
    if kind == "link":
        other.symlink_to(tmp_path / "kept.gone")
    elif kind == "packed":
        other.write_bytes(zstandard.compress(path.read_bytes()))
    else:
        shutil.copy(path, other)
    with monkeypatch.context() as patch:
        if kind == "unreadable":
            patch.setattr(os, "open", lambda *a, **k: (refused if a[0] == str(other) else opened)(*a, **k))
        elif kind == "folder":
            patch.setattr(os, "scandir", refused)
        zcrecord.save_record(OTHER, path, max_shard_size=800)
    r.assert_same(zcrecord.load_record(path, verify="full").tree(), OTHER)
    if kind == "link":
        other.unlink()
        shutil.copy(tmp_path / "kept", other)
    r.assert_same(zcrecord.load_record(other, verify="full").tree(), MODEL)
    other.unlink()
    zcrecord.save_record(OTHER, path)
    assert (kind == "shard's name") or not {*numbered(3)} & {*files(tmp_path)}, "the next save removes them"


@pytest.mark.parametrize("order", ["as saved", "names last"])
def test_shards_that_a_catalogue_names_behind_a_long_index_stay(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "MOST_OF_CATALOGUE", 4096)  # of millions of bytes
    path, other, model = tmp_path / "model.zcr", tmp_path / "best.zcr", {**MODEL, "b": [b"%d" % i for i in range(300)]}
    zcrecord.save_record(model, path, max_shard_size=800)
    with zcrecord.Record(zcrecord.load_record(path).archive.source.file_archive(NONE)) as catalogue:
        tree = catalogue.tree()
        tree = dict(reversed(tree.items())) if order == "names last" else tree
        with other.open("wb") as file:
            write_catalogue(tree, ObjectSink(file), kind=1)
    r.assert_same(zcrecord.load_record(other, verify="full").tree(), model)
    zcrecord.save_record(OTHER, path)
    r.assert_same(zcrecord.load_record(other, verify="full").tree(), model)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="platform: named pipes")
def test_a_pipe_that_takes_a_file_s_place_between_two_looks_makes_no_save_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "best.zcr")
    with pytest.raises(SourceError, match="not a regular file"):
        own_shards._may_be_catalogue(str(tmp_path / "best.zcr"))
    assert scratch._searched_bytes(str(tmp_path), "best.zcr", "model.zcr") == b""


@every_save
def test_shards_are_not_kept_by_a_catalogue_whose_own_end_in_their_names(save: Any, tmp_path: Path) -> None:
    for name in ("big-model.zcr", "model.zcr"):
        zcrecord.save_record(MODEL, tmp_path / name, max_shard_size=800)
    save(tmp_path / "model.zcr")
    assert not {*numbered(3)} & {*files(tmp_path)}
    r.assert_same(zcrecord.load_record(tmp_path / "big-model.zcr", verify="full").tree(), MODEL)


@pytest.mark.parametrize(
    "guess",
    [
        *("{name}", "0 {nbytes} {changed} {name}", "{inode} {nbytes} 0 {name}", "1 2 3 ../x"),
        *("9" * 5000 + " 1 1 x", "٣ 1 1 x", "1 1"),
    ],
)
def test_a_planted_note_has_nothing_removed(guess: str, tmp_path: Path) -> None:
    """Its writer knows names and sizes, and not which files these are; what makes no sense is no reason to fail."""
    mine = tmp_path / "model-00001-of-00002.zcr"
    zcrecord.save_record(MODEL, mine)
    line = guess.format(**ListedFile.from_path(str(mine), mine.name)._asdict())
    (tmp_path / ".model.zcr.0123456789ab.zcr-scratch").write_bytes(note_of([]) + line.encode())
    zcrecord.save_record(OTHER, tmp_path / "model.zcr")
    assert files(tmp_path) == [mine.name, "model.zcr"]


@pytest.mark.skipif(os.name != "posix", reason="platform: POSIX file systems")
def test_shards_have_the_mode_of_the_file_that_they_replace(tmp_path: Path) -> None:
    path = tmp_path / "model.zcr"
    zcrecord.save_record(OTHER, path)
    path.chmod(0o640)
    zcrecord.save_record(MODEL, path, max_shard_size=800)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in files(tmp_path)} == {0o640}


def test_through_a_link_the_shards_lie_beside_the_file_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "model.zcr").symlink_to(tmp_path / "far" / "weights.zcr")
    zcrecord.save_record(MODEL, tmp_path / "model.zcr", max_shard_size=800)
    assert files(tmp_path / "far") == [*numbered(3, "weights"), "weights.zcr"]
    assert (tmp_path / "model.zcr").is_symlink()
    for path in (tmp_path / "model.zcr", tmp_path / "far" / "weights.zcr"):
        r.assert_same(zcrecord.load_record(path).tree(), MODEL)


@pytest.mark.skipif(os.name != "posix", reason="platform: folders that can be synced")
def test_each_step_is_on_the_disk_before_the_next_one_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards, then what names them, and old shards go when nothing can bring back what named those."""
    path, made = tmp_path / "model.zcr", []
    zcrecord.save_record(MODEL, path, max_shard_size=800)
    calls: dict[str, Any] = {"sync": os.fsync, "name": os.replace, "remove": os.unlink}

    def noted(step: str, *args: Any) -> None:
        calls[step](*args)
        if step == "sync":
            made.append("sync folder" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else "sync file")
        elif "scratch" not in args[-1]:
            made.append(f"{step} {re.sub('[0-9]+|~', '', os.path.basename(args[-1]))}")

    for step, call in calls.items():
        monkeypatch.setattr(os, call.__name__, partial(noted, step))
    zcrecord.save_record(OTHER, path, max_shard_size=800)
    assert [step for step, _ in itertools.groupby(made)] == [
        "sync file", "name model--of-.zcr", "sync folder", "name model.zcr", "sync folder", "remove model--of-.zcr",
    ]  # fmt: skip


def full(path: Path) -> Callable[[str, str], None]:
    """Return a rename that fails for the destination `path`, as on a full disk."""
    replace = os.replace

    def rename(source: str, dest: str) -> None:
        if Path(dest) == path:
            raise OSError(28, "No space left on device")
        replace(source, dest)

    return rename


@every_save
@pytest.mark.parametrize("fails", [False, True])
def test_shards_of_a_catalogue_that_was_moved_aside_meanwhile_stay(
    save: Any, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, aside, fsync = tmp_path / "model.zcr", tmp_path / "model.zcr.bak", os.fsync
    zcrecord.save_record(MODEL, path, max_shard_size=800)

    def moved(fd: int) -> None:
        fsync(fd)
        if not aside.exists():
            path.rename(aside)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", moved)
        if fails:
            patch.setattr(os, "replace", full(path))
        with pytest.raises(SourceError, match="No space left") if fails else contextlib.nullcontext():
            save(path)
    if not fails:
        r.assert_same(zcrecord.load_record(path, verify="full").tree(), OTHER)
    aside.replace(path)
    r.assert_same(zcrecord.load_record(path, verify="full").tree(), MODEL)


@every_save
def test_shards_of_a_saver_in_between_go(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync = tmp_path / "model.zcr", os.fsync
    zcrecord.save_record(OTHER, path)

    def synced(fd: int) -> None:
        fsync(fd)
        monkeypatch.setattr(os, "fsync", fsync)
        zcrecord.save_record(MODEL, path, max_shard_size=800, durable=False)

    monkeypatch.setattr(os, "fsync", synced)
    save(path)
    assert os.fsync is fsync, "another saver came"
    r.assert_same(zcrecord.load_record(path, verify="full").tree(), OTHER)
    assert {*files(tmp_path)} == {path.name, *zcrecord.load_record(path).archive.source.file_names}


def test_a_producer_that_fails_leaves_the_old_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.zcr"
    zcrecord.save_record(OTHER, path, max_shard_size=800)
    before = contents(tmp_path)
    lazy = {**MODEL, "short": zcrecord.LazyTensor(np.float32, (100,), [np.zeros(3, np.float32)])}
    with pytest.raises(ProducerError, match="short"):
        zcrecord.save_record(lazy, path, max_shard_size=800)
    with pytest.raises(ZeroDivisionError), zcrecord.RecordWriter(path, max_shard_size=800) as out:
        out.add("a", np.zeros(1000))
        out.add("b", np.ones(1000))
        raise ZeroDivisionError
    assert contents(tmp_path) == before


@pytest.mark.parametrize("size", [0, -1, 2.5, "5GB", True])
def test_a_size_that_is_no_number_of_bytes_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(UnsupportedError, match="is not a number of bytes from 1 on"):
        zcrecord.save_record(MODEL, tmp_path / "model.zcr", max_shard_size=size)
    assert files(tmp_path) == []


@pytest.mark.parametrize("dest", [io.BytesIO(), "s3://bucket/model.zcr"])
def test_shards_need_a_path(dest: Any) -> None:
    with pytest.raises(UnsupportedError, match="max_shard_size= is for paths"):
        zcrecord.save_record(MODEL, dest, max_shard_size=800)


def safetensors_shards(record: Any, dest: Any) -> None:
    formats.convert(io.BytesIO(r.saved(record)), dest, dest_format="safetensors", max_shard_size=800, force=True)


@pytest.mark.skipif(os.name != "posix", reason="platform: devices and links")
@pytest.mark.parametrize("save", [lambda *a: zcrecord.save_record(*a, max_shard_size=800), safetensors_shards])
@pytest.mark.parametrize(
    "dest, message",
    [
        ("none/model.zcr", "No such file or directory"),
        ("/dev/null", "not a regular file; name one, beside which the shards are to lie"),
        ("loop", "Too many levels of symbolic links"),
        ("nul\0", "it contains NUL"),
        ("surrogate\ud800", "it has lone surrogates"),
        ("", "is a directory; name a file in it"),
    ],
)
def test_shards_go_beside_no_device_and_under_no_name_that_one_file_could_not_have(
    save: Any, dest: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    with pytest.raises(SourceError, match=message):
        save(MODEL, dest)
    assert os.listdir() == ["loop"]


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 10_000}])
def test_a_record_is_not_saved_onto_a_shard_of_its_own_catalogue(options: Any, tmp_path: Path) -> None:
    zcrecord.save_record(MODEL, tmp_path / "model.zcr", max_shard_size=800)
    record = zcrecord.load_record(tmp_path / "model.zcr")
    with pytest.raises(DestinationExistsError, match="source and destination are the same file"):
        zcrecord.save_record(record, tmp_path / numbered(3)[1], **options)
    r.assert_same(zcrecord.load_record(tmp_path / "model.zcr", verify="full").tree(), MODEL)


def edited_copy(source: Path, dest: Path) -> None:
    with zcrecord.edit(source, dest, force=True) as model:
        model.metadata["a"] = 1


def unpacked(source: Path, dest: Path) -> None:
    transport.pack(source, source.with_name("one.zst"))
    transport.unpack(source.with_name("one.zst"), dest, force=True)


def tuned(source: Path, dest: Path) -> None:
    onnx.convert(r.ROOT / "tests" / "data" / "digits.onnx", source, force=True)
    onnx.tune(source, dest, force=True, threads=1)


REPLACING: dict[str, Any] = {
    "pack": lambda source, dest: transport.pack(source, dest, force=True),
    "unpack": unpacked,
    "tune": tuned,
    "edit": edited_copy,
    "npz": lambda source, dest: formats.convert(source, dest, dest_format="npz", force=True),
    "safetensors": lambda source, dest: formats.convert(source, dest, dest_format="safetensors", force=True),
}


@pytest.mark.parametrize("replacing", REPLACING)
def test_shards_go_with_their_catalogue_whatever_replaces_it(replacing: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    zcrecord.save_record(OTHER, tmp_path / "source" / "one.zcr")
    zcrecord.save_record(MODEL, tmp_path / "model.zcr", max_shard_size=800)
    REPLACING[replacing](tmp_path / "source" / "one.zcr", tmp_path / "model.zcr")
    assert files(tmp_path) == ["model.zcr", "source"]


@pytest.mark.parametrize("name", ["llama:7b.zcr", "a\nb.zcr", "a\u202eb.zcr", "a\udcffb.zcr"])
def test_a_name_that_no_shard_may_have_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.ones(3)}, tmp_path / name)
    before = os.listdir(tmp_path)
    with pytest.raises(UnsupportedError, match=r"a catalogue's name, .* may not have"):
        zcrecord.save_record(MODEL, tmp_path / name, max_shard_size=800)
    assert os.listdir(tmp_path) == before and zcrecord.load_record(tmp_path / name)["w"].sum() == 3
