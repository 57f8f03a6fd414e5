"""Values of Python without a type of the format: saved as plain data, loaded as equal values of the same types."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import random
import sys
import types
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import jax
import numpy as np
import pytest
import records as r

import zcrecord
from tools.measure import most_allocated
from zcrecord import RecordError, UnsupportedError
from zcrecord.codec import conventions
from zcrecord.codec.entries import is_attribute

ONE = np.ones(3, np.float32)
UTC = datetime.UTC
VALUES: dict[str, Any] = {
    "set": {3, "a", None, 2.5, (1, "b"), frozenset({1, 2}), 2**80, 1j},
    "empty set": set(),
    "frozenset": frozenset(range(1000)),
    "deque": collections.deque([1, 2, 3], maxlen=3),
    "deque of modules": collections.deque([{"a": 1}, [1, "b"]]),
    "path": Path("runs/7"),
    "root": Path("/"),
    "namespace": types.SimpleNamespace(lr=0.1, layers=[1, "a"], inner=types.SimpleNamespace()),
    "arguments": argparse.Namespace(lr=0.1, tags={"a"}, out=Path("x")),
    "datetime": datetime.datetime(2026, 11, 26, 1, 2, 3, 4),
    "aware": datetime.datetime(2026, 11, 26, tzinfo=UTC),
    "offset": datetime.datetime(2026, 11, 26, tzinfo=datetime.timezone(datetime.timedelta(hours=-5, seconds=1))),
    "date": datetime.date(2026, 11, 26),
    "time": datetime.time(1, 2, 3),
    "timedelta": datetime.timedelta(-3, 5, 7),
    "ordered": collections.OrderedDict(b=1, a=collections.OrderedDict({2: 3})),
    "defaultdict": collections.defaultdict(list, {"a": [1], "b": []}),
    "defaultdict of integers": collections.defaultdict(int, {7: 1}),
    "bool keys": {True: 1, False: {"a": 2}},
    "float keys": {0.5: 1, float("inf"): 2},
    "tuple keys": {(0, "a"): [1], ((1, 2), None): {}},
    "mixed keys": {1: 1, "1": 2, 1.5: 3, None: 4, "": 5, 2**64: 6, Path("a"): 7},
}


def same(a: Any, b: Any) -> None:
    """Equal and of one type, keys and items too."""
    assert type(a) is type(b)
    assert a == b
    if isinstance(a, dict):
        assert list(map(type, a)) == list(map(type, b))
        for x, y in zip(a.values(), b.values(), strict=True):
            same(x, y)
    if isinstance(a, collections.defaultdict):
        assert a.default_factory is b.default_factory
    if isinstance(a, collections.deque):
        assert a.maxlen == b.maxlen


@pytest.mark.parametrize("name", VALUES)
def test_value_comes_back_equal_and_of_its_type(name: str) -> None:
    value = VALUES[name]
    rec = r.round_trip({"state": {"v": value}, "w": ONE})
    same(rec.tree()["state"]["v"], value)
    again = r.round_trip(rec.tree())
    same(again.tree()["state"]["v"], value)
    assert again.content_digest() == rec.content_digest()
    typed: Any = zcrecord.load_record(r.saved({"v": value}), into=dict[str, Any])
    same(typed["v"], value)


def test_tensors_in_them_are_views() -> None:
    rec = r.round_trip({"queue": collections.deque([ONE, ONE * 2], 5), "by": {(0, 1): ONE * 3}})
    assert list(rec) == ["queue.value.0", "queue.value.1", "by.values.0"]
    tree = rec.tree()
    np.testing.assert_array_equal(tree["by"][0, 1], ONE * 3)
    for array in (*tree["queue"], tree["by"][0, 1]):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_sets_give_the_same_bytes_in_any_order() -> None:
    items = ["a", "b", 1, 2.0, (1, "c"), None, frozenset({"x", "y"})]
    backwards = [*items[:-1][::-1], frozenset({"y", "x"})]
    assert r.saved({"s": set(items)}) == r.saved({"s": set(backwards)})


def test_other_languages_see_plain_data() -> None:
    rec = r.round_trip({"seen": {3, 1}, "by": {(1, 2): "a"}, "out": Path("a/b"), "n": types.SimpleNamespace(lr=1)})
    assert dict(rec.attributes) == {
        "seen.value": [1, 3], "by.keys.0": (1, 2), "by.values": ["a"], "out.value": "a/b", "n.lr": 1,
    }  # fmt: skip
    assert rec.modules["seen"].type_name == "zcr:set"


def test_states_of_random_generators_come_back(tmp_path: Path) -> None:
    generators = [
        np.random.Generator(getattr(np.random, n)(5)) for n in ("PCG64", "PCG64DXSM", "MT19937", "SFC64", "Philox")
    ]
    old, python = np.random.RandomState(5), random.Random(5)
    sources: list[Any] = [*generators, old]
    for source in sources:
        source.normal(size=3)
    states = {"new": [g.bit_generator.state for g in generators], "old": old.get_state(), "python": python.getstate()}
    zcrecord.save_record(states, tmp_path / "m.zcr")
    tree = zcrecord.load_record(tmp_path / "m.zcr").tree()
    for generator, state in zip(generators, tree["new"], strict=True):
        fresh = np.random.Generator(type(generator.bit_generator)())
        fresh.bit_generator.state = state
        np.testing.assert_array_equal(fresh.integers(1 << 60, size=50), generator.integers(1 << 60, size=50))
    fresh_old, fresh_python = np.random.RandomState(), random.Random()
    fresh_old.set_state(tree["old"])
    fresh_python.setstate(tree["python"])
    assert fresh_old.normal() == old.normal()
    assert fresh_python.random() == python.random()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_of_jax_come_back(impl: str) -> None:
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    rec = r.round_trip({"opt": {"key": keys[0], "more": keys}})
    for tree in (rec.tree(), rec.tree("jax"), rec.tree("jax", like={"opt": {"key": keys[0], "more": keys}})):
        assert tree["opt"]["key"].dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.normal(tree["opt"]["more"][1]), jax.random.normal(keys[1]))


def test_defaults_made_by_other_functions_are_left_out() -> None:
    same(r.round_trip({"d": collections.defaultdict(lambda: 5, a=1)}).tree()["d"], {"a": 1})


def test_record_itself_may_have_any_keys() -> None:
    assert r.round_trip({(1, 2): 3, 0.5: 4}).tree() == {(1, 2): 3, 0.5: 4}
    assert type(r.round_trip(collections.OrderedDict(a=1)).tree()) is dict, "so a state_dict is a plain mapping"


def test_all_that_is_refused_is_named_at_once(tmp_path: Path) -> None:
    with open(__file__, encoding="utf-8") as file:
        record = {"a": {"hook": len, "log": file}, "b": [ONE, object, {object(): 1}], "fine": ONE}
        with pytest.raises(UnsupportedError) as caught:
            zcrecord.save_record(record, tmp_path / "m.zcr")
    text = str(caught.value)
    assert text.startswith("4 values cannot be saved: 'a.hook': a builtin_function_or_method is neither")
    for part in (
        "leave it out, or save its name; 'a.log': a TextIOWrapper",
        "save the file's path; 'b.1'",
        "; 'b.2': a obj",
    ):
        assert part in text
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnsupportedError, match=r"^30 values cannot be saved: .*'m\.19': .*; and 10 more$"):
        r.saved({"m": [len] * 30})


@pytest.mark.parametrize(
    "value",
    [
        datetime.datetime(2026, 10, 25, 2, fold=1),
        datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(0), "GMT")),
    ],
)
def test_time_that_would_lose_something_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedError, match="named time zone, or a fold; save a text"):
        r.saved({"t": value})


def test_path_of_another_system_is_refused() -> None:
    own, other = (PurePosixPath, PureWindowsPath) if sys.platform != "win32" else (PureWindowsPath, PurePosixPath)
    assert r.round_trip({"p": own("a/b")}).tree()["p"] == Path("a/b")
    with pytest.raises(UnsupportedError, match=f"a {other.__name__}, of another system; save str"):
        r.saved({"p": other("a/b")})


OTHER_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "set with an item twice": ("zcr:set", {"value": [1, 1]}),
    "set of lists": ("zcr:set", {"value": [[1], "a"]}),
    "set of a text": ("zcr:set", {"value": "ab"}),
    "deque longer than its limit": ("zcr:deque", {"value": [1, 2], "maxlen": 1}),
    "deque with a negative limit": ("zcr:deque", {"value": [], "maxlen": -1}),
    "deque without a limit": ("zcr:deque", {"value": [1]}),
    "path of another form": ("zcr:path", {"value": "a//b"}),
    "path that is a number": ("zcr:path", {"value": 1}),
    "date that is none": ("zcr:date", {"value": "2026-02-30"}),
    "date of another form": ("zcr:date", {"value": "20260203"}),
    "time with a date": ("zcr:time", {"value": "2026-02-03T01:02:03"}),
    "timedelta out of range": ("zcr:timedelta", {"value": (10**10, 0, 0)}),
    "timedelta not normal": ("zcr:timedelta", {"value": (0, 90000, 0)}),
    "dict with more keys": ("zcr:dict", {"keys": [1.5, 2.5], "values": [1]}),
    "dict with a key twice": ("zcr:dict", {"keys": [1, True], "values": [1, 2]}),
    "dict with more children": ("zcr:dict", {"keys": [1.5], "values": [1], "more": 1}),
    "keys of no generator": ("zcr:jax_key", {"value": np.zeros(2, np.uint32), "impl": "none"}),
    "keys of another shape": ("zcr:jax_key", {"value": np.zeros(3, np.float32), "impl": "threefry2x32"}),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_object_of_another_form_stays_a_mapping(name: str, tmp_path: Path) -> None:
    type_name, children = OTHER_FORMS[name]
    with zcrecord.RecordWriter(tmp_path / "m.zcr") as out:
        out.module("x", "object", type_name)
        for key, value in children.items():
            if isinstance(value, np.ndarray):
                with out.tensor(f"x.{key}", value.dtype, value.shape) as tensor:
                    tensor.write(value)
            elif (isinstance(value, list) and any(isinstance(item, list) for item in value)) or value == [1, True]:
                out.module(f"x.{key}", "list")
                for i, item in enumerate(value):
                    out.attribute(f"x.{key}.{i}", item)
            else:
                out.attribute(f"x.{key}", value)
    tree = zcrecord.load_record(tmp_path / "m.zcr").tree()["x"]
    assert type(tree) is dict
    r.assert_same(tree, children)


NO_KEYS: dict[str, Any] = {
    "bytes": memoryview(b"ab"), "array": np.ones(2), "packed": zcrecord.PackedTensor.pack(np.ones(2, "int4")),
    "list": [1], "dict in a tuple": ({},), "deep tuple": None,
}  # fmt: skip


@pytest.mark.parametrize("name", NO_KEYS)
def test_only_values_that_may_be_saved_in_a_set_are_loaded_in_one(name: str) -> None:
    item = NO_KEYS[name]
    for _ in range(200 if name == "deep tuple" else 0):
        item = (item,)
    for type_name, children in {"zcr:set": {"value": [item]}, "zcr:dict": {"keys": [item], "values": [1]}}.items():
        assert conventions.value_of_object(type_name, list(children.items())) is conventions.ABSENT


def nested(kind: Any, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = kind([value])
    return value


@dataclasses.dataclass
class Unset:
    a: int
    b: int = dataclasses.field(init=False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({np.complex128(1j)}, "'m.x': a complex128 as a key, or in a set, has no equal"),
        ({(np.complex128(1j), 1): 2}, "'m.x': a complex128 as a key, or in a set, has no equal"),
        (nested(frozenset, 500), "'m.x': a key nested more than 100 deep"),
        ({nested(tuple, 5000): 1}, "'m.x': a key nested more than 100 deep"),
        (np.ones(2).data.toreadonly(), "'m.x': a mutable buffer; pass bytes"),
        (Unset(1), "'m.x': a field of this Unset has no value yet: 'Unset' object has no attribute 'b'"),
        (r.Owner([1]), "'m.x': state_dict.. of Owner is not a mapping"),
    ],
)
def test_what_would_not_come_back_equal_is_refused_by_place(value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        r.saved({"m": {"x": value}})


def test_a_list_that_names_one_long_text_often_takes_it_once() -> None:
    text = "x" * (1 << 20)
    assert most_allocated(lambda: is_attribute([text] * 1000, "")) < 3 << 20


def test_items_with_one_hash_are_no_set_and_take_no_time(tmp_path: Path) -> None:
    alike = [5 + i * sys.hash_info.modulus for i in range(50_000)]
    assert len(set(map(hash, alike))) == 1
    assert conventions.value_of_object("zcr:set", [("value", alike)]) is conventions.ABSENT
    few = alike[:50]
    assert conventions.value_of_object("zcr:set", [("value", few)]) == set(few)


def test_namespace_takes_any_names_as_data(tmp_path: Path) -> None:
    for type_name in ("zcr:namespace", "zcr:argparse_namespace"):
        with zcrecord.RecordWriter(tmp_path / "m.zcr") as out:
            out.module("x", "object", type_name)
            for key in ("__class__", "__dict__", "self"):
                out.attribute(f"x.{key}", 1)
        space = zcrecord.load_record(tmp_path / "m.zcr").tree()["x"]
        assert type(space) in (types.SimpleNamespace, argparse.Namespace)
        assert vars(space) == {"__class__": 1, "__dict__": 1, "self": 1}
