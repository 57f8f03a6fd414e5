"""Safetensors into an archive and back: equal both ways, as its own package reads and writes, in bounded memory."""

from __future__ import annotations

import io
import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import safetensors.numpy
from exchange import file_of, peer, peer_told, tensor, told
from exhaustive import rounds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from processes import growth

import zcrecord
from zcrecord import PackedTensor, StringTensor
from zcrecord.codec.entries import is_attribute
from zcrecord.dtypes import DTYPES, from_numpy
from zcrecord.errors import (
    DestinationExistsError,
    IntegrityError,
    LimitError,
    RecordError,
    SourceError,
    UnsupportedError,
)
from zcrecord.formats import convert
from zcrecord.formats.safetensors import write

np_peer: Any = safetensors.numpy
KNOWN = [d for d in DTYPES if d.safetensors is not None]
PLAIN = [d for d in KNOWN if not d.packed]
METADATA = st.dictionaries(r.KEYS, r.ATTRIBUTES.filter(lambda value: is_attribute(value, "")), max_size=3)


def archive_of(source: Any, **options: Any) -> zcrecord.Record:
    """Read a safetensors file by way of an archive in memory."""
    out = io.BytesIO()
    convert(io.BytesIO(source) if isinstance(source, bytes) else source, out, **options)
    return zcrecord.load_record(out.getvalue(), verify="full")


def safetensors_of(record: Any, **options: Any) -> bytes:
    """Return a record, or what is saved as one, as a safetensors file."""
    out = io.BytesIO()
    data = bytes(record.archive.buffer) if isinstance(record, zcrecord.Record) else r.saved(record, **options)
    convert(io.BytesIO(data), out, dest_format="safetensors")
    return out.getvalue()


def metadata_of(data: bytes) -> dict[str, str]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def names_of(data: bytes) -> list[str]:
    """Return a file's names in the order of their bytes."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    return sorted(header, key=lambda name: header[name]["data_offsets"])


# In.


def test_every_type_comes_as_it_is() -> None:
    start, header, raw = 0, {}, b""
    for kind in sorted(KNOWN, key=lambda kind: -kind.bits):
        nbytes = 12 * kind.bits // 8
        header[kind.name] = {"dtype": kind.safetensors, "shape": [3, 4], "data_offsets": [start, start + nbytes]}
        raw += bytes(i % 2 for i in range(nbytes))
        start += nbytes
    data = file_of(header, raw)
    record = archive_of(data)
    assert told(record) == peer_told(data)
    assert [record.info(name).dtype.name for name in record] == list(header)
    assert isinstance(record["float4_e2m1fn"], PackedTensor)
    assert peer_told(safetensors_of(record)) == peer_told(data)


def test_order_is_that_of_the_bytes_and_names_are_split_at_dots() -> None:
    data = file_of({"enc.0.w": tensor(2, 4), "head": tensor(0, 2), "enc.0.b": tensor(4, 5)}, b"abcde")
    record = archive_of(data)
    assert record.names == ("head", "enc.0.w", "enc.0.b")
    assert list(record.tree()["enc"]["0"]) == ["w", "b"]


def test_name_that_continues_another_s_stays_whole() -> None:
    names = ["a", "a.b", "a.b.c", ".", "..x", "x.", "n" + ".n" * 150]
    data = file_of({name: tensor(i, i + 1) for i, name in enumerate(names)}, bytes(len(names)))
    record = archive_of(data)
    assert list(record.tree()) == list(record.names) == names
    assert names_of(safetensors_of(record)) == names


def test_metadata_is_the_archive_s_and_comes_back() -> None:
    metadata = {"format": "pt", "épo que": "1\u2028\U0001f600", "empty": "", "nul": "\0"}
    record = archive_of(file_of({"__metadata__": metadata, "w": tensor(0, 2)}, b"ab"))
    assert record.metadata == metadata
    assert metadata_of(safetensors_of(record)) == metadata


def test_reads_a_file_an_open_pipe_and_a_named_one_alike(tmp_path: Path) -> None:
    data = np_peer.save({"a.w": np.arange(300_000.0), "b": np.ones(3, np.int8)}, {"k": "v"})
    source, pipe = tmp_path / "in.safetensors", tmp_path / "pipe.safetensors"
    source.write_bytes(data)
    os.mkfifo(pipe)
    convert(source, tmp_path / "a.zcr")

    def piped(name: str, *, opened: bool) -> Any:
        thread = threading.Thread(target=lambda: pipe.write_bytes(data))
        thread.start()
        with open(pipe, "rb", buffering=0) if opened else nullcontext(pipe) as given:
            report = convert(given, tmp_path / name)
        thread.join()
        return report

    report = piped("b.zcr", opened=True)
    assert (report.input_bytes, report.source, report.tensors) == (len(data), None, 2)
    piped("c.zcr", opened=False)
    assert len({(tmp_path / f"{name}.zcr").read_bytes() for name in "abc"}) == 1


class OnlyRead:
    """A stream with nothing but `read`, which gives little at a time."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int) -> bytes:
        return self._file.read(min(size, 7))


def test_reads_a_stream_that_gives_little_at_a_time() -> None:
    data = np_peer.save({"w": np.arange(100.0), "v": np.ones((2, 3), np.int8)})
    assert told(archive_of(OnlyRead(data))) == peer_told(data)


def test_text_mode_and_streams_that_are_not_ready_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="text mode"):
        convert(io.StringIO("x"), tmp_path / "out.zcr")  # type: ignore[arg-type]

    class Unready(io.RawIOBase):
        def readinto(self, buffer: Any) -> None:
            return None

    with pytest.raises(RecordError):
        convert(Unready(), tmp_path / "out.zcr", source_format="safetensors")
    assert not list(tmp_path.iterdir())


# Out.


def test_its_own_reader_reads_what_is_written(tmp_path: Path) -> None:
    a = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    record = {
        "c": a, "f": np.asfortranarray(a), "t": a.transpose(1, 2, 0), "gaps": a[:, ::2], "row": a[1], "tied": a,
        "e": np.zeros((0, 3)), "s": np.float16(2), "swapped": a.astype(">f4"), "b": np.array([True, False]),
    }  # fmt: skip
    zcrecord.save_record(record, tmp_path / "m.zcr")
    report = convert(tmp_path / "m.zcr", tmp_path / "m.safetensors")
    loaded = np_peer.load_file(tmp_path / "m.safetensors")
    assert set(loaded) == set(record)
    for name, value in record.items():
        want = np.asarray(value)
        assert (loaded[name].dtype.newbyteorder("="), loaded[name].shape) == (want.dtype.newbyteorder("="), want.shape)
        assert np.array_equal(loaded[name], want), name
    assert report.archive_bytes == (tmp_path / "m.safetensors").stat().st_size
    assert report.repeated_bytes == sum(np.asarray(record[n]).nbytes for n in ("row", "tied", "t", "gaps"))


def test_header_and_every_tensor_are_aligned_and_saved_order_comes_back(tmp_path: Path) -> None:
    record = {"b": np.ones(3, np.int8), "w": np.ones(5), "h": np.ones(3, np.float16), "x": np.ones(1, np.float32)}
    zcrecord.save_record(record, tmp_path / "m.zcr")
    convert(tmp_path / "m.zcr", tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert names_of(data) == ["w", "x", "h", "b"]
    convert(tmp_path / "m.safetensors", tmp_path / "again.zcr")
    assert zcrecord.load_record(tmp_path / "again.zcr").names == tuple(record)
    with pytest.raises(UnsupportedError, match="saved in another order; read it from a file, not from a pipe"):
        archive_of(data)


def test_order_is_kept_where_it_leaves_everything_aligned() -> None:
    record = {"z": np.ones(2, np.int8), "a": np.ones(3, np.float16), "m": np.ones(2), "k": np.zeros(1, np.int8)}
    data = safetensors_of(record, metadata={"author": "me"})
    assert names_of(data) == list(record)
    assert metadata_of(data) == {"author": "me"}, "it needs no entry, and gets none"


def test_with_an_entry_transformers_finds_its_format_and_the_archive_does_not() -> None:
    data = safetensors_of({"w": np.ones(2), "steps": 3}, metadata={"author": "me"})
    assert metadata_of(data)["format"] == "pt"
    assert archive_of(data).metadata == {"author": "me"}
    kept = safetensors_of({"w": np.ones(2), "steps": 3}, metadata={"format": "np"})
    assert archive_of(kept).metadata == {"format": "np"}


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "int4": (PackedTensor.pack(np.ones(4, np.int8).astype("int4")), "no int4; save it as record.name..unpack"),
    "strings": (StringTensor.from_strings(["a"]), "no strings; save them as an attribute"),
    "complex128": (np.ones(2, np.complex128), "no complex128; save it as two tensors"),
    "half a byte": (PackedTensor(np.zeros(2, np.uint8), "float4_e2m1fn", (3,)), "do not fill whole bytes"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_says_what_safetensors_has_no_place_for(kind: str, tmp_path: Path) -> None:
    value, pattern = UNSUPPORTED[kind]
    zcrecord.save_record({"layer": {"x": value}}, tmp_path / "m.zcr")
    with pytest.raises(UnsupportedError, match=rf"m\.zcr: tensor 'layer\.x': .*{pattern}"):
        convert(tmp_path / "m.zcr", tmp_path / "m.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["m.zcr"]


def test_the_name_of_its_metadata_is_no_tensor_s() -> None:
    with pytest.raises(UnsupportedError, match="keeps this name for itself"):
        safetensors_of({"__metadata__": np.ones(1)})


@pytest.mark.exhaustive(keep=0)
def test_header_that_no_reader_takes_is_not_written() -> None:
    with pytest.raises(LimitError, match="a safetensors header has at most 100000000"):
        safetensors_of({"w": np.ones(1), "blob": bytes(80_000_000)})


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_damaged_payload_is_noticed_and_nothing_is_written(suffix: str, tmp_path: Path) -> None:
    zcrecord.save_record({"a": np.ones(4), "b": np.asfortranarray(np.ones((300, 300)))}, tmp_path / "m.zcr")
    for name in ("a", "b"):
        data = bytearray((tmp_path / "m.zcr").read_bytes())
        data[zcrecord.load_record(tmp_path / "m.zcr").info(name).offset] ^= 1
        (tmp_path / "bad.zcr").write_bytes(data)
        with pytest.raises(IntegrityError, match=rf"bad\.zcr: tensor '{name}': its payload's digest does not match"):
            convert(tmp_path / "bad.zcr", tmp_path / f"bad.{suffix}")
        assert not (tmp_path / f"bad.{suffix}").exists()


def test_tensors_that_share_too_much_are_not_written_apart() -> None:
    w = np.zeros(1 << 20)
    with pytest.raises(LimitError, match="tensors that share their bytes would take"):
        safetensors_of({f"{i}": w for i in range(300)})


def test_same_record_gives_the_same_bytes_however_it_is_laid_out(tmp_path: Path) -> None:
    record = {"a": {"w": np.ones(3)}, "b": np.ones(1), "t": (1, 2)}
    zcrecord.save_record(record, tmp_path / "a.zcr", alignment=4096)
    with zcrecord.RecordWriter(tmp_path / "b.zcr") as out:
        out.add("a.w", record["a"]["w"])  # type: ignore[index]
        out.add("b", record["b"])
        out.attribute("t", (1, 2))
    for name in ("a", "b"):
        convert(tmp_path / f"{name}.zcr", tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


# There and back.


def without_what_it_lacks(tree: Any) -> Any:
    """Return a tree with plain numbers where safetensors has no type."""
    if isinstance(tree, dict):
        return {k: without_what_it_lacks(v) for k, v in tree.items()}
    if isinstance(tree, r.Pair):
        return r.Pair(*map(without_what_it_lacks, tree))
    if isinstance(tree, r.Layer):
        return r.Layer(without_what_it_lacks(tree.weight), without_what_it_lacks(tree.bias))
    if isinstance(tree, list | tuple):
        return type(tree)(map(without_what_it_lacks, tree))
    if isinstance(tree, PackedTensor | StringTensor):
        return np.zeros(tree.shape, np.int8)
    if isinstance(tree, np.ndarray | np.generic):
        kind = None if tree.dtype.kind in "UT" else from_numpy(tree.dtype)
        return tree if kind in PLAIN else np.zeros(tree.shape, np.float32)
    return tree


@given(r.trees(), METADATA)
@settings(max_examples=rounds(100), deadline=None)
def test_any_record_comes_back_with_its_content_digest(tmp_path_factory: Any, tree: Any, metadata: Any) -> None:
    tree = without_what_it_lacks(tree)
    assume(r.names_are_unique(tree) and "__metadata__" not in tree)
    folder = tmp_path_factory.mktemp("record")
    zcrecord.save_record(tree, folder / "a.zcr", metadata=metadata, durable=False)
    convert(folder / "a.zcr", folder / "a.safetensors", durable=False)
    peer.deserialize((folder / "a.safetensors").read_bytes())
    convert(folder / "a.safetensors", folder / "b.zcr", durable=False)
    a, b = (zcrecord.load_record(folder / name, verify="full") for name in ("a.zcr", "b.zcr"))
    assert a.content_digest() == b.content_digest()
    assert a.names == b.names
    r.assert_same(b.tree(), a.tree())
    r.assert_same({name: b.metadata[name] for name in metadata}, metadata)
    assert set(a.metadata) == set(b.metadata)


# Ties.


def test_tied_tensors_are_written_under_each_name_and_tied_again(tmp_path: Path) -> None:
    w = np.arange(6.0)
    zcrecord.save_record({"a": w, "b": {"c": w}, "twin": w.copy(), "d": w}, tmp_path / "m.zcr")
    report = convert(tmp_path / "m.zcr", tmp_path / "m.safetensors")
    assert (report.repeated_bytes, report.payload_bytes) == (96, 192)
    assert set(np_peer.load_file(tmp_path / "m.safetensors")) == {"a", "b.c", "twin", "d"}
    convert(tmp_path / "m.safetensors", tmp_path / "n.zcr")
    assert zcrecord.load_record(tmp_path / "n.zcr").info("a").tied == ("a", "b.c", "d")


def test_tensors_that_were_tied_and_changed_since_are_not_tied_again(tmp_path: Path) -> None:
    w = np.arange(6.0)
    zcrecord.save_record({"a": w, "b": w}, tmp_path / "m.zcr")
    convert(tmp_path / "m.zcr", tmp_path / "m.safetensors")
    data = bytearray((tmp_path / "m.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "m.safetensors").write_bytes(data)
    convert(tmp_path / "m.safetensors", tmp_path / "n.zcr")
    record = zcrecord.load_record(tmp_path / "n.zcr")
    assert record.info("b").tied == ()
    assert record["b"].tobytes() == bytes(data[-48:])
    unknown = archive_of(bytes(data))
    assert unknown.info("b").tied == (), "of a stream that cannot be known"


# Shards.


def shards_in(folder: Path, tree: Any, most: int | None = 40, name: str = "m.safetensors") -> list[str]:
    """Write a record as shards; returns the names of the files."""
    zcrecord.save_record(tree, folder / "m.zcr", durable=False)
    convert(folder / "m.zcr", folder / name, max_shard_size=most)
    return sorted(p.name for p in folder.iterdir() if p.name != "m.zcr")


TREE = {"a": {"w": np.arange(6.0), "k": 3}, "b": np.ones(4, np.float32), "c": np.ones(5, np.float32), "z": np.zeros(0)}


def test_shards_and_their_index_are_read_by_name_and_come_back(tmp_path: Path) -> None:
    assert shards_in(tmp_path, TREE) == [
        *(f"m-0000{i}-of-00002.safetensors" for i in (1, 2)), "m.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == 84
    assert index["weight_map"] == dict.fromkeys(["a.w"], "m-00001-of-00002.safetensors") | dict.fromkeys(
        ["b", "c", "z"], "m-00002-of-00002.safetensors"
    )
    for name, file in index["weight_map"].items():
        assert name in np_peer.load_file(tmp_path / file)
    report = convert(tmp_path / "m.safetensors.index.json", tmp_path / "n.zcr")
    assert report.input_bytes == sum(p.stat().st_size for p in tmp_path.iterdir() if p.suffix != ".zcr")
    a, b = (zcrecord.load_record(tmp_path / name) for name in ("m.zcr", "n.zcr"))
    assert (a.content_digest(), a.names, a.metadata) == (b.content_digest(), b.names, b.metadata)
    r.assert_same(b.tree(), a.tree())


def test_what_fits_into_one_file_is_one_unless_an_index_is_asked_for(tmp_path: Path) -> None:
    assert shards_in(tmp_path, TREE, 84) == ["m.safetensors"]
    assert shards_in(tmp_path, TREE, None, "n.safetensors.index.json") == [
        "m.safetensors", "n-00001-of-00001.safetensors", "n.safetensors.index.json",
    ]  # fmt: skip


def test_metadata_of_shards_is_merged_and_nothing_of_it_lost(tmp_path: Path) -> None:
    for i, metadata in enumerate([{"format": "pt", "step": "1"}, {"format": "pt", "step": "2", "own": "x"}], 1):
        np_peer.save_file({f"w{i}": np.ones(2)}, tmp_path / f"{i}.safetensors", metadata)
    index: dict[str, Any] = {"weight_map": {"w1": "1.safetensors", "w2": "2.safetensors"}}
    index["metadata"] = {"total_size": 32, "parameters": 4, "deep": {"a": [1]}, "format": "index"}
    (tmp_path / "any.json").write_text(json.dumps(index), encoding="utf-8")
    convert(tmp_path / "any.json", tmp_path / "m.zcr")
    assert zcrecord.load_record(tmp_path / "m.zcr").metadata == {
        "format": "pt", "step": "1", "2.safetensors: step": "2", "own": "x", "parameters": 4, "deep": '{"a":[1]}',
        "index: format": "index",
    }  # fmt: skip


def test_shards_replace_nothing_without_force_and_all_with_it(tmp_path: Path) -> None:
    shards_in(tmp_path, TREE)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(DestinationExistsError, match=r"m\.safetensors\.index\.json: exists already"):
        convert(tmp_path / "m.zcr", tmp_path / "m.safetensors", max_shard_size=40)
    (tmp_path / "m.safetensors.index.json").unlink()
    with pytest.raises(DestinationExistsError, match=r"m-00001-of-00002\.safetensors: exists already"):
        convert(tmp_path / "m.zcr", tmp_path / "m.safetensors", max_shard_size=40)
    (tmp_path / "m.safetensors").write_bytes(b"old")
    convert(tmp_path / "m.zcr", tmp_path / "m.safetensors", max_shard_size=40, force=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before, "the file it replaces is gone"


def test_shards_that_cannot_all_be_written_leave_none(tmp_path: Path) -> None:
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    r.damage(tmp_path / "m.zcr", zcrecord.load_record(tmp_path / "m.zcr").info("c").offset)
    with pytest.raises(IntegrityError):
        convert(tmp_path / "m.zcr", tmp_path / "m.safetensors", max_shard_size=40)
    assert [p.name for p in tmp_path.iterdir()] == ["m.zcr"]


# What it costs.

MIB = 1 << 20
MOST = 40 * MIB
SETUP = "import os, sys\nfrom zcrecord.formats import convert, safetensors\nos.chdir(sys.argv[1])"


@pytest.mark.measured
def test_conversions_take_bounded_memory_and_a_copy_would_be_noticed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    record = {f"w{i}": rng.integers(0, 1 << 60, 2 * MIB) for i in range(6)} | {"b": np.ones(5)}
    wide = {"w": rng.integers(0, 1 << 60, (4096, 3072)).T}
    zcrecord.save_record(record, tmp_path / "m.zcr", durable=False)
    zcrecord.save_record(wide, tmp_path / "wide.zcr", durable=False)

    def peak(work: str) -> int:
        return growth(SETUP, work, tmp_path)[1]

    assert peak("convert('m.zcr', 'm.safetensors', durable=False)") < MOST
    assert peak("convert('wide.zcr', 'wide.safetensors', durable=False)") < MOST
    assert peak("convert('m.safetensors', 'file.zcr', durable=False)") < MOST
    assert peak("convert(open('m.safetensors', 'rb', buffering=0), 'pipe.zcr', durable=False)") < MOST
    assert peak("held = open('m.safetensors', 'rb').read()") >= 90 * MIB > MOST
    assert np.array_equal(np_peer.load_file(tmp_path / "wide.safetensors")["w"], wide["w"])
    for loaded in (np_peer.load_file(tmp_path / "m.safetensors"), zcrecord.load_record(tmp_path / "file.zcr")):
        assert all(np.array_equal(loaded[name], array) for name, array in record.items())
    assert (tmp_path / "pipe.zcr").read_bytes() == (tmp_path / "file.zcr").read_bytes()


SHRINKING = """
import sys
import zcrecord.formats
from zcrecord.errors import RecordError
source, dest = sys.argv[1:3]
def progress(done, total):
    with open(source, 'r+b') as file:
        file.truncate(5000)
try:
    zcrecord.formats.convert(source, dest, progress=progress)
except RecordError as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffixes", [("safetensors", "zcr"), ("zcr", "safetensors")])
def test_a_file_that_shrinks_meanwhile_is_an_error_and_no_crash(suffixes: tuple[str, str], tmp_path: Path) -> None:
    source, dest = (tmp_path / f"m.{suffix}" for suffix in suffixes)
    zcrecord.save_record({f"w{i}": np.full(1 << 19, i, np.float64) for i in range(4)}, tmp_path / "m.zcr")
    if suffixes[0] != "zcr":
        convert(tmp_path / "m.zcr", source)
        (tmp_path / "m.zcr").unlink()
    assert r.run_python(SHRINKING, source, dest).stdout.strip() in ("SourceError", "FormatError", "IntegrityError")
    assert not dest.exists()


def test_write_error_is_typed_and_leaves_the_old_file(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.ones(3)}, tmp_path / "m.zcr")
    (tmp_path / "m.npz").mkdir()
    with pytest.raises(SourceError, match="is a directory"):
        write(zcrecord.load_record(tmp_path / "m.zcr"), tmp_path / "m.npz")
    (tmp_path / "m.npz").rmdir()
    with pytest.raises(SourceError, match="No such file"):
        convert(tmp_path / "m.zcr", tmp_path / "no" / "m.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["m.zcr"]


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    record = {"a": np.ones(200_000), "b": np.ones(10)}
    zcrecord.save_record(record, tmp_path / "m.zcr")
    for source, dest in (("m.zcr", "m.safetensors"), ("m.safetensors", "n.zcr"), ("n.zcr", "o.zcr")):
        seen: list[tuple[int, int | None]] = []
        convert(tmp_path / source, tmp_path / dest, progress=lambda *told, seen=seen: seen.append(told))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1][0] == seen[-1][1]
