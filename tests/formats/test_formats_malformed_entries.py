"""Malformed indexes of shards, and malformed 'zcrecord' entries, what an archive says besides its tensors."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from exchange import file_of, read, refused, tensor

from zcrecord.errors import FormatError, LimitError, RecordError, SourceError, UnsupportedError, VersionError
from zcrecord.formats import convert

# Shards.


def shards_of(tmp_path: Path, weight_map: Any, **more: Any) -> Path:
    """Write an index beside two shards, of tensors a and b, and of tensor c."""
    (tmp_path / "m-1.safetensors").write_bytes(file_of({"a": tensor(0, 1), "b": tensor(1, 2)}, b"ab"))
    (tmp_path / "m-2.safetensors").write_bytes(file_of({"c": tensor(0, 1)}, b"c"))
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map, **more}), encoding="utf-8")
    return index


RIGHT = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
INDEXES: dict[str, tuple[Any, str]] = {
    "tensor missing from its shard": (RIGHT | {"d": "m-2.safetensors"},
        "m-2.safetensors: tensor 'd': the index has it in this file, which does not hold it"),
    "tensor not in the index": ({"a": "m-1.safetensors", "c": "m-2.safetensors"},
                                "m-1.safetensors: tensor 'b': the index does not have it in this file, which holds it"),
    "no shard": (RIGHT | {"d": "m-3.safetensors"}, "m-3.safetensors: cannot read: No such file"),
    "shard above": (RIGHT | {"c": "../m-2.safetensors"}, "is not the plain name of a .safetensors file"),
    "absolute shard": (RIGHT | {"c": "/etc/passwd"}, "'/etc/passwd' is not the plain name of a .safetensors file"),
    "shard behind a backslash": (RIGHT | {"c": "..\\m.safetensors"}, "is not the plain name"),
    "shard without a name": (RIGHT | {"c": ""}, "shard '' is not the plain name"),
    "shard that is another file": (RIGHT | {"c": "m.zcr"}, "'m.zcr' is not the plain name of a .safetensors file"),
    "shard that is no text": (RIGHT | {"c": 3}, "tensor 'c': its shard 3 is not the plain name"),
    "map that is a list": (["a"], "not an index of safetensors shards: it has no 'weight_map'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", INDEXES)
def test_refuses_index_of_shards_with(fault: str, tmp_path: Path) -> None:
    weight_map, pattern = INDEXES[fault]
    index = shards_of(tmp_path, weight_map)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RecordError, match=pattern):
        convert(index, tmp_path / "out.zcr")
    assert sorted(tmp_path.iterdir()) == before


INDEX_TEXTS: dict[str, tuple[str, str]] = {
    "that is no JSON": ("{", "no JSON that can be read"),
    "that is an array": ('{"weight_map":[]}', "it has no 'weight_map'"),
    "of another kind": ('{"a":1}', "not an index of safetensors shards"),
    "with a name twice": ('{"weight_map":{"a":"m-1.safetensors","a":"m-2.safetensors"}}', "has 'a' twice"),
    "with odd metadata": ('{"weight_map":{},"metadata":3}', "metadata is not an object"),
    "with metadata without a name": ('{"weight_map":{},"metadata":{"":3}}', "metadata has the name ''"),
    "with a lone surrogate": ('{"weight_map":{"\\ud800":3}}', "its shard 3"),
    "that nests too deep": ('{"a":' * 100_000, "no JSON that can be read"),
    "with a number too long": ('{"weight_map":{},"metadata":{"a":' + "9" * 10_000 + "}}", "no JSON that can be read"),
    "that is not UTF-8": ('{"\udcff":1}', "no JSON that can be read"),
    "with an entry that is no text": ('{"weight_map":{},"metadata":{"zcrecord":1}}', "'zcrecord' entry is no text"),
}


@pytest.mark.parametrize("fault", INDEX_TEXTS)
def test_refuses_index(fault: str, tmp_path: Path) -> None:
    text, pattern = INDEX_TEXTS[fault]
    index = tmp_path / "m.safetensors.index.json"
    index.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FormatError, match=pattern):
        convert(index, tmp_path / "out.zcr")


def test_error_in_a_shard_names_the_shard(tmp_path: Path) -> None:
    index = shards_of(tmp_path, RIGHT)
    (tmp_path / "m-2.safetensors").write_bytes(file_of({"c": tensor(0, 2)}, b"c"))
    with pytest.raises(FormatError, match=r"m-2\.safetensors: tensor 'c': data_offsets"):
        convert(index, tmp_path / "out.zcr")


@pytest.mark.skipif(os.name != "posix", reason="platform: named pipes")
def test_shard_that_is_a_pipe_is_refused_without_waiting_for_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = shards_of(tmp_path, RIGHT)
    (tmp_path / "m-2.safetensors").unlink()
    os.mkfifo(tmp_path / "m-2.safetensors")
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits for the pipe's writer"))
    signal.alarm(60)
    try:
        with pytest.raises(
            SourceError, match=r"m-2\.safetensors: not a regular file; put a copy of the file in its pl"
        ):
            convert(index, tmp_path / "out.zcr")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# What an archive says besides its tensors.

ENTRIES: dict[str, tuple[Any, str]] = {
    "empty": ("", "is no JSON that can be read"),
    "a list": ([], "is no JSON object with a version"),
    "no version": ({}, "is no JSON object with a version"),
    "version true": ({"version": True}, "is no JSON object with a version"),
    "a key twice": ('{"version":1,"version":1}', "has a key twice in one object"),
    "unknown part": ({"version": 1, "x": 1}, "has an unknown part 'x'"),
    "depth": ("[" * 100_000, "is no JSON that can be read"),
    "long number": ('{"version":1,"metadata":{"a":' + "9" * 10_000 + "}}", "is no JSON that can be read"),
    "items an object": ({"version": 1, "items": {}}, "something other than a list"),
    "item without a place": ({"version": 1, "items": [[None, ["a"], 1]]}, "neither a module nor an attribute"),
    "items out of order": ({"version": 1, "items": [[1, ["a"], 1], [0, ["b"], 1]]}, "items out of order"),
    "path that is text": ({"version": 1, "items": [[0, "a", 1]]}, "something other than a list"),
    "path of numbers": ({"version": 1, "items": [[0, [1], 1]]}, "something other than text"),
    "path with a surrogate": ('{"version":1,"items":[[0,["\\ud800"],1]]}', "lone surrogates"),
    "unknown kind": ({"version": 1, "items": [[0, ["a"], "set", ""]]}, "a module of unknown kind"),
    "kind a list": ({"version": 1, "items": [[0, ["a"], [], ""]]}, "a module of unknown kind"),
    "paths a list": ({"version": 1, "paths": []}, "something other than an object"),
    "paths to another name": ({"version": 1, "paths": {"w": ["v"]}}, "splits 'w' into other keys"),
    "ties of numbers": ({"version": 1, "ties": [[1]]}, "something other than text"),
    "order a number": ({"version": 1, "order": 1}, "something other than a list"),
    "marked with a number": ({"version": 1, "marked": 1}, "marks with something other than true"),
    "bytes that are none": ({"version": 1, "metadata": {"a": {"bytes": "?"}}}, "has a malformed value of type bytes"),
    "bytes a list": ({"version": 1, "metadata": {"a": {"bytes": []}}}, "something other than text"),
    "float that is none": ({"version": 1, "metadata": {"a": {"float": "x" * 16}}},
                           "has a malformed value of type float"),
    "float too short": ({"version": 1, "metadata": {"a": {"float": "7f"}}}, "an object of an unknown type"),
    "unknown type": ({"version": 1, "metadata": {"a": {"set": []}}}, "an object of an unknown type"),
    "empty type": ({"version": 1, "metadata": {"a": {}}}, "an object of an unknown type"),
    "mixed list": ({"version": 1, "metadata": {"a": [1, "x"]}}, "a value for 'a' that no attribute has"),
    "nested list": ({"version": 1, "metadata": {"a": [[1]]}}, "a value for 'a' that no attribute has"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ENTRIES)
def test_refuses_entry_of_its_own_with(fault: str, tmp_path: Path) -> None:
    what, pattern = ENTRIES[fault]
    text = what if isinstance(what, str) else json.dumps(what)
    refused(file_of({"__metadata__": {"zcrecord": text}, "w": tensor(0, 2)}, b"ab"), tmp_path, pattern)


TYPED = {
    "later version": ({"version": 2}, VersionError, "has version 2, this is 1; upgrade zcrecord"),
    "integer of 70 bits": ({"version": 1, "metadata": {"a": 1 << 70}},
                           RecordError, "a value for 'a' that no attribute has"),
    "name of a tensor": ({"version": 1, "items": [[0, ["w"], 1]]},
                         RecordError, "tensor 'w': an attribute has this name"),
    "module under a tensor": ({"version": 1, "items": [[1, ["w", "x"], 1]]},
                              RecordError, "a tensor or an attribute has the name of this module"),
    "attribute twice": ({"version": 1, "items": [[0, ["a"], 1], [0, ["a"], 1]]},
                        RecordError, "two attributes would have this name"),
    "empty key": ({"version": 1, "items": [[0, [""], 1]]}, UnsupportedError, "keys are non-empty strings"),
    "no path": ({"version": 1, "items": [[0, [], 1]]}, UnsupportedError, "keys are non-empty strings"),
    "too deep": ({"version": 1, "items": [[0, ["a"] * 101, 1]]}, LimitError, "nested more than 100 deep"),
    "nameless metadata": ({"version": 1, "metadata": {"": 1}}, UnsupportedError, "names are non-empty strings"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TYPED)
def test_entry_that_no_archive_can_hold_is_a_typed_error(fault: str, tmp_path: Path) -> None:
    what, kind, pattern = TYPED[fault]
    data = file_of({"__metadata__": {"zcrecord": json.dumps(what)}, "w": tensor(0, 2)}, b"ab")
    with pytest.raises(kind, match=pattern):
        read(data, tmp_path)


def test_entry_about_tensors_that_are_no_longer_there_is_no_fault(tmp_path: Path) -> None:
    about = {"version": 1, "paths": {"x.y": ["x.y"]}, "ties": [["x", "w", "y"]], "order": ["x", "w"]}
    about["items"] = [[7, ["late"], 1]]
    record = read(file_of({"__metadata__": {"zcrecord": json.dumps(about)}, "w": tensor(0, 2)}, b"ab"), tmp_path)
    assert (record.names, record.attributes) == (("w",), {"late": 1})
