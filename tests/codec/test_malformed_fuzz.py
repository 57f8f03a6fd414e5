"""Bytes changed, cut off and made up: out comes the same record, another valid one, or a RecordError.

Warnings are errors in these tests, so neither is there one. Views of what is accepted lie inside the source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changed_bytes import regions, resealed, variants, with_crc
from exhaustive import rounds, some
from forge import VECTORS
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed import LEVELS, compact, plain, rich

import zcrecord
from zcrecord import FormatError, PackedTensor, Record, RecordError, StringTensor, dtypes
from zcrecord.archive.archive import Verify
from zcrecord.codec.layout import NONE

FORMS = [(True, True), (True, False), (False, True), (False, False)]
ARCHIVES = {
    f"{'front' if front else 'back'}-{'sealed' if sealed else 'unsealed'}": plain(front=front, sealed=sealed).seal()
    for front, sealed in FORMS
}
ARCHIVE = pytest.mark.parametrize("data", ARCHIVES.values(), ids=ARCHIVES)


def inside(value: Any, data: bytes) -> None:
    """Check that all bytes a value views are bytes of `data`."""
    if isinstance(value, PackedTensor | StringTensor):
        assert value.shape is not None
        value = value.packed if isinstance(value, PackedTensor) else value.data
    array = np.asarray(value) if isinstance(value, memoryview) else value
    if isinstance(array, np.ndarray) and array.size:
        start = np.frombuffer(data, np.uint8).ctypes.data
        low, high = np.lib.array_utils.byte_bounds(array)
        assert start <= low <= high <= start + len(data)
        assert not array.flags.writeable


def one_by_one(record: Record, data: bytes) -> None:
    for name in record:
        with contextlib.suppress(RecordError):
            inside(record[name], data)
        with contextlib.suppress(RecordError):
            raw, row = record.raw(name), record.archive.row(record.archive.find(name))
            if row.strides == NONE or row.dtype in dtypes.by_code:  # all others are copies (R77)
                inside(raw, data)
        with contextlib.suppress(RecordError):
            record.info(name)


def all_at_once(record: Record, data: bytes) -> None:
    for value in record.values():
        inside(value, data)
        if isinstance(value, StringTensor):
            assert value.unpack(None).shape == value.shape
        if isinstance(value, PackedTensor):
            assert value.unpack().shape == value.shape


def attributes(record: Record, data: bytes) -> None:
    for value in [*record.attributes.values(), *record.metadata.values()]:
        for item in value if isinstance(value, list | tuple) else [value]:
            inside(item, data)


def searched(record: Record, data: bytes) -> None:
    for name in NAMES:
        with contextlib.suppress(RecordError):
            if name in record:
                inside(record[name], data)


NAMES = [*zcrecord.load_record(rich().seal()), "same", "m.z", "m.s", "m.q", "no", ""]
# Each list is asked of a record of its own: at `touch`, what one question has checked must not help the next.
QUESTIONS: list[list[Callable[[Record, bytes], Any]]] = [
    [searched],
    [all_at_once, one_by_one, lambda r, _: r.tree()],
    [
        lambda r, _: (len(r), repr(r), r.archive_nbytes),
        attributes,
        lambda r, _: (r.modules, r.nbytes),
        lambda r, _: list(r.infos()),
        lambda r, _: r.content_digest(),
        lambda r, _: r.verify(),
    ],
]


def questioned(data: bytes, level: Verify = "index") -> Record | None:
    """Load an archive if it can be, and ask for everything; nothing but RecordError may be raised."""
    record = None
    for questions in QUESTIONS:
        if record is None or level == "touch":
            try:
                record = zcrecord.load_record(data, verify=level)
            except RecordError as error:
                assert str(error)
                return None
        for question in questions:
            try:
                question(record, data)
            except RecordError as error:
                assert str(error)
    return record


def same(a: Record, b: Record) -> bool:
    """Return True if two records hold the same names, order, dtypes, shapes, bytes, attributes, metadata."""
    if list(a) != list(b) or a.content_digest() != b.content_digest() or a.metadata != b.metadata:
        return False
    return all((x.dtype, x.strides) == (y.dtype, y.strides) for x, y in zip(a.infos(), b.infos(), strict=True))


@ARCHIVE
def test_every_truncation_is_refused(data: bytes) -> None:
    """R15, R16."""
    for size in some(range(len(data)), 100):
        loads: list[Any] = [partial(zcrecord.load_record, data[:size], verify=level) for level in LEVELS]
        loads.append(partial(zcrecord.load_record, data[:size], embedded="prefix"))
        loads.append(partial(zcrecord.load_record, data[len(data) - size :], embedded="suffix"))
        for load in loads:
            with pytest.raises(FormatError):
                load()


@ARCHIVE
def test_every_changed_byte_of_an_end_leaves_the_same_record_if_its_crc_is_right(data: bytes) -> None:
    expected = zcrecord.load_record(data)
    for places in (range(60), range(len(data) - 64, len(data) - 4)):
        for changed in variants(data, places, "^1 ^80 =0 =ff +1"):
            end = with_crc(changed[places.start : places.start + 60])
            for first, last in ((end, end), (end, data[-64:]), (data[:64], end)):
                record = questioned(first + data[64:-64] + last)
                assert record is None or same(record, expected)


@pytest.mark.parametrize("level", ["touch", "index"])
def test_every_changed_byte_of_an_index_gives_a_valid_record_or_an_error(level: Verify) -> None:
    data = compact().seal()
    flips = "^80" if level == "touch" else "^1 ^80 =0 =ff +1"
    results = [questioned(resealed(changed), level) for changed in variants(data, regions(data)[1], flips)]
    assert sum(record is not None for record in results) > 0
    assert level == "touch" or sum(record is not None for record in results) < len(results) // 2


GOLDEN = pytest.mark.parametrize("name", ["tiny", "empty", "int4_bytes", "strings", "unknown_dtype", "back_unsealed"])


def golden(name: str) -> bytes:
    return (Path(__file__).parents[1] / "conformance" / "valid" / f"{name}.zcr").read_bytes()


@GOLDEN
def test_every_changed_byte_of_a_golden_archive_is_refused_or_leaves_the_same_record(name: str) -> None:
    """A payload's bytes are looked at by `full` alone; then nothing is left that may change."""
    data = golden(name)
    for places in regions(data):
        for changed in variants(data, places, "^1 ^80 =0 =ff +1"):
            with pytest.raises(FormatError):
                zcrecord.load_record(changed)
            if (record := questioned(changed, "touch")) is not None:
                with pytest.raises(FormatError):
                    record.verify()
    for changed in variants(data, range(len(data)), "^1 =ff"):
        with pytest.raises(FormatError):
            zcrecord.load_record(changed, verify="full")


def numbers(dtype: np.dtype[Any]) -> st.SearchStrategy[int]:
    """Return numbers of one type: small ones, and those around its limits."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    small = st.integers(max(low, -4), min(high, 70))
    return small | small | st.sampled_from([low, high, high - 1, high // 2, high // 2 + 1]) | st.integers(low, high)


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, int, str, int]]:
    """Return a few (vector, row, field, value): what to write into an index's columns."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        vector = draw(st.sampled_from([name for name in RICH if len(RICH[name])]))
        dtype = VECTORS[vector][1]
        field = draw(st.sampled_from(dtype.names)) if dtype.names else ""
        value = draw(numbers(dtype[field] if field else dtype))
        found.append((vector, draw(st.integers(0, len(RICH[vector]) - 1)), field, value))
    return found


RICH = rich().columns


@settings(max_examples=rounds(700), deadline=None)
@given(found=changes(), level=st.sampled_from(LEVELS))
def test_random_numbers_in_an_index_give_a_valid_record_or_an_error(
    found: list[tuple[str, int, str, int]], level: Verify
) -> None:
    archive = rich()
    for vector, row, field, value in found:
        column = archive.columns[vector]
        (column[field] if field else column)[row] = value
    questioned(archive.seal(), level)
