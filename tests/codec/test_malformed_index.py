"""The index as bytes: FlatBuffer, vectors, counts that must agree, and the budget of spans that share their pool."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from forge import Forge, build_index
from malformed import LEVELS, Case, broken, cases, plain, refused, rich, saved
from malformed_index import INDEX, OPEN, TABLE, TAKES, VTABLE, at_the_budget, number

import zcrecord
from zcrecord import FormatError, IntegrityError, LimitError, UnsupportedError
from zcrecord.archive.archive import Verify


@pytest.mark.parametrize("level", LEVELS)
@cases(OPEN)
def test_refuses_index_whose_bytes_make_no_columns(case: Case, level: Verify) -> None:
    data = broken(case, rich())
    refused(case, lambda: zcrecord.load_record(data, verify=level))


@cases(INDEX)
def test_refuses_index_as_a_whole(case: Case) -> None:
    data = broken(case, rich())
    refused(case, zcrecord.load_record, data)
    refused(case, lambda: zcrecord.load_record(data, verify="touch").modules)


def test_budget_ends_where_it_says() -> None:
    """R30, R31: each item of a list that twenty attributes share counts twenty times, and so does its text."""
    for data in at_the_budget(0):
        record = zcrecord.load_record(data, verify="full")
        assert len(record.tree()) == 20
    assert record.attributes["7.texts"] == ["y" * 100] * 10
    for data in at_the_budget(1):
        with pytest.raises(LimitError, match=TAKES):
            zcrecord.load_record(data)


@pytest.mark.slow
def test_the_budget_is_exact_whatever_lies_before_in_the_pool_of_words() -> None:
    """R30: sizes of 4 million words of ones add up to 2^54, beside which a double does not tell 5 from 4."""
    f = Forge(saved({"s": ["x"], **{f"k{i:02}": "x" for i in range(40)}}))
    start, size = f.text(b"12345")
    f.add("words", np.full(1 << 22, 2**64 - 1, "<u8"))
    at = f.add("words", [start | size << 32] * 8) + 2
    f.set("attributes", 0, value=at | 1 << 32).use_up("attributes", "value", 1, 1)
    with pytest.raises(LimitError, match=TAKES):
        zcrecord.load_record(f.seal())


def test_an_index_whose_crc_does_not_match_is_refused_and_at_touch_as_a_whole() -> None:
    """R17."""
    archive = plain()
    archive.ends["index_crc"] = 1
    data = archive.seal()
    record = zcrecord.load_record(data, verify="touch")
    assert record["w"].shape == (2, 3)
    message = r"^index: its CRC does not match; the file is damaged, copy it again$"
    for action in (partial(zcrecord.load_record, data), record.tree, record.verify, lambda: record.modules):
        with pytest.raises(IntegrityError, match=message):
            action()


def test_touch_refuses_a_lookup_that_meets_by_name_beyond_the_tensors() -> None:
    """R32."""
    archive = plain()
    archive.columns["by_name"][:] = 77
    record = zcrecord.load_record(archive.seal(), verify="touch")
    for action in (record.get, record.__getitem__, record.__contains__, record.info):
        with pytest.raises(FormatError, match=r"^by_name\[\d\] is 77, of 4 tensors$"):
            action("w")


def test_vector_with_unknown_id_is_ignored() -> None:
    """R78."""
    archive = plain()
    index = build_index(archive.columns, 1)
    at = len(index)
    index += np.array([32, 52, *np.frombuffer(index, "<u2", 12, VTABLE + 4), 48, 9], "<u2").tobytes()  # ids 12 and 13
    index[TABLE : TABLE + 4] = np.int32(TABLE - at).tobytes()
    archive.index = index
    assert zcrecord.load_record(archive.seal())["w"].shape == (2, 3)


def test_vtable_may_be_shorter_than_the_schema() -> None:
    """R20, R23: fields it has no place for are missing, as are vectors without items."""
    archive = plain()
    for name in ("attributes", "metadata", "words", "strides", "by_module"):
        archive.columns.pop(name, None)
    archive.columns["modules"]["first_attribute"] = 0
    number(VTABLE, 4 + 2 * 10, "<u2")(archive)
    assert zcrecord.load_record(archive.seal()).attributes == {}


@pytest.mark.parametrize("rule", ["R32", "R34", "R36"])
def test_errors_that_tell_a_name_are_short(rule: str) -> None:
    f = Forge(saved({"x" * 100_000: np.ones(1), "y": np.ones(1), "m": {"z" * 100_000: {}, "k": 1, "l": 2}}))
    if rule == "R32":
        f.columns["by_name"] = f.columns["by_name"][::-1]
    elif rule == "R34":
        f.set("modules", 2, key_size=5)
    else:
        f.rename("attributes", "k", b"z" * 100_000)
    with pytest.raises(FormatError, match=r"strictly ascending after|is not its module's name|have the key") as caught:
        zcrecord.load_record(f.seal())
    assert len(str(caught.value)) < 1000


def test_attributes_of_one_full_name_are_told_apart_by_their_modules_alone() -> None:
    """R36: no two may hide behind one name."""
    record = zcrecord.load_record(
        Forge(saved({"a_b": 1, "a": {"b": 2}})).rename("attributes", "a_b", b"a.b").seal(), verify="full"
    )
    assert record.tree() == {"a.b": 1, "a": {"b": 2}}
    assert [module.attributes for module in record.modules.values()] == [{"a.b": 1}, {"b": 2}]
    with pytest.raises(UnsupportedError, match=r"^tensor 'a\.b': two attributes have this full name; a module's "):
        _ = record.attributes
