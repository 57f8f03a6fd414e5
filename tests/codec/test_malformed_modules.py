"""The tree: modules in pre-order, places, counts; attributes and metadata, whose words must lie in their pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forge import Forge
from malformed import Case, broken, cases, plain, refused, rich, saved, sequence
from malformed_attributes import CASES as ATTRIBUTES
from malformed_attributes import list_of
from malformed_modules import CASES, FLAT, NESTED, reversed_parents

import zcrecord
from zcrecord import FormatError, LimitError

# The modules of `rich`: 0 itself, 1 block, 2 block.deep, 3 layers, 4 layers.0, 5 layers.1, 6 bare, 7 bare.sub, ...


@cases(CASES)
def test_refuses_tree_of_modules_at_open_and_at_touch_when_it_is_asked_for(case: Case) -> None:
    data = broken(case, rich())
    refused(case, zcrecord.load_record, data)
    record = zcrecord.load_record(data, verify="touch")
    assert record["block.deep.z"].tolist() == [1]
    for action in (record.tree, lambda: record.modules, lambda: record.attributes, lambda: record.metadata):
        refused(case, action)
    refused(case, record.verify)
    refused(case, record.content_digest)


@cases(FLAT)
def test_refuses_children_of_a_flat_record(case: Case) -> None:
    refused(case, zcrecord.load_record, broken(case, sequence(4)))


@cases(NESTED)
def test_refuses_children_of_a_record_without_attributes(case: Case) -> None:
    refused(case, zcrecord.load_record, broken(case, Forge(saved({"w": np.ones(1), "m": {"x": np.ones(1)}}))))


def test_places_are_the_order_of_the_tree_and_not_that_of_the_tensors() -> None:
    """R44."""
    archive = sequence(4)
    archive.columns["tensors"]["place"] = [3, 2, 1, 0]
    record = zcrecord.load_record(archive.seal())
    assert list(record) == ["t000", "t001", "t002", "t003"]
    assert list(record.tree()) == ["t003", "t002", "t001", "t000"]


def test_depth_is_bounded_in_a_tree_of_many_branches() -> None:
    """R40: the deepest module is none of the last."""
    record: dict[str, Any] = {}
    for _ in range(98):
        record = {"a": record}
    archive = Forge(saved({"x": {}, "deep": record, "y": {"z": {}}}))
    zcrecord.load_record(archive.seal())
    rows = archive.columns["modules"]
    last = archive.row("modules", "y") - 1
    extra = np.insert(rows, last + 1, rows[last])
    extra["parent"][last + 1] = last
    extra["parent"][last + 2 :] += (extra["parent"][last + 2 :] > last).astype("<u4")
    extra["end"][extra["end"] > last] += 1
    archive.columns["modules"] = extra
    with pytest.raises(LimitError, match=r"^modules: nested more than 100 deep$"):
        zcrecord.load_record(archive.seal())


def test_module_of_unknown_kind_is_read_as_a_mapping() -> None:
    """R41."""
    archive = plain()
    archive.set("modules", "m", kind=200)
    record = zcrecord.load_record(archive.seal())
    assert list(record.tree()["m"]) == ["z"]
    assert record.modules["m"].kind == "mapping"


def test_by_module_may_say_what_could_be_left_out() -> None:
    """R42: only writers must leave it out."""
    archive = plain()
    archive.add("by_module", range(4))
    assert list(zcrecord.load_record(archive.seal()).tree()) == list(zcrecord.load_record(plain().seal()).tree())


def test_tensors_may_be_saved_in_another_order_than_that_of_their_modules() -> None:
    """R42."""
    archive = rich()
    reversed_parents(archive)
    count = len(archive.columns["tensors"])
    archive.add("by_module", [*range(count - 2), count - 1, count - 2])
    record = zcrecord.load_record(archive.seal())
    assert list(record)[-2:] == ["point.x", "layers.1.k"]
    archive.columns["by_module"] = np.arange(count, dtype="<u4")
    with pytest.raises(FormatError, match=r"^by_module: not strictly ascending"):
        zcrecord.load_record(archive.seal())


@cases(ATTRIBUTES)
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
