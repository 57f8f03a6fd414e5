"""Payloads: where they may lie, and that each belongs to something.

Shown at open, and at `touch` for the tensor that uses one, alone and among all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forge import Forge
from malformed import Case, broken, cases, refused, saved, sequence
from malformed_payloads import CASES, ORDER

import zcrecord
from zcrecord import FormatError


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
