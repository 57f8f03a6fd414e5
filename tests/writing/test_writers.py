"""Guarantees of writers beyond the readers' checks: alignment, one form for each value, the same bytes everywhere."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from forge import Forge

import zcrecord
from zcrecord import dtypes
from zcrecord.codec import blocks
from zcrecord.codec.entries import TensorLayout, ValueForm, ValueType
from zcrecord.codec.layout import NONE, decode_header
from zcrecord.storage.files import open_sink
from zcrecord.writing import module_tree, writers

MIB = 1 << 20


class Pipe:
    """A sink that only writes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)

    def getvalue(self) -> bytes:
        return bytes(self.data)


def write(out: writers.StreamWriter, payloads: dict[str, int], arrays: dict[str, Any]) -> None:
    """Write the index for payloads that were written."""
    tree = module_tree.ModuleTreeBuilder()
    for name, payload in payloads.items():
        kind, shape = dtypes.from_numpy(arrays[name].dtype), arrays[name].shape
        tree.tensor((name,), TensorLayout(kind.code, 8, shape), payload)
    out.finish(tree.entries())


def streamed(arrays: dict[str, Any], file: Any, alignment: int = 64) -> bytes:
    """The same tensors with the index at the back."""
    with open_sink(file) as sink:
        out = writers.StreamWriter(sink, alignment=alignment)
        write(out, {name: out.store(array) for name, array in arrays.items()}, arrays)
    data: bytes = file.getvalue() if hasattr(file, "getvalue") else b""
    return data


def written(kind: str, arrays: dict[str, Any], alignment: int = 64) -> bytes:
    """Return the archive with the index in front or back, through a pipe, or of a file with payloads added together."""
    if kind == "front":
        return r.saved(arrays, alignment=alignment)
    if kind != "file":
        return streamed(arrays, io.BytesIO() if kind == "back" else Pipe(), alignment)
    with tempfile.TemporaryDirectory() as folder:
        with open_sink(path := Path(folder, "m.zcr"), durable=False) as sink:
            out = writers.StreamWriter(sink, alignment=alignment)
            payloads = {name: number for number, name in enumerate(arrays, out.payloads)}
            out.add_all([memoryview(array.tobytes()) for array in arrays.values()])
            write(out, payloads, arrays)
        return path.read_bytes()


def base_alignment(data: bytes) -> int:
    trailer = decode_header(data[-64:], "trailer")
    assert trailer is not None
    return trailer.base_alignment


@pytest.mark.parametrize("kind", ["front", "back", "pipe"])
@pytest.mark.parametrize("alignment", [16, 64, 4096, 65536])
def test_payloads_of_a_mebibyte_start_on_a_page_others_on_the_alignment(kind: str, alignment: int) -> None:
    """R57, R62: of the file, wherever the payloads begin in it."""
    sizes = {"small": 3, "large": MIB, "next": 5, "nearly": MIB - 1, "larger": MIB + 1}
    arrays = {name: np.full(size, i + 1, np.uint8) for i, (name, size) in enumerate(sizes.items())}
    data = written(kind, arrays, alignment)
    record = zcrecord.load_record(data, verify="full")
    for name, size in sizes.items():
        assert record.info(name).offset % (max(alignment, 16384) if size >= MIB else alignment) == 0, name
    assert base_alignment(data) == max(alignment, 16384)


@pytest.mark.parametrize("kind", ["front", "back", "pipe"])
def test_without_large_payloads_the_base_alignment_is_the_alignment(kind: str) -> None:
    """R62."""
    data = written(kind, {"w": np.arange(100, dtype=np.uint8)}, 64)
    assert base_alignment(data) == 64
    assert len(data) < 1024


def numbered(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("kind", ["back", "pipe", "file"])
@pytest.mark.parametrize(
    "nbytes", [1, 64, writers.MOST_WAITING - 1, writers.MOST_WAITING, writers.MOST_WAITING + 1, 3 * MIB]
)
def test_equal_payloads_are_stored_once_into_a_pipe_up_to_what_is_held(kind: str, nbytes: int) -> None:
    arrays = {"a": numbered(nbytes), "b": numbered(nbytes, 1), "c": numbered(nbytes), "d": numbered(nbytes, 1)}
    record = zcrecord.load_record(written(kind, arrays, 64), verify="full")
    assert all((record[name] == array).all() for name, array in arrays.items())
    assert kind != "file" or written("back", arrays, 64) == written("file", arrays, 64)
    shared = kind != "pipe" or nbytes <= writers.MOST_WAITING
    assert record.layout.deduplicated == (2 * nbytes if shared else 0)
    assert (record.info("a").offset == record.info("c").offset) == shared
    assert record.info("a").payload != record.info("c").payload, "equal is not tied"


@pytest.mark.parametrize("kind", ["back", "pipe", "file"])
def test_payloads_that_only_share_a_digest_are_both_stored(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XXH3 can be made to collide on purpose; what decides must not."""

    class Colliding:
        def reset(self) -> None: ...
        def update(self, data: Any) -> None: ...
        def intdigest(self) -> int:
            return 7

    monkeypatch.setattr(blocks, "RunningDigest", Colliding)
    monkeypatch.setattr(writers, "digest_of", lambda data: 7)
    arrays = {"a": numbered(100), "b": numbered(100, 1), "c": numbered(100)}
    record = zcrecord.load_record(written(kind, arrays, 64))
    assert all((record[name] == array).all() for name, array in arrays.items())
    assert record.layout.deduplicated == 100


@pytest.mark.parametrize("kind", ["back", "pipe"])
def test_a_payload_that_is_forgotten_leaves_no_trace(kind: str) -> None:
    arrays = {"a": numbered(100), "b": numbered(writers.MOST_WAITING, 1), "c": numbered(100)}
    file: Any = io.BytesIO() if kind == "back" else Pipe()
    with open_sink(file) as sink:
        out = writers.StreamWriter(sink)
        payloads = {}
        for name, array in arrays.items():
            for forgotten in (numbered(70, 5), numbered(MIB, 6) if kind == "back" else numbered(80, 6)):
                number = out.store(forgotten)
                if kind == "back":  # a pipe would have written the payload
                    out.begin(MIB, alignment=8192)  # without a byte it is no payload
                    assert out.end() == NONE
                out.forget(number)
            payloads[name] = out.store(array)
            out.forget(out.store(array, alignment=4096))  # it has the place of the one before
        write(out, payloads, arrays)
    assert file.getvalue() == written(kind, arrays)


def test_what_went_into_a_pipe_cannot_be_forgotten() -> None:
    with open_sink(Pipe()) as sink:
        out = writers.StreamWriter(sink)
        number = out.store(np.zeros(writers.MOST_WAITING + 1, np.uint8))
        with pytest.raises(zcrecord.errors.UnsupportedError, match="cannot be taken back; write to a file"):
            out.forget(number)


@pytest.mark.parametrize("kind", ["back", "pipe"])
@pytest.mark.parametrize("first", [b"", b"abcd"])
def test_payload_that_was_begun_large_and_got_no_byte_leaves_no_trace(kind: str, first: bytes) -> None:
    """R13, R59."""
    file: Any = io.BytesIO() if kind == "back" else Pipe()
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in zip("abcd", (first, b"", b"efg", b""), strict=True)}
    with open_sink(file) as sink:
        out = writers.StreamWriter(sink)
        payloads = {}
        for name, array in arrays.items():
            out.begin(array.nbytes or MIB)
            out.write(array)
            payloads[name] = out.end()
        write(out, payloads, arrays)
    record = zcrecord.load_record(file.getvalue(), verify="full")
    assert [record[name].tobytes() for name in record] == [first, b"", b"efg", b""]
    assert len(file.getvalue()) < 2048


@pytest.mark.parametrize("buffering", [0, -1])
def test_stream_appended_to_a_file_gets_no_second_header(buffering: int, tmp_path: Path) -> None:
    """Writes to a file that appends go to its end, at any position."""
    arrays = {"w": np.arange(100, dtype=np.uint8)}
    with open(tmp_path / "m.zcr", "a+b", buffering=buffering) as file:
        streamed(arrays, file)
    assert (tmp_path / "m.zcr").read_bytes() == streamed(arrays, Pipe())


def test_elements_are_aligned_wherever_the_archive_is_placed_on_its_base_alignment() -> None:
    """R18. Readers do not check it: anywhere else an archive still loads."""
    data = r.saved({"a": np.ones(3, np.int8), "b": np.arange(3.0), "big": np.ones(MIB, np.uint8)})
    room = np.zeros(len(data) + 2 * 65536, np.uint8)
    for shift in (0, 1):
        start = -r.address(room) % 65536 + shift
        room[start : start + len(data)] = np.frombuffer(data, np.uint8)
        record = zcrecord.load_record(room[start : start + len(data)].data, verify="full")
        assert record["b"].tolist() == [0, 1, 2] and record["b"].flags.aligned == (not shift)
        for info in [] if shift else record.infos():
            assert r.address(record[info.name]) % info.alignment == 0
            assert info.alignment >= (16384 if info.name == "big" else 64)


@pytest.mark.parametrize(
    ("value", "type_", "form"),
    [
        (2**63 - 1, ValueType.INT, ValueForm.SCALAR),
        (-(2**63), ValueType.INT, ValueForm.SCALAR),
        (2**63, ValueType.UINT, ValueForm.SCALAR),
        (True, ValueType.BOOL, ValueForm.SCALAR),
        ([1, -1], ValueType.INT, ValueForm.LIST),
        ((1, 2**64 - 1), ValueType.UINT, ValueForm.TUPLE),
        ([], ValueType.NIL, ValueForm.LIST),
        ((), ValueType.NIL, ValueForm.TUPLE),
    ],
)
def test_each_value_has_one_form(value: Any, type_: int, form: int) -> None:
    """R69."""
    data = r.saved({"v": value})
    row = Forge(data).columns["attributes"][0]
    assert (row["type"], row["form"]) == (type_, form)
    assert zcrecord.load_record(data).attributes == {"v": value}
    if value in ([], ()):
        assert row["value"] >> np.uint64(32) == 0


def test_a_list_of_integers_that_no_one_type_holds_is_a_module() -> None:
    """R69; and R60 for digests that are none."""
    data = r.saved({"v": [-1, 2**63], "w": np.ones(3)}, digest="none")
    assert zcrecord.load_record(data).modules["v"].kind == "list"
    assert (Forge(data).digest_kind, Forge(data).columns["payloads"]["digest"].tolist()) == (0, [0])
