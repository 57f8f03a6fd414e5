"""Keys that are integers come back as integers, and values without a type of their own as what they were."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import records as r
import torch

import zcrecord
from zcrecord import MismatchError, RecordWriter
from zcrecord.codec import conventions
from zcrecord.formats import convert

ONE = np.ones(3, np.float32)
MOMENT = {"step": np.array(5.0), "exp_avg": ONE}
STATE = {"state": {0: MOMENT, 1: MOMENT, 10: {"n": 1}}, "groups": [{"lr": 0.1, "params": [0, 1, 10]}]}
# Of these only the first three read as integers.
KEYS = ["0", "-1", str(2**64 - 1), "01", "-0", "+1", "1.0", " 1", "1_0", "0x1", "١", "１", str(2**64), "9" * 5000, "a"]


def keys(tree: Any) -> list[tuple[type, Any]]:
    """Keys with their types: 1 and True and 1.0 are the same key to a dict."""
    return [(type(key), key) for key in tree]


def test_integers_stay_integers_in_their_order() -> None:
    record = {np.int64(7): ONE, -1: 1, 2**64 - 1: None, -(2**63): {"a": {3: ONE}}, 0: [{5: ONE}], "name": {}}
    rec = r.round_trip(record)
    r.assert_same(rec.tree(), record)
    assert keys(rec.tree()) == [(type(key), key) for key in (7, *list(record)[1:])]
    assert list(rec) == ["7", f"{-(2**63)}.a.3", "0.0.5"], "names are text"
    assert [m.kind for m in rec.modules.values()] == ["numbered", "mapping", "numbered", "list", "numbered", "mapping"]
    for again in (r.round_trip(rec), r.round_trip(rec.tree())):
        r.assert_same(again.tree(), record)
        assert again.content_digest() == rec.content_digest()


def test_text_stays_text_even_if_it_reads_as_an_integer() -> None:
    texts = [key for key in KEYS if not isinstance(conventions.key_of_text(key), int)]
    assert texts == KEYS[3:]
    for record, kind in (({5: ONE} | dict.fromkeys(texts, ONE), "numbered"), (dict.fromkeys(KEYS, ONE), "mapping")):
        rec = r.round_trip(record)
        assert keys(rec.tree()) == keys(record)
        assert rec.modules[""].kind == kind


def test_integers_and_their_texts_have_other_content() -> None:
    numbers, texts = r.round_trip({"s": {0: ONE}}), r.round_trip({"s": {"0": ONE}})
    assert list(numbers) == list(texts)
    assert numbers.content_digest() != texts.content_digest()
    assert numbers.content_digest() == r.round_trip({"s": {0: ONE}}, alignment=4096, digest="none").content_digest()


def test_parts_of_a_record_keep_the_integers() -> None:
    rec = r.round_trip(STATE)
    r.assert_same(rec.module("state").tree(), STATE["state"])
    r.assert_same(rec.module("state.0").tree(), MOMENT)
    r.assert_same(rec.select("state.1.*").tree(), {"state": {1: MOMENT}})
    r.assert_same(rec.select("state.1", rename={"state.1": "state.4"}).tree(), {"state": {4: MOMENT}})
    r.assert_same(rec.select("state.1", rename={"state": ""}).tree(), {1: MOMENT})
    joined = r.round_trip({"state": {0: ONE}, "head": ONE}).select(rename={"head": "state.x"})
    r.assert_same(joined.tree(), {"state": {0: ONE, "x": ONE}})


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_other_formats_bring_the_integers_back(suffix: str, tmp_path: Path) -> None:
    zcrecord.save_record(STATE | {"wide": 2**80, "z": 1j}, tmp_path / "m.zcr")
    convert(tmp_path / "m.zcr", tmp_path / f"m{suffix}")
    convert(tmp_path / f"m{suffix}", tmp_path / "again.zcr")
    again = zcrecord.load_record(tmp_path / "again.zcr")
    assert again.content_digest() == zcrecord.load_record(tmp_path / "m.zcr").content_digest()
    assert keys(again.tree()["state"]) == [(int, 0), (int, 1), (int, 10)]


def test_key_of_any_length_costs_nothing_and_is_text(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "m.zcr") as out:
        out.module("", "numbered")
        for key in KEYS:
            out.attribute((key,), 1)
    found = zcrecord.load_record(tmp_path / "m.zcr").tree()
    assert keys(found) == [(int, 0), (int, -1), (int, 2**64 - 1), *((str, key) for key in KEYS[3:])]


@dataclasses.dataclass
class Moment:
    step: float
    exp_avg: Any


class Run(NamedTuple):
    state: dict[int, Moment]
    epoch: int


def test_integers_are_the_keys_of_a_typed_dict() -> None:
    run = zcrecord.load_record(r.saved({"state": {0: MOMENT, 7: MOMENT}, "epoch": 3}), into=Run)
    assert keys(run.state) == [(int, 0), (int, 7)]
    assert run.state[7].step == 5.0


def test_union_takes_the_dict_whose_keys_fit() -> None:
    both = dict[str, dict[str, int] | dict[int, int]]
    found: Any = zcrecord.load_record(r.saved({"a": {1: 2}, "b": {"1": 2}}), into=both)
    assert found == {"a": {1: 2}, "b": {"1": 2}}
    mixed: Any = zcrecord.load_record(r.saved({1: 2, "x": 3}), into=dict[int | str, int])
    assert mixed == {1: 2, "x": 3}


def test_integers_are_no_texts_and_texts_no_integers() -> None:
    with pytest.raises(MismatchError, match=r"tensor 's': expected str, found int 0"):
        zcrecord.load_record(r.saved({"s": {0: 1}}), into=dict[str, dict[str, int]])
    with pytest.raises(MismatchError, match=r"tensor 's': expected int, found str '0'"):
        zcrecord.load_record(r.saved({"s": {"0": 1}}), into=dict[str, dict[int, int]])


def test_values_without_a_type_of_their_own_fill_fields() -> None:
    class Values(NamedTuple):
        wide: int
        phase: complex
        dtype: torch.dtype
        device: torch.device
        any: Any
        several: list[int]

    values = Values(2**90, 1 - 2j, torch.bfloat16, torch.device("cuda:1"), -(2**64), [2**64, 1])
    assert zcrecord.load_record(r.saved(values), into=Values) == values


FORGED: list[tuple[str, Any]] = [
    ("zcr:int", "5"), ("zcr:int", "0x05"), ("zcr:int", "0X5"), ("zcr:int", "0x"), ("zcr:int", 5), ("zcr:int", ["0x5"]),
    ("zcr:int", "0x1" + "0" * 1024), ("zcr:int", "0x5"), ("zcr:int", hex(2**64 - 1)), ("zcr:int", hex(-(2**63))),
    ("zcr:complex", 1.0), ("zcr:complex", (1.0,)), ("zcr:complex", (1, 2)), ("zcr:complex", "1j"),
    ("zcr:complex", [1.0, 2.0]),
    ("zcr:torch_dtype", "Tensor"), ("zcr:torch_dtype", "load"), ("zcr:torch_dtype", "_inductor"),
    ("zcr:torch_dtype", 1), ("zcr:torch_device", "nowhere"), ("zcr:torch_device", ""), ("zcr:torch_device", 0),
    ("zcr:later", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("type_name", "value"), FORGED)
def test_module_that_only_says_it_stands_for_a_value_is_an_object(type_name: str, value: Any, tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "m.zcr") as out:
        out.module("x", "object", type_name)
        out.attribute("x.value", value)
        out.module("y", "object", "zcr:complex")
        out.attribute("y.value", (1.0, 2.0))
        out.attribute("y.more", 1)
    record = zcrecord.load_record(tmp_path / "m.zcr")
    r.assert_same(record.tree(), {"x": {"value": value}, "y": {"value": (1.0, 2.0), "more": 1}})


LOADED = """
import sys, zcrecord
record = zcrecord.load_record(sys.argv[1])
print(record.tree(), "torch" in sys.modules)
print(record.tree("torch"))
"""


@pytest.mark.exhaustive(keep=0)
def test_no_file_has_torch_imported_and_until_it_is_its_values_are_objects(tmp_path: Path) -> None:
    zcrecord.save_record({"dtype": torch.float16, "device": torch.device("cpu"), "n": 1}, tmp_path / "m.zcr")
    before, after = r.run_python(LOADED, tmp_path / "m.zcr").stdout.splitlines()
    assert before == "{'dtype': {'value': 'float16'}, 'device': {'value': 'cpu'}, 'n': 1} False"
    assert after == "{'dtype': torch.float16, 'device': device(type='cpu'), 'n': 1}"
