"""Forged catalogues: their author writes every table and every shard, and needs no key.

A catalogue never answers for other bytes than its views show, checks all that it shows, and takes work and memory in
proportion to its files.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from forge import Forge
from split_catalogues import boxes_along, changed_index, forge_catalogue, outline_of, save_split

import zcrecord
from attacks import tricks
from tools.range_server import serving
from zcrecord import FillError, FormatError, IntegrityError, LimitError, Record, UnsupportedError, formats, integrity
from zcrecord.archive import digest, shards, tilings, unflatten
from zcrecord.archive.archive import Archive, Verify
from zcrecord.codec.layout import NONE
from zcrecord.distributed import ZcrStorageReader
from zcrecord.distributed.checkpoint import Checkpoint
from zcrecord.hollow import hollow_of
from zcrecord.loaders import load_into

HONEST = {"a": np.zeros(16, np.float32), "b": np.zeros(16, np.float32)}
OTHER = np.arange(16, dtype=np.float32)
LEVELS: tuple[Verify, ...] = ("touch", "index", "full")
MIB = 1 << 20
KEY = Ed25519PrivateKey.generate()
HALVES = [np.s_[:2, :], np.s_[2:, :]]


def with_other_values(folder: Path, **saved: Any) -> Path:
    """Return a catalogue of equal tensors, one range of its outline; the second lies in the attacker's shard."""
    given = {"honest.zcr": {"a": HONEST["a"]}, "other.zcr": {"b": OTHER}}
    return forge_catalogue(folder / "m.zcr", HONEST, given, [(0, 0), (1, 0)], offsets=0, **saved)


def test_payloads_of_one_range_in_the_outline_are_told_apart(tmp_path: Path) -> None:
    record = zcrecord.load_record(with_other_values(tmp_path))
    zcrecord.save_record(HONEST, tmp_path / "one.zcr")
    honest = zcrecord.load_record(tmp_path / "one.zcr")
    zcrecord.save_record(record, tmp_path / "copy.zcr")
    again = zcrecord.load_record(tmp_path / "copy.zcr")
    assert np.array_equal(record["b"], OTHER) and np.array_equal(again["b"], OTHER), "each view shows its own piece"
    assert record.content_digest() == again.content_digest() != honest.content_digest()
    for before, after in ((honest, record), (record, honest)):
        assert [change.name for change in integrity.compare(before, after)] == ["b"]
    for level in LEVELS:
        with pytest.raises(IntegrityError, match=r"content digest sha256:\w+ was expected, it has"):
            zcrecord.load_record(tmp_path / "m.zcr", expect=honest.content_digest(), verify=level)


@pytest.mark.parametrize("mode", ["r", "c"])
def test_the_signature_of_a_record_does_not_pass_for_other_values(mode: Any, tmp_path: Path) -> None:
    zcrecord.save_record(HONEST, tmp_path / "signed.zcr")
    integrity.sign(tmp_path / "signed.zcr", KEY)
    signed = zcrecord.load_record(tmp_path / "signed.zcr")
    integrity.check_signature(signed, KEY.public_key())
    forged = with_other_values(tmp_path, metadata=signed.metadata)
    with pytest.raises(IntegrityError, match="signature"):
        integrity.check_signature(zcrecord.load_record(forged, mode=mode), KEY.public_key())


def test_bytes_of_attributes_of_one_range_in_the_outline_are_told_apart(tmp_path: Path) -> None:
    tree = {"a": b"same", "b": b"different"}
    zcrecord.save_record({"a": b"same", "b": b"same"}, tmp_path / "one.zcr")
    blobs = [b"same", b"else"]
    forged = forge_catalogue(tmp_path / "m.zcr", tree, {}, [(NONE, 0), (NONE, 1)], offsets=0, sizes=4, blobs=blobs)
    record = zcrecord.load_record(forged)
    assert bytes(record.attributes["b"]) == b"else"
    assert record.content_digest() != zcrecord.load_record(tmp_path / "one.zcr").content_digest()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("part", [None, "mask"])
def test_elements_are_checked_by_the_types_that_views_have(split: bool, part: str | None, tmp_path: Path) -> None:
    values, path = np.array([[0, 1], [2, 1]], np.uint8), tmp_path / "m.zcr"
    if split:
        zcrecord.save_record({"mask": values.view(bool)}, path, digest="none")
        outline = outline_of(path)
        save_split(path, {"mask": values}, {"mask": [np.s_[:1, :], np.s_[1:, :]]}, forged={"outline": outline})
    else:
        forge_catalogue(path, {"mask": values.view(bool)}, {"s.zcr": {"mask": values}}, [(0, 0)])
    record = zcrecord.load_record(path)
    with pytest.raises(FormatError, match=r"'mask': a bool is neither 0 nor 1"):
        (record if part is None else record.select(part)).verify()


def test_every_tensor_of_one_range_in_the_outline_is_checked(tmp_path: Path) -> None:
    words = zcrecord.StringTensor.from_strings(["ab", "cd"])
    ends = words.data.copy()
    ends[:8] = np.array([1 << 40], np.uint64).view(np.uint8)
    pairs: tuple[tuple[Any, Any, str], ...] = (
        (np.zeros(8, bool), np.full(8, 2, np.uint8), "'b': a bool is neither 0 nor 1"),
        (words, ends, "'b': "),
    )
    for sound, wrong, message in pairs:
        given = {"sound.zcr": {"a": sound}, "wrong.zcr": {"b": wrong}}
        tree = {"a": sound, "b": copy.deepcopy(sound)}
        forged = forge_catalogue(tmp_path / "m.zcr", tree, given, [(0, 0), (1, 0)], offsets=0)
        record = zcrecord.load_record(forged)
        assert record["a"].shape == sound.shape
        with pytest.raises(FormatError, match=message):
            record.verify()
    with pytest.raises(FormatError, match="'b': "):
        record["b"]


def test_a_piece_in_the_catalogue_is_compared_with_its_own_digest(tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.uint8)
    blobs = [b"another", values.tobytes()]
    path = forge_catalogue(tmp_path / "m.zcr", {"w": values}, {}, [(NONE, 1)], blobs=blobs)
    opened = Checkpoint(path)
    memory, start = opened.locate(opened.pieces(0)[0], verify=True)
    assert bytes(memory[start : start + 64]) == values.tobytes()
    octets = bytearray(path.read_bytes())
    octets[octets.index(values.tobytes()) + 5] ^= 1
    path.write_bytes(octets)
    opened = Checkpoint(path)
    with pytest.raises(IntegrityError, match="'w': its payload's digest does not match"):
        opened.locate(opened.pieces(0)[0], verify=True)


def test_a_private_part_of_a_shard_that_lacks_a_payload_is_one_typed_error(tmp_path: Path) -> None:
    path = forge_catalogue(tmp_path / "m.zcr", HONEST, {"a.zcr": {"a": HONEST["a"]}}, [(0, 0), (0, 99)])
    part = zcrecord.load_record(path, names=["b"], verify="touch").archive.private()
    with pytest.raises(FormatError, match="names payloads that this shard does not have"):
        Record(part)["b"]


def test_a_number_of_a_payload_beyond_the_last_is_one_typed_error_at_touch(tmp_path: Path) -> None:
    tree, halves = {"w": np.arange(4.0), "x": np.arange(3)}, [(slice(0, 2),), (slice(2, 4),)]
    zcrecord.save_record(tree, tmp_path / "one.zcr", digest="none")
    (tmp_path / "one.zcr").write_bytes(Forge((tmp_path / "one.zcr").read_bytes()).set("tensors", 1, payload=99).seal())
    archive = zcrecord.load_record(tmp_path / "one.zcr", verify="touch").archive
    index, header = changed_index(archive, None, None)
    outline = np.frombuffer(header + index + header, np.uint8)
    save_split(tmp_path / "m.zcr", tree, {"w": halves}, forged={"outline": outline})
    record = zcrecord.load_record(tmp_path / "m.zcr", verify="touch")
    assert record["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(FormatError, match=r"'x': .*payload"):
        record["x"]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Serve the test's folder, and give the URL of a file in it."""
    with serving(tmp_path) as server:
        yield lambda name: f"{server.url}/{name}"


def test_a_view_of_a_remote_catalogue_is_hashed_and_not_its_payload(tmp_path: Path, serve: Any) -> None:
    values, other = np.arange(16, dtype=np.float32).reshape(4, 4), np.ones(8, np.float32)
    zcrecord.save_record({"w": values, "b": other}, tmp_path / "one.zcr")
    honest = zcrecord.load_record(tmp_path / "one.zcr").content_digest()
    tree, pieces = {"w": values.T, "b": other}, [(NONE, 0), (0, 0)]
    forge_catalogue(tmp_path / "m.zcr", tree, {"s.zcr": {"b": other}}, pieces, blobs=[values.tobytes()])
    with pytest.raises(IntegrityError, match="was expected, it has"):
        zcrecord.load_record(serve("m.zcr"), expect=honest)


@pytest.mark.parametrize("change", [{"nbytes": 256}, {"offset": 64}, {"offset": 130}, {"nbytes": 1 << 40}])
def test_payloads_of_a_shard_that_break_a_rule_are_refused_at_touch(change: dict[str, int], tmp_path: Path) -> None:
    """A remote payload is known by where it starts, and sums of sizes are of bytes that are there."""
    tree = {"a": np.zeros(32, np.float32), "b": OTHER, "c": OTHER + 1}
    zcrecord.save_record(tree, tmp_path / "s.zcr", digest="none")
    shard = Forge((tmp_path / "s.zcr").read_bytes()).set("payloads", 1, **change).seal()
    forged = forge_catalogue(tmp_path / "m.zcr", {"a": tree["a"]}, {"s.zcr": shard}, [(0, 0)])
    with pytest.raises(FormatError, match=r"s\.zcr: payload"):
        zcrecord.load_record(forged, verify="touch")["a"]


def test_a_checked_catalogue_stays_checked_pickled_and_hollow(tmp_path: Path, serve: Any) -> None:
    def forge(**tensors: Any) -> Path:
        return forge_catalogue(tmp_path / "m.zcr", {"w": OTHER}, {"s.zcr": tensors}, [(0, 0)])

    path = forge(w=OTHER)
    record = zcrecord.load_record(serve("m.zcr"))
    record.content_digest()
    pickled, hollow = [pickle.dumps(record), pickle.dumps(zcrecord.load_record(path))], record.hollow()
    assert all(np.array_equal(pickle.loads(data)["w"], OTHER) for data in pickled)
    forge(w=OTHER + 1)  # indexes are the same
    with pytest.raises(IntegrityError, match="its digest does not match"):
        pickle.loads(pickled[0])["w"]
    with pytest.raises(IntegrityError, match="digest does not match"):
        hollow.fill_by("host")
    forge(w=OTHER, x=OTHER)
    for data in pickled:
        with pytest.raises(IntegrityError, match="is not the archive that was pickled"):
            pickle.loads(data)
    with pytest.raises(IntegrityError, match="is not the catalogue that was checked"):
        hollow.fill_by("host")


def test_a_tensor_in_the_catalogue_is_private_in_a_private_copy(tmp_path: Path) -> None:
    path = forge_catalogue(tmp_path / "m.zcr", {"w": OTHER}, {}, [(NONE, 0)], blobs=[OTHER.tobytes()])
    before = path.read_bytes()
    zcrecord.load_record(path, mode="c")["w"][:] = 7
    zcrecord.load_record(path).torch()["w"].fill_(7)
    assert path.read_bytes() == before and np.array_equal(zcrecord.load_record(path)["w"], OTHER)


@pytest.mark.parametrize("blobs", [["text"], "text", [0.5], [1 << 45], [None], 7])
def test_signing_a_catalogue_leaves_one_that_opens_or_the_old_one(blobs: Any, tmp_path: Path) -> None:
    path = forge_catalogue(tmp_path / "m.zcr", {"w": OTHER}, {"s.zcr": {"w": OTHER}}, [(0, 0)], blobs=blobs)
    before = path.read_bytes()
    with pytest.raises(FormatError, match="the catalogue has no blob 0"):
        integrity.sign(path, KEY)
    assert path.read_bytes() == before


def test_a_signature_that_is_bytes_is_not_replaced_in_a_catalogue(tmp_path: Path) -> None:
    zcrecord.save_record({"w": OTHER}, tmp_path / "one.zcr")
    integrity.sign(tmp_path / "one.zcr", KEY)
    [name] = zcrecord.load_record(tmp_path / "one.zcr").metadata
    tree, given = {"w": OTHER, "x": OTHER + 1}, {"s.zcr": {"w": OTHER, "x": OTHER + 1}}
    pieces = [(0, 0), (0, 1), (NONE, 0)]
    path = forge_catalogue(tmp_path / "m.zcr", tree, given, pieces, metadata={name: b"bytes"}, blobs=[b"bytes"])
    with pytest.raises(UnsupportedError, match="has bytes in its metadata under a name that is to be written"):
        integrity.sign(path, KEY)
    assert np.array_equal(zcrecord.load_record(path)["w"], OTHER)


def test_names_of_values_of_a_checkpoint_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "c.zcr").write_bytes(tricks.below_a_long_name())
    with pytest.raises(LimitError, match="full names of attributes add up to"):
        len(Checkpoint(tmp_path / "c.zcr").values)


def test_pieces_that_a_thousand_names_share_are_gone_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a small catalogue of tied tensors would take hours; and planners of DCP would make lists for each name."""
    names = [f"t{i}" for i in range(1000)]
    values = dict.fromkeys(names, np.arange(100.0))
    save_split(tmp_path / "checkpoint.zcr", values, {"t0": boxes_along(0, 100, (100,))})
    record, calls, boxed_pieces = zcrecord.load_record(tmp_path), [], Archive.boxed_pieces

    def counted(*given: Any) -> Any:
        calls.append(given)
        return boxed_pieces(*given)

    monkeypatch.setattr(Archive, "boxed_pieces", counted)
    record.verify()
    assert len(calls) == 1
    assert load_into(record, "host")["t999"].tolist() == [*range(100)]
    assert len(calls) == 2
    metadata = ZcrStorageReader(tmp_path).read_metadata().state_dict_metadata
    with pytest.raises(
        LimitError, match="its tensors, most of them tied, have over 64 times the pieces that there are"
    ):
        [metadata[name] for name in names]


def test_few_boxes_of_many_axes_are_compared_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have 2^24 corners: axis by axis half of what is left is cut off, 20 boxes in all."""
    rank = 19
    number, axis = np.indices((rank + 1, rank))
    origin, extent = (axis < number).astype(np.int64), np.where(axis <= number, 1, 2).astype(np.int64)
    monkeypatch.setattr(np, "unique", None)
    assert tilings.tiles(origin, extent, (2,) * rank)
    origin[3, 7] = 1
    assert not tilings.tiles(origin, extent, (2,) * rank)
    origin[3, 7], extent[3, 7] = 0, 1
    assert not tilings.tiles(origin, extent, (2,) * rank)


def equal_payloads(count: int, nbytes: int) -> bytes:
    """Return an archive of payloads that are one range."""
    f = tricks.tensors(count, bytes(nbytes), payload=np.arange(count))
    f.columns["payloads"] = np.repeat(f.columns["payloads"], count)
    return f.seal()


ACTS: dict[str, Callable[[Path, Verify], Any]] = {
    "mode c": lambda path, level: dict(zcrecord.load_record(path, mode="c", verify=level)),
    "torch": lambda path, level: zcrecord.load_record(path, verify=level).torch(),
    "host": lambda path, level: zcrecord.load_record(path, verify=level).load_into("host"),
    "hollow": lambda path, level: hollow_of(zcrecord.load_record(path, verify=level)),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_payloads_of_one_range_take_no_memory_each(act: Callable[..., Any], level: Verify, tmp_path: Path) -> None:
    """Payloads of a MiB that are one range of their shard, and apart in the outline."""
    count = 1200
    shard = equal_payloads(count, MIB)
    apart = np.arange(count, dtype=np.uint64) * np.uint64(MIB)
    places = [(0, i) for i in range(count)]
    path = forge_catalogue(tmp_path / "m.zcr", shard, {"s.zcr": shard}, places, offsets=apart)
    assert count * MIB > (1 << 30) + 64 * len(shard)
    for source in (path, path.with_name("s.zcr")):
        with pytest.raises(LimitError, match="tensors that share their bytes would take"):
            act(source, level)


@pytest.mark.slow
def test_split_tensors_over_one_range_take_no_memory_each(tmp_path: Path) -> None:
    count, half = 600, MIB
    tables = {
        "first": np.arange(0, 2 * count + 1, 2, dtype=np.uint64),
        "origin": np.tile(np.array([[0], [half]], np.uint64), (count, 1)),
        "extent": np.full((2 * count, 1), half, np.uint64),
        "offsets": np.arange(count, dtype=np.uint64) * np.uint64(2 * half),
    }
    shards, places = {"s.zcr": equal_payloads(2 * count, half)}, [(0, i) for i in range(2 * count)]
    forged = forge_catalogue(tmp_path / "m.zcr", equal_payloads(count, 2 * half), shards, places, **tables)
    for act in (dict, lambda record: record.load_into("host"), lambda record: record.torch()):
        with pytest.raises(LimitError, match="tensors that share their bytes would take"):
            act(zcrecord.load_record(forged))
    with pytest.raises(LimitError, match="up to which there is a content digest"):
        zcrecord.load_record(forged).content_digest()


def test_bytes_in_the_catalogue_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, decoded, entries = 300, itertools.count(), unflatten.attribute_entries
    tree = {f"a{i}": b"%04d" % i for i in range(count)}
    blobs = list(tree.values())
    path = forge_catalogue(tmp_path / "m.zcr", tree, {}, [(NONE, i) for i in range(count)], blobs=blobs)
    monkeypatch.setattr(shards, "attribute_entries", lambda *given: (next(decoded), entries(*given))[1])
    record: Record = zcrecord.load_record(path)
    assert {name: bytes(value) for name, value in record.attributes.items()} == tree
    record.content_digest()
    assert next(decoded) == 1


VIEWS: dict[str, Any] = {
    "turned": (lambda base: (base, base.T), "has strides"),
    "constant": (lambda base: (base, np.lib.stride_tricks.as_strided(base, (4, 4), (0, 0))), "has strides"),
    "flat": (lambda base: (base.reshape(-1), base), "has another shape than a tensor it is tied to"),
}


@pytest.mark.parametrize(("views", "message"), VIEWS.values(), ids=VIEWS)
def test_another_view_of_a_payload_in_pieces_is_refused(views: Any, message: str, tmp_path: Path) -> None:
    """Its boxes would show other elements than it does: one door would give what another had not checked."""
    tied = dict(zip("ab", views(np.arange(16, dtype=np.float32).reshape(4, 4)), strict=True))
    save_split(tmp_path / "m.zcr", tied, {"b": HALVES})
    with pytest.raises(FormatError, match=rf"m\.zcr: tensor 'b': {message}, and its payload is in pieces"):
        zcrecord.load_record(tmp_path / "m.zcr")


SPLIT = {"s": np.arange(16, dtype=np.float32).reshape(4, 4), "u": np.arange(64, dtype=np.float32)}


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        ({"origin": [[0, 0], [1, 0], [0, 0]]}, "its pieces in the shards do not tile it"),
        (
            {"origin": [[0, 0], [3, 0], [0, 0]], "extent": [[3, 4], [1, 4], [0, 0]]},
            r"another size than its box|a piece of it has \d+ bytes, its box",
        ),
    ],
)
def test_verification_checks_the_boxes_of_split_tensors(forged: Any, message: str, tmp_path: Path) -> None:
    tables = {name: np.array(rows, np.uint64) for name, rows in forged.items()}
    save_split(tmp_path / "m.zcr", SPLIT, {"s": HALVES}, forged=tables)
    for act in (digest.check, digest.check_indexes):
        with pytest.raises(FormatError, match=f"tensor 's': .*{message}"):
            act(zcrecord.load_record(tmp_path / "m.zcr").archive)


READS: dict[str, Any] = {
    "safetensors": lambda path: formats.convert(path, path.with_name("o.safetensors")),
    "npz": lambda path: formats.convert(path, path.with_name("o.npz")),
    "save": lambda path: zcrecord.save_record(zcrecord.load_record(path), path.with_name("o.zcr")),
    "hollow": lambda path: hollow_of(path).fill_by("host"),
    "sink": lambda path: hollow_of(path, sink=lambda n, i: bytearray(i.nbytes)).fill_by("read"),
}


@pytest.mark.parametrize("read", READS)
def test_damage_in_a_shard_is_found_though_the_catalogue_has_no_digests(read: str, tmp_path: Path) -> None:
    save_split(tmp_path / "m.zcr", SPLIT, {"s": HALVES})
    shard = tmp_path / "m-00003-of-00003.zcr"
    octets = bytearray(shard.read_bytes())
    octets[octets.index(SPLIT["u"].tobytes()) + 5] ^= 64
    shard.write_bytes(octets)
    with pytest.raises(IntegrityError, match=r"tensor 'u': .*digest does not match"):
        READS[read](tmp_path / "m.zcr")


def test_a_hollow_record_is_not_filled_from_a_later_checkpoint(tmp_path: Path) -> None:
    def save(tree: Any) -> None:
        save_split(tmp_path / "m.zcr", tree, {"s": HALVES})
        zcrecord.save_record(tree, tmp_path / "one.zcr", digest="none")

    save(SPLIT)
    records = [hollow_of(tmp_path / name) for name in ("m.zcr", "one.zcr")]
    save({name: value + 1 for name, value in SPLIT.items()})
    for record in records:
        with pytest.raises(FillError, match="is not the archive that the hollow record is of"):
            record.fill_by("host")


def test_a_packed_catalogue_has_the_same_names_through_every_door(tmp_path: Path) -> None:
    zcrecord.save_record({f"w{i}": np.full(50, i) for i in range(3)}, tmp_path / "m.zcr", max_shard_size=900)
    packed = tmp_path / "m.zcr.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress((tmp_path / "m.zcr").read_bytes()))
    assert zcrecord.load_record(packed).names == zcrecord.load_record(packed, names="*").names == ("w0", "w1", "w2")


def test_a_shard_that_is_only_claimed_lifts_no_limit(tmp_path: Path) -> None:
    """The catalogue says how large its shards are; one that holds nothing of the record need not be there."""
    shard = equal_payloads(1200, MIB)
    zcrecord.save_record({"x": np.ones(1)}, tmp_path / "t.zcr")
    archives = [zcrecord.load_record(source).archive for source in (shard, tmp_path / "t.zcr")]
    headers = [archive.header for archive in archives]
    size = headers[1].index_size
    headers[1] = headers[1]._replace(archive_size=1 << 50, index_offset=(1 << 50) - 64 - size, payload_offset=64)
    index = archives[0].buffer[headers[0].index_offset :][: headers[0].index_size]
    files = {
        "name": zcrecord.StringTensor.from_strings(["s.zcr", "t.zcr"]),
        "trailer": np.frombuffer(b"".join(h.encode() for h in headers), np.uint8).reshape(2, -1),
        "index_sha256": np.frombuffer(hashlib.sha256(index).digest() * 2, np.uint8).reshape(2, -1),
    }
    path = forge_catalogue(tmp_path / "m.zcr", shard, {"s.zcr": shard}, [(0, i) for i in range(1200)], files=files)
    with pytest.raises(LimitError, match="tensors that share their bytes would take"):
        hollow_of(path)
