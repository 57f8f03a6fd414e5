"""Shards of safetensors are read one by one until more is asked for than a few tensors; what is given was checked."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import zcrecord
from zcrecord import FormatError, SourceError, TensorNotFoundError, UnsupportedError
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
    with pytest.raises(SourceError, match=r"m-00002-of-00003\.safetensors: no such file"):
        zcrecord.load_record(hub)
    (hub / "m-00002-of-00003.safetensors").symlink_to(hub.parent / "elsewhere")
    with pytest.raises(SourceError, match="out of its folder"):
        zcrecord.load_record(hub)


@pytest.mark.skipif(sys.platform == "win32", reason="platform: mapped files cannot be replaced")
def test_it_stays_what_it_was_if_its_files_are_replaced_or_removed(hub: Path) -> None:
    record, pickled = zcrecord.load_record(hub), zcrecord.load_record(hub)
    assert same(record["a.w"], TENSORS["a.w"])
    assert same(pickle.loads(pickle.dumps(pickled))["c"], TENSORS["c"])
    peer.save_file({"c": np.array(8, np.int64)}, hub / "new")
    os.replace(hub / "new", hub / "m-00003-of-00003.safetensors")
    os.unlink(hub / "m-00002-of-00003.safetensors")
    assert same(record["c"], TENSORS["c"]) and same(record["b.w"], TENSORS["b.w"])
    assert all(same(value, TENSORS[name]) for name, value in record.items())


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
