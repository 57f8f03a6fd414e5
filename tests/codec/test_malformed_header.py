"""Header and trailer: what they may say, that they agree, and that what they say is there. At every level, at open."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from forge import Forge, build_index
from malformed import LEVELS, Case, cases, plain, refused, saved
from malformed_header import BACK, FRONT, UNSEALED

import zcrecord
from zcrecord import FormatError, IntegrityError
from zcrecord.archive.archive import Verify


def refuse_at_every_level(case: Case, archive: Forge) -> None:
    case.change(archive)
    data = archive.seal()
    for level in LEVELS:
        refused(case, partial(zcrecord.load_record, data, verify=level))


@cases(FRONT)
def test_refuses_front_indexed_archive_whose_ends_are_wrong(case: Case) -> None:
    refuse_at_every_level(case, plain())


@cases(BACK)
def test_refuses_back_indexed_archive_whose_ends_are_wrong(case: Case) -> None:
    refuse_at_every_level(case, plain(front=False))


@cases(UNSEALED)
def test_refuses_unsealed_archive_whose_ends_are_wrong(case: Case) -> None:
    refuse_at_every_level(case, plain(front=False, sealed=False))


def test_accepts_what_the_cases_start_from() -> None:
    for archive in (plain(), plain(front=False), plain(sealed=False), plain(front=False, sealed=False)):
        data = archive.seal()
        assert len({zcrecord.load_record(data, verify=level).content_digest() for level in LEVELS}) == 1


@pytest.mark.parametrize("front", [True, False], ids=["front", "back"])
@pytest.mark.parametrize("alignment", [16, 32, 4096, 65536])
def test_accepts_every_alignment(alignment: int, front: bool) -> None:
    """R4, R5, R11, R12."""
    for record in ({"w": np.ones(3), "v": np.ones(5)}, {"n": 1}):
        data = Forge(saved(record, alignment=alignment), front=front).seal()
        assert (
            zcrecord.load_record(data, verify="full").content_digest()
            == zcrecord.load_record(saved(record)).content_digest()
        )


def test_gap_behind_a_front_index_may_be_nothing_and_is_less_than_the_base_alignment() -> None:
    """R12."""
    archive = plain()
    while len(build_index(archive.columns)) % 64:
        archive.text(b"1234567")
    zcrecord.load_record(archive.seal())
    archive.widen = 64
    with pytest.raises(FormatError, match=r"^header: 64 bytes between index and payloads, at most 63$"):
        zcrecord.load_record(archive.seal())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 127])
def test_refuses_fewer_bytes_than_two_ends_take(size: int, level: Verify) -> None:
    """R1."""
    start = plain().seal()[:size]
    short = {0: "^the file is empty$", 1: "^not a zcrecord archive", 7: "^the magic is damaged"}  # of what is there
    message = short.get(size, f"^{size} bytes are too few for an archive .*; the file is truncated$")
    with pytest.raises(FormatError, match=message):
        zcrecord.load_record(start, verify=level)


def test_prefix_needs_a_sealed_header() -> None:
    """R15."""
    data = plain(front=False, sealed=False).seal()
    with pytest.raises(FormatError, match=r"^header: not sealed, so its size is not known; open the whole file"):
        zcrecord.load_record(data + b"more", embedded="prefix")


def test_prefix_refuses_an_archive_that_is_cut_off() -> None:
    """R15."""
    data = plain().seal()
    with pytest.raises(FormatError, match=rf"^the archive has {len(data)} bytes, only {len(data) - 1} are there"):
        zcrecord.load_record(data[:-1], embedded="prefix")


def test_prefix_checks_header_and_trailer_as_a_whole_file_does() -> None:
    """R8, R15."""
    archive = plain()
    archive.header["index_crc"] = 1
    with pytest.raises(FormatError, match=r"^header and trailer differ; "):
        zcrecord.load_record(archive.seal() + bytes(64), embedded="prefix")


def test_suffix_refuses_what_does_not_end_in_a_trailer() -> None:
    """R16."""
    data = plain().seal()
    with pytest.raises(FormatError, match=r"^trailer: its magic is missing"):
        zcrecord.load_record(b"before" + data + b"after", embedded="suffix")
    with pytest.raises(FormatError, match=r"^trailer: no archive of a size up to \d+ ends here"):
        zcrecord.load_record(b"before" * 20 + plain(front=False, sealed=False).seal()[:64], embedded="suffix")


@pytest.mark.parametrize("lost", [1, 64, 128])
def test_suffix_refuses_an_archive_whose_start_is_gone(lost: int) -> None:
    """R16."""
    with pytest.raises(FormatError, match=r"^trailer: no archive of a size up to \d+ ends here"):
        zcrecord.load_record(plain().seal()[lost:], embedded="suffix")


def test_suffix_checks_header_and_trailer_as_a_whole_file_does() -> None:
    """R3, R16."""
    archive = plain()
    archive.header["crc"] = 1
    with pytest.raises(IntegrityError, match=r"^header: its CRC does not match"):
        zcrecord.load_record(b"before" + archive.seal(), embedded="suffix")


def test_error_names_the_file(tmp_path: Path) -> None:
    archive = plain()
    archive.ends["zero8"] = 1
    path = tmp_path / "model.zcr"
    path.write_bytes(archive.seal())
    with pytest.raises(FormatError, match=f"^{re.escape(str(path))}: header: reserved bytes") as caught:
        zcrecord.load_record(path)
    assert caught.value.path == str(path)
