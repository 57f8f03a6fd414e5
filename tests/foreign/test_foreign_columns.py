"""Tensors put all at once are an outline's as if one by one, whatever their names; metadata costs what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from exhaustive import rounds
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zcrecord
from tools.measure import most_allocated
from zcrecord.foreign import open_foreign, safetensors_header
from zcrecord.foreign.receiver import Outline
from zcrecord.storage.memory import Memory
from zcrecord.writing import module_tree

peer: Any = safetensors.numpy
KEYS = st.sampled_from(["a", "b", "a-", "a/", "é", "10", "9", "", "weight", "日本"])
NAMES = st.lists(st.lists(KEYS, min_size=1, max_size=6).map(".".join).filter(bool), max_size=12, unique=True)


def opened(data: bytes, kind: str, *, by_columns: bool) -> Any:
    """Return the index of a file, without its memory, and the bytes of its tensors."""
    with pytest.MonkeyPatch.context() as patch:
        if not by_columns:
            patch.setattr(Outline, "put_state", lambda *_: False)
        archive = open_foreign(kind, Memory(memoryview(data)))
    index = archive.index._replace(memory=memoryview(b""))
    columns = [None if column is None else np.asarray(column).tolist() for column in index[2:]]
    return columns, bytes(index.text), [np.asarray(view).tobytes() for view in archive.views()]


def values(names: list[str], forms: list[int]) -> dict[str, Any]:
    dtypes = [np.float32, np.uint8, np.float16]
    found = zip(names, forms * len(names), strict=False)
    return {name: np.arange(form % 5, dtype=dtypes[form % 3]).reshape(1, -1) for name, form in found}


@pytest.mark.slow
@given(NAMES, st.lists(st.integers(0, 15), min_size=1, max_size=12))
@example(["a", "a.b", "c.d"], [2])
@example(["b.a.w", "a.w", "b.a.c.w", "b.w", "a.b.w", "b.c"], [1, 7, 2, 6, 3, 5])
@example([".".join("a" * 99), ".".join("b" * 100), ".".join("c" * 101)], [1])
@settings(max_examples=rounds(400), deadline=None)
def test_tensors_put_at_once_are_as_if_put_one_by_one(names: list[str], forms: list[int]) -> None:
    data = peer.save(values(names, forms), metadata={"made": "here"})
    assert opened(data, "safetensors", by_columns=True) == opened(data, "safetensors", by_columns=False)


@pytest.mark.parametrize("odd", ["a..b", ".a", "a.", "a.b", ".".join("a" * 101)])
def test_usual_names_are_put_at_once_and_odd_ones_one_by_one(odd: str) -> None:
    usual = ["a.b.w", "a.c", "b", "é.w", ".".join("c" * 100)]
    assert module_tree.state_entries(usual) is not None
    assert module_tree.state_entries([*usual, odd]) is None


def test_an_index_of_no_shards_and_files_of_no_tensors_are_empty_records(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {}}', encoding="utf-8")
    for source in (path, peer.save({}), saved(tmp_path / "m.gguf", [], ["a"])):
        assert list(zcrecord.load_record(source)) == []


def test_shards_of_tensors_of_several_types_are_put_at_once(tmp_path: Path) -> None:
    parts = [values([f"{part}.{i}.w" for i in range(9)], [part, 3, 7, 0, 6]) for part in (1, 0)]
    files = {f"m-{k}.safetensors": part for k, part in enumerate(parts)}
    for name, part in files.items():
        (tmp_path / name).write_bytes(peer.save(part))
    path = tmp_path / "m.safetensors.index.json"
    weight_map = {name: file for file, part in files.items() for name in part}
    path.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    record = zcrecord.load_record(path)
    assert sorted(record) == sorted([*parts[0], *parts[1]])
    for name, value in (parts[0] | parts[1]).items():
        assert np.array_equal(record[name], value)
        assert record[name].dtype == value.dtype


def test_names_of_modules_that_take_much_are_not_put_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tree, "_ROOM", 10)
    assert module_tree.state_entries(["abcd.efghi"]) is not None
    assert module_tree.state_entries(["abcd.efgh.i"]) is None


def saved(path: Path, names: list[str], words: list[str]) -> bytes:
    made = gguf.GGUFWriter(path, "llama")
    made.add_array("words", words)
    for name in names:
        made.add_tensor(name, np.ones(3, np.float32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path.read_bytes()


def test_words_of_every_length_come_as_they_are(tmp_path: Path) -> None:
    """Also where one crosses the bytes that are looked at together, is long, is empty, or has NUL."""
    words = ["x" * (i * 7 % 300) + "é" * (i % 3) + "\0" * (i % 5 == 0) for i in range(3000)] + ["y" * 70_000, "z"]
    data = saved(tmp_path / "m.gguf", [f"a.{i}.w" for i in range(300)], words)
    assert zcrecord.load_record(data).metadata["words"] == words
    assert opened(data, "gguf", by_columns=True) == opened(data, "gguf", by_columns=False)


# Metadata.


def header(entries: int, name: str = "") -> bytes:
    text = json.dumps({"__metadata__": {name + f"{i:x}": "" for i in range(entries)}}, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("name", ["", "\n"], ids=["plain", "escaped"])
def test_short_entries_of_metadata_cost_what_is_counted_for_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = header(20_000, name)
    zcrecord.load_record(data)
    peak = most_allocated(lambda: zcrecord.load_record(data))
    assert peak < (1 << 20) + 20_000 * safetensors_header._ENTRY_COST
    assert len(zcrecord.load_record(data).metadata) == 20_000
    monkeypatch.setattr(safetensors_header, "_MEMORY", 1 << 10)
    with pytest.raises(zcrecord.LimitError, match="entries of metadata take far more memory than the file"):
        zcrecord.load_record(data)


def test_a_vocabulary_is_in_memory_twice_at_most_while_its_file_is_opened(tmp_path: Path) -> None:
    data = saved(tmp_path / "m.gguf", [], [f"word{i}" for i in range(200_000)])
    index = zcrecord.load_record(data).archive.index
    assert most_allocated(lambda: zcrecord.load_record(data)) < 2.5 * (len(index.text) + index.words.nbytes)
