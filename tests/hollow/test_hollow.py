"""Hollow records: everything of a record but its weights; each constant is filled once, and seal returns the record."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes  # noqa: F401  # numpy knows "int4" by name from it
import numpy as np
import pytest
import records as r
import torch
from forge import Forge

import zcrecord
from tools.range_server import serving
from zcrecord.dtypes import DType
from zcrecord.errors import (
    FillError,
    IntegrityError,
    ProducerError,
    RecordError,
    SourceError,
    TensorNotFoundError,
    UnsupportedError,
)
from zcrecord.hollow import HollowRecord, hollow_of

BASE = np.arange(40, dtype=np.int32)
W = np.arange(24, dtype=np.float32).reshape(4, 6)
TREE = {
    "m": {"w": W, "tied": W, "columns": np.asfortranarray(W + 1), "equal": W.copy()},
    "first": BASE[:30],
    "last": BASE[10:],
    "all": BASE,
    "halves": {"a": (half := np.arange(30, dtype=np.int16))[:20], "b": half[10:]},
    "empty": np.zeros((0, 3)),
    "scalar": np.array(2.5),
    "flags": np.array([True, False]),
    "text": zcrecord.StringTensor.from_strings(["a", "bc"]),
    "packed": zcrecord.PackedTensor.pack(np.array([[1, -2, 3]]).astype("int4")),
    "blob": b"kept",
    "epoch": 3,
}
DATA = r.saved(TREE, metadata={"author": "me"})


def record() -> zcrecord.Record:
    return zcrecord.load_record(DATA)


class Pipe(io.RawIOBase):
    """A file object that cannot seek, and gives little at a time."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        return self._file.readinto(target[:1000])


class OnlyRead:
    """A file object with no method but `read`."""

    def __init__(self, data: bytes) -> None:
        self.read = io.BytesIO(data).read


def in_order(hollow: HollowRecord, source: zcrecord.Record, *, step: int = 1, form: Any = None) -> None:
    for name in list(source)[::step]:
        if name in hollow.missing():
            hollow.set(name, source[name] if form is None else form(source[name]))


def in_chunks(hollow: HollowRecord, source: zcrecord.Record) -> None:
    for name in source:
        if name in hollow.missing():
            with hollow.open(name) as writer:
                for start in range(0, len(data := raw_bytes(source[name])), 7):
                    writer.write(data[start : start + 7])


def raw_bytes(value: Any) -> bytes:
    """Return a tensor's bytes in C order, as they are stored."""
    if isinstance(value, zcrecord.StringTensor):
        return value.data.tobytes()
    return value.packed.tobytes() if isinstance(value, zcrecord.PackedTensor) else bytes(value.tobytes())


Fill = Callable[[HollowRecord, zcrecord.Record], None]
WAYS: dict[str, Fill] = {
    "set": in_order,
    "set, from the last": lambda h, s: in_order(h, s, step=-1),
    "bytes": lambda h, s: in_order(h, s, form=raw_bytes),
    "chunks": in_chunks,
    "record": lambda h, s: h.stream(s),
    "mapping": lambda h, s: h.stream(dict(s.items())),
    "pairs": lambda h, s: h.stream(s.items()),
    "pairs of chunks": lambda h, s: h.stream((n, iter([raw_bytes(s[n])])) for n in s),
    "file": lambda h, s: h.stream(io.BytesIO(bytes(s.archive.buffer))),
    "pipe": lambda h, s: h.stream(Pipe(bytes(s.archive.buffer))),
    "read alone": lambda h, s: h.stream(OnlyRead(bytes(s.archive.buffer))),
    "host": lambda h, s: h.fill_by("host", s),
    "read": lambda h, s: h.fill_by("read", s),
}


def filled(source: Any, way: str = "record", **options: Any) -> Any:
    """Fill a hollow record one way; returns the result of `seal`."""
    source = source if isinstance(source, zcrecord.Record) else zcrecord.load_record(source)
    hollow = hollow_of(source, **options)
    WAYS[way](hollow, source)
    assert hollow.state == "filled"
    return hollow.seal()


def assert_same(got: zcrecord.Record, want: zcrecord.Record) -> None:
    r.assert_same(got.tree(), want.tree())
    assert got.content_digest() == want.content_digest()
    got.verify()
    assert [i.tied for i in got.infos()] == [i.tied for i in want.infos()]


# The sealed record.


@pytest.mark.parametrize("way", WAYS)
def test_a_filled_record_is_the_record(way: str) -> None:
    assert_same(filled(DATA, way), record())


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("way", ["set, from the last", "pairs", "file", "host"])
@hypothesis.given(tree=r.trees().filter(r.names_are_unique))
@hypothesis.settings(max_examples=15)
def test_any_record_is_filled(way: str, tree: Any) -> None:
    source = zcrecord.load_record(r.saved(tree))
    assert_same(filled(source, way), source)


@pytest.mark.parametrize("options", [{}, {"digest": "none"}, {"alignment": 16}], ids=str)
def test_a_file_is_read_whatever_the_archive_is_like(options: Any) -> None:
    assert_same(filled(r.saved(TREE, **options), "file"), record())


def test_a_file_whose_header_is_not_sealed_is_read() -> None:
    written = bytearray()

    class Sink:
        def write(self, data: Any) -> int:
            written.extend(data)
            return len(data)

    zcrecord.save_record({"w": zcrecord.LazyTensor("float32", (4, 6), lambda: W)}, Sink())
    assert filled(bytes(written), "file")["w"].tolist() == W.tolist()


@pytest.mark.parametrize("kind", r.NUMERIC, ids=str)
def test_every_element_type_is_taken_as_array_bytes_and_chunks(kind: DType) -> None:
    array = r.filled(kind, (3, 5))
    data = r.saved({"w": array})
    stored = raw_bytes(zcrecord.load_record(data)["w"])
    for value in (array, stored, iter([stored[:4], stored[4:]])):
        hollow = hollow_of(data)
        hollow.stream([("w", value)])
        assert raw_bytes(hollow.seal()["w"]) == stored


@pytest.mark.parametrize("way", ["bytes", "file", "host"])
def test_elements_of_a_later_version_pass_as_bytes(way: str) -> None:
    forged = Forge(r.saved({"c": W.astype("f2"), "f": np.asfortranarray(W), "last": BASE}))
    source = zcrecord.load_record(forged.set("tensors", "c", dtype=99).set("tensors", "f", dtype=98).seal())
    hollow = hollow_of(source)
    with pytest.raises(ProducerError, match="tensor 'c': declared as unknown 99, got float16"):
        hollow.set("c", W.astype("f2"))
    if way == "bytes":
        hollow.set("last", BASE)
        hollow.set("c", W.astype("f2").tobytes())
        hollow.stream([("f", iter([W.tobytes()[:7], W.tobytes()[7:]]))])
    else:
        WAYS[way](hollow, source)
    sealed = hollow.seal()
    assert all(sealed.raw(name) == source.raw(name) for name in source)


@pytest.mark.parametrize("way", ["set", "chunks", "record", "file", "host"])
def test_narrow_elements_that_are_stored_one_to_a_byte_are_taken(way: str) -> None:
    kind = zcrecord.dtypes.by_name["int4"]
    data = Forge(r.saved({"w": r.filled(kind, (3, 5)).view(np.int8)})).set("tensors", "w", dtype=kind.code).seal()
    source = zcrecord.load_record(data)
    assert isinstance(source["w"], np.ndarray)
    assert_same(filled(source, way), source)
    hollow = hollow_of(source)
    hollow.set("w", zcrecord.PackedTensor.pack(source["w"]))
    assert_same(hollow.seal(), source)


def test_tensors_of_other_libraries_and_byte_orders_are_taken() -> None:
    for value in (torch.from_numpy(W.copy()), W.astype(">f4"), np.asfortranarray(W), W.data):
        hollow = hollow_of(r.saved({"w": W}))
        hollow.set("w", value)
        assert hollow.seal()["w"].tobytes() == W.tobytes()


def test_other_weights_than_the_archives_are_taken() -> None:
    hollow = hollow_of(r.saved({"w": W, "equal": W.copy()}))
    hollow.set("w", W * 2)
    hollow.set("equal", W * 3)  # stored once with the other, but not tied to it
    sealed = hollow.seal()
    assert sealed["w"].tobytes() == (W * 2).tobytes()
    assert sealed["equal"].tobytes() == (W * 3).tobytes()
    sealed.verify()
    assert zcrecord.load_record(r.saved(sealed), verify="full")["equal"][0, 1] == 3


def test_a_part_of_a_record_is_filled_from_the_whole_record_or_its_file() -> None:
    part = record().select("m")
    for source in (record(), io.BytesIO(DATA)):
        hollow = hollow_of(part)
        hollow.stream(source)
        assert_same(hollow.seal(), part)


def test_a_sealed_record_is_read_only_and_aligned_and_outlives_the_hollow_one() -> None:
    sealed = filled(DATA)
    gc.collect()
    view = sealed["m.w"]
    assert not view.flags.writeable
    assert r.address(view) % 64 == 0
    assert sealed.select("m.*")["m.columns"].tobytes() == (W + 1).tobytes()
    sealed.close()
    assert view.tobytes() == W.tobytes()


# Declarations.


def test_names_shapes_modules_attributes_and_metadata_are_there() -> None:
    hollow, source = hollow_of(DATA), record()
    assert list(hollow) == list(hollow.names) == list(source)
    assert len(hollow) == len(source)
    assert "m.w" in hollow
    others: list[Any] = ["m.x", [], 3, None, b"m.w"]
    assert not any(name in hollow for name in others)
    declared = [(i.name, i.dtype, i.shape, i.strides, i.nbytes, i.tied, i.module) for i in hollow.infos()]
    assert declared == [(i.name, i.dtype, i.shape, i.strides, i.nbytes, i.tied, i.module) for i in source.infos()]
    assert hollow.info("m.w").shape == (4, 6)
    assert list(hollow.modules) == list(source.modules)
    assert hollow.attributes == source.attributes == {"blob": b"kept", "epoch": 3}
    assert hollow.metadata == {"author": "me"}
    assert repr(hollow) == "<HollowRecord bytes: declared, 13 of 14 tensors missing>"


def test_it_does_not_need_the_archive_any_more(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(DATA)
    source = zcrecord.load_record(path)
    gone = weakref.ref(source.archive.buffer.obj)
    hollow = hollow_of(source)
    assert source.close()
    del source
    gc.collect()
    assert gone() is None
    path.unlink()
    hollow.stream(record())
    assert_same(hollow.seal(), record())


def test_of_a_remote_archive_the_index_alone_is_fetched_until_a_loader_fills_it(tmp_path: Path) -> None:
    data = r.saved({"w": np.arange(1 << 20, dtype=np.float32), "blob": b"kept"})
    (tmp_path / "m.zcr").write_bytes(data)
    with serving(tmp_path) as server:
        hollow = hollow_of(f"{server.url}/m.zcr")
        assert hollow.attributes == {"blob": b"kept"}
        assert server.sent < len(data) // 20
        hollow.fill_by("host")
    assert_same(hollow.seal(), zcrecord.load_record(data))


def test_it_is_pickled_small_before_it_is_filled_and_without_a_sink() -> None:
    large = r.saved({"w": np.zeros(1 << 20), "blob": b"kept"})
    data = pickle.dumps(hollow_of(large))
    assert len(data) < 8192 < len(large)
    hollow = pickle.loads(data)
    hollow.stream(io.BytesIO(large))
    for one in (hollow, hollow_of(DATA, sink=lambda _name, _info: None)):
        with pytest.raises(UnsupportedError, match="is pickled before it is filled, and without a sink"):
            pickle.dumps(one)
    assert_same(hollow.seal(), zcrecord.load_record(large))


# States.


def test_states_and_progress_are_told() -> None:
    hollow = hollow_of(r.saved({"a": W, "b": W + 1, "e": np.zeros(0)}))
    assert (hollow.state, hollow.missing(), hollow.nbytes, hollow.nbytes_filled) == ("declared", ["a", "b"], 192, 0)
    writer = hollow.open("a")
    writer.write(W)
    assert (hollow.state, hollow.missing()) == ("filling", ["a", "b"])
    writer.close()
    assert (hollow.state, hollow.missing(), hollow.nbytes_filled) == ("filling", ["b"], 96)
    hollow.set("b", W)
    assert (hollow.state, hollow.missing(), hollow.nbytes_filled) == ("filled", [], 192)
    hollow.seal()
    assert str(hollow.state) == "sealed"
    hollow.abort()
    assert str(hollow.state) == "sealed"


def test_filling_one_of_a_tied_group_fills_all() -> None:
    hollow = hollow_of(DATA)
    hollow.set("m.tied", W)
    assert {"m.w", "m.tied"}.isdisjoint(hollow.missing())
    assert "m.equal" in hollow.missing()
    hollow.set("all", BASE)
    assert {"first", "last", "all"}.isdisjoint(hollow.missing())
    hollow.set("halves.a", half[:20])
    assert "halves.b" in hollow.missing()


def test_sealing_with_something_missing_lists_it() -> None:
    hollow = hollow_of(r.saved({f"w{i}": W + i for i in range(14)}))
    hollow.set("w3", W)
    with pytest.raises(FillError, match=r"13 of 14 tensors are missing: 'w0', 'w1', 'w2', 'w4', .*'w10' and 3 more"):
        hollow.seal()
    hollow.stream((name, W) for name in hollow.missing())
    assert len(hollow.seal()) == 14
    assert filled(r.saved({"k": 1})).attributes == {"k": 1}, "without tensors it is filled"


# After a failure the constant can be filled again.


@pytest.mark.parametrize("data, message", [
    (W.T, r"tensor 'm.w': declared with shape \(4, 6\), got \(6, 4\)"),
    (W.astype("f8"), r"tensor 'm.w': declared as float32, got float64; convert it with .astype"),
    (W.view("i4"), r"tensor 'm.w': declared as float32, got int32; convert it"),
    (np.zeros((4, 6), object), r"tensor 'm.w': dtype object has no place in an archive"),
    (np.full((4, 6), "x"), r"tensor 'm.w': declared as float32, got string"),
    (zcrecord.PackedTensor(np.zeros(12, np.uint8), "int4", (4, 6)), r"tensor 'm.w': declared as float32, got int4"),
    (b"short", r"tensor 'm.w': 96 bytes were declared, 5 produced"),
    (bytes(97), r"tensor 'm.w': 96 bytes were declared, at least 97 produced"),
    (iter([W[:2]]), "tensor 'm.w': 96 bytes were declared, 48 produced"),
    (iter([W[:2], W[2:].astype("f8")]), "tensor 'm.w': declared as float32, a piece is float64"),
    (iter([3]), "tensor 'm.w': a piece cannot be stored"),
    (3, "tensor 'm.w': a int is neither a tensor nor chunks of one"),
])  # fmt: skip
def test_wrong_data_is_refused_and_the_right_one_taken_after(data: Any, message: str) -> None:
    hollow = hollow_of(DATA)
    with pytest.raises(ProducerError, match=message):
        hollow.stream([("m.w", data)])
    assert "m.w" in hollow.missing()
    hollow.stream([("m.w", iter([W[:2], W[2:]]))])
    assert "m.w" not in hollow.missing()


def test_an_unknown_name_lists_close_ones() -> None:
    with pytest.raises(TensorNotFoundError, match=r"tensor 'm.ww': not in this record; close names: 'm.w'"):
        hollow_of(DATA).set("m.ww", W)
    name: Any = [3]
    with pytest.raises(TensorNotFoundError, match="not in this record"):
        hollow_of(DATA).open(name)


def test_filling_twice_is_refused_and_says_why() -> None:
    hollow = hollow_of(DATA)
    hollow.set("m.w", W)
    with pytest.raises(FillError, match=r"tensor 'm.w': is filled already; each constant is filled once"):
        hollow.set("m.w", W)
    with pytest.raises(FillError, match=r"tensor 'm.tied': is filled already, with a tensor whose bytes it shares; e"):
        hollow.set("m.tied", W)
    with pytest.raises(FillError, match=r"tensor 'm.w': is filled already; each"):
        hollow.stream([("m.tied", W), ("m.w", W)])
    writer = hollow.open("first")
    for name in ("first", "all"):
        with pytest.raises(FillError, match=rf"tensor '{name}': is being filled by another writer"):
            hollow.open(name)
    writer.abort()
    hollow.set("all", BASE)


def test_an_error_of_the_producers_goes_through_and_the_constant_is_free_again() -> None:
    def chunks() -> Iterator[Any]:
        yield W[:2]
        raise KeyError("own")

    hollow = hollow_of(DATA)
    with pytest.raises(KeyError, match="own"):
        hollow.stream([("m.w", chunks())])
    hollow.set("m.w", W)


def test_nothing_is_filled_after_the_end() -> None:
    aborted, sealed = hollow_of(DATA), hollow_of(DATA)
    late = aborted.open("m.w")
    aborted.abort()
    aborted.abort()
    assert aborted.state == "aborted"
    assert aborted.info("m.w").shape == (4, 6)
    sealed.stream(record())
    sealed.seal()
    acts: list[Callable[[HollowRecord], Any]] = [lambda h: h.set("m.w", W), HollowRecord.seal]
    for hollow, end in ((aborted, "was aborted"), (sealed, "is sealed")):
        for act in acts:
            with pytest.raises(FillError, match=f"the hollow record {end}; make another"):
                act(hollow)
    with pytest.raises(FillError, match=r"tensor 'm.w': the hollow record was aborted; make another"), late:
        late.write(W)


def test_leaving_the_block_frees_the_memory_unless_it_is_sealed() -> None:
    with hollow_of(DATA) as hollow:
        assert hollow._memory is not None
        memory = weakref.ref(hollow._memory.obj)
        hollow.stream(record())
    assert hollow.state == "aborted"
    gc.collect()
    assert memory() is None
    with hollow_of(DATA) as hollow:
        hollow.stream(record())
        sealed = hollow.seal()
    assert_same(sealed, record())


@pytest.mark.parametrize("change, kind, message", [
    (lambda d: d[: len(d) // 2], SourceError, r"the file ends at 0x[0-9a-f]+, 0x[0-9a-f]+ bytes are needed"),
    (lambda d: d.replace(BASE.tobytes(), (BASE + 1).tobytes()), IntegrityError, "a payload's digest does not match"),
    (lambda d: r.saved({"w": W}), IntegrityError, "the file is not the archive that the hollow record is of"),
    (lambda d: b"", SourceError, "the file ends at 0x0, 0x40 bytes are needed"),
])  # fmt: skip
def test_a_file_that_is_not_the_archive_is_refused(change: Any, kind: type, message: str) -> None:
    hollow = hollow_of(DATA)
    with pytest.raises(kind, match=message):
        hollow.stream(io.BytesIO(change(DATA)))
    assert hollow.missing()
    hollow.stream(io.BytesIO(DATA))
    assert_same(hollow.seal(), record())


@pytest.mark.parametrize("sink", [None, lambda _name, info: bytearray(info.nbytes)], ids=["memory", "sink"])
def test_a_loader_fills_the_missing_constants_and_leaves_the_rest_as_it_is(sink: Any) -> None:
    """Names are no patterns, and progress ends where everything is there."""
    source = zcrecord.load_record(r.saved({"w*": W, "wx": W + 1, "w[x]": W + 2, "rows": BASE[:30], "more": BASE[10:]}))
    hollow = hollow_of(source, sink=sink)
    hollow.set("wx", W * 0)
    seen: list[tuple[int, int | None]] = []
    with pytest.raises(RecordError, match="cancelled after 0 of"):
        hollow.fill_by("host", source, cancel=lambda: True)
    assert len(hollow.missing()) == 4
    hollow.fill_by("host", source, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (2 * 96 + 2 * 120, 2 * 96 + 2 * 120)
    sealed = hollow.seal()
    assert bytes(sealed["wx"]) == bytes(96)
    assert all(bytes(sealed[name]) == source[name].tobytes() for name in source if name != "wx")


# Sinks.


class Upload:
    """A device's constant: bytes come in chunks, and `close` gives a handle for it."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray()
        self.nbytes = nbytes
        self.aborted = False

    def write(self, chunk: memoryview) -> None:
        self.data += chunk

    def close(self) -> bytes:
        assert len(self.data) == self.nbytes
        return bytes(self.data)

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("way", ["set", "chunks", "record", "pairs of chunks", "file", "host"])
def test_a_sink_gets_each_constant_once_in_c_order(way: str) -> None:
    begun = []

    def sink(name: str, info: zcrecord.TensorInfo) -> Upload:
        begun.append(name)
        return Upload(info.nbytes)

    source = record()
    sealed = filled(source, way, sink=sink)
    assert list(sealed) == list(source)
    assert {n: v for n, v in sealed.items() if v} == {n: raw_bytes(v) for n, v in source.items() if v.nbytes}
    assert sealed["m.w"] is sealed["m.tied"]
    assert sealed["empty"] is None
    assert sorted(begun) == sorted({*source} - {"m.tied", "empty"})


def test_a_sink_may_give_buffers() -> None:
    rooms: dict[str, Any] = {}

    def sink(name: str, info: zcrecord.TensorInfo) -> Any:
        rooms[name] = np.empty(info.shape, info.dtype.numpy) if name == "m.columns" else bytearray(info.nbytes)
        return rooms[name]

    sealed = filled(DATA, "file", sink=sink)
    assert sealed["m.columns"] is rooms["m.columns"]
    np.testing.assert_array_equal(rooms["m.columns"], W + 1)
    assert rooms["m.w"] == W.tobytes()


@pytest.mark.parametrize("made, message", [
    (bytearray(95), "sink= gave a buffer that is of 95 bytes; 96 contiguous, writable bytes are needed"),
    (bytes(96), "sink= gave a buffer that is read-only; 96 contiguous, writable bytes are needed"),
    (np.zeros((4, 12), np.uint8)[:, ::2], "sink= gave a buffer that is not in C order; 96 contiguous"),
    (None, r"sink= gave a NoneType, neither a writable buffer nor an object with write\(chunk\)"),
])  # fmt: skip
def test_a_buffer_that_does_not_fit_is_refused(made: Any, message: str) -> None:
    hollow = hollow_of(DATA, sink=lambda _name, _info: made)
    with pytest.raises(ProducerError, match=f"tensor 'm.w': {message}"):
        hollow.set("m.w", W)
    assert "m.w" in hollow.missing()


def test_a_sinks_object_is_aborted_and_its_own_errors_go_through(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Upload] = []

    def sink(_: str, info: zcrecord.TensorInfo) -> Upload:
        made.append(Upload(info.nbytes))
        return made[-1]

    hollow = hollow_of(DATA, sink=sink)
    with pytest.raises(ProducerError, match="got a"):
        hollow.set("text", 3.5)
    with pytest.raises(ProducerError, match="48 produced"):
        hollow.stream([("m.w", iter([W[:2]]))])

    def full(*_: Any) -> None:
        raise MemoryError("the device is full")

    monkeypatch.setattr(Upload, "write", full)
    for source in ({"m.w": W}, io.BytesIO(DATA)):
        with pytest.raises(MemoryError, match="the device is full"):
            hollow.stream(source)
    assert all(upload.aborted for upload in made)
    assert "m.w" in hollow.missing()


# Threads.


def test_of_threads_that_fill_one_constant_one_does() -> None:
    hollow = hollow_of(DATA)
    won: list[int] = []

    def fill(k: int) -> None:
        with contextlib.suppress(FillError):
            hollow.set("m.w", W + k)
            won.append(k)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(8)))
    assert len(won) == 1
    hollow.stream(record())
    assert hollow.seal()["m.w"].tobytes() == (W + won[0]).tobytes()


# Views of one payload.


@pytest.mark.parametrize("shape, strides", [((2, 4), (0, 4)), ((4, 2), (4, 4))])
@pytest.mark.parametrize("way", ["record", "set", "host", "file"])
def test_view_as_large_as_its_payload_that_leaves_some_out_fills_nothing_else(
    shape: tuple[int, int], strides: tuple[int, int], way: str
) -> None:
    y = np.arange(8, dtype=np.float32)
    source = zcrecord.load_record(r.saved({"b": np.lib.stride_tricks.as_strided(y, shape, strides), "y": y}))
    hollow = hollow_of(source)
    if way == "set":
        hollow.set("b", source["b"])
        assert hollow.missing() == ["y"]
    WAYS[way](hollow, source)
    assert hollow.seal()["y"].tolist() == y.tolist()


@pytest.mark.parametrize("way", ["host", "file"])
def test_filled_elements_stay_where_the_rest_of_their_payload_is_filled(way: str, tmp_path: Path) -> None:
    x = np.arange(600, dtype=np.float32)
    zcrecord.save_record({"z": x[:512:2], "y": x[1:512:2], "full": x}, tmp_path / "m.zcr")
    source = zcrecord.load_record(tmp_path / "m.zcr", names=["z", "y"])
    hollow = source.hollow()
    hollow.set("z", np.full(256, 99, np.float32))
    WAYS[way](hollow, source)
    sealed = hollow.seal()
    assert set(sealed["z"].tolist()) == {99.0}
    assert sealed["y"].tolist() == x[1:512:2].tolist()
    assert (hollow.missing(), hollow.state) == ([], "sealed")
