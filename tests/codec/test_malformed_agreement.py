"""The rules about one tensor: both forms of ours agree with plain Python's (`plain_touch`), and with each other.

Rows of one tensor are made up. The archive opens at `index` exactly if they are legal, and at `touch` that tensor is
given exactly if they are, with the same message otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from exhaustive import rounds
from forge import NONE, Forge
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed import saved
from plain_touch import Plain

import zcrecord
from zcrecord import RecordError

BITS = {1: 8, 2: 8, 5: 16, 18: 32, 19: 64, 21: 128, 48: 6, 52: 4, 53: 2, 64: 0}
STRING = 64
SIZES = [24, 40, 3, 8]  # of the archive's payloads
TOP = 2**64 - 1


@dataclass(frozen=True)
class Row:
    """A tensor's row of the index, with its dims and strides."""

    dtype: int
    bits: int
    dims: tuple[int, ...]
    strides: tuple[int, ...] | None
    byte_offset: int
    payload: int
    rank: int | None = None  # if not that of dims
    dims_at: int | None = None  # if not where they are
    strides_at: int | None = None
    key_size: int = 1
    parent: int = 0
    reserved0: int = 0
    reserved1: int = 0


def archive() -> Forge:
    """Return an archive of tensors that are all tied to another, so that each of them may use any payload."""
    arrays = [np.full(size, size, np.uint8) for size in SIZES]
    return Forge(saved({"v": arrays[0], **{f"{k}{i}": a for i, a in enumerate(arrays) for k in "ab"}}))


BASE = archive().seal()


def forged(row: Row) -> bytes:
    f = Forge(BASE)
    dims = f.add("dims", row.dims)
    strides = NONE if row.strides is None else f.add("strides", row.strides)
    dims = dims if row.dims_at is None else row.dims_at
    strides = strides if row.strides_at is None else row.strides_at
    f.set(
        "tensors", "v", dtype=row.dtype, bits=row.bits, rank=len(row.dims) if row.rank is None else row.rank,
        dims=dims, strides=strides,
        byte_offset=row.byte_offset, payload=row.payload, key_size=row.key_size, parent=row.parent,
        reserved0=row.reserved0, reserved1=row.reserved1,
    )  # fmt: skip
    return f.seal()


def outcome(action: Any) -> str:
    try:
        action()
    except RecordError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check(row: Row) -> bool:
    """Check that all forms of the rules say of a row what the plain one does; returns that."""
    data = forged(row)
    expected = Plain(data).answer(b"v") == "accepted"
    opened = outcome(lambda: zcrecord.load_record(data))
    assert (opened == "") == expected, opened or "accepted"
    assert outcome(lambda: zcrecord.load_record(data, verify="touch").raw("v")) == opened
    assert outcome(lambda: list(zcrecord.load_record(data, verify="touch"))) == opened
    if expected and row.dtype in BITS and row.dtype != STRING and row.bits >= 8 and row.payload != NONE:
        record = zcrecord.load_record(data)
        low, high = np.lib.array_utils.byte_bounds(record["v"])
        start = np.frombuffer(record.raw("v"), np.uint8).ctypes.data
        assert start <= low <= high <= start + SIZES[row.payload]
    return expected


# Numbers that matter: those of small shapes, and those at which sums and products go wrong.
DIMS = st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 24, 40])
WILD_DIMS = st.sampled_from([7, 2**31, 2**32 - 1, 2**32, 2**53, 2**56, 2**56 + 1, 2**59, 2**62, 2**63, 2**63 + 3, TOP])
STRIDES = st.integers(-6, 6)
WILD_STRIDES = st.sampled_from(
    [2**31, -(2**32), 2**53, 2**56, -(2**56), 2**56 + 1, -(2**56) - 1, 2**60, 2**63 - 1, -(2**63)]
)
OFFSETS = st.integers(0, 5).map(lambda n: n * 4)
WILD_OFFSETS = st.sampled_from([1, 2, 24, 40, 2**32, 2**56, 2**56 + 4, 2**63, TOP, TOP - 3])
TYPES = st.sampled_from([*BITS.items(), (200, 24), (99, 8), (99, 1), (77, 128)])
WILD_TYPES = st.tuples(
    st.sampled_from([*BITS, 0, 200]), st.sampled_from([0, 1, 4, 6, 8, 12, 16, 32, 64, 128, 129, 255])
)


def mostly(usual: st.SearchStrategy[Any], wild: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).flatmap(lambda n: wild if n == 0 else usual)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Return a row that is near to legal."""
    dtype, bits = draw(mostly(TYPES, WILD_TYPES))
    payload = draw(st.integers(0, len(SIZES) - 1))
    most = draw(st.sampled_from([1, 2, 3, 4, 4, 70]))
    dims = draw(st.lists(mostly(DIMS, WILD_DIMS), max_size=most).map(tuple))
    strides = None
    if draw(st.booleans()):
        strides = tuple(draw(mostly(STRIDES, WILD_STRIDES)) for _ in dims)
    elif bits and draw(st.booleans()):  # a shape that fits
        count = SIZES[payload] * 8 // bits
        first = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0] or [1]))
        dims = (first, count // first)
    elif not bits:
        dims = (draw(st.integers(0, 4)),)
    if 0 in dims and draw(st.booleans()):
        payload, strides = NONE, None
    byte_offset = 0 if strides is None else draw(mostly(OFFSETS, WILD_OFFSETS))
    row = Row(dtype, bits, dims, strides, byte_offset, payload)
    odd = draw(mostly(st.just({}), st.sampled_from(ODD)))
    return replace(row, **odd)


ODD: list[dict[str, int]] = [
    {"rank": 64}, {"rank": 65}, {"rank": 255}, {"rank": 0}, {"rank": 1}, {"dims_at": NONE}, {"dims_at": 1000},
    {"strides_at": NONE - 1}, {"strides_at": 1000}, {"byte_offset": 1}, {"byte_offset": 2**63}, {"payload": NONE},
    {"payload": 4}, {"payload": NONE - 1}, {"key_size": 0}, {"key_size": 2}, {"parent": 1}, {"parent": NONE},
    {"reserved0": 1}, {"reserved1": 1},
]  # fmt: skip


@settings(max_examples=rounds(800), deadline=None)
@given(row=rows())
def test_index_and_touch_allow_what_the_specification_allows(row: Row) -> None:
    check(row)


# Rows whose verdict was worked out by hand.
# fmt: off
KNOWN = [
    (Row(18, 32, (2, 3), None, 0, 0), True),
    (Row(18, 32, (2, 3), (3, -1), 8, 0), True),
    (Row(18, 32, (2, 3), (3, -1), 4, 0), False),
    (Row(18, 32, (), (), 20, 0), True),
    (Row(18, 32, (), (), 24, 0), False),
    (Row(64, 0, (4,), None, 0, 1), True),
    (Row(64, 0, (5,), None, 0, 1), False),
    (Row(64, 0, (0, 3), None, 0, NONE), True),
    (Row(52, 4, (6,), None, 0, 2), True),
    (Row(52, 4, (7,), None, 0, 2), False),
    (Row(200, 24, (2,), (2,), 9, 1), True),
    (Row(200, 24, (2,), (2,), 8, 1), False),
    (Row(18, 32, (0, 2**54), None, 0, NONE), True),
    (Row(18, 32, (0, 2**54 + 1), None, 0, NONE), False),
]
# fmt: on


@pytest.mark.parametrize(("row", "allowed"), KNOWN)
def test_the_second_form_of_the_rules_and_ours_agree_on_known_rows(row: Row, allowed: bool) -> None:
    """R46, R49, R50, R51, R52, R53, R54, R71."""
    assert check(row) == allowed
