"""The index as bytes: FlatBuffer, vectors, counts that must agree, and the budget of spans that share their pool."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from forge import Forge, build_index
from malformed import LEVELS, Case, broken, cases, compact, plain, refused, rich, saved, sequence
from malformed_attributes import CASES as ATTRIBUTES
from malformed_attributes import list_of
from malformed_header import BACK, FRONT, UNSEALED
from malformed_index import INDEX, OPEN, TABLE, TAKES, VTABLE, at_the_budget, number
from malformed_modules import CASES, FLAT, NESTED, reversed_parents

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


# Headers, trailers, and archives among other bytes.


@cases([*FRONT, *BACK, *UNSEALED])
def test_refuses_archive_whose_ends_are_wrong(case: Case) -> None:
    data = broken(case, plain(front=case in FRONT, sealed=case not in UNSEALED))
    for level in LEVELS:
        refused(case, partial(zcrecord.load_record, data, verify=level))


def test_accepts_what_the_cases_of_all_tests_start_from() -> None:
    ends = [plain(front=front, sealed=sealed) for front in (True, False) for sealed in (True, False)]
    for archive in (*ends, rich(), compact(), sequence(4)):
        data = archive.seal()
        assert len({zcrecord.load_record(data, verify=level).content_digest() for level in LEVELS}) == 1


PLAIN, UNSEALED_PLAIN = plain().seal(), plain(front=False, sealed=False).seal()
OTHER_HEADER = PLAIN[:60] + bytes(4) + PLAIN[64:]
GONE = r"trailer: no archive of a size up to \d+ ends here"


@pytest.mark.parametrize(
    ("embedded", "data", "message"),
    [
        ("prefix", UNSEALED_PLAIN + b"more", "header: not sealed, so its size is not known; open the whole file"),
        ("prefix", PLAIN[:-1], rf"the archive has {len(PLAIN)} bytes, only {len(PLAIN) - 1} are there"),
        ("prefix", OTHER_HEADER + bytes(64), "header: its CRC does not match"),
        ("suffix", b"before" + OTHER_HEADER, "header: its CRC does not match"),
        ("suffix", b"before" + PLAIN + b"after", "trailer: its magic is missing"),
        ("suffix", b"before" * 20 + UNSEALED_PLAIN[:64], GONE),
        ("suffix", PLAIN[1:], GONE),
        ("suffix", PLAIN[64:], GONE),
        ("suffix", PLAIN[128:], GONE),
    ],
)
def test_embedded_archives_are_checked_as_whole_files_are(embedded: Any, data: bytes, message: str) -> None:
    """R3, R15, R16."""
    with pytest.raises(FormatError, match=f"^{message}"):
        zcrecord.load_record(data, embedded=embedded)


# Modules and attributes.


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
