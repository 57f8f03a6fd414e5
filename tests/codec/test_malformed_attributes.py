"""Attributes and metadata: order, types, forms, and words that must lie in their pools."""

from __future__ import annotations

import pytest
from forge import Forge
from malformed import Case, broken, cases, plain, refused, rich, saved
from malformed_attributes import CASES, list_of

import zcrecord
from zcrecord import FormatError


@cases(CASES)
def test_refuses_attribute_at_open_and_at_touch_when_any_is_asked_for(case: Case) -> None:
    data = broken(case, rich())
    refused(case, zcrecord.load_record, data)
    record = zcrecord.load_record(data, verify="touch")
    assert record["w"].shape == (2, 3)
    for action in (lambda: record.attributes, lambda: record.metadata, lambda: record.modules, record.tree):
        refused(case, action)


def test_empty_list_may_end_where_the_words_do() -> None:
    """R67."""
    archive = rich()
    list_of(0, 0, beyond=True)(archive)
    assert zcrecord.load_record(archive.seal()).attributes["list"] == []


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
