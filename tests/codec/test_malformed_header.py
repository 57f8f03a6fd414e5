"""Header and trailer: what they may say, that they agree, and that what they say is there. At every level, at open."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from malformed import LEVELS, Case, broken, cases, compact, plain, refused, rich, sequence
from malformed_header import BACK, FRONT, UNSEALED

import zcrecord
from zcrecord import FormatError


@cases([*FRONT, *BACK, *UNSEALED])
def test_refuses_archive_whose_ends_are_wrong(case: Case) -> None:
    data = broken(case, plain(front=case in FRONT, sealed=case not in UNSEALED))
    for level in LEVELS:
        refused(case, partial(zcrecord.load_record, data, verify=level))


def test_accepts_what_the_cases_of_all_tests_start_from() -> None:
    ends = [plain(front=front, sealed=sealed) for front in (True, False) for sealed in (True, False)]
    for archive in (*ends, rich(), compact(), sequence(4)):
        data = archive.seal()
        assert len({zcrecord.load_record(data, verify=level).content_digest() for level in LEVELS}) == 1


PLAIN, UNSEALED_PLAIN = plain().seal(), plain(front=False, sealed=False).seal()
OTHER_HEADER = PLAIN[:60] + bytes(4) + PLAIN[64:]
GONE = r"trailer: no archive of a size up to \d+ ends here"


@pytest.mark.parametrize(
    ("embedded", "data", "message"),
    [
        ("prefix", UNSEALED_PLAIN + b"more", "header: not sealed, so its size is not known; open the whole file"),
        ("prefix", PLAIN[:-1], rf"the archive has {len(PLAIN)} bytes, only {len(PLAIN) - 1} are there"),
        ("prefix", OTHER_HEADER + bytes(64), "header: its CRC does not match"),
        ("suffix", b"before" + OTHER_HEADER, "header: its CRC does not match"),
        ("suffix", b"before" + PLAIN + b"after", "trailer: its magic is missing"),
        ("suffix", b"before" * 20 + UNSEALED_PLAIN[:64], GONE),
        ("suffix", PLAIN[1:], GONE),
        ("suffix", PLAIN[64:], GONE),
        ("suffix", PLAIN[128:], GONE),
    ],
)
def test_embedded_archives_are_checked_as_whole_files_are(embedded: Any, data: bytes, message: str) -> None:
    """R3, R15, R16."""
    with pytest.raises(FormatError, match=f"^{message}"):
        zcrecord.load_record(data, embedded=embedded)
