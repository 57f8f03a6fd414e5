"""Sources of a hollow record: its path from any folder, the whole of a part, digests verified; or one error."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import records as r
from attacks import tricks
from collisions import colliding
from forge import Forge
from split_catalogues import boxes_along, save_split

import zcrecord
from tools.bench.sparse import COUNT, write_holes
from tools.measure import begin_peak, peak_rss
from tools.range_server import serving
from zcrecord import LimitError
from zcrecord.errors import FillError, IntegrityError, RecordError, SourceError, UnsupportedError
from zcrecord.hollow import HollowRecord, hollow_of
from zcrecord.hollow.hollow_record import _fan_out

BASE = np.arange(40, dtype=np.int32)
W = np.arange(24, dtype=np.float32).reshape(4, 6)
TREE = {
    "m": {"w": W, "tied": W, "columns": np.asfortranarray(W + 1), "equal": W.copy(), "note": b"kept"},
    "first": BASE[:30],
    "last": BASE[10:],
    "text": zcrecord.StringTensor.from_strings(["a", "bc"]),
    "packed": zcrecord.PackedTensor(np.arange(6, dtype=np.uint8), "uint4", (3, 4)),
}
SINKS: dict[str, Any] = {"memory": None, "sink": lambda _name, info: bytearray(info.nbytes)}
sinks = pytest.mark.parametrize("sink", SINKS)


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    zcrecord.save_record(TREE, tmp_path / "m.zcr", durable=False)
    return tmp_path / "m.zcr"


def assert_filled(hollow: HollowRecord, part: zcrecord.Record) -> None:
    sealed = hollow.seal()
    if isinstance(sealed, zcrecord.Record):
        r.assert_same(sealed.tree(), part.tree())
        return
    whole = {name: part.archive.payload(part.archive.row(i).payload) for i, name in enumerate(part)}
    for name, value in part.items():
        strided = part.info(name).strides is not None
        assert bytes(sealed[name]) == (value.tobytes() if strided else bytes(whole[name]))


# Its own path, and the whole of a part.

PARTS: dict[str, Callable[[zcrecord.Record], zcrecord.Record]] = {
    "a tensor": lambda rec: rec.select("first"),
    "several": lambda rec: rec.select(["m.equal", "last", "text"]),
    "a module": lambda rec: rec.module("m"),
    "of a part": lambda rec: rec.select("m").module("m").select("columns"),
    "renamed": lambda rec: rec.select("m", rename={"m": "encoder.0"}),
    "nothing": lambda rec: rec.select([]),
}


@sinks
@pytest.mark.parametrize("part", PARTS)
def test_part_is_filled_from_its_own_path_and_from_the_whole_archive(part: str, sink: str, path: Path) -> None:
    record = zcrecord.load_record(path)
    chosen = PARTS[part](record)
    for source in (None, path, record, path.read_bytes(), zcrecord.load_record(path, verify="touch"), chosen):
        for device in ("host", "read"):
            hollow = hollow_of(chosen, sink=SINKS[sink])
            hollow.fill_by(device, source)
            assert_filled(hollow, chosen)


def test_part_is_not_filled_from_another_archive_nor_from_less_than_it_is(path: Path) -> None:
    record = zcrecord.load_record(path)
    other = zcrecord.load_record(r.saved({**TREE, "first": BASE[:29]}))
    for source in (other, record.select("last"), zcrecord.load_record(path, mode="c")):
        with pytest.raises(FillError, match="is not the archive that the hollow record is of"):
            record.select("m").hollow().fill_by("host", source)
    with pytest.raises(FillError, match="no path is known to load from; name the source"):
        hollow_of(path.read_bytes()).fill_by("host")


# Digests.


@sinks
@pytest.mark.parametrize("device", ["host", "read"])
@pytest.mark.parametrize("name", ["m.w", "m.columns", "text", "packed"])
def test_loader_that_brings_damaged_bytes_is_noticed(name: str, device: str, sink: str, path: Path) -> None:
    record, data = zcrecord.load_record(path), bytearray(path.read_bytes())
    data[record.info(name).offset] ^= 1
    path.with_name("damaged.zcr").write_bytes(data)
    hollow = hollow_of(path.with_name("damaged.zcr"), sink=SINKS[sink])
    with pytest.raises(IntegrityError, match=rf"damaged\.zcr: tensor '{name}': a payload's digest does not match"):
        hollow.fill_by(device)
    assert name in hollow.missing()
    assert name == "m.w" or "m.w" not in hollow.missing(), "constants before it count"
    hollow.fill_by(device, verify_digests=False)
    assert hollow.state == "filled"


@sinks
def test_view_that_runs_backwards_is_checked_as_it_is_stored(sink: str) -> None:
    x = np.arange(5, 17, dtype=np.int16).reshape(2, 3, 2)
    data = r.saved({"x": x, "turned": x[::-1].transpose(2, 0, 1)[:, :, ::-1]})
    for broken in (False, True):
        source = zcrecord.load_record(data.replace(x.tobytes(), bytes(24)) if broken else data).select("turned")
        assert source.info("turned").strides == (1, -6, -2)
        hollow = hollow_of(source, sink=SINKS[sink])
        if broken:
            with pytest.raises(IntegrityError, match="tensor 'turned': a payload's digest does not match"):
                hollow.fill_by("host", source)
        else:
            hollow.fill_by("host", source)
            assert_filled(hollow, source)


def test_archive_without_digests_and_edits_of_a_private_copy_fill_unchecked(tmp_path: Path) -> None:
    for digest, mode, value in (("none", "r", 1), ("xxh3", "c", 7)):
        zcrecord.save_record({"w": W * 0 + 1}, tmp_path / "m.zcr", digest=digest)
        source: Any = zcrecord.load_record(tmp_path / "m.zcr", mode=mode)  # type: ignore[call-overload]
        if mode == "c":
            source["w"][:] = 7
        hollow = hollow_of(tmp_path / "m.zcr")
        hollow.fill_by("host", source)
        assert set(hollow.seal()["w"].reshape(-1).tolist()) == {value}


# One error for other sources.


class Reads:
    """A file object whose `read` gives something other than bytes."""

    def __init__(self, gives: Any) -> None:
        self._gives = gives

    def read(self, _: int) -> Any:
        return self._gives


MISUSE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no loader": (lambda h: h.fill_by(None), "loader= takes a loader, or the name of a device"),
    "a class of loaders": (lambda h: h.fill_by(dict), "loader= takes a loader"),
    "views": (lambda h: h.fill_by("cpu"), "views of the archive fill no memory of their own; fill by 'host' or"),
    "no function": (lambda h: h.fill_by("host", progress=3), "progress= takes a function, not a int"),
    "no cancel": (lambda h: h.fill_by("host", cancel=3), "cancel= takes an Event or a function, not a int"),
    "a path": (lambda h: h.stream(Path("m.zcr")), r"stream\(\) does not open paths; stream\(open\(path, 'rb'\)\)"),
    "numbers": (lambda h: h.stream([1, 2]), r"or pairs \(name, data\), and one is a int"),
    "none": (lambda h: h.stream(None), r"or pairs \(name, data\), and one is a NoneType"),
    "names": (lambda h: h.stream(["m.w"]), r"or pairs \(name, data\), and one is a str"),
    "no names": (lambda h: h.stream([(["m.w"], W)]), r"or pairs \(name, data\), and one is a tuple"),
    "text": (lambda h: h.stream(io.StringIO("text")), "a file object in text mode; open it in binary mode"),
    "read gives text": (lambda h: h.stream(Reads("x" * 9)), r"read\(64\) gave a str of 9, not at most 64 bytes"),
    "read gives more": (lambda h: h.stream(Reads(bytes(65))), r"read\(64\) gave a bytes of 65, not at most 64 bytes"),
    "no sink": (lambda h: hollow_of(r.saved({}), sink=h), "sink= is a function of a name and a TensorInfo, not a Hol"),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_one_typed_error_and_harms_nothing(what: str, path: Path) -> None:
    act, message = MISUSE[what]
    hollow = hollow_of(path)
    with pytest.raises(UnsupportedError, match=message):
        act(hollow)
    assert hollow.nbytes_filled == 0
    hollow.fill_by("host")
    assert not hollow.missing()


def test_file_that_gives_nothing_yet_or_cannot_be_read_is_told(path: Path) -> None:
    with pytest.raises(SourceError, match="non-blocking and has no bytes ready; make it blocking"):
        hollow_of(path).stream(Reads(None))
    with open(os.devnull, "wb") as file, pytest.raises(SourceError, match="cannot read"):
        hollow_of(path).stream(file)
    closed = io.BytesIO()
    closed.close()
    with pytest.raises(SourceError, match="the file object is closed; open it again"):
        hollow_of(path).stream(closed)


# Forged sources.


WEIGHT, V = np.arange(400.0), np.arange(400.0) * 2
OTHERS = np.full(400, 666.0).tobytes()
WRONG = "a payload's digest does not match"
devices = pytest.mark.parametrize("device", ["host", "read"])


def forged(data: bytes, evil: bytes) -> bytes:
    """Return an archive with other weights than W."""
    assert data.count(WEIGHT.tobytes()) == 1
    return data.replace(WEIGHT.tobytes(), evil)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("how", ["record", "part", "pickled", "pickled record"])
def test_hollow_record_of_a_checked_catalogue_takes_no_weights_of_the_same_64_bits(
    how: str, split: bool, tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole.zcr", tmp_path / "m.zcr"
    tree = {"a": {"w": WEIGHT.reshape(20, 20)}, "b": {"v": V}}
    zcrecord.save_record(tree, whole, durable=False, digest="none" if split else "xxh3")
    if split:
        save_split(path, tree, {"a.w": boxes_along(1, 3, (20, 20))})
    else:
        zcrecord.save_record(tree, path, max_shard_size=3300, durable=False)
    genuine = whole.read_bytes()
    with serving(tmp_path) as server:
        record = zcrecord.load_record(f"{server.url}/m.zcr", expect=zcrecord.load_record(whole).content_digest())
        assert record.archive.source.file_names
        source = pickle.loads(pickle.dumps(record)) if how == "pickled record" else record
        hollow = hollow_of(source.select("a.*") if how == "part" else source)
        if how == "pickled":
            hollow = pickle.loads(pickle.dumps(hollow))
        with pytest.raises(IntegrityError, match=WRONG):
            hollow.stream(io.BytesIO(forged(genuine, colliding(WEIGHT.tobytes(), OTHERS))))
        assert "a.w" in hollow.missing()
        hollow.stream(io.BytesIO(genuine))
        assert hollow.seal()["a.w"].tobytes() == WEIGHT.tobytes()


def views(base_strides: list[int] | None = None) -> bytes:
    """Return an archive of two halves of a payload, and of a whole that is saved with strides or without."""
    x = WEIGHT.reshape(20, 20)
    out = io.BytesIO()
    zcrecord.save_record({"l": x[:, :10], "base": x, "r": x[:, 10:]}, out)
    if base_strides is None:
        return out.getvalue()
    forge = Forge(out.getvalue())
    forge.set("tensors", "base", dims=forge.add("dims", [20, 10]), strides=forge.add("strides", base_strides))
    return bytes(forge.seal())


@sinks
@devices
@pytest.mark.parametrize("names", [["l", "r"], ["l"], ["l", "base"]])
@pytest.mark.parametrize("strides", [None, [20, 1]])
def test_parts_of_payloads_are_compared_with_the_digest_of_the_whole(
    strides: list[int] | None, names: list[str], device: str, sink: str, tmp_path: Path
) -> None:
    genuine = views(strides)
    (tmp_path / "evil.zcr").write_bytes(forged(genuine, OTHERS))
    part = zcrecord.load_record(genuine).select(names)
    hollow = hollow_of(part, sink=SINKS[sink])
    for source in (forged(genuine, OTHERS), tmp_path / "evil.zcr"):
        with pytest.raises(IntegrityError, match=f"tensor '(l|base)': {WRONG}"):
            hollow.fill_by(device, source)
        assert hollow.missing() == list(part)
    seen: list[tuple[int, int | None]] = []
    with pytest.raises(RecordError, match="cancelled after"):
        hollow.fill_by(device, genuine, cancel=lambda: True)
    hollow.fill_by(device, genuine, progress=lambda done, total: seen.append((done, total)))
    assert all(total == hollow.nbytes for _, total in seen) and seen[-1][0] >= WEIGHT.nbytes // 2
    sealed = hollow.seal()
    for name, value in part.items():
        assert (sealed[name].tobytes() if sink == "memory" else bytes(sealed[name])) == value.tobytes()


def test_parts_of_a_checked_archive_behind_a_url_are_those_that_were_expected(tmp_path: Path) -> None:
    genuine = views([20, 1])
    (tmp_path / "m.zcr").write_bytes(genuine)
    evil = forged(genuine, colliding(WEIGHT.tobytes(), OTHERS))
    with serving(tmp_path) as server:
        expected = zcrecord.load_record(genuine).content_digest()
        record = zcrecord.load_record(f"{server.url}/m.zcr", expect=expected, cache=False)
        hollow = pickle.loads(pickle.dumps(record.hollow()))
        (tmp_path / "m.zcr").write_bytes(evil)
        for source in (None, evil):
            with pytest.raises(IntegrityError, match="digest does not match"):
                hollow.fill_by("read", source)


@sinks
@devices
def test_split_tensor_is_filled_by_a_loader(device: str, sink: str, tmp_path: Path) -> None:
    tree = {"w": WEIGHT.reshape(20, 20), "v": V}
    save_split(tmp_path / "m.zcr", tree, {"w": boxes_along(1, 3, (20, 20))})
    hollow = hollow_of(tmp_path / "m.zcr", sink=SINKS[sink])
    hollow.fill_by(device)
    sealed = hollow.seal()
    assert {name: bytes(sealed[name]) for name in sealed} == {name: value.tobytes() for name, value in tree.items()}


# Memory.


MIB = 1 << 20
LARGE = 2048 * MIB
PAYLOAD = LARGE // COUNT + 8
SMALL = 256 * MIB
LITTLE = 6 * MIB

MEASURED = """
import json, sys
import numpy as np
import zcrecord
from tools.measure import memory, peak_rss
from zcrecord.hollow import hollow_of

class Device:
    '''Counts the bytes that it is given, and keeps as many as `keeps` says.'''
    taken, kept, keeps = 0, [], 0
    def write(self, chunk):
        Device.taken += len(chunk)
        if Device.taken <= Device.keeps:
            Device.kept.append(bytes(chunk))

def arrays(hollow):
    return ((i.name, np.full(i.shape, 1, i.dtype.numpy)) for i in hollow.infos())

def chunks(hollow):
    piece = bytes(1 << 16)
    for i in hollow.infos():
        whole, rest = divmod(i.nbytes, len(piece))
        yield i.name, (piece if k < whole else piece[:rest] for k in range(whole + 1))

def device(name, info):
    return Device()

def act(path, first):
{act}

act(sys.argv[2], True)  # imports what is imported on the way, of a record that is small
before = peak_rss()
result = act(sys.argv[1], False)
print(json.dumps({{'grown': peak_rss() - before, 'taken': Device.taken, 'state': result}}))
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Files of holes by the bytes of their tensors."""
    folder = tmp_path_factory.mktemp("holes")
    for nbytes in (LARGE, SMALL, MIB):
        write_holes(folder / str(nbytes), nbytes)
    return {nbytes: folder / str(nbytes) for nbytes in (LARGE, SMALL, MIB)}


FILLS = {
    "file": "with open(path, 'rb') as file: hollow.stream(file)",
    "chunks": "hollow.stream(chunks(hollow))",
    "arrays": "hollow.stream(arrays(hollow))",
}


def measured(archives: dict[int, Path], fill: str, sink: str = "device", keeps: int = 0, nbytes: int = LARGE) -> Any:
    """Return how much more was resident at the most while a record was filled, and the bytes that the device got."""
    lines = (f"Device.keeps = 0 if first else {keeps}", f"hollow = hollow_of(path, sink={sink})", FILLS[fill])
    code = MEASURED.format(act="\n".join(f"    {line}" for line in (*lines, "hollow.seal()", "return hollow.state")))
    return json.loads(r.run_python(code, archives[nbytes], archives[MIB]).stdout)


@pytest.mark.measured
@pytest.mark.exhaustive(keep=("[arrays]",))
@pytest.mark.parametrize("fill", FILLS)
def test_two_gibibytes_pass_to_a_device_in_the_memory_of_a_chunk_or_one_payload(
    fill: str, archives: dict[int, Path]
) -> None:
    found = measured(archives, fill)
    assert found["taken"] > LARGE
    assert found["state"] == "sealed"
    assert found["grown"] < LITTLE + (PAYLOAD if fill == "arrays" else 0)
    assert fill != "arrays" or found["grown"] > PAYLOAD // 2


@pytest.mark.measured
@pytest.mark.exhaustive(keep=("[file]",))
@pytest.mark.parametrize("fill", ["file", "chunks"])
def test_one_payload_that_stays_in_memory_would_be_noticed(fill: str, archives: dict[int, Path]) -> None:
    assert measured(archives, fill, keeps=PAYLOAD + MIB)["grown"] > PAYLOAD - MIB > LITTLE


@pytest.mark.measured
@pytest.mark.parametrize("fill", FILLS)
def test_memory_of_its_own_is_filled_in_place_and_sealing_adds_nothing(fill: str, archives: dict[int, Path]) -> None:
    found = measured(archives, fill, "None", nbytes=SMALL)
    besides = SMALL // COUNT + 8 if fill == "arrays" else 0
    assert SMALL - LITTLE < found["grown"] < SMALL + besides + LITTLE


@pytest.mark.measured
def test_declaring_takes_no_memory_for_weights(archives: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILLS, "nothing", "return hollow.state")
    assert measured(archives, "nothing", "None")["grown"] < LITTLE


def test_bytes_that_many_payloads_share_are_not_taken_for_each(tmp_path: Path) -> None:
    """A MiB that 2,000 payloads name would be 2 GiB as bytes, and 2 GiB of memory to fill."""
    forged = tricks.attributes(2000, {"n": bytes(MIB)})
    forged.columns["payloads"] = np.repeat(forged.columns["payloads"], 2000)
    forged.columns["attributes"]["value"] = np.arange(2000)
    (tmp_path / "m.zcr").write_bytes(forged.seal())
    with pytest.raises(LimitError, match=r"m\.zcr: tensors that share their bytes would take 2\.1e\+09 bytes"):
        hollow_of(zcrecord.load_record(tmp_path / "m.zcr"))
    saved = r.saved({f"w{i}": np.zeros(MIB, np.uint8) for i in range(20)})
    assert len(hollow_of(saved)) == 20


def test_views_of_the_same_bytes_are_not_handed_to_a_sink_without_end() -> None:
    w = np.zeros(MIB, np.uint8)
    saved = r.saved({f"w{i}": w[i:] for i in range(1200)})
    with pytest.raises(LimitError, match=r"tensors that share their bytes would take 1\.26e\+09 bytes"):
        hollow_of(saved, sink=lambda *_: bytearray())
    assert hollow_of(saved).state == "declared"  # in memory they are views of a MiB


@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells the peak from now on")
def test_memory_of_a_strided_payload_is_taken_as_its_chunks_come() -> None:
    def breaks_off() -> Iterator[memoryview]:
        yield memoryview(bytes(MIB))
        raise SourceError("broke off")

    strided: Any = SimpleNamespace(constant=SimpleNamespace(info=SimpleNamespace(strides=(1, 2))))
    claimed = 192 * MIB
    before = begin_peak()
    with pytest.raises(SourceError, match="broke off"):
        _fan_out([strided], breaks_off(), claimed)
    assert (peak_rss() or 0) - before < claimed // 3
    assert bytearray(claimed) and (peak_rss() or 0) - before > claimed // 2, "the measurement notices"
