"""load_record takes packed archives as any other, whole or only what is asked for; what works on one works there."""

from __future__ import annotations

import dataclasses
import gc
import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import records as r
import zstandard
from packed_archives import GOLDEN, MIB, encoded, frames_of, mixed, packed, streamed, tabled, weights

import zcrecord
from zcrecord import FormatError, IntegrityError, LimitError, Record, TensorNotFoundError, UnsupportedError
from zcrecord.transport import frames, pack

HOW = pytest.mark.parametrize("how", ["front", "sealed", "unsealed"])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private memory")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    path = tmp_path / "m.zcr.zst"
    path.write_bytes(packed())
    return path


def assert_same(got: Record, want: Record, names: Any = None) -> None:
    """Check names, values, attributes and metadata."""
    assert list(got) == list(want if names is None else names)
    for name in got:
        r.assert_same(got[name], want[name], name)
        assert got.info(name).digest == want.info(name).digest
    assert got.metadata == want.metadata


def parts(data: bytes) -> list[bytes]:
    return [data[i : i + 300_000] for i in range(0, len(data), 300_000)]


def of_a_stream(data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


WIDE = zstandard.ZstdCompressionParameters(window_log=25, write_content_size=0)
FORMS: dict[str, Callable[[bytes], bytes]] = {  # the archive as other programs pack it
    "one frame": zstandard.ZstdCompressor().compress,
    "of a stream": of_a_stream,
    "many frames": lambda data: b"".join(map(zstandard.ZstdCompressor(write_checksum=True).compress, parts(data))),
    "skippable frame first": lambda data: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + of_a_stream(data),
    "table without checksums": lambda data: tabled(parts(data), checksums=False),
    "table with checksums": lambda data: tabled(parts(data), write_checksum=True),
    "frames of unknown size": lambda data: tabled(parts(data), write_content_size=False),
    "wide windows": lambda data: tabled(parts(data), compression_params=WIDE),
    "one frame, with a table": lambda data: tabled([data]),
    "empty frames": lambda data: tabled([b"", data[:70], b"", b"", data[70:], b""]),
}

# The whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("verify", ["touch", "index", "full"])
def test_every_golden_archive_loads_packed(name: str, verify: Any, tmp_path: Path) -> None:
    data = streamed(GOLDEN[name])
    (tmp_path / "m.zcr.zst").write_bytes(data)
    want = zcrecord.load_record(GOLDEN[name])
    for source in (tmp_path / "m.zcr.zst", data):
        got = zcrecord.load_record(source, verify=verify)
        assert got.content_digest() == want.content_digest()
        assert (got.names, got.attributes, got.metadata) == (want.names, want.attributes, want.metadata)
        got.verify()


@pytest.mark.slow
@HOW
def test_large_archives_load_packed(how: str, tmp_path: Path) -> None:
    (tmp_path / "m.zcr.zst").write_bytes(packed(how))
    want = zcrecord.load_record(encoded(how))
    for data in (tmp_path / "m.zcr.zst", packed(how), streamed(encoded(how))):
        got = zcrecord.load_record(data, verify="full")
        assert_same(got, want)
        assert got.content_digest() == want.content_digest()
        assert bytes(got.archive.buffer) == encoded(how)


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["front", "unsealed"])
def test_what_other_programs_packed_loads(form: str, how: str) -> None:
    """R85."""
    data = FORMS[form](encoded(how))
    assert bytes(zcrecord.load_record(data).archive.buffer) == encoded(how)
    part = zcrecord.load_record(data, names=["large", "tied.*"])
    assert_same(part, zcrecord.load_record(encoded(how)).select(["large", "tied.*"]))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_any_bytes_hold_a_packed_archive_and_are_let_go_of(kind: Any) -> None:
    source = kind(packed())
    got = zcrecord.load_record(source)
    if isinstance(source, bytearray):
        source.clear()  # a view of it would forbid that
    assert_same(got, zcrecord.load_record(encoded()))


def test_a_mapping_of_the_packed_file_may_be_closed_after(there: Path) -> None:
    with there.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        got = zcrecord.load_record(mapping)
    assert got["page"].sum() == weights(4 * MIB, 3).sum()


@pytest.mark.parametrize("names", [None, ["small", "large", "page", "t"]])
@pytest.mark.parametrize("mode", ["r", "c"])
def test_views_lie_aligned_and_are_read_only_where_they_should(there: Path, names: Any, mode: Any) -> None:
    got = zcrecord.load_record(there, names=names, mode=mode)
    for name, value in got.items():
        if isinstance(value, np.ndarray) and value.size and not name.startswith("tied.twin"):
            assert r.address(value) % got.info(name).alignment == 0
            assert value.flags.writeable is (mode == "c")


def test_a_file_read_rather_than_mapped_loads(there: Path) -> None:
    assert_same(zcrecord.load_record(there, mmap=False), zcrecord.load_record(encoded()))
    assert_same(zcrecord.load_record(there, mmap=False, names="large"), zcrecord.load_record(encoded()), ["large"])


def test_archives_that_are_packed_into_very_few_bytes_load(tmp_path: Path) -> None:
    data = zstandard.ZstdCompressor(level=19).compress(GOLDEN["empty"])
    (tmp_path / "m.zcr.zst").write_bytes(data)
    assert len(data) < 128
    for mapped in (True, False):
        assert len(zcrecord.load_record(tmp_path / "m.zcr.zst", mmap=mapped)) == 0


@dataclasses.dataclass
class Tied:
    """A module of the record."""

    a: np.ndarray
    b: np.ndarray
    twin: np.ndarray


@pytest.mark.parametrize("names", [None, ["tied.*"]])
def test_typed_trees_come_of_packed_archives(there: Path, names: Any) -> None:
    got = zcrecord.load_record(there, names=names).module("tied").into(Tied)
    assert r.address(got.a) == r.address(got.b)
    loaded = zcrecord.load_record(there, names=["tied.a", "tied.b", "tied.twin"], rename={"tied": ""}, into=Tied)
    assert loaded.twin.tolist() == got.twin.tolist()


@pytest.mark.slow
def test_the_content_digest_is_checked_over_everything(there: Path) -> None:
    digest = zcrecord.load_record(encoded()).content_digest()
    assert len(zcrecord.load_record(there, expect=digest)) > 60
    assert zcrecord.load_record(there, expect=digest, names="page").names == ("page",)
    for names in (None, "page"):
        with pytest.raises(IntegrityError, match=r"m\.zcr\.zst: content digest sha256:0+ was expected"):
            zcrecord.load_record(there, expect="sha256:" + 64 * "0", names=names)


@pytest.mark.parametrize("embedded", ["prefix", "suffix"])
@pytest.mark.parametrize("names", [None, "page"])
def test_packed_archives_are_not_embedded(embedded: Any, names: Any, there: Path) -> None:
    with pytest.raises(FormatError, match=r"this is a zstd stream|trailer: its magic"):
        zcrecord.load_record(there, embedded=embedded, names=names)


def test_an_archive_appended_to_a_zstd_file_is_still_found() -> None:
    both = zstandard.ZstdCompressor().compress(b"another file") + GOLDEN["tiny"]
    assert zcrecord.load_record(both, embedded="suffix")["w"].tolist() == [1, 2, 3]


@pytest.mark.slow
def test_several_threads_may_load_at_once(there: Path) -> None:
    want = zcrecord.load_record(encoded())
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: zcrecord.load_record(there), range(8)):
            assert got["large"].tobytes() == want["large"].tobytes()


@pytest.mark.slow
def test_plain_archives_do_not_pay_for_packed_ones(tmp_path: Path) -> None:
    (tmp_path / "m.zcr").write_bytes(GOLDEN["nested"])
    code = "import sys, zcrecord; zcrecord.load_record(sys.argv[1]); print(*sorted(sys.modules))"
    modules = r.run_python(code, tmp_path / "m.zcr").stdout.split()
    assert "zcrecord.record.load" in modules
    assert not {
        "zcrecord.transport.open_packed",
        "zcrecord.transport.frames",
        "zcrecord.storage.compressed",
        "zstandard",
    } & set(modules)


# Some of it


def damaged_but_for(keep: tuple[str, ...]) -> bytes:
    """The packed archive with every frame destroyed that neither index nor these tensors need."""
    data, record = bytearray(packed()), zcrecord.load_record(encoded())
    payloads = record.archive.header.payload_offset
    needed = [(0, payloads), (len(encoded()) - 64, len(encoded()))]
    part = record.select(keep).archive.index.payloads
    needed += [(payloads + int(p["offset"]), payloads + int(p["offset"]) + int(p["nbytes"])) for p in part]
    spoilt = 0
    for frame in frames_of(packed()):
        if not any(lo < frame.start + frame.size and hi > frame.start for lo, hi in needed):
            data[frame.offset : frame.offset + frame.nbytes] = bytes(frame.nbytes)
            spoilt += 1
    assert spoilt > 3
    return bytes(data)


@pytest.mark.parametrize("names", [("page",), ("large",), ("q", "s", "t"), ("deep",), ("small.w7",), ("empty",), ()])
@pytest.mark.parametrize("mode", ["r", "c"])
def test_only_frames_that_are_needed_are_decompressed(names: tuple[str, ...], mode: Any, tmp_path: Path) -> None:
    (tmp_path / "m.zcr.zst").write_bytes(data := damaged_but_for(names))
    want = zcrecord.load_record(encoded()).select(names)
    for source in (data, tmp_path / "m.zcr.zst"):
        got = zcrecord.load_record(source, names=names, verify="full", mode=mode)
        assert_same(got, want)
        assert got.attributes == want.attributes
        with pytest.raises(FormatError, match=r"frame \[0x[0-9a-f]+, 0x[0-9a-f]+\): "):
            zcrecord.load_record(source)


def test_a_damaged_frame_between_those_of_a_part_is_not_looked_at_behind_a_url() -> None:
    archive = r.saved({name: weights(4000, seed) for seed, name in enumerate("axb")})
    between = zcrecord.load_record(archive).info("x").offset
    data = bytearray(tabled([archive[:between], archive[between : between + 4000], archive[between + 4000 :]]))
    frame = frames_of(bytes(data))[1]
    data[frame.offset : frame.offset + frame.nbytes] = bytes(frame.nbytes)
    fsspec.filesystem("memory").pipe_file("/needed/m.zcr.zst", bytes(data))
    ways: list[tuple[Any, Any]] = [(bytes(data), {}), ("memory://needed/m.zcr.zst", {"cache": False})]
    for source, options in ways:
        got = zcrecord.load_record(source, names=("a", "b"), **options)
        assert_same(got, zcrecord.load_record(archive).select(("a", "b")))
    with pytest.raises(FormatError, match=r"frame \[0x[0-9a-f]+, 0x[0-9a-f]+\): "):
        zcrecord.load_record("memory://needed/m.zcr.zst", cache=False)["x"]


@pytest.mark.exhaustive(keep=2)
@HOW
def test_parts_are_those_of_the_archive(how: str) -> None:
    whole = zcrecord.load_record(encoded(how))
    for names, rename in (
        ("large", None),
        ("*.w", {"deep": "shallow"}),
        (["small.w1*", "tied"], lambda n: f"x.{n}" if n else ""),
        (lambda info: info.nbytes < 5000, None),
    ):
        want = whole.select(names, rename)
        got = zcrecord.load_record(packed(how), names=names, rename=rename)
        assert_same(got, want)
        assert got.attributes == want.attributes
        assert got.content_digest() == want.content_digest()
        got.verify()
    assert zcrecord.load_record(packed(how), names=iter(["page", "q"])).names == ("page", "q")
    assert_same(zcrecord.load_record(packed(how), rename={"large": "huge"}), whole.select(rename={"large": "huge"}))


def test_parts_of_parts_are_parts(there: Path) -> None:
    part = zcrecord.load_record(there, names=["tied", "deep"])
    whole = zcrecord.load_record(encoded())
    assert_same(part.module("deep.0"), whole.module("deep.0"))
    assert part.module("deep.0").attributes == whole.module("deep.0").attributes
    assert_same(part.select("*.w").select("deep.1.*"), whole.select("deep.1.w"))
    for again in (part.module("deep.0"), part.select("tied").select("tied.a")):
        assert pickle.loads(pickle.dumps(again)).content_digest() == again.content_digest()


def test_a_name_that_is_not_there_is_told_with_close_ones(there: Path) -> None:
    with pytest.raises(TensorNotFoundError, match=r"m\.zcr\.zst: tensor 'larg': .*close names: 'large'"):
        zcrecord.load_record(there, names="larg")


@pytest.mark.slow
def test_a_part_is_verified_by_itself() -> None:
    data = bytearray(encoded())
    info = zcrecord.load_record(encoded()).info("page")
    data[info.offset + 5] ^= 1
    there = streamed(bytes(data))  # packing reads no payload for what it says
    with pytest.raises(IntegrityError, match=r"tensor 'page': payload .* its digest does not match"):
        zcrecord.load_record(there, names="page", verify="full")
    with pytest.raises(IntegrityError, match="its digest does not match"):
        zcrecord.load_record(there, verify="full")
    with pytest.raises(IntegrityError, match="its digest does not match"):
        zcrecord.load_record(there, names="page").verify()
    zcrecord.load_record(there, names="large", verify="full").verify()


# To be written to


@pytest.mark.parametrize("names", [None, ["tied", "small"]])
def test_private_tensors_are_written_each_by_itself(names: Any, there: Path) -> None:
    got = zcrecord.load_record(there, names=names, mode="c")
    before = got["tied.twin"].copy()
    got["tied.a"][:] = 7
    assert (got["tied.b"] == 7).all(), "tied tensors are one"
    assert (got["tied.twin"] == before).all(), "equal ones are not"
    got["tied.twin"][:] = 8
    assert (got["tied.a"] == 7).all()
    assert there.read_bytes() == packed()
    assert zcrecord.load_record(there)["tied.a"].tolist() == before.tolist()
    with pytest.raises(UnsupportedError, match="a record of mode 'c' may hold edits"):
        pickle.dumps(got)


def test_a_private_part_is_verified_as_it_was() -> None:
    got = zcrecord.load_record(packed(), names=["tied", "t"], mode="c", verify="full")
    got["tied.a"][:] = 7
    got.verify()
    got.module("tied").verify()
    data = bytearray(encoded())
    data[zcrecord.load_record(encoded()).info("t").offset] ^= 1
    with pytest.raises(IntegrityError, match="tensor 't': payload"):
        zcrecord.load_record(streamed(bytes(data)), names=["tied", "t"], mode="c").verify()


@pytest.mark.parametrize("names", [None, ["tied", "small", "t"]])
def test_torch_tensors_are_private(names: Any, there: Path) -> None:
    got = zcrecord.load_record(there, names=names)
    first, second = got.torch("cpu", ["tied.*", "t"]), got.torch("cpu", ["tied.*", "t"])
    first["tied.a"].zero_()
    assert first["tied.b"].sum() == 0
    for other in (second["tied.a"], first["tied.twin"]):
        assert other.numpy().tobytes() == got["tied.a"].tobytes() != first["tied.a"].numpy().tobytes()
    assert first["t"].numpy().tolist() == got["t"].tolist()


# Life


@pytest.mark.slow
@pytest.mark.parametrize("names", [None, ["page", "tied"]])
@pytest.mark.parametrize("mode", ["r", "c"])
def test_closing_lets_go_of_the_memory_and_views_outlive_it(names: Any, mode: Any, there: Path) -> None:
    record = zcrecord.load_record(there, names=names, mode=mode)
    assert record.close() is True
    with pytest.raises(UnsupportedError, match="the record is closed"):
        record["page"]
    with zcrecord.load_record(there, names=names, mode=mode) as record:
        view = record["page"]
    assert record.close() is False
    gc.collect()
    assert view.tobytes() == weights(4 * MIB, 3).tobytes()


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("by", ["path", "bytes"])
@pytest.mark.parametrize("names", [None, ["page", "deep.*"], "t"])
def test_records_are_pickled_by_the_packed_form(by: str, names: Any, there: Path) -> None:
    source = there if by == "path" else bytearray(packed())
    record = zcrecord.load_record(source, names=names, rename=None if names is None else {"page": "side"})
    data = pickle.dumps(record)
    assert len(data) < 2000 if by == "path" else len(data) < len(encoded()) + 2000
    again = pickle.loads(data)
    assert_same(again, record)
    assert again.attributes == record.attributes
    assert pickle.loads(pickle.dumps(again)).content_digest() == record.content_digest()


@pytest.mark.slow
@pytest.mark.parametrize("names", [None, "page"])
def test_an_archive_replaced_meanwhile_is_not_unpickled(names: Any, there: Path) -> None:
    data = pickle.dumps(zcrecord.load_record(there, names=names))
    tree = {**mixed(), "more": np.ones(3)}
    there.write_bytes(streamed(r.saved(tree)))
    with pytest.raises(IntegrityError, match="is not the archive that was pickled; it was replaced since"):
        pickle.loads(data)


@pytest.mark.parametrize("names", [None, ["page"]])
def test_what_needs_a_mapped_file_does_nothing_or_works_otherwise(names: Any, there: Path) -> None:
    record = zcrecord.load_record(there, names=names)
    record.prefetch()
    record.prefetch("page")
    assert record.path == str(there)
    assert record.archive_nbytes == len(encoded())
    there.unlink()
    assert record["page"].tobytes() == weights(4 * MIB, 3).tobytes()
    assert record.torch(names="page")["page"].numpy().tobytes() == record["page"].tobytes()
    assert zcrecord.load_record(r.saved(dict(record))).names == record.names


def test_a_session_computes_off_a_packed_model(tmp_path: Path) -> None:
    from zcrecord.onnx import convert, session

    convert(Path(__file__).parents[1] / "data" / "digits.onnx", tmp_path / "m.zcr")
    pack(tmp_path / "m.zcr", tmp_path / "m.zcr.zst")
    plain, off = session(tmp_path / "m.zcr"), session(tmp_path / "m.zcr.zst")
    given = plain.get_inputs()[0]
    feed = {
        given.name: np.random.default_rng(0).random([d if isinstance(d, int) else 2 for d in given.shape], np.float32)
    }
    for one, other in zip(plain.run(None, feed), off.run(None, feed), strict=True):
        assert np.array_equal(one, other)


# Memory


MEASURED = """
import sys
import numpy as np
import zcrecord
from tools.measure import memory, peak_rss

small, there = sys.argv[1:3]
for mode in 'rc':
    zcrecord.load_record(small, names='w', mode=mode)['w'].sum()
zcrecord.load_record(small)
before, peak = memory().private, peak_rss()
{work}
print(memory().private - before, peak_rss() - peak)
"""


@pytest.mark.measured
@LINUX
def test_a_part_takes_memory_for_itself_and_the_measurement_would_notice(tmp_path: Path) -> None:
    small, archive, there = tmp_path / "small.zst", tmp_path / "m.zcr", tmp_path / "m.zcr.zst"
    small.write_bytes(streamed(r.saved({"w": np.ones(100)})))
    zcrecord.save_record({f"w{i}": weights(16 * MIB, i) for i in range(12)}, archive, durable=False)
    pack(archive, there, durable=False)
    archive.unlink()

    def growth(work: str) -> tuple[int, int]:
        private, peak = r.run_python(MEASURED.format(work=work), small, there).stdout.split()
        return int(private), int(peak)

    private, peak = growth("record = zcrecord.load_record(there); kept = list(record.values())")
    assert 192 * MIB <= private < 200 * MIB, "decompressed once"
    assert peak >= 192 * MIB
    chosen = "record = zcrecord.load_record(there, names='w3'{more}); kept = record['w3']; kept.sum()"
    private, peak = growth(chosen.format(more=""))
    assert 16 * MIB <= private < 24 * MIB
    assert peak < 48 * MIB, "the tensor, its packed bytes, and little else"
    private, _ = growth(chosen.format(more=", mode='c'"))
    assert private < 44 * MIB
    private, _ = growth("record = zcrecord.load_record(there, names='w3'); held = record.archive.private()")
    assert 32 * MIB <= private < 44 * MIB, "a private copy is of the part"


@pytest.mark.parametrize("names", [None, "w"])
@pytest.mark.parametrize("form", ["table", "one frame", "of a stream"])
def test_memory_out_of_all_proportion_is_refused(names: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    with zcrecord.RecordWriter(NoSeek(file)) as out:
        out.add("w", np.zeros(8 * MIB // 8))
    data = r.saved({"w": np.zeros(8 * MIB // 8)}) if form != "of a stream" else file.getvalue()
    bomb = streamed(data) if form == "table" else zstandard.ZstdCompressor().compress(data)
    assert zcrecord.load_record(bomb)["w"].nbytes == 8 * MIB
    monkeypatch.setattr(frames, "EXPANDED_FREE", 7 * MIB)
    with pytest.raises(LimitError, match=r"packed bytes would take \d+ bytes of memory; unpack it into a file"):
        zcrecord.load_record(bomb, names=names)


class NoSeek(io.RawIOBase):
    """A file that is written forward only."""

    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


def test_the_packed_file_is_not_held_open(there: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        return
    record, part = zcrecord.load_record(there), zcrecord.load_record(there, names="page")
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(there) not in mapped
    assert record["page"].sum() == part["page"].sum()
