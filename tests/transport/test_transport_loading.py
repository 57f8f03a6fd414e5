"""load_record takes packed archives as any other, whole or only what is asked for; what works on one works there."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import records as r
import zstandard
from packed_archives import FORMS, GOLDEN, MIB, OneWay, encoded, frames_of, mixed, packed, streamed, tabled, weights
from processes import growth

import zcrecord
from zcrecord import FormatError, IntegrityError, LimitError, Record, UnsupportedError
from zcrecord.transport import frames, pack

HOW = pytest.mark.parametrize("way", ["front", "sealed", "unsealed"])
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
def test_large_archives_load_packed(way: str, tmp_path: Path) -> None:
    (tmp_path / "m.zcr.zst").write_bytes(packed(way))
    want = zcrecord.load_record(encoded(way))
    for data in (tmp_path / "m.zcr.zst", packed(way), streamed(encoded(way))):
        got = zcrecord.load_record(data, verify="full")
        assert_same(got, want)
        assert got.content_digest() == want.content_digest()
        assert bytes(got.archive.buffer) == encoded(way)


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("form", FORMS)
def test_what_other_programs_packed_loads(form: str) -> None:
    """R85. Of archives whose size is in their header, see test_transport_agreement."""
    data = FORMS[form](encoded("unsealed"))
    assert bytes(zcrecord.load_record(data).archive.buffer) == encoded("unsealed")
    part = zcrecord.load_record(data, names=["large", "tied.*"])
    assert_same(part, zcrecord.load_record(encoded("unsealed")).select(["large", "tied.*"]))


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
def test_plain_archives_do_not_pay_for_packed_ones(tmp_path: Path) -> None:
    (tmp_path / "m.zcr").write_bytes(GOLDEN["nested"])
    code = "import sys, zcrecord; zcrecord.load_record(sys.argv[1]); print(*sorted(sys.modules))"
    modules = r.run_python(code, tmp_path / "m.zcr").stdout.split()
    assert "zcrecord.record.load" in modules
    assert not {"zcrecord.transport.open_packed", "zcrecord.storage.compressed", "zstandard"} & {*modules}


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
def test_parts_are_those_of_the_archive(way: str) -> None:
    whole = zcrecord.load_record(encoded(way))
    for names, rename in (
        ("large", None),
        ("*.w", {"deep": "shallow"}),
        (["small.w1*", "tied"], lambda n: f"x.{n}" if n else ""),
        (lambda info: info.nbytes < 5000, None),
    ):
        want = whole.select(names, rename)
        got = zcrecord.load_record(packed(way), names=names, rename=rename)
        assert_same(got, want)
        assert got.attributes == want.attributes
        assert got.content_digest() == want.content_digest()
        got.verify()
    assert zcrecord.load_record(packed(way), names=iter(["page", "q"])).names == ("page", "q")
    assert_same(zcrecord.load_record(packed(way), rename={"large": "huge"}), whole.select(rename={"large": "huge"}))


@pytest.mark.slow
def test_a_part_is_verified_by_itself() -> None:
    data = bytearray(encoded())
    info = zcrecord.load_record(encoded()).info("page")
    data[info.offset + 5] ^= 1
    there = streamed(bytes(data))  # packing reads no payload for what it says
    for names in ("page", None):
        with pytest.raises(IntegrityError, match=r"tensor 'page': payload .* its digest does not match"):
            zcrecord.load_record(there, names=names, verify="full")
    with pytest.raises(IntegrityError, match="its digest does not match"):
        zcrecord.load_record(there, names="page").verify()
    zcrecord.load_record(there, names="large", verify="full").verify()


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


SETUP = """
import zcrecord
small, there = sys.argv[1:3]
for mode in 'rc':
    zcrecord.load_record(small, names='w', mode=mode)['w'].sum()
zcrecord.load_record(small)
"""


@pytest.mark.measured
@LINUX
def test_a_part_takes_memory_for_itself_and_the_measurement_would_notice(tmp_path: Path) -> None:
    small, archive, there = tmp_path / "small.zst", tmp_path / "m.zcr", tmp_path / "m.zcr.zst"
    small.write_bytes(streamed(r.saved({"w": np.ones(100)})))
    zcrecord.save_record({f"w{i}": weights(16 * MIB, i) for i in range(12)}, archive, durable=False)
    pack(archive, there, durable=False)
    archive.unlink()

    def grown(work: str) -> tuple[int, int]:
        return growth(SETUP, work, small, there)

    private, peak = grown("record = zcrecord.load_record(there); kept = list(record.values())")
    assert 192 * MIB <= private < 200 * MIB, "decompressed once"
    assert peak >= 192 * MIB
    chosen = "record = zcrecord.load_record(there, names='w3'{more}); kept = record['w3']; kept.sum()"
    private, peak = grown(chosen.format(more=""))
    assert 16 * MIB <= private < 24 * MIB
    assert peak < 48 * MIB, "the tensor, its packed bytes, and little else"
    private, _ = grown(chosen.format(more=", mode='c'"))
    assert private < 44 * MIB
    private, _ = grown("record = zcrecord.load_record(there, names='w3'); held = record.archive.private()")
    assert 32 * MIB <= private < 44 * MIB, "a private copy is of the part"


@pytest.mark.parametrize("names", [None, "w"])
@pytest.mark.parametrize("form", ["table", "one frame", "of a stream"])
def test_memory_out_of_all_proportion_is_refused(names: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unsealed = OneWay()
    with zcrecord.RecordWriter(unsealed) as out:
        out.add("w", np.zeros(8 * MIB // 8))
    data = r.saved({"w": np.zeros(8 * MIB // 8)}) if form != "of a stream" else bytes(unsealed.written)
    bomb = streamed(data) if form == "table" else zstandard.ZstdCompressor().compress(data)
    assert zcrecord.load_record(bomb)["w"].nbytes == 8 * MIB
    monkeypatch.setattr(frames, "EXPANDED_FREE", 7 * MIB)
    with pytest.raises(LimitError, match=r"packed bytes would take \d+ bytes of memory; unpack it into a file"):
        zcrecord.load_record(bomb, names=names)


def test_the_packed_file_is_not_held_open(there: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        return
    record, part = zcrecord.load_record(there), zcrecord.load_record(there, names="page")
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(there) not in mapped
    assert record["page"].sum() == part["page"].sum()
