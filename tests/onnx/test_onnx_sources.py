"""A model comes from files and pipes, plain or compressed, whole or in part: one pass, the same tensors."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import pytest
import zstandard
from onnx import TensorProto, helper, numpy_helper

import zcrecord
from zcrecord import formats
from zcrecord.errors import (
    DependencyError,
    ExternalDataError,
    FormatError,
    IntegrityError,
    SourceError,
    UnsupportedError,
)
from zcrecord.onnx import convert
from zcrecord.onnx.protobuf.reader import WINDOW

RNG = np.random.default_rng(0)


def a_model() -> bytes:
    """A model of some megabytes of noise, runs and small tensors, with equal ones among them."""
    arrays = {
        "noise": RNG.standard_normal(WINDOW // 2),
        "zeros": np.zeros((1000, 1000), np.float32),
        "again": np.zeros((1000, 1000), np.float32),
        **{f"small.{i}": np.full(50, i % 3) for i in range(30)},
    }
    typed = helper.make_tensor("typed", TensorProto.INT64, [1000], RNG.integers(-(2**40), 2**40, 1000))
    return bytes(m.model_of(*(numpy_helper.from_array(a, n) for n, a in arrays.items()), typed).SerializeToString())


MODEL = a_model()
SKIPPABLE = b"\x5a\x2a\x4d\x18" + (9).to_bytes(4, "little") + b"some note"


def many_frames(data: bytes) -> bytes:
    parts = [
        zstandard.ZstdCompressor(level=1 + i % 4).compress(data[i : i + 300_000]) for i in range(0, len(data), 300_000)
    ]
    return SKIPPABLE + b"".join(p + SKIPPABLE for p in parts)


def streamed(data: bytes, **options: Any) -> bytes:
    writer = zstandard.ZstdCompressor(**options).compressobj()
    return writer.compress(data) + writer.flush()


PACKED = {
    "zst": zstandard.ZstdCompressor().compress(MODEL),
    "zst, no size": streamed(MODEL),
    "zst, checksum, level 19": streamed(MODEL, level=19, write_checksum=True),
    "zst, frames and notes": many_frames(MODEL),
    "gz": gzip.compress(MODEL, 1),
    "gz, two members": gzip.compress(MODEL[:70_000], 1) + gzip.compress(MODEL[70_000:], 9),
}


def archive_of(source: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    convert(source, out, **options)
    return out.getvalue()


@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_model_gives_the_same_archive(kind: str, tmp_path: Path) -> None:
    plain = archive_of(io.BytesIO(MODEL))
    path = tmp_path / "whatever it is called"  # its first bytes tell
    path.write_bytes(PACKED[kind])
    assert archive_of(io.BytesIO(PACKED[kind])) == plain
    assert archive_of(path) == plain


class Trickle(io.RawIOBase):
    """A pipe that hands out little at a time and cannot seek."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data, self._most = io.BytesIO(data), most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._data.readinto(memoryview(buffer)[: self._most])

    def seek(self, *_: Any) -> int:
        raise AssertionError("a seek")


@pytest.mark.parametrize("most", [1, 7, 4097])
@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_stream_may_come_in_any_pieces(kind: str, most: int) -> None:
    data = a_small_one(kind)
    assert archive_of(Trickle(data, most)) == archive_of(io.BytesIO(SMALL))


SMALL = m.model_of(*(numpy_helper.from_array(RNG.integers(0, 9, 60), f"t{i}") for i in range(9))).SerializeToString()


def a_small_one(kind: str) -> bytes:
    return {
        "zst": lambda: zstandard.ZstdCompressor().compress(SMALL),
        "zst, no size": lambda: streamed(SMALL),
        "zst, checksum, level 19": lambda: streamed(SMALL, level=19, write_checksum=True),
        "zst, frames and notes": lambda: SKIPPABLE + b"".join(
            zstandard.ZstdCompressor().compress(SMALL[i : i + 700]) + SKIPPABLE for i in range(0, len(SMALL), 700)
        ),
        "gz": lambda: gzip.compress(SMALL),
        "gz, two members": lambda: gzip.compress(SMALL[:999]) + gzip.compress(SMALL[999:]),
    }[kind]()  # fmt: skip


@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_model_that_is_cut_anywhere_is_an_error(kind: str) -> None:
    data = a_small_one(kind)
    frames = ends_of_frames(data) if "frames" in kind else set()
    whole = archive_of(io.BytesIO(SMALL))
    for cut in range(1, len(data)):
        with contextlib.suppress(FormatError, zcrecord.errors.OnnxError):
            assert archive_of(io.BytesIO(data[:cut])) == whole and cut in frames, f"cut at {cut} of {len(data)}"


def ends_of_frames(data: bytes) -> set[int]:
    """Ends of notes that follow everything that counts: nothing is lost by a cut there."""
    return {len(data) - len(SKIPPABLE)}


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_model_with_changed_bytes_is_an_error_or_a_model(kind: str) -> None:
    data, chance = bytearray(a_small_one(kind)), random.Random(kind)
    for _ in range(300):
        at, bit = chance.randrange(len(data)), 1 << chance.randrange(8)
        data[at] ^= bit
        with contextlib.suppress(zcrecord.RecordError):
            zcrecord.load_record(archive_of(io.BytesIO(bytes(data)))).verify()
        data[at] ^= bit


def test_a_damaged_stream_is_told_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx.zst"
    path.write_bytes(PACKED["zst"][:-1000])
    (tmp_path / "m.zcr").write_bytes(b"precious")
    with pytest.raises(
        FormatError, match=r"m\.onnx\.zst: the zstd stream is truncated or damaged \(it ends inside a frame\); copy"
    ):
        convert(path, tmp_path / "m.zcr", force=True)
    path.write_bytes(PACKED["gz"][:-1000])
    with pytest.raises(FormatError, match="the gzip stream is truncated or damaged"):
        convert(path, tmp_path / "m.zcr", force=True)
    path.write_bytes(PACKED["gz"] + b"rest")
    with pytest.raises(FormatError, match="the gzip stream is truncated or damaged"):
        convert(path, tmp_path / "m.zcr", force=True)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx.zst", "m.zcr"]
    assert (tmp_path / "m.zcr").read_bytes() == b"precious"


def test_a_frame_that_asks_for_more_than_128_mib_is_refused() -> None:
    params = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    data = streamed(MODEL, compression_params=params)
    with pytest.raises(FormatError, match="Frame requires too much memory for decoding"):
        archive_of(io.BytesIO(data))


def test_a_stream_without_zstandard_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        DependencyError, match=r"zstandard is not installed; pip install zstandard, or in a checkout .*'\.\[zstd\]'"
    ):
        archive_of(io.BytesIO(PACKED["zst"]))
    assert len(archive_of(io.BytesIO(PACKED["gz"]))) > len(MODEL) // 2


def test_a_disk_that_fails_under_a_compressed_stream_is_one_error() -> None:
    class Failing(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.data = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            if self.data.tell() > 100_000:
                raise OSError(5, "Input/output error")
            return self.data.readinto(buffer)

    for kind in ("zst", "gz"):
        with pytest.raises(SourceError, match="cannot read: Input/output error"):
            archive_of(Failing(PACKED[kind]))


def test_external_data_lie_beside_a_compressed_model_too(tmp_path: Path) -> None:
    t = TensorProto(name="w", data_type=1, dims=[6], data_location=TensorProto.EXTERNAL)
    t.external_data.add(key="location", value="w.bin")
    (tmp_path / "w.bin").write_bytes(np.arange(6, dtype="<f4").tobytes())
    (tmp_path / "m.onnx.gz").write_bytes(gzip.compress(m.model_of(t).SerializeToString()))
    assert zcrecord.load_record(archive_of(tmp_path / "m.onnx.gz"))["w"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ExternalDataError, match="a stream has no folder"):
        archive_of(io.BytesIO((tmp_path / "m.onnx.gz").read_bytes()))


def test_progress_of_a_compressed_file_is_told_in_its_own_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.zst"
    path.write_bytes(PACKED["zst"])
    seen: list[tuple[int, int | None]] = []
    report = convert(path, io.BytesIO(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(PACKED["zst"]), len(PACKED["zst"]))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert report.input_bytes == len(MODEL)


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
def test_a_bomb_takes_time_and_no_memory(tmp_path: Path) -> None:
    """A few kilobytes that become 256 MiB of zeros in one tensor. To hold them would be noticed."""
    size = 256 << 20
    head = m.field(1, size) + m.field(2, TensorProto.UINT8) + m.field(8, b"w") + b"\x4a" + m.varint(size)
    inner = b"\x2a" + m.varint(len(head) + size) + head
    start = m.field(1, 9) + b"\x3a" + m.varint(len(inner) + size) + inner
    packer, squeezer = zstandard.ZstdCompressor(level=1).compressobj(), zlib.compressobj(1, wbits=31)
    zst, gz = packer.compress(start), squeezer.compress(start)
    for _ in range(size >> 20):
        zst += packer.compress(bytes(1 << 20))
        gz += squeezer.compress(bytes(1 << 20))
    (tmp_path / "m.zst").write_bytes(zst + packer.flush())
    (tmp_path / "m.gz").write_bytes(gz + squeezer.flush())
    code = """
import sys, zcrecord.onnx, zstandard, gzip
from tools.measure import peak_rss
before = peak_rss()
exec(sys.argv[1])
print(peak_rss() - before)
"""

    def grown(work: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", code, work], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        return int(done.stdout)

    assert grown("kept = gzip.open('m.gz').read()") > size
    for name in ("m.zst", "m.gz"):
        assert grown(f"zcrecord.onnx.convert({name!r}, 'm.zcr', durable=False, force=True)") < 24 << 20
        assert (tmp_path / "m.zcr").stat().st_size > size
    (tmp_path / "m.zcr").unlink()


def test_into_a_pipe_equal_tensors_up_to_a_chunk_are_stored_once() -> None:
    record = zcrecord.load_record(m.through_pipes(PACKED["zst"])[0], verify="full")
    assert record.content_digest() == zcrecord.load_record(archive_of(io.BytesIO(MODEL))).content_digest()
    assert record.layout.deduplicated == 27 * 400  # of 30 small ones, three differ
    assert np.shares_memory(record["small.0"], record["small.3"])
    assert not np.shares_memory(record["zeros"], record["again"])  # 4 MB each, and a pipe cannot be taken back


# Part of a model.

NAMES = ["encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias", "head.weight"]


def layered(nodes: Any = ()) -> bytes:
    arrays = [numpy_helper.from_array(np.full(5, i, np.float32), name) for i, name in enumerate(NAMES)]
    return bytes(m.model_of(*arrays, nodes=nodes).SerializeToString())


@pytest.mark.parametrize("select, exclude, expected", [
    ("encoder.*", None, NAMES[:4]),
    ("encoder", None, NAMES[:4]),
    ("encoder.1", "*.bias", [NAMES[2]]),
    (None, ["*.bias", "head"], [NAMES[0], NAMES[2]]),
    (["head.weight", "*.0.b*"], None, [NAMES[1], NAMES[4]]),
    ("*", [], NAMES),
    ("*.WEIGHT", "nothing", None),
])  # fmt: skip
@pytest.mark.parametrize("how", ["file", "pipe"])
def test_patterns_choose_what_is_converted(how: str, select: Any, exclude: Any, expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(KeyError, match=r"tensor '\*\.WEIGHT without nothing': not in this record of 5 tensors"):
            archive_of(io.BytesIO(layered()), select=select, exclude=exclude)
        return
    options = {"select": select, "exclude": exclude}
    piped = how == "pipe"
    data = m.through_pipes(layered(), **options)[0] if piped else archive_of(io.BytesIO(layered()), **options)
    record = zcrecord.load_record(data, verify="full")
    assert list(record) == expected
    assert all(record[name].tolist() == [NAMES.index(name)] * 5 for name in expected)
    assert "onnx.graph" not in record.attributes, "a graph without all of its weights is none"


def test_what_is_left_out_takes_no_place_whatever_it_is_and_however_it_comes(tmp_path: Path) -> None:
    large = RNG.standard_normal(WINDOW)
    typed = helper.make_tensor(
        "drop.typed", TensorProto.FLOAT, [300_000], np.arange(300_000.0)
    )  # named after its values
    external = TensorProto(name="drop.external", data_type=1, dims=[6], data_location=TensorProto.EXTERNAL)
    external.external_data.add(key="location", value="absent.bin")
    inner = helper.make_graph(
        [], "g", [], [], [numpy_helper.from_array(large, "w"), numpy_helper.from_array(large, "keep")]
    )
    nodes = [
        helper.make_node("If", ["c"], ["y"], name="drop", then_branch=inner),
        helper.make_node("Constant", [], ["drop.const"], value=numpy_helper.from_array(large)),
        helper.make_node("Constant", [], ["keep.const"], value=numpy_helper.from_array(np.arange(3))),
    ]
    strings = helper.make_tensor("drop.s", TensorProto.STRING, [2], [b"a", b"b"])
    model = m.model_of(numpy_helper.from_array(large, "drop.raw"), typed, external, strings,
                       helper.make_tensor("keep.t", TensorProto.FLOAT, [3], [1, 2, 3]), nodes=nodes)  # fmt: skip
    for which in ("keep.sparse", "drop.sparse"):
        values = helper.make_tensor(which, TensorProto.FLOAT, [2], [5, 6])
        model.graph.sparse_initializer.append(
            helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 2])), [5])
        )
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    report = convert(path, tmp_path / "m.zcr", exclude=["drop.*"])
    record = zcrecord.load_record(tmp_path / "m.zcr", verify="full")
    assert list(record) == ["keep.const.value", "keep.t", "keep.sparse.values", "keep.sparse.indices"]
    assert report.left_out == 9 and report.archive_bytes < 4000


def test_a_pipe_takes_a_choice_unless_a_large_tensor_is_named_after_its_values() -> None:
    class Pipe(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            return len(data)

    def typed(count: int) -> bytes:
        t = helper.make_tensor("w", TensorProto.FLOAT, [count], np.arange(float(count)))
        return bytes(m.model_of(t, numpy_helper.from_array(np.arange(3), "k")).SerializeToString())

    assert list(zcrecord.load_record(m.through_pipes(typed(1000), select="k")[0])) == ["k"]
    with pytest.raises(UnsupportedError, match="tensor 'w': bytes in a pipe cannot be taken back"):
        convert(io.BytesIO(typed(WINDOW)), Pipe(), select="k")


def test_a_node_that_is_named_after_its_tensors_is_noticed() -> None:
    tensor = m.field(5, [m.field(1, b"v"), m.field(5, m.field(2, 1) + m.field(9, bytes(4)))])
    model = m.wire_model(graph=m.field(1, [tensor, m.field(3, b"late")]))
    assert list(m.converted(model)) == ["late.v"]
    with pytest.raises(
        zcrecord.errors.OnnxError, match=r"tensor 'late\.v': .*named after its values, too late for a choice"
    ):
        m.converted(model, select="late.*")


def test_names_that_had_to_change_are_those_of_the_whole_conversion() -> None:
    constants = [helper.make_node("Constant", [], ["c"], name="n", value=numpy_helper.from_array(np.full(1, i)))
                 for i in range(3)]  # fmt: skip
    record = m.converted(layered(constants), select="n")
    assert {name: record[name].tolist() for name in record} == {"n.value": [0], "n.value~2": [1], "n.value~3": [2]}


# Trying it out, and making sure.


def test_a_dry_run_writes_nothing_and_reports_what_would_be(tmp_path: Path) -> None:
    source, dest = tmp_path / "m.onnx", tmp_path / "m.zcr"
    source.write_bytes(MODEL)
    report = convert(source, dest, dry_run=True)
    assert os.listdir(tmp_path) == ["m.onnx"]
    real = convert(source, dest)
    same = (
        "tensors",
        "modules",
        "payload_bytes",
        "archive_bytes",
        "input_bytes",
        "shared_bytes",
        "left_out",
        "source",
        "dest",
    )
    assert all(getattr(report, name) == getattr(real, name) for name in same)
    assert (report.dry_run, real.dry_run) == (True, False)
    before = dest.read_bytes()
    convert(source, dest, dry_run=True, force=True)
    assert dest.read_bytes() == before
    convert(source, dest, dry_run=True)  # would be refused: it is for somebody who asks what would be
    assert dest.read_bytes() == before
    source.write_bytes(MODEL[:-9])
    with pytest.raises(zcrecord.errors.OnnxError):
        convert(source, dest, dry_run=True, force=True)


@pytest.mark.parametrize("packed", [False, True])
def test_verifying_reads_the_source_again_and_the_archive_back(packed: bool, tmp_path: Path) -> None:
    source, dest = tmp_path / "m.onnx", tmp_path / "m.zcr"
    source.write_bytes(PACKED["zst"] if packed else MODEL)
    seen: list[tuple[int, int | None]] = []
    report = convert(source, dest, verify=True, progress=lambda done, total: seen.append((done, total)))
    size = source.stat().st_size
    assert report.verified and {total for _, total in seen} == {2 * size}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == 2 * size
    assert dest.read_bytes() == archive_of(source)
    zcrecord.load_record(dest, verify="full")


@pytest.mark.parametrize("harm", ["source", "payload", "index"])
def test_a_difference_found_by_verifying_leaves_the_old_file(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dest = tmp_path / "m.onnx", tmp_path / "m.zcr"
    source.write_bytes(MODEL)
    dest.write_bytes(b"precious")
    from zcrecord.writing.writers import StreamWriter

    finish = StreamWriter.finish

    def harmed(self: Any, entries: Any) -> Any:
        report = finish(self, entries)
        sink = self._sink
        if harm == "source":
            changed = bytearray(MODEL)
            changed[len(MODEL) // 5] ^= 1
            source.write_bytes(changed)
        elif sink.keeps:  # the archive, not the second pass
            sink.patch(100_000 if harm == "payload" else sink.position - 100, b"\x55")
        return report

    monkeypatch.setattr(StreamWriter, "finish", harmed)
    message = {
        "source": r"m\.onnx: read again, it is another model than the one converted",
        "payload": r"m\.zcr: bytes \[0x[0-9a-f]+, 0x[0-9a-f]+\) are not what was written; the disk or",
        "index": r"m\.zcr: its index is not what was written",
    }[harm]
    with pytest.raises(IntegrityError, match=message):
        convert(source, dest, verify=True, force=True)
    assert dest.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.zcr"]


@pytest.mark.parametrize("source, dest", [("m.onnx", io.BytesIO()), (io.BytesIO(MODEL), "m.zcr")])
def test_streams_cannot_be_verified(source: Any, dest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").write_bytes(MODEL)
    with pytest.raises(UnsupportedError, match="both must be files by path"):
        convert(source, dest, verify=True)


# Metadata.


@pytest.mark.parametrize("given", [{"license": "mit"}, lambda: {"license": "mit"}])
def test_metadata_are_given_or_asked_for_at_the_end(given: Any, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(m.rich_model().SerializeToString())
    convert(tmp_path / "m.onnx", tmp_path / "m.zcr", metadata=given, verify=True)
    assert zcrecord.load_record(tmp_path / "m.zcr").metadata == {"license": "mit"}
    formats.convert(tmp_path / "m.zcr", tmp_path / "m2.zcr", metadata={"by": "me"})
    assert zcrecord.load_record(tmp_path / "m2.zcr").metadata == {"by": "me", "license": "mit"}
    with pytest.raises(UnsupportedError, match="metadata can be added to archives; npz has that of the record"):
        formats.convert(tmp_path / "m.zcr", tmp_path / "m.npz", metadata={"by": "me"})


@pytest.mark.parametrize("metadata", [{"": 1}, {"a": {}}, 7])
def test_metadata_that_no_archive_holds_leave_the_old_one(metadata: Any, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(m.rich_model().SerializeToString())
    (tmp_path / "m.zcr").write_text("old", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="metadata"):
        convert(tmp_path / "m.onnx", tmp_path / "m.zcr", metadata=lambda: metadata, force=True)
    assert (tmp_path / "m.zcr").read_text(encoding="utf-8") == "old"
