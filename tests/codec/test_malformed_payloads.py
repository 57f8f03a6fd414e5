"""Payloads: where they may lie, and that each belongs to something.

Shown at open, and at `touch` for the tensor that uses one, alone and among all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forge import Forge
from malformed import Case, cases, refused, saved, sequence

import zcrecord
from zcrecord import FormatError


def payload(number: int, **fields: int) -> Callable[[Forge], Any]:
    """Change fields of one payload of `sequence(4)`: 16 bytes at 0, 64, 128 and 192 each."""
    return lambda f: f.set("payloads", number, **fields)


def hole(before: int) -> Callable[[Forge], Any]:
    """Put 64 zeros too many in front of one payload."""

    def change(f: Forge) -> None:
        f.payload[64 * before : 64 * before] = bytes(64)
        f.columns["payloads"]["offset"][before:] += np.uint64(64)

    return change


EMPTY = r"^payloads\[1\]: empty, or larger than an archive may be"
PAST = r"^payload \[0x[0-9a-f]+, 0x[0-9a-f]+\) ends past the region of payloads \(0x[0-9a-f]+\); the file is damaged"
ORDER = r"^payload \[0x[0-9a-f]+, 0x[0-9a-f]+\) overlaps the one before it, or is out of order"
HOLE = r"^payload \[0x[0-9a-f]+, 0x[0-9a-f]+\) comes after a hole of 64 bytes or more"
# fmt: off
CASES = [
    Case("R56", "no bytes", payload(1, nbytes=0), EMPTY, tensor="t001"),
    Case("R56", "2^56+1 bytes", payload(1, nbytes=2**56 + 1), EMPTY, tensor="t001"),
    Case("R56", "2^64-1 bytes", payload(1, nbytes=2**64 - 1), EMPTY, tensor="t001"),
    Case("R56", "at 2^56+64", payload(1, offset=2**56 + 64), EMPTY, tensor="t001"),
    Case("R56", "end wraps to 0", payload(1, offset=2**64 - 64, nbytes=64), EMPTY, tensor="t001"),
    Case("R56", "a byte of the trailer", payload(2, nbytes=128 + 1), PAST, tensor="t002"),
    Case("R56", "a byte past the archive", payload(1, nbytes=256 + 64 - 64 + 1), PAST, tensor="t001"),
    Case("R56", "at 2^56", payload(1, offset=2**56), PAST, tensor="t001"),
    Case("R56", "starts inside, 2^56 bytes", payload(1, nbytes=2**56), PAST, tensor="t001"),
    Case("R57", "unaligned by 16", payload(1, offset=80), r"^payload \[0x.*\) is not aligned to 64 bytes",
         tensor="t001"),
    Case("R57", "unaligned by 1", payload(2, offset=127), r"^payload \[0x.*\) is not aligned to 64 bytes",
         tensor="t002"),
    Case("R58", "into the next", payload(1, nbytes=65), ORDER, tensor="t002"),
    Case("R58", "inside the one before", payload(2, offset=64, nbytes=8), ORDER, tensor="t002"),
    Case("R58", "before the one before", payload(2, offset=0), ORDER, tensor="t002"),
    Case("R59", "hole before the first", hole(0), HOLE, tensor="t000"),
    Case("R59", "hole before the last", hole(3), HOLE, tensor="t003"),
]
# fmt: on


def forged(case: Case) -> bytes:
    archive = sequence(4)
    case.change(archive)
    return archive.seal()


@cases(CASES)
def test_refuses_payload_at_open(case: Case) -> None:
    data = forged(case)
    refused(case, lambda: zcrecord.load_record(data))
    refused(case, lambda: zcrecord.load_record(data, verify="full"))


@cases(CASES)
def test_touch_refuses_the_tensor_that_uses_the_payload(case: Case) -> None:
    record = zcrecord.load_record(forged(case), verify="touch")
    for action in (record.__getitem__, record.get, record.array, record.info, record.raw, record.__contains__):
        refused(case, action, case.tensor)


@cases(CASES)
def test_touch_refuses_the_payload_among_all(case: Case) -> None:
    data = forged(case)
    for action in (lambda r: list(r.values()), lambda r: list(r.items()), lambda r: r.tree(), lambda r: r.nbytes):
        refused(case, action, zcrecord.load_record(data, verify="touch"))


def test_accepts_what_the_cases_start_from() -> None:
    record = zcrecord.load_record(sequence(4).seal(), verify="full")
    assert [value[0] for value in record.values()] == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [2, 100, 5000])
def test_refuses_the_one_bad_payload_among_many(count: int) -> None:
    """R58."""
    archive = Forge(saved({f"t{i:05}": np.full(16, i, np.uint32) for i in range(count)}))
    archive.columns["payloads"]["nbytes"][count // 2 - 1] = 65
    with pytest.raises(FormatError, match=ORDER):
        zcrecord.load_record(archive.seal())


def equal() -> Forge:
    """Return an archive of equal bytes of two tensors that are not tied."""
    return Forge(saved({"a": np.ones(16, np.uint8), "b": np.ones(16, np.uint8)}))


def test_refuses_two_digests_of_one_range() -> None:
    """R60."""
    archive = equal()
    archive.columns["payloads"]["digest"][1] ^= np.uint64(1)
    data = archive.seal()
    with pytest.raises(FormatError, match=r"^payload \[0x.*\) shares its range with one of another digest$"):
        zcrecord.load_record(data)
    record = zcrecord.load_record(data, verify="touch")
    assert record["a"].tolist() == [1] * 16
    with pytest.raises(FormatError, match=r"shares its range with one of another digest$"):
        record["b"]


def test_refuses_digest_in_an_archive_without() -> None:
    """R60."""
    archive = Forge(saved({"a": np.ones(16, np.uint8), "b": np.zeros(16, np.uint8)}, digest="none"))
    archive.set("payloads", 1, digest=1)
    data = archive.seal()
    with pytest.raises(FormatError, match=r"^payload \[0x.*\) has a digest in an archive without$"):
        zcrecord.load_record(data)
    record = zcrecord.load_record(data, verify="touch")
    assert record["a"].tolist() == [1] * 16
    with pytest.raises(FormatError, match=r"has a digest in an archive without$"):
        record["b"]


def test_equal_payloads_share_a_range_and_stay_two() -> None:
    """R58."""
    record = zcrecord.load_record(equal().seal(), verify="full")
    assert (record.info("a").payload, record.info("b").payload) == (0, 1)
    assert record.info("a").offset == record.info("b").offset


def test_refuses_payload_that_nothing_uses() -> None:
    """R61."""
    archive = sequence(4)
    archive.set("tensors", "t001", payload=0)
    data = archive.seal()
    with pytest.raises(FormatError, match=r"^payloads\[1\]: no tensor and no attribute uses it$"):
        zcrecord.load_record(data)
    with pytest.raises(FormatError, match=r"^payloads\[1\]: no tensor and no attribute uses it$"):
        zcrecord.load_record(data, verify="touch").tree()


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
