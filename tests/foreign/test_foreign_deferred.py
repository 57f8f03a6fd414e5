"""Shards of safetensors are read one by one until more is asked for than a few tensors; what is given was checked."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from exhaustive import rounds

import zcrecord
from zcrecord import FormatError, SourceError, TensorNotFoundError, UnsupportedError
from zcrecord.foreign import safetensors_index
from zcrecord.formats import convert

peer: Any = safetensors.numpy
TENSORS: dict[str, Any] = {
    "a.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.b": np.ones(3, np.uint8),
    "b.w": np.arange(4, dtype=np.float16),
    "b.none": np.zeros((0, 2), np.int8),
    "c": np.array(7, np.int64),
}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder with three shards, which hold the tensors whose names start with a, b and c."""
    files = {name: f"m-0000{1 + 'abc'.index(name[0])}-of-00003.safetensors" for name in TENSORS}
    for file in set(files.values()):
        peer.save_file({name: TENSORS[name] for name in TENSORS if files[name] == file}, tmp_path / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return tmp_path


def same(found: Any, expected: Any) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())


def test_tensors_by_name_are_those_of_the_whole_record_before_and_after_it_is_made(hub: Path) -> None:
    record = zcrecord.load_record(hub)
    early = {name: record[name] for name in TENSORS}
    assert all(same(early[name], TENSORS[name]) for name in TENSORS)
    assert sorted(record) == sorted(TENSORS) and record.info("a.w").shape == (2, 3)
    assert all(same(record[name], TENSORS[name]) for name in TENSORS)
    for _ in range(20):  # as often as makes it
        again = zcrecord.load_record(hub)
        assert all(same(again[name], TENSORS[name]) for name in TENSORS for _ in range(9))
    with pytest.raises(TensorNotFoundError, match=r"b\.x"):
        record["b.x"]
    for odd in (3, None, ["a.w"]):
        with pytest.raises(TensorNotFoundError):
            zcrecord.load_record(hub)[odd]  # type: ignore[index]


def test_a_bad_shard_is_an_error_when_it_is_needed_that_names_it(hub: Path) -> None:
    (hub / "m-00002-of-00003.safetensors").write_bytes(peer.save({"b.w": np.ones(1)}))
    record = zcrecord.load_record(hub)
    assert same(record["a.w"], TENSORS["a.w"])
    uses: list[Callable[[], Any]] = [
        lambda: record["b.w"],
        lambda: list(record),
        lambda: "c" in record,
        lambda: zcrecord.load_record(hub, names=["a.*"]),
        lambda: zcrecord.load_record(hub, verify="full"),
        lambda: zcrecord.load_record(hub, mode="c"),
        lambda: convert(hub, hub / "m.zcr"),
    ]
    for use in uses:
        with pytest.raises(
            FormatError, match=r"m-00002-of-00003\.safetensors: tensor 'b.none': the index has it in this file"
        ):
            use()
    assert same(record["a.b"], TENSORS["a.b"])


def test_a_missing_shard_and_a_link_to_elsewhere_are_refused_at_once(hub: Path) -> None:
    (hub / "m-00002-of-00003.safetensors").rename(hub.parent / "elsewhere")
    with pytest.raises(SourceError, match=r"m-00002-of-00003\.safetensors: no such file; the index of the shards"):
        zcrecord.load_record(hub)
    (hub / "m-00002-of-00003.safetensors").symlink_to(hub.parent / "elsewhere")
    with pytest.raises(SourceError, match="out of its folder"):
        zcrecord.load_record(hub)


@pytest.mark.skipif(sys.platform == "win32", reason="platform: mapped files cannot be replaced")
def test_a_shard_replaced_before_it_is_needed_is_refused_and_one_that_was_used_stays(hub: Path) -> None:
    record, whole = zcrecord.load_record(hub), zcrecord.load_record(hub)
    assert same(record["c"], TENSORS["c"]) and len(whole) == len(TENSORS)
    assert same(pickle.loads(pickle.dumps(zcrecord.load_record(hub)))["c"], TENSORS["c"])
    for name, value in (("b", TENSORS["b.w"]), ("c", np.array(8, np.int64))):
        peer.save_file({f"{name}.w" if name == "b" else name: value}, hub / "new")
        os.replace(hub / "new", hub / f"m-0000{1 + 'abc'.index(name)}-of-00003.safetensors")
    assert same(record["c"], TENSORS["c"])
    with pytest.raises(SourceError, match=r"m-00002-of-00003\.safetensors: was replaced or changed since its index"):
        record["b.w"]
    assert all(same(value, TENSORS[name]) for name, value in whole.items())


FORMS = {
    "as json has it": lambda index: json.dumps(index),
    "as transformers writes it": lambda index: json.dumps(index, indent=2, sort_keys=True),
    "compact, the map first": lambda index: json.dumps(dict(reversed(index.items())), separators=(",", ":")),
    "escaped": lambda index: json.dumps(index).replace("c", "\\u0063"),
    "a name in the metadata": lambda index: json.dumps(index | {"metadata": {"a.w": "a.w", "x": {"weight_map": 1}}}),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_index_in_any_form_of_json_leads_to_the_same_tensors(hub: Path, form: str) -> None:
    path = hub / "m.safetensors.index.json"
    path.write_text(FORMS[form](json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    record = zcrecord.load_record(hub)
    assert all(same(record[name], TENSORS[name]) for name in TENSORS)
    assert sorted(record) == sorted(TENSORS)


BAD = {
    "a comma too many": ('", "a.b"', '",, "a.b"'),
    "a space that JSON has not": ('", "a.b"', '",\x0b"a.b"'),
    "a comma for a colon": ('"a.b": ', '"a.b", '),
    "a line in a name": ("a.b", "a.\nb"),
    "no end": ("}}", "}"),
    "a map twice": ('"weight_map"', '"weight_map": {}, "weight_map"'),
    "a name twice": ('"a.b"', '"a.w"'),
    "a map in the metadata": ('"total_size": 1}, "weight_map"', '"weight_map"'),
    "bytes that are no text": ('"total_size"', '"\udcff"'),
}


@pytest.mark.parametrize("fault", BAD)
def test_an_index_that_is_no_json_is_refused_when_it_is_opened(hub: Path, fault: str) -> None:
    path = hub / "m.safetensors.index.json"
    text = path.read_text(encoding="utf-8")
    assert BAD[fault][0] in text
    path.write_bytes(text.replace(*BAD[fault], 1).encode(errors="surrogateescape"))
    with pytest.raises(FormatError):
        zcrecord.load_record(hub)


@pytest.mark.parametrize("early", [True, False])
def test_shards_that_are_to_be_read_are_not_mapped(hub: Path, early: bool) -> None:
    record = zcrecord.load_record(hub, mmap=False)
    found = {name: record[name] for name in TENSORS} if early else dict(record)
    for path in hub.glob("*.safetensors"):
        path.write_bytes(b"\xff" * path.stat().st_size)  # in place
    assert all(same(found[name], TENSORS[name]) and same(record[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.parametrize("weight_map", ['"": ""', '"": "", "": ""'])
def test_an_index_of_empty_texts_is_one_error(weight_map: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors.index.json").write_text(f'{{"weight_map": {{{weight_map}}}}}', encoding="utf-8")
    with pytest.raises(FormatError, match=r"m\.safetensors\.index\.json: "):
        zcrecord.load_record(tmp_path / "m.safetensors.index.json")


PARTS = ['"', ",", ":", "{", "}", " ", "\n", "\\", "\x0b", "a", "[", "1", '"weight_map"', '": "', '", "', "é"]


@pytest.mark.slow
def test_an_index_read_by_columns_is_what_json_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, by_columns, usual = random.Random(1), safetensors_index._decode_usual, 0
    for _ in range(rounds(4000)):
        names = ["".join(chosen.choices("ab.é", k=chosen.randint(1, 4))) for _ in range(chosen.randint(1, 5))]
        index = {"metadata": {"k": "v"}, "weight_map": {n: f"{chosen.randint(1, 2)}.safetensors" for n in names}}
        text = json.dumps(index, indent=chosen.choice([None, 1]), ensure_ascii=False)
        for _ in range(chosen.randint(0, 2)):
            at = chosen.randrange(len(text))
            text = text[:at] + chosen.choice(PARTS) * chosen.randint(0, 1) + text[at + chosen.randint(0, 3) :]
        found: list[Any] = []
        for decode in (by_columns, lambda _: None):
            monkeypatch.setattr(safetensors_index, "_decode_usual", decode)
            try:
                read = safetensors_index.decode_index(text.encode())
                found.append((read.files, read.metadata, [sorted(read.names_in(file)) for file in read.files]))
            except FormatError:
                found.append(([], {}, []))
        assert found[0] == found[1], text
        usual += by_columns(text.encode() + safetensors_index._SLACK) is not None if found[0][0] else 0
    assert usual > 100


def test_a_private_copy_is_one_before_and_after_all_is_asked_for(hub: Path) -> None:
    """Of a tensor that is not aligned, too."""
    for file, name in (("m-00001-of-00003.safetensors", "a.w"), ("odd.safetensors", "b")):
        if name == "b":
            at = {"a": ("U8", [1], [0, 1]), "b": ("F32", [2], [1, 9])}
            entries = {n: dict(zip(("dtype", "shape", "data_offsets"), v, strict=True)) for n, v in at.items()}
            header = json.dumps(entries).encode()
            (hub / file).write_bytes(len(header).to_bytes(8, "little") + header + bytes(9))
        before = (hub / file).read_bytes()
        with zcrecord.load_record(hub / file, mode="c") as record:
            early = record[name]
            early[:] = 5
            assert (record[name] == 5).all() and (dict(record.items())[name] == 5).all()
            assert np.shares_memory(early, record[name])
        assert (hub / file).read_bytes() == before
        assert not (zcrecord.load_record(hub / file)[name] == 5).all()


@pytest.mark.parametrize("made", [False, True])
def test_a_closed_one_gives_nothing_and_lets_go_of_its_files(hub: Path, made: bool) -> None:
    with zcrecord.load_record(hub) as record:
        view = record["a.w"]
        assert not made or len(record) == len(TENSORS)
    assert not record.close(), "the view is in use"
    for use in (lambda: record["a.w"], lambda: record["c"], lambda: len(record)):
        with pytest.raises(UnsupportedError, match="the record is closed"):
            use()
    assert same(view, TENSORS["a.w"])
    del view
    gc.collect()
    assert record.close()


def test_a_record_whose_structure_is_in_the_index_is_made_for_its_first_tensor(tmp_path: Path) -> None:
    tree = {"a.b": {"w": np.arange(3000.0)}, "c": [np.arange(3000.0) + 1]}
    zcrecord.save_record(tree, tmp_path / "m.zcr")
    (tmp_path / "hub").mkdir()
    convert(tmp_path / "m.zcr", tmp_path / "hub" / "m.safetensors.index.json", max_shard_size=25_000)
    record = zcrecord.load_record(tmp_path / "hub")
    assert record["a.b.w"][7] == 7 and record["c.0"][7] == 8
    assert record.content_digest() == zcrecord.load_record(tmp_path / "m.zcr").content_digest()
