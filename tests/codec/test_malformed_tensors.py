"""One tensor: type, shape, payload and strides. After these rules a view lies inside its payload.

Each is shown twice: when the whole index is checked at open, and at `touch` when that one tensor is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forge import Forge
from malformed import Case, broken, cases, refused, rich, saved
from malformed_tensors import CASES, shape, strided
from strided_views import Strided, archive_of, elements_of

import zcrecord
from zcrecord import LimitError, UnsupportedError


@cases(CASES)
def test_refuses_tensor_at_open_and_touch_refuses_it_and_no_other(case: Case) -> None:
    data = broken(case, rich())
    assert refused(case, zcrecord.load_record, data).tensor == case.tensor
    record = zcrecord.load_record(data, verify="touch")
    for action in (record.__getitem__, record.get, record.array, record.info, record.raw, record.__contains__):
        assert refused(case, action, case.tensor).tensor == case.tensor
    assert (record["block.y"].tolist(), record["layers.1.k"].tolist()) == ([0, 1, 2], [1] * 4)
    for ask in (list, lambda r: list(r.values()), lambda r: list(r.items()), lambda r: r.tree(), lambda r: r.nbytes):
        assert refused(case, ask, zcrecord.load_record(data, verify="touch")).tensor == case.tensor


# fmt: off
LEGAL = [
    ("one row again and again", strided((3, 2), (0, 1)), [[0, 1]] * 3),
    ("backwards from the end", strided((6,), (-1,), byte_offset=20), [5, 4, 3, 2, 1, 0]),
    ("both ends reached", strided((2, 2), (-5, 0), byte_offset=20), [[5, 5], [0, 0]]),
    ("rank 0 amid the payload", strided((), (), byte_offset=20), 5),
    ("an axis of 1 with any stride", strided((1, 2), (2**56, 5)), [[0, 5]]),
    ("less than the payload", strided((2,), (3,), byte_offset=8), [2, 5]),
    ("rank 64", shape(*[1] * 62, 2, 3), np.arange(6).reshape(*[1] * 62, 2, 3).tolist()),
]
# fmt: on


@pytest.mark.parametrize(("change", "expected"), [pytest.param(*case[1:], id=case[0]) for case in LEGAL])
def test_accepts_what_just_keeps_the_rules(change: Callable[[Forge], Any], expected: Any) -> None:
    """R47, R52, R53, R54, R55."""
    archive = rich()
    change(archive)
    data = archive.seal()
    for record in (zcrecord.load_record(data), zcrecord.load_record(data, verify="touch")):
        assert record["w"].tolist() == expected


def test_unknown_dtype_with_strides_is_offered_as_its_elements_in_c_order() -> None:
    """R76, R77."""
    views = [Strided(200, 24, (2, 1, 3), (3, 2**56, -1), 6, bytes(range(256)) * 2)]
    elements = np.frombuffer(elements_of(views[0]), np.uint8)
    record = zcrecord.load_record(archive_of(views), verify="full")
    with pytest.raises(UnsupportedError, match=r"\.raw\(name\) gives its bytes"):
        record["t0000"]
    raw = record.raw("t0000")
    assert (bytes(raw), raw.readonly, record.info("t0000").nbytes) == (elements.tobytes(), True, len(elements))
    plain = Forge(saved({"t0000": elements}))
    plain.set("tensors", 0, dtype=200, bits=24, rank=3, dims=plain.add("dims", views[0].shape))
    assert record.content_digest() == zcrecord.load_record(plain.seal()).content_digest()


def test_touch_checks_a_tensor_before_its_every_use_until_it_passed() -> None:
    archive = rich()
    archive.set("tensors", "w", rank=65)
    record = zcrecord.load_record(archive.seal(), verify="touch")
    for _ in range(40):
        with pytest.raises(LimitError, match=r"^tensor 'w': rank 65 is more than 64$"):
            record["w"]
