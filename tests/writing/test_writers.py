"""Guarantees of writers beyond the readers' checks: alignment, one form for each value, the same bytes everywhere."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forge import Forge

import zcrecord
from zcrecord import dtypes
from zcrecord.codec.entries import TensorLayout, ValueForm, ValueType
from zcrecord.codec.layout import decode_header
from zcrecord.storage.files import open_sink
from zcrecord.writing import module_tree, writers

ROOT = Path(__file__).resolve().parents[2]
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


def saved(record: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    zcrecord.save_record(record, file, **options)
    return file.getvalue()


def streamed(arrays: dict[str, Any], file: Any, alignment: int) -> bytes:
    """The same tensors with the index at the back."""
    with open_sink(file) as sink:
        out = writers.StreamWriter(sink, alignment=alignment)
        tree = module_tree.ModuleTreeBuilder()
        for name, array in arrays.items():
            out.begin(array.nbytes)
            out.write(array.tobytes())
            tree.tensor((name,), TensorLayout(dtypes.from_numpy(array.dtype).code, 8, array.shape), out.end())
        out.finish(tree.entries())
    data: bytes = file.getvalue()
    return data


def written(how: str, arrays: dict[str, Any], alignment: int) -> bytes:
    if how == "front":
        return saved(arrays, alignment=alignment)
    if how == "file":
        with tempfile.TemporaryDirectory() as folder:
            return streamed_to(arrays, Path(folder, "m.zcr"), alignment)
    return streamed(arrays, io.BytesIO() if how == "back" else Pipe(), alignment)


def streamed_to(arrays: dict[str, Any], path: Path, alignment: int) -> bytes:
    """The same into a file of its own, all payloads together."""
    with open_sink(path, durable=False) as sink:
        out = writers.StreamWriter(sink, alignment=alignment)
        tree = module_tree.ModuleTreeBuilder()
        for number, (name, array) in enumerate(arrays.items(), out.payloads):
            tree.tensor((name,), TensorLayout(dtypes.from_numpy(array.dtype).code, 8, array.shape), number)
        out.add_all([memoryview(array.tobytes()) for array in arrays.values()])
        out.finish(tree.entries())
    return path.read_bytes()


def base_alignment(data: bytes) -> int:
    trailer = decode_header(data[-64:], "trailer")
    assert trailer is not None
    return trailer.base_alignment


@pytest.mark.parametrize("how", ["front", "back", "pipe"])
@pytest.mark.parametrize("alignment", [16, 64, 4096, 65536])
def test_payloads_of_a_mebibyte_start_on_a_page_others_on_the_alignment(how: str, alignment: int) -> None:
    """R57, R62: of the file, wherever the payloads begin in it."""
    sizes = {"small": 3, "large": MIB, "next": 5, "nearly": MIB - 1, "larger": MIB + 1}
    arrays = {name: np.full(size, i + 1, np.uint8) for i, (name, size) in enumerate(sizes.items())}
    data = written(how, arrays, alignment)
    record = zcrecord.load_record(data, verify="full")
    for name, size in sizes.items():
        assert record.info(name).offset % (max(alignment, 16384) if size >= MIB else alignment) == 0, name
    assert base_alignment(data) == max(alignment, 16384)


@pytest.mark.parametrize("how", ["front", "back", "pipe"])
def test_without_large_payloads_the_base_alignment_is_the_alignment(how: str) -> None:
    """R62."""
    data = written(how, {"w": np.arange(100, dtype=np.uint8)}, 64)
    assert base_alignment(data) == 64
    assert len(data) < 1024


def numbered(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("how", ["back", "pipe", "file"])
@pytest.mark.parametrize(
    "nbytes", [1, 64, writers.MOST_WAITING - 1, writers.MOST_WAITING, writers.MOST_WAITING + 1, 3 * MIB]
)
def test_equal_payloads_are_stored_once_into_a_pipe_up_to_what_is_held(how: str, nbytes: int) -> None:
    arrays = {"a": numbered(nbytes), "b": numbered(nbytes, 1), "c": numbered(nbytes), "d": numbered(nbytes, 1)}
    record = zcrecord.load_record(written(how, arrays, 64), verify="full")
    assert all((record[name] == array).all() for name, array in arrays.items())
    assert how != "file" or written("back", arrays, 64) == written("file", arrays, 64)
    shared = how != "pipe" or nbytes <= writers.MOST_WAITING
    assert record.layout.deduplicated == (2 * nbytes if shared else 0)
    assert (record.info("a").offset == record.info("c").offset) == shared
    assert record.info("a").payload != record.info("c").payload, "equal is not tied"


@pytest.mark.parametrize("how", ["back", "pipe", "file"])
def test_payloads_that_only_share_a_digest_are_both_stored(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XXH3 can be made to collide on purpose; what decides must not."""

    class Colliding:
        def reset(self) -> None: ...
        def update(self, data: Any) -> None: ...
        def intdigest(self) -> int:
            return 7

    monkeypatch.setattr(writers, "RunningDigest", Colliding)
    monkeypatch.setattr(writers, "digest_of", lambda data: 7)
    arrays = {"a": numbered(100), "b": numbered(100, 1), "c": numbered(100)}
    record = zcrecord.load_record(written(how, arrays, 64))
    assert all((record[name] == array).all() for name, array in arrays.items())
    assert record.layout.deduplicated == 100


@pytest.mark.parametrize("how", ["back", "pipe"])
def test_a_payload_that_is_forgotten_leaves_no_trace(how: str) -> None:
    kept = {"a": numbered(100), "b": numbered(writers.MOST_WAITING, 1), "c": numbered(100)}
    file: Any = io.BytesIO() if how == "back" else Pipe()
    with open_sink(file) as sink:
        out = writers.StreamWriter(sink)
        tree = module_tree.ModuleTreeBuilder()
        for name, array in kept.items():
            for dropped in (numbered(70, 5), numbered(MIB, 6) if how == "back" else numbered(80, 6), array):
                out.begin(dropped.nbytes)
                out.write(dropped)
                number = out.end()
                if dropped is not array:
                    out.forget(number)
            tree.tensor((name,), TensorLayout(dtypes.by_name["uint8"].code, 8, array.shape), number)
        out.finish(tree.entries())
    assert file.getvalue() == written(how, kept, 64)


def test_what_went_into_a_pipe_cannot_be_forgotten() -> None:
    with open_sink(Pipe()) as sink:
        out = writers.StreamWriter(sink)
        out.begin(writers.MOST_WAITING + 1)
        out.write(bytes(writers.MOST_WAITING + 1))
        number = out.end()
        with pytest.raises(zcrecord.errors.UnsupportedError, match="cannot be taken back; write to a file"):
            out.forget(number)


@pytest.mark.parametrize("how", ["back", "pipe"])
@pytest.mark.parametrize("first", [b"", b"abcd"])
def test_payload_that_was_begun_large_and_got_no_byte_leaves_no_trace(how: str, first: bytes) -> None:
    """R13, R59."""
    file: Any = io.BytesIO() if how == "back" else Pipe()
    with open_sink(file) as sink:
        out = writers.StreamWriter(sink)
        tree = module_tree.ModuleTreeBuilder()
        for name, data in (("a", first), ("b", b""), ("c", b"efg"), ("d", b"")):
            out.begin(MIB if not data else len(data))
            out.write(data)
            tree.tensor((name,), TensorLayout(dtypes.by_name["uint8"].code, 8, (len(data),)), out.end())
        out.finish(tree.entries())
    record = zcrecord.load_record(file.getvalue(), verify="full")
    assert [record[name].tobytes() for name in record] == [first, b"", b"efg", b""]
    assert len(file.getvalue()) < 2048


@pytest.mark.parametrize("buffering", [0, -1])
def test_stream_appended_to_a_file_gets_no_second_header(buffering: int, tmp_path: Path) -> None:
    """Writes to a file that appends go to its end, at any position."""
    path = tmp_path / "m.zcr"
    arrays = {"w": np.arange(100, dtype=np.uint8)}
    with open(path, "a+b", buffering=buffering) as file, open_sink(file) as sink:
        out = writers.StreamWriter(sink)
        out.begin(100)
        out.write(arrays["w"])
        tree = module_tree.ModuleTreeBuilder()
        tree.tensor(("w",), TensorLayout(dtypes.by_name["uint8"].code, 8, (100,)), out.end())
        out.finish(tree.entries())
    assert path.read_bytes() == streamed(arrays, Pipe(), 64)


def placed(data: bytes, shift: int) -> memoryview:
    """The bytes at an address that is `shift` past a multiple of 65536."""
    room = np.zeros(len(data) + 2 * 65536, np.uint8)
    start = -room.__array_interface__["data"][0] % 65536 + shift
    room[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return room[start : start + len(data)].data


def test_elements_are_aligned_wherever_the_archive_is_placed_on_its_base_alignment() -> None:
    """R18."""
    data = saved({"a": np.ones(3, np.int8), "b": np.ones(3), "big": np.ones(MIB, np.uint8)})
    record = zcrecord.load_record(placed(data, 0))
    for name in record:
        assert record[name].__array_interface__["data"][0] % record.info(name).alignment == 0
        assert record.info(name).alignment >= (16384 if name == "big" else 64)


def test_an_archive_placed_anywhere_still_loads() -> None:
    """R18: readers do not check it."""
    record = zcrecord.load_record(placed(saved({"b": np.arange(3.0)}), 1), verify="full")
    assert not record["b"].flags.aligned
    assert record["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "kind", "form"),
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
def test_each_value_has_one_form(value: Any, kind: int, form: int) -> None:
    """R69."""
    data = saved({"v": value})
    row = Forge(data).columns["attributes"][0]
    assert (row["type"], row["form"]) == (kind, form)
    assert zcrecord.load_record(data).attributes == {"v": value}
    if value in ([], ()):
        assert row["value"] >> np.uint64(32) == 0


def test_a_list_of_integers_that_no_one_type_holds_is_a_module() -> None:
    """R69."""
    record = zcrecord.load_record(saved({"v": [-1, 2**63]}))
    assert (record.modules["v"].kind, record.tree()) == ("list", {"v": [-1, 2**63]})


def test_without_digests_their_fields_are_zero() -> None:
    """R60."""
    forge = Forge(saved({"w": np.ones(3)}, digest="none"))
    assert (forge.digest_kind, forge.columns["payloads"]["digest"].tolist()) == (0, [0])


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("seed", ["1", "2"])
def test_every_golden_archive_comes_out_the_same_under_another_hash_seed(seed: str) -> None:
    """R75, promise P8."""
    command = [sys.executable, "-m", "tools.generate", "--check"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
