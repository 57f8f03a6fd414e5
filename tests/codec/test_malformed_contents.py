"""Rules on the payloads' bytes: digests, zeros between, pad bits, bools, ends of strings. Checked by `full`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from forge import Forge, build_index
from malformed import LEVELS, Case, broken, cases, refused, rich, saved
from malformed_contents import CASES, STRINGS, flipped

import zcrecord
from zcrecord import FormatError, IntegrityError
from zcrecord.archive.archive import Verify


@cases(CASES)
def test_full_alone_finds_what_is_wrong_with_payloads(case: Case) -> None:
    data = broken(case, rich())
    refused(case, lambda: zcrecord.load_record(data, verify="full"))
    refused(case, zcrecord.load_record(data, verify="touch").verify)
    record = zcrecord.load_record(data)
    assert case in STRINGS or len(list(record.values())) == 13
    refused(case, record.verify)


@pytest.mark.parametrize("level", ["touch", "index"])
@cases(STRINGS)
def test_no_end_of_a_string_is_used_unchecked(case: Case, level: Verify) -> None:
    record = zcrecord.load_record(broken(case, rich()), verify=level)
    for action in (lambda: record["s"], lambda: record.get("s"), lambda: list(record.values()), record.tree):
        refused(case, action)
    assert record["w"].shape == (2, 3)


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_payload_of_bools_is_one_throughout(wrong: int) -> None:
    """R72: also where no bool reaches, or each of a million views would have to be looked at."""
    archive = Forge(saved({"n": (numbers := np.ones(8, np.uint8)), "b": numbers[1:].view(bool)}))
    assert len(archive.columns["payloads"]) == 1
    archive.payload[wrong] = 2
    archive.digest()
    with pytest.raises(FormatError, match=r"^tensor 'b': a bool is neither 0 nor 1$"):
        zcrecord.load_record(archive.seal(), verify="full")


@pytest.mark.parametrize("front", [True, False], ids=["front", "back"])
def test_full_finds_a_byte_in_every_gap(front: bool) -> None:
    """R73, R74: no change of one byte anywhere passes `full` unnoticed; each gap is told by its ends."""
    archive = Forge(saved({"a": np.ones(3, np.uint8), "b": np.ones(5, np.uint8)}), front=front)
    data = archive.seal()
    gaps: set[int] = set()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 16
        with pytest.raises(FormatError) as caught:
            zcrecord.load_record(bytes(changed), verify="full")
        if gap := re.match(r"the gap \[(0x[0-9a-f]+), (0x[0-9a-f]+)\) holds bytes that are not", str(caught.value)):
            assert caught.value.offset == int(gap[1], 16) <= at < int(gap[2], 16)
            assert len(zcrecord.load_record(bytes(changed))) == 2
            gaps.add(at)
    index = build_index(archive.columns, archive.digest_kind)
    assert len(gaps) == len(data) - 2 * 64 - len(index) - 3 - 5


def test_error_found_later_names_the_file_too(tmp_path: Path) -> None:
    """R73."""
    archive = rich()
    flipped("w")(archive)
    path = tmp_path / "model.zcr"
    path.write_bytes(archive.seal())
    for action in (zcrecord.load_record(path).verify, lambda: zcrecord.load_record(path, verify="full")):
        with pytest.raises(IntegrityError, match=r"model\.zcr: tensor 'w': payload ") as caught:
            action()
        assert caught.value.path == str(path)


def test_index_error_comes_before_any_payload_is_read() -> None:
    archive = rich()
    archive.payload[:] = b"\xff" * len(archive.payload)
    archive.set("tensors", "w", rank=65)
    for level in LEVELS[1:]:
        with pytest.raises(zcrecord.LimitError, match="rank 65"):
            zcrecord.load_record(archive.seal(), verify=level)
