"""Values that a record cannot hold are refused by one typed error that names them, before a byte is written."""

from __future__ import annotations

import datetime
import io
import os
import re
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import records as r
from records import ONE, nested

import zcrecord
from zcrecord import LimitError, NameCollisionError, RecordError, UnsupportedError

LONE = "a\ud800b"


CYCLIC_DICT: dict[str, Any] = {"w": ONE}
CYCLIC_DICT["m"] = {"self": CYCLIC_DICT}
CYCLIC_LIST: list[Any] = [ONE]
CYCLIC_LIST.append(CYCLIC_LIST)


UNSUPPORTED: list[tuple[Any, str]] = [
    ({"m": {"x": np.array([None])}}, r"tensor 'm\.x': dtype object has no place"),
    ({"x": np.zeros(2, "M8[s]")}, r"tensor 'x': dtype datetime64\[s\]"),
    ({"x": np.array([b"ab"])}, r"tensor 'x': dtype \|S2"),
    ({"x": np.ma.masked_less(ONE, 5)}, r"tensor 'x': a masked array; save \.filled"),
    ({"x": np.array(["a", LONE])}, r"tensor 'x': .*lone surrogates"),
    ({"m": {"x": {b"a"}}}, r"tensor 'm\.x': a bytes as a key, or in a set, has no equal"),
    ({"m": {0: datetime.datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC"))}}, r"tensor 'm\.0': a datetime with a named time"),
    ({"x": r.Layer}, r"tensor 'x': a type is neither .*; leave it out, or save its name"),
    ({"x": [1, range(2)]}, r"tensor 'x\.1': a range is neither .*; save a dict of what it holds"),
    ({"x": iter([1])}, r"tensor 'x': a list_iterator is neither .*; save a list of its items"),
    ({"x": io.BytesIO()}, r"tensor 'x': a BytesIO is neither .*; save the file's path"),
    ({"x": np.random.default_rng()}, r"tensor 'x': a Generator is neither .*; save its \.bit_generator\.state"),
    ({"x": bytearray(b"a")}, r"tensor 'x': a mutable buffer; pass bytes"),
    ({"x": memoryview(b"abcd")[::2]}, r"tensor 'x': "),
    ({"m": [{"x": 2**4096}]}, r"'m\.0\.x': an integer of 4097 bits, 4096"),
    ({"m": {"x": LONE}}, r"'m\.x': .*lone surrogates"),
    ({"x": ["a", LONE]}, r"'x': .*lone surrogates"),
    (ONE, "a record is a mapping, list, tuple or dataclass, not .*ndarray"),
    (None, "a record is a mapping.*, not .*None"),
    (r.Layer, "a record is a mapping.*, not .*Layer"),
    (r.Owner([ONE]), r"state_dict\(\).* mapping from names to tensors"),
    ({"m": {10**5000: ONE}}, r"'m\.keys\.0': an integer of 16610 bits"),
    ({b"k": ONE}, r"a bytes as a key, or in a set, has no equal when it is loaded; make it a text"),
    ({"m": {"a\0b": ONE}}, r"tensor 'm\.a\\x00b': its name contains NUL"),
    ({"m": {"a\0b": 1}}, r"tensor 'm\.a\\x00b': its name contains NUL"),
    ({LONE: ONE}, r"tensor 'a\\ud800b': its name has lone surrogates"),
    ({"m": {LONE: 1}}, r"tensor 'm\.a\\ud800b': .*lone surrogates"),
    (r.Owner({1: ONE}), r"state_dict\(\) of Owner is not a mapping from"),
]
COLLIDING: list[tuple[Any, str]] = [
    ({"a.b": ONE, "a": {"b": ONE}}, r"tensor 'a\.b': two .* this name"),
    ({"a.b": {"x": 1}, "a": {"b": {}}}, r"tensor 'a\.b': two .* this name"),
    ({"a.b": 1, "a": {"b": 2}}, r"'a\.b'.*"),
    ({"a": [ONE], "a.0": ONE}, r"tensor 'a\.0': two .* this name"),
]
TOO_DEEP: list[tuple[Any, str]] = [
    (nested(101), "nested more than 100 deep"),
    (nested(5000), "nested more than 100 deep"),
    (CYCLIC_DICT, "nested more than 100 deep; does the record contain itself"),
    ({"l": CYCLIC_LIST}, "does the record contain itself"),
]
REFUSALS = [
    (error, *refusal)
    for error, table in ((UnsupportedError, UNSUPPORTED), (NameCollisionError, COLLIDING), (LimitError, TOO_DEEP))
    for refusal in table
]


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


@pytest.mark.parametrize(("error", "record", "message"), REFUSALS, ids=[message for *_, message in REFUSALS])
def test_refuses(error: type[RecordError], record: Any, message: str, tmp_path: Path) -> None:
    check_refused(tmp_path, error, message, record)


def test_refuses_long_double(tmp_path: Path) -> None:
    if np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("platform: long double is double here")
    for kind in (np.longdouble, np.clongdouble):
        check_refused(tmp_path, UnsupportedError, f"tensor 'x': dtype {np.dtype(kind)}", {"x": ONE.astype(kind)})


@pytest.mark.parametrize("alignment", [0, 8, 96, 131072, -64, 64.0, "64", None, True])
def test_refuses_alignment(alignment: Any, tmp_path: Path) -> None:
    message = f"alignment {alignment!r} is not a power of two from 16 to 65536"
    check_refused(tmp_path, RecordError, message, {"w": ONE}, alignment=alignment)


@pytest.mark.parametrize("digest", ["", "XXH3", "sha256", 1, b"xxh3"])
def test_refuses_digest(digest: Any, tmp_path: Path) -> None:
    message = f"digest {digest!r} is not known; 'xxh3' or 'none'"
    check_refused(tmp_path, LimitError, message, {"w": ONE}, digest=digest)


METADATA: dict[str, tuple[Any, str]] = {
    "text": ("text", "metadata"),
    "int key": ({1: 1}, "metadata 1: names are non-empty strings"),
    "empty key": ({"": 1}, "metadata '': names are non-empty strings"),
    "NUL in key": ({"a\0": 1}, r"metadata 'a\\x00'"),
    "surrogate in key": ({LONE: 1}, r"metadata 'a\\ud800b'"),
    "surrogate in value": ({"k": LONE}, "metadata 'k'"),
    "mapping": ({"k": {}}, "metadata 'k': .*values .* lists of one"),
    "mixed list": ({"k": [1, "a"]}, "metadata 'k': .*values .* lists of one"),
    "nested list": ({"k": [[1]]}, "metadata 'k': .*values .* lists of one"),
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
        r.saved({name: {b"a"}})
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert caught.value.tensor == name


@pytest.mark.parametrize("dest", [None, 5, 1.5, object(), ["m.zcr"]], ids=lambda d: type(d).__name__)
def test_refuses_a_destination_that_is_no_path_and_no_file(dest: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{type(dest).__name__}.*neither a path nor a binary file"):
        zcrecord.save_record({}, dest)


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
