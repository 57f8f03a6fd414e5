"""A packed archive is one archive: by its seek table and from front to back, whole, in part, by URL and by any zstd."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import zstandard
from exhaustive import rounds
from packed_archives import FORMS, OneWay
from packed_faults import (
    AT,
    HONEST,
    OTHER,
    SIZE,
    WAYS,
    WEIGHTS,
    Entry,
    Piece,
    entry,
    file_of,
    forged,
    frame,
    honest,
    in_a_skippable_frame,
    skipped,
)

import zcrecord
from tools.range_server import Server, serving
from zcrecord import FormatError, RecordError, formats
from zcrecord.codec.layout import HEADER_SIZE, decode_header
from zcrecord.transport import unpack

DIGEST = zcrecord.load_record(HONEST).content_digest()


# Readers: each returns the bytes of `w`, as it reads them.


def weights(record: zcrecord.Record) -> bytes:
    return bytes(record["w"].tobytes())


def whole(path: Path) -> bytes:
    return weights(zcrecord.load_record(path))


def of_bytes(path: Path) -> bytes:
    return weights(zcrecord.load_record(path.read_bytes(), verify="touch"))


def part(path: Path) -> bytes:
    """Read a part that needs every frame: of others a reader of parts checks nothing (R84)."""
    return weights(zcrecord.load_record(path, names="*"))


def unpacked(path: Path) -> bytes:
    out = io.BytesIO()
    unpack(path, out)
    return weights(zcrecord.load_record(out.getvalue()))


def unpacked_from_a_pipe(path: Path) -> bytes:
    out = io.BytesIO()
    unpack(OneWay(path.read_bytes()), out)
    return weights(zcrecord.load_record(out.getvalue()))


def converted_from_a_pipe(path: Path) -> bytes:
    out = io.BytesIO()
    formats.convert(OneWay(path.read_bytes()), out)
    return weights(zcrecord.load_record(out.getvalue()))


def by_zstd(path: Path) -> bytes:
    """Read the archive that any zstd makes of it."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True) as reader:
            return weights(zcrecord.load_record(b"".join(iter(lambda: reader.read(1000), b""))))
    except zstandard.ZstdError:
        raise FormatError("zstd refuses it") from None


READERS = [whole, of_bytes, part, unpacked, unpacked_from_a_pipe, converted_from_a_pipe, by_zstd]


def answers(path: Path) -> dict[str, bytes | None]:
    """Return the weights that each reader finds in a file, None where it refuses."""
    out: dict[str, bytes | None] = dict.fromkeys(reader.__name__ for reader in READERS)
    for reader in READERS:
        with suppress(RecordError):
            out[reader.__name__] = reader(path)
    return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.zcr.zst"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


def test_the_two_archives_differ_in_no_digest_of_64_bits() -> None:
    assert zcrecord.load_record(OTHER, verify="full").content_digest() != DIGEST


def test_header_index_tensors_and_trailer_leave_no_byte_that_a_part_does_not_need() -> None:
    h = decode_header(HONEST[:HEADER_SIZE])
    assert h is not None
    assert h.index_offset + h.index_size == h.payload_offset == AT - 128
    assert len(HONEST) - HEADER_SIZE == AT + SIZE


def test_a_part_is_checked_by_the_frames_that_it_needs(path: Path) -> None:
    """R84."""
    lie = in_a_skippable_frame(HONEST[AT - 128 : AT], OTHER[AT - 128 : AT])
    path.write_bytes(file_of(honest(HONEST[: AT - 128]), lie, honest(HONEST[AT:])))
    assert weights(zcrecord.load_record(path, names="w")) == WEIGHTS
    for reader in (whole, part, unpacked):
        with pytest.raises(FormatError, match="is not one zstd frame"):
            reader(path)


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_table_that_leads_to_other_bytes_than_the_frames_hold_is_refused(
    way: Callable[[bytes, bytes], Piece], checksums: bool, path: Path
) -> None:
    """R84."""
    path.write_bytes(forged(way, checksums))
    for reader in (whole, of_bytes, part, unpacked):
        with pytest.raises(FormatError, match=r"frame \[.*(is not one zstd frame|holds)"):
            reader(path)
    assert WEIGHTS not in answers(path).values()


def test_a_remote_archive_has_its_content_digest_only_if_every_frame_is_right(path: Path, server: Server) -> None:
    """R84, of a frame that holds nothing but zeros in front of the first payload, and of one that holds nothing."""
    values = np.arange(50_000, dtype=np.uint32)  # more than is fetched between two ranges that are asked for
    data = r.saved({"w": values}, alignment=2 * SIZE)
    digest, offset = zcrecord.load_record(data).content_digest(), data.index(values.tobytes())
    first, last = (
        [honest(data[: offset - SIZE])],
        [honest(data[offset : offset + values.nbytes]), honest(data[offset + values.nbytes :])],
    )
    url = f"{server.url}/{path.name}"

    def load(*gap: Piece, **how: Any) -> zcrecord.Record:
        path.write_bytes(file_of(*first, *gap, *last))
        record: zcrecord.Record = zcrecord.load_record(url, cache=False, **how)
        return record

    zeros, longer = frame(bytes(SIZE)), frame(bytes(SIZE) + b"more")
    assert load(honest(bytes(SIZE)), honest(b""), expect=digest)["w"][5] == 5
    for wrong in (
        [(longer, [entry(longer, bytes(SIZE))])],
        [honest(bytes(SIZE)), (b"", [entry(0, b"")])],
        [(zeros + frame(b"more"), [entry(zeros, bytes(SIZE)), entry(frame(b"more"), b"")])],
    ):
        for how in ({"expect": digest}, {"verify": "full"}):
            with pytest.raises(FormatError, match=r"frame \[.*(holds|is not one)"):
                load(*wrong, **how)


def beyond(window: int, dice: random.Random) -> tuple[bytes, list[Piece]]:
    """Return weights, and frames of their archive, of which one has a reference to further back than its window."""
    length = window * dice.randint(4, 9)
    distance, size = window * dice.randint(10, 35) // 10, dice.randint(20, 300)
    values = np.random.default_rng(length).integers(0, 255, length, np.uint8)
    offset = dice.randint(distance, length - size)
    values[offset : offset + size] = values[offset - distance : offset + size - distance]
    data, reports = r.saved({"w": values}, digest="none"), values.tobytes()  # or some readers refuse what is not right
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=21)
    stream, output = zstandard.ZstdCompressor(compression_params=settings).compressobj(size=length), bytearray()
    for offset in range(0, length, window - 24):  # a block is no larger than the window
        output += stream.compress(reports[offset : offset + window - 24]) + stream.flush(
            zstandard.COMPRESSOBJ_FLUSH_BLOCK
        )
    output += stream.flush()
    assert output[4] & 0x20, "it has no window of its own, which is put in here"
    output[4] ^= 0x20
    output.insert(5, (window.bit_length() - 11) << 3)
    offset = data.index(reports)
    return reports, [
        honest(data[:offset]),
        (bytes(output), [entry(len(output), reports)]),
        honest(data[offset + length :]),
    ]


@pytest.mark.parametrize("tabled_one", [True, False])
def test_references_beyond_a_frame_s_window_mean_the_same_to_all(tabled_one: bool, path: Path) -> None:
    """R84. zstd finds there what was, or what replaced it, by how its input is cut and by the room of its output."""
    dice, reports = random.Random(1), set()
    for window in [1 << 10] * 30 + [1 << 17] * 10:
        right, pieces = beyond(window, dice)
        path.write_bytes(file_of(*pieces, checksums=False) if tabled_one else b"".join(data for data, _ in pieces))
        result = answers(path)
        del result["by_zstd"]  # it answers by chance
        assert len(set(result.values())) == 1, [value and hash(value) for value in result.values()]
        reports.add(result["whole"] and result["whole"] == right)
    assert reports != {None}, "all were refused"


WITHOUT_A_TABLE: dict[str, Callable[[bytes], bytes]] = {
    "bytes behind the table": lambda data: file_of(honest(data), behind=skipped(b"more")),
    "skippable bytes in front": lambda data: skipped(b"first") + frame(data),
}


@pytest.mark.parametrize("form", [*FORMS, *WITHOUT_A_TABLE])
def test_frames_of_any_program_that_tell_the_truth_are_read_alike(form: str, path: Path) -> None:
    """R85."""
    path.write_bytes({**FORMS, **WITHOUT_A_TABLE}[form](HONEST))
    assert set(answers(path).values()) == {WEIGHTS}


def declaring(size: int, *blocks: bytes) -> bytes:
    return b"\x28\xb5\x2f\xfd\xa0" + size.to_bytes(4, "little") + b"".join(blocks)


def block(content: bytes, last: bool = False) -> bytes:
    return (len(content) << 3 | last).to_bytes(3, "little") + content


@pytest.mark.parametrize("size", [5, 100_000])
@pytest.mark.parametrize("place", ["behind", "in front", "between"])
def test_a_frame_that_declares_more_than_it_holds_is_refused_though_its_last_block_is_empty(
    size: int, place: str, path: Path
) -> None:
    """R85. zstd, as a stream, does not compare the sizes then."""
    lie = declaring(size, block(b"", last=True))
    cut = {"behind": len(HONEST), "in front": 0, "between": AT}[place]
    parts = [frame(part) if part else b"" for part in (HONEST[:cut], HONEST[cut:])]
    path.write_bytes(lie.join(parts))
    result = answers(path)
    del result["by_zstd"]  # it answers by what is there at once
    assert set(result.values()) == {None}
    path.write_bytes(declaring(len(HONEST) + size, block(HONEST), block(b"", last=True)))
    with pytest.raises(FormatError, match="corruption"):
        whole(path)


def test_frames_whose_last_block_is_empty_are_read_alike(path: Path) -> None:
    """R85."""
    ended = declaring(len(HONEST), block(HONEST), block(b"", last=True))
    nothing = [frame(b"", write_checksum=True), frame(b""), declaring(0, block(b"", last=True))]
    for data in (ended, b"".join([*nothing, ended, *nothing])):
        path.write_bytes(data)
        assert set(answers(path).values()) == {WEIGHTS}


def files(dice: random.Random) -> bytes:
    """Return a file of frames of either archive, shown, hidden, cut and empty, under a table that fits or does not."""
    pieces: list[Piece] = []
    cuts = sorted(dice.sample(range(1, len(HONEST)), dice.randint(0, 4)) + [AT] * dice.randint(0, 1))
    for lo, hi in zip([0, *cuts], [*cuts, len(HONEST)], strict=True):
        reports, result = HONEST[lo:hi], OTHER[lo:hi]
        options = {name: dice.random() < 0.7 for name in ("write_checksum", "write_content_size")}
        if dice.random() < 0.4:
            pieces.append(dice.choice(WAYS)(reports, dice.choice([result, reports, result + b"\0", result[1:]])))
        else:
            pieces.append(honest(dice.choice([reports, result]), **options))
        if dice.random() < 0.2:
            extra = dice.choice(
                [skipped(frame(reports)), skipped(b""), frame(b""), frame(b"", write_checksum=True), b"\0"]
            )
            pieces.append((extra, [entry(extra, b"")] if dice.random() < 0.8 else []))
    if dice.random() < 0.3:
        i = dice.randrange(len(pieces))
        pieces[i] = pieces[i][0], damaged(pieces[i][1], dice)
    return file_of(*pieces, checksums=dice.random() < 0.5, behind=b"" if dice.random() < 0.95 else skipped(b"x"))


def damaged(rows: list[Entry], dice: random.Random) -> list[Entry]:
    """Return entries with a boundary moved, or one split or joined with the next."""
    if len(rows) < 2:
        return [(rows[0][0], 0, 0), (0, *rows[0][1:])] if rows and dice.random() < 0.5 else rows
    (a, b, c), (d, e, f), *rest = rows
    move = min(dice.choice([1, 4, 8, -1, -4, -8]), d) if a >= 8 else 0
    return [*dice.choice([[(a + move, b, c), (d - move, e, f)], [(a + d, b + e, f)], [(a + d, e, f)]]), *rest]


@pytest.mark.slow
def test_readers_that_take_a_file_take_the_same_archive_from_it(path: Path) -> None:
    """R83, R84, R85."""
    dice = random.Random(0)
    accepted = 0
    for _ in range(rounds(300)):
        path.write_bytes(files(dice))
        result = answers(path)
        assert len({data for data in result.values() if data is not None}) <= 1, result.keys()
        accepted += any(result.values())
    assert accepted > 5
