"""Npz into an archive and back: what numpy.savez wrote comes back equal, and numpy.load reads what is written."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from processes import growth

import zcrecord
from zcrecord import PackedTensor, StringTensor
from zcrecord.errors import LimitError, UnsupportedError
from zcrecord.foreign.npz import BYTES, STRUCTURE
from zcrecord.formats import convert

MIB = 1 << 20
Arrays = dict[str, Any]


def archive_of(arrays: Arrays, folder: Path, *, compressed: bool = False) -> zcrecord.Record:
    """Return arrays saved by numpy, by way of an archive."""
    (np.savez_compressed if compressed else np.savez)(folder / "in.npz", **arrays)
    convert(folder / "in.npz", folder / "out.zcr", force=True, durable=False)
    return zcrecord.load_record((folder / "out.zcr").read_bytes(), verify="full")


def npz_of(record: Any, **options: Any) -> bytes:
    """Return a record, or what is saved as one, as a .npz file."""
    out = io.BytesIO()
    data = bytes(record.archive.buffer) if isinstance(record, zcrecord.Record) else r.saved(record, **options)
    convert(io.BytesIO(data), out, dest_format="npz")
    return out.getvalue()


def assert_equal(loaded: Any, arrays: Arrays) -> None:
    assert loaded.files == list(arrays)
    for name, value in arrays.items():
        want, got = np.asarray(value), loaded[name]
        assert got.shape == want.shape, name
        assert got.dtype.newbyteorder("=") == want.dtype.newbyteorder("=") or want.dtype.itemsize == 0 == got.size, name
        assert got.tobytes() == want.astype(got.dtype).tobytes(), name


A = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
ARRAYS: Arrays = {
    "layer.0.weight": A, "layer.0.bias": A[0, 0], "F": np.asfortranarray(A), "gaps": A[:, ::2], "scalar": np.float16(2),
    "swapped": A.astype(">f4"), "flags": np.array([True, False]), "waves": np.array([1j, 2]), "empty": np.zeros((0, 3)),
    "long": np.array([2**63, 1], np.uint64), "words": np.array([["a", "bcd"], ["é\U0001f600", "x y"]]),
    "octets": np.array([b"a", b"\xff\0c"]), "word": np.array("hey"), "octet": np.array(b"hey"),
    "F words": np.asfortranarray(np.array([["a", "b"], ["c", "d"]])), "big words": np.array(["éß"], ">U2"),
    "odd/name:0": np.array([1], np.int8), "é": np.array([2], np.int8),
}  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True])
def test_what_numpy_saved_comes_back_equal(compressed: bool, tmp_path: Path) -> None:
    record = archive_of(ARRAYS, tmp_path, compressed=compressed)
    assert record.names == tuple(ARRAYS)
    assert record.tree()["layer"]["0"]["weight"].shape == (2, 3, 4)
    assert record.info("F").strides == (1, 2, 6)
    loaded = np.load(io.BytesIO(npz_of(record)))
    assert_equal(loaded, ARRAYS)
    assert loaded["F"].flags.f_contiguous


def test_strings_become_string_tensors_and_it_is_remembered_which_were_bytes(tmp_path: Path) -> None:
    record = archive_of(ARRAYS, tmp_path)
    assert isinstance(record["words"], StringTensor)
    assert record["words"].unpack().tolist() == ARRAYS["words"].tolist()
    assert list(record["octets"].strings()) == [b"a", b"\xff\0c"]
    assert record["F words"].unpack().tolist() == [["a", "b"], ["c", "d"]]
    assert record.metadata == {BYTES: ["octets", "octet"]}


def test_strings_of_width_0_and_none_at_all_come_through(tmp_path: Path) -> None:
    arrays = {"none": np.zeros((0, 2), "U3"), "blank": np.array(["", ""]), "octets": np.array([b"", b""])}
    record = archive_of(arrays, tmp_path)
    assert [record[n].shape for n in arrays] == [(0, 2), (2,), (2,)]
    assert list(record["blank"].strings()) == list(record["octets"].strings()) == [b"", b""]
    loaded = np.load(io.BytesIO(npz_of(record)))
    assert [loaded[n].tolist() for n in arrays] == [[], ["", ""], [b"", b""]]


def test_what_npz_cannot_say_comes_back_all_the_same(tmp_path: Path) -> None:
    w = np.arange(6.0)
    tree = {
        "m": r.Layer([w, {"k": (1, 2)}], w),
        "t": ("x", b"yz"),
        "flat.key": np.ones(2),
        "none": {},
        "s": np.array(["q"]),
    }
    zcrecord.save_record(tree, tmp_path / "m.zcr", metadata={"a": 1, "b": "text", "c": [float("nan")]})
    convert(tmp_path / "m.zcr", tmp_path / "m.npz")
    with np.load(tmp_path / "m.npz") as loaded:
        assert loaded.files == ["m.weight.0", "m.bias", "flat.key", "s", STRUCTURE]
    convert(tmp_path / "m.npz", tmp_path / "n.zcr")
    a, b = (zcrecord.load_record(tmp_path / name) for name in ("m.zcr", "n.zcr"))
    assert (a.content_digest(), a.names, repr(a.metadata)) == (b.content_digest(), b.names, repr(b.metadata))
    r.assert_same(b.tree(), a.tree())
    assert b.info("m.bias").tied == ("m.weight.0", "m.bias")


@pytest.mark.parametrize("value, pattern", [
    (np.ones(2).astype("float8_e5m2"), "numpy's files cannot name float8_e5m2"),
    (PackedTensor.pack(np.ones(2).astype("int4")), "numpy's files cannot name int4"),
    (StringTensor.from_strings(["a\0"]), "a string that ends with NUL"),
])  # fmt: skip
def test_says_what_npz_has_no_place_for(value: Any, pattern: str, tmp_path: Path) -> None:
    zcrecord.save_record({"layer": {"x": value}}, tmp_path / "m.zcr")
    with pytest.raises(UnsupportedError, match=rf"m\.zcr: tensor 'layer\.x': {pattern}"):
        convert(tmp_path / "m.zcr", tmp_path / "m.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["m.zcr"]


def test_strings_that_are_not_text_are_written_as_bytes() -> None:
    loaded = np.load(io.BytesIO(npz_of({"s": StringTensor.from_strings([b"\xff", b"a"])})))
    assert loaded["s"].tolist() == [b"\xff", b"a"]


def test_limits_of_names_and_of_strings_padded_to_one_width() -> None:
    with pytest.raises(LimitError, match="longer than the 65535 bytes that a zip file takes"):
        npz_of({"n" * 65_532: np.ones(1)})
    with pytest.raises(LimitError, match="padded to the width of the longest, would take"):
        npz_of({"s": StringTensor.from_strings(["x" * 10_000] + [""] * 10_000)})


class Pipe:
    """A file object that can only be written to."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


def test_bytes_are_the_same_each_time_and_a_pipe_s_are_read_too(tmp_path: Path) -> None:
    record = {"a": {"w": A}, "F": np.asfortranarray(A)}
    zcrecord.save_record(record, tmp_path / "m.zcr")
    convert(tmp_path / "m.zcr", tmp_path / "m.npz")
    assert (tmp_path / "m.npz").read_bytes() == npz_of(record) == npz_of(record, alignment=4096)
    pipe = Pipe()
    convert(tmp_path / "m.zcr", pipe, dest_format="npz")  # type: ignore[arg-type]
    assert_equal(np.load(io.BytesIO(pipe.data)), {"a.w": A, "F": A})


def test_members_of_more_than_4_gib_have_room_for_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # as if
    zcrecord.save_record({"a": A, "b": np.ones(1)}, tmp_path / "m.zcr")
    pipe = Pipe()
    convert(tmp_path / "m.zcr", pipe, dest_format="npz")  # type: ignore[arg-type]
    convert(tmp_path / "m.zcr", tmp_path / "m.npz")
    convert(tmp_path / "m.npz", tmp_path / "n.zcr")
    for source in (io.BytesIO(pipe.data), tmp_path / "m.npz"):
        assert_equal(np.load(source), {"a": A, "b": np.ones(1)})


def test_ctrl_c_as_a_member_is_opened_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zcrecord.save_record({"a": A}, tmp_path / "m.zcr")
    opened: list[Any] = []
    open_member = zipfile.ZipFile.open

    def interrupted(self: zipfile.ZipFile, *args: Any) -> Any:
        opened.append(open_member(self, *args))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(zipfile.ZipFile, "open", interrupted)
        convert(tmp_path / "m.zcr", tmp_path / "m.npz")
    assert opened and [file.name for file in tmp_path.iterdir()] == ["m.zcr"]


def test_npz_is_read_from_a_file_alone(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="npz cannot be read from a pipe; write it to a file first"):
        convert(io.BytesIO(npz_of({"a": A})), tmp_path / "m.zcr")


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
def test_conversions_take_bounded_memory_and_a_copy_would_be_noticed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.integers(0, 1 << 60, 2 * MIB) for i in range(4)}
    arrays["F"] = rng.integers(0, 1 << 60, (2048, 1024)).T
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    np.savez_compressed(tmp_path / "c.npz", F=np.zeros(8 * MIB))

    def peak(work: str) -> int:
        setup = "import os, sys\nimport numpy\nfrom zcrecord.formats import convert, npz\nos.chdir(sys.argv[1])"
        return growth(setup, work, tmp_path)[1]

    assert peak("convert('a.npz', 'a.zcr', durable=False)") < 40 * MIB
    assert peak("convert('a.zcr', 'b.npz', durable=False)") < 40 * MIB
    assert peak("convert('c.npz', 'c.zcr', durable=False)") < 40 * MIB
    assert peak("held = dict(numpy.load('a.npz'))") > 64 * MIB
    assert_equal(np.load(tmp_path / "b.npz"), arrays)
