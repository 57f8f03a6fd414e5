"""A model comes from files and pipes, plain or compressed, whole or in part: one pass, the same tensors."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import onnx_values
import pytest
import zstandard
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import archive_of
from onnx_scans import sparse_model

import zcrecord
from zcrecord import errors
from zcrecord.onnx import convert
from zcrecord.onnx.protobuf.reader import WINDOW
from zcrecord.writing.writers import StreamWriter

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


SMALL = m.model_of(*(numpy_helper.from_array(RNG.integers(0, 9, 60), f"t{i}") for i in range(9))).SerializeToString()


def streamed(data: bytes, **options: Any) -> bytes:
    writer = zstandard.ZstdCompressor(**options).compressobj()
    return writer.compress(data) + writer.flush()


def compressed(data: bytes) -> dict[str, bytes]:
    """Some data in every form of the two compressions."""
    step = len(data) // 9
    frames = [zstandard.ZstdCompressor(level=1 + i).compress(data[i * step : (i + 1) * step]) for i in range(9)]
    frames.append(zstandard.ZstdCompressor().compress(data[9 * step :]))
    return {
        "zst": zstandard.ZstdCompressor().compress(data),
        "zst, no size": streamed(data),
        "zst, checksum": streamed(data, level=12, write_checksum=True),
        "zst, frames and notes": SKIPPABLE + b"".join(frame + SKIPPABLE for frame in frames),
        "gz": gzip.compress(data, 1),
        "gz, two members": gzip.compress(data[:999], 1) + gzip.compress(data[999:], 9),
    }


PACKED, PACKED_SMALL = compressed(MODEL), compressed(SMALL)


@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_model_gives_the_same_archive(kind: str, tmp_path: Path) -> None:
    plain = archive_of(io.BytesIO(MODEL))
    path = tmp_path / "whatever it is called"  # its first bytes tell
    path.write_bytes(PACKED[kind])
    assert archive_of(io.BytesIO(PACKED[kind])) == plain
    assert archive_of(path) == plain


@pytest.mark.parametrize("most", [1, 7, 4097])
@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_stream_may_come_in_any_pieces(kind: str, most: int) -> None:
    assert archive_of(m.Forward(PACKED_SMALL[kind], most)) == archive_of(io.BytesIO(SMALL))


@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_model_that_is_cut_anywhere_is_an_error(kind: str) -> None:
    data, whole = PACKED_SMALL[kind], archive_of(io.BytesIO(SMALL))
    before_the_last_note = len(data) - len(SKIPPABLE) if "notes" in kind else 0
    for cut in range(1, len(data)):
        with contextlib.suppress(errors.FormatError, errors.OnnxError):
            assert archive_of(io.BytesIO(data[:cut])) == whole and cut == before_the_last_note, f"cut at {cut}"


def test_a_damaged_stream_is_told_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx.zst"
    (tmp_path / "m.zcr").write_bytes(b"precious")
    for data, what in (
        (PACKED["zst"][:-1000], r"the zstd stream is truncated or damaged \(it ends inside a frame\); copy"),
        (PACKED["gz"][:-1000], "the gzip stream is truncated or damaged"),
        (PACKED["gz"] + b"rest", "the gzip stream is truncated or damaged"),
    ):
        path.write_bytes(data)
        with pytest.raises(errors.FormatError, match=rf"m\.onnx\.zst: {what}"):
            convert(path, tmp_path / "m.zcr", force=True)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx.zst", "m.zcr"]
    assert (tmp_path / "m.zcr").read_bytes() == b"precious"


def test_a_stream_without_zstandard_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    what = r"zstandard is not installed; pip install zstandard, or in a checkout .*'\.\[zstd\]'"
    with pytest.raises(errors.DependencyError, match=what):
        archive_of(io.BytesIO(PACKED["zst"]))
    assert len(archive_of(io.BytesIO(PACKED["gz"]))) > len(MODEL) // 2


def test_a_disk_that_fails_under_a_compressed_stream_is_one_error() -> None:
    class Failing(m.Forward):
        def readinto(self, buffer: Any) -> int:
            if self._data.tell() > 100_000:
                raise OSError(5, "Input/output error")
            return super().readinto(buffer)

    for kind in ("zst", "gz"):
        with pytest.raises(errors.SourceError, match="cannot read: Input/output error"):
            archive_of(Failing(PACKED[kind]))


def test_external_data_lie_beside_a_compressed_model_too(tmp_path: Path) -> None:
    path = onnx_values.write(tmp_path / "m", onnx_values.reference())
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert (zcrecord.load_record(archive_of(path))["w"] == onnx_values.DATA).all()
    with pytest.raises(errors.ExternalDataError, match="a stream has no folder"):
        archive_of(io.BytesIO(path.read_bytes()))


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
def test_a_bomb_takes_time_and_no_memory(tmp_path: Path) -> None:
    """A few kilobytes that become 256 MiB of zeros in one tensor. To hold them would be noticed."""
    size, plain = 256 << 20, tmp_path / "m.onnx"
    sparse_model(plain, size)
    packers: dict[str, Any] = {
        "m.zst": zstandard.ZstdCompressor(level=1).compressobj(),
        "m.gz": zlib.compressobj(1, wbits=31),
    }
    for name, packer in packers.items():
        with plain.open("rb") as source, (tmp_path / name).open("wb") as dest:
            while data := source.read(1 << 20):
                dest.write(packer.compress(data))
            dest.write(packer.flush())
    assert m.peak_growth("import gzip", f"kept = gzip.open({str(tmp_path / 'm.gz')!r}).read()") > size
    for name in packers:
        work = f"convert({str(tmp_path / name)!r}, {str(tmp_path / 'm.zcr')!r}, durable=False, force=True)"
        assert m.peak_growth("import zstandard, gzip; from zcrecord.onnx import convert", work) < 24 << 20
        assert (tmp_path / "m.zcr").stat().st_size > size
    (tmp_path / "m.zcr").unlink()


def test_into_a_pipe_equal_tensors_up_to_a_chunk_are_stored_once() -> None:
    data, report = m.through_pipes(PACKED["zst"])
    assert (report.source, report.dest) == (None, None)
    record = zcrecord.load_record(data, verify="full")
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
        with pytest.raises(KeyError, match=r"tensor '\*\.WEIGHT without nothing': not in this record of 5 names"):
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
    numbers = np.arange(300_000.0)
    typed = helper.make_tensor("drop.typed", TensorProto.FLOAT, [300_000], numbers)  # named after its values
    external = onnx_values.reference("absent.bin", "drop.external")
    inner = [numpy_helper.from_array(large, name) for name in ("w", "keep")]
    nodes = [
        helper.make_node("If", ["c"], ["y"], name="drop", then_branch=helper.make_graph([], "g", [], [], inner)),
        helper.make_node("Constant", [], ["drop.const"], value=numpy_helper.from_array(large)),
        helper.make_node("Constant", [], ["keep.const"], value=numpy_helper.from_array(np.arange(3))),
    ]
    strings = helper.make_tensor("drop.s", TensorProto.STRING, [2], [b"a", b"b"])
    model = m.model_of(numpy_helper.from_array(large, "drop.raw"), typed, external, strings,
                       helper.make_tensor("keep.t", TensorProto.FLOAT, [3], [1, 2, 3]), nodes=nodes)  # fmt: skip
    places = numpy_helper.from_array(np.array([1, 2]))
    for which in ("keep.sparse", "drop.sparse"):
        values = helper.make_tensor(which, TensorProto.FLOAT, [2], [5, 6])
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [5]))
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
    with pytest.raises(errors.UnsupportedError, match="tensor 'w': bytes in a pipe cannot be taken back"):
        convert(io.BytesIO(typed(WINDOW)), Pipe(), select="k")


def test_a_node_that_is_named_after_its_tensors_is_noticed() -> None:
    tensor = m.field(5, [m.field(1, b"v"), m.field(5, m.field(2, 1) + m.field(9, bytes(4)))])
    model = m.wire_model(graph=m.field(1, [tensor, m.field(3, b"late")]))
    assert list(m.converted(model)) == ["late.v"]
    what = r"tensor 'late\.v': .*named after its values, too late for a choice"
    with pytest.raises(errors.OnnxError, match=what):
        m.converted(model, select="late.*")


# Trying it out, and making sure.


def test_a_dry_run_writes_nothing_and_reports_what_would_be(tmp_path: Path) -> None:
    source, dest = tmp_path / "m.onnx", tmp_path / "m.zcr"
    source.write_bytes(MODEL)
    report = convert(source, dest, dry_run=True)
    assert os.listdir(tmp_path) == ["m.onnx"]
    real = convert(source, dest)
    assert (report.dry_run, real.dry_run) == (True, False)
    measured: dict[str, Any] = {"dry_run": False, "seconds": 0.0, "peak_rss": None}
    assert replace(report, **measured) == replace(real, **measured)
    before = dest.read_bytes()
    convert(source, dest, dry_run=True, force=True)
    assert dest.read_bytes() == before
    convert(source, dest, dry_run=True)  # which would be refused
    assert dest.read_bytes() == before
    source.write_bytes(MODEL[:-9])
    with pytest.raises(errors.OnnxError):
        convert(source, dest, dry_run=True, force=True)


@pytest.mark.parametrize("packed", [False, True])
def test_verifying_reads_the_source_again_and_the_archive_back(packed: bool, tmp_path: Path) -> None:
    source, dest = tmp_path / "m.onnx", tmp_path / "m.zcr"
    source.write_bytes(PACKED["zst"] if packed else MODEL)
    seen: list[tuple[int, int | None]] = []
    report = convert(source, dest, verify=True, progress=lambda done, total: seen.append((done, total)))
    size = source.stat().st_size
    assert report.verified and report.input_bytes == len(MODEL)
    assert {total for _, total in seen} == {2 * size}, "in bytes of the file, packed or not"
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
    with pytest.raises(errors.IntegrityError, match=message):
        convert(source, dest, verify=True, force=True)
    assert dest.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.zcr"]


# Metadata.


@pytest.mark.parametrize("given", [{"license": "mit"}, lambda: {"license": "mit"}])
def test_metadata_are_given_or_asked_for_at_the_end(given: Any, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(m.rich_model().SerializeToString())
    convert(tmp_path / "m.onnx", tmp_path / "m.zcr", metadata=given, verify=True)
    assert zcrecord.load_record(tmp_path / "m.zcr").metadata == {"license": "mit"}
