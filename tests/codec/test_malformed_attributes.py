"""Attributes and metadata: order, types, forms, and words that must lie in their pools."""

from __future__ import annotations

import pytest
from forge import Forge
from malformed import Case, cases, plain, refused, rich, saved
from malformed_attributes import CASES, list_of

import zcrecord
from zcrecord import FormatError


@cases(CASES)
def test_refuses_attribute_at_open(case: Case) -> None:
    archive = rich()
    case.change(archive)
    data = archive.seal()
    refused(case, lambda: zcrecord.load_record(data))
    refused(case, lambda: zcrecord.load_record(data, verify="full"))


@cases(CASES)
def test_touch_refuses_attribute_when_any_is_asked_for(case: Case) -> None:
    archive = rich()
    case.change(archive)
    record = zcrecord.load_record(archive.seal(), verify="touch")
    assert record["w"].shape == (2, 3)
    for action in (lambda: record.attributes, lambda: record.metadata, lambda: record.modules, record.tree):
        refused(case, action)


def test_accepts_what_the_cases_start_from() -> None:
    record = zcrecord.load_record(rich().seal(), verify="full")
    assert record.attributes["texts"] == ("a", "", "b")
    assert record.attributes["none"] is None
    assert record.metadata["tags"] == ["x", "y"]


def test_empty_list_may_end_where_the_words_do() -> None:
    """R67."""
    archive = rich()
    list_of(0, 0, beyond=True)(archive)
    assert zcrecord.load_record(archive.seal()).attributes["list"] == []


@pytest.mark.parametrize(("type", "expected"), [(2, -1), (3, 2**64 - 1)])
def test_every_word_is_an_integer(type: int, expected: int) -> None:
    """R68."""
    archive = Forge(saved({"n": 5}))
    archive.set("attributes", "n", type=type, value=2**64 - 1)
    assert zcrecord.load_record(archive.seal()).attributes == {"n": expected}


def test_every_word_is_a_float() -> None:
    """R68: a signalling NaN too."""
    archive = Forge(saved({"x": 0.5}))
    archive.set("attributes", "x", value=0x7FF0000000000001)
    value = zcrecord.load_record(archive.seal()).attributes["x"]
    assert value != value


def test_metadata_is_checked_where_there_are_no_attributes() -> None:
    """R68."""
    archive = Forge(saved({}, metadata={"on": True}))
    archive.set("metadata", "on", value=2)
    with pytest.raises(FormatError, match=r"^metadata: a bool is more than 1$"):
        zcrecord.load_record(archive.seal())


def test_attributes_are_checked_where_there_is_no_metadata() -> None:
    """R64."""
    archive = plain()
    archive.set("attributes", "n", parent=2)
    with pytest.raises(FormatError, match=r"^attributes\[0\]: its parent 2 is no module$"):
        zcrecord.load_record(archive.seal())
