"""Damaged packed archives: out comes the same record or a RecordError; nothing in the table is believed unchecked."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import records as r
import zstandard
from exhaustive import rounds, some
from other_processors import COUNTS_MEMORY
from packed_archives import GOLDEN, MIB, frames_of, packed, tabled, weights
from packed_faults import BIG, END, ROWS, SMALL, TABLED, WRONG, resealed

import zcrecord
from zcrecord import FormatError, IntegrityError, LimitError, RecordError, formats
from zcrecord.transport import unpack

WAYS: dict[str, Callable[[bytes], bytes]] = {}


def way(work: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Register something that gives back an archive, or a part of it, as bytes that can be compared."""
    WAYS[work.__name__] = work
    return work


def unpacked(data: bytes) -> bytes:
    out = io.BytesIO()
    unpack(io.BytesIO(data), out)
    return out.getvalue()


@way
def loaded(data: bytes) -> bytes:
    return bytes(zcrecord.load_record(data).archive.buffer)


@way
def touched(data: bytes) -> bytes:
    return bytes(zcrecord.load_record(data, verify="touch").archive.buffer)


@way
def in_part(data: bytes) -> bytes:
    part = zcrecord.load_record(data, names=["deep"])
    assert part.names == ("deep.0.v",)
    assert part.attributes == {"deep.0.n": 5, "deep.0.b": b"blob" * 20}
    return SMALL if part["deep.0.v"].tolist() == [1, 1, 1] else b""


@way
def through_a_pipe(data: bytes) -> bytes:
    return unpacked(data)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed") / "m.zcr.zst"


def out_of_a_file(path: Path, data: bytes) -> bytes:
    path.write_bytes(data)
    out = io.BytesIO()
    unpack(path, out, threads=1)
    return out.getvalue()


def refused_or_right(work: Callable[[bytes], bytes], data: bytes) -> bool:
    """Return True if it is refused; otherwise the result must be right."""
    try:
        assert work(data) == SMALL
    except RecordError as error:
        assert str(error)
        return True
    return False


def changed(data: bytes) -> Iterator[bytes]:
    """Yield these bytes with each of them changed, once by a bit and once by all."""
    for at in some(range(len(data)), 60):
        for mask in (1 << at % 8, 0xFF):
            yield data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("tabled_one", [True, False])
def test_every_truncation_is_refused_or_harmless(name: str, tabled_one: bool) -> None:
    """R83, R85."""
    data = TABLED if tabled_one else zstandard.ZstdCompressor(write_checksum=True).compress(SMALL)
    sizes = some(range(len(data)), 60)
    refused = [refused_or_right(WAYS[name], data[:size]) for size in sizes]
    assert all(refused[: len(sizes) * 2 // 3]), "what holds too little was taken"


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("tabled_one", [True, False])
def test_every_changed_byte_is_refused_or_harmless(name: str, tabled_one: bool) -> None:
    """R83, R84."""
    data = TABLED if tabled_one else zstandard.ZstdCompressor(write_checksum=True).compress(SMALL)
    refused = [refused_or_right(WAYS[name], other) for other in changed(data)]
    assert sum(refused) > len(refused) / 2


def test_random_damage_to_many_frames_is_refused_or_harmless(file: Path) -> None:
    """R83, R84."""
    dice = random.Random(1)
    data = tabled([SMALL[i : i + 50] for i in range(0, len(SMALL), 50)], write_checksum=False)
    assert loaded(data) == SMALL
    for _ in range(rounds(1500)):
        other = bytearray(data)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(other))
            other[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 5))
        for work in WAYS.values():
            refused_or_right(work, bytes(other)) if work is not through_a_pipe else plain_zstd(bytes(other))
        refused_or_right(lambda d: out_of_a_file(file, d), bytes(other))


def plain_zstd(data: bytes) -> None:
    """In one pass only the frames' own checksums can be checked, and here they have none."""
    try:
        unpacked(data)
    except RecordError as error:
        assert str(error)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=COUNTS_MEMORY if case == "terabytes" else ()) for case in WRONG]
)
def test_what_the_table_says_is_checked(case: str, tmp_path: Path) -> None:
    """R83, R84."""
    data, kind, message = WRONG[case]
    (tmp_path / "m.zcr.zst").write_bytes(data)
    for source in (data, tmp_path / "m.zcr.zst"):
        with pytest.raises(kind, match=message) as caught:
            zcrecord.load_record(source)
        assert caught.value.path == (None if source is data else str(source))
    with pytest.raises(RecordError):
        zcrecord.load_record(data, names="w")
    if case != "terabytes":
        with pytest.raises(kind, match=message.partition("|")[0]):
            unpack(tmp_path / "m.zcr.zst", io.BytesIO())


def test_a_part_of_terabytes_that_are_not_there_is_refused() -> None:
    rows = [ROWS[0], *[(0, BIG, 0)] * 100_000, *ROWS[1:]]
    with pytest.raises(LimitError, match=r"no room in memory for \d+ bytes"):
        zcrecord.load_record(resealed(rows), names="w")


def test_a_frame_without_its_size_is_held_to_the_table_s() -> None:
    """R84."""
    parts = [SMALL[:200], SMALL[200:]]
    stream = tabled(parts, write_content_size=False)
    assert loaded(stream) == SMALL
    frames = [zstandard.ZstdCompressor(write_content_size=False).compress(part) for part in parts]
    for more, message in ((1, r"ends after \d+ of \d+ bytes"), (-1, r"holds more than the \d+ bytes")):
        rows = b"".join(struct.pack("<II", len(f), len(p)) for f, p in zip(frames, parts, strict=True))
        first = struct.pack("<II", len(frames[0]), len(parts[0]) + more)
        body = first + rows[8:] + struct.pack("<IBI", 2, 0, 0x8F92EAB1)
        data = b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(body)) + body
        with pytest.raises(FormatError, match=message):
            zcrecord.load_record(data)


def test_checksums_of_the_table_are_compared_where_frames_have_none() -> None:
    """R84."""
    data = bytearray(tabled([SMALL[:200], SMALL[200:]], write_checksum=False))
    data[-13] ^= 1
    with pytest.raises(IntegrityError, match="its checksum is not that of the seek table"):
        zcrecord.load_record(bytes(data))


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("damage", range(1, 40, 7))
def test_a_damaged_payload_is_found_by_its_frame(damage: int, tmp_path: Path) -> None:
    frame = max(frames_of(packed()), key=lambda f: f.size)
    at = frame.offset + frame.nbytes * damage // 40
    data = packed()[:at] + bytes([packed()[at] ^ 0x10]) + packed()[at + 1 :]
    (tmp_path / "m.zcr.zst").write_bytes(data)
    where = rf"frame \[{frame.offset:#x}, {frame.offset + frame.nbytes:#x}\): "
    for work in (zcrecord.load_record, lambda path: unpack(path, io.BytesIO())):
        with pytest.raises(FormatError, match=where) as caught:
            work(tmp_path / "m.zcr.zst")
        assert caught.value.offset == frame.offset
    with pytest.raises(FormatError, match="zstd stream is truncated or damaged"):
        unpack(io.BytesIO(data), io.BytesIO())


INSIDE: dict[str, tuple[bytes, str]] = {
    "a text": (b"# A model\n" * 30, "this is a text file, not a zcrecord archive"),
    "nothing": (b"", "0 bytes come out of this zstd file, too few for an archive"),
    "a few bytes": (SMALL[:60], "60 bytes come out of this zstd file, too few for an archive"),
    "half an archive": (SMALL[:-200], "truncated"),
    "more than an archive": (SMALL + b"more", "holds more than the archive's|trailer|followed by other bytes"),
    "two archives": (SMALL + SMALL, "holds more than the archive's|trailer|followed by other bytes"),
    "a damaged index": (SMALL[:90] + b"\xff" + SMALL[91:], "index: its CRC does not match"),
    "half, header unsealed": (GOLDEN["back_unsealed"][:-200], "trailer: its magic is missing"),
    "packed twice": (TABLED, "this is a zstd stream, not a zcrecord archive|seek table: its frames"),
}


@pytest.mark.parametrize("case", INSIDE)
@pytest.mark.parametrize("tabled_one", [True, False])
def test_what_is_no_archive_is_neither_loaded_nor_unpacked(case: str, tabled_one: bool, path: Path) -> None:
    inside, message = INSIDE[case]
    data = tabled([inside]) if tabled_one else zstandard.ZstdCompressor().compress(inside)
    if not tabled_one or not message.startswith(("0", "6")):
        with pytest.raises(FormatError, match=message):
            zcrecord.load_record(data)
    with pytest.raises(FormatError):
        zcrecord.load_record(data, names="w")
    with pytest.raises(FormatError):
        zcrecord.load_record(data, verify="touch")
    with pytest.raises(FormatError):
        unpack(io.BytesIO(data), path, force=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SMALL, "this is a zcrecord archive, not a packed archive"),
        (b"PK\x03\x04" + bytes(100), "this is a zip file .*, not a packed archive"),
        (bytes(200), "not a packed archive: it does not begin with a zstd frame"),
        (b"", "the file is empty"),
        (b"\x28\xb5\x2f\xfd", "too few|truncated"),
    ],
    ids=["archive", "zip", "zeros", "empty", "magic"],
)
def test_what_is_not_packed_is_not_unpacked(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(data)
    for source in (tmp_path / "s", io.BytesIO(data)):
        with pytest.raises(FormatError, match=message):
            unpack(source, tmp_path / "m.zcr")
    assert not (tmp_path / "m.zcr").exists()


def test_a_window_larger_than_zstd_s_own_limit_is_refused(tmp_path: Path) -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=0, compression_level=1)
    data = r.saved({"w": weights(4 * MIB)})
    stream = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    frame = stream.compress(data) + stream.flush()
    with pytest.raises(LimitError, match="its window is larger than 128 MiB; decompress it with zstd --long"):
        zcrecord.load_record(frame)
    rows = struct.pack("<II", len(frame), len(data)) + struct.pack("<IBI", 1, 0, 0x8F92EAB1)
    with pytest.raises(LimitError, match="its window is larger than 128 MiB"):
        zcrecord.load_record(frame + struct.pack("<II", 0x184D2A5E, len(rows)) + rows)


def test_the_error_is_that_of_the_first_damaged_frame_however_many_threads_there_are(tmp_path: Path) -> None:
    data = bytearray(packed())
    hurt = [f for f in frames_of(packed()) if f.size > 100_000]
    for frame in hurt:
        data[frame.offset + frame.nbytes // 2] ^= 0x55
    said = set()
    for _ in range(5):
        with pytest.raises(RecordError, match=rf"frame \[{hurt[0].offset:#x}, ") as caught:
            zcrecord.load_record(bytes(data))
        said.add(str(caught.value))
    assert len(said) == 1


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False], ids=["path", "stream"])
def test_what_expands_out_of_all_proportion_is_not_converted(named: bool, tmp_path: Path) -> None:
    bomb = tmp_path / "m.zcr.zst"
    bomb.write_bytes(zstandard.compress(SMALL + bytes(128 * MIB)))
    with pytest.raises(LimitError, match=r"packed bytes would take .* bytes of memory; unpack it into a file"):
        formats.convert(bomb if named else io.BytesIO(bomb.read_bytes()), tmp_path / "m.safetensors")


def test_an_archive_whose_table_is_lost_still_loads() -> None:
    """R85."""
    assert loaded(TABLED[:-30] + bytes(30)) == loaded(TABLED[:END]) == SMALL
