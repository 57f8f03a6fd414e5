"""A packed archive is zstd frames that begin where payloads do, and gives the same bytes back, wherever it comes from.

Loading is tested in test_transport_loading.py, damage in test_transport_malformed.py.
"""

from __future__ import annotations

import io
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import zstandard
from exhaustive import some
from packed_archives import GOLDEN, MIB, OneWay, encoded, frames_of, packed, streamed, tabled, weights
from processes import growth

import zcrecord
from zcrecord import (
    DependencyError,
    DestinationExistsError,
    FormatError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)
from zcrecord.transport import frames, pack, unpack, unpacker

HOW = pytest.mark.parametrize("way", ["front", "sealed", "unsealed"])
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells the peak of a process alone")
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: pipes of POSIX")


def decompressed(data: bytes) -> bytes:
    """Return the bytes that any zstd decompresses, in one forward pass."""
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.zcr"
    path.write_bytes(encoded())
    return path


@pytest.mark.parametrize("name", GOLDEN)
def test_every_golden_archive_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """R81."""
    source, there, back = tmp_path / "m.zcr", tmp_path / "m.zcr.zst", tmp_path / "back.zcr"
    source.write_bytes(GOLDEN[name])
    report = pack(source, there)
    assert decompressed(there.read_bytes()) == GOLDEN[name]
    assert unpack(there, back).archive_bytes == report.archive_bytes == len(GOLDEN[name])
    assert back.read_bytes() == GOLDEN[name]


@pytest.mark.slow
@HOW
def test_large_archives_come_back_from_files_and_pipes_to_files_and_pipes(way: str, tmp_path: Path) -> None:
    data, there = encoded(way), tmp_path / "m.zcr.zst"
    there.write_bytes(packed(way))
    for output in (packed(way), streamed(data)):
        assert decompressed(output) == data
        out = OneWay()
        unpack(OneWay(output), out)
        assert out.written == data
        unpack(OneWay(output), tmp_path / "back.zcr", force=True)
        assert (tmp_path / "back.zcr").read_bytes() == data
    out = OneWay()
    assert unpack(there, out).frames == len(frames_of(packed(way)))
    assert out.written == data


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_neither_threads_nor_the_way_in_change_a_byte(threads: int, archive: Path, tmp_path: Path) -> None:
    """R82."""
    pack(archive, tmp_path / "m.zcr.zst", threads=threads)
    assert (tmp_path / "m.zcr.zst").read_bytes() == packed() == streamed(encoded(), threads=threads)
    unpack(tmp_path / "m.zcr.zst", tmp_path / "back.zcr", threads=threads)
    assert (tmp_path / "back.zcr").read_bytes() == encoded()


def test_frames_of_other_programs_may_be_too_large_to_hold_several(tmp_path: Path) -> None:
    data = r.saved({"w": np.zeros(40 * MIB // 8)})
    (tmp_path / "m.zcr.zst").write_bytes(tabled([data[:100], data[100:]]))
    unpack(tmp_path / "m.zcr.zst", tmp_path / "back.zcr")
    assert (tmp_path / "back.zcr").read_bytes() == data


@pytest.mark.exhaustive(keep=2)
@HOW
def test_the_table_says_what_the_frames_are(way: str) -> None:
    """R81, R83."""
    for output in (packed(way), streamed(encoded(way))):
        for frame in frames_of(output):
            data = output[frame.offset : frame.offset + frame.nbytes]
            parameters = zstandard.get_frame_parameters(data)
            assert (parameters.content_size, parameters.has_checksum, parameters.dict_id) == (frame.size, True, 0)
            out = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
            assert out == encoded(way)[frame.start : frame.start + frame.size]
            assert int.from_bytes(data[-4:], "little") == frame.checksum


@HOW
def test_frames_begin_at_payloads_and_part_them_from_header_index_and_trailer(way: str) -> None:
    """R82."""
    record, result = zcrecord.load_record(encoded(way)), frames_of(packed(way))
    header, size = record.archive.header, len(encoded(way))
    begin = (np.unique(record.archive.index.payloads["offset"]).astype(int) + header.payload_offset).tolist()
    end = size - 64 if header.front else header.index_offset
    starts = [frame.start for frame in result]
    assert [s for s in starts if s < begin[0]] == [0]
    assert [s for s in starts if s >= end] == [end]
    cut = {start: [s for s in starts if start <= s < after] for start, after in pairwise([*begin, end])}
    large = {start for start, after in pairwise([*begin, end]) if after - start >= MIB}
    of_large = {s for start in large for s in cut[start]}
    for start, after in pairwise([*begin, end]):
        inside = cut[start]
        if start in large:
            assert inside == list(range(start, start + 4 * MIB * len(inside), 4 * MIB))
            assert after - inside[-1] <= 6 * MIB
            assert len(inside) == 1 or after - inside[-1] >= 2 * MIB
        elif inside:
            assert inside == [start], "a payload of less than 1 MiB is cut"
            before = result[starts.index(start) - 1]
            assert before.start < begin[0] or before.start in of_large or (before.size + after - start > MIB), (
                "it has a frame of its own, and there was room in the one before"
            )
    assert sum(len(cut[start]) for start in begin if start not in large) < len(begin) / 4


def test_an_archive_whose_index_comes_last_is_cut_evenly_as_it_comes() -> None:
    """R82."""
    unsealed = frames_of(streamed(encoded("unsealed")))
    assert [f.start for f in unsealed] == [0, *range(64, len(encoded("unsealed")), 4 * MIB)]
    sealed, header = frames_of(streamed(encoded("sealed"))), zcrecord.load_record(encoded("sealed")).archive.header
    assert {f.start for f in sealed} == {0, *range(header.payload_offset, header.index_offset, 4 * MIB),
                                         header.index_offset}  # fmt: skip


@pytest.mark.slow
def test_a_long_index_is_cut_too() -> None:
    data = r.saved({f"module.{i}.{'x' * 200}.weight": np.zeros(0) for i in range(50_000)})
    frames = frames_of(streamed(data))
    assert zcrecord.load_record(data).archive.header.index_size > 10 * MIB
    assert [f.start for f in frames[:2]] == [0, 4 * MIB]
    assert max(f.size for f in frames) <= 6 * MIB
    assert decompressed(streamed(data)) == data


@pytest.mark.slow
@HOW
def test_progress_counts_the_archive_s_bytes(way: str, tmp_path: Path) -> None:
    source, size = tmp_path / "m.zcr", len(encoded(way))
    source.write_bytes(encoded(way))
    there = tmp_path / "m.zcr.zst"
    streamed_total = None if way == "unsealed" else size
    works: list[tuple[Any, Any, Any, int | None]] = [
        (pack, source, there, size),
        (unpack, there, io.BytesIO(), size),
        (pack, OneWay(encoded(way)), io.BytesIO(), streamed_total),
        (unpack, OneWay(packed(way)), io.BytesIO(), None),
    ]
    for work, origin, dest, total in works:
        reports: list[tuple[int, int | None]] = []
        work(origin, dest, progress=lambda *now, reports=reports: reports.append(now))
        done = [d for d, _ in reports]
        assert done == sorted(done) and done[-1] == size and len(done) > 4
        assert {t for _, t in reports} == {total}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04" + bytes(200), "this is a zip file"),
        (encoded()[:-1], "truncated"),
        (encoded("unsealed")[:-1], "trailer: its magic is missing"),
        (encoded()[:100], "truncated"),
        (encoded() + b"more", "followed by other"),
        (encoded()[:90] + b"\xff" + encoded()[91:], "index: its CRC does not match"),
        (packed(), "this is a zstd stream"),
    ],
    ids=["empty", "zip", "short", "unsealed", "index", "long", "damaged", "packed"],
)
def test_only_whole_archives_are_packed(data: bytes, message: str, path: Path, tmp_path_factory: Any) -> None:
    source = tmp_path_factory.mktemp("source") / "s.zcr"
    source.write_bytes(data)
    for given in (source, OneWay(data)):
        with pytest.raises(FormatError, match=message) as caught:
            pack(given, path, force=True)
        assert caught.value.path == (str(source) if given is source else None)


def test_a_damaged_index_at_the_end_of_a_sealed_stream_is_noticed(path: Path) -> None:
    data = bytearray(encoded("sealed"))
    data[-100] ^= 1
    with pytest.raises(FormatError, match="index: its CRC does not match"):
        pack(OneWay(bytes(data)), path, force=True)


def test_a_source_that_changes_while_it_is_packed_is_noticed(path: Path, tmp_path_factory: Any) -> None:
    source = tmp_path_factory.mktemp("source") / "s.zcr"
    source.write_bytes(encoded())
    with pytest.raises(SourceError, match=r"s\.zcr: was changed or replaced while it was packed; pack it again"):
        pack(source, path, force=True, progress=lambda *_: os.utime(source, ns=(1, 1)))
    with pytest.raises(SourceError, match=r"s\.zcr: became shorter while it was read: it ends at byte \d+"):
        pack(source, path, force=True, threads=1, progress=lambda *_: os.truncate(source, 100_000))


@POSIX
def test_a_file_replaced_while_it_is_unpacked_is_read_to_its_end(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, other, out = tmp_path / "m.zcr.zst", tmp_path / "other", io.BytesIO()
    pack(archive, there)
    other.write_bytes(b"other")

    def read_table(*args: Any) -> Any:
        os.replace(other, there)
        return frames.read_table(*args)

    monkeypatch.setattr(unpacker, "read_table", read_table)
    unpack(there, out)
    assert out.getvalue() == archive.read_bytes()


def test_nothing_is_replaced_unasked(archive: Path, tmp_path: Path) -> None:
    there = tmp_path / "m.zcr.zst"
    pack(archive, there)
    for work, source, dest in ((pack, archive, there), (unpack, there, archive)):
        with pytest.raises(DestinationExistsError, match="exists already"):
            work(source, dest)
        with pytest.raises(DestinationExistsError, match="source and destination are the same file"):
            work(source, source, force=True)


@pytest.mark.parametrize("level", [0, 23, "3"])
def test_an_unknown_level_is_refused(level: Any, path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"level=.* is not a number from 1 to 22"):
        pack(io.BytesIO(encoded()), path, level=level, force=True)


def test_an_impossible_number_of_threads_is_refused() -> None:
    for work, data in ((pack, encoded()), (unpack, packed())):
        with pytest.raises(UnsupportedError, match="threads=0: expected a number of at least 1"):
            work(io.BytesIO(data), io.BytesIO(), threads=0)


def test_what_is_neither_path_nor_binary_file_is_refused(tmp_path: Path) -> None:
    for work in (pack, unpack):
        with pytest.raises(UnsupportedError, match="is neither a path nor a binary file object"):
            work(5, tmp_path / "m")
        with pytest.raises(UnsupportedError, match="text mode"):
            work(io.StringIO(), tmp_path / "m")
        with pytest.raises(SourceNotFoundError, match="missing: cannot read: No such file"):
            work(tmp_path / "missing", tmp_path / "m")
    assert not os.listdir(tmp_path)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for work, data in ((pack, encoded()), (unpack, packed())):
        with pytest.raises(DependencyError, match=r"zstandard is not installed; pip install zstandard, .*'\.\[zstd\]'"):
            work(io.BytesIO(data), io.BytesIO())
    with pytest.raises(DependencyError, match="zstandard is not installed"):
        zcrecord.load_record(packed())


SETUP = """
import io
from zcrecord.transport import pack, unpack

class Nowhere(io.RawIOBase):
    def writable(self):
        return True
    def write(self, data):
        return len(data)

small, archive, packed = sys.argv[1:4]
once = lambda path: type("Once", (), {"read": open(path, "rb").read})()
pack(small, Nowhere(), threads=2)
"""


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@LINUX
def test_packing_and_unpacking_hold_some_frames_and_the_measurement_would_notice(tmp_path: Path) -> None:
    small, archive, there = tmp_path / "small.zcr", tmp_path / "m.zcr", tmp_path / "m.zcr.zst"
    zcrecord.save_record({"w": np.ones(100)}, small)
    zcrecord.save_record({f"w{i}": weights(16 * MIB, i) for i in range(10)}, archive, durable=False)
    pack(archive, there, durable=False)

    def peak(work: str) -> int:
        return growth(SETUP, work, small, archive, there)[1]

    assert peak("held = open(archive, 'rb').read()") > 150 * MIB
    works = (
        "pack(archive, Nowhere(), threads=2)",
        "pack(once(archive), Nowhere(), threads=2)",
        "unpack(packed, Nowhere(), threads=2)",
        "unpack(once(packed), Nowhere(), threads=2)",
    )
    for work in some(works, 2):
        assert peak(work) < 64 * MIB, work
    archive.unlink()  # pytest keeps the folders of three runs
