"""Values that a record cannot hold are refused by one typed error that names them, before a byte is written."""

from __future__ import annotations

import datetime
import io
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import records as r
from records import ONE, nested

import zcrecord
from zcrecord import LimitError, NameCollisionError, RecordError, UnsupportedError

LONE = "a\ud800b"
EMPTY: dict[str, Any] = {}


def cyclic_dict() -> dict[str, Any]:
    record: dict[str, Any] = {"w": ONE}
    record["m"] = {"self": record}
    return record


def cyclic_list() -> list[Any]:
    record: list[Any] = [ONE]
    record.append(record)
    return record


class Refusal(NamedTuple):
    """A record, and how saving it fails."""

    record: Any
    error: type[RecordError]
    message: str


ARRAYS = {
    "object": Refusal({"m": {"x": np.array([None])}}, UnsupportedError, r"tensor 'm\.x': dtype object has no place"),
    "object among arrays": Refusal({"a": ONE, "x": np.array([None])}, UnsupportedError, r"tensor 'x': dtype object"),
    "structured": Refusal({"x": np.zeros(2, [("a", "<i4")])}, UnsupportedError, r"tensor 'x': dtype \[\('a', '<i4'"),
    "void": Refusal({"x": np.zeros(2, "V3")}, UnsupportedError, r"tensor 'x': dtype \|V3"),
    "datetime": Refusal({"x": np.zeros(2, "M8[s]")}, UnsupportedError, r"tensor 'x': dtype datetime64\[s\]"),
    "timedelta": Refusal({"x": [np.zeros(2, "m8[s]")]}, UnsupportedError, r"tensor 'x\.0': dtype timedelta64\[s\]"),
    "fixed bytes": Refusal({"x": np.array([b"ab"])}, UnsupportedError, r"tensor 'x': dtype \|S2"),
    "masked": Refusal({"x": np.ma.masked_less(ONE, 5)}, UnsupportedError, r"tensor 'x': a masked array; save \.filled"),
    "masked text": Refusal({"x": np.ma.masked_equal(["a"], "a")}, UnsupportedError, r"tensor 'x': a masked array"),
    "surrogates in text": Refusal({"x": np.array(["a", LONE])}, UnsupportedError, r"tensor 'x': .*lone surrogates"),
    "object scalar": Refusal({"x": np.datetime64("2020")}, UnsupportedError, r"tensor 'x': dtype datetime64"),
}  # fmt: skip
VALUES = {
    "set": Refusal({"m": {"x": {1}}}, UnsupportedError, r"tensor 'm\.x': a set is neither"),
    "numpy's dtype": Refusal({"m": [{"x": np.dtype("f4")}]}, UnsupportedError, r"tensor 'm\.0\.x': .* is neither"),
    "date": Refusal({"m": {0: datetime.date(2020, 1, 1)}}, UnsupportedError, r"tensor 'm\.0': a date is neither"),
    "function": Refusal({"x": len}, UnsupportedError, r"tensor 'x': .*function.* is neither"),
    "class": Refusal({"x": r.Layer}, UnsupportedError, r"tensor 'x': a type is neither"),
    "generator": Refusal({"x": (i for i in "ab")}, UnsupportedError, r"tensor 'x': a generator is neither"),
    "range": Refusal({"x": range(3)}, UnsupportedError, r"tensor 'x': a range is neither"),
    "object in list": Refusal({"x": [1, {2}]}, UnsupportedError, r"tensor 'x\.1': a set is neither"),
    "bytearray": Refusal({"x": bytearray(b"a")}, UnsupportedError, r"tensor 'x': a mutable buffer; pass bytes"),
    "writable memoryview": Refusal({"x": memoryview(bytearray(1))}, UnsupportedError, r"tensor 'x': a mutable buffer"),
    "memoryview with gaps": Refusal({"x": memoryview(b"abcd")[::2]}, UnsupportedError, r"tensor 'x': "),
    "4097-bit integer": Refusal({"m": [{"x": 2**4096}]}, UnsupportedError, r"'m\.0\.x': an integer of 4097 bits, 4096"),
    "4097-bit integers": Refusal({"x": [1, -(2**4096)]}, UnsupportedError, r"'x\.1': an integer of 4097 bits"),
    "surrogates in a value": Refusal({"m": {"x": LONE}}, UnsupportedError, r"'m\.x': .*lone surrogates"),
    "surrogates in a list": Refusal({"x": ["a", LONE]}, UnsupportedError, r"'x': .*lone surrogates"),
    "array as record": Refusal(ONE, UnsupportedError, "a record is a mapping, list, tuple or dataclass, not .*ndarray"),
    "text as record": Refusal("text", UnsupportedError, "a record is a mapping.*, not .*str"),
    "None as record": Refusal(None, UnsupportedError, "a record is a mapping.*, not .*None"),
    "class as record": Refusal(r.Layer, UnsupportedError, "a record is a mapping.*, not .*Layer"),
    "owner's class as record": Refusal(r.Owner, UnsupportedError, "a record is a mapping.*, not .*Owner"),
    "state_dict of a list": Refusal(
        r.Owner([ONE]), UnsupportedError, r"state_dict\(\).* mapping from names to tensors"
    ),
    "state_dict of None": Refusal(r.Owner(None), UnsupportedError, r"state_dict\(\).* mapping from names to tensors"),
}
NAMES = {
    "bool": Refusal({"m": {True: ONE}}, UnsupportedError, r"in 'm': key True is a bool; keys are .* or integers"),
    "bool of numpy": Refusal({np.True_: ONE}, UnsupportedError, r"in the record: key np\.True_ is a bool"),
    "float": Refusal({"m": [{1.0: ONE}]}, UnsupportedError, r"in 'm\.0': key 1\.0 is a float; keys are"),
    "tuple": Refusal({0: {"a": {(1, 2): 3}}}, UnsupportedError, r"in '0\.a': key \(1, 2\) is a tuple; keys are"),
    "int and its text": Refusal(
        {"m": {1: ONE, "1": ONE}}, UnsupportedError, r"in 'm': the key '1' is a text that reads"
    ),
    "int and another's text": Refusal({-1: 1, "7": 2}, UnsupportedError, r"in the record: the key '7' is a text that"),
    "65-bit int": Refusal({"m": {2**64: ONE}}, UnsupportedError, r"in 'm': the key 0x10{16} is .* outside -2\^63 to"),
    "low 65-bit int": Refusal(
        {-(2**63) - 1: ONE}, UnsupportedError, r"in the record: the key -0x80{14}1 is .* outside"
    ),
    "int of 5,000 digits": Refusal({"m": {10**5000: ONE}}, UnsupportedError, r"in 'm': the key 0x\w+….* is .* outside"),
    "bytes": Refusal({b"k": ONE}, UnsupportedError, r"in the record: key b'k' is a bytes"),
    "empty beside int": Refusal({"m": {1: 1, "": ONE}}, UnsupportedError, r"in 'm': an empty key"),
    "None": Refusal({None: 1}, UnsupportedError, r"in the record: key None is a NoneType"),
    "empty": Refusal({"m": {"": ONE}}, UnsupportedError, r"in 'm': an empty key; keys are non-empty"),
    "empty attribute": Refusal({"": 1}, UnsupportedError, "in the record: an empty key"),
    "empty module": Refusal({"": {}}, UnsupportedError, "in the record: an empty key"),
    "NUL in tensor": Refusal({"m": {"a\0b": ONE}}, UnsupportedError, r"tensor 'm\.a\\x00b': its name contains NUL"),
    "NUL in module": Refusal({"m": {"a\0b": {}}}, UnsupportedError, r"tensor 'm\.a\\x00b': its name contains NUL"),
    "NUL in attribute": Refusal({"m": {"a\0b": 1}}, UnsupportedError, r"tensor 'm\.a\\x00b': its name contains NUL"),
    "NUL at the end": Refusal({"a\0": ONE, "b": ONE}, UnsupportedError, r"tensor 'a\\x00': its name contains NUL"),
    "surrogate in tensor": Refusal({LONE: ONE}, UnsupportedError, r"tensor 'a\\ud800b': its name has lone surrogates"),
    "surrogate in module": Refusal({LONE: {"w": ONE}}, UnsupportedError, r"tensor 'a\\ud800b.*lone surrogates"),
    "surrogate in attribute": Refusal({"m": {LONE: 1}}, UnsupportedError, r"tensor 'm\.a\\ud800b': .*lone surrogates"),
    "int in state_dict": Refusal(
        r.Owner({1: ONE}), UnsupportedError, r"state_dict\(\) of Owner is no mapping from names"
    ),
    "empty in state_dict": Refusal(r.Owner({"": ONE}), UnsupportedError, "an empty key"),
    "tensors collide": Refusal({"a.b": ONE, "a": {"b": ONE}}, NameCollisionError, r"tensor 'a\.b': two .* this name"),
    "modules collide": Refusal(
        {"a.b": {"x": 1}, "a": {"b": {}}}, NameCollisionError, r"tensor 'a\.b': two .* this name"
    ),
    "attributes collide": Refusal({"a.b": 1, "a": {"b": 2}}, NameCollisionError, r"'a\.b'.*"),
    "lists collide": Refusal({"a": [ONE], "a.0": ONE}, NameCollisionError, r"tensor 'a\.0': two .* this name"),
}
DEPTHS = {
    "101 deep": Refusal(nested(101), LimitError, "nested more than 100 deep"),
    "5000 deep": Refusal(nested(5000), LimitError, "nested more than 100 deep"),
    "contains itself": Refusal(cyclic_dict(), LimitError, "nested more than 100 deep; does the record contain itself"),
    "list contains itself": Refusal({"l": cyclic_list()}, LimitError, "does the record contain itself"),
}
EVERY = ARRAYS | VALUES | NAMES | DEPTHS


def check_refused(folder: Path, error: type[RecordError], message: str, record: Any, **options: Any) -> None:
    """Saving fails in the same way into a file object, to a new path and over an old file; nothing is written."""
    file = io.BytesIO()
    with pytest.raises(error, match=message):
        zcrecord.save_record(record, file, **options)
    assert file.getvalue() == b""
    old = folder / "old.zcr"
    old.write_bytes(b"what was there before")
    for path in (folder / "new.zcr", old):
        with pytest.raises(error, match=message):
            zcrecord.save_record(record, path, **options)
    assert os.listdir(folder) == ["old.zcr"]
    assert old.read_bytes() == b"what was there before"


@pytest.mark.parametrize("name", EVERY)
def test_refuses(name: str, tmp_path: Path) -> None:
    check_refused(tmp_path, EVERY[name].error, EVERY[name].message, EVERY[name].record)


def test_refuses_long_double(tmp_path: Path) -> None:
    if np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("platform: long double is double here")
    for kind in (np.longdouble, np.clongdouble):
        check_refused(tmp_path, UnsupportedError, f"tensor 'x': dtype {np.dtype(kind)}", {"x": ONE.astype(kind)})


@pytest.mark.parametrize("alignment", [0, 1, 8, 15, 17, 96, 65535, 131072, -64, 64.0, "64", None, True])
def test_refuses_alignment(alignment: Any, tmp_path: Path) -> None:
    error = (LimitError, UnsupportedError)
    message = f"alignment {alignment!r} is not a power of two from 16 to 65536"
    check_refused(tmp_path, error, message, {"w": ONE}, alignment=alignment)  # type: ignore[arg-type]


@pytest.mark.parametrize("digest", ["", "XXH3", "sha256", 1, b"xxh3"])
def test_refuses_digest(digest: Any, tmp_path: Path) -> None:
    message = f"digest {digest!r} is not known; 'xxh3' or 'none'"
    check_refused(tmp_path, LimitError, message, {"w": ONE}, digest=digest)


METADATA: dict[str, tuple[Any, str]] = {
    "no mapping": ([1], "metadata"),
    "text": ("text", "metadata"),
    "int key": ({1: 1}, "metadata 1: names are non-empty strings"),
    "empty key": ({"": 1}, "metadata '': names are non-empty strings"),
    "NUL in key": ({"a\0": 1}, r"metadata 'a\\x00'"),
    "surrogate in key": ({LONE: 1}, r"metadata 'a\\ud800b'"),
    "surrogate in value": ({"k": LONE}, "metadata 'k'"),
    "surrogate in list": ({"k": ["a", LONE]}, "metadata 'k'"),
    "mapping": ({"k": {}}, "metadata 'k': .*values .* lists of one"),
    "array": ({"k": ONE}, "metadata 'k': .*values .* lists of one"),
    "mixed list": ({"k": [1, "a"]}, "metadata 'k': .*values .* lists of one"),
    "nested list": ({"k": [[1]]}, "metadata 'k': .*values .* lists of one"),
    "mixed 65-bit list": ({"k": [-1, 2**63]}, "metadata 'k'"),
    "65-bit integer": ({"k": 2**64}, "metadata 'k'"),
    "namedtuple of two types": ({"k": r.Pair(1, b"a")}, "metadata 'k': .*values .* lists of one"),
}


@pytest.mark.parametrize("name", METADATA)
def test_refuses_metadata(name: str, tmp_path: Path) -> None:
    metadata, message = METADATA[name]
    check_refused(tmp_path, UnsupportedError, message, {"w": ONE}, metadata=metadata)


def test_message_of_a_refusal_stays_readable_whatever_the_name() -> None:
    name = "x" * 10_000 + "\n"
    with pytest.raises(UnsupportedError) as caught:
        r.saved({name: {1}})
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert caught.value.tensor == name


def test_arrays_that_refuse_conversion_say_so(tmp_path: Path) -> None:
    class Broken:
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("lives on a device")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    message = r"tensor 'x': numpy cannot view this Broken: lives on a device"
    check_refused(tmp_path, UnsupportedError, message, {"x": Broken()})


@pytest.mark.parametrize("dest", [None, 5, 1.5, object(), ["m.zcr"]], ids=lambda d: type(d).__name__)
def test_refuses_a_destination_that_is_no_path_and_no_file(dest: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{type(dest).__name__}.*neither a path nor a binary file"):
        zcrecord.save_record(EMPTY, dest)


def test_refuses_files_opened_for_text(tmp_path: Path) -> None:
    with open(tmp_path / "text", "w", encoding="utf-8") as file:
        for dest in (file, io.StringIO()):
            with pytest.raises(UnsupportedError, match="binary"):
                zcrecord.save_record({"w": ONE}, dest)
    assert (tmp_path / "text").read_bytes() == b""


def test_refuses_files_opened_for_reading(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    with open(tmp_path / "old", "rb") as file, pytest.raises(OSError, match="write"):
        zcrecord.save_record({"w": ONE}, file)
    assert (tmp_path / "old").read_bytes() == b"old"


def test_refuses_nul_in_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordError, match=r"null|NUL"):
        zcrecord.save_record({"w": ONE}, "a\0b")
    assert os.listdir(tmp_path) == []


# Advice that works.


@pytest.mark.parametrize("unit", ["M8[ns]", "M8[D]", "m8[s]"])
def test_dates_are_saved_and_loaded_as_their_refusal_says(unit: str, tmp_path: Path) -> None:
    dates = np.arange(5).astype(unit).reshape(5, 1)
    with pytest.raises(UnsupportedError, match=re.escape(f"save .view('int64'), and load that with .view('{unit}')")):
        r.saved({"x": dates})
    zcrecord.save_record({"x": dates.view("int64")}, tmp_path / "m.zcr")
    np.testing.assert_array_equal(zcrecord.load_record(tmp_path / "m.zcr")["x"].view(unit), dates)


def test_structured_arrays_are_saved_as_their_refusal_says(tmp_path: Path) -> None:
    array = np.array([(1, 2.5), (3, 4.5)], [("a", "<i4"), ("b", "<f8")])
    with pytest.raises(UnsupportedError, match=r"save its fields one by one, as array\[field\]"):
        r.saved({"x": array})
    zcrecord.save_record({"x": {field: array[field] for field in array.dtype.names or ()}}, tmp_path / "m.zcr")
    assert zcrecord.load_record(tmp_path / "m.zcr")["x.b"].tolist() == [2.5, 4.5]
