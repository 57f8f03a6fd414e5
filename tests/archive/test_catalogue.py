"""A catalogue opens as one record over its shards: each is opened when needed, and named when it is wrong."""

from __future__ import annotations

import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import records as r
from split_catalogues import Box, save_split

import zcrecord
from zcrecord.codec.layout import NONE
from zcrecord.errors import FormatError, IntegrityError, RecordError, SourceNotFoundError, UnsupportedError

Array = np.ndarray[Any, np.dtype[Any]]
SHARED = np.arange(200, dtype=np.float32)
TREE = {
    "layers": [{"w": np.full((8, 8), i, np.float32), "b": np.full(8, -i, np.int16)} for i in range(9)],
    "head": SHARED,
    "tied": SHARED,
    "view": SHARED[::2],
    "empty": np.zeros((0, 3)),
    "words": np.array(["a", "bc"]),
    "packed": zcrecord.PackedTensor.pack((np.arange(5) - 2).astype(ml_dtypes.int4)),
    "state": {0: {"step": np.int64(3)}, 1: {"step": np.int64(3)}},
    "blob": b"bytes" * 9,
    "heads": [4, 8],
}
FACTS = {"license": "mit", "picture": b"png"}


@pytest.fixture
def one(tmp_path: Path) -> zcrecord.Record:
    zcrecord.save_record(TREE, tmp_path / "one.zcr", metadata=FACTS)
    return zcrecord.load_record(tmp_path / "one.zcr")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    zcrecord.save_record(TREE, tmp_path / "model.zcr", max_shard_size=900, metadata=FACTS)
    return tmp_path / "model.zcr"


def shards_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob("model*-of-*.zcr"))


def test_joined_again_it_is_the_one_archive_to_the_byte(path: Path, one: zcrecord.Record, tmp_path: Path) -> None:
    zcrecord.save_record(zcrecord.load_record(path), tmp_path / "joined.zcr")
    assert (tmp_path / "joined.zcr").read_bytes() == (tmp_path / "one.zcr").read_bytes()


def test_each_shard_is_an_archive_by_itself_with_the_same_names(path: Path, one: zcrecord.Record) -> None:
    seen: list[str] = []
    for shard in shards_of(path):
        record = zcrecord.load_record(shard, verify="full")
        for name, value in record.items():
            r.assert_same(value, one[name])
        seen += record.names
    assert sorted(seen) == sorted(set(one.names) - {"empty"})


def test_opening_opens_no_shard_and_a_tensor_opens_its_own_alone(path: Path) -> None:
    for shard in shards_of(path):
        shard.rename(f"{shard}.away")
    record = zcrecord.load_record(path)
    assert len(record) == len(list(record)) and record.info("head").shape == (200,)
    first = shards_of(path.with_name("model.zcr"))
    assert first == []
    Path(f"{path.parent}/model-00001-of-00004.zcr.away").rename(path.parent / "model-00001-of-00004.zcr")
    assert record["layers.0.w"].shape == (8, 8)
    with pytest.raises(
        SourceNotFoundError, match=r"model-00004-of-00004\.zcr: no such file; it is shard 4 of 4 of .*cop"
    ):
        record["head"]


def test_views_lie_on_the_mapping_and_outlive_the_record(path: Path) -> None:
    record = zcrecord.load_record(path)
    views = dict(record)
    assert np.shares_memory(views["head"], views["tied"]) and np.shares_memory(views["head"], views["view"])
    assert not views["head"].flags.writeable
    assert record.close() is False
    assert views["head"][7] == 7
    with pytest.raises(UnsupportedError, match="closed"):
        record["head"]


def test_a_part_is_verified_by_its_own_payloads(path: Path) -> None:
    damaged = shards_of(path)[0]
    octets = bytearray(damaged.read_bytes())
    offset = zcrecord.load_record(damaged).info("layers.0.w").offset
    octets[offset] ^= 1
    damaged.write_bytes(octets)
    record = zcrecord.load_record(path)
    record.select(["layers.1.w", "head"]).verify()
    for call in (record.select("layers.0.*").verify, lambda: zcrecord.load_record(path, verify="full")):
        with pytest.raises(IntegrityError, match=r"model-00001-of-00004\.zcr: tensor 'layers\.0\.w'.*digest"):
            call()


ZEROS = {"m": {"w": np.zeros(100)}, "n": {"v": np.ones(100)}}  # of equal bytes, both would lie in one shard
EDITED: str = zcrecord.load_record(r.saved({**ZEROS, "m": {"w": np.append(9.0, np.zeros(99))}})).content_digest()
SEEN: dict[str, Callable[[zcrecord.Record], tuple[Any, Callable[[], Any]]]] = {
    "a module's, by the record": lambda c: (c.module("m")["w"], lambda: c["m.w"]),
    "the record's, by an earlier part": lambda c: earlier_part(c),
    "the record's, by a later part": lambda c: (c["m.w"], lambda: c.select("m.*")["m.w"]),
    "torch's, by the record": lambda c: (c.torch()["m.w"], lambda: c["m.w"]),
    "that in a tree, by the record": lambda c: (c.tree()["m"]["w"], lambda: c["m.w"]),
    "a module's, by the digest": lambda c: (c.module("m")["w"], lambda: [9 * (c.content_digest() == EDITED)]),
    "the record's, by a hollow one that it fills": lambda c: (c["m.w"], lambda: filled_by(c)["m.w"]),
}


def earlier_part(record: zcrecord.Record) -> tuple[Any, Callable[[], Any]]:
    part = record.select("m.*")  # opens no shard
    return record["m.w"], lambda: part["m.w"]


def filled_by(record: zcrecord.Record) -> zcrecord.Record:
    hollow = record.hollow()
    hollow.fill_by("read", record)
    sealed: zcrecord.Record = hollow.seal()
    return sealed


@pytest.mark.parametrize("what", SEEN)
def test_an_edit_of_a_private_copy_is_seen_by_the_record_and_all_its_parts(what: str, tmp_path: Path) -> None:
    zcrecord.save_record(ZEROS, tmp_path / "one.zcr")
    zcrecord.save_record(ZEROS, tmp_path / "model.zcr", max_shard_size=1300)
    assert len(shards_of(tmp_path / "model.zcr")) == 2
    for name in ("one.zcr", "model.zcr"):
        edited, seen = SEEN[what](zcrecord.load_record(tmp_path / name, mode="c"))
        edited[0] = 9
        assert seen()[0] == 9, name


@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux lists what is mapped")
@pytest.mark.parametrize("last", range(3))
@pytest.mark.parametrize("mode", ["r", "c"])
def test_shards_are_closed_with_the_last_part(mode: Any, last: int, path: Path) -> None:
    def mapped() -> bool:
        return str(path.parent) in Path("/proc/self/maps").read_text(encoding="utf-8")

    record = zcrecord.load_record(path, mode=mode)
    users = [record, record.module("layers"), record.select("layers.*")]
    names = ["layers.8.w", "8.w", "layers.8.w"]
    users[1]["8.w"]  # opens the shard
    kept, name = users.pop(last), names[last]
    assert users.pop(0).close() is False and kept[name][0, 0] == 8
    users.clear()  # the other one is dropped
    assert kept["layers.0.w" if name != "8.w" else "0.w"][0, 0] == 0, "opened now"
    assert mapped() and kept.close() is True and not mapped()


def test_is_pickled_by_its_path(path: Path) -> None:
    part = pickle.loads(pickle.dumps(zcrecord.load_record(path).module("layers")))
    assert part["2.b"][0] == -2
    data = pickle.dumps(zcrecord.load_record(path))
    assert pickle.loads(data)["head"][3] == 3
    zcrecord.save_record({"other": SHARED, "more": SHARED + 1}, path, max_shard_size=900)
    with pytest.raises(IntegrityError, match="not the archive that was pickled"):
        pickle.loads(data)


def test_threads_open_a_shard_once(path: Path) -> None:
    record = zcrecord.load_record(path)
    barrier, seen = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        seen.append(r.address(record["head"]))

    r.run_in_threads(work, 8)
    assert len(set(seen)) == 1 and len(seen) == 8


# Wrong shards, each named.


def swap(path: Path) -> None:
    shutil.copy(shards_of(path)[1], shards_of(path)[0])


def other_values(path: Path) -> None:
    shard = shards_of(path)[0]
    tree = {name: np.array(value) + 1 for name, value in zcrecord.load_record(shard).items()}
    zcrecord.save_record(tree, shard)


def forged_index(path: Path) -> None:
    shard = shards_of(path)[0]
    octets = bytearray(shard.read_bytes())
    at = octets.rindex(b"layers.0.w")
    octets[at : at + 10] = b"layers.X.w"
    shard.write_bytes(octets)


def cut(path: Path) -> None:
    shard = shards_of(path)[0]
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("harm", "kind", "message"),
    [
        (swap, IntegrityError, r"00001-of-00004\.zcr: is another archive .* shard 1 of 4 of .*model\.zcr; copy"),
        (other_values, IntegrityError, r"00001-of-00004\.zcr: is another archive .* shard 1 of 4"),
        (forged_index, IntegrityError, r"00001-of-00004\.zcr: its index is not the one that the catalogue names"),
        (cut, FormatError, r"00001-of-00004\.zcr: the archive has 2008 bytes, the source 1908; it is truncated"),
        (lambda path: shards_of(path)[0].unlink(), SourceNotFoundError, r"001-of-00004\.zcr: no such file; it is shar"),
    ],
)
def test_a_wrong_shard_is_named(path: Path, harm: Callable[[Path], None], kind: type, message: str) -> None:
    harm(path)
    with pytest.raises(kind, match=message):
        zcrecord.load_record(path)["layers.0.w"]
    with pytest.raises(kind, match=message):
        zcrecord.load_record(path).verify()


# Forged catalogues: the tables are tensors that anybody can write.


def tables(path: Path) -> dict[str, Any]:
    whole = zcrecord.load_record(path).archive
    catalogue = zcrecord.Record(whole.source.file_archive(NONE))
    return {
        name: value if isinstance(value, zcrecord.StringTensor) else np.array(value)
        for name, value in catalogue.items()
    }


def write_catalogue(path: Path, found: dict[str, Any], blobs: Any = (b"bytes" * 9, b"png")) -> None:
    with zcrecord.RecordWriter(path) as out:
        out.module("", type_name="zcr:catalogue")
        for name, value in found.items():
            out.add(name, value)
        if blobs is not None:
            out.attribute("blobs", list(blobs))


def names(*given: str) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update({"files.name": np.array([*given, "a.zcr", "b.zcr", "c.zcr"][:4])})


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update({name: change(found[name])})


def dropped(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.__delitem__(name)


def flipped(at: int) -> Callable[[Array], Array]:
    return lambda octets: octets ^ (np.arange(len(octets)) == at % len(octets)).astype(np.uint8)


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (names("../a.zcr"), r"'files\.name': '\.\./a\.zcr' is not the plain name of a \.zcr file"),
        (names("a.txt"), "is not the plain name"),
        (names("a.zcr", "a.zcr"), r"'files\.name': names a file twice"),
        (dropped("files.name"), r"'files\.name': its table is missing"),
        (changed("files.trailer", lambda v: v[:2]), r"'files\.trailer': its table has the shape \(2, 64\)"),
        (
            changed("files.index_sha256", lambda v: v.astype(np.int8)),
            r"index_sha256': its table is missing, or not of uint8",
        ),
        (dropped("outline"), "'outline': its table is missing"),
        (changed("outline", lambda v: v[:100]), "'outline': is not a sealed header"),
        (changed("outline", flipped(-1)), "'outline': header and trailer differ"),
        (changed("outline", flipped(20)), "outline: "),
        (changed("file", lambda v: v + 4), "'file': piece 0 is in file 4, of 4"),
        (changed("file", lambda v: v[:-1]), "'payload': its table has the shape"),
        (dropped("payload"), "'payload': its table is missing"),
        (changed("payload", lambda v: v + 1000), "names payloads that this shard does not have"),
        (changed("payload", lambda v: v[::-1].copy()), "names payloads that this shard does not have"),
    ],
)
def test_forged_tables_are_one_typed_error(path: Path, forge: Callable[[dict[str, Any]], None], message: str) -> None:
    found = tables(path)
    forge(found)
    write_catalogue(path, found)
    with pytest.raises(RecordError, match=message):
        dict(zcrecord.load_record(path))


def test_a_forged_blob_is_refused(path: Path) -> None:
    for blobs, message in (
        ([b"one"], "the catalogue has no blob 1"),
        ([b"one", b"two"], "another size than its piece"),
    ):
        write_catalogue(path, tables(path), blobs=blobs)
        with pytest.raises(FormatError, match=message):
            _ = (record := zcrecord.load_record(path)).metadata, record.attributes


def mutated(rng: np.random.Generator, value: Any) -> Any:
    """Return a table with one number changed, cut, or repeated."""
    if not isinstance(value, np.ndarray) or not value.size:
        return value
    value = value.copy()
    flat = value.reshape(-1)
    if rng.integers(4) == 0:
        return value[: rng.integers(len(value))]
    numbers = (rng.integers(0, 6), np.iinfo(flat.dtype).max, flat[rng.integers(flat.size)])
    flat[rng.integers(flat.size)] = numbers[rng.integers(3)]
    return value


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("split", [False, True])
def test_random_tables_give_the_record_or_one_typed_error(tmp_path: Path, path: Path, split: bool, seed: int) -> None:
    """No view leaves a shard, whatever the tables say, and nothing but a RecordError is raised."""
    if split:
        path = tmp_path / "split.zcr"
        split_catalogue(path, WHOLE, QUARTERS)
    sound, rng, refused = tables(path), np.random.default_rng(seed), 0
    for _ in range(40):
        name = sorted(sound)[rng.integers(len(sound))]
        write_catalogue(
            path, sound | {name: mutated(rng, sound[name])}, blobs=None if split else (b"bytes" * 9, b"png")
        )
        try:
            record = zcrecord.load_record(path)
            for value in record.values():
                np.asarray(value.unpack() if hasattr(value, "unpack") else value).tobytes()
            record.content_digest()
            record.verify()
        except RecordError:
            refused += 1
    assert refused > 10


def split_catalogue(path: Path, whole: Array, boxes: Sequence[Box], **forged: Any) -> None:
    save_split(path, {"w": whole, "other": np.arange(3)}, {"w": boxes}, forged=forged)


WHOLE = np.arange(6 * 4 * 5, dtype=np.float32).reshape(6, 4, 5)
HALVES = [np.s_[:4, :, :], np.s_[4:, :, :]]
QUARTERS = [np.s_[:3, :2, :], np.s_[:3, 2:, :], np.s_[3:, :1, :], np.s_[3:, 1:, :]]


@pytest.mark.parametrize("boxes", [QUARTERS, [np.s_[:, :, i : i + 1] for i in range(5)]])
@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_split_tensor_is_assembled_when_asked_for(tmp_path: Path, boxes: Any, mode: Any) -> None:
    split_catalogue(tmp_path / "model.zcr", WHOLE, boxes)
    record = zcrecord.load_record(tmp_path / "model.zcr", mode=mode)
    assert np.array_equal(record["w"], WHOLE) and record["other"].tolist() == [0, 1, 2]
    again = record["w"]
    assert r.address(record["w"]) == r.address(again), "kept while a view lives"
    if mode == "c":
        record["w"][0, 0, 0] = 77
        assert again[0, 0, 0] == 77
        again[0, 0, 0] = 0
    assert (
        record.content_digest() == zcrecord.load_record(r.saved({"w": WHOLE, "other": np.arange(3)})).content_digest()
    )
    assert np.array_equal(record.load_into("host")["w"], WHOLE)
    assert np.array_equal(record.torch()["w"].numpy(), WHOLE)
    assert np.array_equal(record.select("w")["w"], WHOLE)
    record.verify()
    record.select("w").verify()


def test_damage_in_a_piece_is_found_before_the_tensor_is_written_elsewhere(tmp_path: Path) -> None:
    split_catalogue(tmp_path / "model.zcr", WHOLE, HALVES)
    record = zcrecord.load_record(tmp_path / "model.zcr")
    (damaged,) = (shard for shard in tmp_path.iterdir() if WHOLE[4:].tobytes() in shard.read_bytes())
    r.damage(damaged, WHOLE[4:].tobytes())
    with pytest.raises(IntegrityError, match=rf"{damaged.name}: tensor 'w': its payload's digest does not match"):
        zcrecord.save_record(record, tmp_path / "one.zcr")
    assert not (tmp_path / "one.zcr").exists()


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ({"origin": np.array([[0, 0, 0], [3, 0, 0], [0, 0, 0]], np.uint64)}, "do not tile it"),
        ({"extent": np.array([[4, 4, 5], [1, 4, 5], [0, 0, 0]], np.uint64)}, "do not tile it"),
        (
            {"extent": np.array([[5, 4, 4], [2, 4, 5], [0, 0, 0]], np.uint64)},
            r"another size than its box|a piece of it has \d+ bytes, its box|do not tile",
        ),
        ({"extent": np.full((3, 3), 1 << 63, np.uint64)}, "do not tile it"),
        ({"origin": np.zeros((3, 2), np.uint64), "extent": np.ones((3, 2), np.uint64)}, "do not tile it"),
        ({"first": np.array([0, 3, 3], np.uint64)}, "'first': does not ascend"),
        ({"file": np.array([0, 0, 2], np.uint32)}, "or one twice"),
        ({"payload": np.array([0, 1, 0], np.uint32)}, "names payloads that this shard does not have"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(tmp_path: Path, forged: dict[str, Any], message: str) -> None:
    split_catalogue(tmp_path / "model.zcr", WHOLE, HALVES, **forged)
    with pytest.raises(FormatError, match=message):
        zcrecord.load_record(tmp_path / "model.zcr")["w"]


def test_a_catalogue_that_names_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.zcr"
    zcrecord.save_record({"a": SHARED, "b": SHARED + 1}, path, max_shard_size=900)
    found = tables(path)
    found["files.name"] = np.array(["model.zcr", shards_of(path)[1].name])
    write_catalogue(path, found, blobs=None)
    with pytest.raises(IntegrityError, match="is another archive than the one that the catalogue names"):
        zcrecord.load_record(path)["a"]
