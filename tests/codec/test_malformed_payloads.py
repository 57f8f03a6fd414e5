"""Payloads: where they may lie, and that each belongs to something; and what `full` alone finds in their bytes.

Where one lies is shown at open, and at `touch` for the tensor that uses it, alone and among all.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forge import Forge, build_index
from malformed import LEVELS, Case, broken, cases, refused, rich, saved, sequence
from malformed_contents import CASES as CONTENTS
from malformed_contents import STRINGS, flipped
from malformed_payloads import CASES, ORDER

import zcrecord
from zcrecord import FormatError, IntegrityError
from zcrecord.archive.archive import Verify


@cases(CASES)
def test_refuses_payload_at_open_and_touch_refuses_the_tensor_that_uses_it(case: Case) -> None:
    data = broken(case, sequence(4))
    refused(case, zcrecord.load_record, data)
    record = zcrecord.load_record(data, verify="touch")
    for action in (record.__getitem__, record.get, record.array, record.info, record.raw, record.__contains__):
        refused(case, action, case.tensor)
    for ask in (lambda r: list(r.values()), lambda r: list(r.items()), lambda r: r.tree(), lambda r: r.nbytes):
        refused(case, ask, zcrecord.load_record(data, verify="touch"))


@pytest.mark.parametrize("count", [2, 100, 5000])
def test_refuses_the_one_bad_payload_among_many(count: int) -> None:
    """R58."""
    archive = Forge(saved({f"t{i:05}": np.full(16, i, np.uint32) for i in range(count)}))
    archive.columns["payloads"]["nbytes"][count // 2 - 1] = 65
    with pytest.raises(FormatError, match=ORDER):
        zcrecord.load_record(archive.seal())


@pytest.mark.parametrize(
    ("digest", "message"),
    [("xxh3", "shares its range with one of another digest"), ("none", "has a digest in an archive without")],
)
def test_refuses_a_wrong_digest(digest: Any, message: str) -> None:
    """R60."""
    archive = Forge(saved({"a": np.ones(16, np.uint8), "b": np.full(16, digest == "xxh3", np.uint8)}, digest=digest))
    data = archive.set("payloads", 1, digest=1).seal()
    with pytest.raises(FormatError, match=rf"^payload \[0x.*\) {message}$"):
        zcrecord.load_record(data)
    record = zcrecord.load_record(data, verify="touch")
    assert record["a"].tolist() == [1] * 16
    with pytest.raises(FormatError, match=rf"{message}$"):
        record["b"]


def test_refuses_payload_that_nothing_uses() -> None:
    """R61."""
    data = sequence(4).set("tensors", "t001", payload=0).seal()
    for action in (zcrecord.load_record, lambda data: zcrecord.load_record(data, verify="touch").tree()):
        with pytest.raises(FormatError, match=r"^payloads\[1\]: no tensor and no attribute uses it$"):
            action(data)


@pytest.mark.parametrize("where", ["attributes", "metadata", "list"])
def test_bytes_among_attributes_use_their_payload(where: str) -> None:
    """R61."""
    record: dict[str, Any] = {"w": np.ones(3)}
    if where != "metadata":
        record["blob"] = b"bytes" if where == "attributes" else [b"", b"bytes"]
    data = saved(record, metadata={"blob": b"bytes"} if where == "metadata" else None)
    zcrecord.load_record(data)
    archive = Forge(data)
    if where == "list":
        archive.columns["words"][:] = 0xFFFFFFFF
    else:
        archive.set(where, "blob", value=0xFFFFFFFF)
    with pytest.raises(FormatError, match=r"^payloads\[1\]: no tensor and no attribute uses it$"):
        zcrecord.load_record(archive.seal())


@cases(CONTENTS)
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
