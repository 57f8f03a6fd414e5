"""Archives of references: an index of other formats' files, and records saved without what a base has."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import records as r

import zcrecord
from tools.range_server import serving
from zcrecord import (
    DestinationExistsError,
    FormatError,
    IntegrityError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)
from zcrecord.archive import references
from zcrecord.archive.archive import open_archive
from zcrecord.codec.conventions import REFERENCES_TYPE
from zcrecord.codec.layout import NONE
from zcrecord.formats import convert
from zcrecord.record.own_shards import own_shards
from zcrecord.record.references import Files
from zcrecord.storage.memory import map_file

if TYPE_CHECKING:
    from command_line import Commands

LAYERS = {f"layer{i}": {"w": np.random.default_rng(i).random((20, 30), np.float32)} for i in range(6)}
TREE: dict[str, Any] = {
    **LAYERS,
    "equal": [np.ones(64, np.float32), np.ones(64, np.float32)],
    "step": 5,
    "blob": b"bytes",
}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder with shards of safetensors, and the same as one archive beside it."""
    zcrecord.save_record(TREE, tmp_path / "own.zcr")
    (tmp_path / "hub").mkdir()
    convert(tmp_path / "own.zcr", tmp_path / "hub" / "model.safetensors", max_shard_size=5000)
    return tmp_path / "hub"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    zcrecord.save_record(TREE, tmp_path / "base.zcr")
    return tmp_path / "base.zcr"


TUNED = {**TREE, "layer3": {"w": LAYERS["layer3"]["w"] + 1}, "step": 6, "note": b"more bytes"}


def tables(path: Path) -> zcrecord.Record:
    """Return an archive of references as readers see it that do not know the convention."""
    return zcrecord.Record(open_archive(map_file(str(path)), verify="index"))


def changed(path: Path, at: int) -> None:
    r.damage(path, at)


@pytest.mark.parametrize("digest", ["xxh3", "none"])
def test_an_index_opens_as_the_record_that_the_files_hold(hub: Path, digest: str) -> None:
    report = zcrecord.index(hub, hub / "index.zcr", digest=digest)
    assert report.archive_bytes == os.path.getsize(hub / "index.zcr") < 8192
    own, record = zcrecord.load_record(hub.parent / "own.zcr"), zcrecord.load_record(hub / "index.zcr")
    assert record.names == own.names and record.content_digest() == own.content_digest()
    assert record.tree()["blob"] == b"bytes" and record.archive.source.file_names == sorted(
        p.name for p in hub.glob("*.safetensors")
    )
    record.verify()
    zcrecord.load_record(hub / "index.zcr", expect=own.content_digest())
    assert pickle.loads(pickle.dumps(record))["layer2.w"].tolist() == LAYERS["layer2"]["w"].tolist()
    edited = zcrecord.load_record(hub / "index.zcr", mode="c")
    edited["equal.0"][...] = 3
    assert edited["equal.1"].tolist() == [1] * 64 == record["equal.0"].tolist()
    convert(hub / "index.zcr", hub.parent / "whole.zcr")
    (hub.parent / "alone").mkdir()
    shutil.move(hub.parent / "whole.zcr", hub.parent / "alone" / "whole.zcr")
    assert (
        zcrecord.load_record(hub.parent / "alone" / "whole.zcr", verify="full").content_digest() == own.content_digest()
    )


def test_a_file_that_was_changed_is_refused_by_name(hub: Path) -> None:
    zcrecord.index(hub, hub / "index.zcr")
    shard = hub / "model-00002-of-00004.safetensors"
    changed(shard, -1)
    with pytest.raises(
        IntegrityError, match=r"00002-of-00004\.safetensors: tensor 'layer\d\.w': .*digest does not match"
    ):
        zcrecord.load_record(hub / "index.zcr", verify="full")
    changed(shard, 20)
    record = zcrecord.load_record(hub / "index.zcr")
    with pytest.raises(IntegrityError, match="is another file than the one that was indexed"):
        record.verify()
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(IntegrityError, match=r"has \d+ bytes, \d+ when it was indexed: .*index\.zcr refers to "):
        zcrecord.load_record(hub / "index.zcr").verify()
    shard.unlink()
    with pytest.raises(
        SourceNotFoundError, match=r"refers to model-00002-of-00004\.safetensors; put the very file beside"
    ):
        zcrecord.load_record(hub / "index.zcr").verify()


def test_what_lies_in_no_file_as_it_is_used_is_refused_by_name(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", w=np.ones(300))
    with pytest.raises(UnsupportedError, match=r"d\.npz: tensor 'w': is deflated, and an index names ranges"):
        zcrecord.index(tmp_path / "d.npz", tmp_path / "i.zcr")
    zcrecord.save_record({"w": np.ones(1)}, tmp_path / "m.zcr")
    with pytest.raises(UnsupportedError, match="archives and catalogues need no index"):
        zcrecord.index(tmp_path / "m.zcr", tmp_path / "i.zcr")
    assert sorted(os.listdir(tmp_path)) == ["d.npz", "m.zcr"]


@pytest.mark.parametrize(("data", "message"), [(b"", "the file is empty"), (b"{}" * 99, "this is JSON text")])
def test_what_is_of_no_format_is_refused_as_that(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match=rf"m\.safetensors: {message}"):
        zcrecord.index(tmp_path / "m.safetensors", tmp_path / "i.zcr")


def test_an_index_lies_beside_its_files_and_never_in_their_place(hub: Path) -> None:
    with pytest.raises(UnsupportedError, match="lies in another folder than the archive"):
        zcrecord.index(hub, hub.parent / "index.zcr")
    single = hub / "model-00001-of-00004.safetensors"
    with pytest.raises(DestinationExistsError):
        zcrecord.index(single, single, force=True)
    (hub / "index.zcr").write_bytes(b"old")
    with pytest.raises(DestinationExistsError):
        zcrecord.index(hub, hub / "index.zcr")
    zcrecord.index(hub, hub / "index.zcr", force=True)


def test_an_index_by_url_fetches_what_is_asked_for(hub: Path) -> None:
    zcrecord.index(hub, hub / "index.zcr")
    with serving(hub) as server:
        record = zcrecord.load_record(f"{server.url}/index.zcr")
        assert record["layer4.w"].tolist() == LAYERS["layer4"]["w"].tolist()
        assert record.content_digest() == zcrecord.load_record(hub.parent / "own.zcr").content_digest()


def test_torch_tensors_of_a_part_by_url_fetch_no_more_than_the_part(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    layers = {f"layer{i}": {"w": np.random.default_rng(i).random((500, 300), np.float32)} for i in range(4)}
    zcrecord.save_record(layers, tmp_path / "m.zcr")
    convert(tmp_path / "m.zcr", tmp_path / "m.safetensors", max_shard_size=1_300_000)  # two in each
    zcrecord.index(tmp_path / "m.safetensors.index.json", tmp_path / "index.zcr")
    with serving(tmp_path) as server:
        record = zcrecord.load_record(f"{server.url}/index.zcr")
        assert record.module("layer3").torch()["w"].tolist() == layers["layer3"]["w"].tolist()
        assert 600_000 < server.sent < 800_000


def test_a_cache_keeps_what_an_index_refers_to(hub: Path, tmp_path: Path) -> None:
    zcrecord.index(hub, hub / "index.zcr")
    with serving(hub) as server:
        for _ in range(2):
            server.forget()
            record = zcrecord.load_record(f"{server.url}/index.zcr", cache=tmp_path / "cache")
            assert record["layer4.w"].tolist() == LAYERS["layer4"]["w"].tolist()
            kept = [path.name for path in (tmp_path / "cache").rglob("*-2400")]
            assert len(kept) == 1


def test_info_says_what_lies_where(base: Path, hub: Path, run: Commands) -> None:
    zcrecord.save_record(TUNED, base.parent / "tuned.zcr", base=base)
    facts = run.json(f"info {base.parent}/tuned.zcr")
    [file] = facts["references"]["files"]
    assert file == {"name": "base.zcr", "nbytes": base.stat().st_size, "payload_nbytes": 5 * 2400}
    own = 2400 + 2 * 256 + len(b"bytes") + len(b"more bytes")  # what is small is written again
    assert facts["references"]["own_payload_nbytes"] == own and facts["catalogue"] is None
    assert "in base.zcr: 12000 bytes of payloads" in run(f"info {base.parent}/tuned.zcr")
    assert run.json(f"info {hub}")["foreign"] == {}


@pytest.mark.parametrize("writer", [False, True])
def test_only_what_changed_is_written(base: Path, writer: bool) -> None:
    path = base.parent / "tuned.zcr"
    if writer:
        with zcrecord.RecordWriter(path, base=base) as out:
            for name, layer in TUNED.items():
                if isinstance(layer, dict):
                    out.add(f"{name}.w", layer["w"])
        report = out.report
    else:
        report = zcrecord.save_record(TUNED, path, base=base)
    assert report is not None and report.archive_bytes == os.path.getsize(path) < os.path.getsize(base) / 2
    record = zcrecord.load_record(path)
    assert record["layer3.w"].tolist() == TUNED["layer3"]["w"].tolist()
    assert record["layer5.w"].tolist() == LAYERS["layer5"]["w"].tolist()
    record.verify()
    assert record.archive.source.file_names == ["base.zcr"]


def test_it_is_the_record_that_it_would_be_without_a_base(base: Path) -> None:
    zcrecord.save_record(TUNED, base.parent / "tuned.zcr", base=base)
    zcrecord.save_record(TUNED, base.parent / "full.zcr")
    tuned, full = (zcrecord.load_record(base.parent / name) for name in ("tuned.zcr", "full.zcr"))
    assert tuned.content_digest() == full.content_digest() and tuned.tree()["note"] == b"more bytes"


def test_views_with_rows_and_no_bytes_are_saved_as_no_bytes(base: Path) -> None:
    views = [np.zeros(shape, np.uint8).data.toreadonly() for shape in ((3, 0), ())]
    zcrecord.save_record(TUNED | {"empty": views[0], "one": views[1]}, base.parent / "tuned.zcr", base=base)
    attributes = zcrecord.load_record(base.parent / "tuned.zcr").attributes
    assert (attributes["empty"], attributes["one"]) == (b"", b"\0")


def test_references_name_files_directly_and_never_chains(base: Path, hub: Path) -> None:
    zcrecord.save_record(TUNED, base.parent / "tuned.zcr", base=base)
    third = {**TUNED, "layer4": {"w": LAYERS["layer4"]["w"] * 2}}
    zcrecord.save_record(third, base.parent / "third.zcr", base=base.parent / "tuned.zcr")
    assert zcrecord.load_record(base.parent / "third.zcr").archive.source.file_names == ["base.zcr", "tuned.zcr"]
    zcrecord.index(hub, hub / "index.zcr")
    zcrecord.save_record(TUNED, hub / "tuned.zcr", base=hub / "index.zcr")
    os.unlink(hub / "index.zcr")
    record = zcrecord.load_record(hub / "tuned.zcr", verify="full")
    assert record.content_digest() == zcrecord.load_record(base.parent / "tuned.zcr").content_digest()
    assert {name.partition("-")[0] for name in record.archive.source.file_names} == {"model"}


def test_a_base_that_is_replaced_meanwhile_is_noticed_and_nothing_is_written(base: Path) -> None:
    before = sorted(os.listdir(base.parent))
    with (
        pytest.raises(SourceError, match=r"base\.zcr: was replaced meanwhile"),
        zcrecord.RecordWriter(base.parent / "new.zcr", base=base) as out,
    ):
        out.add("w", LAYERS["layer0"]["w"])
        zcrecord.save_record({"x": np.ones(1)}, base)
    assert sorted(os.listdir(base.parent)) == before


def test_no_saver_replaces_a_base_between_the_last_look_at_it_and_the_rename(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Savers of one folder take turns: another one waits until the new archive is in its place."""
    check, waited = Files.check_unreplaced, []

    def look(files: Files) -> None:
        check(files)
        other = threading.Thread(target=zcrecord.save_record, args=({"x": np.ones(1)}, base))
        other.start()
        other.join(0.3)
        waited.append(other)
        assert other.is_alive()

    monkeypatch.setattr(Files, "check_unreplaced", look)
    zcrecord.save_record(TUNED, base.parent / "tuned.zcr", base=base)
    waited[0].join()
    assert list(zcrecord.load_record(base)) == ["x"]


def test_a_file_with_a_huge_index_is_not_referred_to(base: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcrecord.record.references.MOST_DESCRIBED", 100)
    for save in (
        lambda: zcrecord.save_record(TUNED, base.parent / "tuned.zcr", base=base),
        lambda: zcrecord.index(hub, hub / "index.zcr"),
    ):
        with pytest.raises(UnsupportedError, match=r"has an index of .* bytes, at most 100 can identify"):
            save()


def test_no_save_removes_a_base(base: Path) -> None:
    zcrecord.save_record(TUNED, base.parent / "tuned.zcr", base=base)
    for most in (None, 4000):
        zcrecord.save_record(TREE, base.parent / "tuned.zcr", max_shard_size=most)
        assert base.exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"base": "base.zcr", "dest": "base.zcr"}, DestinationExistsError, "is the base"),
        ({"base": "base.zcr", "max_shard_size": 100}, UnsupportedError, "do not go together"),
        ({"base": "base.zcr", "digest": "none"}, UnsupportedError, "base= needs digests"),
        ({"base": "plain.zcr"}, UnsupportedError, "has no digests"),
        ({"base": "catalogue.zcr"}, UnsupportedError, "is a catalogue, whose shards are removed"),
        ({"base": "elsewhere/base.zcr"}, UnsupportedError, "lies in another folder"),
        ({"base": "missing.zcr"}, SourceError, "no such file"),
    ],
)
def test_a_base_that_cannot_be_referred_to_is_refused(
    base: Path, options: dict[str, Any], error: type[RecordError], message: str
) -> None:
    folder = base.parent
    zcrecord.save_record(TREE, folder / "plain.zcr", digest="none")
    zcrecord.save_record(TREE, folder / "catalogue.zcr", max_shard_size=4000)
    (folder / "elsewhere").mkdir()
    shutil.copy(base, folder / "elsewhere")
    before = sorted(os.listdir(folder)), base.read_bytes()
    dest = folder / options.pop("dest", "new.zcr")
    with pytest.raises(error, match=message):
        zcrecord.save_record(TUNED, dest, **{**options, "base": folder / options["base"]})
    assert (sorted(os.listdir(folder)), base.read_bytes()) == before


@pytest.mark.parametrize("given", ["folder", "URL"])
def test_a_base_is_not_overwritten_however_it_is_named(given: str, tmp_path: Path) -> None:
    zcrecord.save_record(TREE, tmp_path / "model.zcr")
    before = (tmp_path / "model.zcr").read_bytes()
    base = tmp_path if given == "folder" else (tmp_path / "model.zcr").as_uri()
    with pytest.raises(DestinationExistsError, match=r"model\.zcr: is the base, to which the new archive would refer"):
        zcrecord.save_record({"other": np.arange(7000.0)}, tmp_path / "model.zcr", base=base)
    assert (tmp_path / "model.zcr").read_bytes() == before


def test_a_shard_is_no_base_and_a_record_without_zcr_names_no_files(base: Path) -> None:
    zcrecord.save_record(TREE, base.parent / "model.zcr", max_shard_size=4000)
    shard = next(base.parent.glob("model-00001-*.zcr"))
    with pytest.raises(UnsupportedError, match="has the name of a catalogue's shard"):
        zcrecord.save_record(TUNED, base.parent / "new.zcr", base=shard)
    (base.parent / "link.zcr").symlink_to(shard.name)  # would lead nowhere after the next save of model.zcr
    with pytest.raises(UnsupportedError, match="has the name of a catalogue's shard"):
        zcrecord.save_record(TUNED, base.parent / "new.zcr", base=base.parent / "link.zcr")
    with pytest.raises(UnsupportedError, match=r"an archive that refers to other files is named \.zcr"):
        zcrecord.save_record(TUNED, base.parent / "new.ref", base=base)
    assert not list(base.parent.glob("new*"))


def test_files_of_an_archive_of_references_are_nobodys_though_it_says_catalogue_somewhere(base: Path) -> None:
    zcrecord.save_record({**TUNED, "text": "zcr:catalogue"}, base.parent / "tuned.zcr", base=base)
    assert own_shards(str(base.parent / "tuned.zcr")) == []


def test_a_base_behind_a_link_to_elsewhere_is_refused_before_anything_is_written(base: Path) -> None:
    (base.parent / "m").mkdir()
    (base.parent / "m" / "base.zcr").symlink_to(base)
    with pytest.raises(SourceError, match="out of its folder"):
        zcrecord.save_record(TUNED, base.parent / "m" / "new.zcr", base=base.parent / "m" / "base.zcr")
    assert os.listdir(base.parent / "m") == ["base.zcr"]


def test_a_record_opened_by_a_link_is_not_saved_onto_its_own_base(base: Path) -> None:
    (base.parent / "o").mkdir()
    shutil.move(base, base.parent / "o" / "base.zcr")
    zcrecord.save_record(TUNED, base.parent / "o" / "tuned.zcr", base=base.parent / "o" / "base.zcr")
    (base.parent / "link.zcr").symlink_to("o/tuned.zcr")
    with pytest.raises(DestinationExistsError):
        zcrecord.save_record(zcrecord.load_record(base.parent / "link.zcr"), base.parent / "o" / "base.zcr")


def test_no_save_replaces_what_its_base_refers_to(base: Path) -> None:
    tuned = base.parent / "tuned.zcr"
    zcrecord.save_record(TUNED, tuned, base=base)
    own = {"layer3": TUNED["layer3"]}  # all of it in tuned.zcr itself
    with pytest.raises(DestinationExistsError):
        zcrecord.save_record(own, base, base=tuned)
    with pytest.raises(DestinationExistsError), zcrecord.RecordWriter(base, base=tuned) as out:
        out.add("w", TUNED["layer3"]["w"])
    zcrecord.load_record(tuned, verify="full")


def test_the_index_of_shards_is_not_replaced_by_the_index_made_of_it(hub: Path) -> None:
    with pytest.raises(DestinationExistsError):
        zcrecord.index(hub, hub / "model.safetensors.index.json", force=True)


def test_another_name_in_the_place_of_a_pickled_archive_is_another_archive(hub: Path) -> None:
    zcrecord.index(hub, hub / "index.zcr", digest="none")
    record = zcrecord.load_record(hub / "index.zcr", expect=zcrecord.load_record(hub / "index.zcr").content_digest())
    pickled = pickle.dumps(record)
    octets = (hub / "index.zcr").read_bytes()
    shutil.copy(hub / "model-00001-of-00004.safetensors", hub / "xodel-00001-of-00004.safetensors")
    (hub / "index.zcr").write_bytes(octets.replace(b"model-00001-of-00004", b"xodel-00001-of-00004"))
    with pytest.raises(IntegrityError, match="it was replaced since"):
        pickle.loads(pickled)


def forged(folder: Path, **tables_changed: Any) -> zcrecord.Record:
    """Return an archive of references with other tables, opened."""
    plain = tables(folder / "index.zcr")
    tree = plain.tree()
    for name, value in tables_changed.items():
        holder, _, key = name.rpartition("__")
        (tree[holder] if holder else tree)[key] = value
    from zcrecord.storage.files import open_sink
    from zcrecord.writing.catalogue import write_catalogue

    with open_sink(folder / "forged.zcr") as sink:
        write_catalogue(tree, sink, kind=1, type_name=REFERENCES_TYPE)
    return zcrecord.load_record(folder / "forged.zcr")


def test_tables_that_do_not_fit_are_refused(hub: Path) -> None:
    zcrecord.index(hub, hub / "index.zcr")
    plain = tables(hub / "index.zcr")
    file, offset = plain["file"].copy(), plain["offset"].copy()
    sizes, described = plain["files.nbytes"].copy(), plain["files.described"].copy()
    names, huge = plain["files.name"].unpack().tolist(), np.array([0, 1 << 28], np.uint64)
    for change, message in (
        ({"file": np.where(file == 0, 99, file).astype(np.uint32)}, "payload 0 is in file 99, of 4"),
        ({"file": file[:-1]}, "has the shape"),
        ({"offset": np.where(offset == offset[0], 1 << 40, offset).astype(np.uint64)}, "ends past the end of"),
        ({"offset": np.where(file == 0, offset[0] + 4 * np.arange(len(file)), offset).astype(np.uint64)}, "overlap"),
        ({"offset": np.where(offset == offset[0], offset[0] - 1, offset).astype(np.uint64)}, "not aligned for float32"),
        ({"files__described": described[:, ::-1].copy()}, "is no range of a file"),
        ({"files__described": described + huge, "files__nbytes": sizes + huge[1]}, "or has over 268435456 bytes"),
        ({"files__nbytes": (sizes // 100).astype(np.uint64)}, "ends past the end of|is no range"),
        ({"files__name": np.array(["../x", *names[1:]])}, "is not the plain name of a file"),
        ({"files__name": np.array(["..", *names[1:]])}, "is not the plain name of a file"),
        ({"files__name": np.array([names[1], *names[1:]])}, "names a file twice"),
    ):
        with pytest.raises(FormatError, match=message):
            forged(hub, **change)


def test_the_place_of_a_payload_in_the_archive_itself_is_no_number_of_32_bits(hub: Path) -> None:
    zcrecord.index(hub, hub / "index.zcr")
    plain = tables(hub / "index.zcr")
    offset, own = plain["offset"].copy(), plain["file"] == NONE
    assert own.any()
    record = forged(hub, offset=np.where(own, offset + (1 << 32), offset).astype(np.uint64))
    with pytest.raises(FormatError, match="has no blob"):
        record.tree()


def test_an_archive_that_refers_to_itself_or_by_a_link_to_elsewhere_is_refused(hub: Path) -> None:
    zcrecord.index(hub, hub / "index.zcr")
    plain = tables(hub / "index.zcr")
    names = plain["files.name"].unpack().tolist()
    record = forged(hub, files__name=np.array(["forged.zcr", *names[1:]]))
    with pytest.raises(RecordError, match=r"refers to itself|when it was indexed"):
        record.verify()
    shutil.move(hub / names[0], hub.parent / "secret")
    (hub / names[0]).symlink_to(hub.parent / "secret")
    with pytest.raises(SourceError, match="out of its folder"):
        zcrecord.load_record(hub / "index.zcr").verify()


def test_a_file_that_links_give_many_names_is_hashed_once_and_described_in_one_way(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zcrecord.index(hub, hub / "index.zcr")
    plain = tables(hub / "index.zcr")
    names, described = plain["files.name"].unpack().tolist(), plain["files.described"].copy()
    of, sha256, hashed = hashlib.sha256, plain["files.described_sha256"].copy(), list[int]()
    (hub / "again.safetensors").symlink_to(names[0])
    again = {"files__name": np.array([names[0], "again.safetensors", *names[2:]]), "files__described_sha256": sha256}
    sha256[1] = sha256[0]
    record = forged(hub, **again)

    def counted(data: Any) -> Any:
        hashed.append(len(data))
        return of(data)

    monkeypatch.setattr(references, "hashlib", SimpleNamespace(sha256=counted))
    assert [np.array_equal(record[f"layer{i}.w"], LAYERS[f"layer{i % 2}"]["w"]) for i in range(4)] == [True] * 4
    assert hashed == [described[0, 1]]
    described[1, 0] += 8
    sha256[1] = np.frombuffer(of((hub / names[0]).read_bytes()[slice(*described[1].tolist())]).digest(), np.uint8)
    record = forged(hub, **again, files__described=described)
    assert np.array_equal(record["layer0.w"], LAYERS["layer0"]["w"])
    with pytest.raises(FormatError, match="refers to one file by two names, and by two headers"):
        record["layer2.w"]
